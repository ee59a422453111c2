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
from orthocond.nn._features import Features, features

__all__ = ["Statistics", "check_num_samples", "summed", "whiten", "whiten_by_autograd"]

Root = Callable[[Tensor], tuple[Tensor, Tensor | None]]
"""From covariances ``(groups, c, c)`` to their inverse roots, differentiable, and their eigenvalues where known."""

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
    eigenvalues: Tensor | None
    """``(groups, c)``, ascending"""


def whiten(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    *,
    groups: int,
    root: Root,
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
        process_group: the processes that share the statistics where ``sync``.
        sync: take the statistics over all processes of the group.
    """
    y, *found = _Whiten.apply(x, gamma, beta, groups, root, process_group, sync)
    return y, Statistics(*found)


def whiten_by_autograd(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, *, groups: int, root: Root
) -> tuple[Tensor, Statistics]:
    """Return the same by plain differentiable operations: slower, but differentiable again and traceable."""
    channels = x.shape[1]
    samples = x.movedim(1, 0).reshape(groups, channels // groups, -1)
    mean = samples.mean(-1)
    P = covariance(samples)
    S, eigenvalues = root(P)
    y = (S @ (samples - mean.unsqueeze(-1))).reshape(channels, x.shape[0], *x.shape[2:]).movedim(0, 1)
    broadcast = (1, channels) + (1,) * (x.ndim - 2)
    if gamma is not None:
        y = y * gamma.view(broadcast)
    if beta is not None:
        y = y + beta.view(broadcast)
    return y, Statistics(mean.detach(), P.detach(), S.detach(), eigenvalues)


class _Whiten(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gamma: Tensor | None,
        beta: Tensor | None,
        groups: int,
        root: Root,
        process_group: Any,
        sync: bool,
    ) -> tuple[Tensor | None, ...]:
        samples, mean, is_centred, P, num_samples = _moments(features(x, groups), process_group, sync)
        # The root's own graph on the small matrices: whatever solver and gradient rule it has.
        wanted = any(ctx.needs_input_grad[:3]) and not torch.is_inference_mode_enabled()
        with torch.set_grad_enabled(wanted), _kept_as_it_is():
            leaf = P.detach().requires_grad_(wanted)
            S, eigenvalues = root(leaf)
        whitening = S.detach()
        W = whitening if gamma is None else gamma.view(groups, -1, 1) * whitening
        bias = torch.zeros_like(mean) if is_centred else -_times(W, mean)
        if beta is not None:
            bias = bias + beta.view(groups, -1)
        ctx.save_for_backward(x, gamma, beta, mean, W)
        ctx.root, ctx.graph, ctx.is_centred = root, (leaf, S), is_centred
        ctx.groups, ctx.num_samples, ctx.process_group, ctx.sync = groups, num_samples, process_group, sync
        statistics = (mean, P, whitening, eigenvalues)
        ctx.mark_non_differentiable(*(part for part in statistics if part is not None))
        # Detached, it is no view: autograd forbids in-place operations on views that a function returns.
        return samples.map(W, bias).tensor().detach(), *statistics

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, gamma, beta, mean, W = ctx.saved_tensors
        if torch.is_grad_enabled():  # asked for a graph: by operations that have one
            return _backward_with_graph(ctx, x, gamma, beta, g)
        with autocast_off(x.device):
            return *_backward(ctx, x, gamma, mean, W, g), None, None, None, None


def _backward(
    ctx: Any, x: Tensor, gamma: Tensor | None, mean: Tensor, W: Tensor, g: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    groups = ctx.groups
    samples = features(x, groups)
    if ctx.is_centred:
        samples, centre = samples.shifted(mean), torch.zeros_like(mean)
    else:
        centre = mean
    incoming = type(samples).view(g, groups)
    h = incoming.sum()
    R = incoming.product(samples) - h.unsqueeze(-1) * centre.unsqueeze(-2)
    leaf, S = ctx.graph
    dgamma = (R * S.detach()).sum(-1).flatten() if ctx.needs_input_grad[1] else None
    dbeta = h.flatten() if ctx.needs_input_grad[2] else None
    if ctx.sync:  # also where this process needs no gradient of its input: the others wait for it
        R, h = summed([R, h], ctx.process_group)
    if not ctx.needs_input_grad[0]:
        return None, dgamma, dbeta
    dS = R if gamma is None else gamma.view(groups, -1, 1) * R
    (E,) = torch.autograd.grad(S, leaf, dS, retain_graph=True)
    K = (2 / ctx.num_samples) * E
    dx = samples.map(K, -_times(W.mT, h / ctx.num_samples) - _times(K, centre)).add_map_(W.mT, incoming)
    return dx.tensor(), dgamma, dbeta


def _backward_with_graph(
    ctx: Any, x: Tensor, gamma: Tensor | None, beta: Tensor | None, g: Tensor
) -> tuple[Tensor | None, ...]:
    if ctx.sync:
        raise GradientError("synchronised whitening can't be differentiated twice; pass sync=False for that.")
    y, _ = whiten_by_autograd(x, gamma, beta, groups=ctx.groups, root=ctx.root)
    inputs = [part for part in (x, gamma, beta) if part is not None and part.requires_grad]
    found = iter(torch.autograd.grad(y, inputs, g, create_graph=True))
    to_inputs = (next(found) if part is not None and part.requires_grad else None for part in (x, gamma, beta))
    return *to_inputs, None, None, None, None


def check_num_samples(num_samples: float, shape: torch.Size) -> None:
    """Raise unless there are enough samples for a covariance."""
    if num_samples < 2:
        raise ArgumentError(
            f"expected at least two samples in training, got {int(num_samples)} with an input of shape "
            f"{tuple(shape)}; use a larger batch, or eval mode."
        )


def _moments(samples: Features, process_group: Any, sync: bool) -> tuple[Features, Tensor, bool, Tensor, float]:
    """Return the samples, centred where the accuracy asks for it, their mean, whether, their covariance and number.

    Mean, covariance and number are those of all processes.
    """
    own_sum, num_samples = samples.sum(), float(samples.num_samples)
    total = own_sum
    if sync:
        total, count = summed([own_sum, own_sum.new_full((1,), num_samples)], process_group)
        num_samples = count.item()
    check_num_samples(num_samples, samples.shape)
    mean = total / num_samples
    second = samples.product(samples)
    squared_mean = samples.num_samples * mean.square()
    small = squared_mean * (1 + 1 / _LARGEST_SQUARED_MEAN) <= second.diagonal(dim1=-2, dim2=-1)
    is_centred = not second.is_meta and not bool(small.all())
    if is_centred:
        samples = samples.shifted(mean)
        second = samples.product(samples)
    else:
        cross = own_sum.unsqueeze(-1) * mean.unsqueeze(-2)
        second = second - cross - cross.mT + samples.num_samples * mean.unsqueeze(-1) * mean.unsqueeze(-2)
    if sync:
        (second,) = summed([second], process_group)
    return samples, mean, is_centred, second / num_samples, num_samples


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
