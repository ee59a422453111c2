"""Second divided differences of any function, and both divided differences of a user-defined function.

``f[i,j,k]`` does not depend on the order of its points, so of the three differences one may divide by the largest,
``w``. What is lost by cancellation is then about ``u |f'| / w``, with the unit roundoff ``u``, and only three points
that are all close lose much. There the Taylor series about the middle of them converges quickly: with the complete
homogeneous symmetric polynomials ``h_k`` of the three distances from the middle,

    f[i,j,k] = sum_k  f^(k+2)(x) / (k+2)!  h_k

For powers and the logarithm the distance that counts is relative to ``x``. The switch at ``w = 0.1 x`` makes both
errors small: there the quotient loses a factor of 20, and the terms of the series, each 0.053 times the one before, are
below ``u`` after 16. For the exponential the distance is absolute, and the switch at ``w = 1`` loses a factor of 2.

A user's function has a scale that nobody knows. So both ways are computed, and each pair of points takes the one with
the smaller error bound: for the quotient ``u (|f_i| + |f_j|) / |l_i - l_j|``; for the mean of ``f'`` between the
points, which ``f[i,j]`` is, by Gauss quadrature with four nodes, the difference from three nodes. For ``f`` with a
singularity at distance ``x`` the two bounds meet at about ``0.014 x``, where both are ``70 u``. ``f[i,j,k]`` is done
likewise, from ``f''`` over a triangle (Hermite and Genocchi).

Reference: C. de Boor, Divided differences (Surveys in Approximation Theory 2005); N. J. Higham, Functions of Matrices
(SIAM 2008), appendix B.16.
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from orthocond.errors import ArgumentError, GradientError

__all__ = [
    "any_first",
    "any_second",
    "any_value",
    "exp_coefficients",
    "log_coefficients",
    "power_coefficients",
    "second_by_taylor",
]

Elementwise = Callable[[Tensor], Tensor]

_UNIT = torch.finfo(torch.float64).eps / 2
_TERMS = 16
_NEAR_RELATIVE, _NEAR_ABSOLUTE = 0.1, 1.0
_CHUNK = 2**21
"""Triples of points that are looked at together."""

# Gauss and Legendre's nodes and weights on [0, 1], three and four of them.
_THREE = tuple((0.5 + s * math.sqrt(0.15), w) for s, w in ((-1, 5 / 18), (0, 8 / 18), (1, 5 / 18)))
_FOUR = tuple(
    (0.5 + s * 0.5 * math.sqrt(3 / 7 + inner * 2 / 7 * math.sqrt(6 / 5)), (18 - inner * math.sqrt(30)) / 72)
    for inner in (-1, 1)
    for s in (-1, 1)
)


def power_coefficients(exponent: float) -> list[float]:
    """Return ``f^(m) x^(m-p) / m!`` of ``x^p`` for ``m = 2, 3, ...``: the binomial coefficients."""
    coefficients = [1.0]
    for m in range(1, _TERMS + 2):
        coefficients.append(coefficients[-1] * (exponent - m + 1) / m)
    return coefficients[2:]


def log_coefficients() -> list[float]:
    """Return ``f^(m) x^m / m!`` of ``log x`` for ``m = 2, 3, ...``."""
    return [(-1) ** (m - 1) / m for m in range(2, _TERMS + 2)]


def exp_coefficients() -> list[float]:
    """Return ``1 / m!`` for ``m = 2, 3, ...``."""
    return [1 / math.factorial(m) for m in range(2, _TERMS + 2)]


def second_by_taylor(
    l: Tensor, F: Tensor, G: Tensor, H: Tensor, *, coefficients: list[float], size: Elementwise, relative: bool
) -> Tensor:
    """Return ``W_ik = sum_j f[i,j,k] H_ij G_jk``.

    Args:
        l: points ``(..., n)``.
        F: their first divided differences ``(..., n, n)``.
        G: matrices ``(..., n, n)``.
        H: likewise.
        coefficients: of the series, for ``m = 2, 3, ...``.
        size: what the series is to be multiplied with, from the middle of the points.
        relative: whether the distances are relative to the middle.
    """
    W = torch.zeros_like(H)
    for (a, b, c), columns in _triples(l):
        quotient, width = _quotient(a, b, c, F, columns)
        smallest, largest = _extremes(a, b, c)
        near = width <= (_NEAR_RELATIVE * largest if relative else _NEAR_ABSOLUTE)
        middle = (0.5 * (smallest + largest))[near]
        distances = [(point.expand_as(near)[near] - middle) / (middle if relative else 1.0) for point in (a, b, c)]
        quotient[near] = _series(coefficients, *distances) * size(middle)
        W = W + _contracted(quotient, G, H, columns)
    return W


def _series(coefficients: list[float], x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """Return ``sum_k coefficients_k h_k(x, y, z)``."""
    one = two = three = torch.ones_like(x)
    total = coefficients[0] * three
    for coefficient in coefficients[1:]:  # h_k(x), h_k(x, y) and h_k(x, y, z), each from the one before
        one = one * x
        two = two * y + one
        three = three * z + two
        total = total + coefficient * three
    return total


def any_value(l: Tensor, function: Elementwise, derivative: Elementwise) -> Tensor:
    """Return the values of a user's function ``(..., n)``, checked."""
    for name, each in (("function", function), ("derivative", derivative)):
        shape = each(l).shape
        if shape != l.shape:
            raise ArgumentError(
                f"matrix_functionh expected {name} to keep the shape {tuple(l.shape)} of the eigenvalues, got "
                f"{tuple(shape)}; it must act element by element."
            )
    values = function(l)
    if not torch.compiler.is_compiling() and not values.is_meta and not values.isfinite().all():
        where = l[~values.isfinite()][0].item()
        raise ArgumentError(
            f"matrix_functionh got a function without a finite value at the eigenvalue {where:.3g}; "
            "drop small eigenvalues by rtol, or raise them by eps."
        )
    return values


