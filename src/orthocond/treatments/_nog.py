"""The nearest orthogonal gradient."""

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from orthocond._core.precision import widen
from orthocond._core.registry import resolve
from orthocond.errors import ArgumentError, check_choice, check_nonnegative
from orthocond.linalg import POLAR_SOLVERS, nearest_orthogonal
from orthocond.treatments._part import Note, Part

if TYPE_CHECKING:
    from orthocond.treatments._step import Step
    from orthocond.treatments._target import Target

__all__ = ["NearestOrthogonalGradient"]


class NearestOrthogonalGradient(Part):
    r"""Replaces the gradient :math:`U S V^T` by :math:`U V^T`; a zero gradient stays zero.

    The result has the same size for every gradient, so clipping the gradient beforehand has no effect on this
    layer; ``max_norm`` clips the gradient that the optimizer gets.

    Args:
        solver: one of `orthocond.linalg.POLAR_SOLVERS`.
        max_norm: largest Frobenius norm of the result, as in `torch.nn.utils.clip_grad_norm_`; None for no limit.
        of: what is made orthogonal: ``"gradient"`` as in the paper, before SGD adds weight decay and momentum to it;
            ``"decayed"``, the gradient with weight decay; or ``"momentum"``, the whole step, as Muon does.

    Raises:
        ArgumentError: an unknown option; or in a step, ``of`` other than ``"gradient"`` with an optimizer that is not
            SGD, or that has Nesterov momentum or dampening.

    Example:
        >>> NearestOrthogonalGradient(solver="svd")
        nog(solver=svd)
    """

    name = "nog"
    description = "Nearest orthogonal gradient: the gradient U S V^T is replaced by U V^T."
    reference = "Song, Sebe, Wang 2022, eqs. 14 to 17"
    acts_on = "gradient"
    notes = (
        Note(
            "gradient_range",
            "smallest and largest singular value of the gradient before nog",
            kind="range",
            is_costly=True,
        ),
    )

    def __init__(self, *, solver: str = "gram", max_norm: float | None = None, of: str = "gradient") -> None:
        resolve(POLAR_SOLVERS, solver, "solver", "nog")
        if max_norm is not None:
            check_nonnegative(max_norm, "max_norm", "nog")
        check_choice(of, ("gradient", "decayed", "momentum"), "of", "nog")
        self.solver, self.max_norm, self.of = solver, max_norm, of
        self._momentum: Tensor | None = None

    def install(self, target: "Target") -> None:
        """Refuse parts that change the coordinates of the momentum."""
        if self.of != "gradient" and "gauge" in target.parts:
            raise ArgumentError(
                f"nog(of={self.of}) can't be combined with gauge, which changes the coordinates in which weight decay "
                "and momentum are kept; use nog with of=gradient."
            )

    def act(self, step: "Step") -> None:
        """Replace the gradient."""
        added = self._added(step)
        gradient = step.gradient if added is None else step.gradient + added
        if self.of == "momentum":
            momentum = step.momentum
            self._momentum = gradient if self._momentum is None else momentum * self._momentum.to(gradient) + gradient
            gradient = self._momentum
        nearest = nearest_orthogonal(gradient, solver=self.solver)
        step.note(gradient_range=partial(_singular_range, gradient.clone()))
        if self.max_norm is not None:
            norm = torch.linalg.vector_norm(nearest)
            nearest = nearest * (self.max_norm / norm.clamp(min=torch.finfo(norm.dtype).tiny)).clamp(max=1.0)
        # SGD adds weight decay, and the momentum of the step before: they are taken off here, so that the sum is it.
        if self.of == "momentum" and (before := step.momentum_buffer) is not None:
            nearest = nearest - step.momentum * before
        step.gradient = nearest if added is None else nearest - added

    def state_dict(self) -> dict[str, Any] | None:
        """Return the momentum, where it is kept here."""
        return None if self._momentum is None else {"momentum": self._momentum}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Take over the momentum."""
        self._momentum = None if state is None else state["momentum"]

    def _added(self, step: "Step") -> Tensor | None:
        """Return what weight decay adds to the gradient; None where it doesn't matter."""
        if self.of == "gradient":
            return None
        if not step.is_plain_sgd:
            raise ArgumentError(
                f"nog(of={self.of}) needs torch.optim.SGD without Nesterov momentum, dampening and maximize, got "
                f"{type(step.optimizer).__name__}; use nog with of=gradient."
            )
        return step.weight_decay * step.parameter


@torch.no_grad()
def _singular_range(gradient: Tensor) -> tuple[float, float]:
    matrix = widen(gradient)
    gram = matrix @ matrix.mT if matrix.shape[-2] <= matrix.shape[-1] else matrix.mT @ matrix
    squares = torch.linalg.eigvalsh(gram).clamp(min=0)
    return float(squares.min().sqrt()), float(squares.max().sqrt())
