"""The study's runs for measurements of their own: as the laboratory trains, step by step."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from records import HERE

from orthocond.lab.config import Config, changed, from_toml
from orthocond.lab.data import load_data
from orthocond.lab.engine import start_fabric
from orthocond.lab.presets import preset
from orthocond.lab.state import RunState

CPU = torch.device("cpu")

Vary = Callable[[RunState], None]
"""What is done once before the first step, when the treatment is attached."""


def study_config(data: str) -> Config:
    """Return the study's configuration of the stem of 64 channels."""
    return changed(preset("dbn-cifar10-small"), from_toml(HERE / "settings.toml") | {"data": data, "width": 64})


def stepping(config: Config, vary: Vary | None = None) -> Iterator[tuple[RunState, float]]:
    """Train, and yield the state after each step and the loss in it.

    Weights, batches and schedule are those of `orthocond.lab.train` with this configuration.
    """
    data = load_data(config)  # for this seed: order and augmentation follow from it
    state = RunState(start_fabric(config), config, data)
    if vary is not None:
        vary(state)
    state.model.train()
    while state.step < state.total_steps:
        epochs, start = divmod(state.step, state.steps_per_epoch)
        for x, y in data.train_batches(epochs + 1, start, state.part, CPU):
            loss = F.cross_entropy(state.model(x), y)
            penalty = state.treatment.penalty() if state.treatment is not None else 0.0
            state.optimizer.zero_grad()
            (loss + penalty).backward()
            state.optimizer.step()
            state.scheduler.step()
            state.step += 1
            yield state, loss.item()
            if state.step == state.total_steps:
                return
