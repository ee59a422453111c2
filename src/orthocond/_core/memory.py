"""Memory for large results on the CPU, in large pages where Linux gives them on request.

The C library returns the memory of a large tensor to the system when it is freed, and the system hands it out again
page by page as it is written to: for 32 MB of 4 KB pages that takes six times as long as to write them.
"""

import ctypes
import functools
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from orthocond._core.applying import is_unwatched

__all__ = ["unfilled"]

_SMALLEST = 2**24
"""Bytes from which on it is worth the request."""
_PAGE = 2**21
_MADV_HUGEPAGE = 14


def unfilled(like: Tensor) -> Tensor:
    """Return what `torch.empty_like` returns; where it is large, in large pages.

    >>> unfilled(torch.ones(2, 3)).shape
    torch.Size([2, 3])
    """
    result = torch.empty_like(like)
    if result.nbytes >= _SMALLEST and is_unwatched(result) and (advise := _advise()) is not None:
        start, end = result.data_ptr(), result.data_ptr() + result.nbytes
        start, end = -(-start // _PAGE) * _PAGE, end // _PAGE * _PAGE
        advise(start, end - start, _MADV_HUGEPAGE)  # advice: if it isn't taken, nothing is lost
    return result


@functools.cache
def _advise() -> Callable[[int, int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
    return function
