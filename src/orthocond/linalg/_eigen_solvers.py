"""The solvers by eigenvalues, and a short way for the usual root of one small covariance.

At 16x16 an operation of torch takes longer to call than to compute, and `torch.linalg.eigh` itself is no longer than
ten of them. So the usual case, one root of one float32 matrix on the CPU, has a function of its own, with the formulas
of `_eigen.py` in fewer calls. With ``s = sqrt(l + eps)``, and ``B = U`` for the root or ``B = U / sqrt(s)`` for the
inverse root, the derivative is

    B ((B^T G B)_ij / (s_i + s_j)) B^T

with a minus sign for the inverse root. Where an eigenvalue is dropped, and for the second derivative, the general
functions take over.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]  # documented, missing from the stubs
from torch.nn import Parameter

from orthocond._core import private
from orthocond._core.applying import is_plain
from orthocond._core.precision import finite, narrow
from orthocond.linalg._decompose import retried, warn_of_input
from orthocond.linalg._differences import SMALLEST, shifted, split
from orthocond.linalg._eigen import (
    Context,
    derivative,
    eigen_functions,
    fit,
    function_of,
    noise_of,
    wide_symmetric,
)
from orthocond.linalg._functions import SQRT, Chosen
from orthocond.linalg._solver import Solver
from orthocond.linalg._verify import verified_eigen

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
    if not _is_usual(A, functions, method, gradient, eps, rtol, floor):
        return eigen_functions(A, functions, method=method, gradient=gradient, eps=eps, rtol=rtol, floor=floor)
    assert private.unwrap_dead_wrappers is not None
    (A,) = private.unwrap_dead_wrappers((A,))
    if A.requires_grad and torch.is_grad_enabled():
        # The C code that `applied` calls, too.
        result, eigenvalues = super(torch.autograd.Function, _Root).apply(A, functions[0], eps, rtol)
    else:
        result, eigenvalues, *_ = _root(A, functions[0], eps, rtol)
    return (result,), eigenvalues


def _is_usual(
    A: Tensor,
    functions: tuple[Chosen, ...],
    method: str,
    gradient: str,
    eps: float,
    rtol: float | None,
    floor: Tensor | None,
) -> bool:
    """Return whether the short way suffices: no observer, and only a root and its gradient are needed."""
    return (
        A.dtype is torch.float32
        and A.numel() == A.shape[-1] ** 2 > 0
        and A.is_cpu
        and len(functions) == 1
        and floor is None
        and method == "eigh"
        and gradient == "exact"
        and fit(A.dtype, functions, eps, rtol)
        and type(A) in (Tensor, Parameter)
        and is_plain()
        and not private.forward_mode_is_on()
        and private.unwrap_dead_wrappers is not None
    )


def _root(A: Tensor, function: Chosen, eps: float, rtol: float | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the root, the eigenvalues, ``B`` and the signed ``s`` of the derivative; where some are dropped, ``U``."""
    eigenvalues, U, smallest, largest = _decomposed(A if A.ndim == 2 else A.reshape(A.shape[-2:]))
    if rtol is None:
        points = eigenvalues + eps if smallest >= -eps / 2 else shifted(eigenvalues, eps)
    elif smallest > max(rtol * largest, SMALLEST):
        points = eigenvalues + eps if eps else eigenvalues
    else:
        points = None
    if points is None:
        B, s = U, None
        root = function_of(U, split(eigenvalues, eps, rtol), function)
    else:
        s = points.sqrt()
        if function == SQRT:
            B = U
            root = (U * s).mm(U.mT)
        else:
            B = U / s.sqrt()
            root = B.mm(B.mT)
            s.neg_()
    if A.ndim > 2:  # before it is narrowed, so that it is no view, which could not be changed in place
        root, eigenvalues = root.view(A.shape), eigenvalues.view(A.shape[:-1])
    return root.float(), eigenvalues, B, s


def _decomposed(A: Tensor) -> tuple[Tensor, Tensor, float, float]:
    """Return what `decompose` does for one matrix ``(n, n)``, and the smallest and the largest eigenvalue."""
    wide, asymmetry = (A.double(), None) if torch.equal(A, A.mT) else wide_symmetric(A)
    try:
        eigenvalues, U = torch.linalg.eigh(wide)
    except LinAlgError:
        eigenvalues, U = retried(wide, "eigh")
        return eigenvalues, U, eigenvalues[0].item(), eigenvalues[-1].item()
    wrong, lowest, asymmetric, extremes = verified_eigen(wide, eigenvalues, U, asymmetry)
    if wrong is not None:
        eigenvalues, U = retried(wide, "eigh", (eigenvalues, U, wrong))
        return eigenvalues, U, eigenvalues[0].item(), eigenvalues[-1].item()
    noise = noise_of(A.dtype)
    if asymmetric > noise or lowest < -noise:
        warn_of_input(asymmetric, lowest, noise, semidefinite=True)
    return eigenvalues, U, *extremes


class _Root(torch.autograd.Function):
    """``A -> (A + eps I)^(+-1/2)``, and the eigenvalues."""

    @staticmethod
    def forward(ctx: Context, A: Tensor, function: Chosen, eps: float, rtol: float | None) -> tuple[Tensor, Tensor]:
        root, eigenvalues, B, s = _root(A, function, eps, rtol)
        ctx.options = function, eps, rtol
        ctx.mark_non_differentiable(eigenvalues)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(A, eigenvalues, B, s)
        return root, eigenvalues

    @staticmethod
    def backward(ctx: Context, G: Tensor | None, _: None) -> tuple[Any, ...]:
        if G is None:
            return None, None, None, None
        A, eigenvalues, B, s = ctx.saved_tensors
        if s is None or torch.is_grad_enabled():
            function, eps, rtol = ctx.options
            U = B if s is None or function == SQRT else B * s.neg().sqrt()
            to_A = derivative(A, G, eigenvalues, U.expand(A.shape), function, eps, rtol)
            return narrow(to_A, A), None, None, None
        n = A.shape[-1]
        wide = G.double()
        inner = B.mT.mm(wide if G.ndim == 2 else wide.reshape(n, n)).mm(B).div_(s.unsqueeze(-1) + s)
        to_A = B.mm(inner).mm(B.mT)
        to_A = to_A.lerp(to_A.mT, 0.5)
        return finite((to_A if A.ndim == 2 else to_A.view(A.shape)).float()), None, None, None


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
