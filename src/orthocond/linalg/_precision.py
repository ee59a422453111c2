"""In which precision to compute, and how to come back from it."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

__all__ = ["at_least_float32", "autocast_off", "has_float64", "narrow", "widest"]


def has_float64(device: torch.device) -> bool:
    """Return whether tensors on ``device`` can be float64."""
    return device.type != "mps"


def widest(A: Tensor) -> torch.dtype:
    """Return float64 where the device of ``A`` has it, else float32."""
    return torch.float64 if has_float64(A.device) else torch.float32


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return ``dtype``, with the half types lifted to float32."""
    return torch.promote_types(dtype, torch.float32)


def narrow(A: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``A`` in ``dtype``; what is too large for it becomes its largest number rather than infinity.

    >>> narrow(torch.tensor([1e-3, 1e300], dtype=torch.float64), torch.float32)
    tensor([1.0000e-03, 3.4028e+38])
    """
    if A.dtype == dtype:
        return A
    largest = torch.finfo(dtype).max
    return A.clamp(-largest, largest).to(dtype)


def autocast_off(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which autocast does not lower products; free where it isn't on."""
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
