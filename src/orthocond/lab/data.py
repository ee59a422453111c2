"""Image data: in memory where it fits, streamed through workers where it doesn't.

What a step sees is a function of the seed, the epoch and the step alone: a run that is resumed, or divided over several
processes, sees what an undisturbed one would.
"""

import gzip
import hashlib
import io
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from orthocond.errors import ArgumentError
from orthocond.lab.config import Config

__all__ = ["Data", "Images", "MemoryData", "Part", "StreamedData", "digits", "load_data"]

Batch = tuple[Tensor, Tensor]

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_SPLITS = {"train": ("train",), "val": ("validation", "valid", "val", "test")}
"""What splits are called, the first that is there counts: the test part of ImageNet has no labels."""
_LABELS = ("label", "labels", "fine_label", "coarse_label")


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
        self.num_train, self.num_val = len(train.labels), _num_val(len(val.labels), config)
        mean, std = _mean_and_std(train.pixels)
        self._mean, self._std = mean.view(-1, 1, 1), std.view(-1, 1, 1)

    def train_batches(self, epoch: int, start: int, part: Part, device: torch.device) -> Iterator[Batch]:
        """Yield the epoch's batches from number ``start`` on, this process's part of each, normalised."""
        self._to(device)
        size, seed = self.config.batch_size, self.config.seed
        order = torch.randperm(self.num_train, generator=_generator(seed, epoch))
        for number in range(start, self.num_train // size):
            chosen = part.of(order[number * size : (number + 1) * size]).to(device)
            pixels = self._normalised(self._train.pixels[chosen])
            yield self._augmented(pixels, _generator(seed, epoch, number), part), self._train.labels[chosen]

    def val_batches(self, part: Part, device: torch.device) -> Iterator[Batch]:
        """Yield this process's part of the validation images, in order."""
        self._to(device)
        own = part.of(_spread(len(self._val.labels), self.num_val)).to(device)
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


class StreamedData:
    """Images that are read, decoded and resized by worker processes.

    Args:
        train: a sequence of ``{"image": ..., "label": ...}``, the image one of Pillow's, to train with.
        val: the same, to validate with.
        config: for ``seed``, ``batch_size``, ``resize``, ``crop``, ``flip`` and ``workers``.
    """

    channels = 3

    def __init__(self, train: "Sequence[Any]", val: "Sequence[Any]", config: Config) -> None:
        self.config, self._train, self._val = config, train, val
        self.num_train, self.num_val = len(train), _num_val(len(val), config)

    def train_batches(self, epoch: int, start: int, part: Part, device: torch.device) -> Iterator[Batch]:
        """Yield the epoch's batches from number ``start`` on, this process's part of each, normalised."""
        size, seed = self.config.batch_size, self.config.seed
        order = torch.randperm(self.num_train, generator=_generator(seed, epoch))
        batches = [part.of(order[n * size : (n + 1) * size]).tolist() for n in range(start, self.num_train // size)]
        return self._loaded(_Resized(self._train, self.config, epoch), batches, device)

    def val_batches(self, part: Part, device: torch.device) -> Iterator[Batch]:
        """Yield this process's part of the validation images, in order."""
        own = part.of(_spread(len(self._val), self.num_val))
        batches = [chunk.tolist() for chunk in own.split(100) if len(chunk)]
        return self._loaded(_Resized(self._val, self.config, None), batches, device)

    def _loaded(self, images: "_Resized", batches: list[list[int]], device: torch.device) -> Iterator[Batch]:
        mean, std = (torch.tensor(values, device=device).view(-1, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
        loader = DataLoader(
            images,
            batch_sampler=batches,
            num_workers=min(self.config.workers, len(batches)),
            generator=_generator(0),  # it draws from one, and that of the process is to stay where it is
            pin_memory=device.type == "cuda",
        )
        for pixels, labels in loader:
            pixels, labels = pixels.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            yield (pixels.float() / 255 - mean) / std, labels


class _Resized(Dataset[tuple[Tensor, int]]):
    """Images resized to a square and cropped: at random for an epoch, in the centre for validation."""

    def __init__(self, images: "Sequence[Any]", config: Config, epoch: int | None) -> None:
        self.images, self.config, self.epoch = images, config, epoch

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        import numpy as np
        from PIL import Image

        side, crop = self.config.resize, self.config.crop
        assert side is not None
        row = self.images[index]
        image = row["image"].convert("RGB").resize((side, side), Image.Resampling.BILINEAR)
        top = left = (side - crop) // 2
        flipped = False
        if self.epoch is not None:
            generator = _generator(self.config.seed, self.epoch, index)
            top, left, coin = (int(torch.randint(n, (), generator=generator)) for n in (side - crop + 1,) * 2 + (2,))
            flipped = self.config.flip and coin == 1
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[:, top : top + crop, left : left + crop]
        return (pixels.flip(2) if flipped else pixels).contiguous(), row["label"]


def digits() -> tuple[Images, Images]:
    """Return the embedded 8x8 scans of handwritten digits: 1,438 to train with, every fifth one to validate with.

    Reference:
        Alpaydin and Kaynak, Optical recognition of handwritten digits, UCI machine learning repository, 1998 (its test
        part, as scikit-learn distributes it; CC BY 4.0).
    """
    raw = gzip.decompress(files("orthocond.lab").joinpath("digits.bin.gz").read_bytes())
    rows = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(-1, 65)
    pixels, labels = rows[:, :64].reshape(-1, 1, 8, 8), rows[:, 64].long()
    held_out = torch.arange(len(rows)) % 5 == 4
    return Images(pixels[~held_out], labels[~held_out]), Images(pixels[held_out], labels[held_out])


def load_data(config: Config) -> Data:
    """Return the data of a configuration.

    Raises:
        ArgumentError: it is not there, or is not what the configuration says.

    Example:
        >>> from orthocond.lab.presets import preset
        >>> load_data(preset("dbn-digits")).num_train
        1438
    """
    if config.dataset == "digits":
        if config.data is not None:
            raise ArgumentError("the digits are embedded and need no --data; name the dataset too: --dataset NAME.")
        splits: Any = digits()
    else:
        splits = _splits(config)
    train, val = splits
    data: Data
    if isinstance(train, Images):
        _check_labels(config, train.labels, val.labels)
        data = MemoryData(train, val, config)
    else:
        data = StreamedData(train, val, config)
    if data.num_train < config.batch_size:
        raise ArgumentError(
            f"the data has {data.num_train} training images, fewer than a batch of {config.batch_size}; "
            "lower --batch-size."
        )
    return data


def _splits(config: Config) -> Any:
    """Return the training and validation split of a dataset on disk or on the hub."""
    if config.resize is not None and config.crop > config.resize:
        raise ArgumentError(f"crop {config.crop} is larger than the image, resize {config.resize}; lower --crop.")
    named = _from_folder(Path(config.data)) if config.data is not None else _from_hub(config.dataset)
    chosen = []
    for split, names in _SPLITS.items():
        found = next((named[name] for name in names if name in named), None)
        if found is None or not len(found):
            raise ArgumentError(
                f"{config.data or config.dataset} has no {' or '.join(names)} split, only {', '.join(named) or 'none'};"
                f" name its {'training' if split == 'train' else 'validation'} files or folder so."
            )
        chosen.append(_columns(found, config))
    if config.resize is None:
        return [_decoded(split, config) for split in chosen]
    _check_labels(config, *(torch.as_tensor(split.with_format("numpy")["label"][:]) for split in chosen))
    return chosen


def _from_hub(name: str) -> Any:
    import datasets

    datasets.disable_progress_bars()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries are not for a person
    try:
        return datasets.load_dataset(name)
    except Exception as error:  # no network, no such name, a gate: many kinds of many libraries
        reason = " ".join(str(error).split())[:200]
        raise ArgumentError(
            f"can't load {name} from the Hugging Face hub ({type(error).__name__}: {reason}); give a local copy by "
            f"--data DIR, made where there is a network by: hf download {name} --repo-type dataset --local-dir DIR"
        ) from None


def _from_folder(folder: Path) -> Any:
    """Return the splits in a folder: parquet files with the split in their names, or a folder of images for each."""
    import datasets

    datasets.disable_progress_bars()
    if not folder.is_dir():
        raise ArgumentError(f"there is no folder {folder} with data; make it, or give another one by --data.")
    names = [name for group in _SPLITS.values() for name in group]
    parquet = sorted(folder.rglob("*.parquet"))
    by_split = {
        name: [
            str(file)
            for file in parquet
            if file.stem.partition("-")[0] == name or name in file.relative_to(folder).parts[:-1]
        ]
        for name in names
    }
    try:
        if parquet:
            return datasets.load_dataset("parquet", data_files={name: part for name, part in by_split.items() if part})
        if any((folder / name).is_dir() for name in names):
            return datasets.load_dataset("imagefolder", data_dir=str(folder))
    except Exception as error:  # damaged files: pyarrow's and Pillow's own errors, and datasets' around them
        reason = " ".join(str(error.__cause__ or error).split())[:200]
        raise ArgumentError(f"can't read the data in {folder} ({reason}); get it anew.") from None
    raise ArgumentError(
        f"{folder} holds neither parquet files nor image folders; it should have train.parquet and test.parquet, or "
        "train/CLASS/*.jpg and val/CLASS/*.jpg."
    )


def _columns(split: Any, config: Config) -> Any:
    """Return the split with two columns: ``image`` and ``label``."""
    import datasets

    images = [
        name
        for name, kind in split.features.items()
        if isinstance(kind, datasets.Image) or (isinstance(kind, dict) and "bytes" in kind)
    ]
    label = next((name for name in _LABELS if name in split.features), None)
    if len(images) != 1 or label is None:
        raise ArgumentError(
            f"{config.data or config.dataset} has the columns {', '.join(split.features)}, and one of images and one "
            f"named {' or '.join(_LABELS)} are needed; give another --data."
        )
    split = split.select_columns([images[0], label]).rename_columns({images[0]: "pixels", label: "target"})
    split = split.rename_columns({"pixels": "image", "target": "label"})
    return split.cast_column("image", datasets.Image(decode=config.resize is not None))


def _decoded(split: Any, config: Config) -> Images:
    """Return a split's images as one tensor, from the cache if they have been decoded before."""
    root = Path(os.environ.get("ORTHOCOND_CACHE") or Path.home() / ".cache" / "orthocond")
    file = root / f"{split._fingerprint}-{len(split)}.pt"
    try:
        saved = torch.load(file, weights_only=True, mmap=True)
        return Images(saved["pixels"], saved["labels"])
    except Exception:  # not there, or damaged: it is made anew
        images = _decode(split, config)
    try:
        root.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}")
        torch.save({"pixels": images.pixels, "labels": images.labels}, partial)
        os.replace(partial, file)
    except (OSError, RuntimeError):  # a cache that can't be written costs time only
        pass
    return images


def _decode(split: Any, config: Config) -> Images:
    import numpy as np
    from PIL import Image, UnidentifiedImageError

    arrays, labels, mode = [], [], ""
    for rows in split.iter(batch_size=1000):
        labels.extend(rows["label"])
        for row in rows["image"]:
            try:
                image = Image.open(io.BytesIO(row["bytes"]) if row["bytes"] else row["path"])
                mode = mode or ("L" if image.mode == "L" else "RGB")
                arrays.append(np.asarray(image.convert(mode)))
            except (OSError, UnidentifiedImageError) as error:
                raise ArgumentError(
                    f"image {len(arrays)} of {config.data or config.dataset} is damaged ({error}); get it anew."
                ) from None
    if len({array.shape for array in arrays}) > 1:
        raise ArgumentError(
            f"the images of {config.data or config.dataset} have different sizes; give --resize and --crop, which "
            "stream them."
        )
    pixels = torch.from_numpy(np.stack(arrays))
    pixels = pixels[:, None] if pixels.ndim == 3 else pixels.permute(0, 3, 1, 2)
    return Images(pixels.contiguous(), torch.tensor(labels))


def _num_val(found: int, config: Config) -> int:
    return found if config.val_images is None else min(found, config.val_images)


def _spread(found: int, wanted: int) -> Tensor:
    """Return evenly spaced numbers of images: those of a folder are sorted by class."""
    return torch.arange(wanted) * found // wanted


def _check_labels(config: Config, *labels: Tensor) -> None:
    if min(int(part.min()) for part in labels) < 0:
        raise ArgumentError(f"{config.data or config.dataset} has images without a label; give another --data.")
    found = max(int(part.max()) for part in labels) + 1
    if found != config.num_classes:
        raise ArgumentError(
            f"{config.data or config.dataset} has {found} classes and the configuration {config.num_classes}; "
            f"is it the right data? If so, give --num-classes {found}."
        )


def _generator(*numbers: int) -> torch.Generator:
    """Return a random generator that depends on all the numbers."""
    digest = hashlib.sha256(repr(numbers).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def _mean_and_std(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and deviation of each channel, from sums of whole numbers."""
    channels = pixels.shape[1]
    counts = torch.stack([torch.bincount(pixels[:, c].reshape(-1), minlength=256) for c in range(channels)]).double()
    values = torch.arange(256, dtype=torch.float64)
    mean = counts @ values / counts.sum(1)
    variance = counts @ values**2 / counts.sum(1) - mean**2
    return mean.float(), variance.sqrt().clamp(min=1e-3).float()
