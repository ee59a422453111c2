"""The covariance of samples, as the SVD meta-layer forms it."""

from typing import Any

import torch
from torch import Tensor

from orthocond._core.applying import applied, is_plain, is_plain_inference
from orthocond._core.precision import at_least_float32, autocast_off, lift, widen
from orthocond.errors import ArgumentError, check_matrix

__all__ = ["centred", "check_samples", "covariance", "noise_floor", "sum_of_products", "symmetric_product", "trace"]

_LONGEST = 4096
"""How many terms a sum may have: a million of them, added by one product of float32, lose three digits."""

_BLOCKS, _FEW_FEATURES = 4, 64
"""In how many blocks of rows a symmetric product is taken, and below how many features it isn't worth it."""


def covariance(X: Tensor, *, dim: int = -1) -> Tensor:
    r"""Return the covariance of the samples along ``dim``; for complex samples the Hermitian one, ``X J X^H``.

    .. math:: P = X J X^T, \quad J = \tfrac{1}{N} (I - \tfrac{1}{N} 1 1^T)

    The samples are centred before they are multiplied, in float32 at least. The mean of the centred samples, which is
    the rounding error of the mean, is subtracted from the product, so a large common mean costs no accuracy.
    *Gradient:* :math:`2\,\mathrm{sym}(G) X J` (eq. 8), by one product, for which only ``X`` is kept.

    Args:
        X: features, ``(..., d, N)`` with the samples last; with ``dim=-2`` it is ``(..., N, d)``. In general the
            samples lie along ``dim`` and the features along the last of the other dimensions.
        dim: the dimension of the samples.

    Returns:
        The covariances ``(..., d, d)``, divided by ``N`` rather than ``N - 1``.

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
    check_samples(X, dim, "covariance")
    with autocast_off(X.device):
        samples = lift(X.movedim(dim, -1))
        # A compiler plans the memory of plain operations itself, and takes no function with a forward derivative; nor
        # is that of a function differentiated forward again, by torch.func.
        P: Tensor = applied(_Covariance, samples) if is_plain() else _Covariance.forward(samples)
        return P.to(X.dtype)


def check_samples(X: Tensor, dim: int, caller: str) -> None:
    """Raise unless ``X`` holds samples along ``dim``."""
    check_matrix(X, caller, allow_complex=True)
    if not -X.ndim <= dim < X.ndim:
        raise ArgumentError(f"{caller} got dim={dim} for X of shape {tuple(X.shape)}; pass the samples' dimension.")
    if X.shape[dim] == 0:
        raise ArgumentError(f"{caller} expected at least one sample, got {tuple(X.shape)} with dim={dim}.")


def noise_floor(mean: Tensor, trace: Tensor | None, dtype: torch.dtype) -> Tensor:
    r"""Return the largest eigenvalue ``(...)`` of a covariance that the rounding of its features alone can explain.

    .. math:: u^2 |\mu|^2

    where :math:`u` is the unit roundoff. A feature of the size of its mean is stored with an error of at most
    :math:`u |\mu_j|`, and the trace of the covariance of such errors is the sum of
    their squares. `covariance` adds less: after centring it leaves :math:`(k u)^2 |\mu|` of the mean, where
    :math:`k` is the error of a sum of ``N`` numbers in units of roundoff, about :math:`\log_2 N`; the square of that
    is smaller by :math:`k^4 u^2`. The rounding error of its products is relative to the largest eigenvalue, so
    ``rtol`` covers it.

    Half types are computed in float32, so the roundoff of float32 applies. But where the trace of the covariance is no
    larger than the rounding of the half type, the whole covariance may be rounding, and the floor is the rounding of
    the half type.

    Args:
        mean: means of the features ``(..., d)``.
        trace: traces of the covariances ``(...)``; needed for half types only.
        dtype: what the features were stored in.
    """
    squared_mean = widen(mean.detach()).abs().square().sum(-1)
    floor = _roundoff(at_least_float32(dtype)) ** 2 * squared_mean
    if dtype == at_least_float32(dtype) or trace is None:
        return floor
    coarse = _roundoff(dtype) ** 2 * squared_mean
    return torch.where(trace.detach().to(coarse) <= coarse, coarse, floor)


def sum_of_products(X: Tensor, Y: Tensor, *, longest: int = _LONGEST) -> Tensor:
    """Return ``X Y^H`` over samples ``(..., d, N)`` and ``(..., e, N)``, in sums of at most ``longest`` terms."""
    num_samples = X.shape[-1]
    if num_samples <= longest:
        return X @ Y.mH
    whole = num_samples // longest * longest
    pieces = (part[..., :whole].unflatten(-1, (-1, longest)).transpose(-3, -2) for part in (X, Y))
    total: Tensor = (next(pieces) @ next(pieces).mH).sum(-3)
    return total if whole == num_samples else total + X[..., whole:] @ Y[..., whole:].mH


def symmetric_product(X: Tensor, *, longest: int = _LONGEST) -> Tensor:
    """Return ``X X^T`` as `sum_of_products` does; on a CPU the blocks above the diagonal alone are multiplied."""
    d = X.shape[-2]
    if not X.is_cpu or d < _FEW_FEATURES or not is_plain_inference():
        return sum_of_products(X, X, longest=longest)
    product = X.new_empty(*X.shape[:-1], d)
    size = -(-d // _BLOCKS)
    for start in range(0, d, size):
        rows = sum_of_products(X[..., start : start + size, :], X[..., start:, :], longest=longest)
        product[..., start : start + size, start:] = rows
        product[..., start:, start : start + size] = rows.mT
    return product


def trace(P: Tensor) -> Tensor:
    """Return the traces ``(...)`` of matrices ``(..., d, d)``."""
    return P.diagonal(dim1=-2, dim2=-1).sum(-1)


def centred(X: Tensor) -> Tensor:
    """Return samples ``(..., d, N)`` without their mean: without its rounding, too, which a second mean finds."""
    shifted, rest = _shifted(X)
    return shifted - rest


def _roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


class _Covariance(torch.autograd.Function):
    """``X -> X J X^T`` over the last dimension: plain operations would keep a centred copy, and multiply twice."""

    @staticmethod
    def forward(X: Tensor) -> Tensor:
        shifted, rest = _shifted(X)
        return sum_of_products(shifted, shifted).div_(X.shape[-1]) - rest @ rest.mH

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> Tensor:
        (X,) = ctx.saved_tensors
        with autocast_off(X.device):
            to_X: Tensor = (G + G.mH) / X.shape[-1] @ centred(X)
            return to_X

    @staticmethod
    def jvp(ctx: Any, direction: Tensor) -> Tensor:
        (X,) = ctx.saved_tensors
        half: Tensor = sum_of_products(centred(direction), centred(X)) / X.shape[-1]
        return half + half.mH


def _shifted(X: Tensor) -> tuple[Tensor, Tensor]:
    """Return samples less their mean as it is rounded, and the mean ``(..., d, 1)`` of what is left."""
    shifted = X - X.mean(-1, keepdim=True)
    return shifted, shifted.mean(-1, keepdim=True)
