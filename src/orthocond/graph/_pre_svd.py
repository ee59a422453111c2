"""Finding the Pre-SVD layer: the one whose output a meta-layer decomposes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from orthocond.errors import ArgumentError
from orthocond.nn._meta import MetaLayer

__all__ = ["call", "evaluating", "find_pre_svd", "has_matrix", "tensors", "unwrapped"]


def find_pre_svd(model: nn.Module, example_input: Any) -> dict[str, str]:
    """Return for each meta-layer the layer whose output it decomposes, by their dotted names.

    The model is run once, in eval mode and without a trace on it. From the input of each meta-layer the autograd graph
    is followed back, through normalisations, activations and reshapes, to the nearest layer with a matrix for a weight.
    Where ways meet, it is the one that has the images' size and the most layers behind it: of a residual addition the
    end of the branch, not of the shortcut, and never a gate.

    Args:
        model: with at least one meta-layer of `orthocond.nn`.
        example_input: an input of the model: a tensor, or a tuple or a dict of arguments.

    Raises:
        ArgumentError: no meta-layer, one that the model does not call, or one with no such layer behind it.

    Example:
        >>> from orthocond.nn import DecorrelatedBatchNorm2d
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Identity(), DecorrelatedBatchNorm2d(8))
        >>> find_pre_svd(model, torch.randn(2, 3, 9, 9))
        {'2': '0'}
    """
    model = unwrapped(model)
    metas: dict[nn.Module, str] = {
        module: name for name, module in model.named_modules() if isinstance(module, MetaLayer)
    }
    if not metas:
        raise ArgumentError(
            "find_pre_svd found no meta-layer in the model; put one in, e.g. with orthocond.nn.convert_batchnorm."
        )
    produced: dict[Any, Layer] = {}
    reached: dict[str, Tensor] = {}

    def after(name: str, output: Any) -> None:
        for tensor in tensors(output):
            if tensor.grad_fn is not None:
                produced.setdefault(tensor.grad_fn, Layer(name, tensor.shape[2:]))

    def before(module: nn.Module, inputs: tuple[Any, ...], named_inputs: dict[str, Any]) -> None:
        for tensor in tensors((inputs, named_inputs))[:1]:
            reached.setdefault(metas[module], tensor)

    with evaluating(model) as handles, torch.enable_grad():
        for name, module in model.named_modules():
            if has_matrix(module):
                handles.append(module.register_forward_hook(lambda _, __, output, name=name: after(name, output)))
        handles += [module.register_forward_pre_hook(before, with_kwargs=True) for module in metas]
        call(model, example_input)
    owners = {
        parameter: Layer(name, None)
        for name, module in model.named_modules()
        if has_matrix(module)
        for parameter in module.parameters(recurse=False)
        if parameter.ndim >= 2
    }
    return {name: _nearest(name, reached, produced, owners) for name in metas.values()}


class Layer(NamedTuple):
    """A layer that made a node of the autograd graph."""

    name: str
    shape: torch.Size | None
    """The output's, from the third dimension on; None for a layer whose weight was used without calling it."""


def _nearest(meta: str, reached: dict[str, Tensor], produced: dict[Any, Layer], owners: dict[Any, Layer]) -> str:
    if meta not in reached:
        raise ArgumentError(f"the model did not call the meta-layer {meta!r} for the example input; pass another one.")
    queue, found = [reached[meta].grad_fn], dict[Any, Layer]()
    seen: set[Any] = set()
    for node in queue:  # breadth first: the list grows as it is walked
        if node is None or node in seen:
            continue
        seen.add(node)
        layer = produced.get(node) or _owner(node, owners)
        if layer is not None:
            found[node] = layer
        else:
            queue.extend(following for following, _ in node.next_functions)
    if not found:
        raise ArgumentError(
            f"the meta-layer {meta!r} has no layer with a matrix for a weight behind it; name the layer to treat."
        )
    # What has the images' size made them; a gate or a condition that is multiplied or added to them hasn't.
    fitting = [node for node, layer in found.items() if layer.shape == reached[meta].shape[2:]] or list(found)
    depths = _depths(fitting, produced | found)
    return found[max(fitting, key=depths.__getitem__)].name  # the first of them where several are as deep


def _owner(node: Any, owners: dict[Any, Layer]) -> Layer | None:
    """Return the layer whose weight the operation multiplies by, itself or transposed."""
    for operand, _ in node.next_functions:
        if operand is not None and operand.name().startswith(("TBackward", "TransposeBackward", "PermuteBackward")):
            operand = operand.next_functions[0][0]
        layer = owners.get(getattr(operand, "variable", None))
        if layer is not None:
            return layer
    return None


def _depths(nodes: list[Any], produced: dict[Any, Layer]) -> dict[Any, int]:
    """Return for nodes of the autograd graph, and all behind them, the number of layers on the longest way back."""
    depths: dict[Any, int] = {}
    stack = list(nodes)
    while stack:
        node = stack[-1]
        behind = [following for following, _ in node.next_functions if following is not None]
        missing = [following for following in behind if following not in depths]
        if missing:
            stack.extend(missing)
        else:
            depths[node] = max((depths[following] for following in behind), default=0) + (node in produced)
            stack.pop()
    return depths


def has_matrix(module: nn.Module) -> bool:
    """Return whether a layer multiplies by a matrix, or convolves with one."""
    if isinstance(module, nn.LayerNorm | nn.RMSNorm | nn.Embedding | nn.EmbeddingBag):
        return False
    if parametrize.is_parametrized(module, "weight"):  # reading the weight itself may change state, and costs
        weight = next(module.parametrizations.weight.parameters(recurse=False), None)  # type: ignore[union-attr]
    else:
        weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim >= 2 and weight.is_floating_point()


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside DDP and `torch.compile`."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


@contextmanager
def evaluating(model: nn.Module) -> Iterator[list[Any]]:
    """Put the model in eval mode for a while; the hooks in the list are removed and the modes restored at the end."""
    modes = {module: module.training for module in model.modules()}
    handles: list[Any] = []
    try:
        model.eval()
        yield handles
    finally:
        for handle in handles:
            handle.remove()
        for module, training in modes.items():
            module.training = training


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors in a nest of tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    return [tensor for part in value for tensor in tensors(part)] if isinstance(value, tuple | list) else []


def call(model: nn.Module, example: Any) -> Any:
    """Return what the model gives for an example: a tensor, or a tuple or a dict of arguments."""
    if isinstance(example, dict):
        return model(**{name: _tracked(part) for name, part in example.items()})
    if isinstance(example, tuple):
        return model(*(_tracked(part) for part in example))
    return model(_tracked(example))


def _tracked(value: Any) -> Any:
    """Return an input that has a graph even where all parameters are frozen."""
    return value.detach().requires_grad_() if isinstance(value, Tensor) and value.is_floating_point() else value
