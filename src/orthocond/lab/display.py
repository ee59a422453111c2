"""The display of a run: a live line on a terminal, plain lines elsewhere."""

import time
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["Display", "LiveDisplay", "PlainDisplay", "Silent", "number"]


class Display(Protocol):
    """Shows the progress of a run."""

    def start(self, title: str, step: int, total_steps: int, total_epochs: int) -> None:
        """Begin, at a step."""

    def step(self, record: dict[str, Any]) -> None:
        """Show the newest step."""

    def epoch(self, record: dict[str, Any]) -> None:
        """Show the errors after an epoch."""

    def note(self, text: str) -> None:
        """Say something besides."""

    def stop(self) -> None:
        """End."""


class Silent:
    """Shows nothing."""

    def start(self, title: str, step: int, total_steps: int, total_epochs: int) -> None:
        """Begin, at a step."""

    def step(self, record: dict[str, Any]) -> None:
        """Show nothing."""

    def epoch(self, record: dict[str, Any]) -> None:
        """Show nothing."""

    def note(self, text: str) -> None:
        """Show nothing."""

    def stop(self) -> None:
        """End."""


class LiveDisplay(Silent):
    """A progress bar with epoch, step, loss, error, condition number and the time left, on a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            TextColumn("epoch {task.fields[epoch]}/{task.fields[epochs]}"),
            BarColumn(bar_width=None),
            TextColumn("step {task.completed}/{task.total}"),
            TextColumn("loss {task.fields[loss]}  error {task.fields[error]}  cond {task.fields[cond]}"),
            TimeRemainingColumn(),
            console=console,
        )

    def start(self, title: str, step: int, total_steps: int, total_epochs: int) -> None:
        """Begin, at a step."""
        fields: dict[str, Any] = {"epoch": 0, "epochs": total_epochs, "loss": "-", "error": "-", "cond": "-"}
        self._task = self._progress.add_task(title, total=total_steps, completed=step, **fields)
        self._progress.start()

    def step(self, record: dict[str, Any]) -> None:
        """Show the newest step."""
        shown = {"epoch": record["epoch"], "loss": number(record["loss"]), "cond": number(record["condition"])}
        self._progress.update(self._task, completed=record["step"], **shown)

    def epoch(self, record: dict[str, Any]) -> None:
        """Show the validation error."""
        self._progress.update(self._task, error=f"{record['val_error']:.2f}%")

    def note(self, text: str) -> None:
        """Say something above the bar."""
        self._console.print(text, highlight=False, markup=False)

    def stop(self) -> None:
        """End."""
        self._progress.stop()


class PlainDisplay(Silent):
    """A line for each epoch, and one every few seconds between."""

    def __init__(self, console: Console, seconds: float = 10.0) -> None:
        self._console, self._seconds = console, seconds
        self._next = self._begun = time.monotonic()
        self._first = self._total = 0

    def start(self, title: str, step: int, total_steps: int, total_epochs: int) -> None:
        """Begin, at a step."""
        self._first, self._total, self._begun = step, total_steps, time.monotonic()
        self._next = self._begun + self._seconds
        self.note(f"{title}: {total_steps} steps in {total_epochs} epochs" + (f", from step {step}" if step else ""))

    def step(self, record: dict[str, Any]) -> None:
        """Show the newest step, if it is time."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self._seconds
        done = record["step"] - self._first
        left = (now - self._begun) / max(done, 1) * (self._total - record["step"])
        self.note(
            f"epoch {record['epoch']} step {record['step']}/{self._total} loss {number(record['loss'])} "
            f"cond {number(record['condition'])} {left:.0f} s left"
        )

    def epoch(self, record: dict[str, Any]) -> None:
        """Show the errors."""
        self.note(
            f"epoch {record['epoch']} step {record['step']}/{self._total} training error {record['train_error']:.2f}% "
            f"validation error {record['val_error']:.2f}%"
        )

    def note(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def number(value: float | None) -> str:
    """Return a number in few characters; a dash for none.

    Example:
        >>> number(0.12345), number(123456.0), number(None)
        ('0.123', '1.2e+05', '-')
    """
    if value is None:
        return "-"
    return f"{value:.3g}" if abs(value) < 1e3 else f"{value:.1e}"
