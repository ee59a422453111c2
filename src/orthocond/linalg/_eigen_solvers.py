"""The solvers by eigenvalues, and a short way for the usual function of one small covariance.

At 16x16 an operation of torch takes longer to call than to compute, and `torch.linalg.eigh` itself is no longer than
ten of them. So the usual case, one function of one float32 matrix on the CPU and its gradient, has a function of its
own, with the formulas of `_eigen.py` in fewer calls. For the second derivative the general functions take over. The
roots have an even shorter one: with ``s = sqrt(l + eps)``, and ``B = U`` for the root or ``B = U / sqrt(s)`` for the
inverse root, the derivative is

    B ((B^T G B)_ij / (s_i + s_j)) B^T

with a minus sign for the inverse root. Logarithms and powers have the same form, with ``B = U diag(b)`` and a
denominator ``D_ij`` of their own: the factors of their divided differences in `_functions.py`.

In larger matrices the products count. Those that turn a result back, ``U diag(f) U^T`` and ``U M U^T``, are taken in
float32: ``U`` keeps the norm, so that nothing cancels, and the error is that of the rounding of the result, a few
times over. The products ``U^T G U`` stay in float64, because what they lose the divided differences may amplify.
"""

import functools

import torch
from torch import Tensor

from orthocond._core.applying import is_ordinary
from orthocond._core.precision import finite, narrow
from orthocond.linalg._decompose import decompose_one
from orthocond.linalg._differences import SMALLEST, Split, first_differences, split
from orthocond.linalg._eigen import (
    Context,
    derivative,
    eigen_functions,
    fit,
    noise_of,
    wide_symmetric,
)
from orthocond.linalg._functions import SQRT, Chosen, is_clamped, spectral_function
from orthocond.linalg._solver import Solver

__all__ = ["EIGEN_SOLVERS"]

_NOISE = noise_of(torch.float32)


