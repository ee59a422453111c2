"""Folding for inference: whitening becomes part of the layer in front of it."""

import copy
from collections import Counter
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn.utils import parametrize

from orthocond.linalg._kernels import kernel_matrix, matrix_kernel
from orthocond.nn._norm import _DecorrelatedBatchNorm

__all__ = ["fold"]

M = TypeVar("M", bound=nn.Module)

_Linear = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@torch.no_grad()
def fold(module: M) -> M:
    """Return a copy for inference with the same outputs in eval mode, and none of our layers left in front of it.

    In eval, decorrelated batch norm is a linear map. Where it follows a convolution or a linear layer directly, and
    that layer's output goes nowhere else, the map is multiplied into its weight and the layer disappears. Elsewhere it
    becomes a plain 1x1 convolution or a linear layer. Parametrizations (orthogonal and others) are replaced by the
    weight that they give. The result is plain torch, for `torch.export`, ONNX and whatever comes behind them.

    What follows what is read from a `torch.fx` trace; a model that can't be traced keeps the 1x1 convolutions, except
    within ``nn.Sequential``, where the order is known.

    Args:
        module: any model; it is not changed.

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
    folded = copy.deepcopy(module).eval()
    for layer in folded.modules():
        if parametrize.is_parametrized(layer):
            _leave_weights(layer)
    if isinstance(folded, _DecorrelatedBatchNorm):
        return _as_layer(folded)  # type: ignore[return-value]
    in_front = _layers_in_front(folded)
    for name, layer in list(folded.named_modules(remove_duplicate=False)):
        if not isinstance(layer, _DecorrelatedBatchNorm) or not layer.track_running_stats:
            continue
        parent, _, child = name.rpartition(".")
        replacement: nn.Module = nn.Identity()
        if layer in in_front:
            _multiply_into(in_front.pop(layer), layer)
        else:
            replacement = _as_layer(layer)
        setattr(folded.get_submodule(parent), child, replacement)
    return folded


def _leave_weights(layer: Any) -> None:
    """Replace the parametrizations of a copied layer by the weights that they give.

    `parametrize.remove_parametrizations` would take the weight from the class, which the original still uses.
    """
    weights = {name: getattr(layer, name).detach().clone() for name in layer.parametrizations}
    layer.__class__ = parametrize.type_before_parametrizations(layer)
    del layer.parametrizations
    for name, weight in weights.items():
        layer.register_parameter(name, nn.Parameter(weight))


def _layers_in_front(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return for each whitening layer the linear layer whose output is its input and goes nowhere else."""
    try:
        graph = _Tracer().trace(model)
    except Exception:
        return _layers_in_sequence(model)
    calls: Counter[object] = Counter()
    for node in graph.nodes:
        if node.op == "call_module":
            calls[node.target] += 1
    modules = dict(model.named_modules(remove_duplicate=False))
    in_front = {}
    for node in graph.nodes:
        if node.op != "call_module" or not isinstance(modules[node.target], _DecorrelatedBatchNorm):
            continue
        before = node.args[0] if node.args else None
        if not isinstance(before, torch.fx.Node) or before.op != "call_module" or len(before.users) != 1:
            continue
        once = calls[node.target] == calls[before.target] == 1
        if once and type(modules[before.target]) in _Linear:
            in_front[modules[node.target]] = modules[before.target]
    return _unshared(model, in_front)


def _layers_in_sequence(model: nn.Module) -> dict[nn.Module, nn.Module]:
    in_front: dict[nn.Module, nn.Module] = {}
    for container in model.modules():
        if isinstance(container, nn.Sequential):
            layers = list(container)
            for before, after in pairwise(layers):
                if isinstance(after, _DecorrelatedBatchNorm) and type(before) in _Linear:
                    in_front[after] = before
    return _unshared(model, in_front)


def _unshared(model: nn.Module, in_front: dict[nn.Module, nn.Module]) -> dict[nn.Module, nn.Module]:
    """Return the pairs whose layers appear once in the model: a shared layer's weight serves others, too."""
    uses = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    return {norm: layer for norm, layer in in_front.items() if uses[norm] == uses[layer] == 1}


class _Tracer(torch.fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, _DecorrelatedBatchNorm) or super().is_leaf_module(m, module_qualified_name)


def _multiply_into(layer: Any, norm: _DecorrelatedBatchNorm) -> None:
    """Change the linear layer so that it does what it and the whitening behind it did."""
    old = layer.weight
    weight, shift = (part.double() for part in norm.eval_map())
    dense = torch.block_diag(*weight)
    transposed = isinstance(layer, nn.modules.conv._ConvTransposeNd)
    groups = getattr(layer, "groups", 1)
    matrix = kernel_matrix(old.double(), groups=groups, transposed=transposed)
    if groups == 1:
        layer.weight = nn.Parameter(matrix_kernel(dense @ matrix, old, transposed=transposed).to(old))
    elif norm.groups % groups == 0:  # the whitening mixes channels within each group of the convolution alone
        size = dense.shape[0] // groups
        blocks = torch.stack([dense[i * size : (i + 1) * size, i * size : (i + 1) * size] for i in range(groups)])
        layer.weight = nn.Parameter(matrix_kernel(blocks @ matrix, old, groups=groups, transposed=transposed).to(old))
    else:  # it mixes across groups: the convolution becomes one without groups
        full = torch.block_diag(*matrix.flatten(0, 1).unflatten(0, (groups, -1)))
        inputs, outputs = layer.in_channels, dense.shape[0]
        shape = (inputs, outputs, *old.shape[2:]) if transposed else (outputs, inputs, *old.shape[2:])
        like = old.new_empty(shape)
        layer.weight = nn.Parameter(matrix_kernel(dense @ full, like, transposed=transposed).to(old))
        layer.groups = 1
    shift = shift.flatten()
    if layer.bias is not None:
        shift = shift + dense @ layer.bias.double()
    layer.bias = nn.Parameter(shift.to(old))


def _as_layer(norm: _DecorrelatedBatchNorm) -> nn.Module:
    """Return a plain layer that does what the whitening does in eval."""
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


class _Pointwise(nn.Module):
    """A linear map of the channels of ``(N, C)`` or ``(N, C, L)``."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 2:
            return nn.functional.linear(x, self.weight, self.bias)
        return nn.functional.conv1d(x, self.weight.unsqueeze(-1), self.bias)
