"""Writing files so that a reader, or a process that dies, finds the old content or the new one, never a part."""

import json
import os
import time
from pathlib import Path
from typing import Any

__all__ = ["as_json", "read_object", "replace", "sync_folder", "write_synced"]


def write_synced(file: Path, data: bytes | memoryview) -> None:
    """Write a file, and wait until it is on the disk."""
    with file.open("wb", buffering=0) as stream:
        view = memoryview(data)
        while view:
            view = view[stream.write(view) :]
        os.fsync(stream.fileno())


def replace(source: Path, target: Path) -> None:
    """Move a file over another; Windows refuses while the other is being read, so there it is retried for a second."""
    for _ in range(20 if os.name == "nt" else 0):
        try:
            os.replace(source, target)
            return
        except PermissionError:
            time.sleep(0.05)
    os.replace(source, target)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk; Windows has no such call, and needs none."""
    if os.name == "nt":
        return
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def as_json(value: Any) -> bytes:
    """Return a value as the text of a small file."""
    return (json.dumps(value, indent=2) + "\n").encode()


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        OSError: it can't be read.
        ValueError: it holds something else.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"it holds {type(value).__name__}, not an object")
    return value
