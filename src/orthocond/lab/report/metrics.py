"""Reading ``metrics.jsonl`` and ``times.jsonl``: fast where they are in order, forgiving where they are not.

A sweep has millions of lines, so Arrow reads the steps, and what is kept of a run is small: its epochs, its curves in
bins, and a few numbers of all its steps.
"""

import io
import json
import math
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from orthocond.lab.report.thin import Floats, Spread, spread, thin

__all__ = ["CONDITIONS", "CURVES", "Bins", "Metrics", "bins_for", "read_metrics"]

CONDITIONS = ("cond_support", "cond", "cond_eps")
"""The three condition numbers: on the support, raw, with eps."""

CURVES = (*CONDITIONS, "rank", "loss", "pre_svd_lr")
"""What is drawn over the steps."""

_NUMBERS = ("step", *CURVES, "failures")
_MOST_STEPS = 1e12
_EPOCH = re.compile(rb'"kind":\s*"epoch"')


@dataclass(frozen=True)
class Bins:
    """The bins of an experiment's steps: ``number`` of them, each ``width`` steps wide."""

    width: int
    number: int

    @property
    def steps(self) -> Floats:
        """The step in the middle of each bin."""
        return np.arange(self.number, dtype=np.float64) * self.width + (self.width + 1) // 2

    @property
    def coarse(self) -> "Bins":
        """Bins eight times as wide, for what only many steps together can tell."""
        return Bins(8 * self.width, math.ceil(self.number / 8))


@dataclass(frozen=True)
class Metrics:
    """What is kept of a run."""

    epochs: tuple[dict[str, Any], ...]
    curves: dict[str, Spread]
    """The thinned curves of `CURVES`."""
    switched: Floats
    """The share of steps in each coarse bin in which the learning rate was switched to eta*; NaN without ``olr``."""
    num_steps: int
    num_switched: int | None
    """``None`` without ``olr``."""
    failures: int
    at_end: dict[str, float]
    """The median over the last tenth of the steps, of `CONDITIONS` and ``rank``; NaN where there is none."""
    seconds: dict[str, float]
    """The median seconds of a step: ``step``, and of it ``forward``, ``backward``, ``update``; empty if not timed."""
    num_unreadable: int
    """Lines that are no JSON, the half-written last one not counted."""

    def last(self, name: str) -> float:
        """Return the last epoch's number called ``name``; NaN if there is none."""
        return _number(self.epochs[-1].get(name)) if self.epochs else math.nan


def bins_for(folders: list[Path], *, number: int = 400) -> Bins:
    """Return bins that hold every step of the runs in ``folders``, at most ``number`` of them."""
    total = max([_last_step(folder / "metrics.jsonl") for folder in folders], default=0)
    width = max(1, math.ceil(total / number))
    return Bins(width, math.ceil(total / width))


def read_metrics(folders: list[Path], bins: Bins) -> list[Metrics]:
    """Return the metrics of the run in each of ``folders``; what didn't change isn't read again."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # Arrow and numpy leave the interpreter free
        return list(pool.map(lambda folder: _read(folder, _stamp(folder), bins), folders))


def _stamp(folder: Path) -> tuple[tuple[int, int], ...]:
    stats = [path.stat() for path in (folder / "metrics.jsonl", folder / "times.jsonl") if path.exists()]
    return tuple((stat.st_size, stat.st_mtime_ns) for stat in stats)


@lru_cache(maxsize=1024)
def _read(folder: Path, _: tuple[tuple[int, int], ...], bins: Bins) -> Metrics:
    data = _complete_lines(folder / "metrics.jsonl")
    epochs, bad_epochs = _epochs(data)
    columns, bad_steps = _steps(data)
    steps = columns["step"].astype(np.int64)
    switched = columns["switched"]
    tail = steps > steps.max(initial=0) * 0.9
    at_end = {name: float(spread(columns[name][None, tail]).middle[0]) for name in (*CONDITIONS, "rank")}
    return Metrics(
        epochs=tuple(epochs),
        curves={name: thin(steps, columns[name], width=bins.width, num_bins=bins.number) for name in CURVES},
        switched=_share(steps, switched, bins.coarse),
        num_steps=len(steps),
        num_switched=None if np.isnan(switched).all() else int(np.nansum(switched)),
        failures=int(np.nansum(columns["failures"])),
        at_end=at_end,
        seconds=_seconds(folder / "times.jsonl"),
        num_unreadable=max(bad_epochs, bad_steps),
    )


def _complete_lines(path: Path) -> bytes:
    """Return the file's lines; a last one that is half written is left out."""
    data = path.read_bytes() if path.exists() else b""
    end = data.rfind(b"\n") + 1
    return data if end == len(data) or isinstance(_parsed(data[end:]), dict) else data[:end]


