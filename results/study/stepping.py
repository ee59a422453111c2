"""The study's training for measurements of its own: the networks, data and settings of the runs, step by step."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from records import HERE
from torch import nn

from orthocond.lab.config import Config, changed, from_toml
from orthocond.lab.data import Data, Part
from orthocond.lab.network import network
from orthocond.lab.presets import preset
from orthocond.lab.state import learning_rate_factor
from orthocond.treatments import Treatment

CPU = torch.device("cpu")

Vary = Callable[[nn.Module, Treatment | None, torch.optim.Optimizer], None]
"""What is done once before the first step, when the treatment is attached."""


def study_config(data: str, steps: int) -> Config:
    """Return the study's configuration of the stem of 64 channels."""
    settings = from_toml(HERE / "settings.toml") | {"data": data, "width": 64, "steps": steps}
    return changed(preset("dbn-cifar10-small"), settings)


def stepping(config: Config, data: Data, vary: Vary | None = None) -> Iterator[tuple[int, nn.Module, float]]:
    """Train, and yield each step's number, the network after it and its loss; the rate falls as over 1,000 steps."""
    torch.manual_seed(config.seed)
    model, treatment = network(config, data, sync=False)
    optimizer = torch.optim.SGD(
        model.parameters(), config.learning_rate, config.momentum, weight_decay=config.weight_decay
    )
    if treatment is not None:
        treatment.attach(optimizer)
    if vary is not None:
        vary(model, treatment, optimizer)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor(config, 1000, 1000))
    model.train()
    for step, (x, y) in enumerate(data.train_batches(1, 0, Part(), CPU), 1):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        schedule.step()
        yield step, model, loss.item()
        if step == config.steps:
            return
    raise SystemExit("too few images for so many steps")
