"""The experiments by name: the paper's three, and small ones that run on a laptop."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from orthocond.errors import check_choice
from orthocond.lab.config import Config

__all__ = ["PRESETS", "Preset", "preset"]


@dataclass(frozen=True)
class Preset:
    """A configuration and what it is for."""

    config: Config
    description: str


def _paper_dbn(name: str, dataset: str, num_classes: int) -> Preset:
    """Return decorrelated batch norm as in the paper; "B.1" is the first section of its appendix B."""
    return Preset(
        Config(
            name,
            dataset=dataset,
            num_classes=num_classes,
            model="resnet50",  # B.1: "We use ResNet-50 as the backbone"
            meta="dbn",  # B.1: "The BN layer after this layer is replaced with our decorrelated BN layer", Fig. 6
            small_images=True,  # B.1: 3x3 instead of 7x7, "The stride is also decreased from 2 to 1"
            width=64,  # of ResNet-50; Table 6's caption: the covariance is 1x64x64
            eps=1e-2,  # B.1, in the paper's source, commented out: "We set eps to 0.01"; the authors' code has it
            rtol=0.0,  # B.1: the inverse root of the whole covariance, nothing is dropped
            gradient="pade(clamp=true)",  # B.1: "the technique proposed in [Song et al., ICCV 2021]", as in its code
            epochs=350,  # B.1: "The training lasts 350 epochs"
            learning_rate=0.1,  # B.1: "the learning rate is initialized with 0.1"
            momentum=0.9,  # B.1: "momentum 0.9"
            weight_decay=5e-4,  # B.1: "weight decay 5e-4"
            schedule="steps",
            milestones=(100, 200, 300),  # B.1: "We decrease the learning rate by 10 every 100 epochs"
            gamma=0.1,
            batch_size=128,  # B.1: "The batch size is set to 128"
            pad=4,  # not in the paper: the usual augmentation of CIFAR
            flip=True,
            parts="ow(kind=operator)",  # the technique that eq. 13 cites, and the authors' code: normalised
        ),
        f"Tables 1 to 4 and 6: decorrelated batch norm, ResNet-50 on {dataset.partition('/')[2]}, 350 epochs",
    )


_GCP_IMAGENET = Preset(
    Config(
        "gcp-imagenet",
        dataset="ILSVRC/imagenet-1k",
        num_classes=1000,
        model="resnet18",  # B.2: "We use ResNet-18 for the GCP experiment"
        meta="gcp",  # B.2: "the last Global Average Pooling layer is replaced with our GCP layer", Fig. 7
        small_images=False,
        reduction=256,  # not in B.2: the networks that Fig. 7 cites pool 256 channels; here over 7x7 places: rank 48
        last_stride=2,  # not in B.2: 7x7 places; 1 has 14x14, the 196 in the commented half of Table 6's caption
        solver="svd",  # Table 5 counts the failures of the SVD solver
        gradient="pade(clamp=true)",  # B.2: "the technique proposed in [Song et al., ICCV 2021]", as in its code
        epochs=60,  # B.2: "The training process lasts 60 epochs"
        learning_rate=0.1,  # B.2: "initialize with 0.1"
        momentum=0.9,  # B.2
        weight_decay=1e-4,  # B.2: "weight decay 1e-4"
        schedule="steps",
        milestones=(30, 45),  # B.2: "We decrease the learning rate by 10 at epoch 30 and epoch 45"
        gamma=0.1,
        batch_size=256,  # B.2: "the batch size is set to 256"
        resize=256,  # B.2: "first resized to 256x256"
        crop=224,  # B.2: "randomly cropped to 224x224"
        flip=True,  # B.2: "randomly horizontal flip is used"
        parts="ow(kind=operator)",
        workers=8,
        monitor="input",  # Figs. 1 and 5: condition numbers of covariances in float64, those of evaluation too
        monitor_every=50,
        monitor_validation=True,
    ),
    "Table 5: covariance pooling, ResNet-18 on ImageNet, 60 epochs",
)


def _digits(name: str, meta: str, **settings: Any) -> Preset:
    return Preset(
        Config(
            name,
            dataset="digits",
            model="convnet",
            meta=meta,
            pad=1,
            flip=False,
            epochs=15,
            batch_size=64,
            learning_rate=0.1,
            schedule="linear",
            **settings,
        ),
        f"the embedded digits, {'a whitened stem' if meta == 'dbn' else 'covariance pooling'}: seconds",
    )


def _cifar10_small(name: str, meta: str, **settings: Any) -> Preset:
    return Preset(
        Config(
            name,
            dataset="uoft-cs/cifar10",
            model="resnet-small",
            meta=meta,
            epochs=3,
            batch_size=128,
            learning_rate=0.1,
            schedule="linear",
            **settings,
        ),
        f"CIFAR-10, eight layers, {'a whitened stem' if meta == 'dbn' else 'covariance pooling'}: minutes on a laptop",
    )


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        entry.config.preset: entry
        for entry in (
            _digits("dbn-digits", "dbn", width=8),
            _digits("gcp-digits", "gcp", width=16, reduction=16),
            _cifar10_small("dbn-cifar10-small", "dbn", width=16),
            _cifar10_small("gcp-cifar10-small", "gcp", width=16, reduction=32),
            _paper_dbn("dbn-cifar10", "uoft-cs/cifar10", 10),
            _paper_dbn("dbn-cifar100", "uoft-cs/cifar100", 100),
            _GCP_IMAGENET,
        )
    }
)
"""The presets by name.

Example:
    >>> PRESETS["gcp-imagenet"].description
    'Table 5: covariance pooling, ResNet-18 on ImageNet, 60 epochs'
"""


def preset(name: str) -> Config:
    """Return the configuration of a preset.

    Raises:
        ArgumentError: there is no such preset; the message lists them.

    Example:
        >>> preset("dbn-cifar10").milestones
        (100, 200, 300)
    """
    check_choice(name, PRESETS, "preset", "the run")
    return PRESETS[name].config
