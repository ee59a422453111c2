"""The lock of a run's folder: held by one process, and released by the system when that process ends, however it ends.

The lock is ``flock`` on Linux and macOS and ``LockFileEx`` on Windows, by way of `filelock`. It belongs to one open
file: opening and closing the same file elsewhere in the process, as `is_held` does, leaves it alone.
"""

import os
import time
import weakref
from pathlib import Path
from typing import BinaryIO

from filelock import lock_descriptor

__all__ = ["Lock", "is_held"]

_PATIENCE = 0.5  # seconds: somebody who only asks whether the lock is held has it for a moment
_open_files: "weakref.WeakSet[BinaryIO]" = weakref.WeakSet()


class Lock:
    """A lock on a file, which is made if it isn't there.

    Args:
        file: the file.

    Raises:
        BlockingIOError: another process, or another `Lock` of this one, holds it.
        OSError: the file can't be opened, or its disk has no locks.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     lock = Lock(Path(folder) / "run.lock")
        ...     held = is_held(Path(folder) / "run.lock")
        ...     lock.close()
        ...     held, is_held(Path(folder) / "run.lock")
        (True, False)
    """

    def __init__(self, file: Path) -> None:
        self._file = file.open("a+b")
        until = time.monotonic() + _PATIENCE
        try:
            while not lock_descriptor(self._file.fileno(), blocking=False):
                if time.monotonic() > until:
                    raise BlockingIOError(f"{file} is locked")
                time.sleep(0.02)
        except BaseException:
            self._file.close()
            raise
        _open_files.add(self._file)

    def close(self) -> None:
        """Release the lock."""
        self._file.close()


def is_held(file: Path) -> bool:
    """Return whether a process, this one included, holds the lock on a file; nothing is written."""
    try:
        with file.open("r+b" if os.access(file, os.W_OK) else "rb") as asking:
            return not lock_descriptor(asking.fileno(), blocking=False)
    except OSError:
        return False


def _close_in_child() -> None:
    """Close a forked process's copies, which would keep the lock after the death of the process that took it."""
    for file in list(_open_files):
        file.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
