"""The eigenvalues of a covariance and what they say about its conditioning."""

from typing import NamedTuple

import torch
from torch import Tensor

from orthocond._core.precision import at_least_float32, real_dtype, widen
from orthocond.errors import check_nonnegative, check_square
from orthocond.linalg._decompose import decompose
from orthocond.linalg._differences import shifted
from orthocond.linalg._eigen import symmetric
from orthocond.linalg._roots import default_rtol

__all__ = ["Spectrum", "spectrum", "spectrum_of"]


class Spectrum(NamedTuple):
    """Eigenvalues, rank and condition numbers of symmetric positive semi-definite matrices.

    Example:
        >>> spectrum(torch.diag(torch.tensor([1.0, 4.0]))).eigenvalues
        tensor([4., 1.])
    """

    eigenvalues: Tensor
    """``(..., n)``, descending."""
    rank: Tensor
    """``(...)``: how many eigenvalues are above ``rtol`` times the largest."""
    cond: Tensor
    """``(...)``: the largest over the smallest, both as absolute values; infinite for a singular matrix."""
    cond_support: Tensor
    """``(...)``: the largest over the smallest of those that count towards the rank; 1 for a zero matrix."""
    cond_eps: Tensor
    """``(...)``: the condition number of ``A + eps I``."""
    gap: Tensor
    """``(...)``: the smallest distance between two eigenvalues over the largest absolute value; infinite for 1x1."""


def spectrum(A: Tensor, *, eps: float = 0.0, rtol: float | None = None) -> Spectrum:
    r"""Return the eigenvalues, the rank, three condition numbers and the gap of symmetric matrices.

    .. math:: \kappa(A) = \sigma_{max}(A) / \sigma_{min}(A)

    is the paper's measure (eq. 1). For a singular covariance its denominator is rounding noise, and so is the ratio.
    ``cond_support`` is the condition number for a layer that drops the null space, ``cond_eps`` for one that adds
    ``eps``.

    .. math:: gap(A) = \min_{i \neq j} |\lambda_i - \lambda_j| / \max_k |\lambda_k|

    measures how well the individual eigenvectors are determined. The gradient through eigenvectors divides by these
    distances: at or below ``n * finfo(A.dtype).eps`` two eigenvalues are equal up to rounding, and that gradient is
    rounding noise or NaN. The identity has the best condition number and the worst gap.

    *Gradient:* none; the result is for inspection.

    Args:
        A: matrices ``(..., n, n)``, real or complex; only the symmetric or Hermitian part is used.
        eps: for ``cond_eps`` only.
        rtol: for ``rank`` and ``cond_support``; ``None`` means ``n * finfo(A.dtype).eps``, whatever ``eps`` is.

    Returns:
        A named tuple ``(eigenvalues, rank, cond, cond_support, cond_eps, gap)``, in float32 at least.

    Raises:
        ArgumentError, DtypeError, NonFiniteError, SolverError: as in `matrix_sqrth`.

    Example:
        >>> s = spectrum(torch.diag(torch.tensor([4.0, 1.0, 0.0])), eps=1.0)
        >>> s.rank.item(), s.cond.item(), s.cond_support.item(), s.cond_eps.item()
        (2, inf, 4.0, 5.0)
        >>> s.gap.item(), spectrum(torch.eye(3)).gap.item()
        (0.25, 0.0)
    """
    check_square(A, "spectrum", allow_complex=True)
    check_nonnegative(eps, "eps", "spectrum")
    if rtol is not None:
        check_nonnegative(rtol, "rtol", "spectrum")
    eigenvalues, _ = decompose(symmetric(widen(A.detach())), "eigh")
    found = spectrum_of(eigenvalues, eps=eps, rtol=default_rtol(A, rtol))
    dtype = real_dtype(at_least_float32(A.dtype))  # a condition number is easily too large for a half type
    return Spectrum(*(part.to(A.device, dtype if part.is_floating_point() else None) for part in found))


def spectrum_of(
    eigenvalues: Tensor, *, eps: float, rtol: float, floor: Tensor | None = None, clamp: bool = False
) -> Spectrum:
    """Return the same from eigenvalues ``(..., n)`` that are already known, in any order.

    ``floor`` ``(...)`` is the rounding noise of each matrix: what is at or below it doesn't count towards the rank.
    With ``clamp``, ``cond_eps`` is that of eigenvalues raised to ``eps``.
    """
    l = eigenvalues.sort(-1, descending=True).values
    if l.shape[-1] == 0:
        one = l.new_ones(l.shape[:-1])
        return Spectrum(l, torch.zeros_like(one, dtype=torch.long), one, one, one, torch.full_like(one, torch.inf))
    largest = l[..., 0].clamp(min=0)
    kept = l > rtol * largest.unsqueeze(-1)
    if floor is not None:
        kept = kept & (l > floor.to(l).unsqueeze(-1))
    smallest_kept = torch.where(kept, l, torch.inf).amin(-1)
    rank = kept.sum(-1)
    size = l.abs()
    raised = l.clamp(min=eps) if clamp else shifted(l, eps)
    return Spectrum(
        l,
        rank,
        _ratio(size.amax(-1), size.amin(-1)),
        torch.where(rank > 0, largest / smallest_kept, 1.0),
        _ratio(raised.amax(-1), raised.amin(-1)),
        _gap(l),
    )


def _ratio(largest: Tensor, smallest: Tensor) -> Tensor:
    return torch.where(smallest > 0, largest / smallest, torch.inf)


def _gap(l: Tensor) -> Tensor:
    if l.shape[-1] < 2:
        return torch.full_like(l[..., 0], torch.inf)
    smallest = (l[..., :-1] - l[..., 1:]).amin(-1)
    return torch.where(smallest > 0, smallest / l.abs().amax(-1), smallest)
