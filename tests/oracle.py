"""Slow and readable truths, in float64 or with 50 digits, each by another way than the library's."""

import functools
import warnings
from collections.abc import Callable

import mpmath
import numpy as np
import scipy.linalg
import torch
from torch import Tensor


def root(A: Tensor, power: float, *, eps: float = 0.0, rtol: float = 0.0) -> Tensor:
    """(A + eps I)^power by eigenvalues in float64; at or below rtol * max is dropped when eps = 0."""
    l, U = torch.linalg.eigh(A.detach().double())
    kept = (l > rtol * l.amax(-1, keepdim=True)) if eps == 0 else torch.ones_like(l, dtype=torch.bool)
    return (U * (torch.where(kept, l + eps, 1.0) ** power * kept).unsqueeze(-2)) @ U.mT


def root_gradient(A: Tensor, G: Tensor, power: float, *, eps: float) -> Tensor:
    """The gradient of <G, (A + eps I)^power> by Bartels and Stewart's solution of the Lyapunov equation."""
    batch = A.shape[:-2]
    A, G = A.detach().double(), G.double()
    Q, S = root(A, 0.5, eps=eps), root(A, -0.5, eps=eps)
    G = (G + G.mT) / 2
    if power < 0:
        G = -S @ G @ S
    flat = zip(Q.reshape(-1, *A.shape[-2:]), G.reshape(-1, *A.shape[-2:]), strict=True)
    solved = [scipy.linalg.solve_sylvester(q.numpy(), q.numpy(), g.numpy()) for q, g in flat]
    return torch.from_numpy(np.array(solved)).reshape(*batch, *A.shape[-2:])


SCALARS = {
    "sqrt": mpmath.sqrt,
    "inv_sqrt": lambda x: 1 / mpmath.sqrt(x),
    "power": lambda x, exponent: mpmath.power(x, exponent),
    "log": mpmath.log,
    "exp": mpmath.exp,
    "tanh": mpmath.tanh,
}
"""The spectral functions as scalar functions with 50 digits."""


@functools.lru_cache(maxsize=8)
def _eigen(rows: tuple[tuple[complex, ...], ...]):
    """The eigenvalues and eigenvectors of a matrix with 80 digits, kept for its next function."""
    A = mpmath.matrix(rows)
    return mpmath.eighe(A) if isinstance(rows[0][0], complex) else mpmath.eigsy(A)


def exact_function(A: Tensor, G: Tensor, scalar, *, eps: float = 0.0) -> tuple[Tensor, Tensor]:
    """f(A + eps I) and the gradient of <G, f(A + eps I)> for one matrix, with 50 digits, as the theorem is written.

    Divided differences lose what the gap is small by; below 1e-30 they are the derivative.
    """
    n = A.shape[-1]
    with mpmath.workdps(80):
        l, U = _eigen(tuple(map(tuple, A.tolist())))
        l = [x + mpmath.mpf(eps) for x in l]
        f = [scalar(x) for x in l]
        scale = max(abs(x) for x in l)
        F = mpmath.matrix(n, n)
        for i in range(n):
            for j in range(n):
                gap = l[i] - l[j]
                near = abs(gap) <= mpmath.mpf("1e-30") * scale
                F[i, j] = mpmath.diff(scalar, l[i]) if near else (f[i] - f[j]) / gap
        value = U * mpmath.diag(f) * U.H
        inner = U.H * mpmath.matrix(G.tolist()) * U
        inner = (inner + inner.H) / 2
        gradient = U * mpmath.matrix([[F[i, j] * inner[i, j] for j in range(n)] for i in range(n)]) * U.H
        kind, number = (torch.complex128, complex) if A.is_complex() else (torch.float64, float)
        return tuple(  # type: ignore[return-value]
            torch.tensor([[number(matrix[i, j]) for j in range(n)] for i in range(n)], dtype=kind)
            for matrix in (value, gradient)
        )


SCHUR = {
    "sqrt": scipy.linalg.sqrtm,
    "inv_sqrt": lambda M: np.linalg.inv(scipy.linalg.sqrtm(M)),
    "power": scipy.linalg.fractional_matrix_power,
    "log": scipy.linalg.logm,
    "exp": scipy.linalg.expm,
    "tanh": scipy.linalg.tanhm,
}
"""The spectral functions by SciPy's algorithms for matrices that need not be symmetric; none of them uses eigh."""


def schur_function(A: Tensor, G: Tensor, function: Callable) -> tuple[Tensor, Tensor]:
    """f(A) and the gradient of <G, f(A)> for one symmetric matrix of any size: f([[A, G], [0, A]]) has both in a row.

    In float64, so about cond(A) * 1e-16 is unknown, more for f that grows towards zero. Equal eigenvalues are no
    special case: there are no eigenvectors in it. A must not be singular, where f has no derivative as a function of
    all matrices (`schur_function_of_samples` is for those).

    Reference: Higham, Functions of Matrices, 2008, theorem 3.6.
    """
    n = A.shape[-1]
    A, G = A.double(), G.double()
    G = (G + G.mT) / 2
    both = torch.cat([torch.cat([A, G], -1), torch.cat([torch.zeros_like(A), A], -1)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # logm warns when its estimate of the error is above 2e-13
        rows = torch.from_numpy(np.real(function(both.numpy())))[:n]
    return rows[:, :n], rows[:, n:]


def schur_function_of_samples(X: Tensor, G: Tensor, function: Callable, *, at_zero: float) -> tuple[Tensor, Tensor]:
    """f(X X^T) and the gradient of <G, f(X X^T)> for X, of more rows than columns: f(0) I + X g(C) X^T, C = X^T X.

    C has full rank, so g(l) = (f(l) - f(0)) / l is a smooth function there; f(0) is ``at_zero``.
    """
    X, G = X.double(), (G + G.mT).double() / 2

    def g(M: np.ndarray) -> np.ndarray:
        return np.linalg.solve(M, function(M) - at_zero * np.eye(len(M)))

    value, slope = schur_function(X.mT @ X, X.mT @ G @ X, g)
    identity = torch.eye(len(X), dtype=torch.float64)
    return at_zero * identity + X @ value @ X.mT, 2 * (G @ X @ value + X @ slope)


def polar(A: Tensor) -> Tensor:
    """U V^T by the SVD in float64."""
    U, _, Vh = torch.linalg.svd(A.detach().double(), full_matrices=False)
    return U @ Vh


def relative_error(found: Tensor, truth: Tensor) -> float:
    """The largest Frobenius error of a matrix in the batch, relative to the truth's norm (absolute for zero)."""
    if not found.numel():
        return 0.0
    difference = torch.linalg.matrix_norm(found.detach().double() - truth)
    norm = torch.linalg.matrix_norm(truth.double())
    return float((difference / torch.where(norm > 0, norm, 1.0)).max())