def by_eigenvalues(
    A: Tensor,
    functions: tuple[Chosen, ...],
    *,
    method: str,
    gradient: str,
    eps: float,
    rtol: float | None,
    floor: Tensor | None = None,
    wide: bool = True,
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return ``f(A + eps I)`` for each of ``functions``, and the eigenvalues of ``A``, detached and ascending.

    ``rtol`` and ``floor`` say which eigenvalues are dropped, as in `split`; ``wide`` is as in `eigen_functions`.
    """
    if not (wide and _is_usual(A, functions, method, gradient)):
        return eigen_functions(
            A, functions, method=method, gradient=gradient, eps=eps, rtol=rtol, floor=floor, wide=wide
        )
    call = _Call(functions[0], eps, rtol, floor)
    if A.requires_grad and torch.is_grad_enabled():
        result = super(torch.autograd.Function, _Function).apply(A, call)  # the C code that `applied` calls, too
    else:
        result = _function(A, call)[0]
    assert call.eigenvalues is not None
    return (result,), call.eigenvalues


def _is_usual(A: Tensor, functions: tuple[Chosen, ...], method: str, gradient: str) -> bool:
    """Return whether the short way suffices: no observer, and only one function and its gradient are needed."""
    return (
        A.dtype is torch.float32
        and A.numel() == A.shape[-1] ** 2 > 0
        and A.is_cpu
        and len(functions) == 1
        and not is_clamped(functions[0])
        and method == "eigh"
        and gradient == "exact"
        and is_ordinary(A)
    )


class _Call:
    """The options of a call, and a place for the eigenvalues: a second output of a Function would cost more."""

    __slots__ = ("eigenvalues", "eps", "floor", "function", "rtol")

    def __init__(self, function: Chosen, eps: float, rtol: float | None, floor: Tensor | None) -> None:
        self.function, self.eps, self.rtol, self.floor = function, eps, rtol, floor
        self.eigenvalues: Tensor | None = None


def _function(A: Tensor, call: _Call) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Return the function of ``A``, and what the derivative needs.

    That is ``A``, its eigenvalues, the matrix ``B``, the signed ``s`` of a root, the points at which the function is
    taken, and what is kept, with its cutoff. Where there is no ``s``, the eigenvectors are in the place of ``B``.
    """
    function, eps, rtol, floor = call.function, call.eps, call.rtol, call.floor
    entry, options = spectral_function(function)
    is_one, n = A.ndim == 2, A.shape[-1]
    matrix = A if is_one else A.view(n, n)
    wide, asymmetry = (matrix.double(), None) if torch.equal(matrix, matrix.mT) else wide_symmetric(matrix)
    eigenvalues, U, smallest, largest = decompose_one(
        wide, asymmetry=asymmetry, noise=_NOISE, semidefinite=not entry.whole_line
    )
    is_above_noise = floor is None or floor.item() <= eps
    kept = cutoff = s = None
    if rtol is None and is_above_noise and (entry.whole_line or smallest >= -eps / 2 < -SMALLEST):
        points = eigenvalues + eps
    elif rtol is not None and is_above_noise and smallest > max(rtol * largest, SMALLEST):
        points = eigenvalues + eps if eps else eigenvalues
    else:
        floor = floor if floor is None else floor.reshape(())
        _, points, kept, cutoff, _ = split(eigenvalues, eps, rtol, floor, function=function)
    fits = fit(torch.float32, (function,), eps, rtol)
    if fits and kept is None and entry.is_root:
        s = points.sqrt()
        if function == SQRT:
            result = (U * s).mm(U.mT)
        else:
            U = U * s.rsqrt()
            result = U.mm(U.mT)
            s.neg_()
    else:
        f = entry.value(points, *options)
        result = (U * (f if kept is None else f * kept)).mm(U.mT)
    # A view before it is narrowed is none after it, and can be changed in place.
    result = result.float() if is_one else result.view_as(A).float()
    call.eigenvalues = eigenvalues if is_one else eigenvalues.view(A.shape[:-1])
    return result if fits else finite(result), (A, eigenvalues, U, s, points, kept, cutoff)


class _Function(torch.autograd.Function):
    """``A -> f(A + eps I)``."""

    @staticmethod
    def forward(ctx: Context, A: Tensor, call: _Call) -> Tensor:
        result, saved = _function(A, call)
        ctx.call = call
        ctx.save_for_backward(*saved)
        return result

    @staticmethod
    def backward(ctx: Context, G: Tensor) -> tuple[Tensor, None]:
        A, eigenvalues, B, s, points, kept, cutoff = ctx.saved_tensors
        call = ctx.call
        function = call.function
        if torch.is_grad_enabled():
            U = B if s is None or function == SQRT else B * s.neg().sqrt()
            options = (function, call.eps, call.rtol, call.floor)
            return narrow(derivative(A, G, eigenvalues.expand(A.shape[:-1]), U.expand(A.shape), *options), A), None
        is_one, n = G.ndim == 2, G.shape[-1]
        D = None
        if s is not None:
            D = s.unsqueeze(-1) + s
        elif kept is None:
            entry, options = spectral_function(function)
            factors = entry.factors(points, *options) if entry.factors is not None else None
            if factors is not None:
                b, D = factors
                B = B * b
        transposed = B.mT
        inner = transposed.mm((G if is_one else G.view(n, n)).double()).mm(B)
        if D is None:
            inner.mul_(first_differences(Split(eigenvalues, points, kept, cutoff), function))
        else:
            inner.div_(D)
        to_A = B.mm(inner).mm(transposed)
        to_A = to_A.lerp(to_A.mT, 0.5).float()
        return finite(to_A if is_one else to_A.view_as(A)), None


EIGEN_SOLVERS = (
    Solver(
        "eigh",
        "Symmetric eigendecomposition, in float64 inside where the device has it: the most accurate and the default. "
        "With clamp=true eps is a floor, max(l, eps), instead of a shift. With wide=false a float32 matrix is "
        "decomposed in float32, for GPUs with slow float64: eigenvalues below 1e-6 of the largest are then noise.",
        "LAPACK syevd; gradient by Daleckii and Krein",
        {"clamp": False, "wide": True},
        solve=functools.partial(by_eigenvalues, method="eigh"),
    ),
    Solver(
        "svd",
        "Singular value decomposition, in float64 inside where the device has it: as accurate as eigh, twice its time. "
        "clamp and wide are those of eigh.",
        "LAPACK gesdd; the paper's solver",
        {"clamp": False, "wide": True},
        solve=functools.partial(by_eigenvalues, method="svd"),
    ),
)
