"""Applying a `torch.autograd.Function` to small matrices, where what surrounds it counts."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

try:
    from torch._functorch.utils import unwrap_dead_wrappers
except ImportError:  # a private name, of another version of torch: then the public way it is
    unwrap_dead_wrappers = None  # type: ignore[assignment]

__all__ = ["applied", "changeable", "is_plain"]


def is_plain() -> bool:
    """Return whether operations just run: no compiler, no tracer and no transform of `torch.func` looks on."""
    return not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or torch._C._is_tracing())


def changeable(y: Tensor) -> Tensor:
    """Return ``y`` so that it can be changed in place, as the outputs of torch's own layers can.

    Autograd forbids changing a view that was made without gradients once they are on again; detached, it is no view.
    """
    return y.detach() if _is_plain_inference() else y


def _is_plain_inference() -> bool:
    """Return whether operations just run and no derivative, backward or forward, can be asked for."""
    return is_plain() and not torch.is_grad_enabled() and forward_ad._current_level < 0


def applied(function: type[torch.autograd.Function], *inputs: Any) -> Any:
    """Return ``function.apply(*inputs)`` for inputs that are complete and in order.

    `torch.autograd.Function.apply` reads the signature of ``forward`` anew each time, to fill in defaults that it
    hasn't; at 64x64 that costs a tenth of the decomposition.
    """
    if unwrap_dead_wrappers is None or not is_plain():
        return function.apply(*inputs)
    if _is_plain_inference():
        return function.forward(*unwrap_dead_wrappers(inputs))
    return super(torch.autograd.Function, function).apply(*unwrap_dead_wrappers(inputs))  # type: ignore[misc]  # C code
