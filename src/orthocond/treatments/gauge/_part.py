"""The treatment: it watches a whitening layer, and replaces the weight in front of it if that is ill conditioned."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple
from warnings import warn

import torch
from torch import Tensor, nn

from orthocond._core import private
from orthocond._core.distributed import from_first, num_processes
from orthocond._core.precision import narrow, widen
from orthocond._core.registry import resolve
from orthocond.errors import ArgumentError, OrthocondWarning, check_choice
from orthocond.graph import meta_layer_behind
from orthocond.linalg import SOLVERS
from orthocond.linalg._decompose import DECOMPOSITIONS
from orthocond.linalg._roots import default_rtol
from orthocond.linalg._spectrum import spectrum_of
from orthocond.nn import DecorrelatedBatchNorm1d, DecorrelatedBatchNorm2d, DecorrelatedBatchNorm3d
from orthocond.treatments._part import Note, Part
from orthocond.treatments.gauge._change import SCALES, Change, change_of_gauge, limit
from orthocond.treatments.gauge._metric import Metric, cross_covariance, gradient_after, metric_of

if TYPE_CHECKING:
    from orthocond.treatments._step import Step
    from orthocond.treatments._target import Target

__all__ = ["METRICS", "MOMENTA", "Gauge"]

MOMENTA = ("keep", "reset", "transform")
"""What happens to the optimizer's momentum: it stays, starts from zero, or is multiplied by ``T^(-1)``."""

METRICS = ("input", "weight")
"""How a step is measured after a change: as if the layer's input were white, or in the new weight's own coordinates.

Example:
    >>> METRICS
    ('input', 'weight')
"""

_MOMENTUM_KEYS = ("momentum_buffer", "exp_avg")

_LARGEST_MISMATCH = 0.05
"""Largest relative difference allowed between the covariance of the layer's watched input and the whitened one."""

_CONSTRAINED = "gauge replaces the weight, which {} constrains; use gauge without it."

Norm = DecorrelatedBatchNorm1d | DecorrelatedBatchNorm2d | DecorrelatedBatchNorm3d


