"""The roots of covariances with a gap, by matrix products alone, certified.

Where the eigenvalues of a covariance are either large (at least ``kept`` times the largest) or negligible (at most
``dropped`` times the largest), the projector ``Pi`` on the large ones is a sign function that converges in a few
products, and on its range so does the root:

    s >= largest eigenvalue, from the trace of P^8
    Pi = (I + sign(P/s - m I)) / 2, with m in the gap
    A = P Pi + (tr(P Pi) / tr Pi) (I - Pi)          the null space filled, so that A is well conditioned
    S = Pi A^(-1/2),    Q = P S                      by the coupled Newton-Schulz iteration

with the optimal polynomials (`_schedules.py`) for these two bounds. Three residuals certify the result: ``Pi^2 - Pi``,
``S P S - Pi``, and ``P - P Pi``, whose fourth power has a norm that bounds every eigenvalue which was dropped. So a
certified result is that of a decomposition with ``rtol = dropped``. A matrix without the certificate is decomposed,
which is counted, but not as a failure.

The derivative is the exact one (`_differences.py`) without eigenvalues. Between kept directions it solves a Lyapunov
equation. Between a kept and a dropped one it is ``f(l_i) / (l_i - l_j)``, the projector's part: with the dropped part
``N = P - P Pi`` a series in ``S^2 .. N``, of which each term is smaller by ``dropped / kept``. It is symmetric, so
forward and reverse mode share it, and no step of an iteration is kept for it. Second derivatives are by eigenvalues.
"""

from typing import Any

import torch
from torch import Tensor

from orthocond._core.applying import applied, with_forward_mode
from orthocond._core.precision import autocast_off, lift, narrow
from orthocond.errors import ArgumentError, check_choice
from orthocond.linalg._counts import count_fallbacks
from orthocond.linalg._decompose import check_finite
from orthocond.linalg._eigen import Context, batched, eigen_derivatives, eigen_functions, symmetric
from orthocond.linalg._functions import INV_SQRT, SQRT, Chosen
from orthocond.linalg._gap import Bounds, Certified, certified_roots, derivative
from orthocond.linalg._half import PRECISIONS
from orthocond.linalg._iterative import is_above
from orthocond.linalg._solver import Solver

__all__ = ["PRODUCTS_SOLVERS"]


def products_roots(
    A: Tensor,
    functions: tuple[Chosen, ...],
    *,
    eps: float,
    floor: Tensor | None,
    kept: float,
    dropped: float,
    precision: str,
    **_: object,
) -> tuple[tuple[Tensor, ...], None]:
    """Return ``(A + eps I)^(1/2)`` or ``(A + eps I)^(-1/2)``; a matrix below its ``floor`` counts as zero.

    With ``eps`` nothing is dropped, and all of ``A + eps I`` has to lie within ``kept`` of its largest eigenvalue.
    """
    if not 0 < dropped < kept < 1:
        raise ArgumentError(
            f"solver='products' needs 0 < dropped < kept < 1, got kept={kept} and dropped={dropped}; "
            "pass e.g. products(kept=0.0625, dropped=2e-4)."
        )
    check_choice(precision, PRECISIONS, "precision", "solver='products'")
    if not A.numel():
        return tuple(A.clone() for _ in functions), None
    is_signal = None if floor is None else is_above(A, floor, eps)
    if is_signal is not None:
        A = torch.where(is_signal, A, torch.eye(A.shape[-1], dtype=A.dtype, device=A.device))
    with autocast_off(A.device):
        Q, S, *_ = applied(_Products, lift(A), kept, dropped, eps, precision)
        results = [narrow(Q if function == SQRT else S, A) for function in functions]
    return tuple(result if is_signal is None else result * is_signal for result in results), None


PRODUCTS_SOLVERS = (
    Solver(
        "products",
        "Matrix products alone, for covariances with a gap, as the treatment gauge makes them: eigenvalues of at least "
        "kept, or at most dropped, times the largest; the latter are the null space. Certified by residuals to 1e-5 "
        "(float32); a matrix without the certificate goes to eigh, which linalg.solver_fallbacks() counts. With "
        "precision=float16 or bfloat16 the iterations take half products with float32 sums, three or six for each one, "
        "as accurate as in float32.",
        "Amsel et al., arXiv 2505.16932; Higham, Functions of Matrices, 2008, chapters 5 and 6",
        {"kept": 0.0625, "dropped": 2e-4, "precision": "float32"},
        has_eigenvalues=False,
        solve=products_roots,
    ),
)


