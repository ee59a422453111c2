"""Running a training script under `orthocond.diagnose`."""

import argparse
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from orthocond.diagnosis import Diagnosis
from orthocond.errors import ArgumentError, OrthocondError

__all__ = ["PASSES", "main", "run_script"]

PASSES = 100
"""Backward passes after which a script is stopped."""


class _Enough(BaseException):
    """Stops the script; not an `Exception`, so that the script doesn't catch it."""


def run_script(script: str | Path, arguments: Sequence[str] = (), *, passes: int = PASSES) -> int:
    """Run a Python script, print what its decompositions do, and return an exit code.

    The script runs as ``python SCRIPT ARGUMENTS`` would run it, until the first backward pass with a loss or a gradient
    that is not finite, or until ``passes`` backward passes.

    Args:
        script: path of the script.
        arguments: its command line.
        passes: number of backward passes after which it is stopped.

    Returns:
        0 if every decomposition is healthy, 1 if one is not or the script itself failed.

    Raises:
        ArgumentError: there is no such script, or ``passes`` is below 1.
    """
    path = Path(script)
    if not path.is_file():
        raise ArgumentError(f"diagnose found no script {str(script)!r}; pass the path of a Python file.")
    if passes < 1:
        raise ArgumentError(f"diagnose expected passes >= 1, got {passes}.")
    diagnosis = Diagnosis()
    done = 0

    def count(loss: Tensor, gradients_finite: bool) -> None:
        nonlocal done
        done += 1
        if not torch.isfinite(loss.detach()).all() or not gradients_finite or done >= passes:
            raise _Enough

    diagnosis.after_backward = count
    failed = _run(path, arguments, diagnosis)
    print(f"\n{'=' * 80}\n{done} backward pass{'es' * (done != 1)} of {path}")
    print(diagnosis)
    return int(failed or any(found.verdict != "healthy" for found in diagnosis.findings))


def _run(path: Path, arguments: Sequence[str], diagnosis: Diagnosis) -> bool:
    """Run a script as Python would, and return whether it failed."""
    argv, first = sys.argv, sys.path[:1]
    sys.argv, sys.path[:1] = [str(path), *arguments], [str(path.resolve().parent)]
    try:
        with diagnosis:
            runpy.run_path(str(path), run_name="__main__")
    except (_Enough, KeyboardInterrupt):
        return False
    except SystemExit as ended:
        return ended.code not in (None, 0)
    except Exception:
        traceback.print_exc()
        return True
    finally:
        sys.argv, sys.path[:1] = argv, first
    return False


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line ``python -m orthocond.diagnosis SCRIPT [ARGUMENTS]``."""
    parser = argparse.ArgumentParser(
        prog="python -m orthocond.diagnosis",
        description="Run a training script unchanged until the first NaN, and say what its decompositions (eigh, svd, "
        "cholesky, pinv) do to the gradient.",
        epilog="Example: python -m orthocond.diagnosis train.py --lr 0.1",
    )
    parser.add_argument(
        "--passes", type=int, default=PASSES, metavar="N", help="stop after N backward passes (%(default)s)"
    )
    parser.add_argument("script", metavar="SCRIPT", help="path of the script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="its own command line")
    given = parser.parse_args(arguments)
    try:
        sys.exit(run_script(given.script, given.arguments, passes=given.passes))
    except OrthocondError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
