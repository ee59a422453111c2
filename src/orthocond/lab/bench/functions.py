"""``bench functions``: errors of the spectral functions against the truth, ours and those of other packages.

The matrices have a largest eigenvalue of 2, a given condition number, and a given relative gap between the two largest
eigenvalues and, from 4x4 on, between the two smallest. The truth is that of the numbers as rounded to the dtype, which
is what a contestant sees. Up to 12x12 it is computed with 50 digits. Up to 128x128 it comes from SciPy's functions of
general matrices, which use no eigenvectors; they work in float64, so only condition numbers up to 1e4 are asked there.

No method does better than the rounding of float64 allows, so each problem has a limit of its own: how much the truth
moves if the entries of the matrix move by one unit in the last place of float64.

Also here: the time of the functions over that of our inverse root, for ``bench solvers``.
"""

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import mpmath
import numpy as np
import scipy.linalg
import torch
from torch import Tensor

from orthocond import linalg
from orthocond.lab.bench import peers
from orthocond.lab.bench.measure import Budget, alternate, forward_backward, spread
from orthocond.lab.bench.problems import SPECTRA, problem, relative_error

__all__ = ["BOUNDS", "FUNCTIONS", "OURS", "TRUTHS", "Cell", "cells", "measure", "times"]

Scalar = Callable[[Any], Any]

OURS = "orthocond"
BOUNDS = {"float32": (2e-6, 1e-5), "float64": (1e-12, 1e-10)}
"""The promised relative errors of value and gradient, unless the limit of a problem is larger."""
_SLACK = 100
"""How many times its limit an error may be: the limit is the effect of one random change of the entries."""
_DIGITS = 50
_GAPS = (0.0, *(10.0**-k for k in range(16, 0, -1)))
_SIZES = tuple(range(2, 13))
_LARGE_SIZES = (32, 64, 128)
_LARGE_GAPS = (0.0, 1e-16, 1e-12, 1e-8, 1e-4, 1e-1)
# Float32 can't hold the small eigenvalues of a rotated matrix: beyond this, only the pairs are rotated.
_TURNED = {"float32": 1e4, "float64": math.inf}


class Function(NamedTuple):
    """A spectral function: the scalar function with its derivative, SciPy's function of any matrix, and ours."""

    scalar: Scalar
    derivative: Scalar
    of_any: Callable[[Any], Any]
    ours: Callable[[Tensor], Tensor]


def _power(exponent: float) -> Function:
    p = mpmath.mpf(exponent)
    return Function(
        lambda x: mpmath.power(x, p),
        lambda x: p * mpmath.power(x, p - 1),
        lambda M: scipy.linalg.fractional_matrix_power(M, exponent),
        lambda A: linalg.matrix_powerh(A, exponent, rtol=0.0),
    )


FUNCTIONS: Mapping[str, Function] = {
    "sqrt": _power(0.5),
    "inv_sqrt": _power(-0.5),
    "power(exponent=-0.25)": _power(-0.25),
    "power(exponent=0.3)": _power(0.3),
    "log": Function(mpmath.log, lambda x: 1 / x, scipy.linalg.logm, functools.partial(linalg.matrix_logh, rtol=0.0)),
    "exp": Function(mpmath.exp, mpmath.exp, scipy.linalg.expm, linalg.matrix_exph),
}
"""What is measured, by the name that `orthocond.linalg.FUNCTIONS` gives it."""


@dataclass(frozen=True)
class Cell:
    """The problems of one dtype and condition number, over all gaps and sizes, and the truth they are judged by."""

    dtype: str
    condition: float
    gaps: tuple[float, ...]
    sizes: tuple[int, ...]
    truth: str = "50 digits"


def cells(*, quick: bool) -> Iterator[Cell]:
    """Yield dtypes x condition numbers, of small matrices and then of large ones."""
    gaps, sizes = ((0.0, 1e-8), (3,)) if quick else (_GAPS, _SIZES)
    for dtype in BOUNDS:
        for exponent in (0, 6) if quick else (0, 2, 4, 6, 8, 10, 12):
            yield Cell(dtype, 10.0**exponent, gaps, sizes)
    gaps, sizes = ((0.0, 1e-8), (32,)) if quick else (_LARGE_GAPS, _LARGE_SIZES)
    for dtype in BOUNDS:
        for exponent in (2,) if quick else (0, 2, 4):
            yield Cell(dtype, 10.0**exponent, gaps, sizes, "SciPy")


