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

import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from orthocond._core.applying import applied, with_forward_mode
from orthocond._core.precision import autocast_off, finite, lift, narrow
from orthocond.errors import ArgumentError
from orthocond.linalg._counts import count_fallbacks
from orthocond.linalg._decompose import check_finite
from orthocond.linalg._eigen import Context, batched, eigen_derivatives, eigen_functions, symmetric
from orthocond.linalg._functions import INV_SQRT, SQRT, Chosen
from orthocond.linalg._iterative import is_above
from orthocond.linalg._schedules import quintics
from orthocond.linalg._solver import Solver

__all__ = ["PRODUCTS_SOLVERS", "Bounds", "condition_on_support"]

_TOLERANCE = 80.0
"""For the residuals, relative to the norm of the projector, in units of the machine's: 1e-5 in float32."""
_ERROR = 8.0
"""What the schedules aim at, in the same units: 1e-6 in float32."""


def products_roots(
    A: Tensor,
    functions: tuple[Chosen, ...],
    *,
    eps: float,
    floor: Tensor | None,
    kept: float,
    dropped: float,
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
    if not A.numel():
        return tuple(A.clone() for _ in functions), None
    is_signal = None if floor is None else is_above(A, floor, eps)
    if is_signal is not None:
        A = torch.where(is_signal, A, torch.eye(A.shape[-1], dtype=A.dtype, device=A.device))
    with autocast_off(A.device):
        Q, S, *_ = applied(_Products, lift(A), kept, dropped, eps)
        results = [narrow(Q if function == SQRT else S, A) for function in functions]
    return tuple(result if is_signal is None else result * is_signal for result in results), None


PRODUCTS_SOLVERS = (
    Solver(
        "products",
        "Matrix products alone, for covariances with a gap, as the treatment gauge makes them: eigenvalues of at least "
        "kept, or at most dropped, times the largest; the latter are the null space. Certified by residuals to 1e-5 "
        "(float32); a matrix without the certificate goes to eigh, which linalg.solver_fallbacks() counts.",
        "Amsel et al., arXiv 2505.16932; Higham, Functions of Matrices, 2008, chapters 5 and 6",
        {"kept": 0.0625, "dropped": 2e-4},
        has_eigenvalues=False,
        solve=products_roots,
    ),
)


class Bounds(NamedTuple):
    """What is assumed of a spectrum relative to ``s``, and what follows from it."""

    smallest: float
    """The smallest eigenvalue that is kept."""
    dropped: float
    error: float

    @classmethod
    def of(cls, A: Tensor, kept: float, dropped: float) -> "Bounds":
        """Return them for matrices: ``s`` may exceed the largest eigenvalue by the eighth root of their size.

        Raises:
            ArgumentError: that leaves no gap.
        """
        n = operator.index(A.shape[-1])  # where the compiler has a symbol, too: the steps depend on it
        smallest = kept / max(n, 1) ** 0.125
        if not dropped < smallest:
            raise ArgumentError(
                f"solver='products' needs dropped < kept / n^(1/8), which is {smallest:.3g} for {n}x{n} matrices, got "
                f"kept={kept} and dropped={dropped}; lower dropped, or raise kept."
            )
        return cls(smallest, dropped, _ERROR * torch.finfo(A.dtype).eps)

    @property
    def shift(self) -> float:
        """The middle of the gap."""
        return (self.smallest + self.dropped) / 2

    @property
    def sign_steps(self) -> tuple[tuple[float, float, float], ...]:
        """The steps of the sign, whose argument is half the gap away from zero."""
        return quintics((self.smallest - self.dropped) / 2, self.error)

    @property
    def root_steps(self) -> tuple[tuple[float, float, float], ...]:
        """The steps of the root."""
        return quintics(self.smallest**0.5, self.error)


class _Certified(NamedTuple):
    """Roots of matrices ``(b, n, n)``, scaled by ``size``, and whether they are certified."""

    Q: Tensor
    S: Tensor
    projector: Tensor
    size: Tensor
    """The square root of the scale ``(b, 1, 1)``."""
    holds: Tensor
    """``(b,)``"""


def _roots(B: Tensor, bounds: Bounds, eps: float) -> _Certified:
    """Return the roots of symmetric matrices ``(b, n, n)``."""
    identity = torch.eye(B.shape[-1], dtype=B.dtype, device=B.device).expand_as(B)
    largest = B.abs().amax((-2, -1), keepdim=True)
    largest = torch.where(largest > 0, largest, 1.0)
    M = B / largest
    if eps:
        M = M + (eps / largest) * identity
    # The trace of P^8 bounds the largest eigenvalue from above, and over that of P^6 its square from below.
    squared = M @ M
    fourth = squared @ squared
    eighth = _sum(_squares(fourth))
    top = torch.where(eighth > 0, eighth, 1.0).pow(0.125)
    below = (eighth / torch.where(eighth > 0, _sum((squared.conj() * fourth).real), 1.0)).sqrt() / top
    P = M / top
    tolerance = _TOLERANCE * torch.finfo(B.dtype).eps
    if eps:
        projector, on_range, filled, holds = identity, P, P, torch.ones_like(below, dtype=torch.bool)
    else:
        X = P - bounds.shift * identity
        for a, b, c in bounds.sign_steps:
            square = X @ X
            X = torch.baddbmm(X, X, torch.baddbmm(square, square, square, beta=b, alpha=c), beta=a)
        projector = 0.5 * (identity + X)
        on_range = symmetric(P @ projector)
        rank = _trace(projector)
        mean = _trace(on_range) / torch.where(rank > 0.5, rank, 1.0)
        filled = on_range + torch.where(rank > 0.5, mean, 1.0) * (identity - projector)
        limit = tolerance * rank.clamp(min=1.0).sqrt()
        # In units of what may be dropped: the fourth power's norm is above 1 as soon as one eigenvalue is, and for a
        # few that are just below not far from it. A comparison with NaN is false.
        rest = (P - on_range) / (bounds.dropped * torch.where(below > 0, below, 1.0))
        rest = rest @ rest
        holds = (_norm(projector @ projector - projector) <= limit) & (_norm(rest @ rest) <= 1.0)
    Y, Z = filled, identity
    for number, (a, b, c) in enumerate(bounds.root_steps):
        W = Z @ Y if number else Y
        T = torch.baddbmm(W, W, W, beta=b, alpha=c)
        Y, Z = torch.baddbmm(Y, Y, T, beta=a), torch.baddbmm(Z, T, Z, beta=a)
    S = symmetric(Z if eps else Z @ projector)
    Q = on_range @ S
    residual = _norm(S @ Q - projector)
    holds = holds & (residual <= tolerance * _trace(projector).clamp(min=1.0).sqrt())
    return _Certified(Q, S, projector, top.sqrt() * largest.sqrt(), holds.flatten())


@with_forward_mode
class _Products(torch.autograd.Function):
    """``A -> Q, S``, with the projector, the scale and the certificate behind them."""

    @staticmethod
    def forward(A: Tensor, kept: float, dropped: float, eps: float) -> tuple[Tensor, ...]:
        B = symmetric(A).reshape(-1, *A.shape[-2:])
        found = _roots(B, Bounds.of(A, kept, dropped), eps)
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
            return None, None, None, None
        A, *saved = ctx.saved_tensors
        with autocast_off(A.device):
            return applied(_Slope, A, GQ, GS, *saved, *ctx.options), None, None, None

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
    ) -> Tensor:
        flat = [None if each is None else each.reshape(-1, *each.shape[-2:]) for each in (A, GQ, GS)]
        B, *grads = (None if each is None else symmetric(each) for each in flat)
        assert B is not None
        Q, S, projector, size = (each.reshape(-1, *each.shape[-2:]) for each in (Q, S, projector, size))
        roots = _Certified(Q, S, projector, size, holds.flatten())
        E = _derivative(B, grads[0], grads[1], roots, Bounds.of(A, kept, dropped), eps)
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
        A, GQ, GS, *_, ctx.dropped, ctx.eps = inputs
        ctx.save_for_backward(A, GQ, GS)
        ctx.save_for_forward(A, GQ, GS)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Context, H: Tensor | None) -> tuple[Any, ...]:
        if H is None:
            return (None,) * 11
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
        return to_A, *to_grads, *((None,) * 8)

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


