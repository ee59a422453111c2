"""Distances between covariances and between Gaussians, with gradients that are finite everywhere.

Each of them contains ``tr (A^(1/2) B A^(1/2))^(1/2)``. With factors ``A = L L^H``, ``B = M M^H`` it is the nuclear
norm of ``L^H M``, and the gradient of a nuclear norm is a polar factor: bounded by 1, and zero in a null space.
Centred features are such factors of their covariance, so with fewer samples than dimensions nothing larger than the
samples is decomposed.
"""

from typing import Any

import torch
from torch import Tensor

from orthocond._core.applying import applied, with_forward_mode
from orthocond._core.precision import autocast_off, narrow, widen
from orthocond.errors import ArgumentError, check_broadcast, check_floating, check_matrix, check_square
from orthocond.linalg._eigen import Context
from orthocond.linalg._polar import nearest_orthogonal
from orthocond.linalg._roots import default_rtol, matrix_sqrth

__all__ = ["bures_distance", "frechet_distance", "gaussian_frechet_distance"]


def bures_distance(A: Tensor, B: Tensor) -> Tensor:
    r"""Return the squared Bures-Wasserstein distance between covariances.

    .. math:: d^2 = \mathrm{tr} A + \mathrm{tr} B - 2 \, \mathrm{tr} (A^{1/2} B A^{1/2})^{1/2}

    *Gradient:* :math:`I - T` with the map :math:`T` that transports one Gaussian to the other; zero for equal
    covariances. Null directions of a covariance (as in `matrix_sqrth`) have no gradient, so it is finite where ranks
    differ.

    Args:
        A: symmetric positive semi-definite matrices ``(..., n, n)``, real or complex.
        B: likewise; batch dimensions are broadcast.

    Returns:
        The squared distances ``(...)``, not negative, in the dtype of ``A``.

    Raises:
        ArgumentError, DtypeError, NonFiniteError, SolverError: as in `matrix_sqrth`.

    Reference:
        Bhatia, Jain, Lim, On the Bures-Wasserstein distance between positive definite matrices, 2019.

    Example:
        >>> bures_distance(torch.diag(torch.tensor([4.0, 1.0])), torch.eye(2))  # (2 - 1)^2 + (1 - 1)^2
        tensor(1.)
    """
    for matrix in (A, B):
        check_square(matrix, "bures_distance", allow_complex=True)
    _check_same("bures_distance", A.shape[-1], B.shape[-1])
    check_broadcast("bures_distance", A.shape[:-2], B.shape[:-2])
    with autocast_off(A.device):
        return _narrow(_bures(A, B), A)


def gaussian_frechet_distance(mean1: Tensor, cov1: Tensor, mean2: Tensor, cov2: Tensor) -> Tensor:
    r"""Return the squared Frechet distance (2-Wasserstein) between Gaussians.

    .. math:: \|\mu_1 - \mu_2\|^2 + d^2(\Sigma_1, \Sigma_2)

    where :math:`d^2` is the `bures_distance`. *Gradient:* as in `bures_distance`.

    Args:
        mean1: means ``(..., n)``.
        cov1: covariances ``(..., n, n)``.
        mean2: means of the other Gaussians.
        cov2: covariances of the other Gaussians.

    Returns:
        The squared distances ``(...)``, in the dtype of ``mean1``.

    Raises:
        ArgumentError: shapes that don't fit; otherwise as in `bures_distance`.

    Reference:
        Dowson and Landau, The Frechet distance between multivariate normal distributions, 1982.

    Example:
        >>> gaussian_frechet_distance(torch.zeros(2), torch.eye(2), torch.ones(2), 4 * torch.eye(2))
        tensor(4.)
    """
    for mean, covariance in ((mean1, cov1), (mean2, cov2)):
        _check_gaussian("gaussian_frechet_distance", mean, covariance)
    _check_same("gaussian_frechet_distance", cov1.shape[-1], cov2.shape[-1])
    batches = mean1.shape[:-1], cov1.shape[:-2], mean2.shape[:-1], cov2.shape[:-2]
    check_broadcast("gaussian_frechet_distance", *batches)
    with autocast_off(mean1.device):
        return _narrow(_squared(widen(mean1) - widen(mean2)) + _bures(cov1, cov2), mean1)


