"""The start of the command ``orthocond``.

It is outside the package, because importing the package imports torch, which takes seconds. From the first line of
`main` on, Ctrl-C gives one sentence and exit code 130. While modules are being imported, there is nothing to save, and
a module that is interrupted may swallow the exception or raise another one; so the process just ends.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["is_first_process", "main", "tell_stopped"]


def main() -> None:
    """Run the command line, or report the missing package."""
    with _ending_at_ctrl_c():
        try:
            from orthocond.lab.cli import main as run
        except ModuleNotFoundError as error:
            from orthocond.lab.installing import install_command

            sys.exit(f"orthocond: the laboratory needs {error.name}; install it with: {install_command('lab')}")
    run()


@contextmanager
def _ending_at_ctrl_c() -> Iterator[None]:
    """End the process at Ctrl-C, without a traceback; where Ctrl-C is ignored or handled already, leave it so."""
    is_ours = False
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        try:
            signal.signal(signal.SIGINT, _end)
            is_ours = True
        except ValueError:  # only the main thread is interrupted, and only it may say what happens then
            pass
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(*_: Any) -> None:
    tell_stopped()
    sys.stderr.flush()
    os._exit(130)


def tell_stopped() -> None:
    """Print that the command was stopped, in the process that speaks for all."""
    if is_first_process():
        print(
            "orthocond: stopped; rerun the command to continue from the last checkpoint (train: --resume)",
            file=sys.stderr,
        )


def is_first_process() -> bool:
    """Return whether this is the process that speaks for all of a run."""
    return all(os.environ.get(name, "0") == "0" for name in ("LOCAL_RANK", "RANK", "NODE_RANK", "SLURM_PROCID"))


if __name__ == "__main__":
    main()
