"""What the callbacks of all frameworks log: the numbers of treatments and of monitors, by name."""

from typing import Any

import torch

from orthocond.monitor import ConditionMonitor
from orthocond.treatments import Treatment, TreatmentGroup

__all__ = ["condition_metrics", "treatment_metrics"]


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
