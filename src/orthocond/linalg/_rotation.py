"""The nearest rotation: the polar factor with determinant one, with derivatives of every order.

With ``R`` the rotation and ``P = R^T A``, which is symmetric, a change ``dA`` turns the rotation by ``dR = R W``, where
``W`` is antisymmetric and solves

    W P + P W = R^T dA - dA^T R

In the eigenbasis of ``P``, whose eigenvalues ``p`` are the singular values of ``A``, the smallest with a sign, that is
a division by ``p_i + p_j``. Equal singular values are nothing special. The rotation is not unique, and has no
derivative, where the smallest two sum to zero.

Reference: Levinson et al., An analysis of SVD for deep rotation estimation, NeurIPS 2020; Higham, Functions of Matrices
(SIAM 2008), section 8.1; for the equation of the derivative: Kenney and Laub, SIAM J. Matrix Anal. Appl. 12 (1991).
"""

from typing import Any, Literal, overload

import torch
from torch import Tensor

from orthocond._core.applying import applied, with_forward_mode
from orthocond._core.overriding import overridable
from orthocond._core.precision import at_least_float32, autocast_off, lift, narrow, widen
from orthocond.errors import check_matrix
from orthocond.linalg._decompose import check_finite, svd
from orthocond.linalg._eigen import Context, batched, symmetric
from orthocond.linalg._jacobi import jacobi_svd, pays_off
from orthocond.linalg._polar import nearest_orthogonal, power_of_two_scale

__all__ = ["nearest_rotation"]


@overload
def nearest_rotation(A: Tensor, *, return_margin: Literal[False] = False) -> Tensor: ...


@overload
def nearest_rotation(A: Tensor, *, return_margin: Literal[True]) -> tuple[Tensor, Tensor]: ...


