"""What is kept of the study's runs.

    python results/study/collect.py RUNS

From the run folders to the files beside this one: `runs.csv` has a line for each run, `curves.csv` the condition
numbers over the steps, and each experiment its report as CSV and JSON. What the files have of experiments that are not
in RUNS stays. Experiments of the paper's own configuration are left to `published.py`.
"""

import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from records import CONDITIONS, HERE, PUBLISHED, QUARTERS, THRESHOLD, Record, read_text, write

from orthocond.lab.report import write_report
from orthocond.lab.report.folders import method_order
from orthocond.lab.runs import read_status

FIRST = 10
"""Steps that are left out of medians and shares: the network has just been initialised."""
BIN = 10


def collect(runs: Path) -> None:
    """Write what is kept of the run folders."""
    lines, curves = [], []
    for experiment in sorted(path for path in runs.iterdir() if path.is_dir() and not path.name.startswith(PUBLISHED)):
        by_method: dict[str, list[dict[str, np.ndarray]]] = defaultdict(list)
        for folder in sorted(experiment.glob("*/seed-*")):
            state = read_status(folder).get("state", "not begun")
            if state != "finished":
                print(f"{folder}: {state}, left out", file=sys.stderr)
                continue
            config = json.loads((folder / "config.json").read_text())
            line, columns = summary(folder, config)
            lines.append({"experiment": experiment.name, **line})
            by_method[config["method"]].append(columns)
        for method in sorted(by_method, key=method_order):
            curves += [{"experiment": experiment.name, **point} for point in _curve(method, by_method[method])]
        for form in ("csv", "json"):
            write_report([experiment], HERE / f"{experiment.name}.{form}", format=form)
    write("runs", sorted(_with_others("runs", lines), key=_place))
    write("curves", sorted(_with_others("curves", curves), key=lambda point: point["experiment"]))


def _with_others(name: str, collected: list[Record]) -> list[Record]:
    """Return what was collected, with the committed lines of other experiments in front."""
    experiments = {line["experiment"] for line in collected}
    others = [line for line in read_text(name) if line["experiment"] not in experiments]
    keys = dict.fromkeys(key for line in (*collected, *others) for key in line)
    return [{key: line.get(key, "") for key in keys} for line in (*others, *collected)]


def _place(line: Record) -> tuple[str, tuple[int, str], int]:
    return line["experiment"], method_order(line["method"]), int(line["seed"])


def summary(folder: Path, config: Record) -> tuple[Record, dict[str, np.ndarray]]:
    """Return a run in one line, and its condition numbers by step."""
    records = [json.loads(entry) for entry in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["kind"] == "step"]
    columns = {
        name: np.array([_number(record[name]) for record in steps]) for name in (*CONDITIONS, "cond_floor", "rank")
    }
    losses = np.array([record["loss"] for record in steps])
    later = np.arange(len(steps)) >= FIRST
    times = [json.loads(entry) for entry in (folder / "times.jsonl").read_text().splitlines()]
    line: Record = {
        "method": config["method"],
        "seed": config["seed"],
        "steps": len(steps),
        "error": next(record["val_error"] for record in reversed(records) if record["kind"] == "epoch"),
        **{name: digits(float(np.mean(part))) for name, part in zip(QUARTERS, np.array_split(losses, 4), strict=True)},
        **{name: digits(median(columns[name][later])) for name in CONDITIONS},
        "largest_cond_support": digits(_of_known(np.max, columns["cond_support"][later])),
        "below_threshold": digits(_of_known(np.mean, columns["cond_support"][later], lambda cond: cond < THRESHOLD)),
        "rank_last": digits(median(columns["rank"][-len(steps) // 10 :])),
        "switched": _count(steps, "switched"),
        "gauged": _count(steps, "gauged"),
        "failures": sum(record["failures"] or 0 for record in steps),
        "fallbacks": _count(steps, "fallbacks"),
        **_shares(steps, config["method"]),
        "seconds": digits(statistics.median(record["seconds"] / record["steps"] for record in times)),
    }
    if config["method"] == "bn":
        line |= dict.fromkeys(("largest_cond_support", "below_threshold"), "")
    return line, columns


def _curve(method: str, runs: list[dict[str, np.ndarray]]) -> Iterable[Record]:
    """Yield the median, lowest and highest of the seeds, of the medians of every `BIN` steps."""
    if method == "bn":
        return
    for start in range(0, min(len(run["cond"]) for run in runs) - BIN + 1, BIN):
        point: Record = {"method": method, "step": start + BIN // 2}
        for name in ("cond_support", "cond"):
            values = [median(run[name][start : start + BIN]) for run in runs]
            point |= {
                name: digits(statistics.median(values)),
                f"{name}_low": digits(min(values)),
                f"{name}_high": digits(max(values)),
            }
        yield point


def _of_known(
    statistic: Callable[[np.ndarray], float],
    values: np.ndarray,
    of: Callable[[np.ndarray], np.ndarray] = np.asarray,
) -> float:
    """Return a statistic of the values that were recorded."""
    known = values[~np.isnan(values)]
    return float(statistic(of(known))) if known.size else math.nan


def median(values: np.ndarray) -> float:
    """Return the median of the values that were recorded."""
    return _of_known(np.median, values)


def _count(steps: list[Record], name: str) -> int | str:
    known = [record[name] for record in steps if record.get(name) is not None]
    return sum(known) if known else ""


def _shares(steps: list[Record], method: str) -> Record:
    """Return shares of the steps: those whose whitening decomposed nothing, and well conditioned ones.

    ``without_decomposition`` leaves out the steps in which gauge changed the weight, since that decomposes too. The
    condition number is the one that gauge decides by, on the support that the whitening keeps; without gauge the one
    that is recorded.
    """
    name = "cond_before" if "gauge" in method else "cond_support"
    known = [record[name] for record in steps if record.get(name) is not None]
    free = [record.get("fallbacks", 1) == 0 for record in steps]
    nowhere = [is_free and not record.get("gauged") for is_free, record in zip(free, steps, strict=True)]
    return {
        "whitened_by_products": "" if method == "bn" else digits(statistics.mean(free)),
        "without_decomposition": "" if method == "bn" else digits(statistics.mean(nowhere)),
        "at_most_threshold": digits(statistics.mean(cond <= THRESHOLD for cond in known)) if known else "",
    }


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def digits(value: float) -> str:
    """Return a number as it is written to a file; nothing where there is none."""
    return "" if math.isnan(value) else f"{value:.5g}"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    collect(Path(sys.argv[1]))
