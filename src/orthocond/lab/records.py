"""The one reader of ``metrics.jsonl`` and ``times.jsonl``, for `train`, `compare` and `report`.

A sweep has millions of lines, so Arrow reads the steps of a file that is in order; a file with damaged lines is read
line by line. A line is damaged if it is no JSON object in UTF-8, of no known kind, or without the number of its step;
it is left out, and its number is kept. The last line of a run that was killed may be half written; that one is left out
in silence.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from orthocond.lab.notes import flags

__all__ = [
    "KINDS",
    "Records",
    "last_step",
    "lines_text",
    "number",
    "read_records",
    "read_steps",
    "read_times",
]

KINDS = ("step", "epoch")
"""What a line of ``metrics.jsonl`` may be about."""

_MOST_STEPS = 10**12
_EPOCH = re.compile(rb'"kind":\s*"epoch"')

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Records:
    """What could be read of ``metrics.jsonl``.

    Example:
        >>> records = Records(({"kind": "epoch", "step": 20, "val_error": 5.0},), {}, (), 1)
        >>> records.last_error({"state": "finished", "total_steps": 20}), records.last_error({"state": "running"})
        (5.0, 5.0)
        >>> records.last_error({"state": "finished", "total_steps": 40}) is None  # its last lines are lost
        True
    """

    epochs: tuple[dict[str, Any], ...]
    steps: Mapping[str, Floats]
    """The numbers that were asked for as columns, NaN where one is null."""
    damaged: tuple[int, ...]
    """The numbers of damaged lines, from 1 on."""
    last_epoch_line: int
    """The number of the last epoch's line, 0 without any; whatever is damaged behind it may be a later epoch."""

    def last_error(self, status: Mapping[str, Any]) -> float | None:
        """Return the last validation error in percent, or None if it can't be known: an earlier one is never taken.

        Args:
            status: of the run, as `orthocond.lab.runs.read_status` returns it.
        """
        validated = [record for record in self.epochs if "val_error" in record]
        if not validated or type(validated[-1]["val_error"]) not in (int, float):
            return None
        last, error = validated[-1], float(validated[-1]["val_error"])
        if status.get("state") == "finished":
            if last is not self.epochs[-1] or status.get("val_error") not in (None, error):
                return None
            if "total_steps" in status:
                return error if last["step"] == status["total_steps"] else None
        return error if max(self.damaged, default=0) < self.last_epoch_line else None


def read_records(folder: Path | str, kind: str) -> list[dict[str, Any]]:
    """Return the lines of ``metrics.jsonl`` of a kind, ``"step"`` or ``"epoch"``, without the damaged ones."""
    records, _ = _one_by_one(_complete_lines(Path(folder) / "metrics.jsonl"))
    return [record for _, record in records if record["kind"] == kind]


def read_steps(folder: Path | str, names: Sequence[str] = ()) -> Records:
    """Return the epochs, and numbers of the steps as columns."""
    data = _complete_lines(Path(folder) / "metrics.jsonl")
    names = tuple(dict.fromkeys(("step", *names)))
    try:
        epochs, line = _epochs(data)
        table = _arrow(data, names, kinds=True)
    except ValueError:
        records, damaged = _one_by_one(data)
        epochs = [record for _, record in records if record["kind"] == "epoch"]
        line = max([number for number, record in records if record["kind"] == "epoch"], default=0)
        steps = _columns([record for _, record in records if record["kind"] == "step"], names)
        return Records(tuple(epochs), steps, tuple(damaged), line)
    return Records(tuple(epochs), table, (), line)


def read_times(folder: Path | str, names: Sequence[str]) -> dict[str, Floats]:
    """Return numbers of the lines of ``times.jsonl`` as columns; damaged lines are left out."""
    data = _complete_lines(Path(folder) / "times.jsonl")
    try:
        return _arrow(data, tuple(names), kinds=False)
    except ValueError:
        records = [record for line in data.splitlines() if isinstance(record := _parsed(line), dict)]
        return _columns(records, tuple(names))


def last_step(folder: Path | str) -> int:
    """Return the last step of which there is a record, from the file's end alone; 0 without any."""
    try:
        with (Path(folder) / "metrics.jsonl").open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 65536))
            lines = file.read().splitlines()
    except OSError:
        return 0
    return next((record["step"] for line in reversed(lines) if (record := _record(line)) is not None), 0)


