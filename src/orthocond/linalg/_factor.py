"""Orthogonal factors of a matrix, with derivatives of every order: nearest rotations, and signs of symmetric matrices.

For an orthogonal ``R`` with symmetric ``P = R^T A`` a change ``dA`` turns the factor by ``dR = R W``, where ``W`` is
antisymmetric and solves

    W P + P W = R^T dA - dA^T R

In the eigenbasis of ``P``, with eigenvalues ``p``, that is a division by ``p_i + p_j``, so equal eigenvalues are
nothing special. Two factors are of this kind:

- The nearest rotation: ``p`` are the singular values of ``A``, the smallest with the sign of ``det A``. There is no
  derivative where the smallest two sum to zero.
- The sign of ``A - m I``, for symmetric ``A`` and ``m`` halfway between two eigenvalues: ``p = abs(l - m)``. Between
  eigenvalues on different sides of ``m`` the sum is ``l_i - l_j``; between those on one side the right-hand side is
  zero. So the sign, and with it the projector ``(I + sign) / 2``, sees the gap at ``m`` alone.

Reference: Kenney and Laub, Polar decomposition and matrix sign function condition estimates, SIAM J. Sci. Stat. Comput.
12 (1991); Higham, Functions of Matrices (SIAM 2008), chapters 5 and 8.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from orthocond._core.applying import applied, with_forward_mode
from orthocond._core.precision import autocast_off
from orthocond.linalg._counts import count_failure
from orthocond.linalg._decompose import check_finite, decompose, svd
from orthocond.linalg._eigen import Context, batched, symmetric
from orthocond.linalg._jacobi import jacobi_svd, pays_off

__all__ = ["Factor", "rotation_factor", "sign_factor"]


class Factor(NamedTuple):
    """An orthogonal factor ``R`` of matrices ``A`` ``(..., d, d)`` in float64, and what its derivatives are made of."""

    R: Tensor
    """``(..., d, d)``; the only one with a derivative."""
    p: Tensor
    """The eigenvalues ``(..., d)`` of ``R^T (A - shift I)``."""
    U: Tensor
    """``R V``."""
    V: Tensor
    """The eigenvectors of ``R^T (A - shift I)``."""
    shift: Tensor
    """``(..., 1, 1)``"""
    floor: Tensor
    """``(..., 1, 1)``: pairs with ``p_i + p_j`` at or below it have no derivative."""


def rotation_factor(A: Tensor, rtol: float) -> Factor:
    """Return the nearest rotation to square matrices; ``p`` descends, and its floor is ``rtol p_1``."""
    return Factor(*applied(_OrthogonalFactor, A, 0, rtol))


def sign_factor(A: Tensor, k: int, rtol: float) -> Factor:
    """Return the matrix that is 1 on the ``k`` largest eigenvectors of symmetric ``A`` and -1 on the others, 0 < k < n.

    The floor is ``rtol`` times the largest absolute eigenvalue.
    """
    return Factor(*applied(_OrthogonalFactor, A, k, rtol))


def _factor(A: Tensor, k: int, rtol: float) -> Factor:
    if A.is_meta:
        return Factor(*_empty(A))
    check_finite(A)
    if k:
        eigenvalues, V = decompose(A, "eigh")
        shift = (eigenvalues[..., -k] + eigenvalues[..., -k - 1]) / 2
        sign = torch.ones_like(eigenvalues)
        sign[..., :-k] = -1
        p = sign * (eigenvalues - shift.unsqueeze(-1))
        largest = torch.maximum(eigenvalues[..., -1].abs(), eigenvalues[..., 0].abs())
        U = V * sign.unsqueeze(-2)
    else:
        U, p, V = _signed_svd(A)
        largest = p[..., 0]
        shift = torch.zeros_like(largest)
        U = torch.where((largest == 0)[..., None, None], V, U)  # of zero every rotation is as near: the identity, then
    return Factor(U @ V.mH, p, U, V, shift[..., None, None], rtol * largest[..., None, None])


def _signed_svd(A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``U``, ``p`` and ``V`` with ``A = U diag(p) V^T``, ``det U V^T = 1``, and ``p`` descending in size."""
    if pays_off(A):
        U, p, V, wrong = jacobi_svd(A)
        if wrong is not None:  # these are left to LAPACK
            count_failure("svd", int(wrong.sum()))
            wrong = wrong.view(A.shape[:-2])
            U[wrong], p[wrong], V[wrong] = _signed_svd_by_lapack(A[wrong])
        return U, p, V
    return _signed_svd_by_lapack(A)


