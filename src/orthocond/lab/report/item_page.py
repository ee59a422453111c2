"""The page of the paper's items: each with the paper's numbers beside ours."""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from orthocond.lab.compare import Run
from orthocond.lab.config import solver_of
from orthocond.lab.paper import EXPERIMENTS, SCALES, Item, config_of
from orthocond.lab.report.charts import styles_of
from orthocond.lab.report.experiments import FREE
from orthocond.lab.report.items import view_of
from orthocond.lab.report.page import rendered, section_data
from orthocond.lab.report.rows import BASELINE
from orthocond.lab.report.statistics import TEST
from orthocond.lab.report.write import write_text

__all__ = ["write_items"]


def write_items(
    items: Sequence[Item], scale: str, runs: Sequence[Run], times: Mapping[str, Any] | None, output: Path
) -> Path:
    """Write the page of items and return its path.

    Args:
        items: of the paper.
        scale: at which they were run.
        runs: of all of them; those that are not there yet are left out.
        times: what ``bench step`` measured, for Table 6; None if it did not.
        output: the file.

    Raises:
        ArgumentError: the file can't be written.
    """
    views = [view_of(item, scale, runs, times) for item in items]
    panels = [panel for view in views for panel in view.panels]
    styles = styles_of({method for panel in panels for method in panel.methods})
    data = {
        "styles": {method: asdict(style) for method, style in styles.items()},
        "sections": [section_data(panel.methods, panel.rows, panel.charts) for panel in panels],
    }
    numbers = itertools.count()
    shown = [
        {
            "item": view.item,
            "label": label(view.item),
            "problems": view.problems,
            "panels": [{**vars(panel), "number": next(numbers)} for panel in view.panels],
        }
        for view in views
    ]
    text = rendered(
        "paper.html",
        data,
        title=label(items[0]) if len(items) == 1 else "The paper, item by item",
        views=shown,
        styles=styles,
        message=_message(scale, runs),
        test=TEST,
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
    write_text(output, text)
    return output


def label(item: Item) -> str:
    """Return the readable name of an item.

    Example:
        >>> from orthocond.lab.paper import ITEMS
        >>> label(ITEMS["figure5"])
        'Figure 5'
    """
    return re.sub(r"(\d)", r" \1", item.name).capitalize()


def _message(scale: str, runs: Sequence[Run]) -> list[str]:
    first = f"Scale {scale}: {SCALES[scale]}."
    if runs:
        done, seeds = sum(run.is_finished for run in runs), len({run.config.seed for run in runs})
        first += f" {done} of {len(runs)} runs are finished, {seeds} of each method."
    sentences = [first]
    if scale != "full":
        sentences.append(
            "Data and networks are not the paper's, so only directions can be compared, not errors or condition "
            "numbers. The meta-layers, treatments and gradient rule are the paper's."
        )
    changes = _changes(scale, runs)
    if changes:
        sentences.append(f"Other settings than those of the scale: {', '.join(changes)}.")
    pooling = next((run.config for run in runs if run.config.meta == "gcp" and run.config.method == BASELINE), None)
    if pooling is not None and (solver := solver_of(pooling)) != "svd":
        sentences.append(
            f"Covariance pooling decomposes by {solver} here; the failures that the paper counts are those of svd "
            "(--solver svd)."
        )
    return sentences


def _changes(scale: str, runs: Sequence[Run]) -> list[str]:
    """Return the settings in which runs differ from the default ones of a scale."""
    changes = {}
    for experiment in EXPERIMENTS:
        usual = config_of(experiment, scale)
        run = next((run for run in runs if run.config.preset == usual.preset), None)
        for name, value in vars(run.config).items() if run is not None else ():
            if name not in FREE and value != getattr(usual, name):
                changes[name] = value
    return [f"{name} {value}" for name, value in changes.items()]
