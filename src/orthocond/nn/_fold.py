"""Folding for inference: whitening becomes part of the layer in front of it."""

import copy
import functools
import warnings
from collections import OrderedDict
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from orthocond._core.layout import Layout
from orthocond.errors import OrthocondWarning, check_module
from orthocond.nn._hooks import FORWARD, FORWARD_HOOKS
from orthocond.nn._in_front import layers_in_front
from orthocond.nn._norm import _DecorrelatedBatchNorm

__all__ = ["fold"]

M = TypeVar("M", bound=nn.Module)


@torch.no_grad()
def fold(module: M, *, keep_keys: bool = False) -> M:
    """Return a copy for inference with the same outputs as in eval mode, without whitening and parametrizations.

    In eval, decorrelated batch norm is a linear map. Where it follows a convolution or a linear layer directly, and
    that layer's output and weight are not used elsewhere, the map is multiplied into its weight and the norm
    disappears. Elsewhere it becomes a plain 1x1 convolution. Parametrizations (orthogonal and others) are replaced by
    the weight that they give. The result consists of plain torch layers, for `torch.export`, ONNX and other tools;
    layers that depend on their batch (covariance pooling, norms without running statistics) and orthogonal operators
    stay.

    The order of the layers is read from `torch.fx` traces: of the model or, where it can't be traced, of the parts
    that can. A linear layer is assumed to map ``(N, in)`` to ``(N, out)``, unless the last input of the norm after it
    had three dimensions. Monitors and treatments stay with the original. A norm that becomes a convolution because its
    surroundings can't be traced, because of a hook, or because the model computes with what ``parameters()`` returns
    (a penalty on the weights, seen where the model can be traced) gives a warning with the reason.

    Args:
        module: any model; it is not changed.
        keep_keys: put a neutral BatchNorm in the place of each norm that disappears, so that the ``state_dict`` of the
            copy has the keys and shapes of the architecture with BatchNorm, and can be loaded into it: by
            ``load_state_dict``, or by ``from_pretrained`` of Hugging Face models.

    Returns:
        A copy in eval mode.

    Example:
        >>> from orthocond.nn import DecorrelatedBatchNorm2d
        >>> fold(nn.Sequential(nn.Conv2d(3, 8, 3), DecorrelatedBatchNorm2d(8), nn.ReLU()))
        Sequential(
          (0): Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))
          (1): Identity()
          (2): ReLU()
        )
    """
    check_module(module, "fold")
    folded = _copied(module).eval()
    for layer in folded.modules():
        if parametrize.is_parametrized(layer):
            _leave_weights(layer)
    if isinstance(folded, _DecorrelatedBatchNorm):
        return _followed(_as_layer(folded), folded) if folded.running_mean is not None else folded  # type: ignore[return-value]
    in_front, reasons = layers_in_front(folded)
    for name, layer in list(folded.named_modules(remove_duplicate=False)):
        if not isinstance(layer, _DecorrelatedBatchNorm) or layer.running_mean is None:
            continue
        if layer in in_front:
            replacement = _merged(name, layer, in_front[layer], keep_keys)
        else:
            reason = reasons.get(layer, "no linear layer of its own is directly in front of it" if keep_keys else "")
            if reason:
                _warn(f"{name!r} became a 1x1 convolution{' with keys of its own' * keep_keys}, because {reason}")
            replacement = _followed(_as_layer(layer), layer)
        for hooks in FORWARD:
            setattr(replacement, hooks, getattr(layer, hooks))
        parent, _, child = name.rpartition(".")
        setattr(folded.get_submodule(parent), child, replacement)
    return folded.eval()


def _merged(name: str, norm: _DecorrelatedBatchNorm, layer: nn.Module, keep_keys: bool) -> nn.Module:
    """Multiply a norm into the layer in front, and return what takes its place."""
    shape = layer.weight.shape
    shift = _multiply_into(layer, norm, adds_bias=not keep_keys)
    if not keep_keys:
        return _followed(nn.Identity(), norm)
    if layer.weight.shape != shape:
        _warn(
            f"the weight in front of {name!r} has another shape than that of the unfolded model, because the norm "
            "mixes the groups of the convolution"
        )
    return _neutral(norm, shift)


def _warn(what: str) -> None:
    warnings.warn(f"fold: {what}.", OrthocondWarning, stacklevel=4)


def _copied(module: M) -> M:
    """Return a copy without monitors and treatments, which stay with the original."""
    groups = [layer.process_group for layer in module.modules() if isinstance(layer, _DecorrelatedBatchNorm)]
    hooks = [hook for layer in module.modules() for name in FORWARD_HOOKS for hook in getattr(layer, name).values()]
    shared = groups + [hook for hook in hooks if _is_ours(hook)]
    copied = copy.deepcopy(module, {id(part): part for part in shared})  # a process group can't be copied
    for layer in copied.modules():
        for name in FORWARD_HOOKS:
            for key in [key for key, hook in getattr(layer, name).items() if _is_ours(hook)]:
                for hooks_or_options in FORWARD:
                    getattr(layer, hooks_or_options).pop(key, None)
    return copied


