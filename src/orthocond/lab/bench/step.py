"""``bench step``: Table 6 of the paper, the time of a training step with each method, and what each part adds.

One network and optimizer for each method, as a preset has them, steps in turns. A step of a second varies by more than
the treatments cost, so what each of them adds is timed by itself, too, with and without on the layer alone.
"""

import dataclasses
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import orthocond
from orthocond.lab.bench.measure import Budget, Contestant, alternate, spread
from orthocond.lab.config import Config, changed
from orthocond.lab.data import Part
from orthocond.lab.methods import method
from orthocond.lab.network import network
from orthocond.lab.paper import ITEMS
from orthocond.lab.presets import preset
from orthocond.nn import DecorrelatedBatchNorm2d

__all__ = ["DEVICES", "PAPER", "Cell", "cells", "measure"]

DEVICES = ("cpu", "cuda")
(PAPER,) = ITEMS["table6"].quotes.values()
"""Milliseconds forward and backward in Table 6, on an RTX A6000."""

Batch = tuple[Tensor, Tensor]

_MONITORED = "svd, monitored"
_OUR_DEFAULTS = {"eps": None, "rtol": None, "gradient": "exact", "parts": "none"}
_LARGEST_BATCH = {"cpu": 32, "cuda": 10**9}


@dataclass(frozen=True)
class Cell:
    """``"step"`` for whole training steps, ``"added"`` for what each treatment adds to one."""

    subject: str


def cells(*, quick: bool) -> Iterator[Cell]:  # noqa: ARG001  # the signature of every subject; quick measures both, too
    """Yield both cells."""
    yield from (Cell("step"), Cell("added"))


def measure(
    cell: Cell, *, quick: bool, config: Config | None = None, device: str = "cpu", seconds: float = 0.0
) -> list[dict[str, Any]]:
    """Return a record for each method.

    Args:
        cell: what to measure.
        quick: few steps with a small network.
        config: whose network, layers and batch to take, on a CPU at most 32 images of it; None for ResNet-50 on
            CIFAR-100 with the defaults of our layers.
        device: of `DEVICES`; on CUDA times are taken by its events.
        seconds: begin rounds for so long; there are eight at least.
    """
    torch.manual_seed(0)
    if cell.subject == "added":
        return _added(quick=quick) if device == "cpu" else []
    if config is None:
        config = changed(preset("dbn-cifar100"), _OUR_DEFAULTS)
    if quick:
        config = changed(config, {"model": "resnet-small", "batch_size": 4})
    budget = Budget(0.0, fewest=2) if quick else Budget(seconds, fewest=8)
    return _steps(config, device, budget)


def _steps(config: Config, device: str, budget: Budget) -> list[dict[str, Any]]:
    batch = min(config.batch_size, _LARGEST_BATCH[device])
    names = (*PAPER, *(("svd+gauge",) if config.can_be_gauged else ()), _MONITORED)
    passes = alternate({name: _step(name, config, batch, device) for name in names}, budget, device)
    about = {"preset": config.preset, "network": config.model, "batch_size": batch, "device": device}
    records = []
    for name in names:
        record: dict[str, Any] = {"subject": "step", "method": name, **about}
        for part, which in (("forward", 0), ("backward", 1), ("total", None)):
            record[part] = {base: spread(passes[name], passes[base], which)._asdict() for base in ("svd", "bn")}
        if name in PAPER:
            record["paper"] = {base: sum(PAPER[name]) / sum(PAPER[base]) for base in ("svd", "bn")}
            record["paper"] |= {"forward_ms": PAPER[name][0], "backward_ms": PAPER[name][1]}
        records.append(record)
    return records


class _Noise:
    """Random images of the size of a dataset's."""

    def __init__(self, config: Config) -> None:
        self.channels, side = (1, 8) if config.dataset == "digits" else (3, config.crop if config.resize else 32)
        self.num_train = self.num_val = config.batch_size
        self._shape, self._num_classes = (self.channels, side, side), config.num_classes

    def batch(self, size: int, device: str) -> Batch:
        return torch.randn(size, *self._shape).to(device), torch.randint(self._num_classes, (size,)).to(device)

    def train_batches(self, epoch: int, start: int, part: Part, device: torch.device) -> Iterator[Batch]:
        raise NotImplementedError

    def val_batches(self, part: Part, device: torch.device) -> Iterator[Batch]:  # noqa: ARG002
        yield self.batch(2, str(device))


def _step(name: str, config: Config, batch: int, device: str) -> Contestant:
    """Return the training step of a method; the optimizer's part counts as backward, as treatments act there."""
    chosen = method(name.partition(",")[0], config.parts)
    own = dataclasses.replace(config, method=chosen.name)
    if chosen.solver == "newton_schulz" and not own.eps:
        own = dataclasses.replace(own, eps=1e-2)
    data = _Noise(config)
    model, treatment = network(own, data, sync=False)
    model = model.to(device)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=config.learning_rate, momentum=config.momentum, weight_decay=config.weight_decay
    )
    if treatment is not None:
        treatment.attach(optimizer)
    if name == _MONITORED:
        orthocond.ConditionMonitor(model)
    x, y = data.batch(batch, device)

    def step() -> Iterator[None]:
        penalty = 0.0 if treatment is None else treatment.penalty()
        loss = F.cross_entropy(model(x), y) + penalty
        yield
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield

    return step


def _added(*, quick: bool) -> list[dict[str, Any]]:
    """Return the seconds that each treatment adds to a step, measured on the stem alone with and without it.

    What a treatment adds does not depend on the batch, so it is a small one; but for applications of ``gauge``, which
    take another pass through the stem.
    """
    specs = {"none": "none", "nog": "nog", "olr": "olr", "ow": "ow", "nog+ow+olr": "nog+ow+olr"}
    contestants = {name: _stem(spec) for name, spec in specs.items()}
    contestants["gauge, before its first application"] = _stem("gauge(threshold=1e9)")
    contestants["gauge, after it"] = _stem("gauge", spread=100.0)
    contestants["gauge, applied"] = _stem("gauge(threshold=1.0)", whole_batch=not quick)
    contestants["none, whole batch"] = _stem("none", whole_batch=not quick)
    contestants["monitor"] = _stem("none", monitored=True)
    budget = Budget(0.0, fewest=3) if quick else Budget(20.0, fewest=50, most=1000)
    passes = alternate(contestants, budget)
    records = []
    for name in contestants:
        if name.startswith("none"):
            continue
        base = passes["none, whole batch" if name == "gauge, applied" else "none"]
        added = [sum(own) - sum(without) for own, without in zip(passes[name], base, strict=True)]
        low, middle, high = statistics.quantiles(added, method="inclusive")
        records.append({"subject": "added", "part": name, "seconds": middle, "low": low, "high": high})
    return records


def _stem(spec: str, *, monitored: bool = False, whole_batch: bool = False, spread: float = 1.0) -> Contestant:
    conv = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    conv.weight.data *= torch.linspace(1.0, spread, 27).view(1, 3, 3, 3)  # for a condition number at which gauge acts
    model = nn.Sequential(conv, DecorrelatedBatchNorm2d(64, affine=False))
    treatment = orthocond.treat(model, "0", spec)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=5e-4)
    treatment.attach(optimizer)
    if monitored:
        orthocond.ConditionMonitor(model)
    num, size = (32, 32) if whole_batch else (8, 10)
    x, g = torch.randn(num, 3, size, size), torch.randn(num, 64, size, size)

    def step() -> Iterator[None]:
        optimizer.zero_grad()
        model(x).backward(g)  # not the mean square, which is constant for a whitened output
        optimizer.step()
        yield

    return step
