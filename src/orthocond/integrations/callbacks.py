"""What the callbacks of all frameworks share: their options, and the numbers they log, by name."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from orthocond.monitor import ConditionMonitor
from orthocond.treatments import Treatment, TreatmentGroup, treat

__all__ = ["Treating", "Watching", "condition_metrics", "treatment_metrics"]


class Treating:
    """The part of a ``TreatmentCallback`` that no framework changes."""

    def __init__(self, layer: str, spec: Any, *, example_input: Any = None) -> None:
        self.layer, self.spec, self.example_input = layer, spec, example_input
        self.treatment: Treatment | TreatmentGroup | None = None
        """The treatment, from the time the framework hands the model over."""
        self.model: nn.Module | None = None
        """The model that is treated."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(layer={self.layer!r}, spec={self.spec!r})"

    def numbers(self) -> dict[str, float]:
        """Return what the last step did."""
        return {} if self.treatment is None else treatment_metrics(self.treatment)

    def treat(self, model: nn.Module, example_input: Any = None) -> None:
        """Treat the layer, unless this model is treated already; ``example_input`` is used where none was given."""
        if self.model is not model:
            example = example_input if self.example_input is None else self.example_input
            self.treatment = treat(model, self.layer, self.spec, example_input=example)
            self.model = model


class Watching:
    """The part of a ``ConditionCallback`` that no framework changes."""

    def __init__(self, *, every: int = 1, layers: Iterable[str] | None = None, rtol: float | None = None) -> None:
        self.every, self.rtol = every, rtol
        self.layers = None if layers is None else list(layers)
        self.monitor: ConditionMonitor | None = None
        """The monitor of the last training: ``print`` it."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(every={self.every}, layers={self.layers}, rtol={self.rtol})"

    def numbers(self) -> dict[str, float]:
        """Return the newest records."""
        return {} if self.monitor is None else condition_metrics(self.monitor)

    def watch(self, model: nn.Module) -> None:
        """Begin to watch a model."""
        self.monitor = ConditionMonitor(model, self.every, layers=self.layers, rtol=self.rtol)

    def stop(self) -> None:
        """Stop watching; the monitor keeps its records."""
        if self.monitor is not None:
            self.monitor.close()


def treatment_metrics(treatment: Treatment | TreatmentGroup) -> dict[str, float]:
    """Return what the last step did to each layer, and the penalty, as ``treatment/<layer>/<number>``.

    Example:
        >>> import orthocond
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))
        >>> treatment = orthocond.treat(model, "0", "nog")
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> _ = treatment.attach(optimizer)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
        >>> sorted(treatment_metrics(treatment))[:2]
        ['treatment/0/gradient_range_max', 'treatment/0/gradient_range_min']
    """
    parts = treatment.treatments.values() if isinstance(treatment, TreatmentGroup) else [treatment]
    metrics: dict[str, float] = {}
    for part in parts:
        for name, value in (part.last or {}).items():
            if isinstance(value, tuple):
                metrics |= {
                    f"treatment/{part.name}/{name}_{end}": float(v)
                    for end, v in zip(("min", "max"), value, strict=True)
                }
            elif value is not None:
                metrics[f"treatment/{part.name}/{name}"] = float(value)
        with torch.no_grad():
            penalty = float(part.penalty())
        if penalty:
            metrics[f"treatment/{part.name}/penalty"] = penalty
    return metrics


def condition_metrics(monitor: ConditionMonitor) -> dict[str, float]:
    """Return the newest records, as ``condition/<layer>/<number>``, and forget the older ones."""
    metrics: dict[str, float] = {}

    class Writer:
        def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> Any:
            metrics[tag] = float(scalar_value)

    monitor.log(Writer(), step=0)
    monitor.drain()
    return metrics
