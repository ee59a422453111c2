"""Methods x seeds, each run in its own folder, several at a time, until all of them are done."""

import dataclasses
import logging
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table

from orthocond.errors import ArgumentError
from orthocond.lab.conditions import at_end, geometric_mean, measure_of
from orthocond.lab.config import Config
from orthocond.lab.display import number
from orthocond.lab.installing import install_command
from orthocond.lab.records import lines_text, read_steps
from orthocond.lab.runs import RunError, check_same_run, command, read_config, read_status

__all__ = ["ENGINES", "Engine", "Handle", "LocalEngine", "RayEngine", "Run", "compare", "plan", "summary"]

_TRIES = 2


@dataclass
class Run:
    """A run of a sweep."""

    config: Config
    folder: Path
    tries: int = 0
    problem: str | None = None
    has_config: bool = True
    """False if ``config.json`` can't be read, so that the run has to look after it first."""
    _result: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """For a person."""
        return f"{self.config.method} seed {self.config.seed}"

    @property
    def status(self) -> dict[str, Any]:
        """The status that the run wrote."""
        return read_status(self.folder)

    @property
    def is_finished(self) -> bool:
        """Whether the run is finished."""
        return self.has_config and self.status.get("state") == "finished"

    def result(self) -> dict[str, Any]:
        """Return the last validation error and the condition number of a finished run, and its notes.

        A number that can't be known is None.
        """
        if not self._result:
            measure = measure_of(self.config.eps)
            records = read_steps(self.folder, (measure,))
            error, cond = records.last_error(self.status), at_end(records.steps["step"], records.steps[measure])
            notes = [lines_text(records.damaged)] if records.damaged else []
            if error is None:
                notes.append("its error can't be known, because metrics.jsonl is not as the run wrote it")
            self._result = {
                "error": error,
                "cond": None if math.isnan(cond) else cond,
                "note": f"{self.name}: {'; '.join(notes)} ({self.folder})." if notes else "",
            }
        return self._result


class Handle(Protocol):
    """A run that was started."""

    def poll(self) -> str | None:
        """Return None while it runs; afterwards the problem, or the empty string."""

    def stop(self) -> None:
        """Ask it to save and stop, and wait for it."""


class Engine(Protocol):
    """Executes runs."""

    slots: int

    def start(self, run: Run) -> Handle:
        """Start a run."""


class LocalEngine:
    """Processes on this machine, its threads and GPUs divided among them.

    A run sees only the GPUs that it uses: those with the fewest other runs at the moment.

    Args:
        jobs: the number of runs at a time.
        gpus: as `CUDA_VISIBLE_DEVICES` names them; None for those that this process sees.
    """

    def __init__(self, jobs: int, gpus: Sequence[str] | None = None) -> None:
        self.slots = jobs
        self._threads = max(1, num_cores() // jobs)
        self._users = dict.fromkeys(visible_gpus() if gpus is None else gpus, 0)

    def start(self, run: Run) -> "_Process":
        """Start a run."""
        config = run.config
        wanted = 0 if config.accelerator in ("cpu", "mps") else len(self._users)
        wanted = wanted if config.devices == "auto" else min(wanted, int(config.devices))
        own = sorted(self._users, key=lambda gpu: self._users[gpu])[:wanted]
        process = _Process(run, config.threads or self._threads, own, self._release)
        for gpu in own:
            self._users[gpu] += 1
        return process

    def _release(self, gpus: Sequence[str]) -> None:
        for gpu in gpus:
            self._users[gpu] -= 1


class _Process:
    def __init__(self, run: Run, threads: int, gpus: Sequence[str], release: Callable[[Sequence[str]], None]) -> None:
        config = dataclasses.replace(run.config, threads=threads)
        self._gpus, self._release = gpus, release
        self._log = run.folder / "log.txt"
        devices = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
        try:
            run.folder.mkdir(parents=True, exist_ok=True)
            log = self._log.open("ab")
        except OSError as error:
            raise RunError(
                f"can't write to {run.folder} ({error.strerror}); choose another folder with --out."
            ) from None
        with log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "orthocond.lab.worker", config.to_json(), str(run.folder)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=os.environ
                | kept_memory()
                | devices
                | {"OMP_NUM_THREADS": str(threads), "ORTHOCOND_COMMAND": command()},
            )

    def poll(self) -> str | None:
        code = self._process.poll()
        if code is None:
            return None
        self._process.communicate()
        self._release(self._gpus)
        said = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        if code == 0:
            return ""
        return f"killed by signal {-code}" if code < 0 else (said or [f"exit code {code}"])[-1]

    def stop(self) -> None:
        self._process.communicate()  # closes its standard input, which ends it


