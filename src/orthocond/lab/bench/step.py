"""``bench step``: Table 6 of the paper, what a training step costs by each method, and what is added by each part.

One CIFAR ResNet-50 and optimizer for each method, steps in turns. A step of a second varies by more than the treatments
cost, so what each of them adds is timed by itself, too, with and without on the layer alone.
"""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import orthocond
from orthocond.lab.bench.measure import Budget, Contestant, alternate, spread
from orthocond.lab.methods import method
from orthocond.lab.models import build
from orthocond.nn import DecorrelatedBatchNorm2d

__all__ = ["PAPER", "Cell", "cells", "measure"]

PAPER = {
    "svd": (44, 95),
    "svd+nog": (44, 97),
    "svd+olr": (44, 96),
    "svd+ow": (48, 102),
    "svd+nog+ow+olr": (49, 106),
    "newton_schulz": (43, 93),
    "bn": (42, 90),
}
"""Milliseconds forward and backward in Table 6, on an RTX A6000."""

_MONITORED = "svd, monitored"


@dataclass(frozen=True)
class Cell:
    """``"step"`` for whole training steps, ``"added"`` for what each treatment adds to one."""

    subject: str


def cells(*, quick: bool) -> Iterator[Cell]:  # noqa: ARG001  # that of every subject; quick takes both, too
    """Yield both."""
    yield from (Cell("step"), Cell("added"))


def measure(cell: Cell, *, quick: bool) -> list[dict[str, Any]]:
    """Return a record for each method."""
    torch.manual_seed(0)
    return _steps(quick=quick) if cell.subject == "step" else _added(quick=quick)


def _steps(*, quick: bool) -> list[dict[str, Any]]:
    network, batch = ("resnet-small", 4) if quick else ("resnet50", 32)
    names = (*PAPER, "svd+gauge", _MONITORED)
    budget = Budget(0.0, fewest=2) if quick else Budget(0.0, fewest=8)
    passes = alternate({name: _step(name, network, batch) for name in names}, budget)
    records = []
    for name in names:
        record: dict[str, Any] = {"subject": "step", "method": name, "network": network, "batch_size": batch}
        for part, which in (("forward", 0), ("backward", 1), ("total", None)):
            record[part] = {base: spread(passes[name], passes[base], which)._asdict() for base in ("svd", "bn")}
        if name in PAPER:
            record["paper"] = {base: sum(PAPER[name]) / sum(PAPER[base]) for base in ("svd", "bn")}
            record["paper"] |= {"forward_ms": PAPER[name][0], "backward_ms": PAPER[name][1]}
        records.append(record)
    return records


def _step(name: str, network: str, batch: int) -> Contestant:
    """Return the training step of a method; the optimizer's part counts as backward, as treatments act there."""
    chosen = method(name.partition(",")[0])
    options: dict[str, Any] = {}
    if chosen.solver == "newton_schulz":
        options = {"solver": "newton_schulz", "eps": 1e-2}
    stem = "bn" if chosen.solver is None else "dbn"
    model = build(network, num_classes=100, small_images=True, stem=stem, **options)
    treatment = orthocond.treat(model, "conv1", chosen.treatment)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    treatment.attach(optimizer)
    if name == _MONITORED:
        orthocond.ConditionMonitor(model)
    x, y = torch.randn(batch, 3, 32, 32), torch.randint(100, (batch,))

    def step() -> Iterator[None]:
        loss = F.cross_entropy(model(x), y) + treatment.penalty()
        yield
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield

    return step


def _added(*, quick: bool) -> list[dict[str, Any]]:
    """Return the seconds that each treatment adds to a step: of the stem alone, with it and without it.

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
    conv.weight.data *= torch.linspace(1.0, spread, 27).view(1, 3, 3, 3)  # for a condition number that gauge acts on
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
        model(x).backward(g)  # not of the mean square: that of a whitened output is constant
        optimizer.step()
        yield

    return step
