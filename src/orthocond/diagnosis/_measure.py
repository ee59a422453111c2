r"""What the eigenvalues of a call, and the gradients that pass through it, say about the matrix and about the loss.

All functions take batches flattened to ``(b, ...)`` in float64 and return one number for each matrix. With the
decomposition :math:`A = U \Lambda U^H` and the incoming gradients :math:`\bar\Lambda, \bar U`, the gradient of a
function of symmetric matrices is

.. math:: \bar A = U (\mathrm{diag}(\bar\Lambda) + a_{ij} / (\lambda_j - \lambda_i)) U^H,
          \quad a = (M - M^H) / 2, \quad M = U^H \bar U

and :math:`a_{ij}` is also the derivative of the loss along a rotation of the eigenvectors i and j. Where the two
eigenvalues are equal any rotation gives eigenvectors again, so a loss that is a function of the matrix has
:math:`a_{ij} = 0` there.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Gradient", "Spread", "eigen_gradient", "singular_gradient", "spread"]

_SLACK = 16.0
"""Rounding errors of the incoming gradients, in units of ``sqrt(n)`` times the precision they were computed in."""
_LEAST_TIE = 16.0
"""Units that two eigenvalues of a small matrix may differ by and still be one: each has an error of a few."""
_FOCUS = 10.0
"""How much larger the gradients of the smallest eigenvalues are than those of the others when the loss inverts them."""


@dataclass
class Spread:
    """How the eigenvalues or singular values of each matrix are spread."""

    rank: Tensor
    cond: Tensor
    gap: Tensor
    tied: Tensor
    """Whether two eigenvalues are equal up to rounding."""
    negative: Tensor
    """Whether an eigenvalue is negative, be it by rounding."""
    null: Tensor
    """``(b, n)``: which eigenvalues are zero up to rounding."""
    small: Tensor
    """``(b, n)``: which eigenvalues have a relative error of a percent or more."""


@dataclass
class Gradient:
    """What passed through each matrix in one backward pass."""

    finite_in: Tensor
    """Whether the incoming gradient is finite."""
    finite: Tensor
    """Whether the gradient that came back is finite."""
    amplification: Tensor
    """Norm of what came back over the norm of its well-posed part."""
    noise: Tensor
    """Relative size of the rounding errors that near ties amplify."""
    consistent: Tensor
    """Whether the loss doesn't depend on the choice of eigenvectors of a repeated eigenvalue."""
    focus: Tensor
    """Whether the smallest eigenvalues have much larger gradients than the others: an inverse, a root, a logarithm."""
    tied: Tensor
    """Whether eigenvalues are equal up to rounding."""
    num_used: int
    """How many eigenvectors have a gradient: none of them if only the eigenvalues are used."""
    both_sides: bool = False
    """Whether left and right singular vectors are used."""
    values_used: bool = True
    """Whether the eigenvalues have a gradient."""


def spread(values: Tensor, size: int, unit: float) -> Spread:
    """Return rank, condition number and gap for eigenvalues or singular values ``(b, n)`` of ``size`` rows or columns.

    ``unit`` is the relative precision that the matrix was computed in.
    """
    magnitude = values.abs()
    largest = magnitude.amax(-1)
    null = magnitude <= size * unit * largest.unsqueeze(-1)
    cond = largest / magnitude.amin(-1)
    cond = torch.where(cond.isnan(), torch.inf, cond)  # of zero
    if values.shape[-1] > 1:
        distance = values.sort(-1).values.diff(dim=-1).amin(-1)
        gap = torch.where(distance > 0, distance / largest, distance)
    else:
        gap = torch.full_like(largest, torch.inf)
    small = magnitude <= max(100, 10 * size) * unit * largest.unsqueeze(-1)
    return Spread((~null).sum(-1), cond, gap, gap <= _tie(size, unit), (values < 0).any(-1), null, small)


