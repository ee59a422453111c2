"""The roots by matrix products alone, and the gradient that goes with them.

Neither solver computes eigenvalues, so neither can drop a null space, and the number of steps limits the accuracy of
both. The gradient does not unroll the steps: with ``Q = A^(1/2)``, ``dQ`` solves the Lyapunov equation ``Q dQ + dQ Q =
dA``, whose solution is differentiable by another one, and so to every order.

Reference: Song, Sebe, Wang, Fast differentiable matrix square root and inverse square root, TPAMI 2022.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from orthocond._core.applying import applied, with_forward_mode
from orthocond._core.precision import autocast_off, finite, lift, narrow, real_dtype, widen
from orthocond.linalg._counts import count_failure
from orthocond.linalg._decompose import check_finite, decompose
from orthocond.linalg._differences import split
from orthocond.linalg._eigen import Context, batched, function_of, symmetric
from orthocond.linalg._functions import INV_SQRT, SQRT, Chosen
from orthocond.linalg._schedules import quintics
from orthocond.linalg._solver import Solver

__all__ = ["ITERATIVE_SOLVERS", "is_above"]

Pair = Callable[..., tuple[Tensor, Tensor]]


def iterative_roots(
    A: Tensor,
    functions: tuple[Chosen, ...],
    *,
    solver: str,
    gradient: str,
    eps: float,
    rtol: float | None,
    floor: Tensor | None,
    iterations: float,
    degree: float = 0,
    bound: float = 1.0,
) -> tuple[tuple[Tensor, ...], None]:
    """Return ``(A + eps I)^(1/2)`` or ``(A + eps I)^(-1/2)`` by one of `PAIRS`; a zero matrix has zero roots.

    A matrix below its ``floor`` counts as zero. ``gradient`` and ``rtol`` are for solvers by eigenvalues.
    """
    if bound < 1:  # as many steps of the gradient's iteration, which is the classical one, as the bound asks for
        iterations = math.ceil(0.5 * math.log(1 / bound) / math.log(1.5)) + 6
    is_signal = None if floor is None else is_above(A, floor, eps)
    if is_signal is not None:
        A = torch.where(is_signal, A, torch.eye(A.shape[-1], dtype=A.dtype, device=A.device))
    with autocast_off(A.device):
        Q, S = applied(_IterativeRoots, lift(A), solver, int(iterations), int(degree), bound, eps)
        results = [narrow(Q if function == SQRT else S, A) for function in functions]
    return tuple(result if is_signal is None else result * is_signal for result in results), None


def is_above(A: Tensor, floor: Tensor, eps: float) -> Tensor:
    """Return ``(..., 1, 1)`` whether matrices exceed their noise, or ``eps`` does; NaN is not noise."""
    norm = A.detach().abs().to(floor).square().sum((-2, -1)).sqrt()  # plain operations, also where it is compiled
    return (~(norm <= floor) | (floor <= eps)).unsqueeze(-1).unsqueeze(-1)


def newton_schulz_pair(B: Tensor, iterations: int, degree: int) -> tuple[Tensor, Tensor]:
    """Return the root and the inverse root of ``B`` with norm at most 1 by the coupled Newton-Schulz iteration.

    ``Y <- Y (3I - Z Y) / 2``, ``Z <- (3I - Z Y) Z / 2`` from ``Y = B``, ``Z = I``. A small eigenvalue grows by 2.25
    in each step.

    Reference: Higham, Functions of Matrices, 2008, eq. 6.35.
    """
    identity = _identity_like(B)
    Y, Z = B, identity
    for _ in range(iterations):
        T = 1.5 * identity - 0.5 * (Z @ Y)
        Y, Z = Y @ T, T @ Z
    return Y, Z


def optimal_pair(B: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """Return the same by the optimal polynomials for eigenvalues of at least ``bound``, with as few as possible."""
    identity = _identity_like(B)
    Y, Z = B, identity
    for number, (a, b, c) in enumerate(quintics(bound**0.5, 8 * torch.finfo(B.dtype).eps)):
        W = Z @ Y if number else B
        T = a * identity + b * W + c * (W @ W)
        Y, Z = Y @ T, T @ Z
    return Y, Z


def pade_pair(B: Tensor, iterations: int, degree: int) -> tuple[Tensor, Tensor]:
    """Return the root and the inverse root of ``B`` with norm at most 1 by a diagonal Pade approximant.

    ``sqrt(1 - z) = 1 - sum_j a_j z / (1 - b_j z)`` with ``a_j = 2 sin^2(t_j) / (2m + 1)``, ``b_j = cos^2(t_j)``,
    ``t_j = j pi / (2m + 1)`` for the degree ``m``, at ``z = I - B``. For an eigenvalue ``x`` of ``B`` the relative
    error of the root is ``2 t / (1 - t)``, with ``t = ((1 - sqrt x) / (1 + sqrt x))^(2m + 1)``. The iterations are the
    gradient's alone.

    Reference: Higham, Functions of Matrices, 2008, section 6.7; in a network: Song, Sebe, Wang, ICLR 2022.
    """
    identity = _identity_like(B)
    Z = identity - B
    Y = identity.clone()
    for j in range(1, degree + 1):
        angle = j * math.pi / (2 * degree + 1)
        a, b = 2 * math.sin(angle) ** 2 / (2 * degree + 1), math.cos(angle) ** 2
        Y = Y - a * torch.linalg.solve_ex(identity - b * Z, Z).result
    Y = symmetric(Y)
    return Y, torch.linalg.inv_ex(Y).inverse


PAIRS: Mapping[str, Pair] = {"newton_schulz": newton_schulz_pair, "pade": pade_pair}
"""By name of the solver: from matrices of norm at most 1 to both roots."""


ITERATIVE_SOLVERS = (
    Solver(
        "newton_schulz",
        "Coupled Newton-Schulz iteration in the input's precision. Converges while the norm over the smallest "
        "eigenvalue is below about 2.25^iterations / 30; more iterations amplify the rounding noise of a singular "
        "float32 matrix (2.25^15 * 6e-8 = 0.01). With a bound below 1, eigenvalues of at least bound times the norm "
        "are assumed. Then the polynomials are the optimal ones for it, as few as it allows, and the relative error in "
        "float32 is at most 1e-5 + 3e-7/bound; a larger residual is a failure, and goes to eigh.",
        "Higham, Functions of Matrices, 2008, eq. 6.35; Li et al., CVPR 2018; the paper's baseline. With a bound: "
        "Amsel et al., arXiv 2505.16932",
        {"iterations": 15, "bound": 1.0},
        has_eigenvalues=False,
        solve=functools.partial(iterative_roots, solver="newton_schulz"),
    ),
    Solver(
        "pade",
        "Diagonal Pade approximant of sqrt(1 - z). For x = eigenvalue/norm the relative error of the root is "
        "2t/(1 - t), t = ((1 - sqrt x)/(1 + sqrt x))^(2 degree + 1): with degree 5 it is 2e-3 at x = 0.1, but 8 at "
        "x = 1e-4. The iterations are those of the gradient.",
        "Song, Sebe, Wang, Fast differentiable matrix square root, ICLR 2022",
        {"degree": 5, "iterations": 15},
        has_eigenvalues=False,
        solve=functools.partial(iterative_roots, solver="pade"),
    ),
)


@with_forward_mode
class _IterativeRoots(torch.autograd.Function):
    """``A -> B^(1/2), B^(-1/2)`` with ``B = (A + A^T)/2 + eps I``, scaled to norm 1 inside."""

    @staticmethod
    def forward(
        A: Tensor, solver: str, iterations: int, degree: int, bound: float, eps: float
    ) -> tuple[Tensor, Tensor]:
        B = symmetric(A) + eps * _identity_like(A)
        if torch.compiler.is_compiling():
            Q, S = _iterate_op(B, solver, iterations, degree, bound)
            return Q, S
        return _iterate(B, solver, iterations, degree, bound)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.iterations = inputs[2]
        ctx.save_for_backward(*output)
        ctx.save_for_forward(*output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Context, GQ: Tensor | None, GS: Tensor | None) -> tuple[Tensor | None, ...]:
        if GQ is None and GS is None:
            return (None,) * 6
        Q, S = ctx.saved_tensors
        with autocast_off(Q.device):
            G = torch.zeros_like(Q)
            # Divided by the largest of S, for which the product below could overflow on the way.
            largest = S.detach().abs().amax((-2, -1), keepdim=True).clamp(min=1.0) if S.numel() else _norm(S)
            if GQ is not None:
                G = G + symmetric(GQ) / largest / largest
            if GS is not None:
                G = G - (S / largest) @ symmetric(GS) @ (S / largest)
            X = finite(applied(_Lyapunov, Q, G, ctx.iterations) * largest)
            return _on_support(Q, S, finite(X * largest)), None, None, None, None, None

    @staticmethod
    def tangent(ctx: Context, saved: tuple[Tensor, Tensor], direction: Tensor, *_: None) -> tuple[Tensor, Tensor]:
        Q, S = saved
        with autocast_off(Q.device):
            along_Q = _on_support(Q, S, applied(_Lyapunov, Q, symmetric(direction), ctx.iterations))
            return along_Q, -S @ along_Q @ S

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        return applied(_IterativeRoots, *batched(info.batch_size, in_dims[:1], inputs[:1]), *inputs[1:]), (0, 0)


@with_forward_mode
class _Lyapunov(torch.autograd.Function):
    """``(Q, G) -> X`` with ``Q X + X Q = G``, by the Newton-Schulz iteration for the sign of a block matrix."""

    @staticmethod
    def forward(Q: Tensor, G: Tensor, iterations: int) -> Tensor:
        norm, size = _norm(Q), G.abs().amax((-2, -1), keepdim=True) if G.numel() else _norm(G)
        norm, size = torch.where(norm > 0, norm, 1.0), torch.where(size > 0, size, 1.0)
        B, C = Q / norm, G / size
        for _ in range(iterations):
            squared = B @ B
            C = 0.5 * (B @ C @ B - squared @ C - C @ squared) + 1.5 * C
            B = 1.5 * B - 0.5 * (squared @ B)
        return finite(C / 2 * finite(size / norm))

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: Tensor) -> None:
        Q, _, ctx.iterations = inputs
        ctx.save_for_backward(Q, output)
        ctx.save_for_forward(Q, output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Context, H: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        if H is None:
            return None, None, None
        Q, X = ctx.saved_tensors
        with autocast_off(Q.device):
            Y = applied(_Lyapunov, Q, H, ctx.iterations)
            return -(Y @ X.mH + X.mH @ Y), Y, None

    @staticmethod
    def tangent(
        ctx: Context, saved: tuple[Tensor, Tensor], along_Q: Tensor | None, along_G: Tensor | None, _: None
    ) -> Tensor:
        Q, X = saved
        with autocast_off(Q.device):
            right = torch.zeros_like(X) if along_G is None else along_G
            if along_Q is not None:
                right = right - along_Q @ X - X @ along_Q
            found: Tensor = applied(_Lyapunov, Q, right, ctx.iterations)
            return found

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        return applied(_Lyapunov, *batched(info.batch_size, in_dims[:2], inputs[:2]), *inputs[2:]), 0


def _iterate(B: Tensor, solver: str, iterations: int, degree: int, bound: float) -> tuple[Tensor, Tensor]:
    # A power of four brings any size to where its norm and roots can be computed; its own root is exact.
    root_scale = _root_scale(B)
    scaled = B * root_scale * root_scale
    norm = _norm(scaled)
    nonzero = norm > 0
    norm = torch.where(nonzero, norm, 1.0)
    unit = scaled / norm
    Y, Z = optimal_pair(unit, bound) if bound < 1 else PAIRS[solver](unit, iterations, degree)
    Q, S = Y * (nonzero * norm.sqrt()) / root_scale, Z * (nonzero * norm.rsqrt()) * root_scale
    # The root of a matrix of norm 1 has the norm n^(1/4) at most; a comparison with NaN is false.
    converged = torch.linalg.matrix_norm(Y) <= 1.1 * B.shape[-1] ** 0.25
    if bound < 1:
        eps = torch.finfo(B.dtype).eps
        residual = torch.linalg.matrix_norm(Z @ unit @ Z - _identity_like(B)) / max(B.shape[-1], 1) ** 0.5
        converged = (converged & (residual <= 80 * eps + 2 * eps / bound)) | ~nonzero[..., 0, 0]
    if B.is_meta or converged.all():
        return Q, S
    return _rescued(B, Q, S, ~converged, solver)


def _root_scale(B: Tensor) -> Tensor:
    """Return powers of two ``(..., 1, 1)`` whose squares bring the largest entry of each matrix to [1/4, 1]."""
    if not B.numel():
        return B.new_ones((*B.shape[:-2], 1, 1), dtype=real_dtype(B.dtype))
    largest = B.abs().amax((-2, -1), keepdim=True)
    return torch.exp2(-(torch.where(largest > 0, largest, 1.0).log2() / 2).ceil())


@torch.library.custom_op("orthocond::iterate", mutates_args=())
def _iterate_op(B: Tensor, solver: str, iterations: int, degree: int, bound: float) -> tuple[Tensor, Tensor]:
    """The same, opaque to `torch.compile`: whether it converged depends on the data."""
    Q, S = _iterate(B, solver, iterations, degree, bound)
    return Q.contiguous(), S.contiguous()


@_iterate_op.register_fake
def _(B: Tensor, solver: str, iterations: int, degree: int, bound: float) -> tuple[Tensor, Tensor]:
    return B.new_empty(B.shape), B.new_empty(B.shape)


def _rescued(B: Tensor, Q: Tensor, S: Tensor, diverged: Tensor, solver: str) -> tuple[Tensor, Tensor]:
    """Return the roots with those that diverged replaced by the ones from eigenvalues, and count them.

    An eigenvalue far enough below zero, as rounding in a half type can make one, lets the iteration diverge.
    """
    check_finite(B)
    eigenvalues, U = decompose(widen(B), "eigh")
    parts = split(eigenvalues, 0.0, B.shape[-1] * torch.finfo(B.dtype).eps)
    count_failure(solver, int(diverged.sum()))
    chosen = diverged.unsqueeze(-1).unsqueeze(-1)
    Q, S = (
        torch.where(chosen, narrow(function_of(U, parts, function), B), root)
        for function, root in zip((SQRT, INV_SQRT), (Q, S), strict=True)
    )
    return Q, S


def _on_support(Q: Tensor, S: Tensor, X: Tensor) -> Tensor:
    """Return ``X`` without what lies in the null space of ``Q``, and finite.

    ``I - Q S`` is zero where the roots are inverses, and the projector on the null space of a matrix that has none.
    """
    null = _identity_like(Q) - Q @ S
    return finite(X - null @ X @ null.mH)


def _identity_like(B: Tensor) -> Tensor:
    return torch.eye(B.shape[-1], dtype=B.dtype, device=B.device).expand_as(B)


def _norm(B: Tensor) -> Tensor:
    """Return the Frobenius norm of each matrix, ``(..., 1, 1)``, without overflow on the way."""
    if not B.numel():
        return B.new_ones((*B.shape[:-2], 1, 1), dtype=real_dtype(B.dtype))
    largest = B.abs().amax((-2, -1), keepdim=True)
    scaled = B / torch.where(largest > 0, largest, 1.0)
    norm: Tensor = largest * torch.linalg.matrix_norm(scaled, keepdim=True)
    return norm
