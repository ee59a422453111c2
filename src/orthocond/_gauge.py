"""Re-gauging: another weight in front of a whitening layer, with the same outputs and a well conditioned covariance.

With the covariance ``S`` of the layer's input, ``P = W S W^T`` is what the whitening decomposes, and its output,
``P^(-1/2) W (z - mean)``, depends on the weight only through the polar factor of ``W S^(1/2)``. So ``c P^(-1/2) W``
does the same as ``W``, and has the covariance ``c^2 I``. Its gradient is another one, and so is what a step of it does:
`orthocond._metric`. All of it is in docs/gauge.md.
"""

import warnings
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from orthocond._core.compiling import uncompiled
from orthocond._core.layout import kernel_matrix, matrix_kernel
from orthocond._core.precision import narrow, widen
from orthocond._metric import Metric, cross_covariance, gradient_after, metric_of
from orthocond.errors import ArgumentError, OrthocondWarning, check_choice
from orthocond.graph import meta_layer_behind
from orthocond.linalg._decompose import DECOMPOSITIONS, decompose
from orthocond.linalg._eigen import symmetric
from orthocond.linalg._roots import default_rtol
from orthocond.linalg._spectrum import spectrum_of
from orthocond.nn._norm import _DecorrelatedBatchNorm

__all__ = ["METRICS", "MOMENTA", "SCALES", "Gauge", "GaugeStep", "change_of_gauge"]

SCALES = ("trace", "weight", "unit")
"""What the scale ``c`` keeps: the trace of the covariance, or the weight's norm; ``unit`` is ``c = 1``."""

MOMENTA = ("keep", "reset", "transform")
"""What becomes of the optimizer's momentum: it stays, starts from zero, or is multiplied by ``T^(-1)``."""

METRICS = ("input", "weight")
"""How a step is measured after a change: as if the layer's input were white, or in the new weight's own numbers."""

_MOMENTUM_KEYS = ("momentum_buffer", "exp_avg")

_LARGEST_MISMATCH = 0.05
"""By how much the covariance of what the layer was seen to get may differ from that of what the whitening got."""


class GaugeStep(NamedTuple):
    """What `Gauge.step` did."""

    gauged: bool = False
    cond_before: float | None = None
    cond_after: float | None = None


