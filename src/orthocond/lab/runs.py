"""The folder of a run: its files, and how they survive whatever happens to the process that writes them.

``config.json``, ``environment.json``, ``status.json``, ``metrics.jsonl`` (the same, byte for byte, however often the
run was killed and resumed), ``times.jsonl`` (how long the steps took), ``checkpoint.pt`` and
``checkpoint.previous.pt``, TensorBoard's events, ``run.lock``. Any file in a folder may be damaged: nothing is emptied
or overwritten before it is certain that no run is lost.
"""

import errno
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

import orthocond
from orthocond.errors import ArgumentError, OrthocondError
from orthocond.lab.checkpoints import (
    CHECKPOINTS,
    LINES,
    config_in,
    usable_checkpoints,
    whole_checkpoints,
    write_checkpoint,
)
from orthocond.lab.config import Config, difference, flags, from_json
from orthocond.lab.files import as_json, read_object, replace, write_synced
from orthocond.lab.lock import Lock, is_held
from orthocond.lab.presets import PRESETS
from orthocond.lab.records import last_step

__all__ = [
    "STATES",
    "DivergedError",
    "RunError",
    "RunFolder",
    "check_same_run",
    "environment",
    "is_alive",
    "read_config",
    "read_status",
    "start_over_command",
    "stored_config",
]

STATES = ("running", "finished", "interrupted", "failed")
"""What a run may say of itself."""


class RunError(OrthocondError):
    """A run's folder can't be used, or its files can't be written or read.

    Example:
        >>> try:
        ...     RunFolder(f"{__file__}/run")
        ... except RunError as error:
        ...     print(str(error).partition("; ")[2])
        choose another folder with --out.
    """


class DivergedError(OrthocondError):
    """The loss or a weight became NaN or infinite.

    Example:
        >>> issubclass(DivergedError, OrthocondError)
        True
    """


