"""The spectral functions: functions of the eigenvalues, with the divided differences that their derivatives need.

For ``f(A) = U diag(f(l)) U^H`` the first derivative is made of the first divided differences
``f[i,j] = (f(l_i) - f(l_j)) / (l_i - l_j)``, the second one of ``f[i,j,k] = (f[i,j] - f[j,k]) / (l_i - l_k)``. Written
like that they cancel where eigenvalues are close, so an entry of `FUNCTIONS` gives them in a form that doesn't. With
``t = |log l_i - log l_j|``, ``d = |l_i - l_j|``, and ``m``, ``s`` the larger and the smaller of the two:

    sqrt:      1 / (sqrt(l_i) + sqrt(l_j))
    inv_sqrt:  -1 / (sqrt(l_i) sqrt(l_j) (sqrt(l_i) + sqrt(l_j)))
    power p:   (l_i l_j)^((p-1)/2) sinh(pt/2) / sinh(t/2)
    log:       (l_i l_j)^(-1/2) (t/2) / sinh(t/2)
    exp:       e^m (1 - e^(-d)) / d

Numerator and denominator see the same rounded ``t``, and their quotient is a smooth function of it, so an error of
``t`` counts as it is and is not divided by ``t``. No two normal numbers of float64 have ``t/2`` above 710, where sinh
would overflow. For a power above 1 or below -1 ``sinh(pt/2)`` may, so there it is

    m^(p-1) (1 - e^(-pt)) / (1 - e^(-t)),  for p < 0  -s^p / m (1 - e^(pt)) / (1 - e^(-t))

The second differences are in `_second.py`.

Reference: N. J. Higham, Functions of Matrices (SIAM 2008), section 3.2.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from orthocond._core.registry import Entry, frozen, resolve
from orthocond.linalg._second import (
    any_first,
    any_second,
    any_value,
    exp_coefficients,
    log_coefficients,
    power_coefficients,
    second_by_taylor,
)

__all__ = [
    "FUNCTIONS",
    "INV_SQRT",
    "SQRT",
    "Chosen",
    "SpectralFunction",
    "chosen_function",
    "clamped",
    "is_clamped",
    "spectral_function",
]

Chosen = tuple[str, tuple[Any, ...]]
"""A function and its options' values, as data that `torch.compile` can look at: ``("power", (0.25,))``."""

SQRT: Chosen = ("sqrt", ())
INV_SQRT: Chosen = ("inv_sqrt", ())

_CLAMPED = "clamped"

# In place of a difference of zero: the quotients below are exact with it.
_TINY = 1e-250
# What overflows becomes this, which may be multiplied by the rest without becoming NaN.
_HUGE = 1e250


@dataclass(frozen=True)
class SpectralFunction(Entry):
    """A function of the eigenvalues; its callables take eigenvalues ``(..., n)`` in float64 and the options' values."""

    value: Callable[..., Tensor] = torch.clone
    """``f(l)`` ``(..., n)``."""
    first: Callable[..., Tensor] = torch.clone
    """The first divided differences ``(..., n, n)``."""
    factors: Callable[..., tuple[Tensor, Tensor] | None] | None = None
    """``b`` ``(..., n)`` and ``D`` ``(..., n, n)`` with the first differences ``b_i^2 b_j^2 / D_ij``: one may put ``b``
    into the eigenvectors. None, or returns None, where there is no such form."""
    second: Callable[..., Tensor] = torch.clone
    """From eigenvalues, ``G`` and ``H`` to ``W_ik = sum_j f[i,j,k] H_ij G_jk``, all ``(..., n, n)``."""
    is_root: bool = False
    """Whether the solvers without eigenvalues support it, and it is differentiable more than twice."""
    whole_line: bool = False
    """Whether it takes eigenvalues of any sign; otherwise those at or below zero are noise, or the null space."""


def spectral_function(chosen: Chosen) -> tuple[SpectralFunction, tuple[Any, ...]]:
    """Return the entry of a choice, and its options' values; of a clamped function, those of the function inside."""
    name, options = chosen[1] if is_clamped(chosen) else chosen
    return _ANY if name == _ANY.name else FUNCTIONS[name], options


