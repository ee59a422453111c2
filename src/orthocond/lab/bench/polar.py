"""``bench polar``: the nearest orthogonal matrix, on the shapes of ResNet-50's convolution gradients.

The reference of every ratio is `torch.linalg.svd` in float32 in the same round. The singular values of the gradients
are spread over three decades.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from orthocond.lab import processor
from orthocond.lab.bench.measure import Budget, alternate, once, spread
from orthocond.lab.bench.peers import polar_factors
from orthocond.lab.bench.problems import polar_factor, relative_error
from orthocond.lab.models import build
from orthocond.linalg import POLAR_SOLVERS, nearest_orthogonal

__all__ = ["Cell", "cells", "measure", "muon_iteration"]

_REFERENCE = "torch.linalg.svd"
_MUON = "Muon's five steps"

# A CPU without bfloat16 arithmetic does a billion of its operations per second: the largest shape would take a minute.
_BFLOAT16_WORK = 4e8


@dataclass(frozen=True)
class Cell:
    """A convolution's gradient, flattened."""

    rows: int
    columns: int


def cells(*, quick: bool) -> Iterator[Cell]:
    """Yield the different shapes in the order of the network, CIFAR's stem, and a large square one."""
    convolutions = [m for m in build("resnet50").modules() if isinstance(m, nn.Conv2d)]
    shapes = dict.fromkeys((c.weight.shape[0], c.weight[0].numel()) for c in convolutions)
    yield from (Cell(*shape) for shape in list(shapes)[: 2 if quick else None])
    if not quick:
        yield from (Cell(64, 27), Cell(1024, 1024))


def contestants(cell: Cell) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return the functions that compute the polar factor of such a matrix in reasonable time, by name."""
    short, long = sorted((cell.rows, cell.columns))
    everyone: dict[str, Callable[[Tensor], Tensor]] = {
        **{solver: partial(nearest_orthogonal, solver=solver) for solver in POLAR_SOLVERS},
        _REFERENCE: _by_svd,
        **polar_factors(),
        f"{_MUON}, float32": partial(muon_iteration, dtype=torch.float32),
    }
    if 5 * short**2 * (4 * long + 2 * short) <= _BFLOAT16_WORK and processor.has_half_products():
        everyone[_MUON] = muon_iteration
    return everyone


def muon_iteration(A: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return what `torch.optim.Muon` uses in place of the polar factor of ``A`` ``(m, n)``.

    Five steps of a quintic iteration whose coefficients are chosen for speed: they don't converge, and leave the
    singular values between about 0.7 and 1.2.

    Reference: Jordan et al., Muon, 2024.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    X = (A if A.shape[0] <= A.shape[1] else A.T).to(dtype)
    X = X / X.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = X @ X.T
        X = torch.addmm(X, torch.addmm(gram, gram, gram, beta=b, alpha=c), X, beta=a)
    return X if A.shape[0] <= A.shape[1] else X.T


def measure(cell: Cell, *, quick: bool) -> list[dict[str, Any]]:
    """Return a record for each contestant."""
    A = _gradient(cell)
    truth = polar_factor(A)
    everyone = contestants(cell)
    passes = alternate(
        {name: once(partial(solve, A)) for name, solve in everyone.items()},
        Budget(0.0, fewest=3) if quick else Budget(2.0, fewest=3, most=100),
    )
    return [
        {
            "rows": cell.rows,
            "columns": cell.columns,
            "contestant": name,
            "error": error if math.isfinite(error := relative_error(solve(A), truth)) else None,
            "total": spread(passes[name], passes[_REFERENCE])._asdict(),
        }
        for name, solve in everyone.items()
    ]


def _by_svd(A: Tensor) -> Tensor:
    U, _, Vh = torch.linalg.svd(A, full_matrices=False)
    factor: Tensor = U @ Vh
    return factor


def _gradient(cell: Cell) -> Tensor:
    generator = torch.Generator().manual_seed(cell.rows * cell.columns)
    short = min(cell.rows, cell.columns)
    left, right = (
        torch.linalg.qr(torch.randn(long, short, generator=generator)).Q for long in (cell.rows, cell.columns)
    )
    gradient: Tensor = (left * torch.logspace(0, -3, short)) @ right.T
    return gradient