class Gauge(Part):
    r"""Replaces the weight by :math:`c P^{-1/2} W` where the covariance :math:`P` is ill conditioned.

    See docs/gauge.md. The whitening layer after it gives the same outputs, and the covariance becomes :math:`c^2 I`.
    Directions that the layer keeps become equally strong, so let it drop the weakest: ``rtol=2e-4`` is a good cut.

    Args:
        threshold: the condition number above which it acts.
        scale: what it preserves: the covariance's ``"trace"``, the norm of the ``"weight"``, or ``"unit"`` for a
            covariance that becomes the identity.
        momentum: what happens to the optimizer's momentum: ``"keep"``, ``"reset"`` or ``"transform"``.
        metric: how a step is measured: as if the layer's ``"input"`` were white, or in the coordinates of the new
            ``"weight"``.
        process_group: the processes with copies of the model, None for all. A string can't specify it: pass the
            instance, ``treat(model, layer, ["nog", Gauge(process_group=group)])``.

    Example:
        >>> Gauge(threshold=5.0)
        gauge(threshold=5.0)
    """

    name = "gauge"
    description = (
        "Re-gauging: where the covariance P is ill conditioned, the weight is replaced by c P^(-1/2) W, "
        "which whitening can't tell from W."
    )
    reference = "ours; docs/gauge.md"
    acts_on = "weight"
    order = 30
    excludes = MappingProxyType({name: _CONSTRAINED.format(name) for name in ("ow", "sn")})
    notes = (
        Note("gauged", "gauge replaced the weight", kind="flag"),
        Note("cond_before", "condition number on the support of the last batch's covariance, before gauge"),
        Note("cond_after", "the same for the weight as gauge left it"),
    )

    def __init__(
        self,
        *,
        threshold: float = 10.0,
        scale: str = "trace",
        momentum: str = "keep",
        metric: str = "input",
        process_group: Any = None,
    ) -> None:
        check_choice(scale, SCALES, "scale", "gauge")
        check_choice(momentum, MOMENTA, "momentum", "gauge")
        check_choice(metric, METRICS, "metric", "gauge")
        if not threshold >= 1:
            raise ArgumentError(
                f"gauge expected a threshold >= 1, which is the least that a condition number can be, got "
                f"threshold={threshold!r}; pass e.g. threshold=10."
            )
        self.threshold, self.scale, self.momentum, self.metric = threshold, scale, momentum, metric
        self.process_group = process_group
        self._inputs: tuple[Any, Any] | None = None
        self._seen: _Seen | None = None
        self._speeds: Tensor | None = None
        self._metric: Metric | None = None

    def install(self, target: "Target") -> None:
        """Find the whitening layer behind, and check that its output depends on the polar factor alone."""
        layer = target.layer
        meta = meta_layer_behind(target.model, target.name, layer, target.example_input)
        self.layer: Any = layer
        self.norm = _checked(target.name, layer, meta)
        self._layout, self._name = target.layout, target.name
        self._takes_vectors = isinstance(layer, nn.Linear) and target.example_input is None

    def watch(self, target: "Target") -> None:
        """Keep what the layer gets and what the whitening decomposes in each training forward."""
        if nn.utils.parametrize.is_parametrized(self.layer, "weight"):  # by another treatment, since the installation
            raise ArgumentError(_CONSTRAINED.format("a parametrization"))
        target.after_forward(self.layer, self._note_inputs)
        target.after_forward(self.norm, self._note_batch)
        target.at_detach(self._forget)

    @contextmanager
    def act(self, step: "Step") -> Iterator[None]:
        """Replace the weight if the last batch asks for it, and measure the gradient by the metric.

        The inner parts see weight and gradient in the coordinates in which the input is white.
        """
        is_changed, before, after = self._step(step)
        step.note(gauged=is_changed, cond_before=before, cond_after=after)
        if self._metric is None:
            yield
        elif not step.has_inner_parts:
            self._measure(step, self._metric.squared())
            yield
        else:
            self._measure(step, self._metric)
            step.weight = lambda: self._measured(step.target.weight)
            yield
            self._measure(step, self._metric)

    def state_dict(self) -> dict[str, Any] | None:
        """Return how steps are measured since the first change, None before it."""
        if self._speeds is None or self._metric is None:
            return None
        return {"speeds": self._speeds, **self._metric._asdict()}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Take over what was saved."""
        if state is None:
            self._speeds = self._metric = None
            return
        device = widen(self.layer.weight).device
        self._speeds, *metric = (state[key].to(device) for key in ("speeds", *Metric._fields))
        self._metric = Metric(*metric)

    def _step(self, step: "Step") -> tuple[bool, float | None, float | None]:
        """Replace weight, bias, running statistics and pending gradients if the last batch asks for it.

        Each batch is used once, and in a distributed run the first process decides for all.

        Returns:
            Whether it did, and the condition numbers before and after.
        """
        seen = self._seen
        self._forget()
        if seen is None:
            return False, None, None
        before, is_too_large = self._decisive(seen)
        if not is_too_large:
            return False, before, before
        rows = self._rows(widen(self.layer.weight))
        change = change_of_gauge(
            seen.covariance,
            rows,
            threshold=self.threshold,
            num_samples=seen.num_samples,
            scale=self.scale,
            rtol=_rank_rtol(self.norm, seen.covariance),
            noise=seen.noise,
            solver=self.norm.solver if self.norm.solver in DECOMPOSITIONS else "eigh",
        )
        WS = cross_covariance(
            self.layer, *seen.inputs, sync=seen.is_synchronised, process_group=self.norm.process_group
        )
        WS = self._rows(widen(WS))
        if not self._is_what_was_whitened(WS @ rows.mT, widen(seen.covariance)):
            return False, before, before
        T, inverse, growth, cond = change.T, change.inverse, change.growth, change.cond
        gradient = gradient_after(self._matrices(widen(step.gradient)), rows, WS, *change[:4], rtol=change.rtol)
        # The very same matrices everywhere, whatever the machines' rounding.
        T, inverse, growth, cond, gradient = map(self._everywhere, (T, inverse, growth, cond, gradient))
        if self.metric == "input":
            speeds, metric = self._metric_after(change, rows, WS)
            self._speeds, self._metric = self._everywhere(speeds), Metric(*map(self._everywhere, metric))
        self._replace(T, inverse, growth, step.optimizer)
        step.gradient = gradient.reshape(step.gradient.shape)
        return True, before, float(cond)

    def _measure(self, step: "Step", metric: Metric) -> None:
        """Multiply the gradient by a metric."""
        gradient = step.gradient
        step.gradient = metric(self._matrices(gradient)).reshape(gradient.shape)

    def _measured(self, weight: Tensor) -> Tensor:
        """Return a weight in the coordinates in which the input is white."""
        assert self._metric is not None
        return narrow(self._metric.inverse()(self._matrices(weight)), weight).reshape(weight.shape)

    def _is_what_was_whitened(self, found: Tensor, P: Tensor) -> bool:
        """Return whether the layer's input is still the one that gave the covariance, and warn if it isn't."""
        is_same = self._everywhere(((found - P).norm() <= _LARGEST_MISMATCH * P.norm()).to(P.dtype)).bool()
        if not is_same:
            warn(
                f"gauge left {self._name!r} as it is: its input was overwritten before the optimizer's step, or a hook "
                "gave it another one; keep the batch until the step.",
                OrthocondWarning,
                stacklevel=2,
            )
        return bool(is_same)

    def _metric_after(self, change: Change, W: Tensor, WS: Tensor) -> tuple[Tensor, Metric]:
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

    def _note_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
        if self.norm.training:
            self._inputs = private.tree_map_only(Tensor, Tensor.detach, (args, kwargs))

    def _note_batch(self, _: Any, __: Any, output: Tensor) -> None:
        if not self.norm.training:
            return
        inputs, self._inputs = self._inputs, None
        batch = self.norm.last_batch()
        if batch is None or inputs is None:
            return
        if self._takes_vectors and batch.num_dimensions != 2:
            raise ArgumentError(
                f"gauge took the linear layer in front of {type(self.norm).__name__} to map (N, in) to (N, out), and "
                "the norm got three dimensions; pass treat(..., example_input=x), so that it sees which are the "
                "channels."
            )
        num_samples = output.numel() // self.norm.num_features * batch.num_processes
        rtol = _rank_rtol(self.norm, batch.covariance)
        if batch.estimates is not None:
            cond, rank, _ = batch.estimates
        else:
            assert batch.eigenvalues is not None
            found = spectrum_of(batch.eigenvalues, eps=0.0, rtol=rtol, floor=batch.noise)
            cond, rank = found.cond_support, found.rank
        is_too_large = cond > limit(rank, num_samples, self.threshold)
        decision = torch.stack([cond.max(), is_too_large.any().to(cond.dtype)])
        # On its way to the host while the backward pass is queued, so that the step needs not wait for that.
        on_host, arrived = decision.to("cpu", non_blocking=decision.is_cuda), None
        if decision.is_cuda:
            arrived = torch.cuda.Event()
            arrived.record()
        is_synchronised = batch.num_processes > 1
        self._seen = _Seen(
            inputs, batch.covariance, batch.noise, num_samples, is_synchronised, decision, on_host, arrived
        )

    def _forget(self) -> None:
        self._seen = self._inputs = None

    def _decisive(self, seen: "_Seen") -> tuple[float, bool]:
        """Return the condition number, and whether to act on it: in a distributed run those of the first process."""
        if num_processes(self.process_group) > 1:
            cond, is_too_large = self._everywhere(seen.decision).tolist()
        else:
            if seen.arrived is not None:
                seen.arrived.synchronize()
            cond, is_too_large = seen.on_host.tolist()
        return cond, bool(is_too_large)

    def _everywhere(self, tensor: Tensor) -> Tensor:
        """Return the first process's tensor, in a distributed run."""
        return from_first(tensor, self.process_group) if num_processes(self.process_group) > 1 else tensor

    def _replace(self, T: Tensor, inverse: Tensor, growth: Tensor, optimizer: torch.optim.Optimizer) -> None:
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
            matrix = rows.reshape(self._layout.matrix(tensor).shape)
            tensor.copy_(narrow(self._layout.kernel(matrix, tensor), tensor))
        else:
            tensor.copy_(narrow(rows.flatten(), tensor))

    def _rows(self, tensor: Tensor) -> Tensor:
        """Return a weight or a bias as matrices ``(groups, c, -1)``, a row for each channel of the whitening."""
        return self._matrices(self._layout.matrix(tensor) if tensor.ndim > 1 else tensor)

    def _matrices(self, matrix: Tensor) -> Tensor:
        """Return a matrix with a row for each channel as the whitening's groups ``(groups, c, -1)``."""
        return matrix.reshape(self.norm.groups, self.norm.num_features // self.norm.groups, -1)


class _Seen(NamedTuple):
    """What a training forward showed."""

    inputs: tuple[Any, Any]
    """The layer's, by place and by name."""
    covariance: Tensor
    noise: Tensor
    num_samples: int
    is_synchronised: bool
    """Whether the covariance is that of all processes."""
    decision: Tensor
    """The condition number and whether it is too large."""
    on_host: Tensor
    """The same, once the event ``arrived`` has happened."""
    arrived: Any


def _rank_rtol(norm: Norm, P: Tensor) -> float:
    """Return the relative threshold below which eigenvalues are dropped, or are rounding noise."""
    _, options = resolve(SOLVERS, norm.solver, "solver", "gauge")
    return max(norm.rtol or 0.0, float(options.get("dropped", 0.0)), default_rtol(P, None))


def _checked(name: str, layer: Any, norm: nn.Module) -> Norm:
    """Return the whitening layer, if its output depends on the polar factor alone."""
    if not isinstance(norm, Norm):
        raise ArgumentError(
            f"gauge needs a whitening layer behind {name!r}, which gives the same for every gauge, and "
            f"{type(norm).__name__} does not; use nog, ow or olr there."
        )
    if norm.eps:
        raise ArgumentError(
            f"gauge needs a whitening layer with eps=0 behind {name!r}, got eps={norm.eps}: with it the output depends "
            "on the scale of the weight; let the layer drop small eigenvalues instead, by rtol."
        )
    solver, options = resolve(SOLVERS, norm.solver, "solver", "gauge")
    if not solver.has_eigenvalues and "dropped" not in options:
        raise ArgumentError(
            f"gauge needs a whitening layer that knows which directions it drops behind {name!r}, got "
            f"solver={norm.solver!r}; use one of {', '.join(DECOMPOSITIONS)}, products."
        )
    if norm.groups % getattr(layer, "groups", 1):
        raise ArgumentError(
            f"gauge can't mix the channels of the {layer.groups} groups of {name!r}, and the whitening behind it does, "
            f"with groups={norm.groups}; give it groups={layer.groups}, or a multiple."
        )
    return norm
