"""What surrounds a run: its processes and devices, its folder, and the signals that stop it."""

import importlib
import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType

import torch
from lightning_fabric import Fabric

from orthocond.errors import ArgumentError, OrthocondError
from orthocond.lab import processor
from orthocond.lab.config import Config
from orthocond.lab.display import Display
from orthocond.lab.runs import RunError, RunFolder, check_same_run, start_over_command

__all__ = ["opened_folder", "start_fabric", "stop_requests"]


def start_fabric(config: Config) -> Fabric:
    """Start the processes of a configuration, on its devices and with its precision.

    Raises:
        ArgumentError: this machine doesn't have the devices, or can't compute with the precision.
    """
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)
    several = config.devices not in ("1", "auto") or config.nodes > 1
    if several:
        # The compiler's modules, which an optimizer imports, hold the process group if they come after it.
        importlib.import_module("torch._dynamo")
    accelerator = config.accelerator
    if accelerator == "auto" and not torch.cuda.is_available():
        accelerator = "cpu"
    if accelerator == "cpu" and config.precision == "16-mixed":
        raise ArgumentError("the precision 16-mixed needs a GPU; use --precision bf16-mixed here.")
    if accelerator == "cpu" and "16" in config.precision and not processor.has_half_products():
        raise ArgumentError(
            f"can't train with the precision {config.precision}: {processor.reason()}; use --precision 32-true."
        )
    try:
        fabric = Fabric(
            accelerator=accelerator,
            strategy="ddp" if several else "auto",
            devices=config.devices if config.devices == "auto" else int(config.devices),
            num_nodes=config.nodes,
            precision=config.precision,  # type: ignore[arg-type]
        )
    except (RuntimeError, ValueError, TypeError, ImportError) as error:
        raise ArgumentError(
            f"can't use accelerator {config.accelerator} with {config.devices} devices: {' '.join(str(error).split())}"
        ) from None
    fabric.launch()
    if fabric.device.type == "cuda":
        torch.backends.cudnn.benchmark = config.cudnn_benchmark
        torch.backends.cudnn.deterministic = not config.cudnn_benchmark
    return fabric


@contextmanager
def opened_folder(
    fabric: Fabric, config: Config, out: Path, resume: bool, restart: bool, display: Display
) -> Iterator[RunFolder | None]:
    """Open the folder in the first process; if that fails, every process raises what it raised."""
    folder, problem = None, None
    if fabric.is_global_zero:
        try:
            folder = RunFolder(out)
            aside = folder.set_aside() if restart else None
            if aside is not None:
                display.note(f"what was in {out} is in {aside} now")
            _check_folder(folder, config, resume)
        except OrthocondError as error:
            problem = str(error)
    problem = fabric.broadcast(problem)
    with folder or nullcontext():
        if problem is not None:
            raise RunError(problem)
        yield folder


def _check_folder(folder: RunFolder, config: Config, resume: bool) -> None:
    if not folder.holds_a_run:
        return
    if not resume:
        raise RunError(f"there is a run in {folder.path} already; add --resume, or choose another folder with --out.")
    stored = folder.config()
    if stored is None:
        raise RunError(
            f"config.json in {folder.path} is missing or damaged, no checkpoint holds a copy, and nothing was changed; "
            f"restore it from a copy, or start over with: {start_over_command(config, folder.path)}"
        )
    check_same_run(folder.path, stored, config)


@contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Treat the first Ctrl-C or SIGTERM as a stop request; yield a function that reports whether one arrived."""
    asked: list[int] = []

    def ask(number: int, _: FrameType | None) -> None:
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.append(number)

    try:
        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: signals are somebody else's
        before = {}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
