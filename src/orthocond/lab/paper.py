"""The paper's tables and figures of results: what each is about, which runs it takes, and what the paper prints.

Every number here is the paper's own (Song, Sebe, Wang, ECCV 2022). `ITEMS` drives ``orthocond paper``, the page that it
writes, the benchmark's comparison with Table 6, and the guide's table.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from orthocond.errors import ArgumentError, check_choice
from orthocond.lab.config import Config, changed
from orthocond.lab.methods import PAPER
from orthocond.lab.presets import preset

__all__ = ["EXPERIMENTS", "ITEMS", "NUM_RUNS", "SCALES", "Item", "Place", "chosen_items", "config_of"]

NUM_RUNS = 10
"""Runs of each method behind the errors of Tables 1 to 4."""


class Errors(NamedTuple):
    """Validation error in percent: mean, standard deviation and lowest of `NUM_RUNS` runs."""

    mean: float
    std: float
    min: float


class Accuracies(NamedTuple):
    """Failures of the solver in one training, and validation accuracy in percent."""

    failures: int
    top1: float
    top5: float


class Times(NamedTuple):
    """Milliseconds of a step on an RTX A6000."""

    forward: int
    backward: int


class Condition(NamedTuple):
    """What the text says of a curve: a condition number, how far it is below svd's, or only that it is."""

    about: float | None = None
    below_svd: float | None = None
    is_lower: bool = False


Quotes = Mapping[str, Any]
"""What the paper prints, by method, in its order."""


@dataclass(frozen=True)
class Place:
    """A preset, and the settings in which an experiment of the paper differs from it."""

    preset: str
    settings: Mapping[str, Any] = field(default_factory=dict)


_WHITENING = {"eps": 1e-2, "rtol": 0.0, "gradient": "pade(clamp=true)", "parts": "ow(kind=operator)"}
_POOLING = {
    "gradient": "pade(clamp=true)",
    "parts": "ow(kind=operator)",
    "monitor": "input",
    "monitor_validation": True,
}
_DIGITS = Place("dbn-digits", {**_WHITENING, "width": 16})
_SMALL = Place("dbn-cifar10-small", {**_WHITENING, "width": 64})
SCALES: Mapping[str, str] = MappingProxyType(
    {
        "digits": "the embedded 8x8 digits, three convolutions: minutes on two cores, no data needed",
        "small": "CIFAR-10, a residual network of eight layers, three epochs: hours on two cores",
        "full": "the paper's data, networks and epochs: days on several GPUs",
    }
)
"""How large the runs are. Meta-layers, treatments and gradient rule are the paper's at every scale."""

EXPERIMENTS: Mapping[str, Mapping[str, Place]] = MappingProxyType(
    {
        "CIFAR-100": {"digits": _DIGITS, "small": _SMALL, "full": Place("dbn-cifar100")},
        "CIFAR-10": {"digits": _DIGITS, "small": _SMALL, "full": Place("dbn-cifar10")},
        "ImageNet": {
            "digits": Place("gcp-digits", {**_POOLING, "monitor_every": 5}),
            "small": Place("gcp-cifar10-small", {**_POOLING, "monitor_every": 10}),
            "full": Place("gcp-imagenet"),
        },
    }
)
"""The paper's experiments by its dataset, and what stands for them at each scale.

A stem of 16 channels on digits (3x3 patches of one channel: rank 9) and of 64 on CIFAR-10 (rank 27 as in the paper)
has more channels than its input has dimensions, which is what makes the paper's covariance ill-conditioned.
"""

_FOLDERS = {"uoft-cs/cifar10": "cifar10", "uoft-cs/cifar100": "cifar100", "ILSVRC/imagenet-1k": "imagenet"}


@dataclass(frozen=True)
class Item:
    """A table or figure of the paper."""

    name: str
    """``table4``, ``figure1``."""
    title: str
    caption: str
    """What it shows in the paper, and how."""
    quotes: Mapping[str, Quotes]
    """What the paper prints, by experiment and method."""
    measure: Mapping[str, str] = field(default_factory=dict)
    """For a figure: the condition number that it is about, by experiment."""
    window: tuple[float, float] = (0.0, 1.0)
    """For a figure: the part of the training that it shows."""
    spikes: bool = False
    """For a figure: whether it shows the forwards of evaluation, too."""

    @property
    def kind(self) -> str:
        """One of ``errors``, ``accuracies``, ``times`` and ``conditions``: how it is shown."""
        quote = next(iter(next(iter(self.quotes.values())).values()))
        return {Errors: "errors", Accuracies: "accuracies", Times: "times", Condition: "conditions"}[type(quote)]

    def methods(self, experiment: str) -> list[str]:
        """Return its methods, in the paper's order."""
        return list(self.quotes[experiment])


