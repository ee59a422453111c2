"""Training, on Lightning Fabric: one process or many, any precision, resumable bit for bit."""

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

from orthocond.errors import ArgumentError, NonFiniteError, OrthocondError
from orthocond.lab.conditions import measure_of
from orthocond.lab.config import Config
from orthocond.lab.data import Data, load_data
from orthocond.lab.display import Display, Silent
from orthocond.lab.engine import opened_folder, start_fabric, stop_requests
from orthocond.lab.notes import noted
from orthocond.lab.records import lines_text, read_steps
from orthocond.lab.runs import DivergedError, RunFolder, environment, read_status, start_over_command
from orthocond.lab.state import RunState
from orthocond.lab.watching import Watch
from orthocond.treatments import LastStep

__all__ = ["Outcome", "train"]

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
    """Train as a configuration says, in the run's own folder.

    With several devices or nodes this is called in every process; Fabric starts those of this machine itself.

    Args:
        config: what to run.
        out: the folder of the run.
        resume: continue the existing run; a finished run is not changed.
        restart: move the existing run into a folder beside it, and start over.
        display: shows the progress.

    Raises:
        ArgumentError: the data is missing, or is not what the configuration says.
        RunError: the folder can't be used: not writable, in use, holding another run, full, or damaged beyond repair.
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
    fabric = start_fabric(config)
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
    with opened_folder(fabric, config, out, resume, restart, display) as folder, stop_requests() as stop_asked:
        run = _Run(fabric, config, data, folder, display)
        if folder is not None:
            if folder.holds_a_run:
                folder.count_seconds_from(float(read_status(out).get("seconds", 0)))
            else:
                folder.begin(config, environment(device=str(fabric.device), world_size=fabric.world_size))
        run.note_warnings(run.state.restore(folder))
        if run.state.step >= run.state.total_steps:
            if folder is not None and read_status(out).get("state") != "finished":  # killed just before it said so
                run.set_status("finished")
            display.note(f"the run in {out} is finished; there is nothing to do")
            return run.outcome("finished")
        state = run.state
        display.start(
            f"{config.preset} {config.method} seed {config.seed}", state.step, state.total_steps, state.num_epochs
        )
        try:
            ending = run.loop(stop_asked)
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
        run.set_status(ending)
        return run.outcome(ending)


class _Run:
    """The parts of a run and its loop."""

    def __init__(self, fabric: Fabric, config: Config, data: Data, folder: RunFolder | None, display: Display) -> None:
        self.fabric, self.config, self.data, self.folder, self.display = fabric, config, data, folder, display
        self.state = RunState(fabric, config, data)
        self.watch: Watch | None = None
        self.pending: list[tuple[dict[str, Any], Tensor]] = []
        self.times = dict.fromkeys(("seconds", "forward", "backward", "update"), 0.0)
        self.writer: SummaryWriter | None = None
        self.last: LastStep | None = None

    def loop(self, stop_asked: Callable[[], bool]) -> str:
        """Train until the last step, or until it is asked to stop."""
        if self.folder is not None:
            self.writer = SummaryWriter(str(self.folder.path), purge_step=self.state.step + 1)
        self.watch = Watch(self.state.network, self.config, self.state.step)
        self.set_status("running")
        while self.state.step < self.state.total_steps:
            epochs, start = divmod(self.state.step, self.state.steps_per_epoch)
            epoch = epochs + 1
            self.state.model.train()
            began = time.perf_counter()
            for x, y in self.data.train_batches(epoch, start, self.state.part, self.fabric.device):
                self.state.step += 1
                try:
                    self.train_step(epoch, x, y)
                except NonFiniteError as error:
                    self.flush(reduce=False)
                    raise self._diverged(self.state.step, f"the features are NaN or infinite ({error})") from None
                self.times["seconds"] += time.perf_counter() - began
                ends = self.state.step % self.state.steps_per_epoch == 0 or self.state.step == self.state.total_steps
                saves = self.state.step % self.config.checkpoint_every == 0
                if ends or saves or self.state.step % _FLUSH == 0 or (self.state.part.size == 1 and stop_asked()):
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
                raise self._diverged(self.state.step, f"validation met NaN or infinity ({error})") from None
            self.save()
            if self.state.step < self.state.total_steps and self._everywhere(stop_asked()):
                return "interrupted"
        return "finished"

    def train_step(self, epoch: int, x: Tensor, y: Tensor) -> None:
        """Take one step, and remember what happened in it."""
        assert self.watch is not None
        self.watch.step = self.state.step
        times = [time.perf_counter()]
        groups = self.state.plain_optimizer.param_groups
        scheduled, pre_svd_scheduled = groups[0]["lr"], groups[-1]["lr"]
        logits = self.state.model(x)
        loss = _loss(logits, y)
        penalty = self.state.treatment.penalty() if self.state.treatment is not None else 0.0
        times.append(time.perf_counter())
        self.state.optimizer.zero_grad()
        self.fabric.backward(loss + penalty)
        times.append(time.perf_counter())
        self.state.optimizer.step()
        self.state.scheduler.step()
        times.append(time.perf_counter())
        for name, before, after in zip(("forward", "backward", "update"), times, times[1:], strict=False):
            self.times[name] += after - before

        with torch.no_grad():
            self.state.totals += _totals(loss.detach(), logits, y).to(self.state.totals)
        last = self.state.treatment.last if self.state.treatment is not None else None
        if last is self.last:  # a step that the gradient scaler left out
            last = None
        self.last = last or self.last
        record = {
            "kind": "step",
            "step": self.state.step,
            "epoch": epoch,
            "lr": scheduled,
            "pre_svd_lr": pre_svd_scheduled if last is None else last.learning_rate,
            **(noted(self.state.treatment.notes, last) if self.state.treatment is not None else {}),
        }
        self.pending.append((record, loss.detach()))

    def flush(self, *, reduce: bool = True) -> None:
        """Write down the steps since the last time, over all processes unless these can't agree.

        The loss is their mean, failures and fall-backs of the solver their sum; condition numbers are those of the
        first process.

        Raises:
            DivergedError: the loss of one of them is not finite.
        """
        assert self.watch is not None
        recorded = self.watch.steps()
        if not self.pending:
            return
        stacked = torch.stack([loss for _, loss in self.pending])
        losses = (self.state.reduced(stacked, "mean") if reduce else stacked).tolist()
        own = [recorded(record["step"]) for record, _ in self.pending]
        counted = [name for name in ("failures", "fallbacks") if name in own[0]]
        counts = torch.tensor([[float(found[name]) for name in counted] for found in own])
        totals = (self.state.reduced(counts, "sum") if reduce else counts).long().tolist()
        records = [
            {**record, "loss": loss, **found, **dict(zip(counted, numbers, strict=True))}
            for (record, _), loss, found, numbers in zip(self.pending, losses, own, totals, strict=True)
        ]
        self.pending.clear()
        if self.folder is not None:
            self.folder.append("metrics.jsonl", records)
            known = self.times if self.fabric.device.type == "cpu" else {"seconds": self.times["seconds"]}
            taken = {name: round(seconds, 6) for name, seconds in known.items()}  # elsewhere the parts run later
            self.folder.append("times.jsonl", [{"step": records[-1]["step"], "steps": len(records), **taken}])
            self._to_tensorboard(records[-1], records[-1]["step"])
        self.times = dict.fromkeys(self.times, 0.0)
        self.display.step({**records[-1], "condition": records[-1][measure_of(self.config.eps)]})
        for record in records:
            if not math.isfinite(record["loss"]):
                raise self._diverged(
                    record["step"], f"the loss became {record['loss']} at condition number {record['cond']}"
                )

    def end_epoch(self, epoch: int) -> None:
        """Validate, and write down the epoch's errors."""
        loss, wrong, wrong5, count = self.state.summed(self.state.totals)
        record: dict[str, Any] = {"kind": "epoch", "epoch": epoch, "step": self.state.step}
        record |= {"train_loss": loss / count, "train_error": 100 * wrong / count, "train_error5": 100 * wrong5 / count}
        self.state.totals.zero_()
        if epoch % self.config.evaluate_every == 0 or self.state.step == self.state.total_steps:
            record |= self.validate()
            self.display.epoch(record)
        if self.folder is not None:
            self.folder.append("metrics.jsonl", [record])
            self._to_tensorboard(record, self.state.step)

    @torch.no_grad()
    def validate(self) -> dict[str, Any]:
        """Return loss and errors on the validation images, and what was recorded of the covariances meanwhile."""
        assert self.watch is not None
        self.state.model.eval()
        totals = torch.zeros_like(self.state.totals)
        precision = self.fabric.strategy.precision
        for x, y in self.data.val_batches(self.state.part, self.fabric.device):
            with precision.forward_context():  # not through DDP, whose forwards have to be as many in every process
                logits = self.state.network(precision.convert_input(x))
            totals += _totals(_loss(logits, y), logits, y).to(totals)
        loss, wrong, wrong5, count = self.state.summed(totals)
        found = self.watch.validation()
        (failures,) = self.state.summed(totals.new_tensor([found["failures"]]))
        errors = {"val_loss": loss / count, "val_error": 100 * wrong / count, "val_error5": 100 * wrong5 / count}
        return {**errors, **found, "failures": int(failures)}

    def check_weights(self) -> None:
        """Raise `DivergedError` unless all weights are finite."""
        weights = [value.detach() for value in self.state.network.parameters()]
        if not math.isfinite(nn.utils.get_total_norm(weights)):
            raise self._diverged(self.state.step, "a weight became NaN or infinite")

    def save(self) -> None:
        """Write a checkpoint.

        Raises:
            DivergedError: a weight is not finite; the last checkpoint stays.
        """
        self.check_weights()
        checkpoint = self.state.checkpoint()
        if self.folder is None:
            return
        self.folder.save_checkpoint({**checkpoint, "sizes": self.folder.sizes()})
        self.set_status("running")

    def note_warnings(self, consequence: str) -> None:
        """Say what is wrong in the folder, and what follows from it."""
        for warning in self.folder.warnings if self.folder is not None else ():
            self.display.note(f"{warning}; {consequence}")

    def set_status(self, state: str, error: str | None = None) -> None:
        """Write how far the run is."""
        if self.folder is None:
            return
        epoch = math.ceil(self.state.step / self.state.steps_per_epoch)
        result = None
        if state == "finished":
            result = read_steps(self.folder.path).last_error({"state": state, "total_steps": self.state.total_steps})
        self.folder.set_status(
            state, step=self.state.step, total_steps=self.state.total_steps, epoch=epoch, error=error, val_error=result
        )

    def outcome(self, state: str) -> Outcome:
        """Return how the run ended."""
        if self.folder is None:
            return Outcome(Path(), state, self.state.step, None)
        records = read_steps(self.folder.path)
        error = records.last_error(read_status(self.folder.path))
        if records.damaged:
            self.display.note(f"{lines_text(records.damaged)} ({self.folder.path})")
        if state == "finished" and error is None:
            self.display.note(
                f"the validation error of the run in {self.folder.path} can't be known, because metrics.jsonl is not "
                "as the run wrote it; restore it from a copy, or start over with: "
                + start_over_command(self.config, self.folder.path)
            )
        return Outcome(self.folder.path, state, self.state.step, error)

    def close(self) -> None:
        """Close what was opened for the loop."""
        if self.watch is not None:
            self.watch.close()
        if self.state.treatment is not None:
            self.state.treatment.detach()
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
        return bool(self.state.reduced(torch.tensor(float(asked)), "sum") > 0)

    def _to_tensorboard(self, record: dict[str, Any], step: int) -> None:
        assert self.writer is not None
        for name, value in record.items():
            if name not in ("kind", "step", "epoch") and value is not None:
                self.writer.add_scalar(f"{record['kind']}/{name}", value, step)


def _loss(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), y)


def _totals(loss: Tensor, logits: Tensor, y: Tensor) -> Tensor:
    """Return the summed loss, how many are wrong, how many are not among the best five, and how many there are."""
    best = logits.topk(min(5, logits.shape[1]), dim=1).indices == y[:, None]
    count = len(y)
    wrong, wrong5 = count - best[:, 0].sum(), count - best.any(1).sum()
    return torch.stack([loss * count, wrong.to(loss), wrong5.to(loss), loss.new_tensor(count)])
