"""The folder of a run: what is in it, and how it survives whatever happens to the process that writes it.

``config.json``, ``environment.json``, ``status.json``, ``metrics.jsonl`` (the same, byte for byte, however often it was
killed and resumed), ``times.jsonl`` (how long the steps took), ``checkpoint.pt`` and ``checkpoint.previous.pt``,
``checkpoint.json`` (their checksums), TensorBoard's events, ``run.lock``.
"""

import dataclasses
import fcntl
import hashlib
import io
import json
import os
import platform
import shlex
import struct
import subprocess
import sys
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

import orthocond
from orthocond.errors import OrthocondError
from orthocond.lab.config import PLACE, Config, from_json

__all__ = [
    "DivergedError",
    "RunError",
    "RunFolder",
    "check_same_run",
    "environment",
    "is_alive",
    "read_config",
    "read_records",
    "read_status",
]

_CHECKPOINTS = ("checkpoint.pt", "checkpoint.previous.pt")
_LINES = ("metrics.jsonl", "times.jsonl")


class RunError(OrthocondError):
    """A run's folder can't be used, or its files can't be written or read.

    Example:
        >>> try:
        ...     RunFolder("/dev/null/runs")
        ... except RunError as error:
        ...     print(error)
        can't write to /dev/null/runs (Not a directory); choose another folder by --out.
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
        path: the folder; it is made if it isn't there.

    Raises:
        RunError: it can't be written to, or another process that lives is running there.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.warnings: list[str] = []
        self._started = time.monotonic()
        self._seconds_before = 0.0
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / "run.lock").open("a+")
        except OSError as error:
            raise RunError(f"can't write to {self.path} ({error.strerror}); choose another folder by --out.") from None
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise RunError(
                f"a run in {self.path} is going on in another process; wait for it, or choose another folder by --out."
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let others run here."""
        self._lock.close()

    @property
    def holds_a_run(self) -> bool:
        """Whether a run was begun here."""
        return (self.path / "config.json").exists()

    def begin(self, config: Config, about: dict[str, Any]) -> None:
        """Write what a new run is and where it runs."""
        for name in _LINES:
            self._write(name, b"")
        self._write("environment.json", _json(about))
        self._write("config.json", config.to_json().encode())  # the last: with it the folder holds a run

    def append(self, name: str, records: Iterable[dict[str, Any]]) -> None:
        """Add lines to ``metrics.jsonl`` or ``times.jsonl``, all in one write."""
        data = "".join(json.dumps(record) + "\n" for record in records).encode()
        try:
            with (self.path / name).open("ab", buffering=0) as file:
                if file.write(data) != len(data):
                    raise OSError(28, "No space left on device")
        except OSError as error:
            raise self._unwritable(name, error) from None

    def sizes(self) -> dict[str, int]:
        """Return how long the files of lines are, for `cut`; so much of them is on the disk for good."""
        sizes = {}
        for name in _LINES:
            with (self.path / name).open("rb") as file:
                os.fsync(file.fileno())
                sizes[name] = os.fstat(file.fileno()).st_size
        return sizes

    def cut(self, sizes: dict[str, int]) -> None:
        """Cut the files of lines back to what they were at a checkpoint.

        Raises:
            RunError: one of them is shorter than that.
        """
        for name, size in sizes.items():
            file = self.path / name
            if not file.exists() or file.stat().st_size < size:
                raise RunError(
                    f"{file} is shorter than it was at the checkpoint; start the run anew in another folder by --out."
                )
            os.truncate(file, size)

    def save_checkpoint(self, state: dict[str, Any]) -> None:
        """Write a checkpoint, whole or not at all; the one before it is kept.

        Raises:
            RunError: it can't be written; the checkpoints that are there stay.
        """
        buffer = io.BytesIO()
        torch.save(state, buffer)
        data = buffer.getbuffer()
        newest, previous = (self.path / name for name in _CHECKPOINTS)
        partial = self.path / "checkpoint.partial"
        try:
            _write_synced(partial, data)
            sums = self._checksums()
            if len(sums) > 20:  # so often it died here, or saved: only those of files that are there matter
                sums = [_checksum(file) for file in (previous, newest) if file.exists()]
            # Known before it is in place: whenever this process dies, the files that are there have their sums here.
            self._write("checkpoint.json", _json([*sums, hashlib.sha256(data).hexdigest()]))
            if newest.exists() and self._is_whole(newest):
                os.replace(newest, previous)
            os.replace(partial, newest)
            _sync_folder(self.path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise self._unwritable("a checkpoint", error) from None

    def load_checkpoint(self) -> dict[str, Any] | None:
        """Return the newest checkpoint that is whole, or None; a damaged one is named in ``warnings``."""
        for name in _CHECKPOINTS:
            file = self.path / name
            if not file.exists():
                continue
            if self._is_whole(file):
                state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
                return state
            self.warnings.append(f"{file} is damaged and is not used")
        return None

    def set_status(self, state: str, *, step: int, total_steps: int, epoch: int, error: str | None = None) -> None:
        """Write how far the run is: ``running``, ``finished``, ``interrupted`` or ``failed``."""
        seconds = self._seconds_before + time.monotonic() - self._started
        self._write(
            "status.json",
            _json(
                {
                    "state": state,
                    "step": step,
                    "total_steps": total_steps,
                    "epoch": epoch,
                    "error": error,
                    "updated": datetime.now(UTC).isoformat(timespec="seconds"),
                    "seconds": round(seconds, 3),
                }
            ),
        )

    def count_seconds_from(self, seconds: float) -> None:
        """Let the time that the run took before count."""
        self._seconds_before = seconds

    def _checksums(self) -> list[str]:
        try:
            return [str(value) for value in json.loads((self.path / "checkpoint.json").read_text())]
        except (OSError, ValueError, TypeError):
            return []

    def _is_whole(self, file: Path) -> bool:
        return _checksum(file) in self._checksums()

    def _write(self, name: str, data: bytes) -> None:
        """Write a file, whole or not at all."""
        partial = self.path / f"{name}.partial"
        try:
            _write_synced(partial, data)
            os.replace(partial, self.path / name)
        except OSError as error:
            raise self._unwritable(name, error) from None

    def _unwritable(self, what: str, error: OSError) -> RunError:
        return RunError(
            f"can't write {what} to {self.path} ({error.strerror}); what was written before is intact: make room, and "
            "continue by --resume."
        )


def is_alive(path: Path | str) -> bool:
    """Return whether another process is running in the folder of a run; it is only asked, nothing is held."""
    wanted = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        with (Path(path) / "run.lock").open("rb") as lock:
            found = fcntl.fcntl(lock, fcntl.F_GETLK, wanted)
    except OSError:
        return False
    return bool(struct.unpack("hhqqi", found)[0] != fcntl.F_UNLCK)


def check_same_run(path: Path | str, config: Config) -> None:
    """Raise `RunError` unless the run in a folder has the same configuration, apart from where it happens."""
    stored = read_config(path)
    for field in dataclasses.fields(Config):
        before, now = getattr(stored, field.name), getattr(config, field.name)
        if before != now and field.name not in PLACE:
            raise RunError(
                f"the run in {path} was begun with {field.name} {before}, not {now}; go on as it was, or choose "
                "another folder by --out."
            )


def read_config(path: Path | str) -> Config:
    """Return the configuration of a run."""
    file = Path(path) / "config.json"
    try:
        return from_json(file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"can't read {file}: {error}.") from None


def read_status(path: Path | str) -> dict[str, Any]:
    """Return what `RunFolder.set_status` wrote; empty where there is nothing."""
    try:
        return dict(json.loads((Path(path) / "status.json").read_text()))
    except (OSError, ValueError, TypeError):
        return {}


def read_records(path: Path | str, kind: str) -> list[dict[str, Any]]:
    """Return the whole lines of ``metrics.jsonl`` of a kind, ``"step"`` or ``"epoch"``."""
    records = []
    for line in (Path(path) / "metrics.jsonl").read_text().splitlines():
        try:
            record = json.loads(line)
        except ValueError:  # half written: the last of a run that was killed
            break
        if record.get("kind") == kind:
            records.append(record)
    return records


def environment(*, device: str, world_size: int) -> dict[str, Any]:
    """Return what a run was made by, where and when."""
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


def _checksum(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _write_synced(file: Path, data: bytes | memoryview) -> None:
    with file.open("wb", buffering=0) as stream:
        view = memoryview(data)
        while view:
            view = view[stream.write(view) :]
        os.fsync(stream.fileno())