def _epochs(data: bytes) -> tuple[list[dict[str, Any]], int]:
    records = []
    num_bad = 0
    for match in _EPOCH.finditer(data):
        start, end = data.rfind(b"\n", 0, match.start()) + 1, data.find(b"\n", match.end())
        record = _parsed(data[start : end if end >= 0 else None])
        if isinstance(record, dict):
            records.append(record)
        else:
            num_bad += 1
    return records, num_bad


def _steps(data: bytes) -> tuple[dict[str, Floats], int]:
    """Return the columns of the step lines and how many lines can't be read."""
    columns, num_bad = _columns(data, (*_NUMBERS, "switched"), kind="step")
    known = (columns["step"] >= 1) & (columns["step"] <= _MOST_STEPS)
    return {name: column[known] for name, column in columns.items()}, num_bad


def _columns(data: bytes, names: tuple[str, ...], kind: str | None = None) -> tuple[dict[str, Floats], int]:
    """Return numbers of all lines (of a kind) as columns, NaN where one is null, and how many lines can't be read."""
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyarrow import json as arrow_json

    if not data or data.isspace():
        return {name: np.empty(0) for name in names}, 0
    types = {name: pa.bool_() if name == "switched" else pa.float64() for name in names}
    schema = pa.schema([*types.items(), *([("kind", pa.string())] if kind else [])])
    try:
        table = arrow_json.read_json(
            pa.BufferReader(data),
            read_options=arrow_json.ReadOptions(use_threads=False, block_size=1 << 20),
            parse_options=arrow_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
        )
    except pa.ArrowInvalid:
        return _columns_one_by_one(data, names, kind)
    if kind:
        table = table.filter(pc.equal(table["kind"], kind))
    return {name: table[name].cast(pa.float64()).to_numpy() for name in names}, 0


def _columns_one_by_one(data: bytes, names: tuple[str, ...], kind: str | None) -> tuple[dict[str, Floats], int]:
    """Do what `_columns` does for a file with lines that are no JSON, or hold what doesn't belong there."""
    rows = []
    num_bad = 0
    for line in io.BytesIO(data):
        record = _parsed(line)
        if not isinstance(record, dict):
            num_bad += bool(line.strip())
        elif kind is None or record.get("kind") == kind:
            rows.append([_number(record.get(name)) for name in names])
    table = np.array(rows, dtype=np.float64).reshape(-1, len(names))
    return dict(zip(names, table.T, strict=True)), num_bad


def _share(steps: Any, switched: Floats, bins: Bins) -> Floats:
    index = (steps - 1) // bins.width
    inside = (index >= 0) & (index < bins.number) & ~np.isnan(switched)
    counts = np.bincount(index[inside], minlength=bins.number)
    sums = np.bincount(index[inside], weights=switched[inside], minlength=bins.number)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def _seconds(path: Path) -> dict[str, float]:
    parts = {"step": "seconds", "forward": "forward", "backward": "backward", "update": "update"}
    columns, _ = _columns(_complete_lines(path), ("steps", *parts.values()))
    timed = columns["steps"] > 0
    if not timed.any():
        return {}
    seconds = np.stack([columns[key][timed] / columns["steps"][timed] for key in parts.values()])
    return dict(zip(parts, spread(seconds).middle.tolist(), strict=True))


def _last_step(path: Path) -> int:
    """Return the last step that the file holds, from its end alone."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 65536))
        lines = file.read().splitlines()
    for line in reversed(lines):
        record = _parsed(line)
        if isinstance(record, dict) and 1 <= (step := _number(record.get("step"))) <= _MOST_STEPS:
            return int(step)
    return 0


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan
