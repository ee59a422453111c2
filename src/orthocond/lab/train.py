"""Training, on Lightning Fabric: one process or many, any precision, resumable bit for bit."""

import gc
import importlib
import logging
import math
import random
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

from orthocond import ConditionMonitor, treat
from orthocond.errors import ArgumentError, NonFiniteError, OrthocondError, OrthocondWarning
from orthocond.lab import processor
from orthocond.lab.config import Config
from orthocond.lab.data import Data, Part, load_data
from orthocond.lab.display import Display, Silent
from orthocond.lab.methods import method
from orthocond.lab.models import build
from orthocond.lab.notes import noted
from orthocond.lab.records import last_step, lines_text, read_steps
from orthocond.lab.runs import (
    DivergedError,
    RunError,
    RunFolder,
    check_same_run,
    environment,
    read_status,
    start_over_command,
)
from orthocond.treatments import LastStep, Treatment

__all__ = ["Outcome", "learning_rate_factor", "network", "train"]

_FLUSH = 10  # steps between writes: what a device computed is waited for no more often


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Example:
        >>> Outcome(Path("runs/first"), "finished", 330, 1.5).state
        'finished'
    """

    folder: Path
    state: str
    """``finished`` or ``interrupted``."""
    step: int
    val_error: float | None
    """In percent, of the last validation."""


def train(
    config: Config, out: Path | str, *, resume: bool = False, restart: bool = False, display: Display | None = None
) -> Outcome:
    """Train as a configuration says, in a folder of its own.

    Under several devices or nodes this is called in every process; Fabric starts those of this machine itself.

    Args:
        config: what to run.
        out: the folder of the run.
        resume: continue the run that is there; a run that is finished stays as it is.
        restart: move the run that is there into a folder beside it, and begin anew.
        display: is told what happens.

    Raises:
        ArgumentError: the data is missing, or is not what the configuration says.
        RunError: the folder can't be used: not writable, in use, of another run, full, damaged beyond repair.
        DivergedError: the loss became NaN.

    Example:
        >>> import tempfile
        >>> from orthocond.lab.config import changed
        >>> from orthocond.lab.presets import preset
        >>> config = changed(preset("dbn-digits"), {"method": "svd+nog", "steps": 2, "val_images": 50})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     outcome = train(config, folder)
        >>> outcome.state, outcome.step
        ('finished', 2)
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    fabric = _fabric(config)
    try:
        shown = display if display and fabric.is_global_zero else Silent()
        return _train(fabric, config, Path(out), resume, restart, shown)
    finally:
        if fabric.world_size > 1:
            # Its threads have to end before the interpreter does, and they do when nothing holds the group any more.
            del fabric
            gc.collect()
            torch.distributed.destroy_process_group()