def clamped(function: Chosen) -> Chosen:
    """Return ``f(max(l, eps))``, which `split` and the differences take instead of ``f(l + eps)``."""
    return _CLAMPED, function


def is_clamped(chosen: Chosen) -> bool:
    """Return whether the function is a clamped one."""
    return chosen[0] == _CLAMPED


def chosen_function(choice: str, argument: str, caller: str) -> Chosen:
    """Return the function that a user's string names: ``"log"``, ``"power(exponent=0.25)"``.

    Raises:
        ArgumentError: ``choice`` names no function, or an option that the function doesn't have; the message lists the
            valid ones.
    """
    entry, options = resolve(FUNCTIONS, choice, argument, caller)
    return entry.name, tuple(options.values())


def _sums(s: Tensor) -> Tensor:
    """Return ``1 / (s_i + s_j)``."""
    return (s.unsqueeze(-1) + s.unsqueeze(-2)).reciprocal_()


def _sqrt_first(l: Tensor) -> Tensor:
    return _sums(l.sqrt())


def _sqrt_second(l: Tensor, G: Tensor, H: Tensor) -> Tensor:
    D = _sums(l.sqrt())  # f[i,j,k] = -D_ij D_jk D_ik
    return -D * ((D * H) @ (D * G))


def _inv_sqrt_first(l: Tensor) -> Tensor:
    s = l.sqrt()
    column, row = s.unsqueeze(-1), s.unsqueeze(-2)
    return (column + row).mul_(column).mul_(row).reciprocal_().neg_()


def _inv_sqrt_second(l: Tensor, G: Tensor, H: Tensor) -> Tensor:
    s = l.sqrt()
    D, r = _sums(s), s.reciprocal()  # f[i,j,k] = (r_i r_j + r_j r_k + r_i r_k) D_ij D_jk D_ik
    DG, DH = D * G, D * H
    column, row = r.unsqueeze(-1), r.unsqueeze(-2)
    through = (DH * row) @ DG
    return D * (column * through + through * row + column * (DH @ DG) * row)


def _power(l: Tensor, exponent: float) -> Tensor:
    power = l.pow(exponent)
    # Up to that exponent no power of a normal number is as large.
    return power if abs(exponent) <= 0.75 else power.clamp_(max=_HUGE)


def _half_log_gaps(l: Tensor) -> Tensor:
    """Return the signed ``t/2`` of every pair; the quotients are even functions of it, so the sign does not matter."""
    half = l.log().mul_(0.5)
    return (half.unsqueeze(-1) - (half if half.ndim == 1 else half.unsqueeze(-2))).add_(_TINY)


def _differences_by_factors(b: Tensor, D: Tensor) -> Tensor:
    """Return ``b_i^2 b_j^2 / D_ij``."""
    squared = b * b
    return (squared.unsqueeze(-1) * squared.unsqueeze(-2)).div_(D)


def _power_factors(l: Tensor, exponent: float) -> tuple[Tensor, Tensor] | None:
    if abs(exponent) > 1:
        return None
    x = _half_log_gaps(l)
    small = (x * exponent).sinh_()
    return l.pow((exponent - 1) / 4), x.sinh_().div_(small)


def _power_first(l: Tensor, exponent: float) -> Tensor:
    factors = _power_factors(l, exponent)
    if factors is not None:
        return _differences_by_factors(*factors)
    t = _half_log_gaps(l).abs_().mul_(-2)
    ratio = (t * abs(exponent)).expm1_().div_(t.expm1_())
    if exponent < 0:  # s^p is the larger of the two powers
        return ratio.mul_(_outer_max(_power(l, exponent), smaller=False)).div_(_outer_max(-l, smaller=True))
    return ratio.mul_(_outer_max(_power(l, exponent - 1), smaller=False))


def _log_factors(l: Tensor) -> tuple[Tensor, Tensor]:
    x = _half_log_gaps(l)
    return l.pow(-0.25), x.sinh().div_(x)


