"""The curves of an experiment as data, for the page and for the figures.

A line is the median over the seeds, its band reaches from the lowest to the highest seed. Where steps were thinned, two
hairlines follow the lowest and highest value of any step, so no spike is thinned away. What never changes is a
sentence, not a chart.
"""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from orthocond.lab.conditions import CONDITIONS
from orthocond.lab.notes import declared, rate_notes
from orthocond.lab.report.experiments import Experiment
from orthocond.lab.report.folders import method_order
from orthocond.lab.report.metrics import Metrics
from orthocond.lab.report.rows import BASELINE
from orthocond.lab.report.thin import Floats, Spread, smooth, spread
from orthocond.treatments import Note

__all__ = ["Chart", "Lines", "Style", "View", "charts_of", "condition_view", "styles_of"]


class Lines(NamedTuple):
    """A method's curve: lowest seed, median and highest seed, and the extremes of any seed and any step."""

    low: Floats
    middle: Floats
    high: Floats
    floor: Floats
    peak: Floats


@dataclass(frozen=True)
class View:
    """One quantity of every method."""

    key: str
    label: str
    axis: str
    is_log: bool
    x: Floats
    series: dict[str, Lines]
    """By method."""
    zoom: tuple[tuple[float, float], tuple[float, float]] | None = None
    """The parts of both axes in which the methods differ, where that is a small part of the whole."""

    @property
    def constants(self) -> dict[str, float] | None:
        """The value of each method if none of them ever changes, in any run; otherwise ``None``."""
        values = {}
        for method, lines in self.series.items():
            known = np.unique([part for edge in (lines.floor, lines.peak) for part in edge[~np.isnan(edge)]])
            if len(known) != 1 or np.count_nonzero(~np.isnan(lines.middle)) < 2:
                return None
            values[method] = float(known[0])
        return values


@dataclass(frozen=True)
class Chart:
    """A chart with one or several views to choose from, and a sentence for each quantity that never changes."""

    key: str
    title: str
    caption: str
    x_axis: str
    views: list[View]
    sentences: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Style:
    """How a method's line looks: its colour on white and on black, and its dashes as plotly names them."""

    light: str
    dark: str
    dash: str


_COLOURS = (
    ("#2563a8", "#6fb0f2"),
    ("#c8591a", "#f39a5f"),
    ("#23835a", "#5ccb97"),
    ("#a8327f", "#ea86c6"),
    ("#8a6a10", "#dcb94e"),
    ("#6446a8", "#b09cf0"),
    ("#b8322f", "#f5817b"),
    ("#127f8c", "#50c8d6"),
)
_DASHES = ("solid", "dash", "dot", "longdashdot")
_FIXED = {
    "bn": Style("#8b8f98", "#8f96a3", "dash"),
    "newton_schulz": Style("#5d626c", "#b9bfca", "dot"),
    BASELINE: Style("#16181d", "#f3f4f6", "solid"),
}

_MANY_TIMES = 8  # at this ratio the lower of two errors is a flat line at the bottom of a linear axis


