"""Following eigenvalues to the function that is applied to them: ``l.clamp(min=0).sqrt()`` is a square root."""

import functools
import weakref
from typing import Any

from torch import Tensor

__all__ = ["Flow", "Use"]

_SAME = frozenset(
    [
        "abs",
        "add",
        "__add__",
        "__radd__",
        "clamp",
        "clamp_min",
        "clip",
        "contiguous",
        "cpu",
        "cuda",
        "diag",
        "diag_embed",
        "diagonal",
        "double",
        "expand",
        "flip",
        "float",
        "__getitem__",
        "half",
        "maximum",
        "mul",
        "__mul__",
        "__rmul__",
        "relu",
        "reshape",
        "squeeze",
        "sub",
        "__sub__",
        "to",
        "unsqueeze",
        "view",
        "where",
    ]
)
_POWERS = {"sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0, "square": 2.0, "__rdiv__": -1.0, "__rtruediv__": -1.0}
_DIVISIONS = ("div", "divide", "true_divide", "__truediv__")
_FOLLOWED = _SAME.union(_POWERS, _DIVISIONS, ("log", "exp", "pow", "__pow__"))


class Use:
    """The functions applied to the eigenvalues of a call, as far as observed: exponents, ``"log"`` or ``"exp"``."""

    def __init__(self) -> None:
        self.functions: list[float | str] = []

    def replace(self, old: float | str, new: float | str) -> None:
        """Continue from one function to the next that is applied to its result."""
        if old in self.functions:
            self.functions.remove(old)
        self.functions.append(new)


class Flow:
    """The tensors that are functions of eigenvalues; they are held weakly."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Use, float | str]] = {}

    def __bool__(self) -> bool:
        """Return whether anything is followed."""
        return bool(self._known)

    def begin(self, eigenvalues: Tensor, use: Use) -> None:
        """Follow these eigenvalues from now on."""
        self._follow(eigenvalues, use, 1.0)

    def _follow(self, tensor: Tensor, use: Use, function: float | str) -> None:
        key = id(tensor)
        reference = weakref.ref(tensor, functools.partial(self._known.pop, key))  # gone with the tensor
        self._known[key] = (reference, use, function)

    def step(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Look at one call of a torch function that is called ``name``."""
        if name not in _FOLLOWED or not isinstance(result, Tensor):
            return
        position = next((i for i, X in enumerate(args[:2]) if id(X) in self._known), None)
        if position is None or result.ndim > args[position].ndim + 1:
            return
        _, use, exponent = self._known[id(args[position])]
        if name in _SAME or (name in _DIVISIONS and position == 0):
            if result.shape[-1:] == args[position].shape[-1:] or name == "__getitem__":
                self._follow(result, use, exponent)
            return
        function = _applied(name, args, position, exponent)
        if function is not None:
            use.replace(exponent, function)
            self._follow(result, use, function)


def _applied(name: str, args: tuple[Any, ...], position: int, exponent: float | str) -> float | str | None:
    """Return the exponent after a function, or the name of one that is no power."""
    if name in ("log", "exp") and exponent == 1.0:
        return name
    if isinstance(exponent, str):
        return None
    if name in _POWERS:
        return exponent * _POWERS[name]
    if name in ("pow", "__pow__") and position == 0 and isinstance(args[1], float | int):
        return exponent * args[1]
    return -exponent if name in _DIVISIONS else None
