"""Finding the whitening layer that gets a layer's output, unchanged and as its only use."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch.fx
from torch import Tensor, nn

from orthocond._core.tracing import LINEAR_LAYERS, Tracer
from orthocond.errors import ArgumentError
from orthocond.graph._join import Join
from orthocond.graph._pre_svd import channel_dim, find_pre_svd
from orthocond.graph._running import call, evaluating, tensors
from orthocond.nn import MetaLayer

__all__ = ["meta_layer_behind"]

# What moves numbers and changes none; what else a trace shows of them, it shows without their shapes.
_PASSING_METHODS = {"contiguous", "clone", "to", "type", "float", "double", "half", "bfloat16"}
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_PASSING_NODES = {"Alias", "Clone", "ToCopy", "View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Transpose",
                  "Permute"}  # fmt: skip


def meta_layer_behind(model: nn.Module, name: str, layer: nn.Module, example_input: Any = None) -> MetaLayer:
    """Return the meta-layer that a linear layer's output goes to, unchanged and nowhere else.

    With an example input, it is found from the autograd graph of one run, as in `find_pre_svd`, which follows
    reshapes. Without one, it is found from a `torch.fx` trace of the model or, where it can't be traced, of the
    smallest part that can.

    Raises:
        ArgumentError: there is none, something is between the two, or output or weight are used elsewhere, too.
    """
    if type(layer) not in LINEAR_LAYERS:
        raise ArgumentError(
            f"gauge replaces the weight of {name!r} ({type(layer).__name__}), which has to be a free one of a linear "
            "layer or a convolution of torch; treat such a layer, or leave gauge out."
        )
    if not any(isinstance(module, MetaLayer) for module in model.modules()):
        raise _refusal(name, "the model has no meta-layer")
    weights = [p for _, p in model.named_parameters(remove_duplicate=False) if p is layer.weight]
    if len(weights) > 1:
        raise _refusal(name, "its weight serves another layer, too")
    found = _by_trace(model, name, layer) if example_input is None else _by_example(model, name, layer, example_input)
    calls = [module for _, module in model.named_modules(remove_duplicate=False) if module is found]
    if len(calls) > 1:
        raise _refusal(name, "the meta-layer behind it serves another one, too")
    return found


def _refusal(name: str, reason: str) -> ArgumentError:
    return ArgumentError(
        f"gauge needs the output of {name!r} to go straight to one whitening layer and nowhere else, but {reason}; "
        "treat the layer directly in front of a DecorrelatedBatchNorm, or leave gauge out."
    )


def _by_trace(model: nn.Module, name: str, layer: nn.Module) -> MetaLayer:
    for part, graphs in _traces(model, layer):
        modules = dict(part.named_modules(remove_duplicate=False))
        found = {_followed(graph, modules, name, layer) for graph in graphs}
        (meta,) = found if len(found) == 1 else (None,)
        if meta is not None:
            return meta
        if part is model and found == {None}:
            raise _refusal(name, "no meta-layer follows it")
    raise ArgumentError(
        f"gauge can't see from the model's code alone what the output of {name!r} goes to; "
        "pass one batch of its input: treat(..., example_input=x)."
    )


def _traces(model: nn.Module, layer: nn.Module) -> Iterator[tuple[nn.Module, list[torch.fx.Graph]]]:
    """Yield the parts of the model that hold the layer and can be traced, the largest first."""
    path = next(name for name, module in model.named_modules() if module is layer).split(".")
    for depth in range(len(path)):
        part = model.get_submodule(".".join(path[:depth]))
        if depth and isinstance(part, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            continue  # its parent may use it piece by piece
        parameters = inspect.signature(part.forward).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        try:  # once with optional arguments given and once without
            graphs = [Tracer().trace(part, arguments) for arguments in ([{}, defaults] if defaults else [{}])]
        except Exception:  # a forward may do anything
            continue
        yield part, graphs


def _followed(graph: torch.fx.Graph, modules: dict[str, nn.Module], name: str, layer: nn.Module) -> MetaLayer | None:
    """Return the meta-layer at which the layer's output arrives, or None where it leaves the trace."""

    def called(node: torch.fx.Node) -> nn.Module | None:
        return modules[str(node.target)] if node.op == "call_module" else None

    calls = [node for node in graph.nodes if called(node) is layer]
    if len(calls) != 1:
        raise _refusal(name, f"the model calls it {len(calls)} times")
    if any(node.op == "get_attr" and modules.get(str(node.target).rpartition(".")[0]) is layer for node in graph.nodes):
        raise _refusal(name, "its weight is used without calling it, too")
    node = calls[0]
    while True:
        if len(node.users) != 1:
            raise _refusal(name, f"it goes to {len(node.users)} places")
        node = next(iter(node.users))
        module = called(node)
        if isinstance(module, MetaLayer):
            if sum(called(other) is module for other in graph.nodes) > 1:
                raise _refusal(name, "the meta-layer behind it is called several times")
            return module
        if isinstance(module, nn.Identity) or (node.op == "call_method" and node.target in _PASSING_METHODS):
            continue
        if node.op == "output":
            return None
        what = type(module).__name__ if module else getattr(node.target, "__name__", str(node.target))
        raise _refusal(name, f"it goes to {what!r} first (where that only reshapes, pass example_input=x)")


