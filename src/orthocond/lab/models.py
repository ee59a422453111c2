"""Networks with a whitened stem or a covariance-pooling head.

The residual networks are those of He et al., Deep residual learning for image recognition, CVPR 2016. The stem for
CIFAR is the paper's (Fig. 6): 3x3, stride 1, no pooling; the head for covariance pooling is Fig. 7's.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orthocond.errors import ArgumentError, check_choice
from orthocond.nn import CovariancePool2d, DecorrelatedBatchNorm2d

__all__ = ["MODELS", "ConvNet", "ResNet", "build"]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(inputs, width, 3, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width, 3), nn.BatchNorm2d(width)
        self.downsample = _shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.downsample(x))


class Bottleneck(nn.Module):
    """A 1x1, a 3x3 and a 1x1 convolution, and a shortcut."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(inputs, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = _conv(width, 4 * width, 1), nn.BatchNorm2d(4 * width)
        self.downsample = _shortcut(inputs, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.downsample(x))


@dataclass(frozen=True)
class Plan:
    """The layout of a residual network."""

    block: type[BasicBlock] | type[Bottleneck]
    blocks: tuple[int, ...]
    """How many blocks each stage has."""
    widths: tuple[int, ...] = (64, 128, 256, 512)
    strides: tuple[int, ...] = (1, 2, 2, 2)


DEPTHS = {
    18: Plan(BasicBlock, (2, 2, 2, 2)),
    34: Plan(BasicBlock, (3, 4, 6, 3)),
    50: Plan(Bottleneck, (3, 4, 6, 3)),
    101: Plan(Bottleneck, (3, 4, 23, 3)),
    152: Plan(Bottleneck, (3, 8, 36, 3)),
}
"""The published networks by depth."""

SMALL = Plan(BasicBlock, (1, 1, 1), (32, 64, 128), (2, 2, 2))
"""Eight layers that a laptop trains on CIFAR-10."""


class ResNet(nn.Module):
    """A residual network: ``conv1``, ``bn1``, ``layer1`` and so on, ``reduce``, ``pool``, ``fc``."""

    def __init__(
        self,
        plan: Plan,
        *,
        channels: int,
        num_classes: int,
        small_images: bool,
        stem_norm: nn.Module,
        pool: nn.Module,
        reduction: int | None,
        last_stride: int,
    ) -> None:
        super().__init__()
        width = _num_features(stem_norm)
        strides = (*plan.strides[:-1], last_stride)
        self.conv1 = _conv(channels, width, 3) if small_images else _conv(channels, width, 7, 2)
        self.bn1 = stem_norm
        self.maxpool = nn.Identity() if small_images else nn.MaxPool2d(3, 2, 1)
        for stage, (count, outputs, stride) in enumerate(zip(plan.blocks, plan.widths, strides, strict=True)):
            layers = []
            for number in range(count):
                layers.append(plan.block(width, outputs, stride if number == 0 else 1))
                width = outputs * plan.block.expansion
            self.add_module(f"layer{stage + 1}", nn.Sequential(*layers))
        self.reduce: nn.Module = nn.Identity()
        if reduction is not None:
            self.reduce = nn.Sequential(_conv(width, reduction, 1), nn.BatchNorm2d(reduction), nn.ReLU())
            width = reduction
        self.pool = pool
        self.fc = nn.Linear(_num_pooled(pool, width), num_classes)
        _initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images ``(N, C, H, W)``."""
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        for name, stage in self.named_children():
            if name.startswith("layer"):
                x = stage(x)
        logits: Tensor = self.fc(torch.flatten(self.pool(self.reduce(x)), 1))
        return logits


class ConvNet(nn.Module):
    """Three convolutions for images of a few pixels; the stem's norm is the only one.

    So under DDP with a synchronised stem nothing depends on how the batch is divided.
    """

    def __init__(
        self, *, channels: int, num_classes: int, stem_norm: nn.Module, pool: nn.Module, reduction: int | None
    ) -> None:
        super().__init__()
        width = _num_features(stem_norm)
        last = 32 if reduction is None else reduction
        self.conv1, self.bn1 = _conv(channels, width, 3), stem_norm
        self.conv2, self.conv3 = nn.Conv2d(width, 32, 3, padding=1), nn.Conv2d(32, last, 3, padding=1)
        self.pool = pool
        self.fc = nn.Linear(_num_pooled(pool, last), num_classes)
        _initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images ``(N, C, H, W)``."""
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.conv3(F.max_pool2d(F.relu(self.conv2(x)), 2)))
        logits: Tensor = self.fc(torch.flatten(self.pool(x), 1))
        return logits


