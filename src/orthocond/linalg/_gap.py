"""The mathematics of covariances with a gap: projector, roots and their derivative by matrix products alone.

`_products.py` says which equations these are. Here are tensors ``(b, n, n)`` alone, no autograd.
"""

import operator
from typing import NamedTuple

import torch
from torch import Tensor

from orthocond._core.precision import finite
from orthocond.errors import ArgumentError
from orthocond.linalg._eigen import symmetric
from orthocond.linalg._half import added, product
from orthocond.linalg._schedules import quintics

__all__ = ["Bounds", "Certified", "certified_roots", "condition_on_support", "derivative"]

_TOLERANCE = 80.0
"""For the residuals, relative to the norm of the projector, in units of the machine's: 1e-5 in float32."""
_ERROR = 8.0
"""What the schedules aim at, in the same units: 1e-6 in float32."""


class Bounds(NamedTuple):
    """What is assumed of a spectrum relative to ``s``, and what follows from it."""

    smallest: float
    """The smallest eigenvalue that is kept."""
    dropped: float
    error: float
    precision: str
    """What the products of the iterations take, see `_half.py`."""

    @classmethod
    def of(cls, A: Tensor, kept: float, dropped: float, precision: str) -> "Bounds":
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
        error = _ERROR * torch.finfo(A.dtype).eps
        return cls(_constant(smallest), _constant(dropped), _constant(error), precision)


def _constant(number: float) -> float:
    """Return a number in [0, 1] as one that the compiler knows: with ``dynamic=True`` it makes symbols of floats.

    The steps depend on it. An integer made of a symbol is a number, and 60 bits are enough for a bound.
    """
    return operator.index(int(number * 2.0**60)) / 2.0**60 if torch.compiler.is_compiling() else number


class Certified(NamedTuple):
    """Roots of matrices ``(b, n, n)``, scaled by ``size``, and whether they are certified."""

    Q: Tensor
    S: Tensor
    projector: Tensor
    size: Tensor
    """The square root of the scale ``(b, 1, 1)``."""
    holds: Tensor
    """``(b,)``"""


def certified_roots(B: Tensor, bounds: Bounds, eps: float) -> Certified:
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
    tolerance, half = _TOLERANCE * torch.finfo(B.dtype).eps, bounds.precision
    if eps:
        projector, on_range, filled, holds = identity, P, P, torch.ones_like(below, dtype=torch.bool)
    else:
        X = P - (bounds.smallest + bounds.dropped) / 2 * identity  # the middle of the gap
        for a, b, c in quintics((bounds.smallest - bounds.dropped) / 2, bounds.error):
            square = product(X, X, half)
            X = added(X, X, added(square, square, square, half, beta=b, alpha=c), half, beta=a)
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
    for number, (a, b, c) in enumerate(quintics(bounds.smallest**0.5, bounds.error)):
        W = product(Z, Y, half) if number else Y
        T = added(W, W, W, half, beta=b, alpha=c)
        Y, Z = added(Y, Y, T, half, beta=a), added(Z, T, Z, half, beta=a)
    S = symmetric(Z if eps else Z @ projector)
    Q = on_range @ S
    residual = _norm(S @ Q - projector)
    holds = holds & (residual <= tolerance * _trace(projector).clamp(min=1.0).sqrt())
    return Certified(Q, S, projector, top.sqrt() * largest.sqrt(), holds.flatten())


def derivative(
    B: Tensor,
    GQ: Tensor | None,
    GS: Tensor | None,
    roots: Certified,
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
    size = H.abs().amax((-2, -1), keepdim=True) * H.shape[-1]  # above its norm, so that no half type overflows
    size = torch.where(size > 0, size, 1.0)
    X = H / size
    steps, half = quintics(bounds.smallest**0.5, bounds.error), bounds.precision
    for number, (a, b, c) in enumerate(steps):
        square = product(R, R, half)
        RX = product(R, X, half)
        V = RX - RX.mH
        UV = product(square, V, half)
        even = added(square, square, square, half, beta=b, alpha=c)  # b R^2 + c R^4
        across = b * V + c * (UV - UV.mH)
        X = added(added(X, X, even, half, beta=a), R, across, half)
        if number < len(steps) - 1:
            R = added(R, R, even, half, beta=a)
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