class Gauge:
    """The whitening behind a layer, watched, and the layer's weight replaced where the condition number is too large.

    Args:
        model: that holds the layer.
        name: the layer's, for messages.
        layer: a linear layer or a convolution whose output goes straight to a whitening layer.
        options: ``threshold``, ``scale``, ``momentum``, ``metric`` and ``process_group`` of `orthocond.treat`.
        example_input: an input of the model, for what a trace of its code does not show.

    Raises:
        ArgumentError: the layer or what is behind it can't be re-gauged, or an option is wrong.
    """

    def __init__(
        self, model: nn.Module, name: str, layer: nn.Module, options: dict[str, Any], example_input: Any = None
    ) -> None:
        check_choice(options["scale"], SCALES, "scale", "treat")
        check_choice(options["momentum"], MOMENTA, "momentum", "treat")
        check_choice(options["metric"], METRICS, "metric", "treat")
        if not options["threshold"] >= 1:
            raise ArgumentError(
                f"treat expected a threshold >= 1, which is the least that a condition number can be, got "
                f"threshold={options['threshold']!r}; pass e.g. threshold=10."
            )
        self.layer: Any = layer
        self.norm = _checked(name, layer, meta_layer_behind(model, name, layer, example_input))
        self.threshold, self.scale, self.momentum = options["threshold"], options["scale"], options["momentum"]
        self.metric = options["metric"]
        self.process_group = options["process_group"]
        self._layout: dict[str, Any] = {
            "groups": getattr(layer, "groups", 1),
            "transposed": isinstance(layer, nn.modules.conv._ConvTransposeNd),
        }
        self._takes_vectors = isinstance(layer, nn.Linear) and example_input is None
        self._handles: list[Any] = []
        self._name = name
        self._inputs: tuple[Any, Any] | None = None
        self._seen: _Seen | None = None
        self._speeds: Tensor | None = None
        self._metric: Metric | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy of a watched model may have: no process group, and nothing that is on its way."""
        return {**self.__dict__, "process_group": None, "_seen": None, "_inputs": None, "_handles": []}

    def watch(self) -> None:
        """Note what the whitening decomposes in each training forward."""
        self._handles = [
            self.layer.register_forward_hook(self._note_inputs, with_kwargs=True),
            self.norm.register_forward_hook(self._note),
        ]

    def close(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._seen = self._inputs = None

    def state_dict(self) -> dict[str, Tensor] | None:
        """Return what is to be saved: how steps are measured since the first change, None before it."""
        if self._speeds is None or self._metric is None:
            return None
        return {"speeds": self._speeds, **self._metric._asdict()}

    def load_state_dict(self, state: dict[str, Tensor] | None) -> None:
        """Take over what was saved."""
        if state is None:
            self._speeds = self._metric = None
            return
        device = widen(self.layer.weight).device
        self._speeds, *metric = (state[key].to(device) for key in ("speeds", *Metric._fields))
        self._metric = Metric(*metric)

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer) -> GaugeStep:
        """Replace weight, bias, running statistics and pending gradients if the last batch asks for it.

        Each batch is used once, and in a distributed run the first process decides for all.
        """
        seen, self._seen, self._inputs = self._seen, None, None
        if seen is None:
            return GaugeStep()
        before, is_too_large = self._decisive(seen)
        if not is_too_large:
            return GaugeStep(False, before, before)
        rows = self._rows(widen(self.layer.weight))
        change = change_of_gauge(
            seen.covariance,
            rows,
            threshold=self.threshold,
            num_samples=seen.num_samples,
            scale=self.scale,
            rtol=_rank_rtol(self.norm, seen.covariance),
            solver=self.norm.solver,
        )
        norm = self.norm
        WS = cross_covariance(self.layer, *seen.inputs, sync=norm._is_synchronised(), process_group=norm.process_group)
        WS = self._rows(widen(WS))
        if not self._is_what_was_whitened(WS @ rows.mT, widen(seen.covariance)):
            return GaugeStep(False, before, before)
        T, inverse, growth, cond = change.T, change.inverse, change.growth, change.cond
        gradient = gradient_after(self._rows(widen(self.layer.weight.grad)), rows, WS, *change[:4], rtol=change.rtol)
        if self._is_distributed():  # the very same matrices everywhere, whatever the machines' rounding
            T, inverse, growth, cond, gradient = map(self._from_first, (T, inverse, growth, cond, gradient))
        if self.metric == "input":
            self._speeds, self._metric = self._metric_after(change, rows, WS)
            if self._is_distributed():
                self._speeds, self._metric = (
                    self._from_first(self._speeds),
                    Metric(*map(self._from_first, self._metric)),
                )
        self._replace(T, inverse, growth, gradient, optimizer)
        return GaugeStep(True, before, float(cond))

    @torch.no_grad()
    def measure_(self, gradient: Tensor, *, root: bool = False) -> None:
        """Multiply a gradient by the metric, in place; or by its root, which has to be done twice.

        In between it is that of the weight in the coordinates in which the input is white.
        """
        if self._metric is not None:
            metric = self._metric if root else self._metric.squared()
            self._set_rows_(gradient, metric(self._rows(gradient)))

    @torch.no_grad()
    def measured(self, weight: Tensor) -> Tensor:
        """Return a weight in the coordinates in which the input is white."""
        if self._metric is None:
            return weight
        found = torch.empty_like(weight)
        self._set_rows_(found, self._metric.inverse()(self._rows(weight)))
        return found

    def _is_what_was_whitened(self, found: Tensor, P: Tensor) -> bool:
        """Say whether the layer's input is still the one that gave the covariance, and warn if it isn't."""
        is_same = (found - P).norm() <= _LARGEST_MISMATCH * P.norm()
        if self._is_distributed():
            is_same = self._from_first(is_same.to(P.dtype)).bool()
        if not is_same:
            warnings.warn(
                f"gauge left {self._name!r} as it is: its input was overwritten before the optimizer's step, or a hook "
                "gave it another one; keep the batch until the step.",
                OrthocondWarning,
                stacklevel=2,
            )
        return bool(is_same)

    def _metric_after(self, change: "Change", W: Tensor, WS: Tensor) -> tuple[Tensor, Metric]:
        """Return how steps are measured after a change, and the speeds ``(2, groups)`` that the next one has to keep.

        A gradient turns the polar factor by its length over the squared size of ``W S^(1/2)``, for white inputs that of
        the weight. So at the first change of a group the rows get the speed that the weight would have if inputs were
        white, and what is beside them that of the plain metric. Later changes keep both, whatever the scale.
        """
        first = torch.stack([change.kept.sum(-1) / W.square().sum((-2, -1)), change.mean.reciprocal()])
        before = torch.zeros_like(first) if self._speeds is None else self._speeds
        speeds = torch.where(before > 0, before / change.mean, first)
        is_changed = change.c > 0
        scaled = torch.where(is_changed, speeds * change.c.square(), 1.0)
        c = torch.where(is_changed, change.c, 1.0)
        metric = metric_of(change.support @ W, change.support @ WS, c, scaled[0], scaled[1])
        if not bool(is_changed.all()):  # the other groups keep theirs
            metric = metric.where(is_changed, Metric.plain(W) if self._metric is None else self._metric)
        return torch.where(is_changed, scaled, before), metric

    @uncompiled
    @torch.no_grad()
    def _note_inputs(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
        if self._handles and layer is self.layer and self.norm.training:  # a copy of the model has a copy of the hook
            self._inputs = tree_map_only(Tensor, Tensor.detach, (args, kwargs))

    @uncompiled
    @torch.no_grad()
    def _note(self, norm: nn.Module, _: Any, output: Tensor) -> None:
        if not self._handles or norm is not self.norm or not self.norm.training:
            return
        inputs, self._inputs = self._inputs, None
        eigenvalues, covariance = self.norm.last_eigenvalues, self.norm._covariance
        if eigenvalues is None or covariance is None or inputs is None:
            return
        if self._takes_vectors and self.norm._last_ndim != 2:
            raise ArgumentError(
                f"gauge took the linear layer in front of {type(norm).__name__} to map (N, in) to (N, out), and the "
                "norm got three dimensions; pass treat(..., example_input=x), so that it sees which are the channels."
            )
        num_samples = output.numel() // self.norm.num_features
        if self.norm._is_synchronised():
            num_samples *= torch.distributed.get_world_size(self.norm.process_group)
        found = spectrum_of(eigenvalues, eps=0.0, rtol=_rank_rtol(self.norm, covariance))
        is_too_large = found.cond_support > _limit(found.rank, num_samples, self.threshold)
        decision = torch.stack([found.cond_support.max(), is_too_large.any().to(eigenvalues.dtype)])
        # On its way to the host while the backward pass is queued, so that the step needs not wait for that.
        on_host, arrived = decision.to("cpu", non_blocking=decision.is_cuda), None
        if decision.is_cuda:
            arrived = torch.cuda.Event()
            arrived.record()
        self._seen = _Seen(inputs, covariance, num_samples, decision, on_host, arrived)

    def _decisive(self, seen: "_Seen") -> tuple[float, bool]:
        """Return the condition number, and whether to act on it: in a distributed run those of the first process."""
        if self._is_distributed():
            cond, is_too_large = self._from_first(seen.decision).tolist()
        else:
            if seen.arrived is not None:
                seen.arrived.synchronize()
            cond, is_too_large = seen.on_host.tolist()
        return cond, bool(is_too_large)

    def _is_distributed(self) -> bool:
        distributed = torch.distributed
        return (
            distributed.is_available()
            and distributed.is_initialized()
            and distributed.get_world_size(self.process_group) > 1
        )

    def _from_first(self, tensor: Tensor) -> Tensor:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
        first = torch.distributed.get_process_group_ranks(self.process_group)[0]
        torch.distributed.broadcast(tensor, first, group=self.process_group)
        return tensor

    def _replace(
        self, T: Tensor, inverse: Tensor, growth: Tensor, gradient: Tensor, optimizer: torch.optim.Optimizer
    ) -> None:
        norm, layer = self.norm, self.layer
        for parameter in (layer.weight, layer.bias):
            if parameter is None:
                continue
            self._multiply_(parameter, T)
            state = optimizer.state.get(parameter, {})
            for buffer in (state[key] for key in _MOMENTUM_KEYS if isinstance(state.get(key), Tensor)):
                if self.momentum == "reset":
                    buffer.zero_()
                elif self.momentum == "transform":
                    self._multiply_(buffer, inverse)
            steps = state.get("momentum_buffer")
            if self.momentum == "keep" and self.metric == "input" and isinstance(steps, Tensor):
                self._set_rows_(steps, growth[:, None, None] * self._rows(widen(steps)))  # they grow with the weight
        self._set_rows_(layer.weight.grad, gradient)
        if layer.bias is not None and layer.bias.grad is not None:
            self._multiply_(layer.bias.grad, inverse)
        if norm.running_mean is not None and norm.running_whitening is not None:
            self._multiply_(norm.running_mean, T)
            norm.running_whitening.copy_(widen(norm.running_whitening) @ inverse)

    def _multiply_(self, tensor: Tensor, matrices: Tensor) -> None:
        """Multiply something with the shape of the weight or the bias by matrices ``(groups, c, c)``, from the left."""
        self._set_rows_(tensor, matrices @ self._rows(widen(tensor)))

    def _set_rows_(self, tensor: Tensor, rows: Tensor) -> None:
        """Set something with the shape of the weight or the bias to what has these `_rows`."""
        if tensor.ndim > 1:
            matrix = rows.reshape(kernel_matrix(tensor, **self._layout).shape)
            tensor.copy_(narrow(matrix_kernel(matrix, tensor, **self._layout), tensor))
        else:
            tensor.copy_(narrow(rows.flatten(), tensor))

    def _rows(self, tensor: Tensor) -> Tensor:
        """Return a weight or a bias as matrices ``(groups, c, -1)``, a row for each channel of the whitening."""
        matrix = kernel_matrix(tensor, **self._layout) if tensor.ndim > 1 else tensor
        return matrix.reshape(self.norm.groups, self.norm.num_features // self.norm.groups, -1)


class _Seen(NamedTuple):
    """What a training forward showed."""

    inputs: tuple[Any, Any]
    """The layer's, by place and by name."""
    covariance: Tensor
    num_samples: int
    decision: Tensor
    """The condition number and whether it is too large."""
    on_host: Tensor
    """The same, once the event ``arrived`` has happened."""
    arrived: Any


