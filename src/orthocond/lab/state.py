"""The state of a run: everything that a checkpoint holds, and how it is saved and restored."""

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, cast

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from orthocond.lab.config import Config
from orthocond.lab.data import Data, Part
from orthocond.lab.network import network, pre_svd_parameters
from orthocond.lab.randomness import random_state, seed_all, set_random_state
from orthocond.lab.records import last_step
from orthocond.lab.runs import RunError, RunFolder, read_status, start_over_command

__all__ = ["RunState", "learning_rate_factor"]


class RunState:
    """A run at a step: network and treatment, optimizer and schedule, the epoch's totals, the random generators.

    Several processes have one each, and save and restore together.
    """

    def __init__(self, fabric: Fabric, config: Config, data: Data) -> None:
        self.fabric, self.config = fabric, config
        self.part = Part(fabric.global_rank, fabric.world_size)
        self.steps_per_epoch = data.num_train // config.batch_size
        whole = config.epochs * self.steps_per_epoch
        self.total_steps = whole if config.steps is None else min(config.steps, whole)
        self.num_epochs = math.ceil(self.total_steps / self.steps_per_epoch)
        self.step = 0

        seed_all(config.seed)
        self.network, self.treatment = network(config, data, sync=fabric.world_size > 1)
        self.plain_optimizer = _optimizer(config, self.network, data)
        if self.treatment is not None:
            self.treatment.attach(self.plain_optimizer)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.plain_optimizer, learning_rate_factor(config, self.steps_per_epoch, self.total_steps)
        )
        self.model, self.optimizer = fabric.setup(self.network, self.plain_optimizer)
        self.totals = torch.zeros(
            4, dtype=torch.float32 if fabric.device.type == "mps" else torch.float64, device=fabric.device
        )

    def checkpoint(self) -> dict[str, Any]:
        """Return what a checkpoint holds, but for the sizes of the files; every process has to call it."""
        random_states = torch.zeros(self.fabric.world_size, torch.get_rng_state().numel())
        random_states[self.part.rank] = torch.get_rng_state()
        random_states = self.reduced(random_states, "sum").cpu().to(torch.uint8)
        return {
            "config": asdict(self.config),
            "step": self.step,
            "model": self.network.state_dict(),
            "optimizer": self.plain_optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "treatment": self.treatment.state_dict() if self.treatment is not None else None,
            "precision": self.fabric.strategy.precision.state_dict(),
            "random": {"torch": random_states, **random_state()},
            "totals": torch.tensor(self.summed(self.totals), dtype=torch.float64),
        }

    def restore(self, folder: RunFolder | None) -> str:
        """Go back to the newest checkpoint that can be used, or to the beginning if none was ever written.

        A run that says that it is finished is finished, whatever is missing. Every process has to call it; the folder
        is the first one's.

        Returns:
            what was done, for the warnings about what is damaged.

        Raises:
            RunError: none of the checkpoints that were written can be used; nothing is changed.
        """
        if self.fabric.broadcast(folder is not None and self._says_finished(folder)):
            self.step = self.total_steps
            return "the run is finished"
        states = iter(()) if folder is None else folder.checkpoints(self.config, self.total_steps)
        while True:
            file, state = self.fabric.broadcast(next(states, (None, None)))
            if state is None:
                break
            try:
                self.load(state)
            except Exception as error:  # what somebody made up can fail in any way
                if folder is not None:
                    reason = " ".join(str(error).split())[:200]
                    folder.warnings.append(f"{file} can't be loaded ({reason}) and is not used")
                continue
            if folder is not None:
                folder.cut(state["sizes"])
            self.step = state["step"]
            return f"continuing from step {self.step}"
        problem = None if folder is None else self._restore_without(folder)
        if (problem := self.fabric.broadcast(problem)) is not None:
            raise RunError(problem)
        self.step = self.fabric.broadcast(self.step)
        return "its checkpoints are gone" if self.step else "starting over"

    def load(self, state: dict[str, Any]) -> None:
        """Load the state from a checkpoint."""
        self.network.load_state_dict(state["model"])
        self.plain_optimizer.load_state_dict(state["optimizer"])
        # A run of version 0.1 has one more group, for olr, with the schedule of the others.
        num_groups = len(self.plain_optimizer.param_groups)
        of_groups = {
            name: each[:num_groups] if isinstance(each, list) else each for name, each in state["scheduler"].items()
        }
        self.scheduler.load_state_dict(of_groups)
        if self.treatment is not None:
            self.treatment.load_state_dict(state["treatment"])
        self.fabric.strategy.precision.load_state_dict(state["precision"])
        if self.fabric.is_global_zero:
            self.totals.copy_(state["totals"])
        states = state["random"]["torch"]
        torch.set_rng_state(states[min(self.part.rank, len(states) - 1)].clone())  # torch takes no view
        set_random_state(state["random"])

    def summed(self, totals: Tensor) -> list[float]:
        """Return totals over all processes."""
        values: list[float] = self.reduced(totals.clone(), "sum").tolist()
        return values

    def reduced(self, value: Tensor, how: str) -> Tensor:
        """Return the ``"sum"`` or ``"mean"`` of a tensor over all processes."""
        return cast(Tensor, self.fabric.all_reduce(value.to(self.fabric.device), reduce_op=how))

    def _says_finished(self, folder: RunFolder) -> bool:
        status = read_status(folder.path)
        return status.get("state") == "finished" and status.get("step") == self.total_steps

    def _restore_without(self, folder: RunFolder) -> str | None:
        """Continue without a checkpoint, if no run is lost by it; otherwise return why not, and what to do."""
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
                f"copy, or start over with: {start_over_command(self.config, folder.path)}"
            )
        folder.cut({"metrics.jsonl": 0, "times.jsonl": 0})
        return None


def _optimizer(config: Config, network: nn.Module, data: Data) -> torch.optim.Optimizer:
    """Return the optimizer of a configuration for a network; the Pre-SVD layer's parameters are in the last group."""
    groups: list[dict[str, Any]] = [{"params": list(network.parameters())}]
    if config.pre_svd_rate is not None and config.method != "bn":
        treated = pre_svd_parameters(network, data)
        others = [parameter for parameter in network.parameters() if all(parameter is not each for each in treated)]
        groups = [{"params": others}, {"params": treated, "lr": config.pre_svd_rate}]
    options: dict[str, Any] = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    if config.optimizer == "adamw":
        return torch.optim.AdamW(groups, betas=(config.momentum, 0.999), **options)
    return torch.optim.SGD(groups, momentum=config.momentum, **options)


def learning_rate_factor(config: Config, steps_per_epoch: int, total_steps: int) -> Callable[[int], float]:
    """Return the function from the number of steps taken to the factor of the initial learning rate."""
    if config.schedule == "linear":
        return lambda step: 1 - 0.99 * min(step / total_steps, 1.0)
    return lambda step: config.gamma ** sum(step >= epoch * steps_per_epoch for epoch in config.milestones)