_SVD_100, _NEWTON_100 = Errors(19.99, 0.16, 19.80), Errors(19.45, 0.33, 19.01)

_TABLE_1 = {
    "svd": _SVD_100,
    "svd+sn": Errors(19.94, 0.33, 19.60),
    "svd+ol": Errors(19.73, 0.28, 19.54),
    "svd+ow": Errors(20.06, 0.17, 19.94),
    "newton_schulz": _NEWTON_100,
}
_TABLE_2 = {
    "svd": _SVD_100,
    "svd+nog": Errors(19.43, 0.24, 19.15),
    "svd+nog+sn": Errors(19.43, 0.21, 19.20),
    "svd+nog+ol": Errors(20.14, 0.39, 19.54),
    "svd+nog+ow": Errors(19.22, 0.28, 18.90),
    "newton_schulz": _NEWTON_100,
}
_TABLE_3 = {
    "svd": _SVD_100,
    "svd+olr": Errors(19.50, 0.39, 18.95),
    "svd+nog+olr": Errors(19.77, 0.27, 19.36),
    "svd+ow+olr": Errors(20.61, 0.22, 20.43),
    "svd+nog+ow+olr": Errors(19.05, 0.31, 18.77),
    "newton_schulz": _NEWTON_100,
}
_TABLE_4 = {
    "CIFAR-10": {
        "svd": Errors(4.35, 0.09, 4.17),
        "svd+sn": Errors(4.31, 0.10, 4.15),
        "svd+ol": Errors(4.28, 0.07, 4.23),
        "svd+ow": Errors(4.42, 0.09, 4.28),
        "svd+nog": Errors(4.15, 0.06, 4.04),
        "svd+olr": Errors(4.23, 0.17, 3.98),
        "svd+nog+ow": Errors(4.09, 0.07, 4.01),
        "svd+nog+ow+olr": Errors(3.93, 0.09, 3.85),
        "newton_schulz": Errors(4.20, 0.11, 4.11),
    },
    "CIFAR-100": {name: (_TABLE_1 | _TABLE_2 | _TABLE_3)[name] for name in PAPER},
}
_TABLE_5 = {
    "svd": Accuracies(5, 73.13, 91.02),
    "svd+sn": Accuracies(2, 73.28, 91.11),
    "svd+ol": Accuracies(1, 71.75, 90.20),
    "svd+ow": Accuracies(2, 73.07, 90.93),
    "svd+nog": Accuracies(1, 73.51, 91.35),
    "svd+olr": Accuracies(0, 73.39, 91.26),
    "svd+nog+ow": Accuracies(0, 73.71, 91.43),
    "svd+nog+ow+olr": Accuracies(0, 73.82, 91.57),
    "newton_schulz": Accuracies(0, 73.36, 90.96),
}
_TABLE_6 = {
    "svd": Times(44, 95),
    "svd+nog": Times(44, 97),
    "svd+olr": Times(44, 96),
    "svd+ow": Times(48, 102),
    "svd+nog+ow+olr": Times(49, 106),
    "newton_schulz": Times(43, 93),
    "bn": Times(42, 90),
}
_SILENT = Condition()


def _figure(name: str, title: str, caption: str, quotes: Mapping[str, Quotes], **options: Any) -> Item:
    measure = {experiment: "cond_floor" if experiment == "ImageNet" else "cond_eps" for experiment in quotes}
    return Item(name, title, caption, quotes, measure, **options)


