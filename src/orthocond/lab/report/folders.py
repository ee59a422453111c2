"""The folders of runs: finding them and reading their small files.

A folder is a run if it holds ``config.json``. What can't be read is named, never skipped in silence.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orthocond.errors import ArgumentError
from orthocond.lab.checkpoints import CHECKPOINTS
from orthocond.lab.files import read_object
from orthocond.lab.methods import ALL, method
from orthocond.lab.runs import is_alive, read_status

__all__ = ["Run", "canonical_method", "find_runs", "is_ranked", "method_order"]


_UNRANKED = ("newton_schulz", "bn")


@dataclass(frozen=True)
class Run:
    """The contents of one run's small files: configuration, environment and status."""

    folder: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    status: dict[str, Any]

    @property
    def preset(self) -> str:
        """The preset's name."""
        return str(self.config.get("preset") or "no preset")

    @property
    def method(self) -> str:
        """The method's name, its treatments in one order."""
        parts = self.config.get("parts")
        return canonical_method(
            str(self.config.get("method") or "no method"), parts if isinstance(parts, str) else "none"
        )

    @property
    def seed(self) -> str:
        """The seed."""
        return str(self.config.get("seed", "no seed"))

    @property
    def state(self) -> str:
        """The state that the run recorded; ``"killed"`` if it says running but isn't, ``"unknown"`` without one."""
        state = str(self.status.get("state") or "unknown")
        return "killed" if state == "running" and not is_alive(self.folder) else state

    @property
    def is_finished(self) -> bool:
        """Whether the run is finished, so that its error counts."""
        return self.state == "finished"


def find_runs(folders: Iterable[Path | str]) -> tuple[list[Run], list[str]]:
    """Return the runs in and below ``folders``, and a sentence for each that can't be read.

    Raises:
        ArgumentError: a folder doesn't exist, or there is no run in any of them.
    """
    paths = [Path(folder) for folder in folders]
    if not paths:
        raise ArgumentError("report expected at least one folder, got none; pass the folder that compare wrote.")
    configs: dict[Path, Path] = {}
    for folder in paths:
        if not folder.is_dir():
            raise ArgumentError(f"report found no folder {str(folder)!r}; pass one that train or compare wrote.")
        configs.update({path.resolve(): path for path in sorted(folder.rglob("config.json"))})
    runs, problems = [], [f"{path}: config.json is missing." for folder in paths for path in _without_config(folder)]
    for path in configs.values():
        try:
            config = read_object(path)
        except (OSError, ValueError) as error:
            problems.append(f"{path.parent}: config.json can't be read ({_short(error)}).")
            continue
        small: dict[str, dict[str, Any]] = {}
        for name in ("environment", "status"):
            try:
                small[name] = read_object(path.with_name(f"{name}.json"))
            except (OSError, ValueError) as error:
                problems.append(f"{path.parent}: {name}.json can't be read ({_short(error)}).")
                small[name] = {}
        status = read_status(path.parent)
        odd = sorted(small["status"].keys() - status.keys() - {"error"})
        if odd:
            problems.append(f"{path.parent}: status.json holds what a run doesn't write ({', '.join(odd)}).")
        runs.append(Run(path.parent, config, small["environment"], status))
    if not runs:
        where = ", ".join(repr(str(folder)) for folder in paths)
        unreadable = f" {' '.join(problems)}" if problems else ""
        raise ArgumentError(
            f"report found no run in {where}; a run is a folder with a config.json, as train and compare write it."
            + unreadable
        )
    return runs, problems


def canonical_method(name: str, parts: str = "none") -> str:
    """Return the one spelling of a method, so that it has one row; a name that is no method stays as it is.

    Example:
        >>> canonical_method("svd+olr+ow+nog"), canonical_method("mine")
        ('svd+nog+ow+olr', 'mine')
    """
    try:
        return method(name, parts).name
    except ArgumentError:
        return name


def method_order(name: str) -> tuple[Any, ...]:
    """Return the key that sorts methods: bn, newton_schulz, svd, one treatment, then combinations, as in the tables.

    Example:
        >>> sorted(["svd+nog+ow", "svd", "svd+olr", "bn", "svd+sn"], key=method_order)
        ['bn', 'svd', 'svd+sn', 'svd+olr', 'svd+nog+ow']
    """
    plain = _without_options(name)
    first = {"bn": 0, "newton_schulz": 1, "svd": 2}.get(plain.partition("+")[0], 3)
    return first, plain.count("+"), ALL.index(plain) if plain in ALL else len(ALL), name


def is_ranked(name: str) -> bool:
    """Return whether a method competes for the marks of the best four; others stand below, as in the paper's tables.

    Example:
        >>> is_ranked("svd+nog"), is_ranked("newton_schulz"), is_ranked("bn")
        (True, False, False)
    """
    return _without_options(name).partition("+")[0] not in _UNRANKED


def _without_options(name: str) -> str:
    return re.sub(r"\([^)]*\)", "", name)


def _without_config(folder: Path) -> list[Path]:
    """Return the folders of runs that have lost their configuration; `train --resume` restores it from a checkpoint."""
    found = [path.parent for path in sorted(folder.rglob("metrics.jsonl"))]
    return [
        path
        for path in found
        if not (path / "config.json").exists() and any((path / name).exists() for name in ("status.json", *CHECKPOINTS))
    ]


def _short(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is no text"
    return "it is missing" if isinstance(error, FileNotFoundError) else str(error)
