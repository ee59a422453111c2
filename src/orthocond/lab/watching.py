"""What a run records of its covariances: condition numbers, failures and fall-backs of the solver."""

import math
import statistics
from collections.abc import Callable
from typing import Any

from torch import nn

from orthocond import ConditionMonitor
from orthocond.lab.conditions import CONDITIONS, CUT
from orthocond.lab.config import Config
from orthocond.lab.methods import method
from orthocond.linalg import SOLVERS, solver_failures
from orthocond.nn import MetaLayer

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
                exact_every=config.monitor_exact,
            )
            self.monitor.resume(step)
        self.step = step
        self._failures: dict[int, int] = {}
        self._fallbacks: dict[int, int] = {}
        self._in_validation = 0
        layer = network.get_submodule(name)
        # Only a solver with bounds for what it keeps and drops falls back outside them.
        self._falls_back = has_meta and "dropped" in SOLVERS[chosen.solver or ""].options
        # After the monitor's own look at the input, and before its look at the output: those are not the layer's.
        self._before = (0, 0)
        self._name = name
        self._handles = [
            layer.register_forward_pre_hook(self._remember),
            layer.register_forward_hook(self._count, prepend=True),
        ]

    def steps(self) -> Callable[[int], dict[str, Any]]:
        """Return what the steps since the last time recorded, as a function of the step's number."""
        conditions = {record["step"] + 1: record for record in self._records("train")}
        failures, self._failures = self._failures, {}
        fallbacks, self._fallbacks = self._fallbacks, {}

        def of(step: int) -> dict[str, Any]:
            found = conditions.get(step, {})
            estimated = found.get("estimated")
            numbers: dict[str, Any] = {name: found.get(name) for name in (*CONDITIONS, "rank")}
            if estimated:  # what an estimate doesn't tell
                numbers = {name: None if math.isnan(number) else number for name, number in numbers.items()}
            counts = {"failures": failures.get(step, 0)}
            if self._falls_back:
                counts["fallbacks"] = fallbacks.get(step, 0)
            return {**numbers, "estimated": estimated, **counts}

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

    def _remember(self, layer: nn.Module, *_: Any) -> None:
        self._before = _counts(layer)

    def _count(self, layer: nn.Module, *_: Any) -> None:
        failures, fallbacks = (now - before for now, before in zip(_counts(layer), self._before, strict=True))
        if layer.training:
            self._failures[self.step] = self._failures.get(self.step, 0) + failures
            self._fallbacks[self.step] = self._fallbacks.get(self.step, 0) + fallbacks
        else:
            self._in_validation += failures


def _counts(layer: nn.Module) -> tuple[int, int]:
    """Return the failures in this process so far, and the fall-backs of a layer."""
    return sum(solver_failures().values()), layer.num_fallbacks[0] if isinstance(layer, MetaLayer) else 0
