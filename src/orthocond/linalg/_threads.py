"""Eigenvectors of many small matrices on the CPU, divided among threads.

LAPACK takes a batch one matrix after the other and lets its threads share each, and a small one gives them little to
share. Here every thread takes a part of the batch, and LAPACK is told, in that thread and for that while, to use no
others. What a caller has set for itself, and what its own threads do, is not touched.
"""

import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from orthocond._core import private

__all__ = ["eigh"]

_LARGEST = 128
"""Above this, the threads of one matrix pay."""
_WORTHWHILE = 15_000_000
"""Cubed sizes, summed over a batch, from which on it is divided: some ten milliseconds, less is over too soon."""

_pool: ThreadPoolExecutor | None = None


def eigh(A: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `torch.linalg.eigh` returns; matrices that are small and on the CPU are taken in parallel."""
    n, num_threads = A.shape[-1], torch.get_num_threads()
    worthwhile = num_threads > 1 and n <= _LARGEST and A.numel() * n >= _WORTHWHILE
    if not worthwhile or not _is_plain(A) or _set_threads_here() is None:
        eigenvalues, eigenvectors = torch.linalg.eigh(A)
        return eigenvalues, eigenvectors
    first, *rest = A.reshape(-1, n, n).tensor_split(num_threads)
    waiting = [_threads(num_threads - 1).submit(_alone, part) for part in rest]
    done = [_alone(first), *(part.result() for part in waiting)]
    eigenvalues, eigenvectors = (torch.cat(pieces) for pieces in zip(*done, strict=True))
    return eigenvalues.reshape(A.shape[:-1]), eigenvectors.reshape(A.shape)


def _alone(A: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad(), _one_thread():
        eigenvalues, eigenvectors = torch.linalg.eigh(A)
        return eigenvalues, eigenvectors


def _is_plain(A: Tensor) -> bool:
    """Return whether another thread may work on it: nothing watches the operations of this one."""
    return (
        A.device.type == "cpu"
        and type(A) is Tensor
        and not private.is_transformed(A)
        and not private.num_dispatch_modes()
        and not torch.is_inference_mode_enabled()
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let MKL use one thread when it is called by this one."""
    set_threads = _set_threads_here()
    assert set_threads is not None
    before = set_threads(1)
    try:
        yield
    finally:
        set_threads(before)


@functools.cache
def _set_threads_here() -> Callable[[int], int] | None:
    """Return MKL's function that sets the number of threads for the calling thread alone, if PyTorch brought MKL."""
    if not torch.backends.mkl.is_available():
        return None
    for name in ("libtorch_cpu.so", "torch_cpu.dll", "libtorch_cpu.dylib"):
        try:
            found = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name)).MKL_Set_Num_Threads_Local
        except (OSError, AttributeError):
            continue
        found.argtypes, found.restype = [ctypes.c_int], ctypes.c_int
        return found
    return None


def _threads(number: int) -> ThreadPoolExecutor:
    """Return the threads, as many as are asked for at least."""
    global _pool
    if _pool is None or _pool._max_workers < number:
        _pool = ThreadPoolExecutor(number, thread_name_prefix="orthocond")
    return _pool


def _forget_threads() -> None:
    global _pool
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)  # a forked process has none of its parent's threads
