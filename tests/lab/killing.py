"""Kill runs with SIGKILL at random moments, resume them, and compare what is left with undisturbed ones.

python tests/lab/killing.py 20          one run, killed twenty times
python tests/lab/killing.py sweep 30    thirty runs, every fifth of them killed at each try, then the sweep once more
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from rich.console import Console

from orthocond.lab import worker
from orthocond.lab.compare import LocalEngine, compare, plan
from orthocond.lab.presets import preset
from orthocond.lab.records import read_records

COMMAND = [sys.executable, "-m", "orthocond", "train"]
SETTINGS = [
    *("dbn-digits", "--method", "svd+nog+ow+olr", "--epochs", "8", "--checkpoint-every", "7"),
    *("--threads", "1", "--accelerator", "cpu"),
]


def start(out, *more):
    return subprocess.Popen(
        [*COMMAND, *SETTINGS, "--resume", "--out", str(out), *more],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def finish(out):
    process = start(out)
    errors = process.communicate(timeout=120)[1]
    assert process.returncode == 0, errors


def killed_and_resumed(out: Path, kills: int, seed: int) -> list[int]:
    """Run to the end, killed so often; return the size of the metrics at each kill.

    The moment is random: during the start, between its first step and its last, or while it writes a checkpoint.
    """
    moments, sizes = random.Random(seed), []
    metrics = out / "metrics.jsonl"
    for _ in range(kills):
        process = start(out)
        before = metrics.stat().st_size if metrics.exists() else 0
        if moments.random() < 0.8:  # wait until it works
            while process.poll() is None and (not metrics.exists() or metrics.stat().st_size <= before):
                before = min(before, metrics.stat().st_size) if metrics.exists() else 0
                time.sleep(0.001)
            time.sleep(moments.uniform(0, 0.5))
        else:
            time.sleep(moments.uniform(0, 3))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        sizes.append(metrics.stat().st_size if metrics.exists() else 0)
    finish(out)
    return sizes


def differences(a: Path, b: Path) -> list[str]:
    """Return what differs between two runs: names of tensors, or of files."""
    states = [torch.load(folder / "checkpoint.pt", weights_only=True) for folder in (a, b)]
    flat = [dict(_flat(state)) for state in states]
    found = [name for name in flat[0].keys() | flat[1].keys() if not _same(*(part.get(name) for part in flat))]
    if (a / "metrics.jsonl").read_bytes() != (b / "metrics.jsonl").read_bytes():
        found.append("metrics.jsonl")
    return [name for name in found if not name.startswith(".sizes.times")]


def _flat(value, name=""):
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else None
    if items is None:
        yield name, value
    else:
        for key, part in items:
            yield from _flat(part, f"{name}.{key}")


def _same(a, b):
    return torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b


class InProcess:
    """An engine whose runs happen in this process, one after the other: no imports to wait for."""

    slots = 1

    def __init__(self, jobs):
        pass

    def start(self, run):
        return _Done(worker.run(run.config.to_json(), str(run.folder)) or "")


class _Done:
    def __init__(self, problem):
        self.problem = problem

    def poll(self):
        return self.problem

    def stop(self):
        pass


class KillingEngine(LocalEngine):
    """Kills some of the runs at a random moment of each of their first tries."""

    def __init__(self, jobs, victims, tries, seed):
        super().__init__(jobs)
        self.victims, self.tries, self.moments, self.kills = victims, tries, random.Random(seed), 0

    def start(self, run):
        handle = super().start(run)
        if run in self.victims and run.tries <= self.tries:
            self.kills += 1
            threading.Timer(self.moments.uniform(0.5, 4), handle._process.kill).start()
        return handle


def faults(runs, steps: int) -> list[str]:
    """Return what is lost or doubled in the records of runs."""
    found = [
        run.name for run in runs if [r["step"] for r in read_records(run.folder, "step")] != list(range(1, steps + 1))
    ]
    return found + [run.name for run in runs if not run.is_finished]


def _one_run(kills: int, folder: Path) -> None:
    whole, broken = folder / "whole", folder / "broken"
    finish(whole)
    sizes = killed_and_resumed(broken, kills, seed=0)
    print("metrics.jsonl at each kill:", sizes, "of", (whole / "metrics.jsonl").stat().st_size)
    print("differences:", differences(whole, broken) or "none")


def _sweep(num_runs: int, folder: Path) -> None:
    methods = ["svd", "svd+nog", "bn"]
    config = preset("dbn-digits")
    for title in ("with kills", "restarted"):
        runs = plan(config, methods, num_runs // len(methods), folder)
        engine = KillingEngine(2, runs[::5] if title == "with kills" else [], tries=2, seed=0)
        failed = compare(runs, engine, Console(quiet=True))
        print(f"{title}: {engine.kills} kills, {len(runs) - len(failed)} of {len(runs)} runs finished")
    print("lost or doubled:", faults(runs, 330) or "none", "- folders:", len(list(folder.rglob("config.json"))))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        if sys.argv[1] == "sweep":
            _sweep(int(sys.argv[2]), Path(temporary))
        else:
            _one_run(int(sys.argv[1]), Path(temporary))
