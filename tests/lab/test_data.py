"""Data: the embedded digits, parquet, image folders; batches that depend on seed, epoch and step alone."""

import io
import multiprocessing
import random

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from orthocond.errors import ArgumentError
from orthocond.lab.config import changed
from orthocond.lab.data import Images, MemoryData, Part, digits, load_data, reading
from orthocond.lab.presets import preset

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("ORTHOCOND_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


def picture(seed, size=(8, 6), mode="RGB"):
    shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8), mode)


def png(image):
    buffer = io.BytesIO()
    image.save(buffer, "png")
    return buffer.getvalue()


def write_parquet(folder, counts, *, column="img", label="label", classes=3, **of_picture):
    folder.mkdir(exist_ok=True)
    for split, count in counts.items():
        rows = {
            column: [{"bytes": png(picture(n, **of_picture)), "path": None} for n in range(count)],
            label: [n % classes for n in range(count)],
        }
        datasets.Dataset.from_dict(rows).to_parquet(str(folder / f"{split}.parquet"))
    return folder


def config(folder, **settings):
    return changed(preset("dbn-cifar10-small"), {"data": str(folder), "batch_size": 4, "num_classes": 3, **settings})


def test_the_digits_are_scikit_learn_s():
    found = load_digits()
    train, val = digits()
    assert (len(train.labels), len(val.labels)) == (1438, 359)
    images = torch.from_numpy(found.images).to(torch.uint8)[:, None]
    held_out = np.arange(1797) % 5 == 4
    assert torch.equal(val.pixels, images[held_out])
    assert torch.equal(train.pixels, images[~held_out])
    assert torch.equal(train.labels, torch.from_numpy(found.target)[~held_out])


def test_parquet_is_decoded_once(tmp_path):
    chosen = config(write_parquet(tmp_path / "data", {"train": 10, "test": 5}))
    data = load_data(chosen)
    assert (data.num_train, data.num_val, data.channels) == (10, 5, 3)
    assert np.array_equal(data._train.pixels[7].permute(1, 2, 0).numpy(), np.asarray(picture(7)))
    assert data._train.labels.tolist() == [n % 3 for n in range(10)]
    cached = sorted((tmp_path / "cache").iterdir())
    assert len(cached) == 2
    again = load_data(chosen)
    assert torch.equal(again._train.pixels, data._train.pixels)
    for file in cached:
        file.write_bytes(b"damaged")
    assert torch.equal(load_data(chosen)._train.pixels, data._train.pixels)


def test_the_hub_s_layout_and_columns_are_understood(tmp_path):
    folder = tmp_path / "data" / "cifar100"
    folder.mkdir(parents=True)
    write_parquet(folder, {"train-00000-of-00001": 4, "test-00000-of-00001": 4}, label="fine_label", mode="L")
    data = load_data(config(tmp_path / "data"))
    assert (data.num_train, data.channels) == (4, 1)


def test_an_image_folder_is_streamed(tmp_path):
    for split, count in (("train", 6), ("val", 3)):
        for n in range(count):
            place = tmp_path / "data" / split / f"class{n % 3}"
            place.mkdir(parents=True, exist_ok=True)
            picture(n, size=(20 + n, 17)).save(place / f"{n}.png")
    chosen = config(tmp_path / "data", resize=12, crop=8, workers=0)
    data = load_data(chosen)
    (x, y), *rest = data.train_batches(1, 0, Part(), CPU)
    assert not rest
    assert (x.shape, y.shape, x.dtype) == ((4, 3, 8, 8), (4,), torch.float32)
    (again, _), *_ = data.train_batches(1, 0, Part(), CPU)
    (other, _), *_ = data.train_batches(2, 0, Part(), CPU)
    assert torch.equal(x, again)
    assert not torch.equal(x, other)
    halves = [next(iter(data.train_batches(1, 0, Part(rank, 2), CPU)))[0] for rank in (0, 1)]
    assert torch.equal(torch.cat(halves), x)
    (workers, _), *_ = load_data(changed(chosen, {"workers": 2})).train_batches(1, 0, Part(), CPU)
    assert torch.equal(workers, x)
    (val, labels), *_ = data.val_batches(Part(), CPU)
    assert labels.tolist() == [0, 1, 2]
    centre = np.asarray(picture(0, size=(20, 17)).resize((12, 12), Image.Resampling.BILINEAR))[2:10, 2:10]
    expected = (
        torch.from_numpy(centre.copy()).permute(2, 0, 1) / 255 - torch.tensor([0.485, 0.456, 0.406])[:, None, None]
    )
    assert torch.allclose(val[0], expected / torch.tensor([0.229, 0.224, 0.225])[:, None, None], atol=1e-5)


