"""The paper's tables and figures with our numbers beside them, in no format yet."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from orthocond.errors import ArgumentError
from orthocond.lab.compare import Run
from orthocond.lab.conditions import CONDITIONS
from orthocond.lab.paper import EXPERIMENTS, Item
from orthocond.lab.records import number
from orthocond.lab.report.charts import Chart, Lines, View, condition_view
from orthocond.lab.report.experiments import Experiment, experiments_of
from orthocond.lab.report.folders import find_runs
from orthocond.lab.report.item_tables import accuracy_table, condition_table, error_table, time_table
from orthocond.lab.report.metrics import bins_for, read_metrics
from orthocond.lab.report.rows import Row, rows_of
from orthocond.lab.report.tables import Table
from orthocond.lab.report.thin import spread

__all__ = ["ItemView", "Panel", "view_of"]


@dataclass(frozen=True)
class Panel:
    """The counterpart of one or several of the paper's experiments at a scale: a table, and for a figure a chart."""

    title: str
    table: Table
    methods: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ItemView:
    """An item with what was run for it."""

    item: Item
    panels: list[Panel]
    problems: list[str]


def view_of(item: Item, scale: str, runs: Sequence[Run], times: Mapping[str, Any] | None) -> ItemView:
    """Return an item with the runs that were made for it.

    Args:
        item: of the paper.
        scale: at which it was run.
        runs: of all items; those that are not there yet are left out.
        times: what ``bench step`` measured, for Table 6; None if it did not.
    """
    if item.kind == "times":
        if times is None:
            return ItemView(item, [], ["The time of a step was not measured."])
        return ItemView(item, [Panel(*time_table(item, times))], [])
    places: dict[str, list[str]] = {}
    for experiment in item.quotes:
        places.setdefault(EXPERIMENTS[experiment][scale].preset, []).append(experiment)
    panels, problems = [], []
    for preset, experiments in places.items():
        wanted = set(item.methods(experiments[0]))
        folders = [
            run.folder
            for run in runs
            if run.config.preset == preset and run.config.method in wanted and (run.folder / "config.json").is_file()
        ]
        if not folders:
            problems.append(f"No run of {preset} is there yet.")
            continue
        try:
            found, troubles = find_runs(folders)
        except ArgumentError as error:  # none of them can be read; the other items can
            problems.append(str(error))
            continue
        problems += troubles
        panels.append(_panel(item, preset, experiments, experiments_of(found)[0]))
    return ItemView(item, panels, problems)


def _panel(item: Item, preset: str, experiments: list[str], experiment: Experiment) -> Panel:
    rows = {row.method: row for row in rows_of(experiment)}
    methods = [method for method in item.methods(experiments[0]) if method in rows]
    ordered = [rows[method] for method in methods]
    quotes = {name: item.quotes[name] for name in experiments}
    title = f"{' and '.join(experiments)} in the paper, {preset} here"
    if item.kind == "errors":
        return Panel(title, error_table(quotes, ordered), methods, ordered, notes=experiment.notes)
    (name,) = experiments
    if item.kind == "accuracies":
        return Panel(title, accuracy_table(quotes[name], ordered), methods, ordered, notes=experiment.notes)
    measure = item.measure[name]
    finished = {method: experiment.finished(method) for method in methods}
    ends = {method: {seed: run.at_end[measure] for seed, run in runs.items()} for method, runs in finished.items()}
    chart = _chart(item, experiment, methods, measure)
    table = condition_table(quotes[name], ends, measure)
    return Panel(title, table, methods, charts=[chart] if chart.views[0].series else [], notes=experiment.notes)


def _chart(item: Item, experiment: Experiment, methods: list[str], measure: str) -> Chart:
    """Return the figure in the paper's form: a logarithmic axis, its methods and its part of the training."""
    folders = [run.folder for run in experiment.runs.values()]
    bins = bins_for(folders, window=item.window)
    windowed = dataclasses.replace(
        experiment, bins=bins, metrics=dict(zip(experiment.runs, read_metrics(folders, bins), strict=True))
    )
    view = condition_view(windowed, measure)
    view = dataclasses.replace(view, series={name: view.series[name] for name in methods if name in view.series})
    if item.spikes:
        view = _with_spikes(view, windowed, measure)
    name, about = CONDITIONS[measure]
    caption = f"Condition number {name}. {about} Line: median over the seeds; band: lowest to highest seed."
    if item.spikes:
        caption += " Spikes: the median over the forwards of the validation after each epoch."
    return Chart("conditioning", item.title, caption, "step", [view])


def _with_spikes(view: View, experiment: Experiment, measure: str) -> View:
    """Return the curves with a point for each validation, right after the last step of its epoch."""
    first = experiment.bins.skipped
    records = [record for run in experiment.metrics.values() for record in run.epochs if f"val_{measure}" in record]
    steps = np.array(sorted({float(record["step"]) for record in records if record["step"] > first}))
    if not steps.size:
        return view
    order = np.argsort(np.concatenate([view.x, steps]), kind="stable")
    series = {}
    for method, lines in view.series.items():
        runs = [
            {float(record["step"]): number(record.get(f"val_{measure}")) for record in run.epochs}
            for run in experiment.of(method).values()
        ]
        low, middle, high = spread(np.array([[run.get(step, math.nan) for run in runs] for step in steps]))
        points = (low, middle, high, low, high)
        series[method] = Lines(*(np.concatenate(pair)[order] for pair in zip(lines, points, strict=True)))
    return dataclasses.replace(view, x=np.concatenate([view.x, steps])[order], series=series)