def _signed_svd_by_lapack(A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    U, p, Vh = svd(A)
    sign = torch.ones_like(p)
    sign[..., -1] = torch.where(torch.linalg.det(U @ Vh) > 0, 1.0, -1.0)
    return U * sign.unsqueeze(-2), p * sign, Vh.mT


def _empty(A: Tensor) -> tuple[Tensor, ...]:
    matrices, values, numbers = A.shape, A.shape[:-1], (*A.shape[:-2], 1, 1)
    return tuple(A.new_empty(shape) for shape in (matrices, values, matrices, matrices, numbers, numbers))


@torch.library.custom_op("orthocond::orthogonal_factor", mutates_args=())
def _factor_op(A: Tensor, k: int, rtol: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The same, opaque to `torch.compile`: the retries of the decomposition depend on the data."""
    R, p, U, V, shift, floor = (part.contiguous() for part in _factor(A, k, rtol))
    return R, p, U, V, shift, floor


@_factor_op.register_fake
def _(A: Tensor, k: int, rtol: float) -> tuple[Tensor, ...]:
    return _empty(A)


@with_forward_mode
class _OrthogonalFactor(torch.autograd.Function):
    """``A -> Factor``: the rotation for ``k = 0``, else the sign."""

    @staticmethod
    def forward(A: Tensor, k: int, rtol: float) -> tuple[Tensor, ...]:
        if torch.compiler.is_compiling():
            return tuple(_factor_op(A, k, rtol))
        return tuple(_factor(A, k, rtol))

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(inputs[0], *output)
        ctx.save_for_forward(inputs[0], *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Context, G: Tensor | None, *_: Any) -> tuple[Tensor | None, None, None]:
        if G is None:
            return None, None, None
        A, *factor = ctx.saved_tensors
        with autocast_off(A.device):
            return _turned(A, Factor(*factor), G), None, None

    @staticmethod
    def tangent(ctx: Context, saved: tuple[Tensor, ...], direction: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        A, *factor = saved
        return _turned(A, Factor(*factor), direction), None, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], A: Tensor, *options: Any) -> tuple[tuple[Tensor, ...], Any]:
        output = applied(_OrthogonalFactor, *batched(info.batch_size, in_dims[:1], (A,)), *options)
        return output, (0,) * len(output)


def _turned(A: Tensor, factor: Factor, G: Tensor) -> Tensor:
    """Return ``R W`` with ``W P + P W = R^T G - G^T R``: the derivative in the direction ``G``, and its own adjoint."""
    R, p, U, V, shift, floor = factor
    if not torch.is_grad_enabled():
        Q = U.mH @ G @ V
        return U @ ((Q - Q.mH) * _inverse_sums(p, floor)) @ V.mH
    P = symmetric(R.mH @ (A - shift * torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)))
    turn = R.mH @ G
    W: Tensor = applied(_Lyapunov, P, turn - turn.mH, p, V, floor)
    return R @ W


def _inverse_sums(p: Tensor, floor: Tensor) -> Tensor:
    """Return ``1 / (p_i + p_j)``, and zero where the sum is not above the floor."""
    sums = p.unsqueeze(-1) + p.unsqueeze(-2)
    return torch.where(sums > floor, sums, torch.inf).reciprocal_()


@with_forward_mode
class _Lyapunov(torch.autograd.Function):
    """``(P, C) -> X`` with ``X P + P X = C``, by the eigenvalues ``p`` and eigenvectors ``V`` of the symmetric ``P``.

    ``C`` and ``X`` are antisymmetric, which is made sure of: on the diagonal, where the smallest ``p`` may be tiny,
    rounding noise would be divided by it.
    """

    @staticmethod
    def forward(P: Tensor, C: Tensor, p: Tensor, V: Tensor, floor: Tensor) -> Tensor:
        Q = V.mH @ C @ V
        return V @ ((Q - Q.mH) * (_inverse_sums(p, floor) / 2)) @ V.mH

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        P, _, p, V, floor = inputs
        ctx.save_for_backward(P, p, V, floor, output)
        ctx.save_for_forward(P, p, V, floor, output)

    @staticmethod
    def backward(ctx: Context, H: Tensor) -> tuple[Tensor | None, ...]:
        P, p, V, floor, X = ctx.saved_tensors
        with autocast_off(P.device):
            Y = applied(_Lyapunov, P, H, p, V, floor)
            return -(Y @ X.mH + X.mH @ Y), Y, None, None, None

    @staticmethod
    def tangent(ctx: Context, saved: tuple[Tensor, ...], dP: Tensor | None, dC: Tensor | None, *_: None) -> Tensor:
        P, p, V, floor, X = saved
        change = torch.zeros_like(X) if dC is None else dC
        if dP is not None:
            change = change - dP @ X - X @ dP
        dX: Tensor = applied(_Lyapunov, P, change, p, V, floor)
        return dX

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        return applied(_Lyapunov, *batched(info.batch_size, in_dims, inputs)), 0
