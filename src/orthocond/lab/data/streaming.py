"""Images that don't fit in memory: worker processes read, decode and resize them while the network trains."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from orthocond.lab.config import Config
from orthocond.lab.data.batches import Batch, Part, num_validated, random_generator, spread

__all__ = ["StreamedData"]

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class StreamedData:
    """Images that are read, decoded and resized by worker processes.

    Args:
        train: a sequence of ``{"image": ..., "label": ...}``, the image one of Pillow's, to train with.
        val: the same, to validate with.
        config: for ``seed``, ``batch_size``, ``resize``, ``crop``, ``flip``, ``workers`` and ``prefetch``.
    """

    channels = 3

    def __init__(self, train: "Sequence[Any]", val: "Sequence[Any]", config: Config) -> None:
        self.config, self._train, self._val = config, train, val
        self.num_train, self.num_val = len(train), num_validated(len(val), config)
        self._loaders: dict[str, tuple[DataLoader[Any], _Batches]] = {}

    def train_batches(self, epoch: int, start: int, part: Part, device: torch.device) -> Iterator[Batch]:
        """Yield the epoch's batches from number ``start`` on, this process's part of each, normalised."""
        size, seed = self.config.batch_size, self.config.seed
        order = torch.randperm(self.num_train, generator=random_generator(seed, epoch))
        batches = [part.of(order[n * size : (n + 1) * size]).tolist() for n in range(start, self.num_train // size)]
        return self._loaded("train", self._train, [[(epoch, i) for i in batch] for batch in batches], part, device)

    def val_batches(self, part: Part, device: torch.device) -> Iterator[Batch]:
        """Yield this process's part of the validation images, in order."""
        own = part.of(spread(len(self._val), self.num_val))
        batches: list[list[_Index]] = [[(None, i) for i in chunk.tolist()] for chunk in own.split(100) if len(chunk)]
        return self._loaded("val", self._val, batches, part, device)

    def _loaded(
        self, split: str, images: "Sequence[Any]", batches: "list[list[_Index]]", part: Part, device: torch.device
    ) -> Iterator[Batch]:
        mean, std = (torch.tensor(values, device=device).view(-1, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
        workers = self.config.workers and max(1, self.config.workers // part.size)
        is_pinned = device.type == "cuda"
        known = self._loaders.get(split)  # its workers stay for the next epoch
        if known is None or (known[0].num_workers, known[0].pin_memory) != (workers, is_pinned):
            sampler = _Batches()
            loader: DataLoader[Any] = DataLoader(
                _Resized(images, self.config),
                batch_sampler=sampler,
                num_workers=workers,
                prefetch_factor=self.config.prefetch if workers else None,
                persistent_workers=workers > 0,
                generator=random_generator(0),  # it draws from one, and that of the process is to stay where it is
                pin_memory=is_pinned,
            )
            self._loaders[split] = loader, sampler
        loader, sampler = self._loaders[split]
        sampler.batches = batches
        for pixels, labels in loader:
            pixels, labels = pixels.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            yield (pixels.float() / 255 - mean) / std, labels


_Index = tuple[int | None, int]
"""The epoch, None for validation, and the number of an image."""


class _Batches(Sampler[list[_Index]]):
    """The batches of an epoch, which are others in the next."""

    def __init__(self) -> None:
        self.batches: list[list[_Index]] = []

    def __iter__(self) -> Iterator[list[_Index]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class _Resized(Dataset[tuple[Tensor, int]]):
    """Images resized to a square and cropped: at random for an epoch, in the centre for validation."""

    def __init__(self, images: "Sequence[Any]", config: Config) -> None:
        self.images, self.config = images, config

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: _Index) -> tuple[Tensor, int]:
        import numpy as np
        from PIL import Image

        epoch, index = key
        side, crop = self.config.resize, self.config.crop
        assert side is not None
        row = self.images[index]
        image = row["image"].convert("RGB").resize((side, side), Image.Resampling.BILINEAR)
        top = left = (side - crop) // 2
        flipped = False
        if epoch is not None:
            generator = random_generator(self.config.seed, epoch, index)
            top, left, coin = (int(torch.randint(n, (), generator=generator)) for n in (side - crop + 1,) * 2 + (2,))
            flipped = self.config.flip and coin == 1
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[:, top : top + crop, left : left + crop]
        return (pixels.flip(2) if flipped else pixels).contiguous(), row["label"]
