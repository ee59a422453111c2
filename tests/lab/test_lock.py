"""The lock of a run's folder, from several processes, each without the import of torch."""

import os
import signal
import subprocess
import sys
import time

import pytest

from orthocond.lab import lock as module
from orthocond.lab.lock import Lock, is_held
from orthocond.lab.runs import RunError, RunFolder, is_alive

PRELUDE = f"""
import sys, time
from importlib.machinery import SourceFileLoader
from pathlib import Path
lock = SourceFileLoader("lock", {module.__file__!r}).load_module()
file = Path(sys.argv[1])
"""


def process(code, file):
    command = [sys.executable, "-W", "ignore", "-c", PRELUDE + code, str(file)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)


def holder(file, more=""):
    """A process that holds the lock until it is killed, or its standard input is closed."""
    other = process(f"held = lock.Lock(file)\n{more}\nprint('held', flush=True)\nsys.stdin.read()", file)
    assert other.stdout.readline() == "held\n"
    return other


def test_asking_does_not_lose_it(tmp_path):
    """POSIX record locks of a process are lost when it closes any descriptor of the file."""
    with RunFolder(tmp_path):
        assert is_alive(tmp_path)
        with (tmp_path / "run.lock").open("rb"):
            pass
        other = process("print(lock.is_held(file))", tmp_path / "run.lock")
        assert other.communicate()[0] == "True\n"
        with pytest.raises(RunError, match="in progress in another process"):
            RunFolder(tmp_path)
    assert not is_alive(tmp_path)


def test_another_process_is_refused(tmp_path):
    file = tmp_path / "run.lock"
    other = holder(file)
    assert is_held(file)
    with pytest.raises(BlockingIOError):
        Lock(file)
    other.communicate()
    assert not is_held(file)
    Lock(file).close()


def test_a_killed_holder_releases_it(tmp_path):
    file = tmp_path / "run.lock"
    other = holder(file)
    other.kill()
    other.communicate()
    assert not is_held(file)
    Lock(file).close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes are forked here")
def test_a_child_does_not_keep_it(tmp_path):
    """The processes that read images outlive a killed run by some seconds."""
    file = tmp_path / "run.lock"
    child = "import os\nchild = os.fork()\nif not child:\n    time.sleep(60)\nprint(child, flush=True)"
    other = process(f"held = lock.Lock(file)\n{child}\nsys.stdin.read()", file)
    orphan = int(other.stdout.readline())
    other.kill()
    other.wait()
    try:
        Lock(file).close()
    finally:
        os.kill(orphan, signal.SIGTERM)
        other.stdout.close()
        other.stdin.close()


def test_somebody_who_only_asks_is_waited_for(tmp_path):
    file = tmp_path / "run.lock"
    Lock(file).close()
    other = process("while True: lock.is_held(file)", file)
    try:
        until = time.monotonic() + 2
        while time.monotonic() < until:
            Lock(file).close()
    finally:
        other.kill()
        other.communicate()


def test_it_is_only_asked(tmp_path):
    assert not is_held(tmp_path / "none" / "run.lock")
    assert not is_held(tmp_path / "run.lock")
    assert not list(tmp_path.iterdir())
    (tmp_path / "run.lock").mkdir()
    assert not is_held(tmp_path / "run.lock")
