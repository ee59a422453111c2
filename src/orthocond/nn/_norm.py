"""Decorrelated batch normalisation: ZCA whitening with BatchNorm's signature and semantics."""

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from orthocond._core import private
from orthocond._core.applying import changeable
from orthocond._core.compiling import uncompiled
from orthocond._core.distributed import num_processes
from orthocond._core.precision import at_least_float32, autocast_off, narrow
from orthocond._core.registry import resolve
from orthocond.errors import ArgumentError, OrthocondWarning, check_floating
from orthocond.linalg import SOLVERS
from orthocond.nn._features import features
from orthocond.nn._meta import Estimates, MetaLayer
from orthocond.nn._whitening import Statistics, check_num_samples, whiten, whiten_by_autograd

__all__ = ["DecorrelatedBatchNorm1d", "DecorrelatedBatchNorm2d", "DecorrelatedBatchNorm3d"]

RANK_RTOL = 1e-4
"""What ``rtol=None`` means for the solvers by eigenvalues; chosen by experiment, see docs/whitening.md."""


class LastBatch(NamedTuple):
    """What a whitening layer keeps of its last training batch."""

    eigenvalues: Tensor | None
    """``(groups, c)``, descending; None where the solver has none."""
    estimates: Estimates | None
    """What the solver knows without eigenvalues; None where it has them."""
    noise: Tensor
    """``(groups,)``: of the covariance, by rounding."""
    covariance: Tensor
    """``(groups, c, c)``."""
    num_dimensions: int
    """The input's."""
    num_processes: int
    """The number of processes whose samples the statistics include."""


