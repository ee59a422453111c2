"""The tables of an experiment as cells of text, the same for every format."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orthocond.lab.conditions import CONDITIONS
from orthocond.lab.notes import declared, flags
from orthocond.lab.report import text
from orthocond.lab.report.experiments import Experiment
from orthocond.lab.report.folders import is_ranked
from orthocond.lab.report.rows import BASELINE, VERDICTS, Row

__all__ = [
    "MARKS",
    "Cell",
    "Table",
    "below_the_line",
    "by_error",
    "config_table",
    "environment_table",
    "error_table",
    "run_table",
    "time_table",
]

MARKS = {
    "noise": "the lowest error and those within the noise of it, if another is beyond",
    "paper": "the four lowest errors, whatever the noise",
}
"""What the table of errors may mark."""


@dataclass(frozen=True)
class Cell:
    """A cell of text and what marks it."""

    text: str
    place: int | None = None
    """1 to 4 with the paper's marks, if it is among the best four."""
    is_best: bool = False
    verdict: str = ""


@dataclass(frozen=True)
class Table:
    """A table; its first column names the rows."""

    key: str
    caption: str
    header: list[str]
    rows: list[list[Cell]]
    rules: frozenset[int] = frozenset()
    """The rows that have a line above them."""


def error_table(experiment: Experiment, rows: list[Row], marks: str = "noise") -> Table:
    """Return the main table: Tables 1 to 5 of the paper, the lowest error first, with verdicts on the differences.

    Args:
        experiment: what was run.
        rows: its rows.
        marks: one of `MARKS`.
    """
    pooling, places = experiment.is_pooling, marks == "paper"
    header = ["method", "top-1 error %" if pooling else "error %", "cond", f"difference to {BASELINE}", "seeds' noise"]
    header += ["min", "best epoch", *(["top-5 error %", "min", "best epoch"] if pooling else [])]
    header += ["seeds", "rank", "failures"]
    lines = []
    for row in by_error(rows):
        line = [
            Cell(row.method),
            Cell(text.mean_std(row.error), row.place_mean if places else None, row.is_best and not places),
            Cell(text.condition(row.condition.mean)),
            Cell(text.difference(row.difference)),
            Cell(VERDICTS.get(row.verdict, text.MISSING), verdict=row.verdict),
            Cell(text.error(row.error.min), row.place_min if places else None),
            Cell(text.mean_std(row.best)),
        ]
        if pooling:
            line += [Cell(t) for t in (text.mean_std(row.error5), text.error(row.error5.min), text.mean_std(row.best5))]
        line += [
            Cell(text.seeds(row)),
            Cell(f"{row.rank.mean:.3g}" if math.isfinite(row.rank.mean) else text.MISSING),
            Cell(str(row.failures)),
        ]
        lines.append(line)
    caption = (
        "Validation error after the last epoch, in percent: mean ± standard deviation over the seeds, and the lowest; "
        "beside it that of the best epoch, which is chosen by the validation images and so too low. "
        f"{_what_is_marked(rows, marks)} Condition number {CONDITIONS[experiment.measure][0]} and rank: median over "
        "the last tenth of the steps, geometric mean over the seeds. Failures: retries of the solver, all runs and "
        "processes together, with those of validation."
    )
    return Table("errors", caption, header, lines)


def by_error(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with the lowest mean error first, and those without one last."""
    return sorted(rows, key=lambda row: row.error.mean if math.isfinite(row.error.mean) else math.inf)


def _what_is_marked(rows: list[Row], marks: str) -> str:
    if marks == "paper":
        return "The four best methods are marked; newton_schulz and bn are not ranked."
    if any(row.is_best for row in rows):
        return "Marked: the lowest error, and those next to it that the seeds can't distinguish from it."
    return "No method is marked as the best, because none is worse than the lowest by more than the noise of the seeds."


def time_table(rows: list[Row]) -> Table:
    """Return the time of a step: Table 6 of the paper."""
    names = ("step", "forward", "backward", "update")
    shown = [flag for flag in flags() if any(math.isfinite(row.shares[flag]) for row in rows)]
    header = ["method", *[f"{name} ms" for name in names], f"overhead to {BASELINE}", *(f"steps {f}" for f in shown)]
    lines = []
    for row in rows:
        step, *parts = (row.seconds[name] for name in names)
        cells = [text.milliseconds(step.mean, step.std), *[text.milliseconds(part.mean) for part in parts]]
        overhead = text.MISSING if row.method == BASELINE else text.percent(row.overhead, "+")
        shares = [text.percent(row.shares[flag]) for flag in shown]
        lines.append([Cell(value) for value in (row.method, *cells, overhead, *shares)])
    caption = (
        "Milliseconds of a training step, without validation: median of each run, mean ± standard deviation over the "
        "runs. Runs that shared a machine with others are slower for it."
        + "".join(f" Steps {flag}: {declared()[flag].description}." for flag in shown)
    )
    return Table("times", caption, header, lines)


def config_table(experiment: Experiment) -> Table:
    """Return the configuration that the experiment's runs share."""
    lines = [[Cell(name), Cell(_plain(value))] for name, value in experiment.config.items()]
    return Table("config", "Configuration of all runs.", ["setting", "value"], lines)


def environment_table(experiment: Experiment) -> Table:
    """Return the environment of the runs; where they differ, each value with its number of runs."""
    environments = [run.environment for run in experiment.runs.values()]
    names = [
        name for name in dict.fromkeys(key for e in environments for key in e) if name not in ("started", "command")
    ]
    lines = []
    for name in names:
        counts = Counter(_plain(environment.get(name)) for environment in environments)
        values = [value if len(counts) == 1 else f"{value} ({count} runs)" for value, count in counts.most_common()]
        lines.append([Cell(name), Cell(", ".join(values))])
    started = sorted(str(environment["started"]) for environment in environments if environment.get("started"))
    if started:
        lines.append([Cell("first and last start"), Cell(f"{text.minute(started[0])} to {text.minute(started[-1])}")])
    return Table("environment", "Where and when it ran.", ["environment", "value"], lines)


def run_table(experiment: Experiment) -> Table:
    """Return one line for each run."""
    header = ["method", "seed", "state", "steps", "error %", "started", "minutes", "commit", "folder"]
    lines = []
    for method in experiment.methods:
        for seed, metrics in experiment.of(method).items():
            run = experiment.runs[method, seed]
            seconds = run.status.get("seconds")
            values = (
                method,
                seed,
                run.state,
                str(metrics.num_steps),
                text.error(metrics.last("val_error")),
                text.minute(str(run.environment.get("started") or text.MISSING)),
                f"{seconds / 60:.1f}" if isinstance(seconds, int | float) else text.MISSING,
                str(run.environment.get("commit") or text.MISSING)[:10],
                str(run.folder),
            )
            lines.append([Cell(value) for value in values])
    return Table("runs", "Every run.", header, lines)


def below_the_line(methods: Sequence[str]) -> frozenset[int]:
    """Return the number of the first row that isn't ranked, if others are: the paper has a line above it."""
    unranked = [number for number, method in enumerate(methods) if not is_ranked(method)]
    return frozenset(number for number in unranked[:1] if number > 0)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
