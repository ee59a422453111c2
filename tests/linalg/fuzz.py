"""Fuzzing of the numerics, against an oracle of its own in extended precision.

    python tests/linalg/fuzz.py --matrices 100000 --seed 0

Matrices of every scale, rank, precision and structure go through the roots, powers, logarithm and polar factors. The
oracle is a Jacobi iteration in NumPy's longdouble (64 bits of mantissa on x86). A result is wrong if it is not finite,
or differs from the oracle by more than the error bound that the condition of the problem allows for a computation in
float64 and one rounding to the dtype. Every decomposition is right, so a failure that the library counts is a false
alarm, and makes the run fail as well.
"""

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from orthocond.linalg import (
    matrix_inv_sqrth,
    matrix_logh,
    matrix_powerh,
    matrix_sqrth,
    nearest_orthogonal,
    solver_failures,
)

Long = np.longdouble
IS_EXTENDED = bool(np.finfo(Long).eps < 1e-18)
UNIT = float(np.finfo(np.float64).eps)
SLACK = 64.0
"""The constant of the error bounds: LAPACK's own tests allow 60."""

FUNCTIONS = {
    "sqrt": (matrix_sqrth, np.sqrt, lambda a, b: 1 / (np.sqrt(a) + np.sqrt(b))),
    "inv_sqrt": (
        matrix_inv_sqrth,
        lambda x: 1 / np.sqrt(x),
        lambda a, b: -1 / (np.sqrt(a) * np.sqrt(b) * (np.sqrt(a) + np.sqrt(b))),
    ),
    "power 1/4": (
        lambda A, **options: matrix_powerh(A, 0.25, **options),
        lambda x: np.sqrt(np.sqrt(x)),
        lambda a, b: 1 / ((np.sqrt(np.sqrt(a)) + np.sqrt(np.sqrt(b))) * (np.sqrt(a) + np.sqrt(b))),
    ),
    "log": (
        matrix_logh,
        np.log,
        lambda a, b: np.where(a == b, 1 / b, np.log1p((a - b) / b) / np.where(a == b, 1, a - b)),
    ),
}
"""By name: the library's function, the scalar one, and its divided difference, in a form without cancellation."""
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DECADES = {torch.float16: 2, torch.bfloat16: 30, torch.float32: 30, torch.float64: 90}
SPECTRA = (
    "spread",
    "graded",
    "ties",
    "clusters",
    "rank-deficient",
    "rank one",
    "identity",
    "zero",
    "diagonal",
    "noise",
)


@dataclass(frozen=True)
class Case:
    """What a batch of matrices has in common."""

    size: int
    dtype: torch.dtype
    spectrum: str
    function: str
    solver: str
    eps: float
    """Relative to the largest entry."""
    rtol: float | None


def case(generator: np.random.Generator) -> Case:
    """Return a random case."""
    spectrum = str(generator.choice(SPECTRA))
    eps = float(generator.choice([0.0, 0.0, 1e-2, 1e-5, 1e-9]))
    return Case(
        size=int(generator.choice([1, 2, 3, 4, 5, 6, 8, 12], p=[0.1, 0.15, 0.2, 0.15, 0.15, 0.1, 0.1, 0.05])),
        dtype=DTYPES[generator.choice(4, p=[0.15, 0.15, 0.4, 0.3])],
        spectrum=spectrum,
        function=str(generator.choice([*FUNCTIONS, "polar"], p=[0.25, 0.3, 0.15, 0.15, 0.15])),
        solver=str(generator.choice(["eigh", "svd"], p=[0.85, 0.15])),
        eps=eps,
        rtol=None if generator.random() < 0.7 else float(generator.choice([1e-3, 1e-6, 1e-10])),
    )