class RayEngine:
    """Tasks on a Ray cluster whose machines share the folder of the runs.

    Args:
        address: Ray cluster address; None for the one that is configured, or a new one on this machine.
        cpus: CPUs per run.
        gpus: GPUs per run.
    """

    def __init__(self, address: str | None, cpus: int, gpus: float) -> None:
        try:
            import ray
        except ModuleNotFoundError:
            raise ArgumentError(f"the engine ray needs Ray; install it with: {install_command('ray')}") from None
        self._ray, self.slots = ray, sys.maxsize
        if not ray.is_initialized():
            try:
                ray.init(address=address, log_to_driver=False, include_dashboard=False, logging_level=logging.ERROR)
            except (ConnectionError, ValueError) as error:
                raise ArgumentError(f"can't reach the Ray cluster {address}: {error}; give its --address.") from None

        def work(config: str, out: str) -> str | None:
            from orthocond.lab.worker import run

            return run(config, out)

        # A worker that dies is replaced, and its run resumed by the next.
        self._work = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=3)(work)
        self._cpus = cpus

    def start(self, run: Run) -> "_Task":
        """Start a run."""
        config = dataclasses.replace(run.config, threads=run.config.threads or self._cpus)
        return _Task(self._ray, self._work.remote(config.to_json(), str(run.folder.resolve())))


class _Task:
    def __init__(self, ray: Any, reference: Any) -> None:
        self._ray, self._reference = ray, reference

    def poll(self) -> str | None:
        done, _ = self._ray.wait([self._reference], timeout=0)
        if not done:
            return None
        try:
            return self._ray.get(self._reference) or ""
        except self._ray.exceptions.RayError as error:
            return " ".join(str(error).split())[:300]

    def stop(self) -> None:
        self._ray.cancel(self._reference, recursive=True)
        self._ray.wait([self._reference], timeout=30)


ENGINES = {"local": "processes on this machine", "ray": "tasks on a Ray cluster"}


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as `CUDA_VISIBLE_DEVICES` names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    return [name.strip() for name in named.split(",")][:count] if named else [str(number) for number in range(count)]


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def kept_memory() -> dict[str, str]:
    """Return the environment of a run whose large tensors take memory that the step before used.

    The allocator of glibc returns blocks above 32 MB to the system when they are freed, and the system has to clear
    them when the next step asks for them. Empty with another C library, and where the user chose how memory is kept.
    Also empty before glibc 2.36: older ones ignore a threshold above 32 MB and stop adapting it because of the other
    variable: every block above 128 KB would be returned.
    """
    chosen = any(name.startswith("MALLOC_") for name in os.environ) or "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    library, version = platform.libc_ver()
    if chosen or "LD_PRELOAD" in os.environ or library != "glibc":
        return {}
    if tuple(int(number) for number in version.split(".")[:2]) < (2, 36):
        return {}
    return {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**33)}


def plan(config: Config, methods: Sequence[str], seeds: int, out: Path, shard: tuple[int, int] = (1, 1)) -> list[Run]:
    """Return the runs of a sweep, seed by seed; of a shard ``(3, 8)``, the third of every eight.

    Example:
        >>> [run.name for run in plan(Config("mine"), ["bn", "svd"], 2, Path("runs"))]
        ['bn seed 0', 'svd seed 0', 'bn seed 1', 'svd seed 1']
    """
    configs = [
        dataclasses.replace(config, method=name, seed=config.seed + seed) for seed in range(seeds) for name in methods
    ]
    number, of = shard
    return [Run(one, folder_of(out, one)) for one in configs[number - 1 :: of]]


def folder_of(root: Path, config: Config) -> Path:
    """Return the path of a run below a folder of runs."""
    return root / config.method / f"seed-{config.seed}"


