"""Running the subjects of the benchmark, and their results as JSON beside the environment."""

import errno
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from orthocond.errors import OrthocondError
from orthocond.lab import processor
from orthocond.lab.bench import functions, geometry, layers, peers, polar, solvers, step
from orthocond.lab.runs import environment

__all__ = ["SUBJECTS", "BenchError", "Subject", "check_place", "read_results", "run", "write_results"]


class BenchError(OrthocondError):
    """Results can't be written or read."""


@dataclass(frozen=True)
class Subject:
    """A subject of `orthocond bench`."""

    description: str
    cells: Callable[..., Iterable[Any]]
    """Takes ``quick``; yields what is measured, one cell after the other."""
    measure: Callable[..., list[dict[str, Any]]]
    """Takes a cell and ``quick``; returns its records."""


SUBJECTS = MappingProxyType(
    {
        "solvers": Subject("inverse roots by every solver and gradient rule", solvers.cells, solvers.measure),
        "functions": Subject("errors of the spectral functions", functions.cells, functions.measure),
        "polar": Subject("the nearest orthogonal matrix", polar.cells, polar.measure),
        "geometry": Subject("the nearest rotation", geometry.cells, geometry.measure),
        "layers": Subject("whitening, pooling and orthogonal weights", layers.cells, layers.measure),
        "step": Subject("a training step by each method", step.cells, step.measure),
    }
)
"""What can be measured, by name."""


def run(names: Iterable[str], *, quick: bool, console: Console, **options: Any) -> dict[str, Any]:
    """Return the results: ``environment``, ``quick``, and in ``subjects`` records by name.

    Args:
        names: of `SUBJECTS`.
        quick: small problems and few rounds: whether it runs, not how fast.
        console: where the progress is shown, a bar on a terminal and lines elsewhere.
        **options: of a subject's ``measure``; ``device`` is where it happens.
    """
    names = list(names)
    if "polar" in names:  # Muon's steps are in bfloat16; their setting must be chosen before torch computes
        processor.prepare()
    about = {**environment(device=options.get("device", "cpu"), world_size=1), "peers": peers.state()}
    found: dict[str, Any] = {"environment": about, "quick": quick, "subjects": {}}
    for name in names:
        subject = SUBJECTS[name]
        began = time.monotonic()
        todo = list(subject.cells(quick=quick))
        cells = _shown(todo, name, console)
        records = [record for cell in cells for record in subject.measure(cell, quick=quick, **options)]
        entry = {"seconds": round(time.monotonic() - began, 1), "records": records}
        if name == "solvers":
            entry["growth"] = solvers.growth(records)
            entry["functions"] = functions.times(quick=quick)
        found["subjects"][name] = entry
    return found


def check_place(file: Path) -> None:
    """Raise unless results can be written to the file, before anything is measured."""
    partial = _partial(file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.touch()
        partial.unlink()
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    except OSError as error:
        raise _cant_write(file, error) from None


def write_results(results: dict[str, Any], file: Path) -> None:
    """Write results as JSON, whole or not at all; the folder is made if it isn't there."""
    partial = _partial(file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n")
        os.replace(partial, file)
    except OSError as error:
        raise _cant_write(file, error) from None


def read_results(files: Iterable[Path]) -> dict[str, Any]:
    """Return results from several files as one, ``environment`` and ``quick`` by subject."""
    merged: dict[str, Any] = {"environment": {}, "quick": {}, "subjects": {}}
    for file in files:
        try:
            one = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise BenchError(f"can't read results from {file}: {error}.") from None
        if not isinstance(one, dict) or not {"environment", "quick", "subjects"} <= set(one):
            raise BenchError(f"can't read results from {file}: the file was not written by orthocond bench --json.")
        for name, entry in one["subjects"].items():
            merged["subjects"][name] = entry
            merged["environment"][name], merged["quick"][name] = one["environment"], one["quick"]
    return merged


def _partial(file: Path) -> Path:
    return file.with_name(f"{file.name}.partial")


def _cant_write(file: Path, error: OSError) -> BenchError:
    return BenchError(f"can't write {file} ({error.strerror}); choose another file with --json.")


def _shown(cells: list[Any], title: str, console: Console) -> Iterator[Any]:
    """Yield the cells, and show the progress."""
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console) as progress:
            yield from progress.track(cells, description=title)
        return
    began = time.monotonic()
    for number, cell in enumerate(cells, 1):
        yield cell
        if number == len(cells) or number % max(1, len(cells) // 10) == 0:
            seconds = time.monotonic() - began
            console.print(f"{title}: {number} of {len(cells)} after {seconds:.0f} s", highlight=False, soft_wrap=True)
