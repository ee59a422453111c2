"""The covariance of samples, as the SVD meta-layer forms it."""

from torch import Tensor

from orthocond.errors import ArgumentError, check_matrix
from orthocond.linalg._precision import autocast_off, lift

__all__ = ["covariance"]


def covariance(X: Tensor, *, dim: int = -1) -> Tensor:
    r"""Return the covariance of the samples along ``dim``.

    .. math:: P = X J X^T, \quad J = \tfrac{1}{N} (I - \tfrac{1}{N} 1 1^T)

    The samples are centred before they are multiplied, in float32 at least, so a large common mean costs no
    accuracy. *Gradient:* :math:`2\,\mathrm{sym}(G) X J` (eq. 8).

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
    check_matrix(X, "covariance")
    if not -X.ndim <= dim < X.ndim:
        raise ArgumentError(f"covariance got dim={dim} for X of shape {tuple(X.shape)}; pass the samples' dimension.")
    num_samples = X.shape[dim]
    if num_samples == 0:
        raise ArgumentError(f"covariance expected at least one sample, got {tuple(X.shape)} with dim={dim}.")
    with autocast_off(X.device):
        samples = lift(X.movedim(dim, -1))
        centred = samples - samples.mean(-1, keepdim=True)
        return (centred @ centred.mT / num_samples).to(X.dtype)
