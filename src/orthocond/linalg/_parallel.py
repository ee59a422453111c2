"""Batches of small decompositions on all cores of a CPU.

LAPACK takes the matrices of a batch one after the other, each with all threads, which a small matrix can't use.
Here each thread takes a part of the batch instead.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

__all__ = ["over_batch"]

_LARGEST = 256
"""Above this size a single matrix keeps several threads busy."""

_pools: dict[int, ThreadPoolExecutor] = {}
# Threads don't survive a fork (a DataLoader's workers): the child starts with none.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pools.clear)


def over_batch(function: Callable[[Tensor], tuple[Tensor, Tensor]], A: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``function(A)`` for ``A`` ``(..., n, n)``, with parts of the batch computed side by side on a CPU."""
    num_threads = torch.get_num_threads()
    batch = A.shape[:-2].numel()
    if A.device.type != "cpu" or num_threads == 1 or batch < 2 * num_threads or A.shape[-1] > _LARGEST:
        return function(A)
    pool = _pools.get(num_threads)
    if pool is None:
        # The number of threads is a setting of the thread that sets it: the caller keeps its own.
        pool = _pools[num_threads] = ThreadPoolExecutor(
            num_threads, thread_name_prefix="orthocond", initializer=torch.set_num_threads, initargs=(1,)
        )
    parts = list(pool.map(torch.no_grad()(function), A.flatten(0, -3).chunk(num_threads)))
    first, second = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return first.reshape(A.shape[:-1]), second.reshape(A.shape)
