"""Images that fit in memory: augmented in batches, on the device that trains."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from orthocond.lab.config import Config
from orthocond.lab.data.batches import Batch, Part, num_validated, random_generator, spread

__all__ = ["Images", "MemoryData"]


@dataclass(frozen=True)
class Images:
    """One split in memory."""

    pixels: Tensor
    """uint8 ``(N, C, H, W)``."""
    labels: Tensor
    """int64 ``(N,)``."""


class MemoryData:
    """Images that sit in memory, augmented in batches on the training device.

    Args:
        train: the images to train with.
        val: the images to validate with.
        config: for ``seed``, ``batch_size``, ``pad`` and ``flip``.
    """

    def __init__(self, train: Images, val: Images, config: Config) -> None:
        self.config, self._train, self._val = config, train, val
        self.channels = train.pixels.shape[1]
        self.num_train, self.num_val = len(train.labels), num_validated(len(val.labels), config)
        mean, std = _mean_and_std(train.pixels)
        self._mean, self._std = mean.view(-1, 1, 1), std.view(-1, 1, 1)

    def train_batches(self, epoch: int, start: int, part: Part, device: torch.device) -> Iterator[Batch]:
        """Yield the epoch's batches from number ``start`` on, this process's part of each, normalised."""
        self._to(device)
        size, seed = self.config.batch_size, self.config.seed
        order = torch.randperm(self.num_train, generator=random_generator(seed, epoch))
        for number in range(start, self.num_train // size):
            chosen = part.of(order[number * size : (number + 1) * size]).to(device)
            pixels = self._normalised(self._train.pixels[chosen])
            yield self._augmented(pixels, random_generator(seed, epoch, number), part), self._train.labels[chosen]

    def val_batches(self, part: Part, device: torch.device) -> Iterator[Batch]:
        """Yield this process's part of the validation images, in order."""
        self._to(device)
        own = part.of(spread(len(self._val.labels), self.num_val)).to(device)
        for chosen in own.split(500) if len(own) else ():
            yield self._normalised(self._val.pixels[chosen]), self._val.labels[chosen]

    def _to(self, device: torch.device) -> None:
        if self._train.labels.device != device:
            self._train, self._val = (
                Images(split.pixels.to(device), split.labels.to(device)) for split in (self._train, self._val)
            )
            self._mean, self._std = self._mean.to(device), self._std.to(device)

    def _normalised(self, pixels: Tensor) -> Tensor:
        return (pixels.float() - self._mean) / self._std

    def _augmented(self, x: Tensor, generator: torch.Generator, part: Part) -> Tensor:
        """Return a random crop of each padded image, half of them flipped; drawn for the whole batch, on the CPU."""
        pad, size, (height, width) = self.config.pad, self.config.batch_size, x.shape[-2:]
        top, left = (part.of(torch.randint(2 * pad + 1, (size, 1), generator=generator)).to(x.device) for _ in range(2))
        flipped = part.of(torch.rand(size, 1, generator=generator) < 0.5).to(x.device)
        rows, columns = (
            start + torch.arange(length, device=x.device) for start, length in ((top, height), (left, width))
        )
        if self.config.flip:
            columns = torch.where(flipped, columns.flip(1), columns)
        image = torch.arange(len(x), device=x.device)[:, None, None]
        padded = F.pad(x, (pad, pad, pad, pad)).movedim(1, -1)
        return padded[image, rows[:, :, None], columns[:, None, :]].movedim(-1, 1).contiguous()


def _mean_and_std(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and deviation of each channel, from sums of whole numbers."""
    channels = pixels.shape[1]
    counts = torch.stack([torch.bincount(pixels[:, c].reshape(-1), minlength=256) for c in range(channels)]).double()
    values = torch.arange(256, dtype=torch.float64)
    mean = counts @ values / counts.sum(1)
    variance = counts @ values**2 / counts.sum(1) - mean**2
    return mean.float(), variance.sqrt().clamp(min=1e-3).float()