def test_augmentation_is_a_crop_of_the_padded_image_that_may_be_flipped():
    pixels = torch.arange(64 * 5 * 5, dtype=torch.int64).remainder(251).to(torch.uint8).view(64, 1, 5, 5)
    chosen = changed(preset("dbn-digits"), {"batch_size": 64, "pad": 2, "flip": "true"})
    data = MemoryData(Images(pixels, torch.arange(64)), Images(pixels[:2], torch.arange(2)), chosen)
    x, y = next(data.train_batches(1, 0, Part(), CPU))
    plain = (pixels.float() - data._mean) / data._std
    padded = torch.nn.functional.pad(plain, (2, 2, 2, 2))
    seen = set()
    for image, label in zip(x, y, strict=True):
        windows = {
            (top, left, flipped): padded[label, :, top : top + 5, left : left + 5].flip(2 if flipped else ())
            for top in range(5)
            for left in range(5)
            for flipped in (False, True)
        }
        (found, *_) = [key for key, window in windows.items() if torch.equal(window, image)]
        seen.add(found)
    assert len(seen) > 25
    assert sorted(y.tolist()) == list(range(64))


def test_batches_depend_on_seed_epoch_and_number_alone():
    data = load_data(preset("dbn-digits"))
    whole = [x for x, _ in data.train_batches(3, 0, Part(), CPU)]
    random.seed(7)
    torch.manual_seed(7)
    assert torch.equal(next(data.train_batches(3, 5, Part(), CPU))[0], whole[5])
    halves = [next(data.train_batches(3, 5, Part(rank, 2), CPU))[0] for rank in (0, 1)]
    assert torch.equal(torch.cat(halves), whole[5])
    other_seed = load_data(changed(preset("dbn-digits"), {"seed": 1}))
    assert not torch.equal(next(other_seed.train_batches(3, 5, Part(), CPU))[0], whole[5])
    values = torch.cat([x for x, _ in data.val_batches(Part(), CPU)])
    assert abs(values.mean()) < 0.1
    assert abs(values.std() - 1) < 0.1
    assert load_data(changed(preset("dbn-digits"), {"val_images": 7})).num_val == 7


