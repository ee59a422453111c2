"""What a change of gauge needs to know of the layer's input: the gradient at the new weight, and how to measure a step.

With the covariance ``S`` of the input, all of it is about ``M = W S^(1/2)``, of which whitening gives the polar factor:
see docs/gauge.md.
"""

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from orthocond.linalg._eigen import symmetric
from orthocond.linalg._kernels import matrix_kernel
from orthocond.linalg._precision import autocast_off, widen
from orthocond.nn._whitening import summed

__all__ = ["InputCovariance", "gradient_after", "input_covariance", "metric_root"]

_LARGEST_PATCHES = 2**24
"""So many numbers of patches are held at once."""


class InputCovariance(NamedTuple):
    """The covariance of what a layer multiplies by its weight, in float64."""

    S: Tensor
    """``(groups, k, k)``: a matrix for each group of the layer."""
    num_samples: int


def input_covariance(
    layer: nn.Module,
    x: Tensor,
    *,
    positions: int,
    layout: dict[str, Any],
    sync: bool = False,
    process_group: Any = None,
) -> InputCovariance:
    """Return the covariance of the input of a linear layer, or of the patches that a convolution sees.

    Args:
        layer: linear, or a convolution of any kind.
        x: its input.
        positions: how many samples an image gives.
        layout: groups and kind of the layer, as `orthocond.linalg._kernels.kernel_matrix` takes them.
        sync: take it over all processes of the group.
        process_group: these.
    """
    patches = _Patches(layer, layout)
    x = patches.batched(x.detach().to(layer.weight.dtype))  # type: ignore[arg-type]
    at_once = max(1, _LARGEST_PATCHES // (patches.size * layout["groups"] * positions))
    total: list[Tensor] = []
    shift = None
    with autocast_off(x.device):
        for part in x.split(at_once):
            samples = patches(part)
            if shift is None:  # near the mean, so that the mean's square drowns nothing
                shift = samples.mean(-1, keepdim=True)
            samples = samples - shift
            moments = [
                widen(samples.sum(-1)),
                widen(samples @ samples.mT),
                widen(samples.new_tensor(samples.shape[-1])),
            ]
            total = [a + b for a, b in zip(total, moments, strict=True)] if total else moments
    assert shift is not None
    sums, products, count = total
    centre = widen(shift.squeeze(-1))
    mean = sums / count + centre
    second = products - sums.unsqueeze(-1) * sums.unsqueeze(-2) / count
    if sync:
        weighted, everywhere = summed([count * mean, count.reshape(1)], process_group)
        away = mean - weighted / everywhere
        (second,) = summed([second + count * away.unsqueeze(-1) * away.unsqueeze(-2)], process_group)
        count = everywhere.squeeze()
    return InputCovariance(symmetric(second / count), int(count))


class _Patches:
    """A layer with the identity for a weight: what it gives are the vectors that it multiplies by its own."""

    def __init__(self, layer: Any, layout: dict[str, Any]) -> None:
        weight, groups = layer.weight, layout["groups"]
        self.layout, self.ndim, self.size = layout, weight.ndim, 0
        if weight.ndim == 2:
            self.size = weight.shape[1]
            return
        in_channels, kernel = (weight.shape[0] // groups if layout["transposed"] else weight.shape[1]), weight.shape[2:]
        self.size = in_channels * kernel.numel()
        shape = (weight.shape[0], self.size) if layout["transposed"] else (groups * self.size, in_channels)
        identity = torch.eye(self.size, dtype=weight.dtype, device=weight.device).expand(groups, -1, -1)
        self._layer = copy.copy(layer)
        self._layer._parameters = {
            "weight": nn.Parameter(matrix_kernel(identity, weight.new_empty(*shape, *kernel), **layout), False),
            "bias": None,
        }

    def batched(self, x: Tensor) -> Tensor:
        """Return the input with the samples, or images, in the first dimension."""
        if self.ndim == 2:
            return x.reshape(-1, self.size)
        return x if x.ndim == self.ndim else x.unsqueeze(0)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the patches ``(groups, size, samples)``."""
        if self.ndim == 2:
            return x.mT.unsqueeze(0)
        found: Tensor = self._layer.forward(x)  # not a call: that would run the hooks of the layer
        return found.movedim(1, 0).reshape(self.layout["groups"], self.size, -1)


def gradient_after(G: Tensor, W: Tensor, S: Tensor, c: Tensor, *, rtol: float = 0.0) -> Tensor:
    r"""Return the gradient at ``T W`` of what has the gradient ``G`` at ``W``, if it goes through whitening.

    In the bases of the singular vectors of :math:`M = W S^{1/2}`, with the singular values :math:`s`, the derivative of
    the polar factor divides the antisymmetric part of a change of ``M`` by :math:`s_i + s_j`, and what leads out of the
    rows or columns by :math:`s_i`; after it, all of them are ``c``. So the first gets :math:`(s_i + s_j) / 2c` and the
    second :math:`s_i / c`. A direction that the whitening drops has a singular value :math:`d` of its own, and couples
    an entry to its mirror image, with the gaps of `orthocond.linalg._differences`.

    Args:
        G: gradients ``(groups, c, k)``.
        W: the weights before.
        S: the covariances of the input ``(groups, k, k)``.
        c: ``(groups,)``: the singular values after; zero for a group that stays as it is.
        rtol: singular values whose squares are at or below ``rtol`` times the largest are dropped by the whitening.
    """
    l, V = torch.linalg.eigh(S)
    seen = l > l.shape[-1] * torch.finfo(l.dtype).eps * l[..., -1:]
    root = torch.where(seen, l, 0.0).sqrt()
    inverse = torch.where(seen, l, torch.inf).rsqrt()
    Q, s, Rh = torch.linalg.svd(W @ (V * root.unsqueeze(-2)), full_matrices=True)
    X = Q.mT @ (G @ (V * inverse.unsqueeze(-2))) @ Rh.mT
    rows, columns = X.shape[-2:]
    size = max(rows, columns)
    X = nn.functional.pad(X, (0, size - columns, 0, size - rows))
    largest = s[..., :1]
    s = nn.functional.pad(s, (0, size - s.shape[-1]))
    kept = s.square() > rtol * largest.square()
    kept &= s > 0
    after = torch.where(c > 0, c, 1.0)[..., None, None]
    d = torch.where(kept, 0.0, s / torch.where(largest > 0, largest, 1.0)).unsqueeze(-1)
    d = (d + d.mT) * after  # where one of two is kept, that of the other, after the change
    s_i, s_j = s.unsqueeze(-1), s.unsqueeze(-2)
    both = kept.unsqueeze(-1) & kept.unsqueeze(-2)
    one = kept.unsqueeze(-1) ^ kept.unsqueeze(-2)
    strong, weak = torch.maximum(s_i, s_j), torch.minimum(s_i, s_j)
    gap = (strong.square() - weak.square()).maximum(rtol * largest.square().unsqueeze(-1))
    of_row = torch.where(kept.unsqueeze(-1), strong, (gap + weak.square()) / torch.where(one, strong, 1.0))
    F = of_row * X - weak * X.mT
    to_one = (after * F + d * F.mT) / (after.square() - d.square()).where(one, torch.ones_like(d))
    X = torch.where(both, X * (s_i + s_j) / (2 * after), torch.where(one, to_one, X))
    moved = Q @ X[..., :rows, :columns] @ Rh @ (V * root.unsqueeze(-2)).mT
    return torch.where(c[..., None, None] > 0, moved, G)


def metric_root(found: InputCovariance, rate: Tensor, *, rtol: float) -> Tensor:
    r"""Return :math:`(\kappa S^{-1})^{1/2}`: a step measured by it turns the polar factor as fast in every direction.

    A direction of the input that is too weak to be told from noise, ``tr(S)`` over the number of samples, is taken to be
    as strong as that. One that is known to be below the cut of the whitening is taken to be as strong as the strongest:
    its step stays small, so that it is dropped as before.

    Args:
        found: the covariance of the input, with a matrix for each rate.
        rate: :math:`\kappa`, ``(groups,)``; where it is zero, the identity is returned.
        rtol: what is at or below ``rtol`` times the strongest is dropped by the whitening.
    """
    l, V = torch.linalg.eigh(found.S)
    largest, noise = l[..., -1:], l.sum(-1, keepdim=True) / found.num_samples
    is_dropped = (l <= rtol * largest) & (noise <= rtol * largest)
    g = (rate.unsqueeze(-1) / torch.where(is_dropped, largest, l.maximum(noise))).sqrt()
    g = torch.where(rate.unsqueeze(-1) > 0, g, 1.0)
    root: Tensor = (V * g.unsqueeze(-2)) @ V.mT
    return root