def eigen_gradient(
    l: Tensor,
    U: Tensor | None,
    to_l: Tensor | None,
    to_U: Tensor | None,
    back: Tensor,
    measured: Spread,
    units: tuple[float, float],
) -> Gradient:
    """Measure a backward pass through eigenvalues ``(b, n)`` and eigenvectors ``(b, n, n)``; ``back`` is what it gave.

    ``units`` are the relative precision of the decomposition and that of the incoming gradients.
    """
    symmetric_back = back if to_U is None else (back + back.mH) / 2
    if (plain := _without_ties(l, [to_l, to_U], symmetric_back, back, measured, units)) is not None:
        return plain
    n = l.shape[-1]
    finite_in = _finite(to_l) & _finite(to_U)
    values_used = to_l is not None
    to_l = torch.zeros_like(l) if to_l is None else _repaired(to_l, finite_in)
    pairs = _pairs(l, _tie(n, units[0]))
    if U is None or to_U is None:  # only eigenvalues: those of a repeated one have to be treated alike
        well_posed, columns, num_used = to_l, to_l, 0
        noise = torch.zeros_like(l[:, 0])
        largest = _rounding(n, units[1]) * to_l.abs().amax(-1)

        def is_inconsistent(k: Tensor, i: Tensor, j: Tensor, relative: Tensor) -> Tensor:
            one, other = to_l[k, i], to_l[k, j]
            return (one - other).abs() > 2 * relative * (one.abs() + other.abs()) + largest[k]
    else:
        to_U = _repaired(to_U, finite_in)
        M = U.mH @ to_U
        a = (M - M.mH).div_(2)
        well_posed = a * pairs.inverse
        well_posed.diagonal(dim1=-2, dim2=-1).add_(to_l)
        columns = torch.linalg.vector_norm(to_U, dim=-2)
        noise = _noise(pairs, columns, well_posed, units[1])
        num_used = _num_used(columns)
        largest = _rounding(n, units[1]) * _norm(M)

        def is_inconsistent(k: Tensor, i: Tensor, j: Tensor, relative: Tensor) -> Tensor:
            bound = relative * (M[k, i, j].abs() + M[k, j, i].abs()) + largest[k]
            return a[k, i, j].abs() > bound

    return Gradient(
        finite_in,
        _finite(back),
        _ratio(_norm(back), _norm(well_posed)),
        noise,
        _consistent(l, pairs, is_inconsistent, smooth=values_used),
        _focus(to_l, measured.small) | _focus(columns, measured.small),
        pairs.num_tied > 0,
        num_used,
        values_used=values_used,
    )


def singular_gradient(
    s: Tensor,
    vectors: tuple[Tensor, Tensor] | None,
    to_s: Tensor | None,
    to_vectors: tuple[Tensor | None, Tensor | None],
    back: Tensor,
    measured: Spread,
    units: tuple[float, float],
) -> Gradient:
    r"""Measure a backward pass through singular values ``(b, k)`` and vectors ``(b, m, k)``, ``(b, n, k)``.

    With the skew parts P, Q of :math:`U^H \bar U, V^H \bar V`, the gradient between i and j is
    :math:`(P + Q)_{ij} / 2 (s_j - s_i) + (P - Q)_{ij} / 2 (s_j + s_i)`: only the first part is affected by equal
    singular values.
    """
    if vectors is None or (to_vectors[0] is None and to_vectors[1] is None):
        return eigen_gradient(s, None, to_s, None, back, measured, units)
    if (plain := _without_ties(s, [to_s, *to_vectors], back, back, measured, units)) is not None:
        return plain
    finite_in = _finite(to_s) & _finite(to_vectors[0]) & _finite(to_vectors[1])
    values_used = to_s is not None
    to_s = torch.zeros_like(s) if to_s is None else _repaired(to_s, finite_in)
    inner, size, outside = [], torch.zeros_like(s[:, 0]), torch.zeros_like(s[:, 0])
    columns = torch.zeros_like(s)
    for X, to_X in zip(vectors, to_vectors, strict=True):
        if to_X is None:
            inner.append(torch.zeros(*s.shape, s.shape[-1], dtype=X.dtype))
            continue
        to_X = _repaired(to_X, finite_in)
        M = X.mH @ to_X
        inner.append(M)
        size = size + _norm(M)
        columns = columns + torch.linalg.vector_norm(to_X, dim=-2)
        if X.shape[-2] > X.shape[-1]:
            # What points out of the span of the singular vectors is divided by the singular value.
            beyond = torch.linalg.vector_norm(to_X - X @ M, dim=-2) * ~measured.null
            outside = outside + (beyond / torch.where(measured.null, 1.0, s)).square().sum(-1)
    P, Q = ((M - M.mH).div_(2) for M in inner)
    n = max(X.shape[-2] for X in vectors)
    pairs = _pairs(s, _tie(n, units[0]))
    total = P + Q
    sums = s.unsqueeze(-1) + s.unsqueeze(-2)
    is_null = measured.null.unsqueeze(-1) & measured.null.unsqueeze(-2) | (sums == 0)
    well_posed = (total * pairs.inverse + (P - Q) * sums.masked_fill_(is_null, torch.inf).reciprocal_()) / 2
    well_posed.diagonal(dim1=-2, dim2=-1).add_(to_s)
    largest = _rounding(n, units[1]) * size

    def is_inconsistent(k: Tensor, i: Tensor, j: Tensor, relative: Tensor) -> Tensor:
        sizes = sum((M[k, i, j].abs() + M[k, j, i].abs() for M in inner), torch.zeros_like(relative))
        return total[k, i, j].abs() > relative * sizes + largest[k]

    return Gradient(
        finite_in,
        _finite(back),
        _ratio(_norm(back), (_norm(well_posed).square() + outside).sqrt()),
        _noise(pairs, columns, well_posed, units[1]),
        _consistent(s, pairs, is_inconsistent, smooth=values_used),
        _focus(to_s, measured.small) | _focus(columns, measured.small),
        pairs.num_tied > 0,
        _num_used(columns),
        both_sides=to_vectors[0] is not None and to_vectors[1] is not None,
        values_used=values_used,
    )