def test_missing_and_wrong_data_is_said_in_a_sentence(tmp_path, monkeypatch):
    with pytest.raises(ArgumentError, match="there is no folder"):
        load_data(config(tmp_path / "none"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArgumentError, match="neither parquet files nor image folders"):
        load_data(config(tmp_path / "empty"))
    with pytest.raises(ArgumentError, match="no validation or valid or val or test split, only train"):
        load_data(config(write_parquet(tmp_path / "half", {"train": 4})))
    with pytest.raises(ArgumentError, match="has 3 classes and the configuration 10"):
        load_data(config(write_parquet(tmp_path / "other", {"train": 4, "test": 4}), num_classes=10))
    with pytest.raises(ArgumentError, match="fewer than a batch of 128; lower --batch-size"):
        load_data(config(tmp_path / "other", batch_size=128))
    with pytest.raises(ArgumentError, match="one named label or"):
        load_data(config(write_parquet(tmp_path / "columns", {"train": 4, "test": 4}, label="kind")))
    with pytest.raises(ArgumentError, match="crop 224 is larger"):
        load_data(config(tmp_path / "other", resize=100))
    (tmp_path / "damaged").mkdir()
    for split in ("train", "test"):
        (tmp_path / "damaged" / f"{split}.parquet").write_bytes(b"PAR1 this is none")
    with pytest.raises(ArgumentError, match=r"can't read the data in .*download it again"):
        load_data(config(tmp_path / "damaged"))
    with pytest.raises(ArgumentError, match="need no --data"):
        load_data(changed(preset("dbn-digits"), {"data": "x"}))
    monkeypatch.setattr(datasets, "load_dataset", lambda name: (_ for _ in ()).throw(ConnectionError("no network")))
    with pytest.raises(ArgumentError, match="hf download uoft-cs/cifar10 --repo-type dataset --local-dir DIR"):
        load_data(preset("dbn-cifar10"))


def test_imagenet_is_validated_with_its_labelled_split(tmp_path):
    folder = tmp_path / "train"  # a name that is no split's
    write_parquet(folder, {f"{split}-00000-of-00001": 6 for split in ("train", "validation", "test")})
    rows = {"img": [{"bytes": png(picture(0)), "path": None}] * 3, "label": [-1] * 3}
    datasets.Dataset.from_dict(rows).to_parquet(str(folder / "test-00000-of-00001.parquet"))
    for settings in ({}, {"resize": 8, "crop": 6, "workers": 0}):
        data = load_data(config(folder, **settings))
        assert (data.num_train, data.num_val) == (6, 6)
        ((_, labels),) = data.val_batches(Part(), CPU)
        assert labels.tolist() == [0, 1, 2, 0, 1, 2]
    (folder / "validation-00000-of-00001.parquet").unlink()
    for settings in ({}, {"resize": 8, "crop": 6}):
        with pytest.raises(ArgumentError, match="images without a label"):
            load_data(config(folder, **settings))


def test_images_of_different_sizes_are_told_how_to_be_used(tmp_path):
    folder = write_parquet(tmp_path / "data", {"train": 4, "test": 4})
    rows = {"img": [{"bytes": png(picture(n, size=(5 + n, 5))), "path": None} for n in range(4)], "label": [0, 1, 2, 0]}
    datasets.Dataset.from_dict(rows).to_parquet(str(folder / "train.parquet"))
    with pytest.raises(ArgumentError, match="different sizes; give --resize and --crop"):
        load_data(config(folder))


def test_workers_stay_from_epoch_to_epoch_and_are_divided_among_processes(tmp_path):
    for split in ("train", "val"):
        for n in range(6):
            place = tmp_path / "data" / split / f"class{n % 3}"
            place.mkdir(parents=True, exist_ok=True)
            picture(n).save(place / f"{n}.png")
    settings = {"resize": 8, "crop": 6, "batch_size": 2}
    alone = load_data(config(tmp_path / "data", workers=0, **settings))
    data = load_data(config(tmp_path / "data", workers=4, prefetch=1, **settings))
    next(iter(data.train_batches(1, 0, Part(0, 4), CPU)))  # another division before, as of who looks at one batch
    part, workers = Part(1, 2), []
    for epoch in (1, 2):
        expected = list(alone.train_batches(epoch, 0, part, CPU))
        for (x, _), (y, _) in zip(data.train_batches(epoch, 0, part, CPU), expected, strict=True):
            assert torch.equal(x, y)
        workers.append({child.pid for child in multiprocessing.active_children()})
    assert workers[0] == workers[1]
    assert len(workers[0]) == 2


def test_a_large_copy_is_announced(tmp_path, capsys):
    file = tmp_path / "train.parquet"
    with file.open("wb") as stream:
        stream.truncate(3 * 10**9)  # takes no space
    reading._announce_copy(str(tmp_path / "cache"), [file])
    assert f"copied to {tmp_path / 'cache'} first, which takes 3 GB" in capsys.readouterr().err
    reading._announce_copy(str(tmp_path), [file])  # it is there
    assert capsys.readouterr().err == ""