class _DecorrelatedBatchNorm(MetaLayer):
    _version = 1
    _dimensions: tuple[int, ...]
    _layout: str
    _has_warned = False

    batchnorm_eps: float = 1e-5
    """What a BatchNorm adds to its running variance, for loading its state: torch's default, or the converted one's."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: Tensor | None
    running_whitening: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(
        self,
        num_features: int,
        eps: float = 0.0,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        groups: int = 1,
        rtol: float | None = None,
        solver: str = "eigh",
        gradient: str = "exact",
        sync: bool = False,
        process_group: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        caller = type(self).__name__
        if num_features < 1:
            raise ArgumentError(f"{caller} expected num_features >= 1, got {num_features}.")
        if groups < 1 or num_features % groups:
            raise ArgumentError(
                f"{caller} expected groups that divide num_features, got num_features={num_features} and "
                f"groups={groups}; pass a divisor."
            )
        entry, _ = resolve(SOLVERS, solver, "solver", caller)
        self.num_features, self.eps, self.momentum, self.groups = num_features, eps, momentum, groups
        self.affine, self.track_running_stats = affine, track_running_stats
        self.solver, self.gradient = solver, gradient
        self.rtol = RANK_RTOL if rtol is None and entry.has_eigenvalues else rtol
        self.sync, self.process_group = sync, process_group
        self._has_eigenvalues = entry.has_eigenvalues
        self._last_ndim: int | None = None
        self._check_options()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        size = num_features // groups
        for name in ("weight", "bias"):
            self.register_parameter(name, nn.Parameter(torch.empty(num_features, **factory)) if affine else None)
        tracked = track_running_stats
        self.register_buffer("running_mean", torch.empty(num_features, **factory) if tracked else None)
        self.register_buffer("running_whitening", torch.empty(groups, size, size, **factory) if tracked else None)
        count = torch.tensor(0, dtype=torch.long, device=device) if tracked else None
        self.register_buffer("num_batches_tracked", count)
        self.reset_parameters()

    def reset_running_stats(self) -> None:
        """Set the running mean to zero, the running whitening matrix to the identity, and the count to zero."""
        self._eigenvalues = self._covariance = self._noise = self._whitening = self._estimates = None
        if self.running_mean is None or self.running_whitening is None or self.num_batches_tracked is None:
            return
        self.running_mean.zero_()
        self.running_whitening.zero_().diagonal(dim1=-2, dim2=-1).fill_(1)
        self.num_batches_tracked.zero_()

    def reset_parameters(self) -> None:
        """Set the affine part to ones and zeros, and reset the running statistics."""
        self.reset_running_stats()
        if self.weight is not None and self.bias is not None:
            nn.init.ones_(self.weight)
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (the name that BatchNorm has)
        """Return ``input`` ``(N, C, *)`` whitened, and passed through modules added to the layer, if any."""
        x = input
        self._check_input(x)
        self._last_ndim = x.ndim
        with autocast_off(x.device):
            dtype = at_least_float32(x.dtype)
            gamma, beta = (None if part is None else part.to(dtype) for part in (self.weight, self.bias))
            y = self._forward(x.to(dtype), gamma, beta, x.dtype)
            y = narrow(y, x)
        for name, module in self._modules.items():  # an activation, say: what a converted norm had inside
            if name != "parametrizations":  # those of the scale and the shift
                y = module(y)  # type: ignore[misc]
        return y

    def _forward(self, x: Tensor, gamma: Tensor | None, beta: Tensor | None, stored: torch.dtype) -> Tensor:
        if not self.training and self.running_mean is not None and self.running_whitening is not None:
            weight, bias = self.eval_map(x.dtype)
            return changeable(features(x, self.groups).map(weight, bias).tensor())
        try:
            num_samples = x.shape[0] * math.prod(x.shape[2:])
            options: dict[str, Any] = {"groups": self.groups, "root": self._inverse_root, "stored": stored}
            if self._is_synchronised():
                self._check_rank(num_samples * torch.distributed.get_world_size(self.process_group))
                y, statistics = self._whiten_together(x, gamma, beta, options)
            else:
                check_num_samples(num_samples, x.shape)
                self._check_rank(num_samples)
                # Tracing wants plain operations: the function has a graph of its own inside.
                traced = (
                    torch.compiler.is_compiling() or private.transforms_are_active() or private.forward_mode_is_on()
                )
                whitened: Callable[..., tuple[Tensor, Statistics]] = whiten_by_autograd if traced else whiten
                y, statistics = whitened(x, gamma, beta, **options)
        except ArgumentError as error:
            raise ArgumentError(f"{type(self).__name__}({self.num_features}): {error}") from None
        if self.training:
            self._keep(statistics)
        return y

    @uncompiled
    def _whiten_together(
        self, x: Tensor, gamma: Tensor | None, beta: Tensor | None, options: dict[str, Any]
    ) -> tuple[Tensor, Statistics]:
        """Return the same over all processes; the communication is not compiled."""
        return whiten(x, gamma, beta, **options, process_group=self.process_group, sync=True)

    def samples(self, x: Tensor) -> Tensor:
        """Return the input as samples ``(groups, c, N)`` over batch and positions."""
        return x.movedim(1, 0).reshape(self.groups, self.num_features // self.groups, -1)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load a state of BatchNorm as well: its running variance gives a diagonal whitening matrix."""
        variance = state_dict.pop(prefix + "running_var", None) if self.running_whitening is not None else None
        if (
            variance is not None
            and variance.numel() == self.num_features  # otherwise torch says what doesn't fit
            and prefix + "running_whitening" not in state_dict
        ):
            whitening = diagonal_whitening(variance, self.batchnorm_eps, self.groups)
            state_dict[prefix + "running_whitening"] = whitening
            if self.num_batches_tracked is not None:  # which old states of BatchNorm haven't
                state_dict.setdefault(prefix + "num_batches_tracked", torch.zeros_like(self.num_batches_tracked))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def eval_map(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Return weight ``(groups, c, c)`` and bias ``(groups, c)`` of the layer as a linear map in eval."""
        if self.running_mean is None or self.running_whitening is None:
            raise ArgumentError(f"{type(self).__name__} without running statistics is no fixed map; track them.")
        mean, weight = self.running_mean.to(dtype), self.running_whitening.to(dtype)
        if self.weight is not None:
            weight = self.weight.to(dtype).view(self.groups, -1, 1) * weight
        bias = -(weight @ mean.view(self.groups, -1, 1)).squeeze(-1)
        if self.bias is not None:
            bias = bias + self.bias.to(dtype).view(self.groups, -1)
        return weight, bias

    def _inverse_root(self, P: Tensor, noise: Tensor) -> tuple[Tensor, Tensor | None]:
        (S,), eigenvalues = self._root(P, ("inv_sqrt",), noise)
        return S, eigenvalues

    def last_batch(self) -> LastBatch | None:
        """Return what the treatments in front of the layer need to know of its last training batch; None before it."""
        noise, covariance = self.last_noise, self._covariance
        if noise is None or covariance is None or self._last_ndim is None:
            return None
        processes = num_processes(self.process_group) if self._is_synchronised() else 1
        eigenvalues = self._eigenvalues if self._has_eigenvalues else None
        return LastBatch(eigenvalues, self.last_estimates, noise, covariance, self._last_ndim, processes)

    def _is_synchronised(self) -> bool:
        return self.sync and self.training and num_processes(self.process_group) > 1

    @torch.no_grad()
    def _keep(self, statistics: Statistics) -> None:
        self._keep_spectrum(statistics.covariance, statistics.eigenvalues, statistics.noise)
        # Small, and there anyway: what a change of gauge is made from.
        if self._keeps_spectrum():
            self._covariance, self._whitening = statistics.covariance, statistics.whitening
        if not self.track_running_stats:
            return
        if self.running_mean is None or self.running_whitening is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        momentum: Any = self.momentum
        if momentum is None:  # as a tensor, which takes no synchronisation
            count = self.num_batches_tracked.to(at_least_float32(self.running_mean.dtype))
            momentum = count.reciprocal().to(self.running_mean.dtype)
        self.running_mean.lerp_(narrow(statistics.mean.flatten(), self.running_mean), momentum)
        self.running_whitening.lerp_(narrow(statistics.whitening, self.running_whitening), momentum)

    def _check_rank(self, num_samples: int) -> None:
        """Warn, once, about a training batch with too few samples for its covariance to have full rank."""
        size = self.num_features // self.groups
        if num_samples > size or self._has_warned or not self.training or torch.compiler.is_compiling():
            return
        self._has_warned = True
        of_each = f" of each of the {self.groups} groups" if self.groups > 1 else ""
        warnings.warn(
            f"{type(self).__name__}({self.num_features}) got {num_samples} samples in training for the {size} channels"
            f"{of_each}: such a covariance has rank {num_samples - 1} at most, so every batch is whitened in a "
            "different subspace, and eval mode, which averages over them, gives other outputs than training. Use a "
            "larger batch, or more groups.",
            OrthocondWarning,
            stacklevel=2,
        )

    def _check_input(self, x: Tensor) -> None:
        caller = type(self).__name__
        check_floating(x, caller)
        if x.ndim not in self._dimensions or x.shape[1] != self.num_features:
            raise ArgumentError(
                f"{caller} expected input {self._layout} with C={self.num_features}, got {tuple(x.shape)}; "
                "check the layer in front, or num_features."
            )

    def extra_repr(self) -> str:
        """Return the arguments; those that BatchNorm doesn't have are omitted where they have their defaults."""
        text = (
            f"{self.num_features}, momentum={self.momentum}, affine={self.affine}, "
            f"track_running_stats={self.track_running_stats}, {super().extra_repr()}"
        )
        for name, default in (("groups", 1), ("sync", False)):
            if getattr(self, name) != default:
                text += f", {name}={getattr(self, name)}"
        return text


def diagonal_whitening(variance: Tensor, eps: float, groups: int) -> Tensor:
    """Return the whitening matrices ``(groups, c, c)`` equivalent to BatchNorm with a running variance ``(C,)``."""
    return torch.diag_embed((variance + eps).rsqrt().view(groups, -1))


_DOC = """Whitens {what} by the covariance of their channels over the batch (ZCA), with BatchNorm's semantics.

    .. math:: y = \\gamma \\odot P^{{-1/2}} (x - \\mu) + \\beta

    In training, mean and covariance are those of the batch; in eval, the running mean and the running whitening matrix
    are used, so the layer is one linear map. Directions in which the features don't vary (a 3x3 convolution from 3 to
    64 channels has 37 of them) stay at zero instead of being amplified: see ``rtol``. So do features whose variance
    is no more than the rounding of their mean, whatever ``rtol`` is, unless ``eps`` is larger than that.

    *Gradient:* exact, at repeated and zero eigenvalues too, in one function with five products over the features; only
    the input features are stored. Differentiable twice (without ``sync``).

    Args:
        num_features: the number of channels ``C``.
        eps: added to the eigenvalues of the covariance; a floor for them with ``solver="eigh(clamp=true)"``.
        momentum: weight of the new batch in the running statistics; ``None`` for the mean over all batches.
        affine: learn a scale (from ones) and a shift (from zeros) for each channel.
        track_running_stats: keep running statistics for eval; without them eval uses the batch, too.
        groups: whiten the channels in this many groups instead of all together.
        rtol: eigenvalues at or below ``rtol`` times the largest are dropped; ``None`` means 1e-4 for the solvers by
            eigenvalues. The paper's own setting, which drops nothing, is ``eps=1e-2, rtol=0.0``.
        solver: one of `orthocond.linalg.SOLVERS`. ``"products"`` needs no decomposition while the covariance has a gap,
            which ``orthocond.treat(model, layer_in_front, "gauge")`` creates; `num_fallbacks` counts the exceptions.
        gradient: one of `orthocond.linalg.GRADIENTS`.
        sync: compute mean and covariance over all processes of ``process_group``, with exact gradients: two processes
            with half a batch each give the same result as one with the whole batch.
        process_group: the processes that share statistics; ``None`` for all.
        device: the device of the parameters and buffers.
        dtype: the dtype of the parameters and buffers.

    Shape: {layout}, contiguous or channels last, to the same.

    Raises:
        ArgumentError: a wrong shape, groups that don't divide, fewer than two samples in training.
        NonFiniteError: the features hold NaN or infinity.

    Reference:
        Huang et al., Decorrelated batch normalization, CVPR 2018; Song, Sebe, Wang 2022, appendix B.1.

    Example:
        >>> import torch
        >>> from orthocond.linalg import covariance
        >>> layer = {name}(3)
        >>> y = layer(torch.randn({example}))
        >>> torch.allclose(covariance(y.movedim(1, 0).flatten(1)), torch.eye(3), atol=1e-4)
        True
    """


class DecorrelatedBatchNorm1d(_DecorrelatedBatchNorm):
    __doc__ = _DOC.format(
        what="vectors or sequences",
        name="DecorrelatedBatchNorm1d",
        layout="``(N, C)`` or ``(N, C, L)``",
        example="50, 3",
    )
    _dimensions, _layout = (2, 3), "(N, C) or (N, C, L)"


class DecorrelatedBatchNorm2d(_DecorrelatedBatchNorm):
    __doc__ = _DOC.format(
        what="images", name="DecorrelatedBatchNorm2d", layout="``(N, C, H, W)``", example="8, 3, 5, 5"
    )
    _dimensions, _layout = (4,), "(N, C, H, W)"


class DecorrelatedBatchNorm3d(_DecorrelatedBatchNorm):
    __doc__ = _DOC.format(
        what="volumes", name="DecorrelatedBatchNorm3d", layout="``(N, C, D, H, W)``", example="8, 3, 3, 3, 3"
    )
    _dimensions, _layout = (5,), "(N, C, D, H, W)"