ITEMS: Mapping[str, Item] = MappingProxyType(
    {
        item.name: item
        for item in (
            Item(
                "table1",
                "Weight treatments",
                "Validation error with spectral norm, orthogonal loss and orthogonal weight, ResNet-50 on CIFAR-100.",
                {"CIFAR-100": _TABLE_1},
            ),
            Item(
                "table2",
                "Orthogonal gradient, with weight treatments",
                "Validation error with the nearest orthogonal gradient, ResNet-50 on CIFAR-100.",
                {"CIFAR-100": _TABLE_2},
            ),
            Item(
                "table3",
                "Optimal learning rate, with other treatments",
                "Validation error with the optimal learning rate, ResNet-50 on CIFAR-100.",
                {"CIFAR-100": _TABLE_3},
            ),
            Item(
                "table4",
                "Decorrelated batch norm",
                "Validation error of nine methods, ResNet-50 on CIFAR-10 and CIFAR-100.",
                _TABLE_4,
            ),
            Item(
                "table5",
                "Covariance pooling",
                "Failures of the solver in one training and validation accuracy, ResNet-18 on ImageNet.",
                {"ImageNet": _TABLE_5},
            ),
            Item(
                "table6",
                "Time of a step",
                "Milliseconds of a step forward and backward, ResNet-50 on CIFAR-100, on an RTX A6000.",
                {"CIFAR-100": _TABLE_6},
            ),
            _figure(
                "figure1",
                "Condition number in training",
                "Decorrelated batch norm beside Newton-Schulz and batch norm on CIFAR-100; covariance pooling beside "
                "Newton-Schulz on ImageNet.",
                {
                    "CIFAR-100": {"svd": Condition(1e12), "newton_schulz": Condition(1e5), "bn": Condition(1e3)},
                    "ImageNet": {"svd": Condition(1e16), "newton_schulz": Condition(1e15)},
                },
            ),
            _figure(
                "figure2",
                "Condition number with weight treatments",
                "Spectral norm, orthogonal loss and orthogonal weight, decorrelated batch norm on CIFAR-100.",
                {
                    "CIFAR-100": {
                        "svd": Condition(1e12),
                        "svd+sn": Condition(1e5),
                        "svd+ol": Condition(is_lower=True),
                        "svd+ow": Condition(1e3),
                    }
                },
            ),
            _figure(
                "figure3",
                "Condition number with the orthogonal gradient",
                "The nearest orthogonal gradient, alone and with weight treatments, on CIFAR-100.",
                {
                    "CIFAR-100": {
                        "svd": Condition(1e12),
                        "svd+nog": Condition(1e6),
                        **dict.fromkeys(("svd+nog+sn", "svd+nog+ol", "svd+nog+ow"), _SILENT),
                    }
                },
            ),
            _figure(
                "figure4",
                "Condition number with the optimal learning rate",
                "The optimal learning rate, alone and with other treatments, on CIFAR-100.",
                {
                    "CIFAR-100": {
                        "svd": Condition(1e12),
                        "svd+olr": Condition(1e4),
                        **dict.fromkeys(("svd+nog+olr", "svd+ow+olr", "svd+nog+ow+olr"), _SILENT),
                    }
                },
            ),
            _figure(
                "figure5",
                "Condition number of pooling, later in training",
                "Covariance pooling on ImageNet in the later stage; the spikes are the evaluation after every epoch.",
                {
                    "ImageNet": {
                        "svd": Condition(1e16),
                        "svd+ow": Condition(below_svd=1e15),
                        "svd+nog": Condition(below_svd=2e15),
                        "svd+olr": Condition(below_svd=1e15),
                        "svd+nog+ow": Condition(is_lower=True),
                        "svd+nog+ow+olr": Condition(below_svd=5e15),
                        "newton_schulz": Condition(1e15),
                    }
                },
                window=(0.5, 1.0),
                spikes=True,
            ),
        )
    }
)
"""The paper's tables and figures by name.

Example:
    >>> ITEMS["table5"].quotes["ImageNet"]["svd+nog"]
    Accuracies(failures=1, top1=73.51, top5=91.35)
"""


def chosen_items(names: Iterable[str]) -> list[Item]:
    """Return the items of names, each once, in the paper's order; ``all`` names every one.

    Raises:
        ArgumentError: there is no such item; the message lists them.

    Example:
        >>> [item.name for item in chosen_items(["figure1", "table1"])]
        ['table1', 'figure1']
    """
    wanted: set[str] = set()
    for name in names:
        check_choice(name, (*ITEMS, "all"), "item", "paper")
        wanted |= set(ITEMS) if name == "all" else {name}
    return [item for item in ITEMS.values() if item.name in wanted]


def config_of(
    experiment: str, scale: str, data: Path | None = None, settings: Mapping[str, Any] | None = None
) -> Config:
    """Return the configuration that represents an experiment of the paper at a scale.

    Args:
        experiment: one of `EXPERIMENTS`.
        scale: one of `SCALES`.
        data: a folder with the data, or with a folder for each dataset: ``cifar10``, ``cifar100``, ``imagenet``.
        settings: further settings to change.

    Raises:
        ArgumentError: ``data`` holds none of these and several datasets are needed.

    Example:
        >>> config_of("CIFAR-100", "digits").eps
        0.01
    """
    check_choice(scale, SCALES, "scale", "paper")
    place = EXPERIMENTS[experiment][scale]
    config = changed(preset(place.preset), {**place.settings, **(settings or {})})
    if data is None or config.dataset == "digits":
        return config
    folder = data / _FOLDERS[config.dataset]
    if not folder.is_dir() and any((data / name).is_dir() for name in _FOLDERS.values()):
        raise ArgumentError(f"there is no folder {folder}, which {experiment} needs; put the data there.")
    return changed(config, {"data": str((folder if folder.is_dir() else data).resolve())})