def contestants(name: str) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return the implementations of a function of matrices, by the name of the package."""
    return {OURS: FUNCTIONS[name].ours, **peers.spectral_functions(name)}


def measure(cell: Cell, **_: bool) -> list[dict[str, Any]]:
    """Return a record for each function and contestant: its largest errors, and how many problems it solves."""
    everyone = {(name, who): solve for name in FUNCTIONS for who, solve in contestants(name).items()}
    results: dict[tuple[str, str], list[_Judged]] = {key: [] for key in everyone}
    for size in cell.sizes:
        for gap in cell.gaps:
            A, G = _problem(cell, size, gap)
            truth = TRUTHS[cell.truth]
            truths, moved = truth(A, G), truth(_moved(A), G)
            for (name, who), solve in everyone.items():
                limits = [relative_error(there, here) for there, here in zip(moved[name], truths[name], strict=True)]
                results[name, who].append(_judged(solve, A, G, truths[name], limits, BOUNDS[cell.dtype]))
    return [
        {
            "truth": cell.truth,
            "dtype": cell.dtype,
            "condition": cell.condition,
            "sizes": f"{min(cell.sizes)}x{min(cell.sizes)} to {max(cell.sizes)}x{max(cell.sizes)}",
            "function": name,
            "contestant": who,
            "problems": len(own),
            "value_error": _largest(judged.value for judged in own),
            "gradient_error": _largest(judged.gradient for judged in own),
            "not_finite": sum(not judged.is_finite for judged in own),
            "within": sum(judged.is_within for judged in own),
        }
        for (name, who), own in results.items()
    ]


class _Judged(NamedTuple):
    value: float
    gradient: float
    is_finite: bool
    is_within: bool


def _judged(
    solve: Callable[[Tensor], Tensor],
    A: Tensor,
    G: Tensor,
    truths: tuple[Tensor, Tensor],
    limits: list[float],
    bounds: tuple[float, float],
) -> _Judged:
    leaf = A.clone().requires_grad_()
    try:
        value = solve(leaf)
        (gradient,) = torch.autograd.grad(value, leaf, G)
    except Exception:  # other packages may raise anything: then there is no result
        return _Judged(math.inf, math.inf, is_finite=False, is_within=False)
    errors = relative_error(value, truths[0]), relative_error((gradient + gradient.mT) / 2, truths[1])
    allowed = [max(bound, _SLACK * limit) for bound, limit in zip(bounds, limits, strict=True)]
    is_within = all(error <= most for error, most in zip(errors, allowed, strict=True))  # False for NaN
    return _Judged(*errors, is_finite=all(map(math.isfinite, errors)), is_within=is_within)


def _largest(errors: Iterator[float]) -> float | None:
    """Return the largest of the errors that are finite."""
    return max(filter(math.isfinite, errors), default=None)


def _problem(cell: Cell, size: int, gap: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    l = 2 * torch.logspace(0, -math.log10(cell.condition), size, dtype=torch.float64)
    if size > 2 or cell.condition == 1:  # otherwise the condition number is the gap
        l[1] = l[0] * (1 - gap)
    if size > 3:
        l[-2] = l[-1] * (1 + gap)
    U = torch.eye(size, dtype=torch.float64)
    is_turned = cell.condition <= _TURNED[cell.dtype]
    blocks = [slice(size)] if is_turned else [slice(min(2, size - 1)), slice(max(2, size - 2), size)]
    for block in blocks:
        shape = U[block, block].shape
        U[block, block] = torch.linalg.qr(torch.randn(shape, generator=generator, dtype=torch.float64)).Q
    dtype = getattr(torch, cell.dtype)
    A, G = ((U * l) @ U.mT).to(dtype), torch.randn(size, size, generator=generator, dtype=dtype)
    return (A + A.mT) / 2, (G + G.mT) / 2


def _moved(A: Tensor) -> Tensor:
    """Return the matrix with its entries changed at random, by one unit in the last place of float64 of its norm."""
    generator = torch.Generator().manual_seed(1)
    E = torch.randn(A.shape, generator=generator, dtype=torch.float64)
    wide = A.double()
    moved: Tensor = wide + (E + E.mT) / 2 * torch.finfo(torch.float64).eps * torch.linalg.matrix_norm(wide, 2)
    return moved


def _digits(A: Tensor, G: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Return for each of `FUNCTIONS` its value at ``A`` and the gradient of the inner product with ``G``, in float64.

    Computed with 50 digits: the gradient is ``U (F o (U^T G U)) U^T`` with the divided differences ``F``.

    Reference: Higham, Functions of Matrices, 2008, theorem 3.11.
    """
    n = A.shape[-1]
    with mpmath.workdps(_DIGITS):
        l, U = mpmath.eigsy(mpmath.matrix(A.tolist()))
        inner = U.T * mpmath.matrix(G.tolist()) * U
        l = [abs(x) for x in l]  # if the matrix is singular in its dtype, rounding decides the sign
        found = {}
        for name, function in FUNCTIONS.items():
            f = [function.scalar(x) for x in l]
            F = mpmath.matrix(n, n)
            for i in range(n):
                for j in range(i + 1):
                    F[i, j] = F[j, i] = inner[i, j] * _difference(l[i], l[j], f[i], f[j], function.derivative)
            found[name] = (_tensor(U * mpmath.diag(f) * U.T), _tensor(U * F * U.T))
    return found


