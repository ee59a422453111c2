"""Singular value decompositions of many 3x3 matrices at a time, by one-sided Jacobi rotations.

LAPACK takes a batch one matrix after the other, and a 3x3 matrix takes it longer to call than to decompose. Here every
operation is done for the whole batch. One-sided Jacobi rotates pairs of columns of ``A`` until they are orthogonal,
``A V = U diag(s)``, and finds also the small singular values to full relative accuracy. The result is verified as those
of LAPACK are (`_verify.py`), in the layout in which it is computed.

Reference: Demmel and Veselic, Jacobi's method is more accurate than QR, SIAM J. Matrix Anal. Appl. 13 (1992).
"""

import torch
from torch import Tensor

from orthocond.linalg._verify import allowed_error, probe

__all__ = ["jacobi_svd", "pays_off"]

_MANY = 64
"""From here on a batch is faster together than one by one."""
_IN_CACHE = 16384
"""As many at a time: their columns, of 18 numbers each, stay in the cache."""
_MAX_SWEEPS = 12


def pays_off(A: Tensor) -> bool:
    """Return whether these are many 3x3 matrices on the CPU; GPUs have solvers for batches of their own."""
    return A.shape[-2:] == (3, 3) and A.device.type == "cpu" and A.numel() >= _MANY * 9


def jacobi_svd(A: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return rotations ``U``, values ``p``, rotations ``V`` with ``A = U diag(p) V^T``, and which of them are wrong.

    ``p`` ``(..., 3)`` has ``p_1 >= p_2 >= |p_3|``, up to rounding. The last tensor ``(b,)`` marks the matrices of the
    flattened batch whose decomposition is wrong; it is None if no one is. For finite 3x3 matrices in float64 whose
    largest entries are about 1.
    """
    parts = [_decomposed(part) for part in A.reshape(-1, 3, 3).split(_IN_CACHE)]
    U, p, V, right = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
    return U.reshape(A.shape), p.reshape(A.shape[:-1]), V.reshape(A.shape), None if bool(right.all()) else ~right


def _decomposed(batch: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # Columns first and the batch last: (column, row, batch).
    A = batch.permute(2, 1, 0).contiguous()
    U, p, V = _by_rotations(A)
    return U.permute(2, 1, 0), p.T, V.permute(2, 1, 0), _is_right(A, U, p, V)


def _by_rotations(A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # The rows of A above those of V.
    columns = list(torch.cat([A, torch.eye(3, dtype=A.dtype).unsqueeze(-1).expand_as(A)], 1))
    for _ in range(_MAX_SWEEPS):  # four to six are enough
        were_orthogonal = [_rotated(columns, i, j) for i, j in ((0, 1), (0, 2), (1, 2))]
        if all(were_orthogonal):
            break
    stacked = torch.stack(columns)
    order = stacked[:, :3].square().sum(1).argsort(0, descending=True)
    stacked = stacked.gather(0, order.unsqueeze(1).expand_as(stacked))
    left, (v1, v2, v3) = stacked[:, :3], stacked[:, 3:]
    u1 = _unit(left[0])
    u2 = _unit(_without(u1, _unit(_without(u1, left[1]))))  # twice: where it is rounding noise, it may be u1's
    is_missing = u2.square().sum(0) < 0.5
    if bool(is_missing.any()):  # a matrix of rank 1, or 0
        u1 = torch.where(u1.square().sum(0) < 0.5, v1, u1)
        u2 = torch.where(is_missing, _perpendicular(u1), u2)
    # The third is the one that makes a rotation; its singular value gets the sign, by that of V as well.
    U, V = (torch.stack([*pair, torch.linalg.cross(*pair, dim=0)]) for pair in ((u1, u2), (v1, v2)))
    p = (U * left).sum(1)
    p[2] *= (V[2] * v3).sum(0)
    return U, p, V


def _is_right(A: Tensor, U: Tensor, p: Tensor, V: Tensor) -> Tensor:
    """Return which decompositions ``(b,)`` are right, by their products with a vector ``x``.

    ``A x = U diag(p) V^T x``; ``U U^T x = x`` and ``V V^T x = x``; and as ``U`` and ``V`` are rotations, the third
    column is the cross product of the others: ``x . u_3 = x . (u_1 x u_2)``.
    """
    x = probe(3, A.dtype, A.device).x
    bound, tiny = allowed_error(3, A.dtype)
    column, allowed = x.unsqueeze(-1), bound * p[0] + tiny
    along_U, along_V = x @ U, x @ V
    residual = _combined(U, p * along_V) - _combined(A, column)
    right = (residual.abs().amax(0) < allowed) & (p[1] <= p[0] + allowed) & (p[2].abs() <= p[1] + allowed)
    for W, y in ((U, along_U), (V, along_V)):
        right &= (_combined(W, y) - column).abs().amax(0) <= bound
        right &= ((torch.linalg.cross(W[0], W[1], dim=0) * column).sum(0) - y[2]).abs() <= bound
    return right


def _combined(columns: Tensor, factors: Tensor) -> Tensor:
    """Return the sums ``(row, b)`` of the columns ``(column, row, b)`` times factors ``(column, b)``."""
    first, second, third = (columns[i] * factors[i] for i in range(3))
    return first.add_(second).add_(third)


def _rotated(columns: list[Tensor], i: int, j: int) -> bool:
    """Rotate two columns so that their upper halves are orthogonal; return whether all of them were already."""
    left, right = columns[i], columns[j]
    norm_left, norm_right = left[:3].square().sum(0), right[:3].square().sum(0)
    product = (left[:3] * right[:3]).sum(0)
    # The smaller root of t^2 + 2 z t - 1 = 0, z = (norm_right - norm_left) / (2 product), without dividing by zero.
    difference = norm_right - norm_left
    denominator = difference.abs() + (difference.square() + (2 * product).square()).sqrt()
    tangent = 2 * product / torch.where(denominator > 0, denominator, 1.0)
    tangent = torch.where(difference < 0, -tangent, tangent)
    cosine = (1 + tangent.square()).rsqrt()
    sine = cosine * tangent
    columns[i], columns[j] = cosine * left - sine * right, sine * left + cosine * right
    # Squares of what is below 1e-154 vanish on both sides.
    return bool((product.square() <= (4 * torch.finfo(product.dtype).eps) ** 2 * norm_left * norm_right).all())


def _unit(x: Tensor) -> Tensor:
    norm = x.square().sum(0).sqrt()
    return x / torch.where(norm > 0, norm, 1.0)


def _without(unit: Tensor, x: Tensor) -> Tensor:
    return x - (unit * x).sum(0) * unit


def _perpendicular(x: Tensor) -> Tensor:
    """Return a unit vector perpendicular to ``x``, made from the axis that is the farthest from it."""
    axis = torch.nn.functional.one_hot(x.abs().argmin(0), 3).to(x).T
    return _unit(torch.linalg.cross(x, axis, dim=0))
