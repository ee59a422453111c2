"""What a report keeps of a run's ``metrics.jsonl`` and ``times.jsonl``.

A sweep has millions of lines, and what is kept of a run is small: its epochs, its curves in bins, and a few numbers of
all its steps.
"""

import dataclasses
import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from orthocond.lab.conditions import CONDITIONS, at_end
from orthocond.lab.notes import declared
from orthocond.lab.records import Records, last_step, number, read_steps, read_times
from orthocond.lab.report.thin import Floats, Spread, spread, thin

__all__ = ["CURVES", "Bins", "Metrics", "bins_for", "read_metrics"]

CURVES = (*CONDITIONS, "rank", "loss", "pre_svd_lr")
"""The numbers that are drawn over the steps."""

_NUMBERS = ("step", *CURVES, "failures")


@dataclass(frozen=True)
class Bins:
    """The bins of an experiment's steps: ``number`` of them, each ``width`` steps wide, after the first ``skipped``."""

    width: int
    number: int
    skipped: int = 0

    @property
    def steps(self) -> Floats:
        """The step in the middle of each bin."""
        return np.arange(self.number, dtype=np.float64) * self.width + (self.width + 1) // 2 + self.skipped

    @property
    def coarse(self) -> "Bins":
        """Bins eight times as wide, for shares that need many steps."""
        return Bins(8 * self.width, math.ceil(self.number / 8), self.skipped)


@dataclass(frozen=True)
class Metrics:
    """What is kept of a run."""

    records: Records
    """The records that could be read, without those of the steps."""
    curves: dict[str, Spread]
    """The thinned curves of `CURVES`, and of the numbers that treatments noted."""
    shares: dict[str, Floats]
    """For each flag that a treatment noted, the share of steps in each coarse bin in which it was set."""
    num_steps: int
    counts: dict[str, int]
    """For each flag, the number of steps in which it was set."""
    failures: int
    """Solver failures in all processes, in training and validation."""
    at_end: dict[str, float]
    """Each of `CONDITIONS` and ``rank`` at the end of training; NaN where there is none."""
    seconds: dict[str, float]
    """The median seconds of a step: ``step``, and of it ``forward``, ``backward``, ``update``; empty if not timed."""

    @property
    def epochs(self) -> tuple[dict[str, Any], ...]:
        """The records of the epochs."""
        return self.records.epochs

    def last(self, name: str) -> float:
        """Return the last epoch's number called ``name``; NaN if there is none."""
        return number(self.epochs[-1].get(name)) if self.epochs else math.nan

    def best(self, name: str) -> float:
        """Return the lowest of the epochs' numbers called ``name``; NaN if there is none."""
        known = [value for record in self.epochs if not math.isnan(value := number(record.get(name)))]
        return min(known, default=math.nan)


def bins_for(folders: list[Path], *, number: int = 400, window: tuple[float, float] = (0.0, 1.0)) -> Bins:
    """Return at most ``number`` bins that hold every step of the runs in ``folders`` in a part of the training."""
    total = max([last_step(folder) for folder in folders], default=0)
    first, last = (round(part * total) for part in window)
    width = max(1, math.ceil((last - first) / number))
    return Bins(width, math.ceil((last - first) / width), first)


def read_metrics(folders: list[Path], bins: Bins) -> list[Metrics]:
    """Return the metrics of the run in each of ``folders``; unchanged files aren't read again."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # Arrow and numpy release the interpreter lock
        return list(pool.map(lambda folder: _read(folder, _stamp(folder), bins), folders))


def _stamp(folder: Path) -> tuple[tuple[int, int], ...]:
    stats = [path.stat() for path in (folder / "metrics.jsonl", folder / "times.jsonl") if path.is_file()]
    return tuple((stat.st_size, stat.st_mtime_ns) for stat in stats)


@lru_cache(maxsize=1024)
def _read(folder: Path, _: tuple[tuple[int, int], ...], bins: Bins) -> Metrics:
    notes = declared()
    records = read_steps(folder, (*_NUMBERS, *notes))
    columns = records.steps
    steps = columns["step"].astype(np.int64)
    own = [name for name in notes if not np.isnan(columns[name]).all()]
    flagged = [name for name in own if notes[name].kind == "flag"]
    drawn = (*CURVES, *(name for name in own if name not in flagged))
    thinned = {
        name: thin(steps - bins.skipped, columns[name], width=bins.width, num_bins=bins.number) for name in drawn
    }
    in_validation = sum(number(record.get("failures", 0)) for record in records.epochs)
    return Metrics(
        records=dataclasses.replace(records, steps={}),
        curves=thinned,
        shares={name: _share(steps, columns[name], bins.coarse) for name in flagged},
        num_steps=len(steps),
        counts={name: int(np.nansum(columns[name])) for name in flagged},
        failures=int(np.nansum([np.nansum(columns["failures"]), in_validation])),
        at_end={name: at_end(steps, columns[name]) for name in (*CONDITIONS, "rank")},
        seconds=_seconds(folder),
    )


def _share(steps: Any, flag: Floats, bins: Bins) -> Floats:
    index = (steps - 1 - bins.skipped) // bins.width
    inside = (index >= 0) & (index < bins.number) & ~np.isnan(flag)
    counts = np.bincount(index[inside], minlength=bins.number)
    sums = np.bincount(index[inside], weights=flag[inside], minlength=bins.number)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def _seconds(folder: Path) -> dict[str, float]:
    parts = {"step": "seconds", "forward": "forward", "backward": "backward", "update": "update"}
    columns = read_times(folder, ("steps", *parts.values()))
    timed = columns["steps"] > 0
    if not timed.any():
        return {}
    seconds = np.stack([columns[key][timed] / columns["steps"][timed] for key in parts.values()])
    return dict(zip(parts, spread(seconds).middle.tolist(), strict=True))