def _without_ties(
    values: Tensor,
    incoming: list[Tensor | None],
    well_posed: Tensor,
    back: Tensor,
    measured: Spread,
    units: tuple[float, float],
) -> Gradient | None:
    """Return the same at less cost if all matrices are far from ties and of full rank, and None if one is not.

    Then what came back is the well-posed gradient, except for its antisymmetric part, which a symmetric matrix doesn't
    have.
    """
    n = max(back.shape[-2:])
    distance = measured.gap * values.abs().amax(-1)
    if bool(measured.small.any()) or bool(measured.tied.any()):
        return None
    size = _norm(well_posed)
    vectors = [_norm(X) for X in incoming[1:] if X is not None]
    noise = _ratio(sum(vectors, torch.zeros_like(size)) * units[1] * math.sqrt(n) / distance, size)
    if not bool((noise < 1e-3).all()) or not all(bool(_finite(X).all()) for X in (back, *incoming)):
        return None
    yes = torch.ones_like(size, dtype=torch.bool)
    return Gradient(yes, yes, _ratio(_norm(back), size), noise, yes, ~yes, ~yes, 0)


class _Pairs(NamedTuple):
    """The distances between the eigenvalues of a matrix, ``(b, n, n)``."""

    inverse: Tensor
    """``1 / (l_j - l_i)``; zero for those that are equal up to rounding, and on the diagonal."""
    distance: Tensor
    """``|l_j - l_i|``"""
    tied: Tensor
    """Which are equal up to rounding."""
    num_tied: Tensor
    """``(b,)``"""


def _pairs(values: Tensor, tolerance: float) -> _Pairs:
    difference = values.unsqueeze(-2) - values.unsqueeze(-1)
    distance = difference.abs()
    near = distance <= tolerance * values.abs().amax(-1)[:, None, None]
    inverse = difference.masked_fill_(near, torch.inf).reciprocal_()  # the diagonal is among them
    near.diagonal(dim1=-2, dim2=-1).fill_(False)
    return _Pairs(inverse, distance, near, near.sum((-2, -1)))


def _consistent(values: Tensor, pairs: _Pairs, is_inconsistent: Callable[..., Tensor], *, smooth: bool) -> Tensor:
    """Return which matrices have no inconsistent pair, asking for those that are tied alone.

    A function of the eigenvalues (``smooth``) differs between two that are not quite equal, by as much as they do
    relative to themselves; without one, nothing may differ.
    """
    consistent = torch.ones_like(pairs.num_tied, dtype=torch.bool)
    if not bool(pairs.num_tied.any()):
        return consistent
    k, i, j = pairs.tied.nonzero(as_tuple=True)
    larger = torch.maximum(values[k, i].abs(), values[k, j].abs())
    relative = pairs.distance[k, i, j] / torch.where(larger > 0, larger, 1.0) * smooth
    consistent[k[is_inconsistent(k, i, j, relative)]] = False
    return consistent


def _noise(pairs: _Pairs, columns: Tensor, well_posed: Tensor, unit: float) -> Tensor:
    """Return how large ``unit * |columns| / distance``, the rounding error of each pair, is against the gradient."""
    errors = columns.unsqueeze(-2) / pairs.distance.masked_fill(pairs.distance == 0, torch.inf)
    return _ratio(unit * _norm(errors), _norm(well_posed))


def _num_used(columns: Tensor) -> int:
    """Return how many eigenvectors have a gradient."""
    return int((columns > 1e-6 * columns.amax(-1, keepdim=True)).sum(-1).max())


def _tie(n: int, unit: float) -> float:
    """Return the distance, relative to the largest, up to which two eigenvalues are equal up to rounding."""
    return max(n, _LEAST_TIE) * unit


def _rounding(n: int, unit: float) -> float:
    return _SLACK * math.sqrt(n) * unit


def _focus(weights: Tensor, small: Tensor) -> Tensor:
    def size(which: Tensor) -> Tensor:
        return (weights.abs().square() * which).sum(-1) / which.sum(-1).clamp(min=1)

    has_small = small.any(-1)
    return has_small & (size(small) > _FOCUS**2 * size(~small)) if bool(has_small.any()) else has_small


def _finite(X: Tensor | None) -> Tensor:
    if X is None:
        return torch.tensor(True)
    sums = X.flatten(1).sum(-1)
    return torch.isfinite(sums) if bool(torch.isfinite(sums).all()) else torch.isfinite(X).flatten(1).all(-1)


def _repaired(X: Tensor, finite: Tensor) -> Tensor:
    return X if bool(finite.all()) else X.nan_to_num(0.0, 0.0, 0.0)


def _norm(X: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(X.flatten(1), dim=-1)
    return norm


def _ratio(back: Tensor, well_posed: Tensor) -> Tensor:
    """Return the ratio of two norms; where nothing is well posed it is infinite, or 0 if nothing came back either."""
    ratio = torch.where(well_posed > 0, back / torch.where(well_posed > 0, well_posed, 1.0), back * torch.inf)
    ratio = torch.where((back == 0) & (well_posed == 0), 0.0, ratio)
    return torch.where(back.isnan(), torch.inf, ratio)
