"""Which linear layer is directly in front of a whitening layer, and why none is known where that is so.

What follows what is read from `torch.fx` traces: of the model or, where it can't be traced, of the parts that can.
"""

import ast
import inspect
import textwrap
from collections import Counter
from typing import Any

from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode

from orthocond._core.private import tree_map_only
from orthocond._core.tracing import LINEAR_LAYERS, Tracer
from orthocond.nn._norm import _DecorrelatedBatchNorm

__all__ = ["layers_in_front"]

_CALLS_ITS_PARTS = (
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
    nn.DataParallel,
    nn.parallel.DistributedDataParallel,
    AveragedModel,
)
"""Modules whose children are called as they are, never taken apart."""


def layers_in_front(model: nn.Module) -> tuple[dict[nn.Module, nn.Module], dict[nn.Module, str]]:
    """Return for each whitening layer the linear layer whose output is its input and goes nowhere else.

    Returns:
        The layers in front, and for the norms that have one but can't use it, or whose surroundings can't be seen, why.
        Norms that are in neither have no linear layer in front of them.
    """
    search = _Search(model)
    names = {module: name for name, module in model.named_modules()}
    uses = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    in_front: dict[nn.Module, nn.Module] = {}
    reasons: dict[nn.Module, str] = {}
    for norm, layer in search.pairs.items():
        if uses[norm] > 1 or uses[layer] > 1:
            continue  # a shared layer's weight serves others, too
        hooked = next((m for m in (layer, norm) if m._forward_pre_hooks or (m is layer and m._forward_hooks)), None)
        if hooked is not None:
            reasons[norm] = f"{names[hooked]!r} has a hook, which would see other numbers"
        elif isinstance(layer, nn.Linear) and norm._last_ndim == 3:
            reasons[norm] = f"{names[layer]!r} maps another dimension than the norm does"
        else:
            in_front[norm] = layer
    for norm, name in names.items():
        if not isinstance(norm, _DecorrelatedBatchNorm):
            continue
        layers = [norm, in_front[norm]] if norm in in_front else [norm]
        read = next((layer for layer in layers if not search.read.isdisjoint(layer.parameters(recurse=False))), None)
        if read is not None:
            in_front.pop(norm, None)
            reasons[norm] = f"the model also computes with the parameters of {names[read]!r}; compare the outputs"
        elif norm not in search.seen:
            parents = [name.rsplit(".", depth)[0] for depth in range(1, name.count(".") + 1)] + [""]
            told = (search.failures.get(model.get_submodule(parent)) for parent in parents)
            reasons[norm] = next((reason for reason in told if reason), "its surroundings can't be traced")
    return in_front, reasons


class _Search:
    """Looks for norms and the layers in front of them: in a module or, where that can't be traced, in its parts."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.pairs: dict[_DecorrelatedBatchNorm, nn.Module] = {}
        self.seen: set[nn.Module] = set()
        self.read: set[nn.Parameter] = set()
        self.failures: dict[nn.Module, str] = {}
        self.look_into(model)

    def look_into(self, module: nn.Module) -> None:
        if _has_forward(module):
            parameters = inspect.signature(module.forward).parameters.values()
            defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
            try:
                # Once with optional arguments given and once without: what holds both times holds.
                traces = [self._pairs_of(module, arguments) for arguments in ([{}, defaults] if defaults else [{}])]
            except Exception as error:  # a forward may do anything; what can't be traced may have parts that can
                message = str(error).strip().partition("\n")[0]
                self.failures[module] = f"{type(module).__name__} can't be traced ({type(error).__name__}: {message})"
            else:
                self.pairs |= dict(set.intersection(*(set(pairs.items()) for pairs in traces)))
                return
        for name, child in module.named_children():
            if isinstance(child, nn.Sequential) and not _calls_as_a_whole(module, name):
                kind = type(module).__name__
                self.failures[child] = f"{kind} can't be traced and may use the parts of its {name!r} one by one"
                for part in child.children():
                    self.look_into(part)
            else:
                self.look_into(child)

    def _pairs_of(self, module: nn.Module, arguments: dict[str, Any]) -> dict[_DecorrelatedBatchNorm, nn.Module]:
        with _Reading(self.read):
            graph = Tracer().trace(module, arguments)
        calls = Counter(node.target for node in graph.nodes if node.op == "call_module")
        read = {str(node.target).rpartition(".")[0] for node in graph.nodes if node.op == "get_attr"}
        modules = dict(module.named_modules(remove_duplicate=False))
        pairs = {}
        for node in graph.nodes:
            norm = modules.get(node.target) if node.op == "call_module" else None
            if not isinstance(norm, _DecorrelatedBatchNorm):
                continue
            before = next(iter(node.all_input_nodes), None)
            if module is self.model or before is None or before.op != "placeholder":  # of a part: from where?
                self.seen.add(norm)
            if before is None or before.op != "call_module" or len(before.users) != 1 or before.target in read:
                continue
            if calls[node.target] == calls[before.target] == 1 and type(modules[before.target]) in LINEAR_LAYERS:
                pairs[norm] = modules[before.target]
        return pairs


class _Reads:
    """What `_Reading` does at each operation.

    It is a class of its own because torch wraps the method of a mode's own class so that its first call imports the
    compiler. During a trace that import would record the functions that `torch.fx` has replaced, and the process could
    no longer compile them.
    """

    read: set[nn.Parameter]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if not name.startswith("new_") and not name.endswith("_like"):  # those take the shape, not the numbers
            tree_map_only(nn.Parameter, self.read.add, (args, kwargs))
        return function(*args, **(kwargs or {}))


class _Reading(_Reads, TorchDispatchMode):
    """Collects the parameters that a model computes with while it is traced.

    The trace itself shows those that are attributes (``self.conv.weight``), but those of ``parameters()`` only where
    they meet an input: what is computed from them alone is a constant.
    """

    def __init__(self, read: set[nn.Parameter]) -> None:
        super().__init__()
        self.read = read


def _has_forward(module: nn.Module) -> bool:
    return getattr(type(module).forward, "__name__", "") != nn.Module.forward.__name__


def _calls_as_a_whole(module: nn.Module, child: str) -> bool:
    """Return whether the code of ``module`` calls ``self.child(...)`` and does nothing else with it."""
    if isinstance(module, _CALLS_ITS_PARTS) or child == "_orig_mod":  # torch.compile's wrapper
        return True
    try:
        own = [cls for cls in type(module).__mro__ if issubclass(cls, nn.Module) and cls is not nn.Module]
        trees = [ast.parse(textwrap.dedent(inspect.getsource(cls))) for cls in own]
    except (OSError, TypeError, SyntaxError):  # no source to read
        return not _has_forward(module)
    nodes = [node for tree in trees for node in ast.walk(tree)]
    called = {node.func for node in nodes if isinstance(node, ast.Call)}
    for node in nodes:
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name) or node.value.id != "self":
            continue
        if node.attr in ("children", "named_children", "_modules"):
            return False
        if node.attr == child and isinstance(node.ctx, ast.Load) and node not in called:
            return False
    return True
