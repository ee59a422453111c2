"""The study's pictures."""

import statistics
from pathlib import Path
from typing import Any

from records import THRESHOLD, Group, Record, grouped, groups

from orthocond.linalg import SOLVERS

STEMS = {"stem16": "16 channels, full rank", "stem64": "64 channels, rank 27 at most"}
COLOURS = {
    "svd": "#0072b2",
    "svd+sn": "#56b4e9",
    "svd+olr": "#cc79a7",
    "newton_schulz": "#999999",
    "svd+nog": "#e69f00",
    "svd+ow": "#d55e00",
    "svd+ol": "#000000",
    "svd+gauge": "#009e73",
    "svd+nog+ow": "#f0e442",
    "svd+nog+ow+olr": "#8c564b",
    "bn": "#555555",
}
"""Of the methods in pictures."""
TREATED = ("svd", "svd+sn", "svd+olr", "newton_schulz", "svd+nog", "svd+ow", "svd+ol", "svd+gauge")
"""The methods whose condition numbers are drawn for both stems."""

KEPT, DROPPED = (SOLVERS["products"].options[name] for name in ("kept", "dropped"))


def draw_gauged(curves: list[Record], file: Path) -> None:
    """Draw the condition number on the support, with the range of the seeds."""
    figure, axes = _stems()
    for axis, experiment in zip(axes, STEMS, strict=True):
        for method in ("svd", "svd+nog", "svd+gauge"):
            steps, own = _line(axis, curves, experiment, method, "cond_support")
            low, high = ([point[f"cond_support_{end}"] for point in own] for end in ("low", "high"))
            axis.fill_between(steps, low, high, color=COLOURS[method], alpha=0.2, linewidth=0)
        axis.axhline(THRESHOLD, color="black", linewidth=0.8, linestyle=":")
    axes[0].set_ylabel("condition number on the support")
    axes[0].text(990, THRESHOLD * 1.1, "threshold", ha="right", fontsize=9)
    axes[1].legend(loc="center right")
    figure.savefig(file, dpi=110, metadata={"Software": None})


def draw_treated(curves: list[Record], file: Path) -> None:
    """Draw the raw condition number of each treatment."""
    figure, axes = _stems()
    for axis, experiment in zip(axes, STEMS, strict=True):
        for method in TREATED:
            _line(axis, curves, experiment, method, "cond")
    axes[0].set_ylabel("condition number, median of the seeds")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center")
    figure.savefig(file, dpi=110, metadata={"Software": None})


def draw_published(curves: list[Record], file: Path) -> None:
    """Draw the condition numbers of the paper's own configuration, geometric means over the seeds."""
    measures = {"cond_eps": "with eps = 0.01", "cond_floor": "eigenvalues raised to 2.2e-16"}
    figure, axes = _pyplot().subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, (name, title) in zip(axes, measures.items(), strict=True):
        for group in groups(curves, "published"):
            by_step = grouped(group.runs, "step")
            steps = sorted(by_step, key=lambda step: float(step[0]))
            means = [statistics.geometric_mean(point[name] for point in by_step[step]) for step in steps]
            axis.plot([float(step) for (step,) in steps], means, color=COLOURS[group.method], label=group.method)
        axis.set(yscale="log", title=title, xlabel="step")
    axes[0].set_ylabel("condition number")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center")
    figure.savefig(file, dpi=110, metadata={"Software": None})


def draw_published_errors(runs: list[Record], file: Path) -> None:
    """Draw the errors of all seeds in the paper's own configuration."""
    statistics_of = {"error": "running statistics", "renewed": "statistics renewed after the training"}
    _draw_errors({title: (groups(runs, "published"), name) for name, title in statistics_of.items()}, file)


def draw_spectrum(spectra: list[Record], file: Path) -> None:
    """Draw the eigenvalues of the stem's covariance over the steps, with the bounds of the solver by products."""
    methods = {"svd": "svd", "products+gauge": "products+gauge"}
    figure, axes = _pyplot().subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for axis, (method, title) in zip(axes, methods.items(), strict=True):
        own = [point for point in spectra if point["method"] == method]
        steps = [point["step"] for point in own]
        for name in (name for name in own[0] if name.isdecimal()):
            axis.plot(steps, [max(point[name], 1e-9) for point in own], color="#0072b2", linewidth=0.7, alpha=0.8)
        axis.axhspan(DROPPED, KEPT, color="#e69f00", alpha=0.2, linewidth=0)
        axis.set(yscale="log", ylim=(1e-9, 2), title=title, xlabel="step")
    axes[0].set_ylabel("eigenvalues, relative to the largest")
    axes[1].text(990, (KEPT * DROPPED) ** 0.5, "the gap that products need", ha="right", va="center", fontsize=9)
    figure.savefig(file, dpi=110, metadata={"Software": None})


def _stems() -> tuple[Any, Any]:
    figure, axes = _pyplot().subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for axis, title in zip(axes, STEMS.values(), strict=True):
        axis.set(yscale="log", title=title, xlabel="step")
    return figure, axes


def _line(axis: Any, curves: list[Record], experiment: str, method: str, name: str) -> tuple[list[float], list[Record]]:
    own = [point for point in curves if (point["experiment"], point["method"]) == (experiment, method)]
    steps = [point["step"] for point in own]
    axis.plot(steps, [point[name] for point in own], color=COLOURS[method], label=method)
    return steps, own


def draw_errors(runs: list[Record], file: Path) -> None:
    """Draw the errors of all seeds on both stems."""
    _draw_errors({title: (groups(runs, experiment), "error") for experiment, title in STEMS.items()}, file)


def _draw_errors(panels: dict[str, tuple[list[Group], str]], file: Path) -> None:
    figure, axes = _pyplot().subplots(1, 2, figsize=(10, 4.6), sharex=True, sharey=True, layout="constrained")
    for axis, (title, (found, value)) in zip(axes, panels.items(), strict=True):
        names = [group.method for group in found][::-1]
        for place, group in enumerate(found[::-1]):
            errors = group.values(value)
            axis.plot(errors, [place] * len(errors), "o", color="#56b4e9", markersize=5)
            axis.plot([statistics.mean(errors)], [place], "|", color="black", markersize=16)
        axis.set(title=title, xlabel="error in percent, one dot a seed, the bar their mean")
        axis.set_yticks(range(len(names)), names)
        axis.grid(axis="y", alpha=0.3)
    figure.savefig(file, dpi=110, metadata={"Software": None})


def _pyplot() -> Any:
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    return plt
