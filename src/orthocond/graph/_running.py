"""Running a model on an example without leaving a trace on it."""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["arguments", "call", "evaluating", "mapped", "random_state_kept", "tensors", "unwrapped"]


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside DDP and `torch.compile`."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


@contextmanager
def evaluating(model: nn.Module) -> Iterator[list[Any]]:
    """Put the model in eval mode, with nothing frozen, within a context.

    At the end modes and frozen parameters are as before, and the hooks that the caller put in the list are removed.
    """
    modes = {module: module.training for module in model.modules()}
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    handles: list[Any] = []
    try:
        model.eval()
        for parameter in frozen:
            parameter.requires_grad_(parameter.is_floating_point())
        yield handles
    finally:
        for handle in handles:
            handle.remove()
        for parameter in frozen:
            parameter.requires_grad_(False)
        for module, training in modes.items():
            module.training = training


def call(model: nn.Module, example: Any) -> Any:
    """Return the model's output for an example input, as `arguments` reads it."""
    args, kwargs = arguments(model, example)
    with random_state_kept(model):
        return model(*args, **kwargs)


def random_state_kept(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context after which the random generators of the CPU and of the model's GPUs are as before."""
    devices = {parameter.device for parameter in (*model.parameters(), *model.buffers()) if parameter.is_cuda}
    return torch.random.fork_rng(devices=list(devices))


def arguments(model: nn.Module, example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments that an example input represents.

    A tuple holds positional arguments. A mapping holds keyword arguments if the signature of ``forward`` accepts them,
    and is the only argument otherwise (``model(batch)``). Anything else is the only argument. Floating tensors require
    grad, so that the graph begins with them.

    Example:
        >>> arguments(nn.Linear(1, 1), {"input": 3})  # forward(self, input)
        ((), {'input': 3})
        >>> arguments(nn.Linear(1, 1), {"pixels": 3})
        (({'pixels': 3},), {})
    """
    example = mapped(_tracked, example)
    if isinstance(example, tuple) and not hasattr(example, "_fields"):
        return example, {}
    if isinstance(example, Mapping) and all(isinstance(name, str) for name in example):
        try:
            inspect.signature(model.forward).bind(**example)
        except TypeError:
            return (example,), {}
        return (), dict(example)
    return (example,), {}


def _tracked(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor


def mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return a nest of tuples, lists and mappings with ``function`` applied to each tensor in it."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, MutableMapping):
        changed = copy.copy(value)
        for key, part in value.items():
            changed[key] = mapped(function, part)
        return changed
    if isinstance(value, tuple | list):
        parts = [mapped(function, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors in a nest of tuples, lists and mappings."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = tuple(value.values())
    return [tensor for part in value for tensor in tensors(part)] if isinstance(value, tuple | list) else []
