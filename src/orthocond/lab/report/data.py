"""The report as data: JSON with everything, CSV with a row for each method, both with all digits."""

import csv
import dataclasses
import io
import json
import math
from typing import Any

from orthocond.lab.report.content import Report, Section
from orthocond.lab.report.rows import Row
from orthocond.lab.report.statistics import TEST

__all__ = ["as_csv", "as_json"]


def as_csv(report: Report) -> str:
    """Return a row for each method of each experiment; numbers that don't exist are empty."""
    records = [
        {"experiment": section.experiment.title, "preset": section.experiment.preset} | _flat(row)
        for section in report.sections
        for row in section.rows
    ]
    file = io.StringIO()
    writer = csv.DictWriter(file, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _no_formula(value) for name, value in record.items()} for record in records)
    return file.getvalue()


def _no_formula(value: Any) -> Any:
    """Return a cell that no spreadsheet takes for a formula: text that begins like one gets a leading apostrophe.

    Example:
        >>> _no_formula("=HYPERLINK(1)"), _no_formula("svd"), _no_formula(-0.5)
        ("'=HYPERLINK(1)", 'svd', -0.5)
    """
    if not isinstance(value, str):
        return value
    text = value.replace("\r", "\n")  # which the writer puts into quotation marks
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\n")) else text


def as_json(report: Report) -> str:
    """Return everything but the curves; numbers that don't exist are ``null``, infinity is the string ``"inf"``."""
    content = {
        "written": report.written,
        "test": TEST,
        "problems": report.problems,
        "experiments": [_section(section) for section in report.sections],
    }
    return json.dumps(_strict(content), indent=2, allow_nan=False) + "\n"


def _section(section: Section) -> dict[str, Any]:
    experiment = section.experiment
    return {
        "title": experiment.title,
        "preset": experiment.preset,
        "differs": experiment.differs,
        "message": section.message,
        "notes": experiment.notes,
        "config": experiment.config,
        "methods": [dataclasses.asdict(row) for row in section.rows],
        "runs": [
            {
                "method": run.method,
                "seed": run.seed,
                "folder": str(run.folder),
                "status": run.status,
                "environment": run.environment,
                "failures": experiment.metrics[key].failures,
                "at_end": experiment.metrics[key].at_end,
                "seconds": experiment.metrics[key].seconds,
                "epochs": experiment.metrics[key].epochs,
            }
            for key, run in experiment.runs.items()
        ],
    }


def _flat(row: Row) -> dict[str, Any]:
    difference = row.difference
    record: dict[str, Any] = {
        "method": row.method,
        "runs": row.num_runs,
        "finished": row.num_finished,
        "diverged": row.num_diverged,
        "error_mean": row.error.mean,
        "error_std": row.error.std,
        "error_min": row.error.min,
        "best_epoch_mean": row.best.mean,
        "best_epoch_std": row.best.std,
        "place_mean": row.place_mean,
        "place_min": row.place_min,
        "is_best": row.is_best,
        "error5_mean": row.error5.mean,
        "error5_std": row.error5.std,
        "error5_min": row.error5.min,
        "difference": difference.mean if difference else None,
        "difference_low": difference.low if difference else None,
        "difference_high": difference.high if difference else None,
        "p": difference.p if difference else None,
        "p_holm": row.p_corrected,
        "pairs": difference.num_pairs if difference else None,
        "verdict": row.verdict,
        **{name: estimate.mean for name, estimate in row.conditions.items()},
        "measure": row.measure,
        "rank": row.rank.mean,
        "failures": row.failures,
        **row.shares,
        **{f"seconds_{name}": estimate.mean for name, estimate in row.seconds.items()},
        "overhead": row.overhead,
    }
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in record.items()}


def _strict(value: Any) -> Any:
    """Return the value with what JSON can't express replaced."""
    if isinstance(value, dict):
        return {str(key): _strict(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value
