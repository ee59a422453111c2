"""The layer that is treated, as its parts see it."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from orthocond._core.compiling import HookNotice, uncompiled
from orthocond._core.layout import Layout
from orthocond.errors import ArgumentError
from orthocond.treatments._part import Part

__all__ = ["Target"]

ForwardHook = Callable[[tuple[Any, ...], dict[str, Any], Any], None]


class Target:
    """The layer that a treatment acts on.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3))
        >>> target = Target(model, "0", model[0])
        >>> target.weight.shape
        torch.Size([8, 27])
    """

    def __init__(self, model: nn.Module, name: str, layer: nn.Module) -> None:
        self.model, self.name, self.layer = model, name, layer
        self.layout = Layout.of(layer)
        self.parts: Mapping[str, Part] = {}
        """All parts of the treatment by name."""
        self.example_input: Any = None
        """What was passed to `orthocond.treat`, while parts are installed."""
        self.warnings: list[str] = []
        self._hooks: list[_Hook] = []
        self._at_detach: list[Callable[[], None]] = []

    @property
    def parameter(self) -> nn.Parameter:
        """The trained tensor: the weight, or the tensor behind its parametrization."""
        if parametrize.is_parametrized(self.layer, "weight"):
            parameter = getattr(self.layer.parametrizations.weight, "original", None)  # type: ignore[union-attr]
        else:
            parameter = self.layer.weight
        if not isinstance(parameter, nn.Parameter):
            raise ArgumentError(
                f"the weight of {self.name!r} is made of several tensors, and a treatment acts on one; "
                "remove that parametrization first."
            )
        return parameter

    @property
    def weight(self) -> Tensor:
        """The weight that the layer multiplies by, as a matrix: one row per output channel, groups as a batch."""
        weight = self.layer.weight
        assert isinstance(weight, Tensor)
        return self.layout.matrix(weight)

    def after_forward(self, module: nn.Module, function: ForwardHook) -> None:
        """Call ``function(args, kwargs, output)`` after each forward of a module, until the treatment is detached.

        It is called without gradients, outside of what `torch.compile` compiles, and not for copies of the module.
        """
        self._hooks.append(_Hook(module, function))

    def at_detach(self, function: Callable[[], None]) -> None:
        """Call ``function()`` once, when the treatment is detached."""
        self._at_detach.append(function)

    def warn(self, message: str) -> None:
        """Warn the caller of `treat`; for `Part.install`."""
        self.warnings.append(message)

    def detach(self) -> None:
        """Remove what was registered."""
        for hook in self._hooks:
            hook.close()
        for function in self._at_detach:
            function()
        self._hooks.clear()
        self._at_detach.clear()

    @property
    def is_blind(self) -> bool:
        """Whether a part waits for a forward pass, and none has been seen."""
        return bool(self._hooks) and not any(hook.has_run for hook in self._hooks)


class _Hook:
    """A forward hook of one module, and not of its copies."""

    module: nn.Module | None = None
    has_run = False
    _handles: Iterable[Any] = ()

    def __init__(self, module: nn.Module, function: ForwardHook) -> None:
        self.module, self.function = module, function
        self._handles: list[Any] = [module.register_forward_hook(self.call, with_kwargs=True), HookNotice(module)]

    def __getstate__(self) -> dict[str, Any]:
        """Return an empty state: a copy of a watched module is not watched."""
        return {}

    @uncompiled
    @torch.no_grad()
    def call(self, module: nn.Module, *given: Any) -> None:
        if module is self.module:
            self.has_run = True
            self.function(*given)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self.module = None
