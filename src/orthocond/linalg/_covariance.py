"""The covariance of samples, as the SVD meta-layer forms it."""

from typing import Any

import torch
from torch import Tensor

from orthocond._core.applying import applied, is_plain
from orthocond._core.precision import autocast_off, lift
from orthocond.errors import ArgumentError, check_matrix

__all__ = ["covariance"]


def covariance(X: Tensor, *, dim: int = -1) -> Tensor:
    r"""Return the covariance of the samples along ``dim``; for complex samples the Hermitian one, ``X J X^H``.

    .. math:: P = X J X^T, \quad J = \tfrac{1}{N} (I - \tfrac{1}{N} 1 1^T)

    The samples are centred before they are multiplied, in float32 at least, so a large common mean costs no
    accuracy. *Gradient:* :math:`2\,\mathrm{sym}(G) X J` (eq. 8), by one product, for which only ``X`` is kept.

    Args:
        X: features, ``(..., d, N)`` with the samples last; with ``dim=-2`` it is ``(..., N, d)``. In general the
            samples lie along ``dim`` and the features along the last of the other dimensions.
        dim: the dimension of the samples.

    Returns:
        The covariances ``(..., d, d)``, divided by ``N`` and not by ``N - 1``.

    Raises:
        ArgumentError: ``X`` has fewer than two dimensions, ``dim`` is not one of them, or there is no sample.

    Reference:
        Song, Sebe, Wang 2022, eq. 2.

    Example:
        >>> import torch
        >>> X = torch.tensor([[1.0, 3.0], [0.0, 4.0]])
        >>> covariance(X)
        tensor([[1., 2.],
                [2., 4.]])
    """
    check_matrix(X, "covariance", allow_complex=True)
    if not -X.ndim <= dim < X.ndim:
        raise ArgumentError(f"covariance got dim={dim} for X of shape {tuple(X.shape)}; pass the samples' dimension.")
    num_samples = X.shape[dim]
    if num_samples == 0:
        raise ArgumentError(f"covariance expected at least one sample, got {tuple(X.shape)} with dim={dim}.")
    with autocast_off(X.device):
        samples = lift(X.movedim(dim, -1))
        # A compiler plans the memory of plain operations itself, and takes no function with a forward derivative; nor
        # is that of a function differentiated forward again, by torch.func.
        P: Tensor = applied(_Covariance, samples) if is_plain() else _Covariance.forward(samples)
        return P.to(X.dtype)


class _Covariance(torch.autograd.Function):
    """``X -> X J X^T`` over the last dimension: plain operations would keep a centred copy, and multiply twice."""

    @staticmethod
    def forward(X: Tensor) -> Tensor:
        centred = _centred(X)
        return (centred @ centred.mH).div_(X.shape[-1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> Tensor:
        (X,) = ctx.saved_tensors
        with autocast_off(X.device):
            to_X: Tensor = (G + G.mH) / X.shape[-1] @ _centred(X)
            return to_X

    @staticmethod
    def jvp(ctx: Any, direction: Tensor) -> Tensor:
        (X,) = ctx.saved_tensors
        half: Tensor = _centred(direction) @ _centred(X).mH / X.shape[-1]
        return half + half.mH


def _centred(X: Tensor) -> Tensor:
    return X - X.mean(-1, keepdim=True)
