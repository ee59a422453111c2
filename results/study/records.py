"""The committed files of the study, one record a line, and the runs of a method in them."""

import csv
import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from orthocond.lab.report import text
from orthocond.lab.report.folders import method_order
from orthocond.lab.report.rows import Estimate

HERE = Path(__file__).parent
CONDITIONS = ("cond", "cond_support", "cond_eps")
QUARTERS = ("loss_1", "loss_2", "loss_3", "loss_4")
"""Training loss, mean over a quarter of the steps."""
THRESHOLD = 10.0
"""Of gauge."""

PUBLISHED = "published"
"""How the names of experiments in the paper's own configuration begin."""

Record = dict[str, Any]


def read(name: str) -> list[Record]:
    """Return the records of a committed file, its numbers as numbers."""
    return [{key: _parsed(value) for key, value in record.items()} for record in read_text(name)]


def read_text(name: str) -> list[Record]:
    """Return the records of a committed file as they are written."""
    with (HERE / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def write(name: str, records: list[Record]) -> None:
    """Write a committed file."""
    with (HERE / f"{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(records[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)


def grouped(records: Iterable[Record], *names: str) -> dict[tuple[str, ...], list[Record]]:
    """Return the records by what stands under these names, in the order of the file."""
    found = defaultdict(list)
    for record in records:
        found[tuple(str(record[name]) for name in names)].append(record)
    return found


class Group:
    """The runs of one method in one experiment."""

    def __init__(self, runs: list[Record], experiment: str, method: str) -> None:
        self.method = method
        self.runs = [run for run in runs if (run["experiment"], run["method"]) == (experiment, method)]

    def values(self, name: str) -> list[float]:
        return [float(run[name]) for run in self.runs if run[name] != ""]

    def by_seed(self, name: str) -> dict[str, float]:
        return {str(run["seed"]): float(run[name]) for run in self.runs}

    @property
    def error(self) -> str:
        return self.mean_std("error")

    def mean_std(self, name: str) -> str:
        return text.mean_std(Estimate.of(self.values(name)))

    def condition(self, name: str) -> str:
        """The geometric mean over the seeds of each run's median."""
        values = self.values(name)
        return text.condition(statistics.geometric_mean(values)) if values else ""

    def mean(self, name: str, form: str) -> str:
        values = self.values(name)
        return form.format(statistics.mean(values)) if values else ""


def groups(runs: list[Record], experiment: str) -> list[Group]:
    names = {run["method"] for run in runs if run["experiment"] == experiment}
    return [Group(runs, experiment, name) for name in sorted(names, key=method_order)]


def _parsed(value: str) -> Any:
    try:
        return float(value)
    except ValueError:
        return value
