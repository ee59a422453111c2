"""Batches of small decompositions on all cores of a CPU.

LAPACK takes the matrices of a batch one after the other, each with all threads, which a small matrix can't use.
Here each thread takes a part of the batch instead.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

__all__ = ["over_batch"]

_LARGEST = 256
"""Above this size a single matrix keeps several threads busy."""

_pools: dict[int, ThreadPoolExecutor] = {}
_lock = threading.Lock()
# Threads don't survive a fork (a DataLoader's workers): the child starts with none.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pools.clear)


def over_batch(function: Callable[[Tensor], tuple[Tensor, Tensor]], A: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``function(A)`` for ``A`` ``(..., n, n)``, with parts of the batch computed side by side on a CPU."""
    num_threads = torch.get_num_threads()
    batch = A.shape[:-2].numel()
    if A.device.type != "cpu" or num_threads == 1 or batch < 2 * num_threads or A.shape[-1] > _LARGEST:
        return function(A)
    parts = list(_pool(num_threads).map(torch.no_grad()(function), A.flatten(0, -3).chunk(num_threads)))
    first, second = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return first.reshape(A.shape[:-1]), second.reshape(A.shape)


def _pool(num_threads: int) -> ThreadPoolExecutor:
    """Return a pool of threads that compute with one thread each."""
    with _lock:
        if num_threads not in _pools:
            all_started = threading.Barrier(num_threads + 1)

            def start() -> None:
                torch.set_num_threads(1)
                all_started.wait()

            pool = ThreadPoolExecutor(num_threads, "orthocond")
            for _ in range(num_threads):
                pool.submit(start)
            all_started.wait()
            # The setting is a thread's own, but the last one set is what threads of the user's will start with.
            torch.set_num_threads(num_threads)
            _pools[num_threads] = pool
        return _pools[num_threads]