class Change(NamedTuple):
    """A change of gauge: all in float64."""

    eigenvalues: Tensor
    """``(groups, c)``, those of the covariance."""
    vectors: Tensor
    """``(groups, c, c)``, its eigenvectors."""
    kept: Tensor
    """``(groups, c)``: which of them the whitening keeps."""
    c: Tensor
    """``(groups,)``: the square root of the eigenvalues that are kept, after it; 0 for a group that stays as it is."""
    rtol: float
    """What is at or below ``rtol`` times the largest eigenvalue is dropped."""
    factors: Tensor
    """``(groups, c)``: by how much the directions are stretched."""
    cond: Tensor
    """The largest condition number on the support, after it."""

    @property
    def T(self) -> Tensor:  # noqa: N802  # its name in the formulas
        """``(groups, c, c)``: what the weight is multiplied by."""
        return self._matrix(self.factors)

    @property
    def inverse(self) -> Tensor:
        """``(groups, c, c)``: what the whitening matrix is multiplied by, from the right."""
        return self._matrix(self.factors.reciprocal())

    @property
    def support(self) -> Tensor:
        """``(groups, c, c)``: the same as ``T``, without what is dropped."""
        return self._matrix(torch.where(self.kept, self.factors, 0.0))

    @property
    def mean(self) -> Tensor:
        """``(groups,)``: of the eigenvalues that are kept."""
        return torch.where(self.kept, self.eigenvalues, 0.0).sum(-1) / self.kept.sum(-1)

    @property
    def growth(self) -> Tensor:
        """``(groups,)``: of the size of ``W S^(1/2)``."""
        return torch.where(self.c > 0, self.c / self.mean.sqrt(), 1.0)

    def _matrix(self, values: Tensor) -> Tensor:
        matrix: Tensor = (self.vectors * values.unsqueeze(-2)) @ self.vectors.mT
        return matrix


