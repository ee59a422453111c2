"""The roots by eigenvalues: a decomposition, a function of the eigenvalues, and exact derivatives."""

from typing import Any

import torch
from torch import Tensor

from orthocond.linalg._decompose import decompose
from orthocond.linalg._differences import root_values, second_derivative, split
from orthocond.linalg._gradients import GRADIENTS, differences
from orthocond.linalg._precision import autocast_off, narrow, widest
from orthocond.linalg._registry import resolve

__all__ = ["eigen_root_vjp", "eigen_roots", "sandwich", "symmetric"]

Context = Any
Options = tuple[tuple[float, ...], str, str, float, float | None]
"""powers, method, gradient rule, eps, rtol: what the functions below take beside tensors."""


def eigen_roots(
    A: Tensor, powers: tuple[float, ...], *, method: str, gradient: str, eps: float, rtol: float | None
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return ``(A + eps I)^p`` for each ``p`` in ``powers``, and the eigenvalues of ``A``, detached and ascending.

    ``rtol=None`` drops no eigenvalue.
    """
    with autocast_off(A.device):
        *roots, eigenvalues, _ = _EigenRoots.apply(A, powers, method, gradient, eps, rtol)
    return tuple(roots), eigenvalues


def eigen_root_vjp(A: Tensor, power: float, G: Tensor, *, rtol: float) -> tuple[Tensor, Tensor]:
    """Return ``A^power`` and its derivative applied to ``G``, both differentiable again."""
    root, eigenvalues, U = _EigenRoots.apply(A, (power,), "eigh", "exact", 0.0, rtol)
    return root, _EigenDerivative.apply((power,), "exact", 0.0, rtol, A, eigenvalues, U, G)


def symmetric(A: Tensor) -> Tensor:
    """Return ``(A + A^T) / 2``."""
    return (A + A.mT).mul_(0.5)


def sandwich(U: Tensor, middle: Tensor) -> Tensor:
    """Return ``U middle U^T``."""
    return U @ middle @ U.mT


class _EigenRoots(torch.autograd.Function):
    """``A -> (A + eps I)^p`` for one or two ``p``, with the eigenvalues and eigenvectors behind them."""

    @staticmethod
    def forward(
        A: Tensor, powers: tuple[float, ...], method: str, gradient: str, eps: float, rtol: float | None
    ) -> tuple[Tensor, ...]:
        eigenvalues, U = decompose(symmetric(A.to(widest(A))), method)
        parts = split(eigenvalues, eps, rtol)
        roots = ((U * root_values(parts, power).unsqueeze(-2)) @ U.mT for power in powers)
        return *(narrow(root, A.dtype) for root in roots), eigenvalues, U

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        A, *ctx.options = inputs
        *_, eigenvalues, U = output
        ctx.mark_non_differentiable(eigenvalues, U)
        ctx.save_for_backward(A, eigenvalues, U)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        A, eigenvalues, U = ctx.saved_tensors
        powers, _, gradient, eps, rtol = ctx.options
        used = [(power, grad) for power, grad in zip(powers, grads, strict=False) if grad is not None]
        total: Tensor | None = None
        if used:
            with autocast_off(A.device):
                total = _EigenDerivative.apply(
                    tuple(power for power, _ in used),
                    gradient,
                    eps,
                    rtol,
                    A,
                    eigenvalues,
                    U,
                    *(grad for _, grad in used),
                )
        return total, None, None, None, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], A: Tensor, *options: Any
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        assert in_dims[0] is not None
        output = _EigenRoots.apply(A.movedim(in_dims[0], 0), *options)
        return output, (0,) * len(output)


class _EigenDerivative(torch.autograd.Function):
    """``(A, G_1, ...) -> sum_p U (F_p o (U^T G_p U)) U^T``: symmetric in ``G``, so its own adjoint in it."""

    @staticmethod
    def forward(
        powers: tuple[float, ...],
        gradient: str,
        eps: float,
        rtol: float | None,
        A: Tensor,
        eigenvalues: Tensor,
        U: Tensor,
        *grads: Tensor,
    ) -> Tensor:
        parts = split(eigenvalues, eps, rtol)
        rule, options = resolve(GRADIENTS, gradient, "gradient", "backward")
        middles = (
            differences(rule.name, options, parts, power, eps) * _to_eigenbasis(U, G)
            for power, G in zip(powers, grads, strict=True)
        )
        return narrow(sandwich(U, sum(middles, start=U.new_zeros(()))), A.dtype)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: Tensor) -> None:
        *ctx.options, A, eigenvalues, U = inputs[:7]
        ctx.save_for_backward(A, eigenvalues, U, *inputs[7:])

    @staticmethod
    def backward(ctx: Context, H: Tensor) -> tuple[Any, ...]:
        A, eigenvalues, U, *grads = ctx.saved_tensors
        powers, gradient, eps, rtol = ctx.options
        if gradient != "exact":
            raise RuntimeError(f"the gradient rule {gradient!r} can't be differentiated again; use gradient='exact'.")
        with autocast_off(A.device):
            again = (
                _EigenDerivative.apply((power,), gradient, eps, rtol, A, eigenvalues, U, H) if needed else None
                for power, needed in zip(powers, ctx.needs_input_grad[7:], strict=True)
            )
            to_matrix = (
                _EigenSecondDerivative.apply(powers, eps, rtol, A, eigenvalues, U, H, *grads)
                if ctx.needs_input_grad[4]
                else None
            )
            return None, None, None, None, to_matrix, None, None, *again

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        return _EigenDerivative.apply(*inputs[:4], *_batched(info.batch_size, in_dims[4:], inputs[4:])), 0


class _EigenSecondDerivative(torch.autograd.Function):
    """The derivative of ``<H, _EigenDerivative(A, G)>`` with respect to ``A``."""

    @staticmethod
    def forward(
        powers: tuple[float, ...],
        eps: float,
        rtol: float | None,
        A: Tensor,
        eigenvalues: Tensor,
        U: Tensor,
        H: Tensor,
        *grads: Tensor,
    ) -> Tensor:
        parts = split(eigenvalues, eps, rtol)
        H = _to_eigenbasis(U, H)
        middles = (
            second_derivative(parts, power, _to_eigenbasis(U, G), H) for power, G in zip(powers, grads, strict=True)
        )
        return narrow(sandwich(U, sum(middles, start=U.new_zeros(()))), A.dtype)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> Any:
        raise RuntimeError("the matrix roots by eigenvalues are differentiable twice, not three times.")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        return _EigenSecondDerivative.apply(*inputs[:3], *_batched(info.batch_size, in_dims[3:], inputs[3:])), 0


def _to_eigenbasis(U: Tensor, G: Tensor) -> Tensor:
    """Return ``U^T sym(G) U``."""
    return U.mT @ symmetric(G.to(U.dtype)) @ U


def _batched(size: int, dims: tuple[int | None, ...], tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the tensors with the dimension of `torch.vmap` in front, expanded where they had none."""
    return [
        tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(tensors, dims, strict=True)
    ]
