"""The nearest orthogonal matrix, and the solvers to choose from."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from orthocond._core.applying import applied, is_ordinary, with_forward_mode
from orthocond._core.overriding import overridable
from orthocond._core.precision import at_least_float32, autocast_off, lift, narrow, real_dtype, widen
from orthocond._core.registry import Entry, frozen, resolve
from orthocond.errors import ArgumentError, NonFiniteError, check_matrix, check_nonnegative
from orthocond.linalg._counts import count_failure
from orthocond.linalg._decompose import check_finite, decompose, decompose_one, svd
from orthocond.linalg._eigen import Context, eigen_vjp, product
from orthocond.linalg._functions import INV_SQRT
from orthocond.linalg._schedules import quintics

__all__ = ["POLAR_SOLVERS", "PolarSolver", "nearest_orthogonal"]

# A Gram matrix in a precision of unit u has the polar factor to within about u * cond^2: up to here it will do.
_GRAM_TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-10}


@dataclass(frozen=True)
class PolarSolver(Entry):
    """A way to the nearest orthogonal matrix."""

    has_rank: bool = True
    """Whether the solver can identify the singular values that must stay zero."""
    solve: Callable[..., Tensor] = lambda A: A
    """From matrices ``(..., m, n)``, ``m <= n``, to their polar factors. In float64, and for a solver without the rank,
    their largest entry is in [1, 2)."""


@overridable
def nearest_orthogonal(A: Tensor, *, solver: str = "gram", rtol: float | None = None) -> Tensor:
    r"""Return the nearest matrices to ``A`` with orthonormal rows or columns, whichever are fewer.

    .. math:: R = U V^T, \quad A = U \Sigma V^T

    which minimises :math:`\|A - R\|_F`. Zero singular values stay zero, so a zero matrix gives zero.

    *Gradient:* that of :math:`(A A^T)^{-1/2} A` (for wide ``A``), exact at equal singular values and differentiable
    again. It grows like the inverse of the smallest singular value that is kept; those below about 1e-7 of the largest
    (relevant for float64 input only) have no gradient.

    Args:
        A: matrices ``(..., m, n)``, tall or wide, real or complex (then the nearest unitary ones).
        solver: one of `POLAR_SOLVERS`.
        rtol: singular values at or below ``rtol`` times the largest count as zero. ``None`` means
            ``max(m, n) * finfo(A.dtype).eps`` (of float32 for the half types), as in `torch.linalg.matrix_rank`.

    Returns:
        The polar factors ``(..., m, n)``, in the dtype and on the device of ``A``.

    Raises:
        ArgumentError: a wrong shape, an unknown solver, a negative ``rtol``.
        DtypeError: ``A`` is neither floating nor complex.
        NonFiniteError: a matrix holds NaN or infinity.
        SolverError: no decomposition converged, retries included.

    Reference:
        Higham, Matrix nearness problems and applications, 1989; Song, Sebe, Wang 2022, eqs. 14 to 17.

    Example:
        >>> nearest_orthogonal(torch.tensor([[0.0, 3.0], [-0.1, 0.0]]))
        tensor([[ 0.,  1.],
                [-1.,  0.]])
    """
    check_matrix(A, "nearest_orthogonal", allow_complex=True)
    entry, options = resolve(POLAR_SOLVERS, solver, "solver", "nearest_orthogonal")
    if rtol is not None:
        check_nonnegative(rtol, "rtol", "nearest_orthogonal")
        if rtol and not entry.has_rank:
            raise ArgumentError(
                f"nearest_orthogonal got rtol={rtol} with solver={entry.name!r}, which can't tell the rank; "
                "use solver='gram', or leave rtol=None."
            )
    if not A.numel():
        return A.clone()
    dtype = at_least_float32(A.dtype)
    rtol = max(A.shape[-2:]) * torch.finfo(dtype).eps if rtol is None else rtol
    wide = A if A.shape[-2] <= A.shape[-1] else A.mT
    if solver == "gram" and A.dtype is torch.float32 and _is_one(A) and _is_constant(A):  # the same, for less
        R = _by_gram(wide, rtol).float()
        return R if wide is A else R.mT
    with autocast_off(A.device):
        # The scale does not matter. In float64, where the rank is found, no product of float32 numbers overflows.
        scale = None if entry.has_rank and real_dtype(dtype) == torch.float32 else power_of_two_scale(wide)
        R = narrow(applied(_Polar, lift(wide, scale), entry.name, rtol, tuple(options.items())), A)
    return R if wide is A else R.mT


def power_of_two_scale(A: Tensor) -> Tensor:
    """Return the scales ``(..., 1, 1)``, in float32 at least, that bring the largest entry of each matrix to [1, 2).

    Powers of two cost no rounding. The scale of a zero matrix is 1.
    """
    dtype = real_dtype(at_least_float32(A.dtype))
    largest = A.detach().abs().amax((-2, -1), keepdim=True).to(dtype)
    bound = 1020.0 if dtype == torch.float64 else 125.0
    return torch.exp2(-torch.where(largest > 0, largest, 1.0).log2().floor().clamp(-bound, bound))


@with_forward_mode
class _Polar(torch.autograd.Function):
    """``A -> U V^T`` for wide ``A``; the gradient is that of ``(A A^T)^(-1/2) A``, whatever the solver."""

    @staticmethod
    def forward(A: Tensor, solver: str, rtol: float, options: tuple[tuple[str, int | float], ...]) -> Tensor:
        if torch.compiler.is_compiling():
            R: Tensor = _polar_op(A, solver, rtol, list(dict(options).values()))
            return R
        return _polar(A, solver, rtol, list(dict(options).values()))

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: Tensor) -> None:
        A, _, ctx.rtol, _ = inputs
        ctx.save_for_backward(A)
        ctx.save_for_forward(A)

    @staticmethod
    def backward(ctx: Context, G: Tensor) -> tuple[Tensor, None, None, None]:
        (A,) = ctx.saved_tensors
        with autocast_off(A.device):
            wide, G = widen(A), widen(G)
            S, to_gram = _inverse_root_and_slope(wide, G, ctx.rtol)
            return narrow(S @ G + 2 * to_gram @ wide, A), None, None, None

    @staticmethod
    def tangent(ctx: Context, saved: tuple[Tensor], direction: Tensor, *_: None) -> Tensor:
        (A,) = saved
        with autocast_off(A.device):
            wide, direction = widen(A), widen(direction)
            S, along_gram = _inverse_root_and_slope(wide, direction, ctx.rtol)
            return narrow(S @ direction + 2 * along_gram @ wide, A)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], A: Tensor, *options: Any) -> tuple[Tensor, int]:
        assert in_dims[0] is not None
        return applied(_Polar, A.movedim(in_dims[0], 0), *options), 0


def _inverse_root_and_slope(A: Tensor, direction: Tensor, rtol: float) -> tuple[Tensor, Tensor]:
    """Return ``(A A^H)^(-1/2)`` and its derivative along half of ``direction A^H + A direction^H``."""
    rtol = max(rtol**2, A.shape[-2] * torch.finfo(A.dtype).eps)
    return eigen_vjp(A @ A.mH, INV_SQRT, direction @ A.mH, rtol=rtol)


def _polar(A: Tensor, solver: str, rtol: float, options: list[float]) -> Tensor:
    entry = POLAR_SOLVERS[solver]
    if not A.is_meta and not (solver == "gram" and _is_one(A)):  # there, the decomposition looks at it
        check_finite(A)
    return entry.solve(A, rtol, *options).to(A)


def _is_constant(A: Tensor) -> bool:
    """Return whether no derivative can be asked for, and nothing looks on."""
    return not (A.requires_grad and torch.is_grad_enabled()) and is_ordinary(A)


def _is_one(A: Tensor) -> bool:
    """Return whether it is one real matrix on the CPU, for which there are fewer calls: small matrices notice."""
    return A.ndim == 2 and A.is_cpu and not A.is_complex()


@torch.library.custom_op("orthocond::polar", mutates_args=())
def _polar_op(A: Tensor, solver: str, rtol: float, options: list[float]) -> Tensor:
    """The same, opaque to `torch.compile`: the fallback depends on the data."""
    return _polar(A, solver, rtol, options).clone(memory_format=torch.contiguous_format)


@_polar_op.register_fake
def _(A: Tensor, solver: str, rtol: float, options: list[float]) -> Tensor:
    return A.new_empty(A.shape)


def _by_gram(A: Tensor, rtol: float) -> Tensor:
    wide = widen(A)
    unit = torch.finfo(wide.dtype).eps
    # Below the first bound an eigenvalue is too small to be accurate, below the second so small that the Gram matrix
    # can't tell whether it is to be kept.
    uncertain, noise = unit / _GRAM_TOLERANCE[real_dtype(A.dtype)], A.shape[-2] * unit
    if _is_one(A):
        try:
            eigenvalues, U, lowest, highest = decompose_one(wide.mm(wide.mT))
        except NonFiniteError:
            check_finite(A)  # says where
            raise
        if lowest > max(rtol**2, uncertain, noise) * highest:
            return (U * eigenvalues.rsqrt()).mm(U.mT).mm(wide)
    else:
        eigenvalues, U = decompose(product(wide, wide.mH), "eigh")
    smallest, largest = eigenvalues[..., :1], eigenvalues[..., -1:]
    if wide.is_cpu and bool((smallest > max(rtol**2, uncertain, noise) * largest).all()):  # the usual case
        return product(product(U * eigenvalues.rsqrt().unsqueeze(-2), U.mH), wide)
    kept = eigenvalues > rtol**2 * largest
    scale = torch.where(kept, eigenvalues, 1.0).rsqrt() * kept
    R = product(product(U * scale.unsqueeze(-2), U.mH), wide)
    inaccurate = (eigenvalues < uncertain * largest) & kept | (eigenvalues <= noise * largest) & (rtol**2 < noise)
    inaccurate = inaccurate.any(-1) & (largest[..., 0] > 0)
    if A.is_meta or not inaccurate.any():
        return R
    if A.ndim == 2:
        return _by_svd(A, rtol)
    R[inaccurate] = _by_svd(A[inaccurate], rtol).to(R)
    return R


def _by_svd(A: Tensor, rtol: float) -> Tensor:
    U, singular_values, Vh = svd(widen(A))
    kept = singular_values > rtol * singular_values[..., :1]
    return (U * kept.unsqueeze(-2)) @ Vh


def _by_newton_schulz(A: Tensor, rtol: float, iterations: float, bound: float) -> Tensor:
    if bound < 1:
        return _by_optimal_steps(A, rtol, bound)
    # x (15 - 10 x^2 + 3 x^4) / 8 maps [0, 1] into itself, has the fixed point 1 to third order, and slope 15/8 at 0.
    norm = torch.linalg.matrix_norm(A, keepdim=True)
    X = A / torch.where(norm > 0, norm, 1.0)
    for _ in range(int(iterations)):
        gram = X @ X.mH
        X = 1.875 * X + (0.375 * (gram @ gram) - 1.25 * gram) @ X
    return X


def _by_optimal_steps(A: Tensor, rtol: float, bound: float) -> Tensor:
    """Return polar factors by polynomials that are optimal for singular values of at least ``bound`` times the norm.

    A result that is too far from orthogonal has smaller singular values: it counts as a failure, and the decomposition
    replaces it.
    """
    norm = torch.linalg.matrix_norm(A, keepdim=True)
    X = A / torch.where(norm > 0, norm, 1.0)
    eps = torch.finfo(A.dtype).eps
    for a, b, c in quintics(bound, 8 * eps):
        gram = X @ X.mH
        X = a * X + (b * gram + c * (gram @ gram)) @ X
    identity = torch.eye(A.shape[-2], dtype=A.dtype, device=A.device)
    residual = torch.linalg.matrix_norm(X @ X.mH - identity) / A.shape[-2] ** 0.5
    converged = (residual <= 80 * eps) | (norm[..., 0, 0] == 0)
    if A.is_meta or converged.all():
        return X
    count_failure("newton_schulz", int((~converged).sum()))
    return torch.where(converged[..., None, None], X, _by_svd(A, rtol).to(A))


POLAR_SOLVERS = frozen(
    PolarSolver(
        "gram",
        "Inverse root of the Gram matrix of the shorter side, in float64 where the device has it; matrices too "
        "ill-conditioned for that go to svd by themselves. The fastest, and the default.",
        "Higham, Functions of Matrices, 2008, chapter 8; Song, Sebe, Wang 2022, eq. 16",
        solve=_by_gram,
    ),
    PolarSolver(
        "svd",
        "Singular value decomposition, in float64 where the device has it: accurate at any condition number.",
        "Higham, Functions of Matrices, 2008, theorem 8.1; Song, Sebe, Wang 2022, eq. 17",
        solve=_by_svd,
    ),
    PolarSolver(
        "newton_schulz",
        "Quintic Newton-Schulz iteration with converging coefficients, in the input's precision and by products "
        "alone. Converges while the norm over the smallest singular value is below about 1.875^iterations / 5; "
        "rounding noise in a null space grows as fast (1.875^15 * 6e-8 = 7e-4). With a bound below 1, singular values "
        "of at least bound times the norm are assumed. Then the polynomials are the optimal ones for it; a residual "
        "above 1e-5 in float32 is a failure, and goes to svd.",
        "Kovarik 1970; Bjorck and Bowie 1971; Higham, Functions of Matrices, 2008, section 8.3. With a bound: Amsel et "
        "al., arXiv 2505.16932",
        {"iterations": 15, "bound": 1.0},
        has_rank=False,
        solve=_by_newton_schulz,
    ),
)
"""The polar solvers by name. Write one as ``solver="gram"`` or ``solver="newton_schulz(iterations=25)"``.

Example:
    >>> list(POLAR_SOLVERS)
    ['gram', 'svd', 'newton_schulz']
"""
