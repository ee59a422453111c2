"""The change of gauge: the matrices that make covariances well conditioned."""

from typing import NamedTuple

import torch
from torch import Tensor

from orthocond._core.precision import widen
from orthocond.linalg._decompose import decompose
from orthocond.linalg._eigen import symmetric
from orthocond.linalg._spectrum import spectrum_of

__all__ = ["SCALES", "Change", "change_of_gauge", "limit"]

SCALES = ("trace", "weight", "unit")
"""What the scale ``c`` keeps: the trace of the covariance, or the weight's norm; ``unit`` is ``c = 1``."""


class Change(NamedTuple):
    """A change of gauge: all in float64."""

    eigenvalues: Tensor
    """``(groups, c)``, those of the covariance."""
    vectors: Tensor
    """``(groups, c, c)``, its eigenvectors."""
    kept: Tensor
    """``(groups, c)``: which of them the whitening keeps."""
    c: Tensor
    """``(groups,)``: the square root of the eigenvalues that are kept, after it; 0 for a group that stays as it is."""
    rtol: float
    """What is at or below ``rtol`` times the largest eigenvalue is dropped."""
    factors: Tensor
    """``(groups, c)``: by how much the directions are stretched."""
    cond: Tensor
    """The largest condition number on the support, after it."""

    @property
    def T(self) -> Tensor:  # noqa: N802  # its name in the formulas
        """``(groups, c, c)``: what the weight is multiplied by."""
        return self._matrix(self.factors)

    @property
    def inverse(self) -> Tensor:
        """``(groups, c, c)``: what the whitening matrix is multiplied by, from the right."""
        return self._matrix(self.factors.reciprocal())

    @property
    def support(self) -> Tensor:
        """``(groups, c, c)``: the same as ``T``, without what is dropped."""
        return self._matrix(torch.where(self.kept, self.factors, 0.0))

    @property
    def mean(self) -> Tensor:
        """``(groups,)``: of the eigenvalues that are kept."""
        return torch.where(self.kept, self.eigenvalues, 0.0).sum(-1) / self.kept.sum(-1)

    @property
    def growth(self) -> Tensor:
        """``(groups,)``: of the size of ``W S^(1/2)``."""
        return torch.where(self.c > 0, self.c / self.mean.sqrt(), 1.0)

    def _matrix(self, values: Tensor) -> Tensor:
        matrix: Tensor = (self.vectors * values.unsqueeze(-2)) @ self.vectors.mT
        return matrix


def change_of_gauge(
    P: Tensor,
    W: Tensor,
    *,
    threshold: float,
    num_samples: int,
    scale: str = "trace",
    rtol: float = 0.0,
    noise: Tensor | None = None,
    solver: str = "eigh",
) -> Change:
    r"""Return the matrices that make covariances well conditioned, without changing what is whitened.

    .. math:: T = c \, U \operatorname{diag}(g) U^T, \quad g_i = l_i^{-1/2}

    for ``P = U diag(l) U^T``. An eigenvalue that the whitening drops gets :math:`g_i = l_{max}^{-1/2}`: it stays in the
    same ratio to the largest, so it is dropped as before, and ``T`` can be inverted.

    Args:
        P: covariances ``(groups, c, c)``.
        W: the weight that made them ``(groups, c, k)``.
        threshold: what has a condition number on its support at or below it gets the identity.
        num_samples: how many stand behind each covariance: where they are few, noise alone exceeds a threshold.
        scale: one of `SCALES`.
        rtol: eigenvalues at or below ``rtol`` times the largest are dropped by the whitening.
        noise: rounding noise of the covariances ``(groups,)``, at or below which the whitening drops them as well.
        solver: how to decompose: that of the layer, so that the same eigenvalues are dropped.

    Example:
        >>> P = torch.diag(torch.tensor([100.0, 4.0, 0.0]))[None]
        >>> change_of_gauge(P, torch.eye(3)[None], threshold=10.0, num_samples=99, scale="unit").T[0].diag()
        tensor([0.1000, 0.5000, 0.1000], dtype=torch.float64)
    """
    eigenvalues, U = decompose(symmetric(widen(P)), solver)
    l = eigenvalues.clamp(min=0)
    largest = l.amax(-1, keepdim=True)
    cutoff = rtol * largest
    kept = l > (cutoff if noise is None else torch.maximum(cutoff, noise.to(l).unsqueeze(-1)))
    g = torch.where(kept, l, largest).rsqrt()
    change = Change(l, U, kept, torch.ones_like(g[..., 0]), rtol, g, l)
    if scale == "trace":
        c = change.mean.sqrt()
    elif scale == "weight":
        c = torch.linalg.matrix_norm(W) / torch.linalg.matrix_norm(change.T @ W.to(U))
    else:
        c = change.c
    found = spectrum_of(l, eps=0.0, rtol=rtol, floor=noise)
    is_too_large = found.cond_support > limit(found.rank, num_samples, threshold)  # never at rank 0
    g = torch.where(is_too_large.unsqueeze(-1), c.unsqueeze(-1) * g, 1.0)
    after = spectrum_of(g.square() * l, eps=0.0, rtol=rtol).cond_support.max()
    return change._replace(factors=g, c=torch.where(is_too_large, c, 0.0), cond=after)


def limit(rank: Tensor, num_samples: int, threshold: float) -> Tensor:
    """Return the condition number above which to act: the threshold, or more where a batch is too small to tell.

    The covariance of ``M`` samples of white noise in ``r`` dimensions has condition numbers around the square of
    ``(1 + q) / (1 - q)``, ``q = sqrt(r / M)`` (Marchenko and Pastur), and acting on noise makes the weight grow by
    ``1 / (1 - r / M)``. With fewer than ten samples for each dimension, only twice that, in digits, counts.
    """
    ratio = rank / max(num_samples - 1, 1)
    q = ratio.sqrt().clamp(max=1.0)
    noise = ((1 + q) / (1 - q)).pow(4)
    return torch.where(ratio > 0.1, noise.clamp(min=threshold), threshold)
