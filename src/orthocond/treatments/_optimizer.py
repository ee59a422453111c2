"""What a treatment needs from an optimizer: the one inside wrappers, the parameter's group, a rate for one step."""

from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from orthocond.errors import ArgumentError

__all__ = ["StepRate", "check_scheduler", "group_of", "unwrapped_optimizer", "without_split_group"]

_FOR_EACH_PARAMETER = {"params", "param_names"}
"""What a parameter group holds for each parameter."""


def unwrapped_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer that takes the steps: the one inside Accelerate's or Fabric's.

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


def check_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    """Raise `ArgumentError` unless a scheduler, also one wrapped by Accelerate, acts on an optimizer."""
    if not hasattr(scheduler, "optimizer"):
        scheduler = getattr(scheduler, "scheduler", scheduler)
    if not hasattr(scheduler, "optimizer"):
        raise ArgumentError(f"attach expected a scheduler of torch, got {type(scheduler).__name__}; leave it out.")
    if unwrapped_optimizer(scheduler.optimizer) is not optimizer:
        raise ArgumentError("attach got a scheduler of another optimizer; pass the one that was made for this one.")


class StepRate:
    """A learning rate that one parameter has for one step.

    The parameter leaves its group, whose other parameters keep their rate, and is alone in a temporary group until
    `undo`. So no scheduler and no checkpoint ever sees another group or another rate.
    """

    _active: ClassVar[WeakKeyDictionary[torch.optim.Optimizer, list["StepRate"]]] = WeakKeyDictionary()
    """The rates of an optimizer that are in effect, in the order in which they were set."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter, rate: float) -> None:
        group = group_of(parameter, optimizer)
        assert group is not None
        self._rates = self._active.setdefault(optimizer, [])
        self._rates.append(self)
        self._groups, self._group, self._scheduled = optimizer.param_groups, group, group["lr"]
        self.rate: Any = torch.full_like(self._scheduled, rate) if isinstance(self._scheduled, Tensor) else rate
        self._own: dict[str, Any] | None = None
        if len(group["params"]) == 1:
            group["lr"] = self.rate
            return
        self._place = _place(parameter, group)
        self._own = {**group, "lr": self.rate}
        for key in _FOR_EACH_PARAMETER & group.keys():
            self._own[key] = [group[key].pop(self._place)]
        self._groups.append(self._own)

    def undo(self) -> None:
        """Put the scheduled rate back, and the parameter where it was; the rates that were set later go first."""
        while self in self._rates:
            self._rates.pop()._undo()

    def _undo(self) -> None:
        if self._own is None:
            if self._group["lr"] is self.rate:  # else somebody has set another one since, after a step that failed
                self._group["lr"] = self._scheduled
            return
        self._groups[:] = [group for group in self._groups if group is not self._own]
        for key in _FOR_EACH_PARAMETER & self._own.keys():
            self._group[key].insert(self._place, *self._own[key])


def without_split_group(
    parameter: nn.Parameter, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> dict[str, Any] | None:
    """Return an optimizer's state of version 0.1, in which ``olr`` had a group of its own, as it is saved today.

    Any other state is left to the optimizer: None.
    """
    saved, group = state["param_groups"], group_of(parameter, optimizer)
    if len(saved) != len(optimizer.param_groups) + 1 or len(saved[-1]["params"]) != 1 or group is None:
        return None
    merged = [dict(one) for one in saved[:-1]]
    number = next(i for i, one in enumerate(optimizer.param_groups) if one is group)
    for key in _FOR_EACH_PARAMETER & saved[-1].keys():
        merged[number][key] = list(merged[number][key])
        merged[number][key].insert(_place(parameter, group), *saved[-1][key])
    return {**state, "param_groups": merged}


def _place(parameter: nn.Parameter, group: dict[str, Any]) -> int:
    return next(i for i, other in enumerate(group["params"]) if other is parameter)