def any_first(l: Tensor, function: Elementwise, derivative: Elementwise) -> Tensor:
    """Return the first divided differences ``(..., n, n)`` of a function with a known derivative."""
    return _first_and_bound(l, function, derivative)[0]


def _first_and_bound(l: Tensor, function: Elementwise, derivative: Elementwise) -> tuple[Tensor, Tensor]:
    f = function(l)
    gaps = l.unsqueeze(-1) - l.unsqueeze(-2)
    safe = torch.where(gaps == 0, 1.0, gaps)
    quotient = (f.unsqueeze(-1) - f.unsqueeze(-2)) / safe
    noise = torch.where(gaps == 0, torch.inf, _UNIT * (f.abs().unsqueeze(-1) + f.abs().unsqueeze(-2)) / safe.abs())
    coarse, fine = (
        sum((weight * derivative(l.unsqueeze(-2) + node * gaps) for node, weight in rule), torch.zeros_like(gaps))
        for rule in (_THREE, _FOUR)
    )
    bound = (fine - coarse).abs() + _UNIT * fine.abs()
    F = torch.where(bound <= noise, fine, quotient)
    return (F + F.mT) / 2, torch.minimum(bound, noise)


def any_second(l: Tensor, G: Tensor, H: Tensor, function: Elementwise, derivative: Elementwise) -> Tensor:
    """Return ``W_ik = sum_j f[i,j,k] H_ij G_jk`` of a function whose derivative autograd can differentiate."""
    F, bound = _first_and_bound(l, function, derivative)
    W = torch.zeros_like(H)
    for (a, b, c), columns in _triples(l):
        quotient, width = _quotient(a, b, c, F, columns)
        # The bounds of the two differences that were subtracted, here with the third as well.
        noise = sum(_pairs(bound + _UNIT * F.abs(), columns), torch.zeros(())) / width
        coarse, fine = (_over_the_triangle(derivative, a, b, c, rule) for rule in (_THREE, _FOUR))
        second = torch.where((fine - coarse).abs() <= noise.nan_to_num(torch.inf), fine, quotient)
        W = W + _contracted(second, G, H, columns)
    return W


def _over_the_triangle(
    derivative: Elementwise, a: Tensor, b: Tensor, c: Tensor, rule: tuple[tuple[float, float], ...]
) -> Tensor:
    """Return ``int_0^1 s ds int_0^1 dt f''(a + s (b - a) + s t (c - b))``."""
    total = torch.zeros(())
    for s, outer in rule:
        for t, inner in rule:
            total = total + outer * inner * s * _slope(derivative, a + s * (b - a) + s * t * (c - b))
    return total


def _slope(derivative: Elementwise, x: Tensor) -> Tensor:
    """Return the derivative of an elementwise function, by autograd."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        values = derivative(leaf)
        if not values.requires_grad:
            if values.unique().numel() <= 1:  # a constant, which autograd does not see depend on anything
                return torch.zeros_like(x)
            raise GradientError(
                "the second derivative of matrix_functionh needs the derivative of `derivative`, and autograd finds "
                "none; write `derivative` with torch operations, without detach()."
            )
        (slope,) = torch.autograd.grad(values.sum(), leaf)
    return slope


def _triples(l: Tensor) -> Iterator[tuple[tuple[Tensor, Tensor, Tensor], slice]]:
    """Yield the points of index ``i``, ``j`` and ``k`` ``(..., n, c, n)``, for a few ``j`` at a time."""
    n = l.shape[-1]
    step = max(1, _CHUNK // max(1, l.numel() * n))
    for start in range(0, n, step):
        columns = slice(start, start + step)
        yield (l[..., :, None, None], l[..., None, columns, None], l[..., None, None, :]), columns


def _pairs(F: Tensor, columns: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``F_ij``, ``F_jk`` and ``F_ik``."""
    return F[..., :, columns, None], F[..., None, columns, :], F[..., :, None, :]


def _quotient(a: Tensor, b: Tensor, c: Tensor, F: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Return ``f[a,b,c]`` by the quotient with the largest denominator, and that denominator's size."""
    ab, bc, ac = _pairs(F, columns)
    first, second, third = (a - c).abs(), (a - b).abs(), (b - c).abs()
    width = torch.maximum(torch.maximum(first, second), third)
    by_ac = (ab - bc) / torch.where(a == c, 1.0, a - c)
    by_ab = (ac - bc) / torch.where(a == b, 1.0, a - b)
    by_bc = (ab - ac) / torch.where(b == c, 1.0, b - c)
    return torch.where(width == first, by_ac, torch.where(width == second, by_ab, by_bc)), width


def _extremes(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    return torch.minimum(torch.minimum(a, b), c), torch.maximum(torch.maximum(a, b), c)


def _contracted(second: Tensor, G: Tensor, H: Tensor, columns: slice) -> Tensor:
    """Return ``sum_j f[i,j,k] H_ij G_jk`` over some ``j``."""
    return (second * H[..., :, columns, None] * G[..., None, columns, :]).sum(-2)
