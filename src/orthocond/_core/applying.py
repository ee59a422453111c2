"""Applying a `torch.autograd.Function` to small matrices, where what surrounds it counts."""

from typing import Any

import torch
from torch.autograd import forward_ad

try:
    from torch._functorch.utils import unwrap_dead_wrappers
except ImportError:  # a private name, of another version of torch: then the public way it is
    unwrap_dead_wrappers = None  # type: ignore[assignment]

__all__ = ["applied", "is_plain"]


def is_plain() -> bool:
    """Return whether operations just run: no compiler, no tracer and no transform of `torch.func` looks on."""
    return not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or torch._C._is_tracing())


def applied(function: type[torch.autograd.Function], *inputs: Any) -> Any:
    """Return ``function.apply(*inputs)`` for inputs that are complete and in order.

    `torch.autograd.Function.apply` reads the signature of ``forward`` anew each time, to fill in defaults that it
    hasn't; at 64x64 that costs a tenth of the decomposition.
    """
    if unwrap_dead_wrappers is None or not is_plain():
        return function.apply(*inputs)
    if not torch.is_grad_enabled() and forward_ad._current_level < 0:  # nobody can ask for a derivative
        return function.forward(*unwrap_dead_wrappers(inputs))
    return super(torch.autograd.Function, function).apply(*unwrap_dead_wrappers(inputs))  # type: ignore[misc]  # C code