def _derivative(
    B: Tensor,
    GQ: Tensor | None,
    GS: Tensor | None,
    roots: _Certified,
    bounds: Bounds,
    eps: float,
) -> Tensor:
    """Return ``DQ[GQ] + DS[GS]`` of certified roots, all ``(b, n, n)``; inside in units where ``s`` is 1."""
    identity = torch.eye(B.shape[-1], dtype=B.dtype, device=B.device).expand_as(B)
    projector, size = roots.projector, roots.size
    Q, S = roots.Q / size, roots.S * size
    if GS is not None:
        GS = finite(GS / size / size)
    SG = None if GS is None else S @ GS
    if eps:
        inner = torch.zeros_like(B) if GQ is None else GQ
        root = Q
    else:
        inner = torch.zeros_like(B) if GQ is None else projector @ GQ @ projector
        rank = _trace(projector)
        mean = _sum(_squares(Q)) / torch.where(rank > 0.5, rank, 1.0)
        root = Q + torch.where(rank > 0.5, mean, 1.0).sqrt() * (identity - projector)
    if SG is not None:
        inner = inner - SG @ S
    E = _lyapunov(symmetric(root), symmetric(inner), bounds)
    if not eps:
        # Kept times dropped: f(P) Y with P Y - Y N = G, so Y = S^2 (G + Y N): S (G + ..) for Q, and S^3 (G + ..) for S.
        squared = S @ S
        first = torch.zeros_like(B) if GQ is None else S @ GQ
        if SG is not None:
            first = first + squared @ SG
        first = first - first @ projector
        P = B / size / size
        N = P - P @ projector
        across = first + squared @ (first + squared @ first @ N) @ N
        E = E + across + across.mH
    return finite(symmetric(E) / size)


