"""Runs that may be compared with each other: one preset, one configuration, several methods and seeds."""

import json
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from orthocond.lab.conditions import measure_of
from orthocond.lab.config import PLACE, Config
from orthocond.lab.records import lines_text
from orthocond.lab.report.folders import Run, method_order
from orthocond.lab.report.metrics import Bins, Metrics, bins_for, read_metrics

__all__ = ["FREE", "Experiment", "experiments_of"]

FREE = frozenset({"method", "seed", *PLACE})
"""The fields of a configuration in which the runs of one experiment may differ."""

_DEFAULTS = {field.name: field.default for field in fields(Config) if field.default is not MISSING}


@dataclass(frozen=True)
class Experiment:
    """Runs of one configuration, at most one for each method and seed."""

    title: str
    preset: str
    differs: dict[str, Any]
    """The fields in which other experiments of the same preset have another value, and the value here."""
    runs: dict[tuple[str, str], Run]
    """By method and seed."""
    metrics: dict[tuple[str, str], Metrics]
    bins: Bins
    notes: list[str] = field(default_factory=list)
    """Notes about its runs: unfinished, failed, missing, duplicate, unreadable."""

    @property
    def methods(self) -> list[str]:
        """The methods, in the order of the tables."""
        return sorted({method for method, _ in self.runs}, key=method_order)

    @property
    def seeds(self) -> list[str]:
        """The seeds, ascending."""
        return sorted({seed for _, seed in self.runs}, key=_seed_order)

    @property
    def config(self) -> dict[str, Any]:
        """The configuration that all runs share."""
        shared = next(iter(self.runs.values())).config
        return {name: value for name, value in shared.items() if name not in FREE}

    @property
    def is_pooling(self) -> bool:
        """Whether it is about covariance pooling, where the top-5 error is shown too."""
        return self.config.get("meta") == "gcp" or self.config.get("head") == "covariance"

    @property
    def measure(self) -> str:
        """The condition number by which its methods are compared."""
        eps = self.config.get("eps")
        return measure_of(eps if isinstance(eps, int | float) else None)

    def of(self, method: str) -> dict[str, Metrics]:
        """Return the metrics of a method's runs by seed."""
        return {seed: self.metrics[method, seed] for seed in self.seeds if (method, seed) in self.runs}

    def finished(self, method: str) -> dict[str, Metrics]:
        """Return the metrics of a method's finished runs by seed, without runs whose last lines are lost."""
        return {
            seed: metrics
            for seed, metrics in self.of(method).items()
            if self.runs[method, seed].is_finished and not self.is_lost(method, seed)
        }

    def is_lost(self, method: str, seed: str) -> bool:
        """Return whether a run is finished, but its error is lost."""
        run = self.runs[method, seed]
        return run.is_finished and self.metrics[method, seed].records.last_error(run.status) is None


def experiments_of(runs: Iterable[Run]) -> list[Experiment]:
    """Return the experiments that ``runs`` make up, by preset; runs of different configurations are never mixed."""
    presets: dict[str, dict[str, list[Run]]] = {}
    for run in runs:
        # A setting that is younger than a run had its default value then.
        shared = {name: value for name, value in {**_DEFAULTS, **run.config}.items() if name not in FREE}
        identity = json.dumps(shared, sort_keys=True, default=str)
        presets.setdefault(run.preset, {}).setdefault(identity, []).append(run)
    experiments = []
    for preset, groups in sorted(presets.items()):
        configs = [json.loads(identity) for identity in groups]
        names = sorted({name for config in configs for name in config})
        differing = [name for name in names if len({json.dumps(config.get(name)) for config in configs}) > 1]
        for config, group in zip(configs, groups.values(), strict=True):
            experiments.append(_experiment(preset, {name: config.get(name) for name in differing}, group))
    return experiments


def _experiment(preset: str, differs: dict[str, Any], group: list[Run]) -> Experiment:
    notes = []
    if differs:
        values = ", ".join(f"{name} = {json.dumps(value)}" for name, value in differs.items())
        notes.append(f"This preset was run with several configurations, which are kept apart; here {values}.")
    chosen: dict[tuple[str, str], Run] = {}
    for run in sorted(group, key=lambda run: (not run.is_finished, str(run.folder))):
        if (run.method, run.seed) in chosen:
            notes.append(f"{run.method}, seed {run.seed} was run twice; {run.folder} is left out.")
        else:
            chosen[run.method, run.seed] = run
    folders = [run.folder for run in chosen.values()]
    bins = bins_for(folders)
    metrics = dict(zip(chosen, read_metrics(folders, bins), strict=True))
    suffix = f" ({', '.join(f'{name} {json.dumps(value)}' for name, value in differs.items())})" if differs else ""
    experiment = Experiment(preset + suffix, preset, differs, chosen, metrics, bins, notes)
    notes += [note for key, run in sorted(chosen.items()) for note in _notes_of(run, metrics[key])]
    notes += _notes_on_environments(list(chosen.values()))
    for seed in experiment.seeds:
        missing = [method for method in experiment.methods if (method, seed) not in chosen]
        if missing:
            notes.append(f"Seed {seed} is missing for {', '.join(missing)}.")
    return experiment


def _notes_of(run: Run, metrics: Metrics) -> list[str]:
    name = f"{run.method}, seed {run.seed}"
    notes = []
    if not run.is_finished:
        step, total = run.status.get("step", metrics.num_steps), run.status.get("total_steps", "unknown")
        error = f": {str(run.status['error']).rstrip('.')}" if run.status.get("error") else ""
        heard = (
            f", last heard of {str(run.status['updated'])[:16].replace('T', ' ')}" if run.status.get("updated") else ""
        )
        notes.append(f"{name}: {run.state} at step {step} of {total}{heard}{error}; its error is not in the table.")
    elif metrics.records.last_error(run.status) is None:
        notes.append(
            f"{name}: finished, but its error can't be known and is not in the table, because metrics.jsonl is not as "
            "the run wrote it."
        )
    if metrics.records.damaged:
        notes.append(f"{name}: {lines_text(metrics.records.damaged)}.")
    return notes


def _notes_on_environments(runs: list[Run]) -> list[str]:
    differs = {
        name: len({str(run.environment.get(name)) for run in runs if run.environment}) > 1
        for name in ("commit", "orthocond", "torch", "processor", "device", "threads", "world_size")
    }
    code = [name for name in ("commit", "orthocond", "torch") if differs[name]]
    place = [name for name in ("processor", "device", "threads", "world_size") if differs[name]]
    notes = [f"The runs are not of one version: they differ in {', '.join(code)}."] if code else []
    return notes + ([f"Their times are not comparable: the runs differ in {', '.join(place)}."] if place else [])


def _seed_order(seed: str) -> tuple[int, str]:
    return (int(seed) if seed.isdecimal() else -1, seed)
