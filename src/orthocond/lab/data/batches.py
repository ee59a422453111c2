"""What a batch is: which images it has, which part of it a process takes, and where its random numbers come from."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from orthocond.lab.config import Config

__all__ = ["Batch", "Data", "Part", "num_validated", "random_generator", "spread"]

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Part:
    """Which part of every batch a process takes."""

    rank: int = 0
    size: int = 1

    def of(self, batch: Tensor) -> Tensor:
        """Return this process's images of a batch: a contiguous, equal part."""
        return batch.tensor_split(self.size)[self.rank]


class Data(Protocol):
    """Images to train with and to validate with."""

    channels: int
    num_train: int
    num_val: int

    def train_batches(self, epoch: int, start: int, part: Part, device: torch.device) -> Iterator[Batch]:
        """Yield the epoch's batches from number ``start`` on, this process's part of each, normalised."""

    def val_batches(self, part: Part, device: torch.device) -> Iterator[Batch]:
        """Yield this process's part of the validation images, in order."""


def num_validated(found: int, config: Config) -> int:
    """Return how many of the validation images are used."""
    return found if config.val_images is None else min(found, config.val_images)


def spread(found: int, wanted: int) -> Tensor:
    """Return evenly spaced numbers of images: those of a folder are sorted by class."""
    return torch.arange(wanted) * found // wanted


def random_generator(*numbers: int) -> torch.Generator:
    """Return a random generator that depends on all the numbers."""
    digest = hashlib.sha256(repr(numbers).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
