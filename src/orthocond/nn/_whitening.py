"""Whitening of a feature map as one differentiable function, over one process or several.

With the mean ``m`` and the covariance ``P`` of the samples, ``S = P^(-1/2)`` and an affine part ``gamma, beta``:

    y = W (x - m) + beta,    W = diag(gamma) S

Backward, with the sums ``R = sum g (x - m)^T`` and ``h = sum g`` over the ``M`` samples, and ``E`` the gradient of the
root with respect to ``P`` for the incoming ``diag(gamma) R``:

    dx = W^T g + (2/M) E (x - m) - (1/M) W^T h,    dgamma = diag(R S),    dbeta = h

That is five products over the features in all, of which only ``x`` is kept for the backward pass.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from orthocond._core import private
from orthocond._core.distributed import summed
from orthocond._core.precision import autocast_off
from orthocond.errors import ArgumentError, GradientError
from orthocond.linalg import covariance
from orthocond.linalg._covariance import centred, noise_floor, trace
from orthocond.nn._features import Features, features

__all__ = ["Statistics", "check_num_samples", "summed", "whiten", "whiten_by_autograd"]

Root = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""From covariances ``(groups, c, c)`` and their rounding noise ``(groups,)`` to their inverse roots, differentiable,
and their eigenvalues where known."""

# Without centring, a covariance is the difference of two numbers of the size of the squared mean: beyond this ratio
# to the variance, float32 would lose more than the last two digits.
_LARGEST_SQUARED_MEAN = 32.0


class Statistics(NamedTuple):
    """What a training step learned about the features: all detached."""

    mean: Tensor
    """``(groups, c)``"""
    covariance: Tensor
    """``(groups, c, c)``"""
    whitening: Tensor
    """``(groups, c, c)``"""
    noise: Tensor
    """``(groups,)``: of the covariance, by rounding"""
    eigenvalues: Tensor | None
    """``(groups, c)``, ascending"""


def whiten(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    *,
    groups: int,
    root: Root,
    stored: torch.dtype,
    process_group: Any = None,
    sync: bool = False,
) -> tuple[Tensor, Statistics]:
    """Return the whitened features and the statistics that whitened them.

    Args:
        x: features ``(N, C, *)``, float32 or float64.
        gamma: scale ``(C,)``, or None.
        beta: shift ``(C,)``, or None.
        groups: the channels are whitened in this many groups.
        root: the inverse root.
        stored: the dtype that the features were rounded to.
        process_group: the processes that share the statistics where ``sync``.
        sync: take the statistics over all processes of the group.
    """
    y, *found = _Whiten.apply(x, gamma, beta, groups, root, stored, process_group, sync)
    return y, Statistics(*found)


