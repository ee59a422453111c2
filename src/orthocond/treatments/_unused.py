"""Warnings for treatments without effect: never attached, a penalty never added, an optimizer made too early."""

import weakref
from typing import Any, ClassVar
from warnings import warn

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from orthocond.errors import OrthocondWarning

__all__ = ["Replaced", "Unused"]

_BACKWARDS = 2
"""The number of backward passes without use before the warning."""
_STEPS = 2
"""The number of steps of an optimizer with the replaced parameter before the warning."""


class Unused:
    """What a treatment still needs; it warns when training continues without it.

    The parameter's gradient shows that training continues: after the second backward pass without `attach` or
    ``penalty``, a warning says which is missing. The hook holds the treatment's name alone, so a treatment that nobody
    kept warns as well.

    Args:
        parameter: the one that is trained; None to warn of nothing.
        name: of the layer.
        spec: of the treatment.
        missing: ``"attach"`` and ``"penalty"``, as far as the treatment needs them.
    """

    def __init__(self, parameter: nn.Parameter | None, name: str, spec: str, missing: set[str]) -> None:
        self.name, self.spec, self.missing = name, spec, missing
        self._num_backwards = 0
        self._handle = None
        if missing and parameter is not None and parameter.requires_grad:
            self._handle = parameter.register_post_accumulate_grad_hook(self._count)

    def done(self, what: str) -> None:
        """Record that the treatment was attached, or its penalty used."""
        if what in self.missing:
            self.missing.discard(what)
            if not self.missing:
                self._close()

    def _close(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _count(self, _: Tensor) -> None:
        self._num_backwards += 1
        if self._num_backwards < _BACKWARDS:
            return
        self._close()
        if "attach" in self.missing:
            warn(
                f"the treatment {self.spec} of {self.name!r} has no effect: the model is being trained, and the "
                "treatment is not attached; "
                "call treatment.attach(optimizer) after the optimizer is made.",
                OrthocondWarning,
                stacklevel=2,
            )
        if "penalty" in self.missing:
            warn(
                f"the treatment {self.spec} of {self.name!r} has a penalty that is not in the loss; add "
                "treatment.penalty() to the loss.",
                OrthocondWarning,
                stacklevel=2,
            )


class Replaced:
    """It warns when an optimizer that was made before the treatment trains without the parameter that ``ow`` put there.

    The parameter has a gradient, the optimizer holds the one before, and no optimizer holds the new one: after the
    second such step a warning says so. It holds neither parameter, and stops at the first step with the new one.

    Args:
        before: the parameter that the layer had.
        parameter: the one that is trained now.
        name: of the layer.
        spec: of the treatment.
    """

    _waiting: ClassVar[dict["Replaced", None]] = {}
    """Those of which no step has told yet whether the new parameter is trained."""
    _hooks: ClassVar[list[Any]] = []
    """The one hook for all of them, which stays: torch calls hooks from a dict that may not change meanwhile."""

    def __init__(self, before: nn.Parameter, parameter: nn.Parameter, name: str, spec: str) -> None:
        self._before, self._parameter, self.name, self.spec = weakref.ref(before), weakref.ref(parameter), name, spec
        self._num_steps = 0
        self._waiting[self] = None
        if not self._hooks:
            self._hooks.append(register_optimizer_step_pre_hook(self._look))

    @classmethod
    def _look(cls, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not cls._waiting or torch.compiler.is_compiling():
            return
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for replaced in list(cls._waiting):
            replaced._count(held)

    def _count(self, held: set[int]) -> None:
        before, parameter = self._before(), self._parameter()
        if before is None or parameter is None or id(parameter) in held:
            self._waiting.pop(self, None)
        elif id(before) in held and parameter.grad is not None:
            self._num_steps += 1
            if self._num_steps < _STEPS:  # another optimizer may hold the new one
                return
            self._waiting.pop(self, None)
            warn(
                f"the layer {self.name!r} is not trained: {self.spec} replaced its parameter, and the optimizer holds "
                "the one before; make the optimizer after treat(), from model.parameters().",
                OrthocondWarning,
                stacklevel=2,
            )
