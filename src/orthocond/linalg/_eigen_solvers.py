"""The solvers by eigenvalues, and a short way for the usual function of one small covariance.

At 16x16 an operation of torch takes longer to call than to compute, and `torch.linalg.eigh` itself is no longer than
ten of them. So the usual case, one function of one float32 matrix on the CPU and its gradient, has a function of its
own, with the formulas of `_eigen.py` in fewer calls. For the second derivative the general functions take over. The
roots have an even shorter one: with ``s = sqrt(l + eps)``, and ``B = U`` for the root or ``B = U / sqrt(s)`` for the
inverse root, the derivative is

    B ((B^T G B)_ij / (s_i + s_j)) B^T

with a minus sign for the inverse root.

In larger matrices the products count. Those that turn a result back, ``U diag(f) U^T`` and ``U M U^T``, are taken in
float32: ``U`` keeps the norm, so that nothing cancels, and the error is that of the rounding of the result, a few
times over. The products ``U^T G U`` stay in float64, because what they lose the divided differences may amplify.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from orthocond._core import private
from orthocond._core.applying import is_plain
from orthocond._core.precision import finite, narrow
from orthocond.linalg._decompose import decompose_one
from orthocond.linalg._differences import SMALLEST, Split, first_differences, split, values
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


def by_eigenvalues(
    A: Tensor,
    functions: tuple[Chosen, ...],
    *,
    method: str,
    gradient: str,
    eps: float,
    rtol: float | None,
    floor: Tensor | None = None,
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return ``f(A + eps I)`` for each of ``functions``, and the eigenvalues of ``A``, detached and ascending.

    ``rtol`` and ``floor`` say which eigenvalues are dropped, as in `split`.
    """
    if not _is_usual(A, functions, method, gradient):
        return eigen_functions(A, functions, method=method, gradient=gradient, eps=eps, rtol=rtol, floor=floor)
    assert private.unwrap_dead_wrappers is not None
    (A,) = private.unwrap_dead_wrappers((A,))
    if A.requires_grad and torch.is_grad_enabled():
        # The C code that `applied` calls, too.
        result, eigenvalues = super(torch.autograd.Function, _Function).apply(A, functions[0], eps, rtol, floor)
    else:
        result, eigenvalues, *_ = _function(A, functions[0], eps, rtol, floor)
    return (result,), eigenvalues


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
        and type(A) in (Tensor, Parameter)
        and is_plain()
        and not private.forward_mode_is_on()
        and private.unwrap_dead_wrappers is not None
        and not torch.is_autocast_enabled("cpu")
    )


def _function(
    A: Tensor, function: Chosen, eps: float, rtol: float | None, floor: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Split, Tensor | None]:
    """Return the function of ``A``, the eigenvalues, and for the derivative the eigenvectors, the split and None.

    For a root without dropped eigenvalues it is ``B`` in the place of the eigenvectors, and the signed ``s`` is last.
    """
    entry, _ = spectral_function(function)
    n = A.shape[-1]
    matrix = A if A.ndim == 2 else A.reshape(n, n)
    wide, asymmetry = (matrix.double(), None) if torch.equal(matrix, matrix.mT) else wide_symmetric(matrix)
    eigenvalues, U, smallest, largest = decompose_one(
        wide, asymmetry=asymmetry, noise=noise_of(A.dtype), semidefinite=not entry.whole_line
    )
    is_above_noise = floor is None or floor.item() <= eps
    if rtol is None and is_above_noise and (entry.whole_line or smallest >= -eps / 2 < -SMALLEST):
        parts = Split(eigenvalues, eigenvalues + eps, None, None)
    elif rtol is not None and is_above_noise and smallest > max(rtol * largest, SMALLEST):
        parts = Split(eigenvalues, eigenvalues + eps if eps else eigenvalues, None, None)
    else:
        floor = floor if floor is None else floor.reshape(())
        parts = split(eigenvalues, eps, rtol, floor, function=function)
    fits, sums = fit(A.dtype, (function,), eps, rtol), None
    if fits and parts.kept is None:
        sums = parts.points.sqrt()
        if function == SQRT:
            result = (U * sums).mm(U.mT)
        else:
            U = U / sums.sqrt()
            result = U.mm(U.mT)
            sums.neg_()
    else:
        result = (U * values(parts, function)).mm(U.mT)
    if A.ndim > 2:  # before it is narrowed, so that it is no view, which could not be changed in place
        result, eigenvalues = result.view(A.shape), eigenvalues.view(A.shape[:-1])
    return result.float() if fits else narrow(result, A), eigenvalues, U, parts, sums


class _Function(torch.autograd.Function):
    """``A -> f(A + eps I)``, and the eigenvalues."""

    @staticmethod
    def forward(
        ctx: Context, A: Tensor, function: Chosen, eps: float, rtol: float | None, floor: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        result, eigenvalues, B, ctx.parts, sums = _function(A, function, eps, rtol, floor)
        ctx.options = function, eps, rtol, floor
        ctx.mark_non_differentiable(eigenvalues)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(A, eigenvalues, B, sums)
        return result, eigenvalues

    @staticmethod
    def backward(ctx: Context, G: Tensor | None, _: None) -> tuple[Any, ...]:
        if G is None:
            return None, None, None, None, None
        A, eigenvalues, B, sums = ctx.saved_tensors
        if torch.is_grad_enabled():
            function, *options = ctx.options
            U = B if sums is None or function == SQRT else B * sums.neg().sqrt()
            to_A = narrow(derivative(A, G, eigenvalues, U.expand(A.shape), function, *options), A)
            return to_A, None, None, None, None
        n = A.shape[-1]
        wide = G.double() if G.ndim == 2 else G.double().reshape(n, n)
        inner = B.mT.mm(wide).mm(B)
        if sums is None:
            inner.mul_(first_differences(ctx.parts, ctx.options[0]))
        else:
            inner.div_(sums.unsqueeze(-1) + sums)
        to_A = B.mm(inner).mm(B.mT)
        to_A = to_A.lerp(to_A.mT, 0.5).float()
        return finite(to_A if A.ndim == 2 else to_A.view(A.shape)), None, None, None, None


EIGEN_SOLVERS = (
    Solver(
        "eigh",
        "Symmetric eigendecomposition, in float64 inside where the device has it: the most accurate and the default. "
        "With clamp=true eps is a floor, max(l, eps), instead of a shift.",
        "LAPACK syevd; gradient by Daleckii and Krein",
        {"clamp": False},
        solve=functools.partial(by_eigenvalues, method="eigh"),
    ),
    Solver(
        "svd",
        "Singular value decomposition, in float64 inside where the device has it: as accurate as eigh, twice its time. "
        "With clamp=true eps is a floor, max(l, eps), instead of a shift.",
        "LAPACK gesdd; the paper's solver",
        {"clamp": False},
        solve=functools.partial(by_eigenvalues, method="svd"),
    ),
)