@with_forward_mode
class _Products(torch.autograd.Function):
    """``A -> Q, S``, with the projector, the scale and the certificate behind them."""

    @staticmethod
    def forward(A: Tensor, kept: float, dropped: float, eps: float, precision: str) -> tuple[Tensor, ...]:
        B = symmetric(A).reshape(-1, *A.shape[-2:])
        found = certified_roots(B, Bounds.of(A, kept, dropped, precision), eps)
        Q, S, holds = found.Q * found.size, found.S / found.size, found.holds
        if torch.compiler.is_compiling():  # without a branch: what is not certified is not a number
            passed = torch.where(holds, 0.0, torch.nan).to(found.size)[:, None, None]
            Q, S = Q + passed, S + passed
        elif not A.is_meta:
            holds = holds.cpu()  # the one decision that the host waits for
            if not holds.all():
                check_finite(A)  # with its place in the whole batch
                Q, S = _decomposed(B, Q, S, holds, dropped, eps)
        batch = A.shape[:-2]
        tensors = (Q, S, found.projector, found.size)
        return *(each.reshape(*batch, *each.shape[-2:]) for each in tensors), holds.reshape(batch)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        A, *ctx.options = inputs
        ctx.mark_non_differentiable(*output[2:])
        ctx.save_for_backward(A, *output)
        ctx.save_for_forward(A, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Context, GQ: Tensor | None, GS: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if GQ is None and GS is None:
            return (None,) * 5
        A, *saved = ctx.saved_tensors
        with autocast_off(A.device):
            return applied(_Slope, A, GQ, GS, *saved, *ctx.options), *((None,) * 4)

    @staticmethod
    def tangent(ctx: Context, saved: tuple[Tensor, ...], direction: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        A, *rest = saved
        with autocast_off(A.device):
            along_Q, along_S = (
                applied(_Slope, A, *(direction if k == which else None for k in (0, 1)), *rest, *ctx.options)
                for which in (0, 1)
            )
            return along_Q, along_S, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        output = applied(_Products, *batched(info.batch_size, in_dims[:1], inputs[:1]), *inputs[1:])
        return output, (0,) * len(output)


def _decomposed(B: Tensor, Q: Tensor, S: Tensor, holds: Tensor, dropped: float, eps: float) -> tuple[Tensor, Tensor]:
    """Return the roots with those that are not certified replaced by the ones from eigenvalues, and count these."""
    failed = (~holds).nonzero().flatten().to(B.device)
    roots, _ = _by_eigenvalues(B[failed], dropped, eps)
    count_fallbacks("products", len(failed))
    Q, S = (whole.index_copy(0, failed, root) for whole, root in zip((Q, S), roots, strict=True))
    return Q, S


def _by_eigenvalues(B: Tensor, dropped: float, eps: float) -> tuple[tuple[Tensor, ...], Tensor]:
    rtol = None if eps else dropped
    stored = torch.bfloat16  # B may have been lifted from it
    return eigen_functions(B, (SQRT, INV_SQRT), method="eigh", gradient="exact", eps=eps, rtol=rtol, stored=stored)


@with_forward_mode
class _Slope(torch.autograd.Function):
    """``(A, GQ, GS) -> DQ(A)[GQ] + DS(A)[GS]``: symmetric, so the derivative and its adjoint."""

    @staticmethod
    def forward(
        A: Tensor,
        GQ: Tensor | None,
        GS: Tensor | None,
        Q: Tensor,
        S: Tensor,
        projector: Tensor,
        size: Tensor,
        holds: Tensor,
        kept: float,
        dropped: float,
        eps: float,
        precision: str,
    ) -> Tensor:
        flat = [None if each is None else each.reshape(-1, *each.shape[-2:]) for each in (A, GQ, GS)]
        B, *grads = (None if each is None else symmetric(each) for each in flat)
        assert B is not None
        Q, S, projector, size = (each.reshape(-1, *each.shape[-2:]) for each in (Q, S, projector, size))
        roots = Certified(Q, S, projector, size, holds.flatten())
        E = derivative(B, grads[0], grads[1], roots, Bounds.of(A, kept, dropped, precision), eps)
        if not torch.compiler.is_compiling() and not A.is_meta and not holds.all():
            failed = (~holds.flatten()).nonzero().flatten().to(B.device)
            with torch.enable_grad():
                leaf = B[failed].requires_grad_()
                by_eigenvalues, _ = _by_eigenvalues(leaf, dropped, eps)
                pairs = [(root, G[failed]) for root, G in zip(by_eigenvalues, grads, strict=True) if G is not None]
                (exact,) = torch.autograd.grad([root for root, _ in pairs], leaf, [G for _, G in pairs])
            E = E.index_copy(0, failed, exact)
        return E.reshape(A.shape)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: Tensor) -> None:
        A, GQ, GS, *_, ctx.dropped, ctx.eps, _ = inputs
        ctx.save_for_backward(A, GQ, GS)
        ctx.save_for_forward(A, GQ, GS)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Context, H: Tensor | None) -> tuple[Any, ...]:
        if H is None:
            return (None,) * 12
        A, *grads = ctx.saved_tensors
        to_A = torch.zeros_like(A)
        to_grads: list[Tensor | None] = []
        with autocast_off(A.device):
            for function, G in zip((SQRT, INV_SQRT), grads, strict=True):
                if G is None:
                    to_grads.append(None)
                    continue
                _, along, second = _second(ctx, A, function, G, H)
                to_A = to_A + narrow(second, A)
                to_grads.append(narrow(along, G))
        return to_A, *to_grads, *((None,) * 9)

    @staticmethod
    def tangent(ctx: Context, saved: tuple[Any, ...], along_A: Tensor | None, *along: Tensor | None) -> Tensor:
        A, *grads = saved
        total = torch.zeros_like(A)
        with autocast_off(A.device):
            for function, G, along_G in zip((SQRT, INV_SQRT), grads, along[:2], strict=True):
                if G is not None and along_A is not None:
                    total = total + narrow(_second(ctx, A, function, G, along_A)[2], A)
                if along_G is not None:
                    total = total + narrow(_second(ctx, A, function, along_G, along_G)[0], A)
        return total

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        return applied(_Slope, *batched(info.batch_size, in_dims[:8], inputs[:8]), *inputs[8:]), 0


def _second(ctx: Context, A: Tensor, function: Chosen, G: Tensor, H: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the derivatives of first and second order by eigenvalues, since they are rarely needed."""
    rtol = None if ctx.eps else ctx.dropped
    return eigen_derivatives(A, function, G, H, eps=ctx.eps, rtol=rtol, floor=None)