def _lyapunov(R: Tensor, H: Tensor, bounds: Bounds) -> Tensor:
    """Return symmetric ``X`` with ``R X + X R = H``: the sign of ``[[R, H], [0, -R]]`` is ``[[I, 2X], [0, -I]]``.

    Each quintic of that block matrix is taken in its two different blocks: ``H R`` is ``(R H)^T``, and with the
    antisymmetric ``V = R H - H R`` the blocks of the square are ``R^2`` and ``V``.
    """
    size = H.abs().amax((-2, -1), keepdim=True)
    size = torch.where(size > 0, size, 1.0)
    X = H / size
    steps = bounds.root_steps
    for number, (a, b, c) in enumerate(steps):
        square = R @ R
        RX = R @ X
        V = RX - RX.mH
        UV = square @ V
        even = torch.baddbmm(square, square, square, beta=b, alpha=c)  # b R^2 + c R^4
        across = b * V + c * (UV - UV.mH)
        X = torch.baddbmm(torch.baddbmm(X, X, even, beta=a), R, across)
        if number < len(steps) - 1:
            R = torch.baddbmm(R, R, even, beta=a)
    return 0.5 * size * X


def condition_on_support(P: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """Return estimates ``(...)`` of the condition number on the support and of the rank, from ``P`` and its root ``S``.

    The largest eigenvalues of ``P`` and of ``S^2`` are those of a mean with the weights ``l^64``: below the truth, and
    by a percent at most unless dozens of eigenvalues are nearly as large.
    """
    cond = _largest(P) * _largest(S @ S)
    rank = ((P @ S) * S.conj()).real.sum((-2, -1)).round()
    return cond.clamp(min=1.0), rank


def _largest(A: Tensor) -> Tensor:
    power = A
    for _ in range(5):
        power = _normalized(power)
        power = power @ power
    power = _normalized(power)
    total = _squares(power).sum((-2, -1))
    return ((A @ power) * power.conj()).real.sum((-2, -1)) / torch.where(total > 0, total, 1.0)


def _normalized(A: Tensor) -> Tensor:
    norm = _norm(A)
    return A / torch.where(norm > 0, norm, 1.0)


def _sum(A: Tensor) -> Tensor:
    return A.sum((-2, -1), keepdim=True)


def _trace(A: Tensor) -> Tensor:
    return A.diagonal(dim1=-2, dim2=-1).real.sum(-1)[..., None, None]


def _squares(A: Tensor) -> Tensor:
    return A.abs().square()


def _norm(A: Tensor) -> Tensor:
    return _sum(_squares(A)).sqrt()
