"""The roots by eigenvalues: a decomposition, a function of the eigenvalues, and exact derivatives."""

from typing import Any

import torch
from torch import Tensor

from orthocond._core.applying import applied
from orthocond._core.precision import autocast_off, narrow, widen
from orthocond._core.registry import resolve
from orthocond.errors import GradientError
from orthocond.linalg._decompose import decompose
from orthocond.linalg._differences import Split, root_values, second_derivative, split
from orthocond.linalg._gradients import GRADIENTS, differences

__all__ = ["batched", "eigen_root_vjp", "eigen_roots", "root_of", "symmetric"]

Context = Any


def eigen_roots(
    A: Tensor,
    powers: tuple[float, ...],
    *,
    method: str,
    gradient: str,
    eps: float,
    rtol: float | None,
    floor: Tensor | None = None,
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return ``(A + eps I)^p`` for each ``p`` in ``powers``, and the eigenvalues of ``A``, detached and ascending.

    ``rtol`` and ``floor`` say which eigenvalues are dropped, as in `split`.
    """
    with autocast_off(A.device):
        *roots, eigenvalues, _ = applied(_EigenRoots, A, floor, powers, method, gradient, eps, rtol)
    return tuple(roots), eigenvalues


def eigen_root_vjp(A: Tensor, power: float, G: Tensor, *, rtol: float) -> tuple[Tensor, Tensor]:
    """Return ``A^power`` and its derivative applied to ``G``, both differentiable again."""
    root, eigenvalues, U = _EigenRoots.apply(A, None, (power,), "eigh", "exact", 0.0, rtol)
    return root, _EigenDerivative.apply(A, G, eigenvalues, U, None, power, "exact", 0.0, rtol)


def root_of(U: Tensor, parts: Split, power: float) -> Tensor:
    """Return the root or the inverse root from eigenvectors and eigenvalues."""
    return (U * root_values(parts, power).unsqueeze(-2)) @ U.mT


def symmetric(A: Tensor) -> Tensor:
    """Return ``(A + A^T) / 2``, halved first so that nothing overflows."""
    half = A * 0.5
    return half + half.mT


def _wide_symmetric(A: Tensor) -> Tensor:
    if A.dtype == torch.float64:
        return symmetric(A)
    wide = widen(A)
    return wide.lerp(wide.mT, 0.5)  # here nothing overflows


def _fit(dtype: torch.dtype, eps: float, rtol: float | None) -> bool:
    """Return whether ``dtype`` holds every root, so that none need be looked at; float32 with usual options does.

    The smallest number of float32 that isn't zero is 1e-45, so no eigenvalue that is kept is below ``1e-45 * rtol``.
    """
    return dtype == torch.float32 and (rtol or 0.0) + eps > 1e-25 and eps < 1e60


def batched(size: int, dims: tuple[int | None, ...], tensors: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    """Return the tensors with the dimension of `torch.vmap` in front, expanded where they had none."""
    return [
        None if tensor is None else tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(tensors, dims, strict=True)
    ]


class _EigenRoots(torch.autograd.Function):
    """``A -> (A + eps I)^p`` for one or two ``p``, with the eigenvalues and eigenvectors behind them."""

    @staticmethod
    def forward(
        A: Tensor,
        floor: Tensor | None,
        powers: tuple[float, ...],
        method: str,
        gradient: str,
        eps: float,
        rtol: float | None,
    ) -> tuple[Tensor, ...]:
        eigenvalues, U = decompose(_wide_symmetric(A), method)
        parts = split(eigenvalues, eps, rtol, floor)
        roots = (root_of(U, parts, power) for power in powers)
        if _fit(A.dtype, eps, rtol):
            return *(root.to(A) for root in roots), eigenvalues, U
        return *(narrow(root, A) for root in roots), eigenvalues, U

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        A, floor, ctx.powers, _, *ctx.options = inputs
        *_, eigenvalues, U = output
        ctx.mark_non_differentiable(eigenvalues, U)
        ctx.save_for_backward(A, eigenvalues, U, floor)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        A, eigenvalues, U, floor = ctx.saved_tensors
        total: Tensor | None = None
        with autocast_off(A.device):
            for power, G in zip(ctx.powers, grads[: len(ctx.powers)], strict=True):
                if G is not None:
                    part = applied(_EigenDerivative, A, G, eigenvalues, U, floor, power, *ctx.options)
                    total = part if total is None else total + part
            # The parts may exceed what a half type holds where their sum doesn't, so it is narrowed alone.
            to_A = None if total is None else narrow(total, A)
        return to_A, None, None, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        output = _EigenRoots.apply(*batched(info.batch_size, in_dims[:2], inputs[:2]), *inputs[2:])
        return output, (0,) * len(output)


class _EigenDerivative(torch.autograd.Function):
    """``(A, G) -> U (F o (U^T G U)) U^T``, in the dtype of ``U``: symmetric in ``G``, so its own adjoint in it."""

    @staticmethod
    def forward(
        A: Tensor,
        G: Tensor,
        eigenvalues: Tensor,
        U: Tensor,
        floor: Tensor | None,
        power: float,
        gradient: str,
        eps: float,
        rtol: float | None,
    ) -> Tensor:
        parts = split(eigenvalues, eps, rtol, floor)
        rule, options = resolve(GRADIENTS, gradient, "gradient", "backward")
        F = differences(rule, options, parts, power, eps)
        # F is symmetric, so the symmetric part may be taken last, where it is cheapest. Of the two factors it is G that
        # may be of several directions at once.
        return symmetric(U @ (U.mT @ G.to(U) @ U).mul_(F) @ U.mT)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: Tensor) -> None:
        A, G, eigenvalues, U, floor, *ctx.options = inputs
        ctx.save_for_backward(A, G, eigenvalues, U, floor)

    @staticmethod
    def backward(ctx: Context, H: Tensor) -> tuple[Any, ...]:
        A, G, eigenvalues, U, floor = ctx.saved_tensors
        power, gradient, eps, rtol = ctx.options
        if gradient != "exact":
            raise GradientError(f"the gradient rule {gradient!r} can't be differentiated again; use gradient='exact'.")
        to_A = to_G = None
        with autocast_off(A.device):
            if ctx.needs_input_grad[0]:
                to_A = _EigenSecondDerivative.apply(A, G, H, eigenvalues, U, floor, power, eps, rtol)
            if ctx.needs_input_grad[1]:
                to_G = narrow(_EigenDerivative.apply(A, H, eigenvalues, U, floor, *ctx.options), G)
        return to_A, to_G, None, None, None, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        return _EigenDerivative.apply(*batched(info.batch_size, in_dims[:5], inputs[:5]), *inputs[5:]), 0


class _EigenSecondDerivative(torch.autograd.Function):
    """The derivative of ``<H, _EigenDerivative(A, G)>`` with respect to ``A``."""

    @staticmethod
    def forward(
        A: Tensor,
        G: Tensor,
        H: Tensor,
        eigenvalues: Tensor,
        U: Tensor,
        floor: Tensor | None,
        power: float,
        eps: float,
        rtol: float | None,
    ) -> Tensor:
        parts = split(eigenvalues, eps, rtol, floor)
        in_eigenbasis = (U.mT @ symmetric(part.to(U)) @ U for part in (G, H))
        return narrow(U @ second_derivative(parts, power, *in_eigenbasis) @ U.mT, A)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> Any:
        raise GradientError("the roots by eigenvalues are differentiable twice, not three times; newton_schulz is.")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        return _EigenSecondDerivative.apply(*batched(info.batch_size, in_dims[:6], inputs[:6]), *inputs[6:]), 0
