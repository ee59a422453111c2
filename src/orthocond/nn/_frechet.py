"""The Frechet distance to a running reference, as a loss."""

import math

import torch
from torch import Tensor, nn

from orthocond._core.precision import at_least_float32, narrow
from orthocond.errors import ArgumentError, NonFiniteError, check_floating
from orthocond.linalg import covariance, frechet_distance

__all__ = ["FrechetLoss"]


class FrechetLoss(nn.Module):
    r"""The squared Frechet distance of a batch of features to a Gaussian fitted to the reference features seen so far.

    .. math:: \|\mu - \mu_r\|^2 + \mathrm{tr}(\Sigma + \Sigma_r - 2 (\Sigma_r^{1/2} \Sigma \Sigma_r^{1/2})^{1/2})

    The reference (:math:`\mu_r, \Sigma_r`) is kept as buffers and has no gradient. Set it once, over the whole data
    set, with `update`, or batch by batch in training, as the second argument.

    *Gradient:* finite, as that of `orthocond.linalg.frechet_distance`, with fewer samples than features too. The
    distance of a small batch is biased upwards, because its covariance is estimated from few samples: compare batches
    of one size only.

    Args:
        num_features: the number of features.
        momentum: the weight of a new reference batch in a moving average; ``None`` weighs all samples seen so far
            equally.
        device: the device of the buffers.
        dtype: the dtype of the buffers.

    Shape: features ``(N, num_features)`` to a scalar.

    Raises:
        ArgumentError: a wrong shape, or no reference yet (in compiled code the loss is NaN then).
        NonFiniteError: reference features with NaN or infinity; the reference stays as it was.

    Reference:
        Heusel et al., GANs trained by a two time-scale update rule, NeurIPS 2017.

    Example:
        >>> loss = FrechetLoss(3)
        >>> loss.update(torch.randn(1000, 3))
        >>> x = (1 + torch.randn(8, 3)).requires_grad_()
        >>> loss(x).backward()
        >>> x.grad.shape
        torch.Size([8, 3])
    """

    running_mean: Tensor
    running_covariance: Tensor
    num_samples_tracked: Tensor

    def __init__(
        self,
        num_features: int,
        momentum: float | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_features < 1 or not (momentum is None or 0 < momentum <= 1):
            raise ArgumentError(
                f"FrechetLoss expected num_features >= 1 and momentum in (0, 1] or None, got {num_features} and "
                f"{momentum}; pass e.g. FrechetLoss(64)."
            )
        self.num_features, self.momentum = num_features, momentum
        self.register_buffer("running_mean", torch.zeros(num_features, device=device, dtype=dtype))
        self.register_buffer("running_covariance", torch.zeros(num_features, num_features, device=device, dtype=dtype))
        self.register_buffer("num_samples_tracked", torch.zeros((), device=device, dtype=torch.long))

    def forward(self, x: Tensor, reference: Tensor | None = None) -> Tensor:
        """Return the distance of features ``x`` ``(N, C)`` to the reference; ``reference`` updates it in training."""
        self._check(x)
        if reference is not None and self.training:
            self.update(reference)
        if not torch.compiler.is_compiling() and self.num_samples_tracked == 0:
            raise ArgumentError(
                "FrechetLoss has no reference yet; call update(features) first, or pass reference features in training."
            )
        # Copies: the buffers may be updated before the backward pass.
        distance = frechet_distance(x, (self.running_mean.clone(), self.running_covariance.clone()), dim=0)
        if torch.compiler.is_compiling():  # a graph can't raise for what depends on its data
            return torch.where(self.num_samples_tracked > 0, distance, math.nan)
        return distance

    @torch.no_grad()
    def update(self, reference: Tensor) -> None:
        """Add reference features ``(N, C)``."""
        self._check(reference)
        dtype = at_least_float32(self.running_mean.dtype)
        samples = reference.to(self.running_mean.device, dtype)
        mean, P, num = samples.mean(0), covariance(samples, dim=0), samples.shape[0]
        if not P.isfinite().all():
            raise NonFiniteError(
                "FrechetLoss got reference features with NaN or infinity, or too large for their squares; the "
                "reference is unchanged. Look for the overflow in the network that computes them, or omit the batch."
            )
        total = int(self.num_samples_tracked) + num
        weight = num / total if self.momentum is None or total == num else self.momentum
        # The covariance of two samples together, of weights w and 1 - w, has the part w (1 - w) of the means' distance.
        old_mean, old_covariance = self.running_mean.to(dtype), self.running_covariance.to(dtype)
        offset = mean - old_mean
        new = torch.lerp(old_covariance, P, weight).add_(torch.outer(offset, offset), alpha=weight * (1 - weight))
        self.running_covariance.copy_(narrow(new, self.running_covariance))
        self.running_mean.copy_(narrow(torch.lerp(old_mean, mean, weight), self.running_mean))
        self.num_samples_tracked += num

    def _check(self, x: Tensor) -> None:
        check_floating(x, "FrechetLoss")
        if x.ndim != 2 or x.shape[1] != self.num_features:
            raise ArgumentError(
                f"FrechetLoss expected features (N, {self.num_features}), got {tuple(x.shape)}; flatten or pool them."
            )

    def extra_repr(self) -> str:
        """Return the options."""
        return f"{self.num_features}, momentum={self.momentum}"
