"""Finding the Pre-SVD layer: the layer whose output a meta-layer decomposes."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from orthocond.errors import ArgumentError, check_floating, check_module
from orthocond.graph._join import Feed, Join, fed_channels, runs
from orthocond.graph._running import call, evaluating, tensors, unwrapped
from orthocond.nn import MetaLayer

__all__ = ["find_pre_svd", "has_matrix"]

_GATES = ("Sigmoid", "Hardsigmoid", "Softmax", "SafeSoftmax")
_TRANSPOSED = ("TBackward", "TransposeBackward", "PermuteBackward")
_PRODUCTS = ("Mul", "Bmm", "Mm")


def find_pre_svd(model: nn.Module, example_input: Any) -> dict[str, str | Join]:
    """Return for each meta-layer the layer whose output it decomposes, by their dotted names.

    The model runs in eval mode and is left as it was. From the input of each meta-layer the autograd graph is followed
    back, through normalisations, activations, reshapes and additions, to the nearest layers whose weight is a matrix.
    The usual result is one layer, by its name. Where several layers feed a meta-layer (a concatenation, a residual
    addition), the result is a `Join`, which says which channels of the meta-layer's input depend on which layer.

    Operands that only scale or shift the features are not followed: a sigmoid or softmax that multiplies them (a gate,
    the queries and keys of attention), and a layer without positions (one number per channel and image) where another
    layer produces the same channels.

    Args:
        model: a model with at least one meta-layer of `orthocond.nn`.
        example_input: an input of the model: a tensor, a tuple of arguments, a dict of keyword arguments, or a dict
            that the model takes as its only argument.

    Returns:
        ``{meta-layer: layer}``, with a `Join` in place of the layer's name where several layers feed the meta-layer.

    Raises:
        ArgumentError: no meta-layer, one that the model does not call, or one with no such layer behind it.

    Example:
        >>> from orthocond.nn import DecorrelatedBatchNorm2d
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Identity(), DecorrelatedBatchNorm2d(8))
        >>> find_pre_svd(model, torch.randn(2, 3, 9, 9))
        {'2': '0'}
    """
    check_module(model, "find_pre_svd")
    if not tensors(example_input) and hasattr(example_input, "__array__"):
        check_floating(example_input, "find_pre_svd")
    model = unwrapped(model)
    metas: dict[nn.Module, str] = {
        module: name for name, module in model.named_modules() if isinstance(module, MetaLayer)
    }
    if not metas:
        raise ArgumentError(
            "find_pre_svd found no meta-layer in the model; put one in, e.g. with orthocond.nn.convert_batchnorm."
        )
    matrices = {name: module for name, module in model.named_modules() if has_matrix(module)}
    produced: dict[Any, Layer] = {}
    reached: dict[str, list[Tensor]] = {name: [] for name in metas.values()}

    def after(name: str, output: Any) -> None:
        for tensor in tensors(output):
            if tensor.grad_fn is not None:
                produced.setdefault(tensor.grad_fn, Layer(name, _num_positions(matrices[name], tensor)))

    def before(module: nn.Module, inputs: tuple[Any, ...], named_inputs: dict[str, Any]) -> None:
        reached[metas[module]] += tensors((inputs, named_inputs))[:1]

    with evaluating(model) as handles, torch.enable_grad():
        for name, module in matrices.items():
            handles.append(module.register_forward_hook(lambda _, __, output, name=name: after(name, output)))
        handles += [module.register_forward_pre_hook(before, with_kwargs=True) for module in metas]
        call(model, example_input)
    owners = {
        parameter: Layer(name, None)
        for name, module in matrices.items()
        for parameter in module.parameters(recurse=False)
        if parameter.ndim >= 2
    }
    walk = _Walk(produced, owners)
    return {name: _feeds(model, example_input, name, inputs, walk) for name, inputs in reached.items()}


class Layer(NamedTuple):
    """A layer that made a node of the autograd graph."""

    name: str
    num_positions: int | None
    """The output's numbers per channel and image; None for a layer whose weight was used without calling it."""


