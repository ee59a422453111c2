"""Residual networks with a whitened stem or a covariance-pooling head.

The networks are those of He et al., Deep residual learning for image recognition, CVPR 2016. The stem for CIFAR is the
paper's (Fig. 6): 3x3, stride 1, no pooling; the head for covariance pooling is Fig. 7's.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orthocond.errors import ArgumentError, check_choice
from orthocond.nn import CovariancePool2d, DecorrelatedBatchNorm2d

__all__ = ["DEPTHS", "ResNet", "resnet"]


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


DEPTHS: dict[int, tuple[type[BasicBlock] | type[Bottleneck], tuple[int, ...]]] = {
    18: (BasicBlock, (2, 2, 2, 2)),
    34: (BasicBlock, (3, 4, 6, 3)),
    50: (Bottleneck, (3, 4, 6, 3)),
    101: (Bottleneck, (3, 4, 23, 3)),
    152: (Bottleneck, (3, 8, 36, 3)),
}
"""Depth of the network: its block and how many of them each stage has."""


class ResNet(nn.Module):
    """A residual network, as `resnet` makes it: ``conv1``, ``bn1``, ``layer1`` to ``layer4``, ``pool``, ``fc``."""

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        blocks: tuple[int, ...],
        *,
        num_classes: int,
        small_images: bool,
        stem_norm: Callable[[int], nn.Module],
        pool: nn.Module,
        reduction: int | None,
    ) -> None:
        super().__init__()
        self.conv1 = _conv(3, 64, 3) if small_images else _conv(3, 64, 7, 2)
        self.bn1 = stem_norm(64)
        self.maxpool = nn.Identity() if small_images else nn.MaxPool2d(3, 2, 1)
        channels = 64
        for stage, count in enumerate(blocks):
            width, stride = 64 * 2**stage, 1 if stage == 0 else 2
            layers = []
            for number in range(count):
                layers.append(block(channels, width, stride if number == 0 else 1))
                channels = width * block.expansion
            self.add_module(f"layer{stage + 1}", nn.Sequential(*layers))
        self.reduce: nn.Module = nn.Identity()
        if reduction is not None:
            self.reduce = nn.Sequential(_conv(channels, reduction, 1), nn.BatchNorm2d(reduction), nn.ReLU())
            channels = reduction
        self.pool = pool
        features = channels * (channels + 1) // 2 if isinstance(pool, CovariancePool2d) else channels
        self.fc = nn.Linear(features, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images ``(N, 3, H, W)``."""
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        for name, stage in self.named_children():
            if name.startswith("layer"):
                x = stage(x)
        logits: Tensor = self.fc(torch.flatten(self.pool(self.reduce(x)), 1))
        return logits


def resnet(
    depth: int,
    *,
    num_classes: int = 1000,
    small_images: bool = False,
    stem: str = "bn",
    head: str = "average",
    reduction: int | None = None,
    **options: Any,
) -> ResNet:
    """Return a residual network, randomly initialised.

    Args:
        depth: one of `DEPTHS`.
        num_classes: of the classifier.
        small_images: the stem for CIFAR, 3x3 with stride 1 and no pooling, instead of ImageNet's.
        stem: ``"bn"``, or ``"dbn"`` for decorrelated batch norm.
        head: ``"average"``, or ``"covariance"`` for covariance pooling.
        reduction: channels of a 1x1 convolution in front of the head; ``None`` for none.
        **options: of the meta-layer: ``eps``, ``rtol``, ``solver``, ``gradient``; the stem's also ``groups``, ``sync``.

    Raises:
        ArgumentError: an unknown depth, stem or head.

    Example:
        >>> sum(p.numel() for p in resnet(18).parameters())
        11689512
    """
    if depth not in DEPTHS:
        raise ArgumentError(f"resnet got an unknown depth {depth!r}; choose one of {', '.join(map(str, DEPTHS))}.")
    check_choice(stem, ("bn", "dbn"), "stem", "resnet")
    check_choice(head, ("average", "covariance"), "head", "resnet")
    if options and (stem, head) == ("bn", "average"):
        raise ArgumentError(
            f"resnet got options ({', '.join(options)}) and no meta-layer for them; choose a stem or a head."
        )
    of_pool = {key: value for key, value in options.items() if key not in ("groups", "sync", "process_group")}
    block, blocks = DEPTHS[depth]
    return ResNet(
        block,
        blocks,
        num_classes=num_classes,
        small_images=small_images,
        stem_norm=nn.BatchNorm2d if stem == "bn" else lambda n: DecorrelatedBatchNorm2d(n, **options),
        pool=nn.AdaptiveAvgPool2d(1) if head == "average" else CovariancePool2d(**of_pool),
        reduction=reduction,
    )


def _conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    if inputs == outputs and stride == 1:
        return nn.Identity()
    return nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