def matrices(asked: Case, count: int, generator: np.random.Generator) -> torch.Tensor:
    """Return symmetric matrices ``(count, n, n)``, exactly representable in the dtype."""
    n = asked.size
    random = generator.random((count, n))
    decades = generator.uniform(0, 16, (count, 1))
    spectrum = {
        "spread": lambda: 10 ** (-decades * random),
        "graded": lambda: 10.0 ** (-decades * np.arange(n) / max(n - 1, 1)),
        "ties": lambda: generator.choice([1.0, 0.25, 0.01], (count, n)),
        "clusters": lambda: generator.choice([1.0, 0.1], (count, n)) * (1 + 10 ** (-decades) * random),
        "rank-deficient": lambda: 10 ** (-2 * random) * (np.arange(n) < generator.integers(0, n + 1, (count, 1))),
        "rank one": lambda: np.eye(n)[np.zeros(count, int)],
        "identity": lambda: np.ones((count, n)),
        "zero": lambda: np.zeros((count, n)),
        "diagonal": lambda: 10 ** (-decades * random),
        "noise": lambda: np.where(np.arange(n) == 0, 1.0, 1e-17 * (random - 0.5)),
    }[asked.spectrum]()
    spectrum = spectrum / np.where(spectrum.max(1) > 0, spectrum.max(1), 1)[:, None]
    Q = np.linalg.qr(generator.standard_normal((count, n, n)))[0]
    if asked.spectrum in ("diagonal", "identity"):
        Q = np.broadcast_to(np.eye(n), Q.shape)
    limit = DECADES[asked.dtype]
    scale = 10.0 ** generator.uniform(-limit, limit, (count, 1, 1))
    A = (Q * spectrum[:, None, :]) @ Q.swapaxes(-1, -2) * scale
    A = torch.from_numpy((A + A.swapaxes(-1, -2)) / 2).to(asked.dtype)
    return torch.triu(A) + torch.triu(A, 1).mT


Decompose = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