class RunFolder:
    """The folder of one run, held by this process until it is closed.

    Args:
        path: the folder; it is created if it doesn't exist.

    Raises:
        RunError: it can't be written to, or another process is running there.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.warnings: list[str] = []
        self._started = time.monotonic()
        self._seconds_before = 0.0
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = Lock(self.path / "run.lock")
        except BlockingIOError:
            raise RunError(
                f"a run in {self.path} is in progress in another process; wait for it, or choose another folder "
                "with --out."
            ) from None
        except OSError as error:
            raise RunError(
                f"can't write to {self.path} ({error.strerror}); choose another folder with --out."
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the folder for other processes."""
        self._lock.close()

    @property
    def holds_a_run(self) -> bool:
        """Whether a run was started here, even if some of its files are gone; a new folder has no file that matters."""
        if any(os.path.lexists(self.path / name) for name in ("config.json", "status.json", *CHECKPOINTS)):
            return True
        return any(_is_more_than_an_empty_file(self.path / name) for name in LINES)

    def begin(self, config: Config, about: dict[str, Any]) -> None:
        """Write the configuration and the environment of a new run."""
        for name in LINES:
            self._write(name, b"")
        self._write("environment.json", as_json(about))
        self._write("config.json", config.to_json().encode())  # the last: with it the folder holds a run

    def config(self) -> Config | None:
        """Return the configuration of the run that is here, or None if it can't be read.

        If ``config.json`` is lost or damaged, it is restored from a checkpoint.
        """
        stored = stored_config(self.path)
        try:
            read_config(self.path)
        except RunError as error:
            if stored is not None:
                self._write("config.json", stored.to_json().encode())
                self.warnings.append(f"{str(error).rstrip('.')}; it is restored from a checkpoint")
        return stored

    def set_aside(self) -> Path | None:
        """Move the contents into a folder beside this one and return that; None if there is nothing to move."""
        files = sorted(file for file in self.path.iterdir() if file.name not in ("run.lock", "log.txt"))
        if not files:
            return None
        taken = {file.name for file in self.path.parent.iterdir()}
        count = next(n for n in range(1, len(taken) + 2) if f"{self.path.name}.old-{n}" not in taken)
        aside = self.path.with_name(f"{self.path.name}.old-{count}")
        try:
            aside.mkdir()
            for file in files:
                replace(file, aside / file.name)
        except OSError as error:
            raise RunError(
                f"can't move {self.path} to {aside} ({error.strerror}); choose another folder with --out."
            ) from None
        return aside

    def append(self, name: str, records: Iterable[dict[str, Any]]) -> None:
        """Add lines to ``metrics.jsonl`` or ``times.jsonl``, all in one write."""
        data = "".join(json.dumps(record) + "\n" for record in records).encode()
        try:
            with (self.path / name).open("ab", buffering=0) as file:
                if file.write(data) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise self._unwritable(name, error) from None

    def sizes(self) -> dict[str, int]:
        """Return the lengths of the files of lines, for `cut`; that much of them is safely on the disk."""
        sizes = {}
        for name in LINES:
            try:
                with (self.path / name).open("ab") as file:
                    os.fsync(file.fileno())
                    sizes[name] = os.fstat(file.fileno()).st_size
            except OSError as error:
                raise self._unwritable(name, error) from None
        return sizes

    def cut(self, sizes: dict[str, int]) -> None:
        """Truncate the files of lines to their state at a checkpoint; lost times stay lost, with a warning.

        Raises:
            RunError: ``metrics.jsonl`` is shorter than that.
        """
        for name in LINES:  # not in sizes, which comes from a file
            file, size = self.path / name, sizes[name]
            try:
                with file.open("ab") as stream:
                    before = os.fstat(stream.fileno()).st_size
                    if before < size and name == "metrics.jsonl":
                        raise RunError(
                            f"{file} is shorter than it was at the checkpoint; restore it from a copy, or choose "
                            "another folder with --out."
                        )
                    if before < size:
                        self.warnings.append(f"{file} has lost lines: the times before are not known")
                    stream.truncate(min(size, before))
            except OSError as error:
                raise self._unwritable(name, error) from None

    def save_checkpoint(self, state: dict[str, Any]) -> None:
        """Write a checkpoint atomically; the one before it is kept.

        Raises:
            RunError: it can't be written; the existing checkpoints stay.
        """
        try:
            write_checkpoint(self.path, state)
        except OSError as error:
            raise self._unwritable("a checkpoint", error) from None

    def load_checkpoint(self) -> dict[str, Any] | None:
        """Return the newest complete checkpoint, or None; a damaged one is named in ``warnings``."""
        return next((state for _, state in whole_checkpoints(self.path, self.warnings)), None)

    def checkpoints(self, config: Config, total_steps: int) -> Iterator[tuple[Path, dict[str, Any]]]:
        """Yield the checkpoints from which this run can continue, the newest first; the others are in ``warnings``."""
        return usable_checkpoints(self.path, config, total_steps, self.warnings)

    def had_checkpoint(self, steps_per_epoch: int) -> bool:
        """Return whether a checkpoint was ever written here; there is one after the first epoch at the latest."""
        if any(os.path.lexists(self.path / name) for name in CHECKPOINTS):
            return True
        status = read_status(self.path)
        saved = status.get("state") in ("running", "finished") and status.get("step", 0) > 0
        return saved or last_step(self.path) > steps_per_epoch or not _is_file_or_nothing(self.path / "metrics.jsonl")

    def set_status(
        self,
        state: str,
        *,
        step: int,
        total_steps: int,
        epoch: int,
        error: str | None = None,
        val_error: float | None = None,
    ) -> None:
        """Write how far the run is: one of `STATES`, and the validation error of a finished one."""
        seconds = self._seconds_before + time.monotonic() - self._started
        status = {
            "state": state,
            "step": step,
            "total_steps": total_steps,
            "epoch": epoch,
            "error": error,
            "updated": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(seconds, 3),
        }
        self._write("status.json", as_json(status if val_error is None else {**status, "val_error": val_error}))

    def count_seconds_from(self, seconds: float) -> None:
        """Include the time that the run took before."""
        self._seconds_before = seconds

    def _write(self, name: str, data: bytes) -> None:
        """Write a file atomically."""
        partial = self.path / f"{name}.partial"
        try:
            write_synced(partial, data)
            replace(partial, self.path / name)
        except OSError as error:
            raise self._unwritable(name, error) from None

    def _unwritable(self, what: str, error: OSError) -> RunError:
        is_full = error.errno in (errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC))
        remedy = "make room" if is_full else "put that right"
        return RunError(
            f"can't write {what} to {self.path} ({error.strerror}); what was written before is intact: {remedy}, and "
            "continue with --resume."
        )