MODELS = MappingProxyType(
    {
        **{f"resnet{depth}": f"ResNet-{depth} as published" for depth in DEPTHS},
        "resnet-small": "a residual network of eight layers for CIFAR-10 on a laptop",
        "convnet": "three convolutions for images of a few pixels",
    }
)
"""The networks by name, with a description."""


def build(
    name: str,
    *,
    channels: int = 3,
    num_classes: int = 1000,
    small_images: bool = False,
    stem: str = "bn",
    head: str = "average",
    width: int = 64,
    reduction: int | None = None,
    last_stride: int = 2,
    **options: Any,
) -> ResNet | ConvNet:
    """Return a network, randomly initialised.

    Args:
        name: one of `MODELS`.
        channels: channels of the images.
        num_classes: classes of the classifier.
        small_images: the stem for CIFAR, 3x3 with stride 1 and no pooling, instead of ImageNet's; the small networks
            always have it.
        stem: ``"bn"``, or ``"dbn"`` for decorrelated batch norm.
        head: ``"average"``, or ``"covariance"`` for covariance pooling.
        width: channels of the stem.
        reduction: channels of a 1x1 convolution in front of the head, or of the last convolution of ``convnet``;
            ``None`` for none.
        last_stride: stride of the last stage of a residual network; with 1 the head pools four times as many places.
        **options: options of the meta-layer: ``eps``, ``rtol``, ``solver``, ``gradient``; the stem's also ``groups``,
            ``sync``.

    Raises:
        ArgumentError: an unknown network, stem or head.

    Example:
        >>> sum(p.numel() for p in build("resnet18").parameters())
        11689512
    """
    check_choice(name, MODELS, "model", "build")
    check_choice(stem, ("bn", "dbn"), "stem", "build")
    check_choice(head, ("average", "covariance"), "head", "build")
    if options and (stem, head) == ("bn", "average"):
        raise ArgumentError(
            f"build got options ({', '.join(options)}) and no meta-layer for them; choose a stem or a head."
        )
    of_pool = {key: value for key, value in options.items() if key not in ("groups", "sync", "process_group")}
    parts: dict[str, Any] = {
        "channels": channels,
        "num_classes": num_classes,
        "stem_norm": nn.BatchNorm2d(width) if stem == "bn" else DecorrelatedBatchNorm2d(width, **options),
        "pool": nn.AdaptiveAvgPool2d(2 if name == "convnet" else 1)
        if head == "average"
        else CovariancePool2d(**of_pool),
        "reduction": reduction,
    }
    if name == "convnet":
        return ConvNet(**parts)
    parts["last_stride"] = last_stride
    if name == "resnet-small":
        return ResNet(SMALL, small_images=True, **parts)
    return ResNet(DEPTHS[int(name.removeprefix("resnet"))], small_images=small_images, **parts)


def _initialise(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def _num_features(norm: nn.Module) -> int:
    assert isinstance(norm, nn.BatchNorm2d | DecorrelatedBatchNorm2d)
    return norm.num_features


def _num_pooled(pool: nn.Module, width: int) -> int:
    if isinstance(pool, nn.AdaptiveAvgPool2d):
        return width * int(pool.output_size) ** 2  # type: ignore[arg-type]
    return width * (width + 1) // 2


def _conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    if inputs == outputs and stride == 1:
        return nn.Identity()
    return nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
