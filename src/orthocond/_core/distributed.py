"""Several processes with copies of one model."""

from typing import Any

import torch
import torch.distributed
from torch import Tensor

__all__ = ["from_first", "num_processes", "summed"]


def num_processes(process_group: Any = None) -> int:
    """Return how many processes a group has; 1 where nothing is distributed."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_world_size(process_group))
    return 1


def summed(parts: list[Tensor], process_group: Any) -> list[Tensor]:
    """Return the sums of the tensors over all processes, in one exchange."""
    flat = torch.cat([part.reshape(-1) for part in parts])
    torch.distributed.all_reduce(flat, group=process_group)
    pieces = flat.split([part.numel() for part in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


def from_first(tensor: Tensor, process_group: Any) -> Tensor:
    """Return the tensor of the group's first process."""
    tensor = tensor.clone(memory_format=torch.contiguous_format)
    first = torch.distributed.get_process_group_ranks(process_group)[0]
    torch.distributed.broadcast(tensor, first, group=process_group)
    return tensor
