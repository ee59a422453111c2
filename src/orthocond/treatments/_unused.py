"""A warning for treatments without effect: one that is never attached, a penalty that is never added."""

import weakref
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from orthocond.errors import OrthocondWarning

__all__ = ["Replaced", "Unused"]

_BACKWARDS = 2
"""The number of backward passes without use before the warning."""


class Unused:
    """What a treatment still needs; it warns when training continues without it.

    The parameter's gradient shows that training continues: after the second backward pass without `attach` or
    ``penalty``, a warning says which is missing. The hook holds the treatment's name alone, so a treatment that nobody
    kept warns as well.

    Args:
        parameter: the one that is trained.
        name: of the layer.
        spec: of the treatment.
        missing: ``"attach"`` and ``"penalty"``, as far as the treatment needs them.
    """

    def __init__(self, parameter: nn.Parameter, name: str, spec: str, missing: set[str]) -> None:
        self.name, self.spec, self.missing = name, spec, missing
        self._num_backwards = 0
        self._handle = None
        if missing and parameter.requires_grad:
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
    """It warns when an optimizer that was made before the treatment steps with the parameter that ``ow`` replaced.

    Args:
        before: the parameter that the layer had.
        parameter: the one that is trained now.
        name: of the layer.
        spec: of the treatment.
    """

    def __init__(self, before: nn.Parameter, parameter: nn.Parameter, name: str, spec: str) -> None:
        self._before, self._parameter, self.name, self.spec = weakref.ref(before), weakref.ref(parameter), name, spec
        self._handle: Any = register_optimizer_step_pre_hook(self._look)

    def _look(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        before, parameter = self._before(), self._parameter()
        held = {id(held) for group in optimizer.param_groups for held in group["params"]}
        if before is None or parameter is None or id(parameter) in held:
            self._handle.remove()
        elif id(before) in held:
            self._handle.remove()
            warn(
                f"the layer {self.name!r} is not trained: {self.spec} replaced its parameter, and the optimizer holds "
                "the one before; make the optimizer after treat(), from model.parameters().",
                OrthocondWarning,
                stacklevel=2,
            )