def _feeds(model: nn.Module, example: Any, meta: str, inputs: list[Tensor], walk: "_Walk") -> str | Join:
    if not inputs:
        raise ArgumentError(f"the model did not call the meta-layer {meta!r} for the example input; pass another one.")
    nodes = walk.nearest([tensor.grad_fn for tensor in inputs])
    if not nodes:
        raise ArgumentError(
            f"the meta-layer {meta!r} has no layer with a matrix for a weight behind it; name the layer to treat."
        )
    depths: dict[str, int] = {}
    for node, layer in nodes.items():
        depths[layer.name] = max(walk.depth(node), depths.get(layer.name, 0))
    if len(depths) == 1:
        return next(iter(depths))
    channels = fed_channels(model, example, meta, list(depths))
    # A layer without positions adds to, or scales, what others make, unless some channels are its alone.
    with_positions = {layer.name for layer in nodes.values() if layer.num_positions != 1}
    if with_positions and max(tensor[0, 0].numel() for tensor in inputs) > 1:
        made = set().union(*(channels[name] for name in with_positions))
        channels = {name: those for name, those in channels.items() if name in with_positions or those - made}
    if len(channels) == 1:
        return next(iter(channels))
    order = sorted(channels, key=lambda name: (-depths[name], min(channels[name], default=0)))
    return Join(Feed(name, runs(channels[name])) for name in order)


class _Walk:
    """The autograd graph of one run, and the layers that made its nodes."""

    def __init__(self, produced: dict[Any, Layer], owners: dict[Any, Layer]) -> None:
        self.produced, self.owners = produced, owners
        self._called = {layer.name for layer in produced.values()}
        self._depths: dict[Any, int] = {}

    def layer(self, node: Any) -> Layer | None:
        """Return the layer that made a node, or whose weight it multiplies by, itself or transposed."""
        if node in self.produced:
            return self.produced[node]
        if node.name().startswith(_TRANSPOSED):
            return None
        for operand, _ in node.next_functions:
            if operand is not None and operand.name().startswith(_TRANSPOSED):
                operand = operand.next_functions[0][0]
            layer = self.owners.get(getattr(operand, "variable", None))
            if layer is not None:
                return layer
        return None

    def nearest(self, nodes: list[Any]) -> dict[Any, Layer]:
        """Return the nodes that layers made and that are reached first on the ways back, gates left out."""
        queue, found = list(nodes), dict[Any, Layer]()
        seen: set[Any] = set()
        for node in queue:  # breadth first: the list grows as it is walked
            if node is None or node in seen:
                continue
            seen.add(node)
            layer = self.layer(node)
            if layer is not None:
                found[node] = layer
            else:
                queue += self._followed(node)
        return found

    def depth(self, node: Any) -> int:
        """Return the number of layers on the longest way back from a node, its own included."""
        stack, depths = [node], self._depths
        while stack:
            behind = _operands(stack[-1])
            missing = [following for following in behind if following not in depths]
            if missing:
                stack.extend(missing)
            else:
                last = stack.pop()
                layer = self.layer(last)
                is_layer = last in self.produced or (layer is not None and layer.name not in self._called)
                depths[last] = max((depths[following] for following in behind), default=0) + is_layer
        return depths[node]

    def _followed(self, node: Any) -> list[Any]:
        """Return the operands of an operation that carry the features: of a product, those that are no gate."""
        operands = _operands(node)
        if node.name().startswith("ScaledDotProduct") and len(node.next_functions) > 2:  # query, key, value
            return [node.next_functions[2][0]]
        if not node.name().startswith(_PRODUCTS):
            return operands
        carrying = [operand for operand in operands if not self._is_gate(operand)]
        # A gate on a parameter or on the model's input: then its own layer is all there is.
        return carrying if any(map(self.depth, carrying)) else operands

    def _is_gate(self, node: Any) -> bool:
        while self.layer(node) is None:
            if node.name().startswith(_GATES):
                return True
            operands = _operands(node)
            if len(operands) != 1:
                return False
            node = operands[0]
        return False


def _operands(node: Any) -> list[Any]:
    return [following for following, _ in node.next_functions if following is not None]


def _num_positions(layer: nn.Module, output: Tensor) -> int:
    dim = channel_dim(layer, output)
    return output[0].numel() // output.shape[dim] if 0 < dim < output.ndim and output.numel() else 1


def channel_dim(layer: nn.Module, output: Tensor) -> int:
    """Return the dimension of the channels in the output of a linear layer or a convolution."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return output.ndim - (1 if isinstance(layer, nn.Linear) else weight.ndim - 1)


def has_matrix(module: nn.Module) -> bool:
    """Return whether a layer multiplies by a matrix, or convolves with one."""
    if isinstance(module, nn.LayerNorm | nn.RMSNorm | nn.Embedding | nn.EmbeddingBag):
        return False
    if parametrize.is_parametrized(module, "weight"):  # reading the weight itself may change state, and costs
        weight = next(module.parametrizations.weight.parameters(recurse=False), None)  # type: ignore[union-attr]
    else:
        weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim >= 2 and weight.is_floating_point()
