"""What a solver of spectral functions is."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from orthocond._core.registry import Entry

__all__ = ["Solver"]

Solved = tuple[tuple[Tensor, ...], Tensor | None]


def _unsolved(*_: object, **__: object) -> Solved:
    raise NotImplementedError


@dataclass(frozen=True)
class Solver(Entry):
    """A way to the roots, and with eigenvalues to the other functions, of a symmetric matrix."""

    has_eigenvalues: bool = True
    """Whether the solver computes eigenvalues, and so supports the rank, the gradient rules and every function."""
    solve: Callable[..., Solved] = _unsolved
    """``solve(A, functions, gradient=..., eps=..., rtol=..., floor=..., **options)`` returns ``f(A + eps I)`` for each
    function, and the eigenvalues ``(..., n)``, ascending, or None."""