def compare(runs: Sequence[Run], engine: Engine, console: Console) -> list[Run]:
    """Do the remaining runs while showing a table of all of them; return those that failed.

    A run that fails is retried once, from its last checkpoint, and then left with its problem; the others continue.

    Raises:
        RunError: a folder holds a run of another configuration.
    """
    for run in runs:
        if os.path.lexists(run.folder / "config.json"):
            try:
                stored = read_config(run.folder)
            except RunError:  # the run itself restores it from a checkpoint, or says that it can't
                run.has_config = False
            else:
                check_same_run(run.folder, stored, run.config)
        elif run.is_finished:
            run.has_config = False
    waiting = [run for run in runs if not run.is_finished]
    running: list[tuple[Run, Handle]] = []
    began = time.monotonic()
    fraction_before = _fraction_done(runs)

    def table() -> Table:
        done = _fraction_done(runs)
        gained = done - fraction_before
        left = (time.monotonic() - began) / gained * (1 - done) if gained > 0.01 else None
        return summary(runs, caption="" if left is None or not running else f"{left:.0f} s left")

    several = len({run.config.preset for run in runs}) > 1
    with _shown(table, console, several) as show:
        try:
            while waiting or running:
                while waiting and len(running) < engine.slots:
                    run = waiting.pop(0)
                    run.tries, run.problem = run.tries + 1, None
                    try:
                        running.append((run, engine.start(run)))
                    except RunError as error:
                        run.problem, run.tries = str(error), _TRIES
                        show(run)
                time.sleep(0.2)
                for entry in list(running):
                    run, handle = entry
                    problem = handle.poll()
                    if problem is None:
                        continue
                    running.remove(entry)
                    run.has_config = run.has_config or not problem
                    if problem or not run.is_finished:
                        run.problem = problem or "it ended without a result"
                        if run.tries < _TRIES:
                            waiting.append(run)
                    show(run)
        finally:
            for _, handle in running:
                handle.stop()
    return [run for run in runs if not run.is_finished]


def summary(runs: Sequence[Run], caption: str = "") -> Table:
    """Return a table with a row for each method of each preset: runs done, error, condition number, failed runs."""
    table = Table("method", caption=caption or None, pad_edge=False)
    for heading in ("runs", "error %", "best", "condition number", "progress"):
        table.add_column(heading, justify="right")
    several = len({run.config.preset for run in runs}) > 1
    for preset, name in dict.fromkeys((run.config.preset, run.config.method) for run in runs):
        own = [run for run in runs if (run.config.preset, run.config.method) == (preset, name)]
        results = [run.result() for run in own if run.is_finished]
        errors = [result["error"] for result in results if result["error"] is not None]
        conds = [result["cond"] for result in results if result["cond"] is not None]
        failed = sum(run.problem is not None and run.tries >= _TRIES and not run.is_finished for run in own)
        table.add_row(
            f"{preset} {name}" if several else name,
            f"{len(results)}/{len(own)}" + (f", {failed} failed" if failed else ""),
            mean_and_std(errors),
            f"{min(errors):.2f}" if errors else "",
            number(geometric_mean(conds)) if conds else "",
            f"{100 * _fraction_done(own):.0f}%",
        )
    return table


def mean_and_std(values: Sequence[float]) -> str:
    """Return the mean and, for several values, the standard deviation.

    Example:
        >>> mean_and_std([1.0, 2.0]), mean_and_std([1.0])
        ('1.50 ± 0.71', '1.00')
    """
    if not values:
        return ""
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{spread}"


def _fraction_done(runs: Sequence[Run]) -> float:
    fractions = []
    for run in runs:
        step, total = (run.status.get(name, 0) for name in ("step", "total_steps"))
        fractions.append(min(step / total, 1.0) if total else 0.0)
    return statistics.fmean(fractions)


@contextmanager
def _shown(table: Callable[[], Table], console: Console, several: bool) -> Iterator[Callable[[Run], None]]:
    """Show a live table on a terminal, elsewhere a line for each run that ends."""
    if console.is_terminal:
        with Live(get_renderable=table, console=console, refresh_per_second=2):
            yield lambda _: None
        return

    def line(run: Run) -> None:
        error = None if run.problem else run.result()["error"]
        said = f"failed: {run.problem}" if run.problem else "no error" if error is None else f"error {error:.2f}%"
        name = f"{run.config.preset} {run.name}" if several else run.name
        console.print(f"{name}: {said}", highlight=False, markup=False, soft_wrap=True)

    yield line
