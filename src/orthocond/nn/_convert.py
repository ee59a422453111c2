"""From BatchNorm to decorrelated batch norm."""

import copy
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from orthocond.errors import ArgumentError, OrthocondWarning, check_choice, check_module
from orthocond.nn._hooks import CALLED
from orthocond.nn._norm import (
    DecorrelatedBatchNorm1d,
    DecorrelatedBatchNorm2d,
    DecorrelatedBatchNorm3d,
    _DecorrelatedBatchNorm,
    diagonal_whitening,
)

__all__ = ["convert_batchnorm"]

_COUNTERPARTS: dict[type[nn.Module], type[_DecorrelatedBatchNorm]] = {
    nn.BatchNorm1d: DecorrelatedBatchNorm1d,
    nn.BatchNorm2d: DecorrelatedBatchNorm2d,
    nn.BatchNorm3d: DecorrelatedBatchNorm3d,
    nn.SyncBatchNorm: DecorrelatedBatchNorm2d,
}


def convert_batchnorm(module: nn.Module, names: Iterable[str] | None = None, **options: Any) -> nn.Module:
    """Replace BatchNorm by decorrelated batch norm, keeping its parameters and statistics.

    Scale and shift, momentum, running mean, the count of batches, mode, device, dtype and hooks are carried over. The
    running variance becomes a diagonal whitening matrix, so that in eval mode the converted model gives the same
    outputs until it is trained. A checkpoint of the model with BatchNorm can be loaded into the converted model in the
    same way, by ``load_state_dict``.

    A subclass of BatchNorm is converted if it normalises and then applies its submodules one after another, such as
    the ``BatchNormAct2d`` of timm with its dropout and activation: the new layer gets the same submodules. This is
    tested on random features, in both modes; a subclass that does something else is refused.

    Args:
        module: a model, changed in place, or a BatchNorm layer.
        names: dotted names of the layers to convert; ``None`` for all of them. ``SyncBatchNorm`` is assumed to be
            two-dimensional and becomes ``sync=True``.
        **options: for the new layers: ``eps``, ``rtol``, ``groups``, ``solver``, ``gradient``, ``sync``,
            ``process_group``.

    Returns:
        The model, or the new layer where ``module`` was a BatchNorm layer itself.

    Raises:
        ArgumentError: a name is not that of a BatchNorm layer of the model (the message lists them), or a layer can't
            be converted; then none is converted.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.BatchNorm2d(8))
        >>> convert_batchnorm(model, ["1"])[1]
        DecorrelatedBatchNorm2d(8, momentum=0.1, affine=True, track_running_stats=True, eps=0.0, rtol=0.0001)
    """
    check_module(module, "convert_batchnorm")
    norms = {
        name: layer for name, layer in module.named_modules(remove_duplicate=False) if isinstance(layer, _BatchNorm)
    }
    if isinstance(names, str):
        raise ArgumentError(f"convert_batchnorm expected a list of names, got {names!r}; pass [{names!r}].")
    chosen = list(norms) if names is None else list(names)
    for name in chosen:
        check_choice(name, norms, "BatchNorm layer", "convert_batchnorm")
    if not chosen:
        reason = "found no BatchNorm layer in the model" if names is None else "got an empty list of names"
        warnings.warn(f"convert_batchnorm {reason}; nothing was converted.", OrthocondWarning, stacklevel=2)
    converted = {layer: _converted(name, layer, options) for name, layer in norms.items() if name in chosen}
    for name in chosen:
        if not name:
            return converted[norms[name]]
        parent, _, child = name.rpartition(".")
        setattr(module.get_submodule(parent), child, converted[norms[name]])
    return module


