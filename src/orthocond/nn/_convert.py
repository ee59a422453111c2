"""From BatchNorm to decorrelated batch norm."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from orthocond.errors import ArgumentError, check_choice
from orthocond.nn._norm import (
    DecorrelatedBatchNorm1d,
    DecorrelatedBatchNorm2d,
    DecorrelatedBatchNorm3d,
    _DecorrelatedBatchNorm,
)

__all__ = ["convert_batchnorm"]

_COUNTERPARTS: dict[type[nn.Module], type[_DecorrelatedBatchNorm]] = {
    nn.BatchNorm1d: DecorrelatedBatchNorm1d,
    nn.BatchNorm2d: DecorrelatedBatchNorm2d,
    nn.BatchNorm3d: DecorrelatedBatchNorm3d,
    nn.SyncBatchNorm: DecorrelatedBatchNorm2d,
}


def convert_batchnorm(module: nn.Module, names: Iterable[str] | None = None, **options: Any) -> nn.Module:
    """Replace BatchNorm by decorrelated batch norm, with everything that it has learned.

    Scale and shift, momentum, running mean, the count of batches, mode, device and dtype are carried over. The running
    variance becomes a diagonal whitening matrix, so that in eval mode the converted model gives the same outputs until
    it is trained.

    Args:
        module: a model, changed in place, or a BatchNorm layer.
        names: dotted names of the layers to convert; ``None`` for all of them. ``SyncBatchNorm`` is taken for two
            dimensions and becomes ``sync=True``.
        **options: for the new layers: ``eps``, ``rtol``, ``groups``, ``solver``, ``gradient``, ``sync``,
            ``process_group``.

    Returns:
        The model, or the new layer where ``module`` was a BatchNorm layer itself.

    Raises:
        ArgumentError: a name is not that of a BatchNorm layer of the model; the message lists them.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.BatchNorm2d(8))
        >>> convert_batchnorm(model, ["1"])[1]
        DecorrelatedBatchNorm2d(8, momentum=0.1, affine=True, track_running_stats=True, eps=0.0, rtol=0.0001)
    """
    found = {
        name: layer for name, layer in module.named_modules(remove_duplicate=False) if type(layer) in _COUNTERPARTS
    }
    if isinstance(names, str):
        raise ArgumentError(f"convert_batchnorm expected a list of names, got {names!r}; pass [{names!r}].")
    chosen = list(found) if names is None else list(names)
    for name in chosen:
        check_choice(name, found, "BatchNorm layer", "convert_batchnorm")
    converted = {layer: _converted(name, layer, options) for name, layer in found.items() if name in chosen}
    for name in chosen:
        if not name:
            return converted[module]
        parent, _, child = name.rpartition(".")
        setattr(module.get_submodule(parent), child, converted[found[name]])
    return module


@torch.no_grad()
def _converted(name: str, layer: Any, options: dict[str, Any]) -> _DecorrelatedBatchNorm:
    if isinstance(layer, nn.SyncBatchNorm):
        options = {"sync": True, "process_group": layer.process_group} | options
    like = next((part for part in (layer.weight, layer.running_mean) if part is not None), torch.empty(0))
    carried = {
        "momentum": layer.momentum,
        "affine": layer.affine,
        "track_running_stats": layer.track_running_stats,
        "device": like.device,
        "dtype": like.dtype,
    }
    try:
        new = _COUNTERPARTS[type(layer)](layer.num_features, **{**carried, **options})
    except ArgumentError as error:
        raise ArgumentError(f"convert_batchnorm of {name!r}: {error}") from None
    if layer.affine:
        new.weight, new.bias = layer.weight, layer.bias
    if new.running_mean is not None and new.running_whitening is not None and layer.running_mean is not None:
        new.running_mean.copy_(layer.running_mean)
        scale = (layer.running_var + layer.eps).rsqrt().view(new.groups, -1)
        new.running_whitening.copy_(torch.diag_embed(scale))
        if new.num_batches_tracked is not None:
            new.num_batches_tracked.copy_(layer.num_batches_tracked)
    return new.train(layer.training)