def frechet_distance(X: Tensor, Y: Tensor | tuple[Tensor, Tensor], *, dim: int = -1) -> Tensor:
    r"""Return the squared Frechet distance between Gaussians fitted to features: the FID, for training too.

    It is `gaussian_frechet_distance` of means and covariances (divided by the number of samples), at the cost of the
    smaller side of the features: fewer samples than dimensions is the cheap case.

    *Gradient:* finite everywhere: for equal features, for fewer samples than dimensions, for constant features. Exact
    unless a singular value of :math:`X_c^H Y_c` is zero, where the distance has a kink; there it is the subgradient of
    smallest norm.

    Args:
        X: features ``(..., d, N)`` with the samples last; in general the samples lie along ``dim`` and the features
            along the last of the other dimensions, as in `covariance`.
        Y: features of the reference, with as many dimensions ``d``; or its mean ``(..., d)`` and covariance
            ``(..., d, d)``.
        dim: the dimension of the samples, in ``Y`` too.

    Returns:
        The squared distances ``(...)``, not negative, in the dtype of ``X``.

    Raises:
        ArgumentError: shapes that don't fit; otherwise as in `matrix_sqrth`.

    Reference:
        Heusel et al., GANs trained by a two time-scale update rule, NeurIPS 2017 (FID).

    Example:
        >>> X = torch.tensor([[0.0, 2.0, 0.0, 2.0], [0.0, 0.0, 2.0, 2.0]])
        >>> frechet_distance(X, 3 * X), frechet_distance(X, X)
        (tensor(16.), tensor(0.))
    """
    samples = _samples("X", X, dim)
    reference = None if isinstance(Y, tuple) else _samples("Y", Y, dim)
    with autocast_off(X.device):
        wide = widen(samples)
        mean, num = wide.mean(-1), samples.shape[-1]
        centred = (wide - mean.unsqueeze(-1)) / num**0.5
        if reference is not None:
            _check_same("frechet_distance", samples.shape[-2], reference.shape[-2])
            check_broadcast("frechet_distance", samples.shape[:-2], reference.shape[:-2])
            other = widen(reference)
            other_mean = other.mean(-1)
            other_centred = (other - other_mean.unsqueeze(-1)) / reference.shape[-1] ** 0.5
            traces = _squared(centred.flatten(-2)) + _squared(other_centred.flatten(-2))
            shared = nuclear_norm(_factor(centred, X).mH @ _factor(other_centred, X))
        else:
            assert isinstance(Y, tuple)
            if len(Y) != 2:
                raise ArgumentError(
                    "frechet_distance expected features, or a mean and a covariance, got a tuple of length "
                    f"{len(Y)}; pass (mean, covariance)."
                )
            other_mean, other_covariance = Y
            _check_gaussian("frechet_distance", other_mean, other_covariance)
            _check_same("frechet_distance", samples.shape[-2], other_covariance.shape[-1])
            check_broadcast("frechet_distance", mean.shape[:-1], other_mean.shape[:-1], other_covariance.shape[:-2])
            other_mean, B = widen(other_mean), widen(other_covariance)
            traces = _squared(centred.flatten(-2)) + _trace(B)
            if num <= samples.shape[-2]:  # tr (L^H B L)^(1/2) of the samples' size
                shared = _trace(matrix_sqrth(centred.mH @ B @ centred, rtol=default_rtol(X, None)))
            else:
                shared = nuclear_norm(
                    _factor(centred, X).mH @ matrix_sqrth(B, rtol=default_rtol(other_covariance, None))
                )
        return _narrow(_squared(mean - other_mean) + _not_negative(traces - 2 * shared), X)