def change_of_gauge(
    P: Tensor,
    W: Tensor,
    *,
    threshold: float,
    num_samples: int,
    scale: str = "trace",
    rtol: float = 0.0,
    solver: str = "eigh",
) -> Change:
    r"""Return the matrices that make covariances well conditioned, without changing what is whitened.

    .. math:: T = c \, U \operatorname{diag}(g) U^T, \quad g_i = l_i^{-1/2}

    for ``P = U diag(l) U^T``. An eigenvalue that the whitening drops gets :math:`g_i = l_{max}^{-1/2}`: it stays in the
    same ratio to the largest, so it is dropped as before, and ``T`` can be inverted.

    Args:
        P: covariances ``(groups, c, c)``.
        W: the weight that made them ``(groups, c, k)``.
        threshold: what has a condition number on its support at or below it gets the identity.
        num_samples: how many stand behind each covariance: where they are few, noise alone exceeds a threshold.
        scale: one of `SCALES`.
        rtol: eigenvalues at or below ``rtol`` times the largest are dropped by the whitening.
        solver: how to decompose: that of the layer, so that the same eigenvalues are dropped.

    Example:
        >>> P = torch.diag(torch.tensor([100.0, 4.0, 0.0]))[None]
        >>> change_of_gauge(P, torch.eye(3)[None], threshold=10.0, num_samples=99, scale="unit").T[0].diag()
        tensor([0.1000, 0.5000, 0.1000], dtype=torch.float64)
    """
    eigenvalues, U = decompose(symmetric(widen(P)), solver)
    l = eigenvalues.clamp(min=0)
    largest = l.amax(-1, keepdim=True)
    kept = l > rtol * largest
    g = torch.where(kept, l, largest).rsqrt()
    change = Change(l, U, kept, torch.ones_like(g[..., 0]), rtol, g, l)
    if scale == "trace":
        c = change.mean.sqrt()
    elif scale == "weight":
        c = torch.linalg.matrix_norm(W) / torch.linalg.matrix_norm(change.T @ W.to(U))
    else:
        c = change.c
    found = spectrum_of(l, eps=0.0, rtol=rtol)
    is_too_large = found.cond_support > _limit(found.rank, num_samples, threshold)  # never at rank 0
    g = torch.where(is_too_large.unsqueeze(-1), c.unsqueeze(-1) * g, 1.0)
    after = spectrum_of(g.square() * l, eps=0.0, rtol=rtol).cond_support.max()
    return change._replace(factors=g, c=torch.where(is_too_large, c, 0.0), cond=after)


