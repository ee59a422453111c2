"""What is kept of the runs in the paper's own configuration (plan.md).

    python results/study/published.py CIFAR_DIR RUNS

Adds a line to published.csv for each finished run of an experiment whose name begins with "published", and its
condition numbers over the steps to published_curves.csv. Each network is tested once more, with the statistics of its
stem recomputed after the training. Lines of runs that are not in RUNS stay, so the sweep may be done in several
sittings and on several machines, and a run whose line is there already is not tested again.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from collect import digits, median, summary
from evaluated import error, renew, trained
from records import HERE, PUBLISHED, Record, read_text, write

from orthocond.lab.config import changed
from orthocond.lab.data import load_data
from orthocond.lab.report.folders import method_order
from orthocond.lab.runs import read_config, read_status

BIN = 100
MEASURES = ("cond_eps", "cond_floor", "cond_support")


def collect(data_folder: str, runs: Path) -> None:
    torch.set_num_threads(1)
    for folder in sorted(runs.glob(f"{PUBLISHED}*/*/seed-*")):
        if read_status(folder).get("state") != "finished":
            continue
        config = changed(read_config(folder), {"data": data_folder})
        line, columns = summary(folder, {"method": config.method, "seed": config.seed})
        line = {"experiment": folder.parts[-3], **line}
        (known,) = [other for other in _committed("published") if _key(other) == _key(line)] or [{}]
        if all(known.get(name) == str(value) for name, value in line.items()):
            continue
        data = load_data(config)
        model = trained(config, data, folder)
        renew(model, data)
        line["renewed"] = error(model, data)
        print(line, flush=True)
        about = {name: line[name] for name in ("experiment", "method", "seed")}
        points = [{**about, **point} for point in _curve(columns)]
        # The curve first: a run whose line is there is complete.
        write("published_curves", _replaced(_committed("published_curves"), points))
        write("published", _replaced(_committed("published"), [line]))


def _replaced(committed: list[Record], collected: list[Record]) -> list[Record]:
    """Return the committed records with those of a run in place of its earlier ones."""
    others = [record for record in committed if _key(record) != _key(collected[0])]
    return sorted([*others, *collected], key=_place)


def _curve(columns: dict[str, np.ndarray]) -> list[Record]:
    starts = range(0, len(columns["cond"]), BIN)
    return [
        {"step": start + BIN // 2, **{name: digits(median(columns[name][start : start + BIN])) for name in MEASURES}}
        for start in starts
    ]


def _committed(name: str) -> list[Record]:
    return read_text(name) if (HERE / f"{name}.csv").exists() else []


def _key(line: Record) -> tuple[str, str, str]:
    return line["experiment"], line["method"], str(line["seed"])


def _place(line: Record) -> tuple[str, tuple[int, str], int, int]:
    return line["experiment"], method_order(line["method"]), int(line["seed"]), int(line.get("step", 0))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    collect(sys.argv[1], Path(sys.argv[2]))
