"""What `torch.compile` has to know of us: functions hidden from it, and hooks that it must notice."""

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

__all__ = ["HookNotice", "uncompiled"]

P = ParamSpec("P")
R = TypeVar("R")

_NOTICES: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function`` as `torch.compiler.disable` does, which by itself would load the compiler on import."""
    disabled: list[Callable[P, R]] = []

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if disabled:
            return disabled[0](*args, **kwargs)
        hidden: Callable[P, R] = torch.compiler.disable(function)
        if not torch.compiler.is_compiling():  # the compiler of torch 2.8 traces this function, and can't the next line
            disabled.append(hidden)
        return hidden(*args, **kwargs)

    wrapper._torchdynamo_disable = True  # type: ignore[attr-defined]
    return wrapper


class HookNotice:
    """Makes code that was compiled before a layer had hooks notice them; `remove` takes it back.

    `torch.compile` does not check that a layer still has no hooks. So code that it compiled earlier for the model, or
    for another model of the same class, would run without them. It does check that the layer has no ``forward`` of its
    own beside that of its class: a second reference to the same method is enough to have the code compiled again.

    Create one after registering forward hooks, and remove it with them.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer: nn.Module | None = layer
        if "forward" not in vars(layer):
            layer.forward = layer.forward
            _NOTICES[layer] = 0
        if layer in _NOTICES:
            _NOTICES[layer] += 1

    def remove(self) -> None:
        """Take the notice back; the last one of a layer leaves it as it was."""
        layer, self._layer = self._layer, None
        if layer is None or layer not in _NOTICES:
            return
        _NOTICES[layer] -= 1
        if _NOTICES[layer] == 0:
            del _NOTICES[layer]
            vars(layer).pop("forward", None)