def styles_of(methods: Iterable[str]) -> dict[str, Style]:
    """Return each method's style: fixed for bn, newton_schulz and svd; a colour, and then a dash, for each other."""
    ordered = sorted(methods, key=method_order)
    styles, count = {}, 0
    for method in ordered:
        if method in _FIXED:
            styles[method] = _FIXED[method]
            continue
        light, dark = _COLOURS[count % len(_COLOURS)]
        styles[method] = Style(light, dark, _DASHES[count // len(_COLOURS) % len(_DASHES)])
        count += 1
    return styles


def charts_of(experiment: Experiment) -> list[Chart]:
    """Return the experiment's charts; quantities without a single value are left out, constant ones are sentences."""
    band = "Line: median over the seeds; band: lowest to highest seed."
    hair = f"{band} Hairlines: lowest and highest of any step."
    window = max(2, experiment.bins.number // 25)
    seen = {name for run in experiment.metrics.values() for name in (*run.curves, *run.shares)}
    notes = {name: note for name, note in declared().items() if name in seen}
    measures = sorted(CONDITIONS, key=lambda key: key != experiment.measure)
    charts = [
        Chart(
            "conditioning",
            "Condition number of the covariance",
            f"{hair} {' '.join(f'{name.capitalize()}: {about}' for name, about in CONDITIONS.values())}",
            "step",
            [condition_view(experiment, key) for key in measures],
        ),
        Chart(
            "rank",
            "Rank of the covariance",
            f"Eigenvalues that count. {hair}",
            "step",
            [_over_steps(experiment, "rank", "rank", "rank")],
        ),
        Chart(
            "rates",
            "Learning rate of the Pre-SVD layer",
            f"Methods that change it, and the schedule that the others follow. {hair}",
            "step",
            [
                _over_steps(
                    experiment, "pre_svd_lr", "learning rate", "learning rate", is_log=True, methods=_rated(experiment)
                )
            ],
        ),
        Chart(
            "notes",
            "What the treatments did",
            " ".join(f"{name.replace('_', ' ').capitalize()}: {note.description}." for name, note in notes.items()),
            "step",
            [_noted(experiment, note) for note in notes.values()],
        ),
        Chart(
            "progress",
            "Error and loss",
            band,
            "epoch",
            [
                _zoomed(_over_epochs(experiment, "val_error", "validation error", "error in %")),
                _zoomed(_over_epochs(experiment, "train_error", "training error", "error in %")),
                *(
                    [_zoomed(_over_epochs(experiment, "val_error5", "top-5", "error in %"))]
                    if experiment.is_pooling
                    else []
                ),
                _over_epochs(experiment, "val_loss", "validation loss", "loss", is_log=True),
                _over_epochs(experiment, "train_loss", "training loss", "loss", is_log=True),
            ],
        ),
        Chart(
            "loss",
            "Training loss of each step",
            f"{hair} Smoothed: the running mean of each run over {window * experiment.bins.width} steps.",
            "step",
            [
                _over_steps(experiment, "loss", "smoothed", "loss", is_log=True, window=window),
                _over_steps(experiment, "loss", "each step", "loss", is_log=True),
            ],
        ),
    ]
    return [chart for chart in map(_told, charts) if chart.views or chart.sentences]


def _told(chart: Chart) -> Chart:
    """Return a chart whose constant views are sentences, without those that have no value."""
    sentences, views = [], []
    for view in chart.views:
        constants = view.constants
        if view.series and constants is not None:
            sentences.append(_sentence(view, constants, chart.x_axis))
        elif view.series:
            views.append(view)
    return dataclasses.replace(chart, views=views, sentences=sentences)


def _sentence(view: View, constants: dict[str, float], x_axis: str) -> str:
    """Return the sentence about a quantity that never changes.

    A rank of 9 for every method reads ``Rank: 9 at every step, for every method.``
    """
    groups: dict[float, list[str]] = {}
    for method, value in constants.items():
        groups.setdefault(value, []).append(method)
    name = view.label if view.label == view.axis or view.axis.startswith(view.label) else f"{view.axis} ({view.label})"
    where = f"at every {x_axis}" if x_axis == "step" else f"in every {x_axis}"
    if len(groups) == 1 and len(constants) > 1:
        groups = {value: ["every method"] for value in groups}
    told = [f"{_number(value)} {where}, for {', '.join(methods)}" for value, methods in groups.items()]
    return f"{name[:1].upper()}{name[1:]}: {'; '.join(told)}."


def _number(value: float) -> str:
    return "infinite" if np.isinf(value) else f"{value:.4g}"


def _zoomed(view: View) -> View:
    """Return a view of errors that opens where methods differ: the range of the second half of the training.

    Where one method's error is many times another's, the axis is logarithmic, so that none of them is a flat line. With
    fewer than four points there is no zoom: it would show ends of lines.
    """
    half = len(view.x) // 2
    if not view.series or half == 0:
        return view
    late = np.concatenate([part[half:] for lines in view.series.values() for part in (lines.low, lines.high)])
    every = np.concatenate([lines.high for lines in view.series.values()])
    late, every = late[np.isfinite(late)], every[np.isfinite(every)]
    if not late.size:
        return view
    low, high = float(late.min()), float(late.max())
    if low > 0 and high > _MANY_TIMES * low:
        return dataclasses.replace(view, is_log=True)
    if half < 2 or high - low > 0.5 * (float(every.max()) - low):
        return view
    margin = 0.06 * (high - low) or 0.5
    inside = np.any([lines.middle <= high for lines in view.series.values()], axis=0)
    first = max(0, int(np.argmax(inside)) - 1)
    return dataclasses.replace(
        view, zoom=((float(view.x[first]), float(view.x[-1])), (max(0.0, low - margin), high + margin))
    )


def condition_view(experiment: Experiment, measure: str) -> View:
    """Return the curves of one of the condition numbers."""
    return _over_steps(experiment, measure, CONDITIONS[measure][0], "condition number", is_log=True)


def _over_steps(
    experiment: Experiment,
    key: str,
    label: str,
    axis: str,
    *,
    is_log: bool = False,
    methods: list[str] | None = None,
    window: int = 1,
) -> View:
    """Return a quantity over the steps; the running mean of each run if ``window`` is larger than one bin."""
    series = {}
    for method in experiment.methods if methods is None else methods:
        curves = [run.curves[key] for run in experiment.of(method).values()]
        if window > 1:
            series[method] = _whole(spread(np.stack([smooth(curve.middle, window) for curve in curves], axis=1)))
            continue
        low, middle, high = (np.stack(parts, axis=1) for parts in zip(*curves, strict=True))
        series[method] = Lines(*spread(middle), spread(low).low, spread(high).high)
    name = key if window == 1 else f"{key}_smoothed"
    return View(name, label, axis, is_log, experiment.bins.steps, _with_values(series))


def _noted(experiment: Experiment, note: Note) -> View:
    """Return what treatments noted: for a flag the share of steps in which it was set, for a number its curve."""
    label = note.name.replace("_", " ")
    if note.kind == "flag":
        coarse = experiment.bins.coarse
        nothing = np.full(coarse.number, np.nan)
        series = _with_values(_of(experiment, lambda run: 100 * run.shares.get(note.name, nothing)))
        return View(note.name, label, f"steps {label} in %", False, coarse.steps, series)
    methods = [m for m in experiment.methods if all(note.name in run.curves for run in experiment.of(m).values())]
    view = _over_steps(experiment, note.name, label, label, methods=methods)
    is_positive = all(np.nanmin(lines.floor) > 0 for lines in view.series.values())
    return dataclasses.replace(view, is_log=is_positive)


def _over_epochs(experiment: Experiment, key: str, label: str, axis: str, *, is_log: bool = False) -> View:
    numbers = [
        int(record["epoch"]) for run in experiment.metrics.values() for record in run.epochs if _is_epoch(record)
    ]
    last = max(numbers, default=0)

    def values(run: Metrics) -> Floats:
        column = np.full(last, np.nan)
        for record in run.epochs:
            if _is_epoch(record) and isinstance(record.get(key), int | float):
                column[int(record["epoch"]) - 1] = record[key]
        return column

    return View(key, label, axis, is_log, np.arange(1.0, last + 1), _with_values(_of(experiment, values)))


def _of(experiment: Experiment, values: Callable[[Metrics], Floats]) -> dict[str, Lines]:
    stacks = {
        method: np.stack([values(run) for run in experiment.of(method).values()], axis=1)
        for method in experiment.methods
    }
    return {method: _whole(spread(stack)) for method, stack in stacks.items()}


def _whole(lines: Spread) -> Lines:
    return Lines(*lines, lines.low, lines.high)


def _is_epoch(record: dict[str, object]) -> bool:
    number = record.get("epoch")
    return isinstance(number, int) and 1 <= number <= 100_000


def _rated(experiment: Experiment) -> list[str]:
    """Return the methods whose learning rate is worth a line: those that change it, and one that shows the schedule."""
    rated = [
        method
        for method in experiment.methods
        if any(rate_notes() & set(run.counts) for run in experiment.of(method).values())
    ]
    others = [method for method in experiment.methods if method not in rated]
    schedule = [BASELINE] if BASELINE in others else others[:1]
    return sorted([*schedule, *rated], key=method_order)


def _with_values(series: dict[str, Lines]) -> dict[str, Lines]:
    return {method: lines for method, lines in series.items() if not np.isnan(lines.middle).all()}
