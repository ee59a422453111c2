"""The report as one self-contained HTML file: no network, no second file.

Every name goes through the template's escaping, or into JSON whose ``<`` is escaped: it is shown as text. The charting
library is embedded compressed, a third of its size, and the browser unpacks it.
"""

import base64
import gzip
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache
from importlib import resources
from typing import Any

import numpy as np

from orthocond.lab.report.charts import Chart, charts_of, styles_of
from orthocond.lab.report.content import Report
from orthocond.lab.report.rows import BASELINE, Row
from orthocond.lab.report.statistics import TEST
from orthocond.lab.report.tables import (
    by_error,
    config_table,
    environment_table,
    error_table,
    run_table,
    time_table,
)
from orthocond.lab.report.thin import Floats

__all__ = ["page", "rendered", "section_data"]


def page(report: Report, *, refresh: int | None = None) -> str:
    """Return the page; with ``refresh``, the browser reloads it every ``refresh`` seconds."""
    methods = {method for section in report.sections for method in section.experiment.methods}
    styles = styles_of(methods)
    charts = [charts_of(section.experiment) for section in report.sections]
    data = {
        "styles": {method: asdict(style) for method, style in styles.items()},
        "sections": [
            section_data(section.experiment.methods, section.rows, of_section)
            for section, of_section in zip(report.sections, charts, strict=True)
        ],
    }
    sections = [
        {
            "title": section.experiment.title,
            "methods": section.experiment.methods,
            "num_runs": len(section.experiment.runs),
            "num_seeds": len(section.experiment.seeds),
            "message": section.message,
            "notes": section.experiment.notes,
            "baseline": BASELINE,
            "errors": error_table(section.experiment, section.rows, report.marks),
            "times": time_table(section.rows),
            "charts": of_section,
            "config": config_table(section.experiment),
            "environment": environment_table(section.experiment),
            "runs": run_table(section.experiment),
        }
        for section, of_section in zip(report.sections, charts, strict=True)
    ]
    return rendered(
        "page.html",
        data,
        sections=sections,
        styles=styles,
        problems=report.problems,
        written=report.written,
        test=TEST,
        refresh=refresh,
    )


def rendered(template: str, data: dict[str, Any], **values: Any) -> str:
    """Return a page from a template of this package, with its style, its script and the data that it draws."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined
    from markupsafe import Markup

    # Autoescape shows a hostile name as text. Only our own files and the escaped JSON are marked as safe.
    environment = Environment(
        loader=FunctionLoader(_file), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(template).render(
        **values,
        css=Markup(_file("page.css")),
        script=Markup(_file("page.js")),
        library=Markup(_library()),
        data=Markup(_script_json(data)),
    )


def section_data(methods: Sequence[str], rows: Sequence[Row], charts: Sequence[Chart]) -> dict[str, Any]:
    """Return what the script draws of a section: dots of errors, bars of times, curves."""
    return {
        "baseline": BASELINE,
        "methods": list(methods),
        "byError": [row.method for row in by_error(rows)],
        "errors": {row.method: {seed: _rounded(error) for seed, error in row.errors.items()} for row in rows},
        "means": {row.method: _rounded(row.error.mean) for row in rows},
        "seconds": {
            row.method: {name: _rounded(estimate.mean) for name, estimate in row.seconds.items()} for row in rows
        },
        "charts": [
            {
                "key": chart.key,
                "xAxis": chart.x_axis,
                "views": [
                    {
                        "key": view.key,
                        "axis": view.axis,
                        "log": view.is_log,
                        "zoom": view.zoom,
                        "x": _numbers(view.x),
                        "series": {
                            method: {name: _numbers(values) for name, values in lines._asdict().items()}
                            for method, lines in view.series.items()
                        },
                    }
                    for view in chart.views
                ],
            }
            for chart in charts
            if chart.views
        ],
    }


def _numbers(values: Floats) -> list[float | str | None]:
    return [_rounded(value) for value in np.asarray(values).tolist()]


def _rounded(value: float) -> float | str | None:
    """Return five digits, which is more than a screen shows; ``None`` for NaN and ``"inf"`` for infinity."""
    if math.isfinite(value):
        short = float(f"{value:.5g}")
        return int(short) if short.is_integer() and abs(short) < 1e15 else short
    return None if math.isnan(value) else "inf"


def _script_json(data: Any) -> str:
    """Return JSON that can't end the script element that it stands in."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _file(name: str) -> str:
    return resources.files("orthocond.lab.report").joinpath(name).read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def _library() -> str:
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()