@overridable
def nearest_rotation(A: Tensor, *, return_margin: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    r"""Return the rotation matrices that are nearest to ``A``.

    .. math:: R = U \,\mathrm{diag}(1, \dots, 1, \det U V^T)\, V^T, \quad A = U \Sigma V^T

    which minimises :math:`\|A - R\|_F` over :math:`R^T R = I`, :math:`\det R = 1`. A rectangular matrix has no
    determinant: there the result has orthonormal rows or columns (the fewer), as from `nearest_orthogonal`.

    *Gradient:* :math:`R V (K \circ (Q - Q^T)) V^T` with :math:`Q = V^T R^T G V`, :math:`K_{ij} = 1 / (p_i + p_j)` and
    the singular values :math:`p`, of which the smallest has the sign of :math:`\det A`. It is exact at equal singular
    values and at singular matrices of rank :math:`d - 1`, and differentiable again, any number of times. The rotation
    jumps where the two smallest of them sum to zero. There the derivative does not exist; pairs with
    :math:`p_i + p_j \le d\,u\,p_1` (``u`` is the unit roundoff of the dtype of ``A``) get none, so the gradient stays
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
        A reflection becomes a rotation, the direction with the smallest singular value is the one that turns:

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
        R, p, _, _ = applied(_Rotation, widen(lift(A, scale)), rtol)
        R = narrow(R, A)
    return (R, narrow(_margin(p), A)) if return_margin else R


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


def signed_svd(A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return rotated ``U``, signed singular values ``p`` and ``V`` with ``A = U diag(p) V^T`` and ``det U V^T = 1``.

    For square matrices in float64. The singular values descend; the last one has the sign of the determinant.
    """
    rotated = jacobi_svd(A) if pays_off(A) else None
    if rotated is not None:
        return rotated
    U, p, Vh = svd(A)
    is_rotation = torch.linalg.det(U @ Vh) > 0
    sign = torch.ones_like(p)
    sign[..., -1] = torch.where(is_rotation, 1.0, -1.0)
    return U * sign.unsqueeze(-2), p * sign, Vh.mT


def _rotation(A: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if A.is_meta:
        return torch.empty_like(A), A[..., 0].clone(), torch.empty_like(A), torch.empty_like(A)
    check_finite(A)
    U, p, V = signed_svd(A)
    is_zero = (p[..., :1] == 0).unsqueeze(-1)  # every rotation is as near: the identity, then
    U = torch.where(is_zero, V, U)
    return U @ V.mT, p, U, V


@torch.library.custom_op("orthocond::rotation", mutates_args=())
def _rotation_op(A: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same, opaque to `torch.compile`: the retries of the decomposition depend on the data."""
    R, p, U, V = _rotation(A)
    return R.contiguous(), p.contiguous(), U.contiguous(), V.contiguous()


@_rotation_op.register_fake
def _(A: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return A.new_empty(A.shape), A.new_empty(A.shape[:-1]), A.new_empty(A.shape), A.new_empty(A.shape)


def _inverse_sums(p: Tensor, rtol: float) -> Tensor:
    """Return ``1 / (p_i + p_j)``, and zero where that is not above ``rtol p_1``."""
    sums = p.unsqueeze(-1) + p.unsqueeze(-2)
    return torch.where(sums > rtol * p[..., :1].unsqueeze(-1), sums, torch.inf).reciprocal_()


@with_forward_mode
class _Rotation(torch.autograd.Function):
    """``A -> R``, and with it ``p``, ``U = R V`` and ``V``, which have no derivative."""

    @staticmethod
    def forward(A: Tensor, rtol: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if torch.compiler.is_compiling():
            R, p, U, V = _rotation_op(A)
            return R, p, U, V
        return _rotation(A)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Tensor, float], output: tuple[Tensor, ...]) -> None:
        A, ctx.rtol = inputs
        R, p, U, V = output
        ctx.mark_non_differentiable(p, U, V)
        ctx.save_for_backward(A, R, p, U, V)
        ctx.save_for_forward(A, R, p, U, V)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Context, G: Tensor | None, *_: Any) -> tuple[Tensor | None, None]:
        if G is None:
            return None, None
        A, R, p, U, V = ctx.saved_tensors
        with autocast_off(A.device):
            return _turned(A, R, p, U, V, G, ctx.rtol), None

    @staticmethod
    def tangent(ctx: Context, saved: tuple[Tensor, ...], direction: Tensor, _: None) -> tuple[Tensor, None, None, None]:
        A, R, p, U, V = saved
        return _turned(A, R, p, U, V, direction, ctx.rtol), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], A: Tensor, rtol: float) -> tuple[tuple[Tensor, ...], Any]:
        return applied(_Rotation, *batched(info.batch_size, in_dims[:1], (A,)), rtol), (0, 0, 0, 0)


def _turned(A: Tensor, R: Tensor, p: Tensor, U: Tensor, V: Tensor, G: Tensor, rtol: float) -> Tensor:
    """Return ``R W`` with ``W P + P W = R^T G - G^T R``: the derivative in the direction ``G``, and its own adjoint."""
    if not torch.is_grad_enabled():
        Q = U.mT @ G @ V
        return U @ ((Q - Q.mT) * _inverse_sums(p, rtol)) @ V.mT
    turn = R.mT @ G
    W: Tensor = applied(_Lyapunov, symmetric(R.mT @ A), turn - turn.mT, p, V, rtol)
    return R @ W


@with_forward_mode
class _Lyapunov(torch.autograd.Function):
    """``(P, C) -> X`` with ``X P + P X = C``, by the eigenvalues ``p`` and eigenvectors ``V`` of the symmetric ``P``.

    ``C`` and ``X`` are antisymmetric, which is made sure of: on the diagonal, where the smallest ``p`` may be tiny,
    rounding noise would be divided by it.
    """

    @staticmethod
    def forward(P: Tensor, C: Tensor, p: Tensor, V: Tensor, rtol: float) -> Tensor:
        Q = V.mT @ C @ V
        return V @ ((Q - Q.mT) * (_inverse_sums(p, rtol) / 2)) @ V.mT

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: Tensor) -> None:
        P, _, p, V, ctx.rtol = inputs
        ctx.save_for_backward(P, p, V, output)
        ctx.save_for_forward(P, p, V, output)

    @staticmethod
    def backward(ctx: Context, H: Tensor) -> tuple[Tensor | None, ...]:
        P, p, V, X = ctx.saved_tensors
        with autocast_off(P.device):
            Y = applied(_Lyapunov, P, H, p, V, ctx.rtol)
            return -(Y @ X.mT + X.mT @ Y), Y, None, None, None

    @staticmethod
    def tangent(ctx: Context, saved: tuple[Tensor, ...], dP: Tensor | None, dC: Tensor | None, *_: None) -> Tensor:
        P, p, V, X = saved
        change = torch.zeros_like(X) if dC is None else dC
        if dP is not None:
            change = change - dP @ X - X @ dP
        dX: Tensor = applied(_Lyapunov, P, change, p, V, ctx.rtol)
        return dX

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        return applied(_Lyapunov, *batched(info.batch_size, in_dims[:4], inputs[:4]), inputs[4]), 0
