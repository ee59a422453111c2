"""One run in a process of its own, for a sweep: ``python -m orthocond.lab.worker CONFIGURATION FOLDER``.

Standard input stays open as long as the sweep lives; when it closes, the run saves a checkpoint and ends, so that no
run is left behind whatever happens to the sweep.
"""

import os
import signal
import sys
import threading
import traceback

from orthocond.errors import OrthocondError
from orthocond.lab.config import from_json
from orthocond.lab.train import train
from orthocond_command import is_first_process

__all__ = ["run"]


def run(config: str, out: str) -> str | None:
    """Do a run, or what is left of it; return what went wrong, in a sentence, or None."""
    try:
        outcome = train(from_json(config), out, resume=True)
    except OrthocondError as error:
        return str(error)
    except Exception as error:  # a mistake of ours, or of the machine
        traceback.print_exc()
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return None if outcome.state == "finished" else "it was interrupted"


def _end_with_the_sweep() -> None:
    os.read(0, 1)
    signal.raise_signal(signal.SIGTERM)  # os.kill would end the process at once on Windows


def _main() -> None:
    config, out = sys.argv[1:]
    if is_first_process():  # it tells the others
        threading.Thread(target=_end_with_the_sweep, daemon=True).start()
    problem = run(config, out)
    if problem is not None:
        print(problem, file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    _main()