def _log_first(l: Tensor) -> Tensor:
    return _differences_by_factors(*_log_factors(l))


def _exp(l: Tensor) -> Tensor:
    return l.exp().clamp_(max=_HUGE)


def _exp_first(l: Tensor) -> Tensor:
    d = (l.unsqueeze(-1) - l.unsqueeze(-2)).abs_().clamp_(min=_TINY)
    return torch.expm1(-d).div_(d).mul_(_outer_max(-_exp(l), smaller=True))


def _outer_max(values: Tensor, *, smaller: bool) -> Tensor:
    """Return the larger, or the smaller, of ``values_i`` and ``values_j``."""
    return (torch.minimum if smaller else torch.maximum)(values.unsqueeze(-1), values.unsqueeze(-2))


def _power_second(l: Tensor, G: Tensor, H: Tensor, exponent: float) -> Tensor:
    return second_by_taylor(
        l,
        _power_first(l, exponent),
        G,
        H,
        coefficients=power_coefficients(exponent),
        size=lambda x: x.pow(exponent - 2).clamp_(max=_HUGE),
        relative=True,
    )


def _log_second(l: Tensor, G: Tensor, H: Tensor) -> Tensor:
    return second_by_taylor(
        l, _log_first(l), G, H, coefficients=log_coefficients(), size=lambda x: x.pow(-2), relative=True
    )


def _exp_second(l: Tensor, G: Tensor, H: Tensor) -> Tensor:
    return second_by_taylor(l, _exp_first(l), G, H, coefficients=exp_coefficients(), size=_exp, relative=False)


FUNCTIONS = frozen(
    SpectralFunction(
        "sqrt",
        "Square root: the descriptor of covariance pooling, the transport map between Gaussians.",
        "Higham, Functions of Matrices, 2008, chapter 6",
        value=torch.sqrt,
        first=_sqrt_first,
        second=_sqrt_second,
        is_root=True,
    ),
    SpectralFunction(
        "inv_sqrt",
        "Inverse square root: whitening. Null directions map to zero.",
        "Higham, Functions of Matrices, 2008, chapter 6",
        value=lambda l: l.sqrt().reciprocal_(),
        first=_inv_sqrt_first,
        second=_inv_sqrt_second,
        is_root=True,
    ),
    SpectralFunction(
        "power",
        "Any real power: power normalisation between the covariance (1) and its logarithm (0); -1/4 in Shampoo. Null "
        "directions map to zero, whatever the exponent.",
        "Higham, Functions of Matrices, 2008, chapter 7; Li et al., ICCV 2017",
        {"exponent": 0.5},
        signed_options=True,
        value=_power,
        first=_power_first,
        factors=_power_factors,
        second=_power_second,
    ),
    SpectralFunction(
        "log",
        "Logarithm: maps covariances to a flat space, where differences are distances and means are means. Null "
        "directions map to zero, as if their eigenvalue were 1.",
        "Arsigny et al., Log-Euclidean metrics, Magnetic Resonance in Medicine 2006; Higham 2008, chapter 11",
        value=torch.log,
        first=_log_first,
        factors=_log_factors,
        second=_log_second,
    ),
    SpectralFunction(
        "exp",
        "Exponential, the inverse of log: takes any symmetric matrix to a positive definite one.",
        "Higham, Functions of Matrices, 2008, chapter 10",
        value=_exp,
        first=_exp_first,
        second=_exp_second,
        whole_line=True,
    ),
)
"""The spectral functions by name. Write one as ``"log"`` or ``"power(exponent=0.25)"``.

Example:
    >>> list(FUNCTIONS)
    ['sqrt', 'inv_sqrt', 'power', 'log', 'exp']
    >>> FUNCTIONS["exp"].whole_line  # eigenvalues of any sign
    True
"""

_ANY = SpectralFunction(
    "any",
    "A function that the user defines, with its derivative.",
    "Higham, Functions of Matrices, 2008, theorem 3.11",
    value=any_value,
    first=any_first,
    second=any_second,
    whole_line=True,
)
