"""What a treatment needs of an optimizer: the one inside of wrappers, the parameter's group, a group of its own."""

from typing import Any

import torch
from torch import Tensor, nn

from orthocond.errors import ArgumentError

__all__ = ["group_of", "split_group", "unwrapped_optimizer"]

# What a scheduler of torch holds for each parameter group.
_FOR_EACH_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums")


def unwrapped_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer that takes the steps: the one inside of Accelerate's or Fabric's.

    Raises:
        ArgumentError: there is none, or it is LBFGS, which takes several steps in one.
    """
    inner = getattr(optimizer, "optimizer", None)
    while isinstance(inner, torch.optim.Optimizer) and inner is not optimizer:
        optimizer, inner = inner, getattr(inner, "optimizer", None)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(
            f"attach expected an optimizer of torch, or one that wraps it as `.optimizer`, got "
            f"{type(optimizer).__name__}; pass the optimizer itself."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ArgumentError(
            "LBFGS evaluates many gradients in a step, which a treatment can't act on; use another one."
        )
    return optimizer


def group_of(parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Return the optimizer's group that holds this very parameter."""
    for group in optimizer.param_groups:
        if any(other is parameter for other in group["params"]):
            return group
    return None


def split_group(name: str, parameter: nn.Parameter, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    """Give a parameter a group of its own, with the settings of the group that it is in, where it isn't alone.

    Raises:
        ArgumentError: a scheduler has been made for the groups as they are, and isn't given, or belongs elsewhere.
    """
    groups = optimizer.param_groups
    place = next(i for i, group in enumerate(groups) if any(other is parameter for other in group["params"]))
    group = groups[place]
    if len(group["params"]) == 1:
        return
    if scheduler is None and "initial_lr" in group:
        raise ArgumentError(
            f"olr gives the parameter of {name!r} a group of its own, and a scheduler has been made for the groups as "
            "they are; pass it, attach(optimizer, scheduler=scheduler), or attach the treatment before you make it."
        )
    schedulers = [] if scheduler is None else _all_schedulers(scheduler)
    for one in schedulers:
        if unwrapped_optimizer(getattr(one, "optimizer", None)) is not optimizer:
            raise ArgumentError("attach got a scheduler of another optimizer; pass the one that was made for this one.")
    index = next(i for i, other in enumerate(group["params"]) if other is parameter)
    own: Any = group["params"].pop(index)
    if "param_names" in group:  # an optimizer of named parameters
        own = (group["param_names"].pop(index), own)
    num_groups = len(groups)
    optimizer.add_param_group({"params": [own], **{k: _own(v) for k, v in group.items() if not k.startswith("param")}})
    for one in schedulers:
        for values in (vars(one).get(key) for key in _FOR_EACH_GROUP):
            if isinstance(values, list) and len(values) == num_groups:
                values.append(_own(values[place]))


def _own(value: Any) -> Any:
    """Return a setting for another group: a rate that is a tensor is each group's own."""
    return value.clone() if isinstance(value, Tensor) else value


def _all_schedulers(scheduler: Any) -> list[Any]:
    """Return a scheduler, and those that it is made of."""
    if not hasattr(scheduler, "optimizer") and hasattr(scheduler, "scheduler"):  # Accelerate's
        scheduler = scheduler.scheduler
    inner = [found for one in getattr(scheduler, "_schedulers", []) for found in _all_schedulers(one)]
    return [scheduler, *inner]
