"""Slow and readable truths in float64, each by another way than the library's."""

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