def lines_text(damaged: Sequence[int]) -> str:
    """Return a sentence's beginning that names damaged lines.

    Example:
        >>> lines_text([4])
        'line 4 of metrics.jsonl is damaged and left out'
        >>> lines_text([1, 2, 3, 5, 8])
        'lines 1, 2, 3 and 2 others of metrics.jsonl are damaged and left out'
    """
    if len(damaged) == 1:
        return f"line {damaged[0]} of metrics.jsonl is damaged and left out"
    shown = damaged if len(damaged) <= 3 else [*damaged[:3], f"{len(damaged) - 3} others"]
    first = ", ".join(map(str, shown[:-1]))
    return f"lines {first} and {shown[-1]} of metrics.jsonl are damaged and left out"


def number(value: Any) -> float:
    """Return a number from a file as a float; NaN for anything else."""
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.nan


def _complete_lines(path: Path) -> bytes:
    """Return the file's lines; a last one that is half written is left out, and what is no file has none."""
    try:
        data = path.read_bytes()
    except OSError:
        return b""
    end = data.rfind(b"\n") + 1
    return data if end == len(data) or isinstance(_parsed(data[end:]), dict) else data[:end]


def _epochs(data: bytes) -> tuple[list[dict[str, Any]], int]:
    """Return the epochs, found by their kind, and the number of the last one's line; a damaged one is a ValueError."""
    records, line, counted = [], 0, 0
    for match in _EPOCH.finditer(data):
        start, end = data.rfind(b"\n", 0, match.start()) + 1, data.find(b"\n", match.end())
        record = _record(data[start : end if end >= 0 else None])
        if record is None:
            raise ValueError
        records.append(record)
        line, counted = line + data.count(b"\n", counted, start), start
    return records, line + 1 if records else 0


def _arrow(data: bytes, names: tuple[str, ...], *, kinds: bool) -> dict[str, Floats]:
    """Return numbers of all lines, or of the steps among them, as columns; one damaged line is a ValueError."""
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyarrow import json as arrow_json

    if not data or data.isspace():
        return {name: np.empty(0) for name in names}
    data.decode()  # Arrow doesn't mind what is no UTF-8
    are_flags = flags()
    types = {name: pa.bool_() if name in are_flags else pa.float64() for name in names}
    schema = pa.schema([*types.items(), *([("kind", pa.string())] if kinds else [])])
    table = arrow_json.read_json(  # its ArrowInvalid is a ValueError
        pa.BufferReader(data),
        read_options=arrow_json.ReadOptions(use_threads=False, block_size=1 << 20),
        parse_options=arrow_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
    )
    if kinds:
        step = table["step"].cast(pa.float64()).to_numpy()
        known = (step >= 1) & (step <= _MOST_STEPS) & (step == np.floor(step))
        if len(table) != data.count(b"\n") + (not data.endswith(b"\n")) or not known.all():
            raise ValueError
        if not pc.all(pc.is_in(table["kind"], pa.array(KINDS))).as_py():
            raise ValueError
        table = table.filter(pc.equal(table["kind"], "step"))
    return {name: table[name].cast(pa.float64()).to_numpy() for name in names}


def _one_by_one(data: bytes) -> tuple[list[tuple[int, dict[str, Any]]], list[int]]:
    """Return the records with the numbers of their lines, and the numbers of the damaged ones."""
    records, damaged = [], []
    for line_number, line in enumerate(data.split(b"\n"), start=1):
        record = _record(line)
        if record is not None:
            records.append((line_number, record))
        elif line.strip():
            damaged.append(line_number)
    return records, damaged


def _columns(records: Sequence[dict[str, Any]], names: tuple[str, ...]) -> dict[str, Floats]:
    rows = [[number(record.get(name)) for name in names] for record in records]
    table = np.array(rows, dtype=np.float64).reshape(-1, len(names))
    return dict(zip(names, table.T, strict=True))


def _record(line: bytes) -> dict[str, Any] | None:
    """Return what a line of ``metrics.jsonl`` says, None if it is damaged."""
    record = _parsed(line)
    if not isinstance(record, dict) or record.get("kind") not in KINDS:
        return None
    step = record.get("step")
    return record if type(step) is int and 1 <= step <= _MOST_STEPS else None


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
