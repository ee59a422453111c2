"""The checkpoints of a run: written whole or not at all, the last two kept, and believed only after they were checked.

A checkpoint carries its own checksums (those of the ZIP archive that `torch.save` writes), so no other file is needed
to tell a whole one from a damaged one. Loading never unpickles code.
"""

import io
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from orthocond.errors import ArgumentError
from orthocond.lab.config import Config, difference, from_settings
from orthocond.lab.files import replace, sync_folder, write_synced

__all__ = ["CHECKPOINTS", "LINES", "config_in", "usable_checkpoints", "whole_checkpoints", "write_checkpoint"]

CHECKPOINTS = ("checkpoint.pt", "checkpoint.previous.pt")
"""The files, the newest first."""

LINES = ("metrics.jsonl", "times.jsonl")
"""The files of lines, whose sizes a checkpoint holds."""

_KINDS: dict[str, tuple[type, ...]] = {
    "config": (dict,),
    "step": (int,),
    "model": (dict,),
    "optimizer": (dict,),
    "scheduler": (dict,),
    "treatment": (dict, type(None)),
    "precision": (dict,),
    "random": (dict,),
    "totals": (Tensor,),
    "sizes": (dict,),
}


class _UnusableError(Exception):
    """The reason why a checkpoint isn't used."""


def write_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint; the newest one, if it is whole, becomes the one before.

    Raises:
        OSError: it can't be written; the checkpoints that are there stay.
    """
    buffer = io.BytesIO()
    torch.save(state, buffer)
    newest, previous = (folder / name for name in CHECKPOINTS)
    partial = folder / "checkpoint.partial"
    try:
        write_synced(partial, buffer.getbuffer())
        if newest.is_file() and _is_whole(newest):
            replace(newest, previous)
        replace(partial, newest)
        sync_folder(folder)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def whole_checkpoints(folder: Path, warnings: list[str]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the checkpoints that are whole, the newest first; name the others in ``warnings``."""
    for name in CHECKPOINTS:
        file = folder / name
        if not os.path.lexists(file):
            continue
        try:
            state = _read(file)
        except _UnusableError as reason:
            warnings.append(f"{file} {reason} and is not used")
        else:
            yield file, state


def usable_checkpoints(
    folder: Path, config: Config, total_steps: int, warnings: list[str]
) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the checkpoints from which a run can continue, the newest first; name the others in ``warnings``.

    A checkpoint is usable if it is whole, of a run with this configuration (apart from where it happens), of a step
    that the run has, and if ``metrics.jsonl`` still holds what had been written by then.
    """
    for file, state in whole_checkpoints(folder, warnings):
        try:
            differs = difference(from_settings(state["config"]), config)
        except ArgumentError as error:
            differs = str(error).rstrip(".")
        metrics, size = folder / "metrics.jsonl", state["sizes"]["metrics.jsonl"]
        if differs is not None:
            warnings.append(f"{file} is of another run ({differs}) and is not used")
        elif state["step"] > total_steps:
            warnings.append(f"{file} claims step {state['step']} of a run of {total_steps} and is not used")
        elif not metrics.is_file() or metrics.stat().st_size < size:
            warnings.append(f"{file} is not used, because metrics.jsonl is shorter than it was at the checkpoint")
        else:
            yield file, state


def config_in(folder: Path) -> Config | None:
    """Return the configuration that the newest whole checkpoint holds, if there is one."""
    for _, state in whole_checkpoints(folder, []):
        try:
            return from_settings(state["config"])
        except ArgumentError:
            continue
    return None


def _read(file: Path) -> dict[str, Any]:
    """Return what a checkpoint holds, after checking that it is one."""
    if not _is_whole(file):
        raise _UnusableError("is damaged")
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception:  # a file that somebody made up can fail in any way
        raise _UnusableError("holds something else than a checkpoint") from None
    if not isinstance(state, dict):
        raise _UnusableError("holds something else than a checkpoint")
    for name, kinds in _KINDS.items():
        if not isinstance(state.get(name, ...), kinds) or isinstance(state[name], bool):
            raise _UnusableError(f"is not a checkpoint of a run ({name} is missing or of the wrong kind)")
    sizes = state["sizes"]
    if set(sizes) != set(LINES) or not all(type(size) is int and size >= 0 for size in sizes.values()):
        raise _UnusableError(f"is not a checkpoint of a run (its sizes are not those of {' and '.join(LINES)})")
    if state["step"] < 1:
        raise _UnusableError(f"is not a checkpoint of a run (it claims step {state['step']})")
    return state


def _is_whole(file: Path) -> bool:
    """Return whether every part of the archive has its checksum; `torch.load` doesn't look."""
    try:
        with zipfile.ZipFile(file) as archive:
            return bool(archive.namelist()) and archive.testzip() is None
    except Exception:  # zipfile raises a dozen kinds on damaged headers
        return False
