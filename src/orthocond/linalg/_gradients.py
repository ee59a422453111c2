"""The gradient rules: the exact one, and those of the literature for comparison.

Eq. 7 of the paper writes the gradient through the eigenvectors, with a matrix ``K``, ``K_ij = 1 / (l_i - l_j)``.
Put together with eqs. 5 and 6 and symmetrised, it is ``U (F o (U^T G U)) U^T`` with

    F_ij = K_ij f(l_i) + K_ji f(l_j),    F_ii = f'(l_i)

so a rule is a function from eigenvalues to ``K``. With the true ``K`` this is the exact rule, except that ``K``
is infinite at a tie, where ``F`` is not.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from orthocond._core.registry import Entry, Option, frozen
from orthocond.linalg._differences import Split, first_differences, shifted, values
from orthocond.linalg._functions import Chosen, is_clamped

__all__ = ["GRADIENTS", "GradientRule", "differences"]


@dataclass(frozen=True)
class GradientRule(Entry):
    """A rule for the gradient of the roots through the eigendecomposition."""

    bounded: bool = True
    """Whether the gradient is finite at repeated eigenvalues, with the default options."""
    kernel: Callable[..., Tensor] | None = None
    """From eigenvalues ``(..., n)``, and the options, to ``K``; None for the exact rule."""


def differences(rule: GradientRule, options: dict[str, Option], parts: Split, function: Chosen, eps: float) -> Tensor:
    """Return the matrix ``F`` ``(..., n, n)`` of the rule for a function of the eigenvalues."""
    exact = first_differences(parts, function)
    if rule.kernel is None:
        return exact
    f = values(parts, function)
    # A clamped function is one of the eigenvalues as they are decomposed.
    K = rule.kernel(shifted(parts.eigenvalues, 0.0 if is_clamped(function) else eps), **options)
    F = K * f.unsqueeze(-1) + K.mT * f.unsqueeze(-2)
    F = F + torch.diag_embed((exact - F).diagonal(dim1=-2, dim2=-1))
    if parts.kept is not None:
        F = torch.where(parts.kept.unsqueeze(-1) | parts.kept.unsqueeze(-2), F, 0.0)
    return F


def _ordered(l: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each pair the larger, the smaller, and the sign of ``l_i - l_j`` (by position at a tie)."""
    i, j = l.unsqueeze(-1), l.unsqueeze(-2)
    later = torch.ones_like(i * j).tril(-1)
    sign = torch.where(i == j, later - later.mT, (i - j).sign())
    return torch.maximum(i, j), torch.minimum(i, j), sign


def _naive(l: Tensor) -> Tensor:
    larger, smaller, sign = _ordered(l)
    return torch.where(sign == 0, 0.0, sign / (larger - smaller))


def _taylor(l: Tensor, degree: int) -> Tensor:
    larger, smaller, sign = _ordered(l)
    larger = torch.where(larger == 0, 1.0, larger)
    x, series = smaller / larger, torch.ones_like(larger)
    for _ in range(degree):
        series = 1 + x * series
    return sign * series / larger


def _pade(l: Tensor, clamp: bool) -> Tensor:
    larger, smaller, sign = _ordered(l.clamp(min=torch.finfo(l.dtype).eps) if clamp else l)
    K = torch.where(sign == 0, 0.0, sign / (larger * (1 - smaller / larger)))
    if not clamp:
        return K
    # The overflow check: at a tie K_ij and K_ji, both infinite, become the largest finite entry of the matrix.
    finite = K.isfinite()
    return torch.where(finite, K, torch.where(finite, K, 0.0).amax((-2, -1), keepdim=True))


def _clip(l: Tensor, bound: float) -> Tensor:
    larger, smaller, sign = _ordered(l)
    return sign * (larger - smaller).reciprocal().clamp(max=bound)


GRADIENTS = frozen(
    GradientRule(
        "exact",
        "Divided differences in closed form: exact everywhere, at repeated eigenvalues too, and differentiable again.",
        "Daleckii and Krein 1965; Higham, Functions of Matrices, 2008, theorem 3.11",
    ),
    GradientRule(
        "naive",
        "K_ij = 1/(l_i - l_j): infinite at repeated eigenvalues.",
        "Ionescu et al., ICCV 2015; eq. 7 of the paper",
        bounded=False,
        kernel=_naive,
    ),
    GradientRule(
        "taylor",
        "The geometric series of 1/(1 - l_j/l_i) up to a degree: bounded, and wrong where eigenvalues are close.",
        "Wang et al., Robust differentiable SVD, TPAMI 2021",
        {"degree": 9},
        kernel=_taylor,
    ),
    GradientRule(
        "pade",
        "The diagonal Pade approximant of the geometric series, which is 1/(1 - x) itself: the same values as "
        "naive in another order of operations, and like it not bounded at x = 1, that is at repeated eigenvalues. "
        "With clamp=true as in the authors' code: eigenvalues raised to 2.2e-16, and infinite entries of K replaced by "
        "the largest finite one, so that the gradient is finite at repeated eigenvalues, and wrong there.",
        "Song et al., Why approximate matrix square root outperforms accurate SVD, ICCV 2021; used in the paper",
        {"clamp": False},
        bounded=False,
        kernel=_pade,
    ),
    GradientRule(
        "clip",
        "K_ij clipped to a bound: finite, and wrong where eigenvalues are closer than 1/bound.",
        "the usual safeguard, compared in Song et al., ICCV 2021",
        {"bound": 1e4},
        kernel=_clip,
    ),
)
"""The gradient rules by name. Write one as ``gradient="taylor"`` or ``gradient="taylor(degree=20)"``.

Example:
    >>> [name for name, rule in GRADIENTS.items() if rule.bounded]
    ['exact', 'taylor', 'clip']
"""