def _schur(A: Tensor, G: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the same, computed in float64 without eigenvectors: they are the first rows of ``f([[A, G], [0, A]])``.

    Reference: Higham, Functions of Matrices, 2008, theorem 3.6.
    """
    n = A.shape[-1]
    both = np.block([[A.double().numpy(), G.double().numpy()], [np.zeros((n, n)), A.double().numpy()]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # logm's, where it estimates an error above 2e-13
        rows = {name: torch.from_numpy(np.real(function.of_any(both)))[:n] for name, function in FUNCTIONS.items()}
    return {name: (row[:, :n], row[:, n:]) for name, row in rows.items()}


TRUTHS: Mapping[str, Callable[[Tensor, Tensor], dict[str, tuple[Tensor, Tensor]]]] = {
    "50 digits": _digits,
    "SciPy": _schur,
}
"""By name: the functions that compute values and gradients of all `FUNCTIONS` for a symmetric matrix and a gradient."""


def _difference(x: Any, y: Any, f: Any, g: Any, derivative: Scalar) -> Any:
    """Return ``(f - g) / (x - y)``, or the derivative where the quotient would lose too many digits."""
    return derivative((x + y) / 2) if abs(x - y) <= mpmath.mpf("1e-25") * x else (f - g) / (x - y)


def _tensor(matrix: Any) -> Tensor:
    return torch.tensor([[float(x) for x in row] for row in matrix.tolist()], dtype=torch.float64)


_TIMED = {
    "matrix_logh": linalg.matrix_logh,
    "matrix_exph": linalg.matrix_exph,
    "matrix_powerh(exponent=-0.25)": lambda A: linalg.matrix_powerh(A, -0.25),
    "matrix_powerh(exponent=0.3)": lambda A: linalg.matrix_powerh(A, 0.3),
}


def times(*, quick: bool) -> list[dict[str, Any]]:
    """Return the time of the functions, forward and backward, over that of `matrix_inv_sqrth` in the same round."""
    spectrum = next(iter(SPECTRA))
    records = []
    for size, batch in [(16, 1)] if quick else [(16, 1), (16, 64), (64, 1), (64, 64), (128, 1), (256, 1)]:
        asked = problem(size, batch, spectrum)
        everyone = {"root": linalg.matrix_inv_sqrth, **_TIMED}
        budget = Budget(0.0, fewest=3) if quick else Budget(6.0, fewest=10, most=400)
        passes = alternate(
            {name: forward_backward(solve, asked.A, asked.G) for name, solve in everyone.items()}, budget
        )
        place = {"size": size, "batch": batch, "spectrum": spectrum}
        records += [
            {**place, "contestant": name, "over_root": spread(passes[name], passes["root"])._asdict()}
            for name in _TIMED
        ]
    return records
