"""In which precision to compute, and how to come back from it."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from orthocond._core.applying import applied, with_forward_mode

__all__ = ["at_least_float32", "autocast_off", "finite", "finite_", "lift", "narrow", "real_dtype", "widen"]


_NOTHING = nullcontext()
_REAL = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}


def widen(A: Tensor) -> Tensor:
    """Return ``A`` in float64, or complex128: on its device, or on the CPU where the device has no float64 (MPS)."""
    wide = A if A.device.type != "mps" else A.cpu()
    return wide.to(torch.complex128) if A.is_complex() else wide.double()


def narrow(A: Tensor, like: Tensor) -> Tensor:
    """Return ``A`` in dtype and on the device of ``like``; what is too large becomes the largest number, not infinity.

    >>> narrow(torch.tensor([1e-3, 1e300], dtype=torch.float64), torch.zeros(1))
    tensor([1.0000e-03, 3.4028e+38])
    """
    if A.dtype == like.dtype:
        return A
    return finite(A.to(like))


def finite(A: Tensor) -> Tensor:
    """Return ``A`` with what is infinite, because its dtype can't hold it, as the largest number of that sign."""
    largest = torch.finfo(A.dtype).max
    if A.is_complex():
        return torch.view_as_complex(torch.view_as_real(A.resolve_conj()).clamp(-largest, largest))
    return A.clamp(-largest, largest)


def finite_(A: Tensor) -> Tensor:
    """Do the same in place, for which there is no batching rule."""
    if A.is_complex():
        return A.copy_(finite(A))
    largest = torch.finfo(A.dtype).max
    return A.clamp_(-largest, largest)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return ``dtype``, with the half types lifted to float32."""
    return torch.promote_types(dtype, torch.float32)


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the parts of a complex number, and a real ``dtype`` itself.

    It is `torch.dtype.to_real`, which `torch.compile` can't trace.
    """
    return _REAL.get(dtype, dtype)


def lift(A: Tensor, scale: Tensor | None = None) -> Tensor:
    """Return ``A`` in float32 at least, times ``scale``; its gradient comes back without overflow to infinity."""
    if scale is None and A.dtype == at_least_float32(A.dtype):
        return A
    lifted: Tensor = applied(_Lift, A, A.new_ones(()) if scale is None else scale)
    return lifted


@with_forward_mode
class _Lift(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(A: Tensor, scale: Tensor) -> Tensor:
        return A.to(at_least_float32(A.dtype)) * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        A, scale = inputs
        ctx.dtype = A.dtype
        ctx.save_for_backward(scale)
        ctx.save_for_forward(scale)

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> tuple[Tensor, None]:
        (scale,) = ctx.saved_tensors
        return finite((G * scale).to(ctx.dtype)), None

    @staticmethod
    def tangent(ctx: Any, saved: tuple[Tensor], direction: Tensor, _: None) -> Tensor:
        (scale,) = saved
        return direction.to(at_least_float32(ctx.dtype)) * scale


def autocast_off(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which autocast does not lower products; free where it isn't on."""
    kind = device.type
    if (kind == "cpu" or torch.amp.is_autocast_available(kind)) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return _NOTHING