@torch.no_grad()
def _converted(name: str, layer: Any, options: dict[str, Any]) -> _DecorrelatedBatchNorm:
    counterpart = _counterpart(name, layer)
    if isinstance(layer, nn.SyncBatchNorm):
        options = {"sync": True, "process_group": layer.process_group} | options
    like = next((part for part in (layer.weight, layer.running_mean) if part is not None), torch.empty(0))
    carried = {
        "momentum": layer.momentum,
        "affine": layer.affine,
        "track_running_stats": layer.running_mean is not None,
        "device": like.device,
        "dtype": like.dtype,
    }
    try:
        new = counterpart(layer.num_features, **{**carried, **options})
    except ArgumentError as error:
        raise ArgumentError(f"convert_batchnorm of {name!r}: {error}") from None
    if layer.affine:
        new.weight, new.bias = layer.weight, layer.bias
    new.batchnorm_eps = layer.eps
    if "track_running_stats" not in options:
        new.track_running_stats = layer.track_running_stats
    if new.running_mean is not None and new.running_whitening is not None and layer.running_mean is not None:
        new.running_mean.copy_(layer.running_mean)
        new.running_whitening.copy_(diagonal_whitening(layer.running_var, layer.eps, new.groups))
        if new.num_batches_tracked is not None:
            new.num_batches_tracked.copy_(layer.num_batches_tracked)
    for child, submodule in layer.named_children():
        new.add_module(child, submodule)
    for hooks in CALLED:  # the same dicts, so that who registered a hook can remove it
        setattr(new, hooks, getattr(layer, hooks))
    new.training = layer.training
    return new


def _counterpart(name: str, layer: _BatchNorm) -> type[_DecorrelatedBatchNorm]:
    """Return the class that ``layer`` becomes, or raise for what can't be converted faithfully."""
    kind = type(layer)
    reason = _what_it_has_besides(layer)
    if kind in _COUNTERPARTS and not reason:
        return _COUNTERPARTS[kind]
    if isinstance(layer, LazyModuleMixin):
        raise ArgumentError(
            f"convert_batchnorm can't convert {name!r}: a {kind.__name__} doesn't know its number of channels yet; "
            "call the model once, then convert it."
        )
    base = next((base for base in _COUNTERPARTS if isinstance(layer, base)), None)
    reason = reason or ("its number of dimensions is unknown" if base is None else _what_it_does_besides(layer, base))
    if base is None or reason:
        raise ArgumentError(
            f"convert_batchnorm can't convert {name!r}, a {kind.__name__}: {reason}; name the layers to convert "
            "without it, or put a plain BatchNorm in its place."
        )
    return _COUNTERPARTS[base]


def _what_it_has_besides(layer: _BatchNorm) -> str:
    """Return what a layer has that its counterpart can't have, empty for nothing."""
    if parametrize.is_parametrized(layer):
        return "it has a parametrization, which torch.nn.utils.parametrize.remove_parametrizations takes away"
    own = {name for name, _ in (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False))}
    more = sorted(own - {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"})
    if more:
        return f"it has parameters or buffers that BatchNorm doesn't have ({', '.join(more)})"
    if layer._load_state_dict_pre_hooks:
        return "it has a hook on load_state_dict that is bound to it, which its handle can remove"
    return ""


def _what_it_does_besides(layer: _BatchNorm, base: type[nn.Module]) -> str:
    """Return what a subclass of ``base`` does besides normalising and applying its submodules, empty for nothing."""
    sizes: dict[type[nn.Module], tuple[int, ...]] = {nn.BatchNorm1d: (), nn.BatchNorm3d: (2, 3, 3)}
    like = next((part for part in (layer.weight, layer.running_mean) if part is not None), torch.empty(0))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(
        5, layer.num_features, *sizes.get(base, (3, 3)), generator=generator, dtype=torch.float64, device="cpu"
    ).to(like)
    for training in (True, False):
        if training and base is nn.SyncBatchNorm:  # which runs on a GPU alone
            continue
        tried = copy.deepcopy(layer).eval()
        tried.training = training
        expected = _normalised(tried, x)
        try:
            for submodule in tried.children():
                expected = submodule(expected)
            agrees = torch.allclose(tried.forward(x.clone()), expected, rtol=1e-3, atol=1e-3)
        except Exception as error:  # a subclass may do anything
            return f"trying it out failed ({type(error).__name__}: {error})"
        if not agrees:
            mode = "training" if training else "eval"
            return f"in {mode} mode it does something other than to normalise and to apply its submodules in order"
    return ""


def _normalised(layer: _BatchNorm, x: Tensor) -> Tensor:
    uses_batch = layer.training or layer.running_mean is None
    mean, variance = (None, None) if uses_batch else (layer.running_mean, layer.running_var)
    return nn.functional.batch_norm(x, mean, variance, layer.weight, layer.bias, uses_batch, 0.0, layer.eps)
