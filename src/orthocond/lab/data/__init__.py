"""Image data: in memory where it fits, streamed through workers where it doesn't.

The data of a step depends only on the seed, the epoch and the step: a run that is resumed, or divided over several
processes, sees the same data as an uninterrupted one.
"""

from typing import Any

from orthocond.errors import ArgumentError
from orthocond.lab.config import Config
from orthocond.lab.data.batches import Data, Part
from orthocond.lab.data.memory import Images, MemoryData
from orthocond.lab.data.reading import check_labels, digits, read_splits
from orthocond.lab.data.streaming import StreamedData

__all__ = ["Data", "Images", "MemoryData", "Part", "StreamedData", "digits", "load_data"]


def load_data(config: Config) -> Data:
    """Return the data of a configuration.

    Raises:
        ArgumentError: it is missing, or doesn't match the configuration.

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
        splits = read_splits(config)
    train, val = splits
    data: Data
    if isinstance(train, Images):
        check_labels(config, train.labels, val.labels)
        data = MemoryData(train, val, config)
    else:
        data = StreamedData(train, val, config)
    if data.num_train < config.batch_size:
        raise ArgumentError(
            f"the data has {data.num_train} training images, fewer than a batch of {config.batch_size}; "
            "lower --batch-size."
        )
    return data