def _by_example(model: nn.Module, name: str, layer: nn.Module, example_input: Any) -> MetaLayer:
    own = next(other for other, module in model.named_modules() if module is layer)
    pre_svd = find_pre_svd(model, example_input)
    for meta_name, feeds in pre_svd.items():
        if isinstance(feeds, Join) and own in feeds.layers:
            raise _refusal(name, f"the meta-layer {meta_name!r} is fed by several: {feeds}")
    found = [meta_name for meta_name, feeds in pre_svd.items() if feeds == own]
    if len(found) != 1:
        raise _refusal(name, f"{len(found) or 'no'} meta-layer{'s' * (len(found) > 1)} follow{'s' * (not found)} it")
    meta = model.get_submodule(found[0])
    assert isinstance(meta, MetaLayer)
    made: list[tuple[Any, Tensor]] = []
    reached: list[tuple[Any, Tensor]] = []
    dropped: set[Any] = set()

    def after(_: nn.Module, __: Any, output: Tensor) -> None:
        made.append((output.grad_fn, _energies(output, channel_dim(layer, output))))

    def before(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        x = tensors((args, kwargs))[0]
        reached.append((x.grad_fn, _energies(x, 1)))
        return (x.detach().requires_grad_(),), {}  # cut: what still reaches the layer goes by another way

    with evaluating(model) as handles, torch.enable_grad():
        handles.append(layer.register_forward_hook(after))
        handles.append(meta.register_forward_pre_hook(before, with_kwargs=True))
        for module in model.modules():
            if isinstance(module, _DROPOUTS):  # in eval it leaves no trace
                handles.append(module.register_forward_pre_hook(lambda _, args: dropped.add(args[0].grad_fn)))
        output = call(model, example_input)
    if len(made) != 1 or len(reached) != 1:
        raise _refusal(name, f"the model calls it {len(made)} times, and the meta-layer {len(reached)} times")
    (source, sent), (node, arrived) = made[0], reached[0]
    while True:
        if node in dropped:
            raise _refusal(name, "it goes to 'Dropout' first")
        if node is source:
            break
        kind = node.name().partition("Backward")[0]
        if kind not in _PASSING_NODES:
            raise _refusal(name, f"it goes to {kind!r} first")
        node = node.next_functions[0][0]
    if sent.shape != arrived.shape or not torch.allclose(sent, arrived, rtol=1e-2):
        raise _refusal(name, "its channels are rearranged in between")
    if source in _behind([tensor.grad_fn for tensor in tensors(output)]):
        raise _refusal(name, "it goes to another place, too")
    return meta


def _energies(x: Tensor, dim: int) -> Tensor:
    """Return the sum of squares of each channel."""
    return x.detach().double().movedim(dim, 0).flatten(1).square().sum(1)


def _behind(nodes: list[Any]) -> set[Any]:
    """Return the nodes of the autograd graph that can be reached."""
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes.extend(following for following, _ in node.next_functions)
    return seen
