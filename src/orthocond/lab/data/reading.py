"""Where images come from: the digits inside the package, a folder, or the Hugging Face hub."""

import gzip
import io
import logging
import os
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from orthocond.errors import ArgumentError
from orthocond.lab.config import Config
from orthocond.lab.data.memory import Images
from orthocond_command import is_first_process

__all__ = ["check_labels", "digits", "read_splits"]

_SPLITS = {"train": ("train",), "val": ("validation", "valid", "val", "test")}
"""What splits are called, the first that is there counts: the test part of ImageNet has no labels."""
_LABELS = ("label", "labels", "fine_label", "coarse_label")


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


def read_splits(config: Config) -> Any:
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
    check_labels(config, *(torch.as_tensor(split.with_format("numpy")["label"][:]) for split in chosen))
    return chosen


def _announce_copy(cache: str, parquet: list[Path]) -> None:
    """Say how large the copy is that datasets is going to make of parquet files, if it is large and not there yet."""
    gigabytes = sum(file.stat().st_size for file in parquet) / 1e9
    if gigabytes >= 1 and not Path(cache).exists() and is_first_process():
        print(
            f"orthocond: the parquet files are copied to {cache} first, which takes {gigabytes:.0f} GB there; "
            "folders of images (train/CLASS/*.jpg and val/CLASS/*.jpg) need no copy.",
            file=sys.stderr,
        )


def _from_hub(name: str) -> Any:
    import datasets

    datasets.disable_progress_bars()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries are not for a person
    try:
        return datasets.load_dataset(name)
    except Exception as error:  # no network, no such name, a gate: many kinds of many libraries
        reason = " ".join(str(error).split())[:200]
        raise ArgumentError(
            f"can't load {name} from the Hugging Face hub ({type(error).__name__}: {reason}); give a local copy with "
            "--data DIR, downloaded where there is a network with: "
            f"hf download {name} --repo-type dataset --local-dir DIR"
        ) from None


def _from_folder(folder: Path) -> Any:
    """Return the splits in a folder: parquet files with the split in their names, or a folder of images for each."""
    import datasets

    datasets.disable_progress_bars()
    if not folder.is_dir():
        raise ArgumentError(f"there is no folder {folder} with data; make it, or give another one with --data.")
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
            by_name = {name: part for name, part in by_split.items() if part}
            _announce_copy(datasets.load_dataset_builder("parquet", data_files=by_name).cache_dir, parquet)
            return datasets.load_dataset("parquet", data_files=by_name)
        if any((folder / name).is_dir() for name in names):
            return datasets.load_dataset("imagefolder", data_dir=str(folder))
    except Exception as error:  # damaged files: pyarrow's and Pillow's own errors, and datasets' around them
        reason = " ".join(str(error.__cause__ or error).split())[:200]
        raise ArgumentError(f"can't read the data in {folder} ({reason}); download it again.") from None
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
    except Exception:  # missing or damaged: it is made again
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
                    f"image {len(arrays)} of {config.data or config.dataset} is damaged ({error}); download it again."
                ) from None
    if len({array.shape for array in arrays}) > 1:
        raise ArgumentError(
            f"the images of {config.data or config.dataset} have different sizes; give --resize and --crop, which "
            "stream them."
        )
    pixels = torch.from_numpy(np.stack(arrays))
    pixels = pixels[:, None] if pixels.ndim == 3 else pixels.permute(0, 3, 1, 2)
    return Images(pixels.contiguous(), torch.tensor(labels))


def check_labels(config: Config, *labels: Tensor) -> None:
    """Raise `ArgumentError` unless every image has a label and the classes are as many as the configuration says."""
    if min(int(part.min()) for part in labels) < 0:
        raise ArgumentError(f"{config.data or config.dataset} has images without a label; give another --data.")
    found = max(int(part.max()) for part in labels) + 1
    if found != config.num_classes:
        raise ArgumentError(
            f"{config.data or config.dataset} has {found} classes and the configuration {config.num_classes}; "
            f"is it the right data? If so, give --num-classes {found}."
        )
