"""The nearest orthogonal gradient."""

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from orthocond._core.precision import widen
from orthocond._core.registry import resolve
from orthocond.errors import check_nonnegative
from orthocond.linalg import POLAR_SOLVERS, nearest_orthogonal
from orthocond.treatments._part import Note, Part

if TYPE_CHECKING:
    from orthocond.treatments._step import Step

__all__ = ["NearestOrthogonalGradient"]


class NearestOrthogonalGradient(Part):
    r"""Replaces the gradient :math:`U S V^T` by :math:`U V^T`; a zero gradient stays zero.

    The result has the same size whatever the gradient's, so clipping the gradient beforehand has no effect on this
    layer; ``max_norm`` clips what the optimizer gets.

    Args:
        solver: one of `orthocond.linalg.POLAR_SOLVERS`.
        max_norm: largest Frobenius norm of the result, as in `torch.nn.utils.clip_grad_norm_`; None for no limit.

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

    def __init__(self, *, solver: str = "gram", max_norm: float | None = None) -> None:
        resolve(POLAR_SOLVERS, solver, "solver", "nog")
        if max_norm is not None:
            check_nonnegative(max_norm, "max_norm", "nog")
        self.solver, self.max_norm = solver, max_norm

    def act(self, step: "Step") -> None:
        """Replace the gradient."""
        gradient = step.gradient
        nearest = nearest_orthogonal(gradient, solver=self.solver)
        step.note(gradient_range=partial(_singular_range, gradient.clone()))
        if self.max_norm is not None:
            norm = torch.linalg.vector_norm(nearest)
            nearest = nearest * (self.max_norm / norm.clamp(min=torch.finfo(norm.dtype).tiny)).clamp(max=1.0)
        step.gradient = nearest


@torch.no_grad()
def _singular_range(gradient: Tensor) -> tuple[float, float]:
    matrix = widen(gradient)
    gram = matrix @ matrix.mT if matrix.shape[-2] <= matrix.shape[-1] else matrix.mT @ matrix
    squares = torch.linalg.eigvalsh(gram).clamp(min=0)
    return float(squares.min().sqrt()), float(squares.max().sqrt())
