"""The exponential of matrices, with a gradient that is as accurate at any scale."""

from typing import Any

import torch
from torch import Tensor

from orthocond._core.applying import applied, with_forward_mode
from orthocond.linalg._polar import power_of_two_scale

__all__ = ["exponential"]


def exponential(A: Tensor) -> Tensor:
    r"""Return ``exp(A)`` of matrices ``(..., n, n)``.

    *Gradient:* the derivative in the direction :math:`G` is the corner of another exponential,

    .. math:: \exp \begin{pmatrix} A^T & G \\ 0 & A^T \end{pmatrix}

    which squares its argument the more often, and loses the more digits, the larger :math:`G` is: `torch` loses three
    of them where a loss is scaled by 65536. The derivative is linear, so here :math:`G` is first divided by its norm.

    Reference:
        Higham, Functions of Matrices, 2008, eq. 3.16.
    """
    result: Tensor = applied(_Exponential, A)
    return result


@with_forward_mode
class _Exponential(torch.autograd.Function):
    @staticmethod
    def forward(A: Tensor) -> Tensor:
        result: Tensor = torch.linalg.matrix_exp(A)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> Tensor:
        (A,) = ctx.saved_tensors
        return _derivative(A.mT, G)

    @staticmethod
    def tangent(ctx: Any, saved: tuple[Tensor], direction: Tensor) -> Tensor:
        (A,) = saved
        return _derivative(A, direction)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int], A: Tensor) -> tuple[Tensor, int]:
        # A generated rule has no forward mode of the forward mode, and so no torch.func.hessian.
        return applied(_Exponential, A.movedim(in_dims[0], 0)), 0


def _derivative(A: Tensor, G: Tensor) -> Tensor:
    """Return the derivative of the exponential at ``A`` in the direction ``G``, differentiable again."""
    n = A.shape[-1]
    scale = power_of_two_scale(G.detach().abs().sum(-2, keepdim=True))
    top = torch.cat([A, G * scale], -1)
    bottom = torch.cat([torch.zeros_like(A), A], -1)
    return exponential(torch.cat([top, bottom], -2))[..., :n, n:] / scale
