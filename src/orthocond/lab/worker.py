"""One run in a process of its own, for a sweep: ``python -m orthocond.lab.worker``, the task on standard input.

Standard input stays open as long as the sweep lives; when it closes, the run saves a checkpoint and ends, so that no
run is left behind whatever happens to the sweep.
"""

import json
import os
import signal
import sys
import threading
import traceback

from orthocond.errors import OrthocondError
from orthocond.lab.config import from_json
from orthocond.lab.runs import RunFolder
from orthocond.lab.train import train

__all__ = ["run"]


def run(config: str, out: str) -> str | None:
    """Do a run, or what is left of it; return what went wrong, in a sentence, or None."""
    try:
        outcome = train(from_json(config), out, resume=True)
    except OrthocondError as error:
        return str(error)
    except Exception as error:  # a mistake of ours, or of the machine: it must not stop the other runs
        traceback.print_exc()
        problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
        with RunFolder(out) as folder:
            folder.set_failed(problem)
        return problem
    return None if outcome.state == "finished" else "it was interrupted"


def _end_with(parent: int) -> None:
    os.read(parent, 1)
    os.kill(os.getpid(), signal.SIGTERM)


def _main() -> None:
    line = b""
    while not line.endswith(b"\n") and (part := os.read(0, 1)):
        line += part
    task = json.loads(line)
    threading.Thread(target=_end_with, args=(0,), daemon=True).start()
    problem = run(task["config"], task["out"])
    if problem is not None:
        print(problem, file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    _main()