def jacobi(A: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return eigenvalues, ascending, and eigenvectors of symmetric matrices, by cyclic Jacobi rotations."""
    count, n, _ = A.shape
    size = np.abs(A).max((1, 2), keepdims=True) if n else np.ones((count, 1, 1), Long)
    size = np.where(size > 0, size, 1)
    A, V = A / size, np.broadcast_to(np.eye(n, dtype=Long), A.shape).copy()
    for _ in range(40):
        off = np.abs(A * (1 - np.eye(n, dtype=Long))).max() if n > 1 else 0
        if off < 1e-30:  # below the last digit of longdouble, relative to any eigenvalue that counts
            break
        for p in range(n - 1):
            for q in range(p + 1, n):
                apq, difference = A[:, p, q], A[:, q, q] - A[:, p, p]
                root = np.sqrt(difference**2 + 4 * apq**2)
                denominator = np.abs(difference) + root
                t = np.where(denominator > 0, 2 * apq / np.where(denominator > 0, denominator, 1), 0)
                t = np.where(difference < 0, -t, t)
                c = 1 / np.sqrt(1 + t * t)
                s = (c * t)[:, None]
                c = c[:, None]
                A[:, :, p], A[:, :, q] = c * A[:, :, p] - s * A[:, :, q], s * A[:, :, p] + c * A[:, :, q]
                A[:, p, :], A[:, q, :] = c * A[:, p, :] - s * A[:, q, :], s * A[:, p, :] + c * A[:, q, :]
                V[:, :, p], V[:, :, q] = c * V[:, :, p] - s * V[:, :, q], s * V[:, :, p] + c * V[:, :, q]
    l = np.einsum("bii->bi", A) * size[:, :, 0]
    order = np.argsort(l, axis=1)
    return np.take_along_axis(l, order, 1), np.take_along_axis(V, order[:, None, :], 2)


@dataclass(frozen=True)
class Truth:
    """What should come out, and by how much a right result may differ from it (Frobenius norms, ``(b,)``)."""

    value: np.ndarray
    gradient: np.ndarray
    value_error: np.ndarray
    gradient_error: np.ndarray
    is_clear: np.ndarray
    """Where rounding noise does not decide: no eigenvalue is near the cut-off, nor is ``l + eps`` nothing but noise."""


def truth(
    A: np.ndarray, G: np.ndarray, asked: Case, eps: np.ndarray, rtol: float | None, decompose: Decompose = jacobi
) -> Truth:
    """Return the function of symmetric matrices and the gradient of its inner product with ``G``."""
    n = A.shape[-1]
    _, f, difference = FUNCTIONS[asked.function]
    l, U = decompose(A)
    largest = np.abs(l).max(1, keepdims=True)
    noise = SLACK * n * UNIT * largest
    if rtol is None:
        kept = np.ones_like(l, bool)
        points = np.maximum(l, -eps / 2) + eps
        is_clear = (l + eps > noise).all(1)  # elsewhere the result is one of rounding noise
        gap = np.full(len(l), np.inf, Long)
    else:
        cutoff = np.maximum(rtol * l[:, -1:], np.finfo(np.float64).tiny)
        kept = l > cutoff
        is_clear = (np.abs(l - cutoff) > noise).all(1) | (largest[:, 0] == 0)
        points = np.where(kept, l + eps, 1)
        apart = np.abs(l[:, :, None] - l[:, None, :])
        apart = np.where(kept[:, :, None] ^ kept[:, None, :], np.maximum(apart, cutoff[:, :, None]), np.inf)
        gap = apart.min((1, 2))
    values = np.where(kept, f(points), 0)
    F = difference(points[:, :, None], points[:, None, :])
    if rtol is not None:
        both, one = kept[:, :, None] & kept[:, None, :], kept[:, :, None] ^ kept[:, None, :]
        across = (values[:, :, None] + values[:, None, :]) / np.where(one, apart, 1)
        F = np.where(both, F, np.where(one, across, 0))
    transposed = U.swapaxes(1, 2)
    value = np.einsum("bij,bj,bkj->bik", U, values, U)
    inner = transposed @ ((G + G.swapaxes(1, 2)) / 2) @ U
    gradient = U @ (F * inner) @ transposed
    # First order: an error E of the matrix changes the value by F o E, and the gradient by second differences, which
    # are at most F over the smallest point or gap.
    steepest = np.abs(F).max((1, 2))
    nearest = np.minimum(np.where(kept, points, np.inf).min(1), gap)
    value_error = steepest * noise[:, 0] * np.sqrt(n) + SLACK * UNIT * n * np.abs(values).max(1)
    norm = np.sqrt((G**2).sum((1, 2)))
    gradient_error = steepest * norm * (n * noise[:, 0] / nearest + SLACK * UNIT * n)
    return Truth(value, gradient, value_error, gradient_error, is_clear)


def checked(asked: Case, count: int, generator: np.random.Generator, found: Counter) -> None:
    """Run the library on a batch, compare, and count."""
    A = matrices(asked, count, generator)
    n = asked.size
    G = torch.from_numpy(generator.standard_normal((count, n, n))).to(asked.dtype)
    function, *_ = FUNCTIONS[asked.function]
    eps = asked.eps * float(A.abs().double().median()) if n else 0.0
    unit = max(torch.finfo(asked.dtype).eps if asked.dtype == torch.float64 else 2.0**-23, 2.0**-52)
    rtol = asked.rtol if asked.rtol is not None else None if eps > 0 else n * unit
    A.requires_grad_()
    value = function(A, solver=asked.solver, eps=eps, rtol=asked.rtol)
    (gradient,) = torch.autograd.grad(value, A, G)
    wide = A.detach().double().numpy().astype(Long)
    true = truth(wide, G.double().numpy().astype(Long), asked, Long(eps), rtol)
    is_fit = [
        _within(value, true.value, true.value_error, asked.dtype),
        _within(gradient, true.gradient, true.gradient_error, asked.dtype),
    ]
    finite = (value.isfinite().flatten(1).all(1) & gradient.isfinite().flatten(1).all(1)).numpy()
    wrong = ~finite | (true.is_clear & ~(is_fit[0] & is_fit[1]))
    alone = function(A.detach()[:1], solver=asked.solver, eps=eps, rtol=asked.rtol)
    wrong[0] |= not _is_same(alone[0], value.detach()[0])
    _counted(found, asked, wrong, true.is_clear, A)


def _within(result: torch.Tensor, true: np.ndarray, error: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    about = torch.finfo(dtype)
    with np.errstate(over="ignore"):
        expected = np.clip(true, -Long(about.max), Long(about.max))
        difference = np.abs(result.detach().double().numpy().astype(Long) - expected)
        allowed = error[:, None, None] + 2 * Long(about.eps) * np.abs(expected) + Long(about.tiny)
        saturated = np.abs(true) + error[:, None, None] >= 0.5 * Long(about.max)
    return ((difference <= allowed) | saturated).all((1, 2))


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether a matrix alone gives what it gives in a batch, up to the rounding of its function."""
    size = other.abs().max().double()
    return bool(((one - other).abs().double() <= 1e-3 * size).all())


def checked_polar(asked: Case, count: int, generator: np.random.Generator, found: Counter) -> None:
    """The same for the polar factor."""
    A = matrices(asked, count, generator)
    wide = A.double().numpy().astype(Long)
    size = np.abs(wide).max((1, 2), keepdims=True)
    wide = wide / np.where(size > 0, size, 1)
    l, U = jacobi(wide)  # symmetric matrices: the polar factor is their sign
    largest = np.abs(l).max(1, keepdims=True)
    unit = torch.finfo(torch.promote_types(asked.dtype, torch.float32)).eps
    cutoff = asked.size * unit * largest
    kept = np.abs(l) > cutoff
    is_clear = ((np.abs(np.abs(l) - cutoff) > 0.05 * cutoff).all(1) & ~(l * kept < 0).any(1)) | (largest[:, 0] == 0)
    expected = np.einsum("bij,bj,bkj->bik", U, np.sign(l) * kept, U)
    result = nearest_orthogonal(A, solver="gram" if asked.solver == "eigh" else "svd")
    smallest = np.where(kept, np.abs(l), np.inf).min(1)
    error = SLACK * asked.size * UNIT * largest[:, 0] / smallest + (5e-6 if asked.dtype != torch.float64 else 1e-9)
    fits = (np.abs(result.double().numpy() - expected) <= error[:, None, None] + 2 * torch.finfo(asked.dtype).eps).all(
        (1, 2)
    )
    finite = result.isfinite().flatten(1).all(1).numpy()
    _counted(found, asked, ~finite | (is_clear & ~fits), is_clear, A)


def _counted(found: Counter, asked: Case, wrong: np.ndarray, is_clear: np.ndarray, A: torch.Tensor) -> None:
    found["matrices"] += len(wrong)
    found["left to rounding noise, so only finite"] += int((~is_clear).sum())
    found["wrong"] += int(wrong.sum())
    if wrong.any():
        first = int(np.flatnonzero(wrong)[0])
        print(f"wrong: {int(wrong.sum())} of {len(wrong)}, {asked}\n{A.detach()[first].tolist()}", file=sys.stderr)


def fuzz(count: int, seed: int, batch: int = 100) -> Counter:
    """Return how many matrices were tried, and how many results were wrong."""
    generator = np.random.default_rng(seed)
    found: Counter = Counter(wrong=0)
    solver_failures(reset=True)
    with warnings.catch_warnings(), np.errstate(divide="ignore", invalid="ignore", under="ignore"):
        warnings.simplefilter("error")
        while found["matrices"] < count:
            asked = case(generator)
            check = checked_polar if asked.function == "polar" else checked
            check(asked, min(batch, count - found["matrices"]), generator, found)
    found["false alarms"] = sum(solver_failures(reset=True).values())
    return found


def main() -> int:
    """Fuzz as long as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--matrices", type=int, default=10_000, help="how many matrices to try")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random matrices")
    options = parser.parse_args()
    if not IS_EXTENDED:
        parser.error("NumPy's longdouble is float64 on this machine: no oracle; use one with an x86 processor.")
    found = fuzz(options.matrices, options.seed)
    print(f"seed {options.seed}: " + ", ".join(f"{number} {name}" for name, number in found.items()))
    return 1 if found["wrong"] or found["false alarms"] else 0


if __name__ == "__main__":
    sys.exit(main())
