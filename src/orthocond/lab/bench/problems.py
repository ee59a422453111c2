"""Test matrices and reference results: covariances with a given spectrum, and an oracle in float64.

Everyone is asked for the same smooth function, ``(A + eps I)^(-1/2)`` of float32 matrices whose largest eigenvalue is
1, so nobody has to guess a rank. The oracle sees the matrices as rounded to float32.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

__all__ = ["EPS", "SPECTRA", "Problem", "polar_factor", "problem", "relative_error"]

EPS = 1e-5

SPECTRA: Mapping[str, Callable[[int], Tensor]] = {
    "condition 1e2": lambda n: torch.logspace(0, -2, n, dtype=torch.float64),
    "condition 1e6": lambda n: torch.logspace(0, -6, n, dtype=torch.float64),
    "condition 1e12": lambda n: torch.logspace(0, -12, n, dtype=torch.float64),
    "rank-deficient": lambda n: torch.logspace(0, -2, n, dtype=torch.float64) * (torch.arange(n) < 27 * n // 64),
    "ties": lambda n: torch.tensor([1.0, 0.25, 1 / 64], dtype=torch.float64).repeat(n)[:n],
    "condition 10": lambda n: torch.logspace(0, -1, n, dtype=torch.float64),
}
"""By name: the eigenvalues of a matrix of size n. The rank is that of a 3x3 convolution from 3 to 64 channels. The last
one is as the treatment gauge makes them: only there does the solver products decompose nothing."""

_JUDGED = 4
"""Number of matrices of a batch that are compared with the reference."""


@dataclass(frozen=True)
class Problem:
    """Matrices, an incoming gradient, and for the first few of them the inverse root and its gradient."""

    A: Tensor
    """``(batch, n, n)``, float32"""
    G: Tensor
    """``(batch, n, n)``, float32"""
    value: Tensor
    """``(few, n, n)``, float64"""
    gradient: Tensor
    """``(few, n, n)``, float64"""

    def value_error(self, found: Tensor) -> float:
        """Return the relative error of inverse roots ``(batch, n, n)``."""
        return relative_error(found, self.value)

    def gradient_error(self, found: Tensor) -> float:
        """Return the relative error of gradients ``(batch, n, n)``; only the symmetric part counts."""
        return relative_error((found + found.mT) / 2, self.gradient)


def problem(size: int, batch: int, spectrum: str) -> Problem:
    """Return the problem of a size (a power of two), a batch and one of `SPECTRA`: always the same one."""
    generator = torch.Generator().manual_seed(size)
    if spectrum == "ties":  # rotated so that every entry has few digits, and ties stay ties in float32
        U = _hadamard(size).expand(batch, size, size) / size**0.5
    else:
        U = torch.linalg.qr(torch.randn(batch, size, size, generator=generator, dtype=torch.float64)).Q
    A = (U * SPECTRA[spectrum](size)) @ U.mT
    A = ((A + A.mT) / 2).float()
    G = torch.randn(batch, size, size, generator=generator)
    return Problem(A, G, *oracle(A[:_JUDGED], G[:_JUDGED]))


def oracle(A: Tensor, G: Tensor, eps: float = EPS) -> tuple[Tensor, Tensor]:
    """Return ``(A + eps I)^(-1/2)`` and the gradient of its inner product with ``G``, by NumPy in float64.

    The gradient is ``U (F o (U^T sym(G) U)) U^T``, ``F_ij = -1 / (s_i s_j (s_i + s_j))``, ``s = sqrt(l + eps)``.

    Reference: Higham, Functions of Matrices, 2008, theorem 3.11.
    """
    l, U = np.linalg.eigh(A.double().numpy())
    s = np.sqrt(l + eps)
    column, row, transposed = s[..., :, None], s[..., None, :], U.swapaxes(-1, -2)
    symmetric = (G.double() + G.double().mT).numpy() / 2
    inner = transposed @ symmetric @ U
    gradient = U @ (-inner / (column * row * (column + row))) @ transposed
    return torch.from_numpy((U / row) @ transposed), torch.from_numpy(gradient)


def polar_factor(A: Tensor) -> Tensor:
    """Return ``U V^T`` of ``A`` ``(m, n)`` by NumPy's singular value decomposition in float64."""
    U, _, Vh = np.linalg.svd(A.double().numpy(), full_matrices=False)
    return torch.from_numpy(U @ Vh)


def relative_error(found: Tensor, truth: Tensor) -> float:
    """Return the largest relative error in Frobenius norm, over the matrices whose reference is known."""
    few = found.detach()[: len(truth)].double() if truth.ndim > 2 else found.detach().double()
    difference = torch.linalg.matrix_norm(few - truth)
    return float((difference / torch.linalg.matrix_norm(truth)).max())


def _hadamard(size: int) -> Tensor:
    H = torch.ones(1, 1, dtype=torch.float64)
    while len(H) < size:
        H = torch.cat([torch.cat([H, H], 1), torch.cat([H, -H], 1)])
    return H