def _is_ours(hook: Any) -> bool:
    """Return whether a hook belongs to this package: those of monitors and treatments watch, and change no output."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    owner = getattr(hook, "__module__", None) or type(hook).__module__
    return owner.partition(".")[0] == __name__.partition(".")[0]


def _leave_weights(layer: Any) -> None:
    """Replace the parametrizations of a copied layer by the weights that they give.

    `parametrize.remove_parametrizations` would take the weight from the class, which the original still uses.
    """
    weights = {name: getattr(layer, name).detach().clone() for name in layer.parametrizations}
    layer.__class__ = parametrize.type_before_parametrizations(layer)
    del layer.parametrizations
    for name, weight in weights.items():
        layer.register_parameter(name, nn.Parameter(weight))


def _multiply_into(layer: Any, norm: _DecorrelatedBatchNorm, *, adds_bias: bool) -> Tensor:
    """Change the linear layer so that it also applies the whitening after it.

    Returns:
        The shift that remains to be added: zero, unless the layer has no bias and must not get one.
    """
    old = layer.weight
    weight, shift = (part.double() for part in norm.eval_map())
    dense = torch.block_diag(*weight)
    layout = Layout.of(layer)
    groups, matrix = layout.groups, layout.matrix(old.double())
    like = old
    if groups > 1 and norm.groups % groups == 0:  # the whitening mixes channels within each group alone
        size = len(dense) // groups
        matrix = torch.stack([dense[i * size :][:size, i * size :][:, :size] @ matrix[i] for i in range(groups)])
    elif groups > 1:  # it mixes across groups: the convolution becomes one without groups
        matrix = dense @ torch.block_diag(*matrix)
        channels = (layer.in_channels, len(dense)) if layout.transposed else (len(dense), layer.in_channels)
        like, layer.groups = old.new_empty((*channels, *old.shape[2:])), 1
        layout = Layout.of(layer)
    else:
        matrix = dense @ matrix
    new = layout.kernel(matrix, like).to(old)
    if old.ndim == 4 and old.is_contiguous(memory_format=torch.channels_last) and not old.is_contiguous():
        new = new.contiguous(memory_format=torch.channels_last)
    shift = shift.flatten()
    if layer.bias is not None:
        shift = shift + dense @ layer.bias.double()
    layer.weight = nn.Parameter(new, requires_grad=old.requires_grad)
    if layer.bias is None and not adds_bias:
        return shift
    layer.bias = nn.Parameter(shift.to(old), requires_grad=old.requires_grad)
    return torch.zeros_like(shift)


def _as_layer(norm: _DecorrelatedBatchNorm) -> nn.Module:
    """Return a plain layer equivalent to the whitening in eval."""
    weight, bias = norm.eval_map()
    dense = torch.block_diag(*weight)
    n = norm.num_features
    if norm._dimensions == (2, 3):
        return _Pointwise(dense, bias.flatten())
    kind = nn.Conv2d if norm._dimensions == (4,) else nn.Conv3d
    layer = kind(n, n, 1, device=dense.device, dtype=dense.dtype)
    layer.weight = nn.Parameter(dense.view_as(layer.weight))
    layer.bias = nn.Parameter(bias.flatten())
    return layer.eval()


def _neutral(norm: _DecorrelatedBatchNorm, shift: Tensor) -> nn.Module:
    """Return a BatchNorm that in eval adds ``shift`` and does nothing else."""
    inside = dict(norm.named_children())
    kind: Any = _BATCHNORMS[norm._dimensions][bool(inside)]
    new = kind(norm.num_features, norm.batchnorm_eps, norm.momentum, norm.affine).to(norm.running_mean)
    new.running_mean.copy_(-shift)
    new.running_var.fill_(1 - norm.batchnorm_eps)  # to which the layer adds eps
    new.num_batches_tracked.copy_(norm.num_batches_tracked)
    for name, submodule in inside.items():
        new.add_module(name, submodule)
    neutral: nn.Module = new.eval()
    return neutral


class _WithModulesBehind(_BatchNorm):
    """A BatchNorm that applies its submodules to its output."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (the name that BatchNorm has)
        y = super().forward(input)
        for submodule in self.children():
            y = submodule(y)
        return y


class _BatchNorm1dAnd(_WithModulesBehind, nn.BatchNorm1d):
    pass


class _BatchNorm2dAnd(_WithModulesBehind, nn.BatchNorm2d):
    pass


class _BatchNorm3dAnd(_WithModulesBehind, nn.BatchNorm3d):
    pass


_BATCHNORMS: dict[tuple[int, ...], tuple[type[_BatchNorm], ...]] = {
    (2, 3): (nn.BatchNorm1d, _BatchNorm1dAnd),
    (4,): (nn.BatchNorm2d, _BatchNorm2dAnd),
    (5,): (nn.BatchNorm3d, _BatchNorm3dAnd),
}


def _followed(replacement: nn.Module, norm: _DecorrelatedBatchNorm) -> nn.Module:
    """Return what takes the norm's place, with the modules behind it that the norm had inside."""
    inside = dict(norm.named_children())
    return nn.Sequential(OrderedDict({"map": replacement, **inside})).eval() if inside else replacement


class _Pointwise(nn.Module):
    """A linear map of the channels of ``(N, C)`` or ``(N, C, L)``."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 2:
            return nn.functional.linear(x, self.weight, self.bias)
        return nn.functional.conv1d(x, self.weight.unsqueeze(-1), self.bias)
