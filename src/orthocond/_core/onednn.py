"""Products of float32 matrices by oneDNN, on processors where MKL leaves half of their speed unused.

On AMD's processors MKL takes its AVX2 kernels, whatever the processor can do. oneDNN, which torch has for convolutions
and for compiled linear layers, takes AVX-512: on an AMD EPYC (family 26) it reaches 268 GFLOP/s for each core where MKL
reaches 120. Both round as float32 does.
"""

import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from orthocond._core import private
from orthocond._core.applying import is_unwatched

__all__ = ["is_faster", "linear"]


def is_faster(*tensors: Tensor) -> bool:
    """Return whether `linear` takes these tensors, and in less time than ``@``: no derivative can be asked for."""
    return (
        is_unwatched(*tensors)
        and _linear() is not None
        and all(each.dtype == torch.float32 for each in tensors)
        and bool(getattr(torch.backends.mkldnn, "enabled", True))
        # Else float32 may mean bfloat16 to oneDNN.
        and private.float32_products_are_exact()
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x weight^T + bias`` of matrices ``(m, k)`` and ``(n, k)``; ``x`` is copied unless it is contiguous."""
    function = _linear()
    assert function is not None
    # Strides of x and of the weight are respected, those of the bias aren't.
    return function(x, weight, None if bias is None else bias.contiguous(), "none", [], "")


@functools.cache
def _linear() -> Callable[..., Tensor] | None:
    """Return oneDNN's linear layer where it is faster than MKL: with AVX-512 on a processor of AMD's."""
    has_avx512 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    function = private.onednn_linear() if has_avx512 and _is_from_amd() else None
    return function if function is not None and _works(function) else None


def _works(function: Callable[..., Tensor]) -> bool:
    """Return whether a function of torch's that may change with any release still is what is expected here."""
    x, weight, bias = (torch.ones(shape, dtype=torch.float32, device="cpu") for shape in ((2, 3), (4, 3), (4,)))
    try:
        return torch.equal(function(x, weight, bias, "none", [], ""), x @ weight.mT + bias)
    except (RuntimeError, TypeError):
        return False


def _is_from_amd() -> bool:
    """Return whether the processor is AMD's; False where the system doesn't tell."""
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
