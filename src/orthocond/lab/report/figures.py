"""The charts as PNG and SVG for a paper."""

import re
from pathlib import Path

import numpy as np

from orthocond.lab.report.charts import Chart, Style, View, charts_of, styles_of
from orthocond.lab.report.content import Report
from orthocond.lab.report.thin import Floats

__all__ = ["write_figures"]

_DASHES = {"solid": "-", "dash": "--", "dot": ":", "longdashdot": "-."}


def write_figures(report: Report, folder: Path) -> list[Path]:
    """Write every view of every chart into ``folder`` and return the files, a PNG and an SVG for each."""
    folder.mkdir(parents=True, exist_ok=True)
    styles = styles_of({method for section in report.sections for method in section.experiment.methods})
    files = []
    for number, section in enumerate(report.sections, start=1):
        prefix = f"{number}-{re.sub(r'[^A-Za-z0-9_.]+', '-', section.experiment.preset)[:60]}"
        for chart in charts_of(section.experiment):
            for view in chart.views:
                files += _figure(chart, view, styles, folder / f"{prefix}-{view.key}")
    return files


def _figure(chart: Chart, view: View, styles: dict[str, Style], stem: Path) -> list[Path]:
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "orthocond", "font.size": 9}):
        figure = Figure(figsize=(6.4, 3.6), dpi=200, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        handles = []
        ceiling, has_infinite = _ceiling(view)
        for method, lines in view.series.items():
            style = styles[method]
            low, middle, high, floor, peak = (_drawn(values, ceiling, is_log=view.is_log) for values in lines)
            axes.fill_between(view.x, low, high, color=style.light, alpha=0.15, linewidth=0)
            for edge in (floor, peak):
                axes.plot(view.x, edge, color=style.light, alpha=0.3, linewidth=0.3)
            mark = "." if np.count_nonzero(~np.isnan(middle)) == 1 else ""
            handles += axes.plot(
                view.x, middle, color=style.light, linestyle=_DASHES[style.dash], linewidth=1.2, marker=mark
            )
            infinite = np.isposinf(lines.peak)
            axes.plot(view.x[infinite], np.full(infinite.sum(), ceiling), "^", color=style.light, markersize=3)
        if view.is_log:
            axes.set_yscale("log")
        if has_infinite:
            axes.annotate("▲ infinite", (1, 1), xycoords="axes fraction", ha="right", va="bottom", fontsize=7)
        axes.set_xlabel(chart.x_axis)
        axes.set_ylabel(f"{view.axis} ({view.label})" if view.label != view.axis else view.axis)
        axes.grid(alpha=0.25, linewidth=0.5)
        axes.spines[["top", "right"]].set_visible(False)
        names = [_encodable(method) for method in view.series]
        legend = figure.legend(handles, names, loc="outside right upper", fontsize=7, frameon=False)
        for entry in legend.get_texts():
            entry.set_parse_math(False)  # a dollar in a name starts no formula
        files = [stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "svg")]
        for file in files:
            figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    return files


def _encodable(name: str) -> str:
    """Return a name that a font can draw: half of a surrogate pair becomes a question mark."""
    return name.encode(errors="replace").decode()


def _ceiling(view: View) -> tuple[float, bool]:
    """Return where infinite values are drawn, above all others, and whether there are any."""
    values = np.concatenate([np.empty(0), *(lines.peak for lines in view.series.values())])
    highest = values[np.isfinite(values)].max(initial=0.0)
    above = highest * (10 if view.is_log else 1.1)
    return float(above) if above > 0 else 1.0, bool(np.isposinf(values).any())


def _drawn(values: Floats, ceiling: float, *, is_log: bool) -> Floats:
    """Return the values with infinity at the ceiling, and without values that a logarithmic axis can't show."""
    placed = np.where(np.isposinf(values), ceiling, values)
    return np.where(np.isfinite(placed) & ((placed > 0) | (not is_log)), placed, np.nan)