def whiten_by_autograd(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, *, groups: int, root: Root, stored: torch.dtype
) -> tuple[Tensor, Statistics]:
    """Return the same by plain differentiable operations: slower, but differentiable again and traceable."""
    channels = x.shape[1]
    samples = x.movedim(1, 0).reshape(groups, channels // groups, -1)
    mean = samples.mean(-1)
    P = covariance(samples)
    noise = noise_floor(mean, trace(P), stored)
    S, eigenvalues = root(P, noise)
    y = (S @ centred(samples)).reshape(channels, x.shape[0], *x.shape[2:]).movedim(0, 1)
    broadcast = (1, channels) + (1,) * (x.ndim - 2)
    if gamma is not None:
        y = y * gamma.view(broadcast)
    if beta is not None:
        y = y + beta.view(broadcast)
    return y, Statistics(mean.detach(), P.detach(), S.detach(), noise, eigenvalues)


_NO_OPTIONS = (None, None, None, None, None)
"""The gradients of what isn't a tensor."""


class _Whiten(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gamma: Tensor | None,
        beta: Tensor | None,
        groups: int,
        root: Root,
        stored: torch.dtype,
        process_group: Any,
        sync: bool,
    ) -> tuple[Tensor | None, ...]:
        samples, moments = _moments(features(x, groups), process_group, sync)
        P = moments.covariance
        noise = noise_floor(moments.mean, trace(P), stored)
        # The root's own graph on the small matrices: whatever solver and gradient rule it has.
        wanted = any(ctx.needs_input_grad[:3]) and not torch.is_inference_mode_enabled()
        with torch.set_grad_enabled(wanted), _kept_as_it_is():
            leaf = P.detach().requires_grad_(wanted)
            S, eigenvalues = root(leaf, noise)
        whitening = S.detach()
        W = whitening if gamma is None else gamma.view(groups, -1, 1) * whitening
        bias = -_times(W, moments.centre)
        if beta is not None:
            bias = bias + beta.view(groups, -1)
        ctx.save_for_backward(x, gamma, beta, moments.shift, moments.centre, W)
        ctx.root, ctx.stored, ctx.graph = root, stored, (leaf, S)
        ctx.groups, ctx.num_samples, ctx.process_group, ctx.sync = groups, moments.num_samples, process_group, sync
        statistics = (moments.mean, P, whitening, noise, eigenvalues)
        ctx.mark_non_differentiable(*(part for part in statistics if part is not None))
        # Detached, it is no view: autograd forbids in-place operations on views that a function returns.
        return samples.map(W, bias).tensor().detach(), *statistics

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, gamma, beta, shift, centre, W = ctx.saved_tensors
        with autocast_off(x.device):
            if torch.is_grad_enabled():  # asked for a graph: by operations that have one
                return _backward_with_graph(ctx, x, gamma, beta, g)
            return *_backward(ctx, x, gamma, shift, centre, W, g), *_NO_OPTIONS


def _backward(
    ctx: Any, x: Tensor, gamma: Tensor | None, shift: Tensor | None, centre: Tensor, W: Tensor, g: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    groups = ctx.groups
    samples = features(x, groups)
    if shift is not None:
        samples = samples.shifted(shift)
    incoming = type(samples).view(g, groups)
    h = incoming.sum()
    R = incoming.product(samples) - _outer(h, centre)
    leaf, S = ctx.graph
    dgamma = (R * S.detach()).sum(-1).reshape(-1) if ctx.needs_input_grad[1] else None
    dbeta = h.reshape(-1) if ctx.needs_input_grad[2] else None
    if ctx.sync:  # also where this process needs no gradient of its input: the others wait for it
        R, h = summed([R, h], ctx.process_group)
    if not ctx.needs_input_grad[0]:
        return None, dgamma, dbeta
    dS = R if gamma is None else gamma.view(groups, -1, 1) * R
    (E,) = torch.autograd.grad(S, leaf, dS, retain_graph=True)
    K = (2 / ctx.num_samples) * E
    bias = -_times(W.mT, h / ctx.num_samples) - _times(K, centre)
    dx = samples.map(K, bias, (W.mT, incoming))
    return dx.tensor(), dgamma, dbeta


def _backward_with_graph(
    ctx: Any, x: Tensor, gamma: Tensor | None, beta: Tensor | None, g: Tensor
) -> tuple[Tensor | None, ...]:
    if ctx.sync:
        raise GradientError("synchronised whitening can't be differentiated twice; pass sync=False for that.")
    y, _ = whiten_by_autograd(x, gamma, beta, groups=ctx.groups, root=ctx.root, stored=ctx.stored)
    inputs = [part for part in (x, gamma, beta) if part is not None and part.requires_grad]
    found = iter(torch.autograd.grad(y, inputs, g, create_graph=True))
    to_inputs = (next(found) if part is not None and part.requires_grad else None for part in (x, gamma, beta))
    return *to_inputs, *_NO_OPTIONS


def check_num_samples(num_samples: float, shape: torch.Size) -> None:
    """Raise unless there are enough samples for a covariance."""
    if num_samples < 2:
        raise ArgumentError(
            f"expected at least two samples in training, got {int(num_samples)} with an input of shape "
            f"{tuple(shape)}; use a larger batch, or eval mode."
        )


class _Moments(NamedTuple):
    """Mean, covariance and number of the samples of all processes."""

    mean: Tensor
    covariance: Tensor
    num_samples: float
    shift: Tensor | None
    """What was subtracted from the samples of this process first, where the accuracy asks for it."""
    centre: Tensor
    """The mean less that shift; more accurate than the mean."""


def _moments(samples: Features, process_group: Any, sync: bool) -> tuple[Features, _Moments]:
    """Return the samples, shifted where the accuracy asks for it, and their moments.

    With ``m`` the mean as it is rounded and ``r`` the mean of ``x - m``, which is its rounding error, the covariance is
    the mean of ``(x - m) (x - m)^T`` less ``r r^T``.
    """
    own_sum, second = samples.sum(), samples.product(samples)
    own, num_samples, total = samples.num_samples, float(samples.num_samples), own_sum
    if sync:
        total, count = summed([own_sum, own_sum.new_full((1,), num_samples)], process_group)
        num_samples = count.item()
    check_num_samples(num_samples, samples.shape)
    mean = total / num_samples
    small = own * mean.square() * (1 + 1 / _LARGEST_SQUARED_MEAN) <= second.diagonal(dim1=-2, dim2=-1)
    shift = None if second.is_meta or bool(small.all()) else mean
    if shift is not None:
        samples = samples.shifted(shift)
        rest, second = samples.sum(), samples.product(samples)
    else:
        rest = own_sum - own * mean
        second = second - _outer(own_sum, mean) - _outer(mean, rest)
    if sync:
        rest, second = summed([rest, second], process_group)
    rest = rest / num_samples
    P = second / num_samples - _outer(rest, rest)
    return samples, _Moments(mean + rest, P, num_samples, shift, rest if shift is not None else mean + rest)


def _outer(x: Tensor, y: Tensor) -> Tensor:
    return x.unsqueeze(-1) * y.unsqueeze(-2)


def _kept_as_it_is() -> AbstractContextManager[object]:
    """Return a context in which no hook from outside gets what is saved for the gradient.

    A graph within a graph is differentiated by a call of its own, for which activation checkpointing would run the
    layer once more. The matrices in it are small.
    """
    return nullcontext() if private.saved_tensors_hooks(False) is None else saved_tensors_hooks(_same, _same)


def _same(saved: Tensor) -> Tensor:
    return saved


def _times(matrices: Tensor, vectors: Tensor) -> Tensor:
    return (matrices @ vectors.unsqueeze(-1)).squeeze(-1)
