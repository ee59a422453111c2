"""``bench geometry``: the nearest rotation, forward and backward, and the memory that it takes.

The reference of every ratio is `torch.linalg.svd` forward in float32 in the same round. The matrices are normally
distributed, those with a small margin (see `orthocond.linalg.nearest_rotation`) left out.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from orthocond.lab.bench import peers
from orthocond.lab.bench.measure import Budget, alternate, forward_backward, once, peak_bytes, spread
from orthocond.lab.bench.problems import relative_error
from orthocond.linalg import nearest_rotation

__all__ = ["Cell", "cells", "measure"]

_REFERENCE = "torch.linalg.svd, forward"
_MARGIN = 0.1
_JUDGED = 16
"""Number of matrices of a batch that are compared with the reference."""


@dataclass(frozen=True)
class Cell:
    """A batch of square matrices."""

    size: int
    batch: int


def cells(*, quick: bool) -> Iterator[Cell]:
    """Yield the problems: a hundred thousand poses, and larger matrices in small batches.

    Two matrices of 64x64 are enough to see the memory that each takes: a hundred of them need 13 gigabytes where the
    backward pass forms all products of four indices.
    """
    yield from ([Cell(3, 200), Cell(6, 2)] if quick else [Cell(3, 1), Cell(3, 1000), Cell(3, 100_000), Cell(64, 2)])


def contestants() -> dict[str, Callable[[Tensor], Tensor]]:
    """Return the functions that compute the nearest rotation, by name."""
    return {"nearest_rotation": nearest_rotation, "autograd through svd": by_svd, **peers.rotations()}


def by_svd(A: Tensor) -> Tensor:
    """Return the nearest rotation as it is usually written."""
    U, _, Vh = torch.linalg.svd(A)
    signs = torch.ones_like(A[..., 0])
    signs[..., -1] = torch.linalg.det(U.detach() @ Vh.detach())
    rotation: Tensor = (U * signs.unsqueeze(-2)) @ Vh
    return rotation


def measure(cell: Cell, *, quick: bool) -> list[dict[str, Any]]:
    """Return a record for each contestant."""
    A, G = _problem(cell)
    truth = _gradient(by_svd, A[:_JUDGED].double(), G[:_JUDGED].double())
    everyone = contestants()
    passes = alternate(
        {
            _REFERENCE: once(lambda: torch.linalg.svd(A)),
            **{name: forward_backward(solve, A, G) for name, solve in everyone.items()},
        },
        Budget(0.0, fewest=3) if quick else Budget(10.0, fewest=3, most=100),
    )
    few = A[: max(1, min(len(A), 1000))]
    return [
        {
            "size": cell.size,
            "batch": cell.batch,
            "contestant": name,
            "gradient_error": error if math.isfinite(error := _error(solve, A, G, truth)) else None,
            "forward": spread(passes[name], passes[_REFERENCE], part=0)._asdict(),
            "total": spread(passes[name], passes[_REFERENCE])._asdict(),
            "peak": peak_bytes(lambda: _gradient(solve, few, G[: len(few)])) / (few.numel() * few.element_size()),  # noqa: B023
        }
        for name, solve in everyone.items()
    ]


def _problem(cell: Cell) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(cell.size)
    A = torch.randn(2 * cell.batch + 20, cell.size, cell.size, generator=generator)
    margins = nearest_rotation(A, return_margin=True)[1]
    # Large random matrices have small singular values, so the cut is lower for them.
    A = A[margins.argsort(descending=True)[: cell.batch]] if cell.size > 3 else A[margins > _MARGIN][: cell.batch]
    return A, torch.randn(A.shape, generator=generator)


def _gradient(solve: Callable[[Tensor], Tensor], A: Tensor, G: Tensor) -> Tensor:
    A = A.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(solve(A), A, G)
    return gradient


def _error(solve: Callable[[Tensor], Tensor], A: Tensor, G: Tensor, truth: Tensor) -> float:
    return relative_error(_gradient(solve, A, G)[:_JUDGED], truth)