def _limit(rank: Tensor, num_samples: int, threshold: float) -> Tensor:
    """Return the condition number above which to act: the threshold, or more where a batch is too small to tell.

    The covariance of ``M`` samples of white noise in ``r`` dimensions has condition numbers around the square of
    ``(1 + q) / (1 - q)``, ``q = sqrt(r / M)`` (Marchenko and Pastur), and acting on noise makes the weight grow by
    ``1 / (1 - r / M)``. With fewer than ten samples for each dimension, only twice that, in digits, counts.
    """
    ratio = rank / max(num_samples - 1, 1)
    q = ratio.sqrt().clamp(max=1.0)
    noise = ((1 + q) / (1 - q)).pow(4)
    return torch.where(ratio > 0.1, noise.clamp(min=threshold), threshold)


def _rank_rtol(norm: _DecorrelatedBatchNorm, P: Tensor) -> float:
    """Return below what the eigenvalues are dropped, or are rounding noise that nobody should divide by."""
    return max(norm.rtol or 0.0, default_rtol(P, None))


def _checked(name: str, layer: Any, norm: nn.Module) -> _DecorrelatedBatchNorm:
    """Return the whitening layer, if its output depends on the polar factor alone."""
    if not isinstance(norm, _DecorrelatedBatchNorm):
        raise ArgumentError(
            f"gauge needs a whitening layer behind {name!r}, which gives the same for every gauge, and "
            f"{type(norm).__name__} does not; use nog, ow or olr there."
        )
    if norm.eps:
        raise ArgumentError(
            f"gauge needs a whitening layer with eps=0 behind {name!r}, got eps={norm.eps}: with it the output depends "
            "on the scale of the weight; let the layer drop small eigenvalues instead, by rtol."
        )
    if norm.solver not in DECOMPOSITIONS:
        raise ArgumentError(
            f"gauge needs a whitening layer that knows its eigenvalues behind {name!r}, got solver={norm.solver!r}; "
            f"use one of {', '.join(DECOMPOSITIONS)}."
        )
    if norm.groups % getattr(layer, "groups", 1):
        raise ArgumentError(
            f"gauge can't mix the channels of the {layer.groups} groups of {name!r}, and the whitening behind it does, "
            f"with groups={norm.groups}; give it groups={layer.groups}, or a multiple."
        )
    return norm
