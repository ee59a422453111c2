"""Which module of a model calls a function, and under which name the monitor records that call."""

import sys
from collections import Counter
from types import FrameType

from torch import nn

__all__ = ["NOTHING_TO_WATCH", "Callers"]

NOTHING_TO_WATCH = (
    "ConditionMonitor recorded nothing: the model has no meta-layer, and no call of orthocond.linalg was seen; name "
    "the layers whose input it should watch, e.g. ConditionMonitor(model, layers=['bn1']), or put a meta-layer in, "
    "e.g. by orthocond.nn.convert_batchnorm. orthocond.diagnose(model) watches your own calls of eigh and svd."
)


class Callers:
    """The modules of a model, and the places in their code that call functions of `orthocond.linalg`."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._places: dict[tuple[str, str, str, int], str] = {}
        self._num_alike: Counter[str] = Counter()

    def place(self, function: str) -> tuple[str, nn.Module] | None:
        """Return a name for the place that calls ``function`` just now, and its module; None outside the model.

        The name is ``"module:function"``; a second place of the same module gets ``"module:function (2)"``.
        """
        frame: FrameType | None = sys._getframe(1)
        line: tuple[str, int] | None = None
        while frame is not None:
            code = frame.f_code
            if line is None and not frame.f_globals.get("__name__", "").startswith(("orthocond.", "torch.")):
                line = (code.co_filename, frame.f_lineno)
            # f_locals keeps what it finds alive as long as the frame: ask methods alone, which end soon.
            if code.co_varnames[:1] == ("self",):
                module = frame.f_locals.get("self")
                if isinstance(module, nn.Module) and module in self._names:
                    return self._named(self._names[module], function, *(line or ("", 0))), module
            frame = frame.f_back
        return None

    def _named(self, module: str, function: str, file: str, line: int) -> str:
        key = (module, function, file, line)
        if key not in self._places:
            name = f"{module}:{function}" if module else function
            self._num_alike[name] += 1
            number = self._num_alike[name]
            self._places[key] = name if number == 1 else f"{name} ({number})"
        return self._places[key]
