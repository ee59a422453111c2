"""The laboratory's training compared with a bare loop: ``python -m orthocond.lab.bench.training [DATA]``.

Images per second of both, in turns, with the same model, data and batch; then how the memory grows over many steps.
With a folder of CIFAR-10, ``dbn-cifar10-small``; without, the embedded digits.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from orthocond.lab.config import Config, changed
from orthocond.lab.data import Part, load_data
from orthocond.lab.display import Silent
from orthocond.lab.network import network
from orthocond.lab.presets import preset
from orthocond.lab.train import train

__all__ = ["main"]


class _Clock(Silent):
    """Records when each step was reached, and the memory at that time."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, float, int]] = []

    def step(self, record: dict[str, object]) -> None:
        """Record the moment."""
        self.seen.append((int(str(record["step"])), time.perf_counter(), _kilobytes("VmRSS:")))

    def images_per_second(self, batch_size: int) -> float:
        """Return the rate between the first moment and the last."""
        (first, began, _), (last, ended, _) = self.seen[0], self.seen[-1]
        return batch_size * (last - first) / (ended - began)


def main() -> None:
    """Print the rates, their ratio and the memory."""
    folder = sys.argv[1] if len(sys.argv) > 1 else None
    name = "dbn-digits" if folder is None else "dbn-cifar10-small"
    steps = 300 if folder is None else 80
    settings = {"data": folder, "method": "svd+nog", "epochs": 100, "steps": steps, "val_images": 100}
    config = changed(preset(name), settings)
    ratios = []
    for turn in range(5):
        ours, bare = _laboratory(config).images_per_second(config.batch_size), _bare(config)
        ratios.append(ours / bare)
        print(f"{turn + 1}: orthocond train {ours:7.0f} images/s, bare loop {bare:7.0f}, ratio {ratios[-1]:.3f}")
    print(f"{name}, median ratio {statistics.median(ratios):.3f}")
    clock = _laboratory(changed(config, {"steps": 2_000} if folder is None else {"steps": 200}))
    at = {step: kilobytes / 1024 for step, _, kilobytes in clock.seen}
    marks = [step for step in at if step % (max(at) // 5) == 0]
    if not at[max(at)]:
        print("resident memory: not known on this system")
        return
    print("resident memory in MB at step:", ", ".join(f"{step}: {at[step]:.1f}" for step in marks))
    print(f"largest ever: {_kilobytes('VmHWM:') / 1024:.1f} MB")


def _laboratory(config: Config) -> _Clock:
    clock = _Clock()
    with tempfile.TemporaryDirectory() as folder:
        train(config, Path(folder) / "run", display=clock)
    return clock


def _bare(config: Config) -> float:
    """Return images per second of a plain loop: no records, no checkpoints, no monitor."""
    data, device = load_data(config), torch.device("cpu")
    torch.manual_seed(config.seed)
    model, treatment = network(config, data, sync=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    if treatment is not None:
        treatment.attach(optimizer)
    clock, step, epoch = _Clock(), 0, 0
    steps = config.steps or 0
    while step < steps:
        epoch += 1
        for x, y in data.train_batches(epoch, 0, Part(), device):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 10 == 0:
                clock.step({"step": step})
            if step == steps:
                break
    return clock.images_per_second(config.batch_size)


def _kilobytes(name: str) -> int:
    """Return the memory of this process as Linux reports it; 0 elsewhere."""
    status = Path("/proc/self/status")
    return int(status.read_text().partition(name)[2].split()[0]) if status.exists() else 0


if __name__ == "__main__":
    main()
