"""What a run records of its covariances: condition numbers, and failures of the solver, in training and validation."""

import statistics
from collections.abc import Callable
from typing import Any

from torch import nn

from orthocond import ConditionMonitor
from orthocond.lab.conditions import CONDITIONS, CUT
from orthocond.lab.config import Config
from orthocond.lab.methods import method
from orthocond.linalg import solver_failures

__all__ = ["Watch"]

_META_LAYERS = {"dbn": "bn1", "gcp": "pool"}
"""Where the networks have their meta-layer, or what stands in its place."""


class Watch:
    """Watches the layer of a network that is, or could be, a meta-layer.

    Without a meta-layer the input of the batch norm in its place is watched; average pooling has none to watch.

    Args:
        network: as `orthocond.lab.network.network` makes it.
        config: its configuration.
        step: how many steps were taken before, in a run that is resumed.

    Attributes:
        step: the number of the current step, set by the training loop.
    """

    def __init__(self, network: nn.Module, config: Config, step: int) -> None:
        name, chosen = _META_LAYERS[config.meta], method(config.method, config.parts)
        has_meta = chosen.solver is not None
        self.monitor: ConditionMonitor | None = None
        if config.monitor != "none" and (has_meta or config.meta == "dbn"):
            self.monitor = ConditionMonitor(
                network,
                config.monitor_every,
                layers=[name] if config.monitor == "input" or not has_meta else None,
                rtol=CUT,
                evaluation=config.monitor_validation,
                eps=chosen.options.get("eps", config.eps) or 0.0,
            )
            self.monitor.resume(step)
        self.step = step
        self._failures: dict[int, int] = {}
        self._in_validation = 0
        layer = network.get_submodule(name)
        # After the monitor's own look at the input, and before its look at the output: those are not the layer's.
        self._before = 0
        self._name = name
        self._handles = [
            layer.register_forward_pre_hook(self._remember),
            layer.register_forward_hook(self._count, prepend=True),
        ]

    def steps(self) -> Callable[[int], dict[str, Any]]:
        """Return what the steps since the last time recorded, as a function of the step's number."""
        conditions = {record["step"] + 1: record for record in self._records("train")}
        failures, self._failures = self._failures, {}

        def of(step: int) -> dict[str, Any]:
            found = conditions.get(step, {})
            return {name: found.get(name) for name in (*CONDITIONS, "rank")} | {"failures": failures.get(step, 0)}

        return of

    def validation(self) -> dict[str, Any]:
        """Return what the forwards of a validation recorded: medians of the condition numbers, the sum of failures."""
        own = self._records("eval")
        failures, self._in_validation = self._in_validation, 0
        found = {f"val_{name}": statistics.median(record[name] for record in own) for name in CONDITIONS} if own else {}
        return {**found, "failures": failures}

    def close(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
        if self.monitor is not None:
            self.monitor.close()

    def _records(self, mode: str) -> list[dict[str, Any]]:
        """Return the layer's records since the last time, of training or evaluation; others are dropped."""
        records = [] if self.monitor is None else self.monitor.drain()
        return [record for record in records if (record["layer"], record["mode"]) == (self._name, mode)]

    def _remember(self, *_: Any) -> None:
        self._before = sum(solver_failures().values())

    def _count(self, layer: nn.Module, *_: Any) -> None:
        failures = sum(solver_failures().values()) - self._before
        if layer.training:
            self._failures[self.step] = self._failures.get(self.step, 0) + failures
        else:
            self._in_validation += failures
