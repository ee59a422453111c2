"""Functions that take part in PyTorch's protocol for overriding functions."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch.overrides import handle_torch_function, has_torch_function

__all__ = ["overridable"]

P = ParamSpec("P")
R = TypeVar("R")


def overridable(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function`` such that ``__torch_function__`` of a mode or a tensor subclass sees one call of it.

    What the function does inside is then invisible to the mode, as the inside of torch's own functions is.

    Example:
        >>> import torch
        >>> from torch.overrides import TorchFunctionMode
        >>> class Names(TorchFunctionMode):
        ...     def __torch_function__(self, function, types, args=(), kwargs=None):
        ...         print(function.__name__)
        ...         return function(*args, **(kwargs or {}))
        >>> @overridable
        ... def twice(x):
        ...     return x + x
        >>> x = torch.ones(2)
        >>> with Names():
        ...     _ = twice(x)
        twice
    """

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if has_torch_function(args):
            result: Any = handle_torch_function(wrapper, args, *args, **kwargs)
            return result  # type: ignore[no-any-return]
        return function(*args, **kwargs)

    return wrapper
