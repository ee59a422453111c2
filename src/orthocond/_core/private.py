"""What the library uses of torch's private names: each is looked up here, once, and has a public way without it.

Another version of torch may lack one. The answers without it are the careful ones (a transform may be active, a mode
may look on), with which a slower public way is taken; the results are the same.

>>> transforms_are_active()
False
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

__all__ = [
    "NAMES",
    "float32_products_are_exact",
    "forward_mode_is_on",
    "graph_task_id",
    "is_exporting",
    "is_tracing",
    "is_transformed",
    "num_compiled_frames",
    "num_dispatch_modes",
    "onednn_linear",
    "saved_tensors_hooks",
    "set_forward_mode",
    "transforms_are_active",
    "transforms_are_seen",
    "tree_map_only",
    "uncompiled_call",
    "unwrap_dead_wrappers",
]


def _mapped(kind: type, function: Callable[[Any], Any], tree: Any) -> Any:
    """Return nested tuples, lists and dicts with the function applied to everything of a kind."""
    if isinstance(tree, kind):
        return function(tree)
    if isinstance(tree, dict):
        return {key: _mapped(kind, function, value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_mapped(kind, function, value) for value in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(_mapped(kind, function, value) for value in tree)
    return tree


NAMES: Mapping[str, tuple[str, Any]] = MappingProxyType(
    {
        "transforms_are_active": ("torch._C._are_functorch_transforms_active", lambda: True),
        "is_transformed": ("torch._C._functorch.is_functorch_wrapped_tensor", lambda _: True),
        "num_dispatch_modes": ("torch._C._len_torch_dispatch_stack", lambda: 1),
        "graph_task_id": ("torch._C._current_graph_task_id", lambda: -1),
        "is_tracing": ("torch._C._is_tracing", lambda: torch.jit.is_tracing()),  # type: ignore[attr-defined]  # public, all the same
        "unwrap_dead_wrappers": ("torch._functorch.utils.unwrap_dead_wrappers", None),
        "set_forward_mode": ("torch.autograd.forward_ad._set_fwd_grad_enabled", None),
        "saved_tensors_hooks": ("torch._C._autograd._top_saved_tensors_default_hooks", lambda _: ()),
        "tree_map_only": ("torch.utils._pytree.tree_map_only", _mapped),
    }
)
"""By the name that it has here: torch's name, and what takes its place where torch has no such name."""


def _looked_up(name: str) -> Any:
    path, otherwise = NAMES[name]
    place, _, attribute = path.rpartition(".")
    try:
        return getattr(importlib.import_module(place), attribute)
    except (ImportError, AttributeError):
        return otherwise


transforms_are_active: Callable[[], bool] = _looked_up("transforms_are_active")
"""Return whether a transform of `torch.func` may be active."""
is_transformed: Callable[[Tensor], bool] = _looked_up("is_transformed")
"""Return whether a tensor may be one of a transform of `torch.func`."""
num_dispatch_modes: Callable[[], int] = _looked_up("num_dispatch_modes")
"""Return how many modes may look on at each operation."""
graph_task_id: Callable[[], int] = _looked_up("graph_task_id")
"""Return the number of the backward pass that this thread is in; -1 if it is in none, or can't tell."""
is_tracing: Callable[[], bool] = _looked_up("is_tracing")
"""Return whether `torch.jit.trace` looks on."""
unwrap_dead_wrappers: Callable[[tuple[Any, ...]], tuple[Any, ...]] | None = _looked_up("unwrap_dead_wrappers")
"""Return tensors without what ended transforms left around them; None: only ``Function.apply`` can."""
set_forward_mode: Callable[[bool], AbstractContextManager[object]] | None = _looked_up("set_forward_mode")
"""Return a context with forward mode on or off; None: there is no such thing."""
saved_tensors_hooks: Callable[[bool], tuple[Any, ...] | None] = _looked_up("saved_tensors_hooks")
"""Return the hooks that get what is saved for gradients (the argument: while tracing, too); None: there are none."""
tree_map_only: Callable[[type, Callable[[Any], Any], Any], Any] = _looked_up("tree_map_only")
"""Return nested containers with a function applied to everything of a kind."""


def transforms_are_seen() -> bool:
    """Return whether a transform of `torch.func` is active; False, not True, where torch can't tell."""
    return transforms_are_active is not NAMES["transforms_are_active"][1] and transforms_are_active()


def forward_mode_is_on() -> bool:
    """Return whether forward derivatives may be asked for: a level of `torch.autograd.forward_ad` is open."""
    return getattr(forward_ad, "_current_level", 0) >= 0


def is_exporting() -> bool:
    """Return whether `torch.export` runs this; the public function is true in all that torch 2.8 compiles, too."""
    return bool(getattr(torch.compiler, "_is_exporting_flag", torch.compiler.is_exporting()))


def float32_products_are_exact() -> bool:
    """Return whether torch rounds products of float32 matrices on the CPU as float32 does, and no coarser."""
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # the precision was set for each backend, which this question does not take
        return False


def onednn_linear() -> Callable[..., Tensor] | None:
    """Return oneDNN's linear layer, ``(x, weight, bias, "none", [], "")``, as compiled code calls it; None without."""
    if not torch.backends.mkldnn.is_available():
        return None
    return getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None)


def num_compiled_frames() -> int:
    """Return how many frames `torch.compile` is known to have compiled in this process."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return int(counters.get("frames", {}).get("ok", 0))


def uncompiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """Return the call of a compiled module as it was before `torch.compile`, or None if it isn't compiled."""
    if isinstance(original := getattr(module, "_orig_mod", None), nn.Module):  # torch.compile(module)
        return original
    if getattr(module, "_compiled_call_impl", None) is not None:  # module.compile()
        return getattr(module, "_call_impl", module.forward)
    return None
