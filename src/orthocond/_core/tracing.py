"""Models as `torch.fx` sees them, with our layers as single nodes."""

from collections.abc import Callable
from typing import Any

import torch.fx
from torch import nn

from orthocond._core.private import uncompiled_call

__all__ = ["LINEAR_LAYERS", "Tracer"]

LINEAR_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
"""The layers of torch that multiply by a weight."""


class Tracer(torch.fx.Tracer):
    """Traces models without looking inside of the layers of `orthocond.nn`, as torch does for those of `torch.nn`.

    Parts that are compiled are traced as the code that they were compiled from: `torch.fx` can't trace compiled code.
    """

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return what a module's call gives in the trace."""
        return super().call_module(m, uncompiled_call(m) or forward, args, kwargs)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether a module is one node of the trace."""
        is_ours = any(base.__module__.startswith("orthocond.nn.") for base in type(m).__mro__)
        return is_ours or super().is_leaf_module(m, module_qualified_name)
