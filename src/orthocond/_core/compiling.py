"""Hiding a function from `torch.compile` without loading the compiler."""

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

__all__ = ["uncompiled"]

P = ParamSpec("P")
R = TypeVar("R")


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function`` as `torch.compiler.disable` does, which by itself would load the compiler on import."""
    disabled: list[Callable[P, R]] = []

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    wrapper._torchdynamo_disable = True  # type: ignore[attr-defined]
    return wrapper