def nuclear_norm(M: Tensor) -> Tensor:
    """Return the sum of the singular values; its gradient is the polar factor, which is zero in null spaces."""
    value: Tensor = applied(_NuclearNorm, M)[0]
    return value


@with_forward_mode
class _NuclearNorm(torch.autograd.Function):
    """``M -> tr |M|``, and the polar factor behind it."""

    @staticmethod
    def forward(M: Tensor) -> tuple[Tensor, Tensor]:
        R = nearest_orthogonal(M)
        return _inner(R, M), R

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        (M,), (_, R) = inputs, output
        ctx.mark_non_differentiable(R)
        ctx.save_for_backward(M, R)
        ctx.save_for_forward(M, R)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Context, G: Tensor | None, _: None) -> Tensor | None:
        if G is None:
            return None
        M, R = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient may be differentiated again
            R = nearest_orthogonal(M)
        to_M: Tensor = G.unsqueeze(-1).unsqueeze(-1) * R
        return to_M

    @staticmethod
    def tangent(ctx: Context, saved: tuple[Tensor, Tensor], direction: Tensor) -> tuple[Tensor, None]:
        return _inner(nearest_orthogonal(saved[0]), direction), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int], M: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        return applied(_NuclearNorm, M.movedim(in_dims[0], 0)), (0, 0)


def _bures(A: Tensor, B: Tensor) -> Tensor:
    roots = [matrix_sqrth(widen(matrix), rtol=default_rtol(matrix, None)) for matrix in (A, B)]
    traces = _trace(widen(A)) + _trace(widen(B))
    return _not_negative(traces - 2 * nuclear_norm(roots[0] @ roots[1]))


def _factor(centred: Tensor, features: Tensor) -> Tensor:
    """Return ``L`` with ``L L^H`` the covariance: the features themselves, or where these are more the root of it."""
    if centred.shape[-1] <= centred.shape[-2]:
        return centred
    return matrix_sqrth(centred @ centred.mH, rtol=centred.shape[-2] * torch.finfo(features.dtype).eps ** 2)


def _samples(name: str, X: Tensor, dim: int) -> Tensor:
    check_matrix(X, "frechet_distance", allow_complex=True)
    if not -X.ndim <= dim < X.ndim or X.shape[dim] == 0:
        raise ArgumentError(
            f"frechet_distance got {name} of shape {tuple(X.shape)} with dim={dim}; pass the samples' dimension, with "
            "at least one sample."
        )
    return X.movedim(dim, -1)


def _check_gaussian(caller: str, mean: Tensor, covariance: Tensor) -> None:
    check_floating(mean, caller, allow_complex=True)
    check_square(covariance, caller, allow_complex=True)
    if mean.ndim < 1 or mean.shape[-1] != covariance.shape[-1]:
        raise ArgumentError(
            f"{caller} expected a mean (..., n) and a covariance (..., n, n), got {tuple(mean.shape)} and "
            f"{tuple(covariance.shape)}; pass e.g. X.mean(-1) and covariance(X)."
        )


def _check_same(caller: str, n: int, m: int) -> None:
    if n != m:
        raise ArgumentError(
            f"{caller} expected as many dimensions on both sides, got {n} and {m}; use the same features."
        )


def _trace(A: Tensor) -> Tensor:
    return A.diagonal(dim1=-2, dim2=-1).real.sum(-1)


def _inner(A: Tensor, B: Tensor) -> Tensor:
    return (A.conj() * B).real.sum((-2, -1))


def _squared(x: Tensor) -> Tensor:
    return (x.conj() * x).real.sum(-1)


def _not_negative(distance: Tensor) -> Tensor:
    """Return what rounding made negative as zero, with the gradient as it is."""
    return distance + (distance.clamp(min=0) - distance).detach()


def _narrow(distance: Tensor, like: Tensor) -> Tensor:
    return narrow(distance, like.real if like.is_complex() else like)
