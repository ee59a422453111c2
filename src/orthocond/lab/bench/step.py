"""What the treatments and the monitor add to a training step (Table 6 of the paper), measured side by side.

Run it with ``python -m orthocond.lab.bench.step``. First the CIFAR ResNet-50 of the paper, one network and optimizer
for each method, steps in turns within this run, each method's step against that of ``svd``. A step of seconds varies by
more than the treatments cost, so then what each of them adds is timed by itself, in percent of the step.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

import orthocond
from orthocond.lab.bench.measure import alternate
from orthocond.lab.models import build
from orthocond.nn import DecorrelatedBatchNorm2d

__all__ = ["main"]

BASELINES = {"monitored": "unwatched", "gauge, idle": "no gauge", "gauge, applied": "no gauge"}
"""What each is compared with, where that is not svd."""
METHODS = {"svd": "none", "svd+nog": "nog", "svd+olr": "olr", "svd+ow": "ow", "svd+nog+ow+olr": "nog+ow+olr"}
PAPER = {"svd": 0.0, "svd+nog": 1.4, "svd+olr": 0.7, "svd+ow": 7.9, "svd+nog+ow+olr": 11.5}
"""The paper's overhead in percent of a step with svd."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.manual_seed(0)
    contestants = {name: _step(spec, options.batch) for name, spec in METHODS.items()}
    contestants["svd+gauge"] = _step("gauge", options.batch)
    contestants["svd, monitored"] = _step("none", options.batch, monitored=True)
    contestants["bn"] = _step(None, options.batch)
    seconds = alternate(contestants, repeats=options.repeats, warmup=1)
    base = seconds["svd"]
    threads = torch.get_num_threads()
    print(f"CIFAR ResNet-50, batch {options.batch}, {threads} threads, {options.repeats} steps each in turns")
    print(f"{'method':16} {'best s':>7} {'median s':>9} {'best vs svd':>12} {'paired median':>14} {'paper':>7}")
    for name, times in seconds.items():
        best = 100 * (min(times) / min(base) - 1)
        paired = 100 * (statistics.median(own / other for own, other in zip(times, base, strict=True)) - 1)
        paper = f"{PAPER[name]:+.1f}%" if name in PAPER else ""
        print(f"{name:16} {min(times):7.3f} {statistics.median(times):9.3f} {best:+11.2f}% {paired:+13.2f}% {paper:>7}")

    _added(statistics.median(base))


def _added(step: float) -> None:
    """Print what is added to a step of so many seconds, each timed with and without on the layer alone."""
    contestants: dict[str, Callable[[], object]] = {}
    for name, spec in METHODS.items():
        conv = torch.nn.Conv2d(3, 64, 3, padding=1, bias=False)
        treatment = orthocond.treat(torch.nn.Sequential(conv), "0", spec)
        optimizer = torch.optim.SGD(conv.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
        treatment.attach(optimizer)
        contestants[name] = partial(_weight_and_step, conv, optimizer, torch.randn_like(conv.weight))
    for name in ("unwatched", "monitored"):
        norm = DecorrelatedBatchNorm2d(64)
        if name == "monitored":
            orthocond.ConditionMonitor(norm)
        contestants[name] = partial(norm, torch.randn(2, 64, 8, 8))
    for name, spec, threshold in (
        ("no gauge", "none", 1.0),
        ("gauge, idle", "gauge", 1e9),
        ("gauge, applied", "gauge", 1.0),
    ):
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 64, 3, bias=False), DecorrelatedBatchNorm2d(64, affine=False))
        treatment = orthocond.treat(model, "0", spec, threshold=threshold)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        treatment.attach(optimizer)
        contestants[name] = partial(_forward_and_step, model, optimizer, torch.randn(8, 3, 10, 10))
    best = {name: min(times) for name, times in alternate(contestants, repeats=200, warmup=5).items()}
    print(f"\nadded to a step of {step:.2f} s, best of 200")
    for name, value in best.items():
        added = value - best[BASELINES.get(name, "svd")]
        if added and name not in BASELINES.values():
            print(f"{name:16} {1e3 * added:6.2f} ms  {100 * added / step:+.3f}%")


def _weight_and_step(conv: torch.nn.Conv2d, optimizer: torch.optim.Optimizer, gradient: torch.Tensor) -> None:
    """Make the weight, send a gradient back through it, and take the optimizer's step."""
    optimizer.zero_grad()
    conv.weight.backward(gradient)
    optimizer.step()


def _forward_and_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    """Whiten the layer's output, send a gradient back through it, and take the optimizer's step."""
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()


def _step(spec: str | None, batch: int, *, monitored: bool = False) -> Callable[[], object]:
    model = build("resnet50", num_classes=100, small_images=True, stem="bn" if spec is None else "dbn")
    treatment = orthocond.treat(model, "conv1", spec or "none")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    treatment.attach(optimizer)
    x, y = torch.randn(batch, 3, 32, 32), torch.randint(100, (batch,))
    if monitored:
        orthocond.ConditionMonitor(model)

    def step() -> None:
        loss = F.cross_entropy(model(x), y) + treatment.penalty()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    main()