def is_alive(path: Path | str) -> bool:
    """Return whether a process is running in the folder of a run, without taking the lock."""
    return is_held(Path(path) / "run.lock")


def check_same_run(path: Path | str, stored: Config, config: Config) -> None:
    """Raise `RunError` unless the run in a folder has the same configuration, apart from where it happens."""
    differs = difference(stored, config)
    if differs is not None:
        raise RunError(
            f"the run in {path} was begun with {differs}; continue with those settings, or choose another folder "
            "with --out."
        )


def read_config(path: Path | str) -> Config:
    """Return the configuration of a run.

    Raises:
        RunError: it is missing or damaged.
    """
    file = Path(path) / "config.json"
    try:
        return from_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunError(f"can't read {file} ({error.strerror}).") from None
    except UnicodeDecodeError:
        raise RunError(f"can't read {file} (it is no text).") from None
    except ArgumentError as error:
        raise RunError(f"can't read {file} ({str(error).rstrip('.')}).") from None


def stored_config(path: Path | str) -> Config | None:
    """Return the configuration of a run from ``config.json`` or else a checkpoint; None if neither can be read."""
    try:
        return read_config(path)
    except RunError:
        return config_in(Path(path))


def read_status(path: Path | str) -> dict[str, Any]:
    """Return what `RunFolder.set_status` wrote, without invalid entries; empty if there is nothing.

    ``state`` is one of `STATES`; ``step``, ``total_steps`` and ``epoch`` are whole numbers, ``seconds`` and
    ``val_error`` finite numbers, none of them negative; ``error`` and ``updated`` are text.
    """
    try:
        status = read_object(Path(path) / "status.json")
    except (OSError, ValueError):
        return {}
    return {name: value for name, value in status.items() if name in _IS_STATUS and _IS_STATUS[name](value)}


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_amount(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_IS_STATUS = {
    "state": lambda value: value in STATES,
    **dict.fromkeys(("step", "total_steps", "epoch"), _is_count),
    **dict.fromkeys(("seconds", "val_error"), _is_amount),
    **dict.fromkeys(("error", "updated"), _is_text),
}


def start_over_command(config: Config, path: Path | str) -> str:
    """Return the command that sets the run in a folder aside and starts over."""
    base = PRESETS[config.preset].config if config.preset in PRESETS else Config(config.preset)
    words = ["orthocond", "train", config.preset, *flags(config, base), "--restart", "--out", str(path)]
    return shlex.join(words)


def environment(*, device: str, world_size: int) -> dict[str, Any]:
    """Return the software, the machine and the date of a run."""
    commit, dirty = _commit()
    return {
        "orthocond": orthocond.__version__,
        "commit": commit,
        "dirty": dirty,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "device": device,
        "world_size": world_size,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": os.environ.get("ORTHOCOND_COMMAND") or command(),
    }


def command() -> str:
    """Return what was typed to start this process; ``python -m orthocond`` is ``orthocond``."""
    program = Path(sys.argv[0])
    return shlex.join([program.parent.name if program.name == "__main__.py" else program.name, *sys.argv[1:]])


def _commit() -> tuple[str | None, bool | None]:
    """Return the commit of the checkout that this package is in, if it is in one, and whether it was changed since."""
    here = Path(orthocond.__file__).parent
    if not (here.parents[1] / ".git").exists():
        return None, None
    try:
        commit, changes = (
            subprocess.run(["git", *command], cwd=here, capture_output=True, text=True, timeout=10, check=True).stdout
            for command in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.SubprocessError):
        return None, None
    return commit.strip(), bool(changes)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def _is_file_or_nothing(path: Path) -> bool:
    return path.is_file() or not os.path.lexists(path)


def _is_more_than_an_empty_file(path: Path) -> bool:
    return os.path.lexists(path) and not (path.is_file() and path.stat().st_size == 0)