def _train(fabric: Fabric, config: Config, out: Path, resume: bool, restart: bool, display: Display) -> Outcome:
    data = load_data(config)
    if config.batch_size % fabric.world_size:
        raise ArgumentError(
            f"a batch of {config.batch_size} can't be divided among {fabric.world_size} processes; change --batch-size."
        )
    with _opened(fabric, config, out, resume, restart, display) as folder, _stop_signals() as stop_asked:
        run = _Run(fabric, config, data, folder, display)
        if folder is not None:
            if folder.holds_a_run:
                folder.count_seconds_from(float(read_status(out).get("seconds", 0)))
            else:
                folder.begin(config, environment(device=str(fabric.device), world_size=fabric.world_size))
        if run.says_finished():
            run.step = run.total_steps
            run.note_warnings("the run is finished")
        else:
            run.restore()
        if run.step >= run.total_steps:
            if folder is not None and read_status(out).get("state") != "finished":  # killed just before it said so
                run.set_status("finished")
            display.note(f"the run in {out} is finished; there is nothing to do")
            return run.outcome("finished")
        display.start(f"{config.preset} {config.method} seed {config.seed}", run.step, run.total_steps, run.num_epochs)
        try:
            state = run.loop(stop_asked)
        except OrthocondError as error:
            run.set_status("failed", str(error))
            raise
        except KeyboardInterrupt:
            run.set_status("interrupted")
            raise
        except Exception as error:
            run.set_status("failed", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
            raise
        finally:
            display.stop()
            run.close()
        run.set_status(state)
        return run.outcome(state)


class _Run:
    """The parts of a run and its loop."""

    def __init__(self, fabric: Fabric, config: Config, data: Data, folder: RunFolder | None, display: Display) -> None:
        self.fabric, self.config, self.data, self.folder, self.display = fabric, config, data, folder, display
        self.part = Part(fabric.global_rank, fabric.world_size)
        self.steps_per_epoch = data.num_train // config.batch_size
        whole = config.epochs * self.steps_per_epoch
        self.total_steps = whole if config.steps is None else min(config.steps, whole)
        self.num_epochs = math.ceil(self.total_steps / self.steps_per_epoch)
        self.step = 0

        _seed(config.seed)
        self.network, self.treatment = network(config, data, sync=fabric.world_size > 1)
        self.monitor = ConditionMonitor(self.network) if method(config.method).solver else None
        self.sgd = torch.optim.SGD(
            self.network.parameters(),
            lr=config.learning_rate,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
        )
        if self.treatment is not None:
            self.treatment.attach(self.sgd)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.sgd, learning_rate_factor(config, self.steps_per_epoch, self.total_steps)
        )
        self.model, self.optimizer = fabric.setup(self.network, self.sgd)
        self.totals = torch.zeros(
            4, dtype=torch.float32 if fabric.device.type == "mps" else torch.float64, device=fabric.device
        )
        self.pending: list[tuple[dict[str, Any], Tensor]] = []
        self.times = dict.fromkeys(("seconds", "forward", "backward", "update"), 0.0)
        self.writer: SummaryWriter | None = None
        self.last: LastStep | None = None

    def loop(self, stop_asked: Callable[[], bool]) -> str:
        """Train until the last step, or until it is asked to stop."""
        if self.folder is not None:
            self.writer = SummaryWriter(str(self.folder.path), purge_step=self.step + 1)
        self.set_status("running")
        while self.step < self.total_steps:
            epoch, start = self.step // self.steps_per_epoch + 1, self.step % self.steps_per_epoch
            self.model.train()
            began = time.perf_counter()
            for x, y in self.data.train_batches(epoch, start, self.part, self.fabric.device):
                self.step += 1
                try:
                    self.train_step(epoch, x, y)
                except NonFiniteError as error:
                    self.flush(reduce=False)
                    raise self._diverged(self.step, f"the features are NaN or infinite ({error})") from None
                self.times["seconds"] += time.perf_counter() - began
                ends = self.step % self.steps_per_epoch == 0 or self.step == self.total_steps
                saves = self.step % self.config.checkpoint_every == 0
                if ends or saves or self.step % _FLUSH == 0 or (self.part.size == 1 and stop_asked()):
                    self.flush()
                    if ends:
                        break
                    stopping = self._everywhere(stop_asked())
                    if stopping or saves:
                        self.save()
                    if stopping:
                        return "interrupted"
                began = time.perf_counter()
            self.check_weights()
            try:
                self.end_epoch(epoch)
            except NonFiniteError as error:
                raise self._diverged(self.step, f"validation met NaN or infinity ({error})") from None
            self.save()
            if self.step < self.total_steps and self._everywhere(stop_asked()):
                return "interrupted"
        return "finished"

    def train_step(self, epoch: int, x: Tensor, y: Tensor) -> None:
        """Take one step, and remember what happened in it."""
        times = [time.perf_counter()]
        scheduled = self.sgd.param_groups[0]["lr"]
        logits = self.model(x)
        loss = _loss(logits, y)
        penalty = self.treatment.penalty() if self.treatment is not None else 0.0
        times.append(time.perf_counter())
        self.optimizer.zero_grad()
        self.fabric.backward(loss + penalty)
        times.append(time.perf_counter())
        self.optimizer.step()
        self.scheduler.step()
        times.append(time.perf_counter())
        for name, before, after in zip(("forward", "backward", "update"), times, times[1:], strict=False):
            self.times[name] += after - before

        with torch.no_grad():
            self.totals += _totals(loss.detach(), logits, y).to(self.totals)
        last = self.treatment.last if self.treatment is not None else None
        if last is self.last:  # a step that the gradient scaler left out
            last = None
        self.last = last or self.last
        record = {
            "kind": "step",
            "step": self.step,
            "epoch": epoch,
            "lr": scheduled,
            "pre_svd_lr": scheduled if last is None else last.learning_rate,
            **(noted(self.treatment.notes, last) if self.treatment is not None else {}),
        }
        self.pending.append((record, loss.detach()))

    def flush(self, *, reduce: bool = True) -> None:
        """Write down the steps since the last time, their loss averaged over the processes unless these can't agree.

        Raises:
            DivergedError: the loss of one of them is not finite.
        """
        conditions = self.monitor.drain() if self.monitor is not None else []
        if not self.pending:
            return
        stacked = torch.stack([loss for _, loss in self.pending])
        losses = (self._reduced(stacked, "mean") if reduce else stacked).tolist()
        conditions = conditions[: len(losses)] or [{}] * len(losses)
        names = ("cond", "cond_support", "cond_eps", "rank", "failures")
        records = []
        for (record, _), loss, condition in zip(self.pending, losses, conditions, strict=True):
            found = {name: condition.get(name, 0 if name == "failures" else None) for name in names}
            records.append({**record, "loss": loss, **found})
        self.pending.clear()
        if self.folder is not None:
            self.folder.append("metrics.jsonl", records)
            known = self.times if self.fabric.device.type == "cpu" else {"seconds": self.times["seconds"]}
            taken = {name: round(seconds, 6) for name, seconds in known.items()}  # elsewhere the parts run later
            self.folder.append("times.jsonl", [{"step": records[-1]["step"], "steps": len(records), **taken}])
            self._to_tensorboard(records[-1], records[-1]["step"])
        self.times = dict.fromkeys(self.times, 0.0)
        self.display.step(records[-1])
        for record in records:
            if not math.isfinite(record["loss"]):
                raise self._diverged(
                    record["step"], f"the loss became {record['loss']} at condition number {record['cond']}"
                )

    def end_epoch(self, epoch: int) -> None:
        """Validate, and write down the epoch's errors."""
        loss, wrong, wrong5, count = self._summed(self.totals)
        record: dict[str, Any] = {"kind": "epoch", "epoch": epoch, "step": self.step}
        record |= {"train_loss": loss / count, "train_error": 100 * wrong / count, "train_error5": 100 * wrong5 / count}
        self.totals.zero_()
        if epoch % self.config.evaluate_every == 0 or self.step == self.total_steps:
            record |= self.validate()
            self.display.epoch(record)
        if self.folder is not None:
            self.folder.append("metrics.jsonl", [record])
            self._to_tensorboard(record, self.step)

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Return loss and errors on the validation images."""
        self.model.eval()
        totals = torch.zeros_like(self.totals)
        precision = self.fabric.strategy.precision
        for x, y in self.data.val_batches(self.part, self.fabric.device):
            with precision.forward_context():  # not through DDP, whose forwards have to be as many in every process
                logits = self.network(precision.convert_input(x))
            totals += _totals(_loss(logits, y), logits, y).to(totals)
        loss, wrong, wrong5, count = self._summed(totals)
        return {"val_loss": loss / count, "val_error": 100 * wrong / count, "val_error5": 100 * wrong5 / count}

    def check_weights(self) -> None:
        """Raise `DivergedError` unless all weights are finite."""
        weights = [value.detach() for value in self.network.parameters()]
        if not math.isfinite(nn.utils.get_total_norm(weights)):
            raise self._diverged(self.step, "a weight became NaN or infinite")

    def save(self) -> None:
        """Write a checkpoint.

        Raises:
            DivergedError: a weight is not finite; the last checkpoint stays.
        """
        self.check_weights()
        random_states = torch.zeros(self.fabric.world_size, torch.get_rng_state().numel())
        random_states[self.part.rank] = torch.get_rng_state()
        random_states = self._reduced(random_states, "sum").cpu().to(torch.uint8)
        totals = torch.tensor(self._summed(self.totals), dtype=torch.float64)
        if self.folder is None:
            return
        self.folder.save_checkpoint(
            {
                "config": asdict(self.config),
                "step": self.step,
                "model": self.network.state_dict(),
                "optimizer": self.sgd.state_dict(),
                "scheduler": self.scheduler.state_dict(),
                "treatment": self.treatment.state_dict() if self.treatment is not None else None,
                "precision": self.fabric.strategy.precision.state_dict(),
                "random": {"torch": random_states, **_random_state()},
                "totals": totals,
                "sizes": self.folder.sizes(),
            }
        )
        self.set_status("running")

    def says_finished(self) -> bool:
        """Return whether the run that is there says that it is finished: then nothing is done, whatever is missing."""
        finished = False
        if self.folder is not None:
            status = read_status(self.folder.path)
            finished = status.get("state") == "finished" and status.get("step") == self.total_steps
        return bool(self.fabric.broadcast(finished))

    def restore(self) -> None:
        """Go back to the newest checkpoint that can be used, or to the beginning if none was ever written.

        Raises:
            RunError: none of the checkpoints that were written can be used; nothing is changed.
        """
        states = iter(()) if self.folder is None else self.folder.checkpoints(self.config, self.total_steps)
        while True:
            file, state = self.fabric.broadcast(next(states, (None, None)))
            if state is None:
                break
            try:
                self.load(state)
            except Exception as error:  # what somebody made up can fail in any way
                if self.folder is not None:
                    reason = " ".join(str(error).split())[:200]
                    self.folder.warnings.append(f"{file} can't be loaded ({reason}) and is not used")
                continue
            if self.folder is not None:
                self.folder.cut(state["sizes"])
            self.step = state["step"]
            self.note_warnings(f"going on from step {self.step}")
            return
        problem = None if self.folder is None else self.restore_without(self.folder)
        if (problem := self.fabric.broadcast(problem)) is not None:
            raise RunError(problem)
        self.step = self.fabric.broadcast(self.step)
        self.note_warnings("its checkpoints are gone" if self.step else "beginning anew")

    def restore_without(self, folder: RunFolder) -> str | None:
        """Go on without a checkpoint, if no run is lost by it; otherwise return why not, and what to do."""
        if (
            read_status(folder.path).get("state", "finished") == "finished"
            and last_step(folder.path) == self.total_steps
        ):
            self.step = self.total_steps  # a finished run that has lost its checkpoints, and what it said of itself
            return None
        if folder.had_checkpoint(self.steps_per_epoch):
            reasons = "; ".join(folder.warnings) or "they are gone"
            return (
                f"no checkpoint in {folder.path} can be used ({reasons}), and nothing was changed; restore them from a "
                f"copy, or start over by: {start_over_command(self.config, folder.path)}"
            )
        folder.cut({"metrics.jsonl": 0, "times.jsonl": 0})
        return None

    def load(self, state: dict[str, Any]) -> None:
        """Take over what a checkpoint holds."""
        self.network.load_state_dict(state["model"])
        self.sgd.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        if self.treatment is not None:
            self.treatment.load_state_dict(state["treatment"])
        self.fabric.strategy.precision.load_state_dict(state["precision"])
        if self.fabric.is_global_zero:
            self.totals.copy_(state["totals"])
        states = state["random"]["torch"]
        torch.set_rng_state(states[min(self.part.rank, len(states) - 1)].clone())  # torch takes no view
        _set_random_state(state["random"])

    def note_warnings(self, consequence: str) -> None:
        """Say what is wrong in the folder, and what follows from it."""
        for warning in self.folder.warnings if self.folder is not None else ():
            self.display.note(f"{warning}; {consequence}")

    def set_status(self, state: str, error: str | None = None) -> None:
        """Write how far the run is."""
        if self.folder is None:
            return
        epoch = math.ceil(self.step / self.steps_per_epoch)
        result = None
        if state == "finished":
            result = read_steps(self.folder.path).last_error({"state": state, "total_steps": self.total_steps})
        self.folder.set_status(
            state, step=self.step, total_steps=self.total_steps, epoch=epoch, error=error, val_error=result
        )

    def outcome(self, state: str) -> Outcome:
        """Return how the run ended."""
        if self.folder is None:
            return Outcome(Path(), state, self.step, None)
        records = read_steps(self.folder.path)
        error = records.last_error(read_status(self.folder.path))
        if records.damaged:
            self.display.note(f"{lines_text(records.damaged)} ({self.folder.path})")
        if state == "finished" and error is None:
            self.display.note(
                f"the validation error of the run in {self.folder.path} can't be known, because metrics.jsonl is not "
                "as the run wrote it; restore it from a copy, or start over by: "
                + start_over_command(self.config, self.folder.path)
            )
        return Outcome(self.folder.path, state, self.step, error)

    def close(self) -> None:
        """Close what was opened for the loop."""
        if self.monitor is not None:
            self.monitor.close()
        if self.treatment is not None:
            self.treatment.detach()
        if self.writer is not None:
            self.writer.close()

    def _diverged(self, step: int, what: str) -> DivergedError:
        saved = self.folder.load_checkpoint() if self.folder is not None else None
        last = f"the last good checkpoint is that of step {saved['step']}" if saved else "there is no checkpoint yet"
        return DivergedError(f"training stopped at step {step}: {what}; {last}. Try a lower --learning-rate.")

    def _everywhere(self, asked: bool) -> bool:
        """Return whether any process was asked."""
        if self.fabric.world_size == 1:
            return asked
        return bool(self._reduced(torch.tensor(float(asked)), "sum") > 0)

    def _summed(self, totals: Tensor) -> list[float]:
        """Return totals over all processes."""
        values: list[float] = self._reduced(totals.clone(), "sum").tolist()
        return values

    def _reduced(self, value: Tensor, how: str) -> Tensor:
        return cast(Tensor, self.fabric.all_reduce(value.to(self.fabric.device), reduce_op=how))

    def _to_tensorboard(self, record: dict[str, Any], step: int) -> None:
        assert self.writer is not None
        for name, value in record.items():
            if name not in ("kind", "step", "epoch") and value is not None:
                self.writer.add_scalar(f"{record['kind']}/{name}", value, step)


def network(config: Config, data: Data, *, sync: bool) -> tuple[nn.Module, Treatment | None]:
    """Return the network of a configuration, and the treatment on its Pre-SVD layer, if it has one."""
    chosen = method(config.method, config.parts)
    options: dict[str, Any] = {}
    if chosen.solver is not None:
        options = {"solver": chosen.solver}
        # What Newton-Schulz iterates on has no eigenvalues to drop, nor to make a rule of.
        names = ("eps", "rtol", "gradient") if chosen.solver == "eigh" else ("eps",)
        options |= {name: getattr(config, name) for name in names if getattr(config, name) is not None}
        if config.meta == "dbn":
            options["sync"] = sync
    with_meta = chosen.solver is not None
    model = build(
        config.model,
        channels=data.channels,
        num_classes=config.num_classes,
        small_images=config.small_images,
        stem="dbn" if with_meta and config.meta == "dbn" else "bn",
        head="covariance" if with_meta and config.meta == "gcp" else "average",
        width=config.width,
        reduction=config.reduction,
        **options,
    )
    if config.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # a stub that lacks it
    if chosen.treatment == "none":
        return model, None
    images, _ = next(iter(data.val_batches(Part(), torch.device("cpu"))))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OrthocondWarning)  # a combination that was asked for by its name
        return model, treat(model, "auto", chosen.treatment, example_input=images[:2])


def learning_rate_factor(config: Config, steps_per_epoch: int, total_steps: int) -> Callable[[int], float]:
    """Return the function from the number of steps taken to the factor of the initial learning rate."""
    if config.schedule == "linear":
        return lambda step: 1 - 0.99 * min(step / total_steps, 1.0)
    return lambda step: config.gamma ** sum(step >= epoch * steps_per_epoch for epoch in config.milestones)


def _fabric(config: Config) -> Fabric:
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
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    return fabric


@contextmanager
def _opened(
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
        raise RunError(f"there is a run in {folder.path} already; add --resume, or choose another folder by --out.")
    stored = folder.config()
    if stored is None:
        raise RunError(
            f"config.json in {folder.path} is missing or damaged, no checkpoint holds a copy, and nothing was changed; "
            f"restore it from a copy, or start over by: {start_over_command(config, folder.path)}"
        )
    check_same_run(folder.path, stored, config)


@contextmanager
def _stop_signals() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C or SIGTERM into a wish; yield what tells whether there was one."""
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


def _loss(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), y)


def _totals(loss: Tensor, logits: Tensor, y: Tensor) -> Tensor:
    """Return the summed loss, how many are wrong, how many are not among the best five, and how many there are."""
    best = logits.topk(min(5, logits.shape[1]), dim=1).indices == y[:, None]
    count = len(y)
    wrong, wrong5 = count - best[:, 0].sum(), count - best.any(1).sum()
    return torch.stack([loss * count, wrong.to(loss), wrong5.to(loss), loss.new_tensor(count)])


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.manual_seed(seed)


def _random_state() -> dict[str, Any]:
    kind, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (
            str(kind),
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    if "cuda" in state and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
