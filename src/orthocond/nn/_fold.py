"""Folding for inference: whitening becomes part of the layer in front of it."""

import copy
import inspect
from collections import Counter, OrderedDict
from typing import Any, TypeVar

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn.utils import parametrize

from orthocond._core.layout import kernel_matrix, matrix_kernel
from orthocond.nn._meta import MetaLayer
from orthocond.nn._norm import _DecorrelatedBatchNorm
from orthocond.nn._skew import SkewOrthogonalConv2d

__all__ = ["LINEAR_LAYERS", "Tracer", "fold"]

M = TypeVar("M", bound=nn.Module)

LINEAR_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@torch.no_grad()
def fold(module: M) -> M:
    """Return a copy for inference, with the same outputs as in eval mode, and neither whitening nor parametrizations.

    In eval, decorrelated batch norm is a linear map. Where it follows a convolution or a linear layer directly, and
    that layer's output and weight go nowhere else, the map is multiplied into its weight and the layer disappears.
    Elsewhere it becomes a plain 1x1 convolution. Parametrizations (orthogonal and others) are replaced by the weight
    that they give. What is left is plain torch, for `torch.export`, ONNX and whatever comes behind them; layers that
    depend on their batch (covariance pooling, norms without running statistics) and orthogonal operators stay.

    What follows what is read from `torch.fx` traces, of the model or, where it can't be traced, of the parts that can.
    A linear layer is taken to map ``(N, in)`` to ``(N, out)``, unless the norm behind it last saw three dimensions.

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
    groups = [layer.process_group for layer in module.modules() if isinstance(layer, _DecorrelatedBatchNorm)]
    folded = copy.deepcopy(module, {id(group): group for group in groups}).eval()  # a process group can't be copied
    for layer in folded.modules():
        if parametrize.is_parametrized(layer):
            _leave_weights(layer)
    if isinstance(folded, _DecorrelatedBatchNorm):
        return _followed(_as_layer(folded), folded) if folded.track_running_stats else folded  # type: ignore[return-value]
    in_front = _layers_in_front(folded)
    for name, layer in list(folded.named_modules(remove_duplicate=False)):
        if not isinstance(layer, _DecorrelatedBatchNorm) or not layer.track_running_stats:
            continue
        parent, _, child = name.rpartition(".")
        if layer in in_front:
            _multiply_into(in_front[layer], layer)
            replacement: nn.Module = nn.Identity()
        else:
            replacement = _as_layer(layer)
        replacement = _followed(replacement, layer)
        replacement._forward_hooks, replacement._forward_pre_hooks = layer._forward_hooks, layer._forward_pre_hooks
        setattr(folded.get_submodule(parent), child, replacement)
    return folded.eval()


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
    uses = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    found = _traced_pairs(model)
    return {
        norm: layer
        for norm, layer in found.items()
        if uses[norm] == uses[layer] == 1  # a shared layer's weight serves others, too
        and not layer._forward_hooks
        and not layer._forward_pre_hooks
        and not norm._forward_pre_hooks
        and not (isinstance(layer, nn.Linear) and norm._last_ndim == 3)
    }


def _traced_pairs(module: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return whitening layers and the linear layers in front of them, as far as traces show them."""
    parameters = inspect.signature(module.forward).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    try:
        # Once with optional arguments given and once without: what holds both times holds.
        given = _pairs_of(module, {})
        pairs = given if not defaults else dict(given.items() & _pairs_of(module, defaults).items())
    except Exception:  # a forward may do anything; what can't be traced may have parts that can
        pairs = {}
        for child in module.children():
            pairs |= _traced_pairs(child) if not isinstance(child, nn.Sequential | nn.ModuleList | nn.ModuleDict) else {
                norm: layer for part in child.children() for norm, layer in _traced_pairs(part).items()
            }  # fmt: skip
    return pairs


def _pairs_of(module: nn.Module, arguments: dict[str, Any]) -> dict[nn.Module, nn.Module]:
    graph = Tracer().trace(module, arguments)
    calls = Counter(node.target for node in graph.nodes if node.op == "call_module")
    read = {str(node.target).rpartition(".")[0] for node in graph.nodes if node.op == "get_attr"}
    modules = dict(module.named_modules(remove_duplicate=False))
    pairs = {}
    for node in graph.nodes:
        if node.op != "call_module" or not isinstance(modules[node.target], _DecorrelatedBatchNorm):
            continue
        before = next(iter(node.all_input_nodes), None)
        if before is None or before.op != "call_module" or len(before.users) != 1 or before.target in read:
            continue
        if calls[node.target] == calls[before.target] == 1 and type(modules[before.target]) in LINEAR_LAYERS:
            pairs[modules[node.target]] = modules[before.target]
    return pairs


class Tracer(torch.fx.Tracer):
    """Traces models with meta-layers and orthogonal operators as they are, without looking inside."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether a module is one node of the trace."""
        return isinstance(m, MetaLayer | SkewOrthogonalConv2d) or super().is_leaf_module(m, module_qualified_name)


def _multiply_into(layer: Any, norm: _DecorrelatedBatchNorm) -> None:
    """Change the linear layer so that it does what it and the whitening behind it did."""
    old = layer.weight
    weight, shift = (part.double() for part in norm.eval_map())
    dense = torch.block_diag(*weight)
    transposed = isinstance(layer, nn.modules.conv._ConvTransposeNd)
    groups = getattr(layer, "groups", 1)
    matrix = kernel_matrix(old.double(), groups=groups, transposed=transposed)
    like = old
    if groups > 1 and norm.groups % groups == 0:  # the whitening mixes channels within each group alone
        size = len(dense) // groups
        matrix = torch.stack([dense[i * size :][:size, i * size :][:, :size] @ matrix[i] for i in range(groups)])
    elif groups > 1:  # it mixes across groups: the convolution becomes one without groups
        matrix = dense @ torch.block_diag(*matrix)
        channels = (layer.in_channels, len(dense)) if transposed else (len(dense), layer.in_channels)
        like, groups, layer.groups = old.new_empty((*channels, *old.shape[2:])), 1, 1
    else:
        matrix = dense @ matrix
    new = matrix_kernel(matrix, like, groups=groups, transposed=transposed).to(old)
    if old.ndim == 4 and old.is_contiguous(memory_format=torch.channels_last) and not old.is_contiguous():
        new = new.contiguous(memory_format=torch.channels_last)
    shift = shift.flatten()
    if layer.bias is not None:
        shift = shift + dense @ layer.bias.double()
    layer.weight = nn.Parameter(new, requires_grad=old.requires_grad)
    layer.bias = nn.Parameter(shift.to(old), requires_grad=old.requires_grad)


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
