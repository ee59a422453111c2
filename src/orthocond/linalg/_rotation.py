"""The nearest rotation, and the rigid or similarity transform between two sets of points."""

from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from orthocond._core.overriding import overridable
from orthocond._core.precision import at_least_float32, autocast_off, lift, narrow, widen
from orthocond.errors import ArgumentError, check_broadcast, check_floating, check_matrix
from orthocond.linalg._decompose import svd
from orthocond.linalg._factor import rotation_factor
from orthocond.linalg._polar import nearest_orthogonal, power_of_two_scale

__all__ = ["Alignment", "nearest_rotation", "procrustes"]


@overload
def nearest_rotation(A: Tensor, *, return_margin: Literal[False] = False) -> Tensor: ...


@overload
def nearest_rotation(A: Tensor, *, return_margin: Literal[True]) -> tuple[Tensor, Tensor]: ...


@overridable
def nearest_rotation(A: Tensor, *, return_margin: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    r"""Return the rotation matrices that are nearest to ``A``.

    .. math:: R = U \,\mathrm{diag}(1, \dots, 1, \det U V^T)\, V^T, \quad A = U \Sigma V^T

    which minimises :math:`\|A - R\|_F` over :math:`R^T R = I`, :math:`\det R = 1`. A rectangular matrix has no
    determinant: there the result has orthonormal rows or columns, whichever are fewer, as from `nearest_orthogonal`.

    *Gradient:* :math:`R V (K \circ (Q - Q^T)) V^T` with :math:`Q = V^T R^T G V`, :math:`K_{ij} = 1 / (p_i + p_j)` and
    the singular values :math:`p`, of which the smallest has the sign of :math:`\det A`. It is exact at equal singular
    values and at singular matrices of rank :math:`d - 1`, and differentiable again, any number of times. The rotation
    jumps where the two smallest singular values sum to zero. There the derivative does not exist; pairs with
    :math:`p_i + p_j \le d\,u\,p_1` (``u`` is the unit roundoff of the dtype of ``A``) get no gradient, so it stays
    bounded by :math:`\|G\| / (d\,u\,p_1)`.

    Args:
        A: matrices ``(..., d, d)``, or rectangular ones ``(..., m, n)``.
        return_margin: also return how far each matrix is from one without a unique nearest rotation.

    Returns:
        The rotations, in shape, dtype and on the device of ``A``; the zero matrix gives the identity. With
        ``return_margin`` also the margins ``(...)``, detached: ``(p_{d-1} + p_d) / p_1``, between 0 (not unique) and 2;
        for a rectangular matrix the smallest over the largest singular value.

    Raises:
        ArgumentError: ``A`` has fewer than two dimensions.
        DtypeError: ``A`` is not real and floating.
        NonFiniteError: a matrix holds NaN or infinity.
        SolverError: no decomposition converged, retries included.

    Reference:
        Schonemann, Psychometrika 1966; Umeyama, TPAMI 1991.

    Example:
        A reflection becomes a rotation; the direction with the smallest singular value is flipped:

        >>> nearest_rotation(torch.diag(torch.tensor([3.0, 2.0, -1.0])))
        tensor([[1., 0., 0.],
                [0., 1., 0.],
                [0., 0., 1.]])
        >>> R, margin = nearest_rotation(torch.diag(torch.tensor([2.0, 1.0, -1.0])), return_margin=True)
        >>> margin  # here, turning the second or the third direction is equally near
        tensor(0.)
    """
    check_matrix(A, "nearest_rotation")
    if A.shape[-1] != A.shape[-2] or not A.numel():
        R = nearest_orthogonal(A, solver="svd")
        return (R, _rectangular_margin(A)) if return_margin else R
    with autocast_off(A.device):
        scale = power_of_two_scale(A)
        rtol = A.shape[-1] * torch.finfo(at_least_float32(A.dtype)).eps
        factor = rotation_factor(widen(lift(A, scale)), rtol)
        R = narrow(factor.R, A)
    return (R, narrow(_margin(factor.p), A)) if return_margin else R


def _margin(p: Tensor) -> Tensor:
    if p.shape[-1] == 1:
        return torch.full_like(p[..., 0], 2.0)  # the only rotation of a line is the identity
    largest = p[..., 0]
    return (p[..., -2] + p[..., -1]) / torch.where(largest > 0, largest, 1.0)


@torch.no_grad()
def _rectangular_margin(A: Tensor) -> Tensor:
    if not A.numel():
        return A.new_zeros(A.shape[:-2])
    wide = widen(A if A.shape[-2] <= A.shape[-1] else A.mT)
    s = svd(wide)[1]
    return narrow(s[..., -1] / torch.where(s[..., 0] > 0, s[..., 0], 1.0), A)


class Alignment(NamedTuple):
    """The result of `procrustes`: ``Y ~ scale X R^T + t``.

    Example:
        >>> Alignment._fields
        ('rotation', 'scale', 'translation', 'residual')
    """

    rotation: Tensor
    """``R`` ``(..., d, d)``, with determinant 1."""
    scale: Tensor
    """``(...)``; 1 where it was not asked for."""
    translation: Tensor
    """``t`` ``(..., d)``; 0 where it was not asked for."""
    residual: Tensor
    """The weighted mean of the squared distances that are left, ``(...)``."""


@overridable
def procrustes(
    X: Tensor, Y: Tensor, weights: Tensor | None = None, *, scale: bool = False, translation: bool = True
) -> Alignment:
    r"""Return the rotation, scale and translation that bring one set of points nearest to another.

    .. math:: \min_{R,\, s,\, t} \; \sum_i w_i \, \| y_i - (s R x_i + t) \|^2, \quad R^T R = I, \; \det R = 1

    *Gradient:* exact, with respect to the points and the weights, and differentiable again; that of the rotation is the
    one of `nearest_rotation` at :math:`\sum_i w_i (y_i - \bar y)(x_i - \bar x)^T`, so it is bounded where the points
    don't determine the rotation.

    Args:
        X: points ``(..., n, d)``, a point in each row.
        Y: the points ``(..., n, d)`` that they correspond to.
        weights: ``(..., n)``, not negative; None for equal weights. Their sum does not matter.
        scale: whether to fit a scale, for a similarity transform; otherwise it is 1.
        translation: whether to fit a translation; otherwise it is 0.

    Returns:
        A named tuple of rotation, scale, translation and residual, in the dtype of the points and computed in float64.
        Degenerate points have a result, too: where all weights are zero, or all points of ``X`` or of ``Y`` coincide,
        the rotation is the identity and the scale 1; for points on a line it is one of the rotations that align the
        lines.

    Raises:
        ArgumentError: shapes that do not fit.
        DtypeError: points that are not real and floating.
        NonFiniteError: points or weights hold NaN or infinity.

    Reference:
        Kabsch, Acta Cryst. A 1976; Umeyama, Least-squares estimation of transformation parameters between two point
        patterns, TPAMI 1991.

    Example:
        >>> X = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]])
        >>> R = torch.tensor([[0.0, -1.0], [1.0, 0.0]])
        >>> found = procrustes(X, 3 * X @ R.T + 1, scale=True)
        >>> found.scale, found.translation
        (tensor(3.), tensor([1., 1.]))
        >>> torch.allclose(found.rotation, R, atol=1e-6)
        True
    """
    for points in (X, Y):
        check_matrix(points, "procrustes")
    if X.shape[-2:] != Y.shape[-2:] or not X.shape[-1]:
        raise ArgumentError(
            f"procrustes expected two sets of corresponding points (..., n, d), got {tuple(X.shape)} and "
            f"{tuple(Y.shape)}; pass as many points, of the same dimension, in both."
        )
    if weights is not None:
        check_floating(weights, "procrustes")
        if weights.ndim < 1 or weights.shape[-1] != X.shape[-2]:
            raise ArgumentError(
                f"procrustes expected weights (..., n) for {X.shape[-2]} points, got {tuple(weights.shape)}."
            )
    check_broadcast("procrustes", X.shape[:-2], Y.shape[:-2], torch.Size(()) if weights is None else weights.shape[:-1])
    like = X if X.dtype == torch.promote_types(X.dtype, Y.dtype) else Y
    with autocast_off(X.device):
        wide_weights = None if weights is None else _wide(weights)
        wide = _aligned(
            _wide(X),
            _wide(Y),
            wide_weights,
            scale,
            translation,
            X.shape[-1] * torch.finfo(at_least_float32(like.dtype)).eps,
        )
        return Alignment(*(narrow(part, like) for part in wide))


def _wide(X: Tensor) -> Tensor:
    """Return the points in float64; a gradient too large for their dtype becomes its largest finite value."""
    return widen(lift(X, X.new_ones(())))


def _aligned(X: Tensor, Y: Tensor, weights: Tensor | None, scale: bool, translation: bool, rtol: float) -> Alignment:
    shares = torch.ones_like(X[..., 0]) if weights is None else weights
    total = shares.sum(-1, keepdim=True)
    shares = (shares / torch.where(total > 0, total, 1.0)).unsqueeze(-1)
    if translation:
        x_mean, y_mean = ((shares * points).sum(-2, keepdim=True) for points in (X, Y))
    else:
        x_mean, y_mean = (torch.zeros_like(points[..., :1, :]) for points in (X, Y))
    x, y = X - x_mean, Y - y_mean
    cross = y.mT @ (shares * x)
    size = power_of_two_scale(cross)
    R = rotation_factor(cross * size, rtol).R
    if scale:
        spread = (shares * x.square()).sum((-2, -1))
        overlap = (R * cross).sum((-2, -1)).clamp(min=0)
        # Where the points are one, every scale is as good.
        is_spread = (spread > 0) & (overlap > 0)
        s = torch.where(is_spread, overlap / torch.where(is_spread, spread, 1.0), 1.0)
    else:
        s = torch.ones(cross.shape[:-2], dtype=X.dtype, device=X.device)
    turned = s[..., None, None] * x @ R.mT
    residual = (shares * (y - turned).square()).sum((-2, -1))
    t = (y_mean - s[..., None, None] * x_mean @ R.mT).squeeze(-2)
    return Alignment(R, s, t.expand(*cross.shape[:-1]), residual)
