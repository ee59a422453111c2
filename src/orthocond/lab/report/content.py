"""The content of a report, in no format yet."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from orthocond.lab.report.experiments import Experiment, experiments_of
from orthocond.lab.report.folders import find_runs
from orthocond.lab.report.message import message_of
from orthocond.lab.report.rows import Row, rows_of

__all__ = ["Report", "Section", "read_report"]


@dataclass(frozen=True)
class Section:
    """One experiment: its rows and what they say in a sentence or two."""

    experiment: Experiment
    rows: list[Row]
    message: list[str]


@dataclass(frozen=True)
class Report:
    """A section for each experiment, and a sentence for each folder that can't be read."""

    sections: list[Section]
    problems: list[str]
    written: str
    marks: str = "noise"
    """What the tables mark, one of `orthocond.lab.report.tables.MARKS`."""


def read_report(folders: Iterable[Path | str], marks: str = "noise") -> Report:
    """Return the report on the runs in and below ``folders``.

    Raises:
        ArgumentError: a folder doesn't exist, or there is no run in any of them.
    """
    runs, problems = find_runs(folders)
    sections = []
    for experiment in experiments_of(runs):
        rows = rows_of(experiment)
        sections.append(Section(experiment, rows, message_of(experiment, rows)))
    return Report(sections, problems, datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), marks)
