"""Seeing the calls: a function mode that observes decompositions, and the gradients that pass through them."""

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.linalg import LinAlgError  # type: ignore[attr-defined]  # documented, missing from the stubs
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from orthocond.diagnosis._calls import (
    Call,
    begin,
    entry_of,
    is_ours,
    measure,
    measure_failure,
    measure_gradient,
    outputs_of,
)
from orthocond.diagnosis._flow import Flow
from orthocond.errors import NonFiniteError, SolverError

__all__ = ["Watch"]


class Watch(TorchFunctionMode):
    """The mode: calls each function as it is, and hands what it saw of decompositions to ``calls``."""

    def __init__(
        self,
        names: dict[int, str],
        calls: list[Call],
        notes: list[str],
        after_backward: Callable[[Tensor], None] | None = None,
    ) -> None:
        super().__init__()
        self.names = names
        self.calls = calls
        self.notes = notes
        self.handles: list[Any] = []
        self.flow = Flow()
        self.after_backward = after_backward

    def __torch_function__(
        self, function: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, and observe it if it is a decomposition."""
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        if function is torch.Tensor.backward and type(args[0]) is Tensor:
            return self._backward(*args, **kwargs)
        entry = entry_of(function, args)
        if entry is None:
            result = function(*args, **kwargs)
            self.flow.step(getattr(function, "__name__", ""), args, result)
            return result
        return self._observe(function, entry, args, kwargs)

    def _backward(
        self,
        loss: Tensor,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """Do what `torch.Tensor.backward` does, watching what checkpoints compute again inside."""
        with self:
            torch.autograd.backward(loss, gradient, retain_graph, create_graph, inputs=inputs)
        for mode in (self, *_get_current_function_mode_stack()):  # self, and those that it is nested in
            if isinstance(mode, Watch) and mode.after_backward is not None:
                mode.after_backward(loss)

    def _observe(self, function: Any, entry: tuple[str, str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        frame = sys._getframe(2)
        if entry[1] != "ours" and is_ours(frame):
            return function(*args, **kwargs)  # inside a function of ours, which is seen as a whole
        call = self._guarded(lambda: begin(entry, frame, self.names, args, kwargs))
        if call is None:
            return function(*args, **kwargs)
        try:
            result = function(*args, **kwargs)
        except (LinAlgError, NonFiniteError, SolverError) as error:
            call.failure = str(error)
            self._guarded(lambda: measure_failure(call, args, kwargs))
            self.calls.append(call)
            raise
        self._guarded(lambda: self._finish(call, result, args, kwargs))
        return result

    def _finish(self, call: Call, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        outputs = outputs_of(call, result)
        self.calls.append(call)
        if call.kind != "ours" and ("L" in outputs or "S" in outputs):
            self.flow.begin(outputs["L"] if "L" in outputs else outputs["S"], call.use)
        if call.finite_input:
            measure(call, outputs, args, kwargs)
        node = next((output.grad_fn for output in outputs.values() if output.grad_fn is not None), None)
        if node is None:
            return
        call.requires_grad = True
        vectors = {name: output.detach() for name, output in outputs.items() if name in ("U", "Vh")}

        def hook(backs: tuple[Tensor | None, ...], incoming: tuple[Tensor | None, ...]) -> None:
            self._guarded(lambda: measure_gradient(call, vectors, backs, incoming))

        self.handles.append(node.register_hook(hook))

    def _guarded(self, step: Callable[[], Any]) -> Any:
        """Look without being noticed: no mode, no graph, and no exception of ours in somebody's training."""
        try:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                return step()
        except Exception as error:
            note = f"A call could not be analysed ({type(error).__name__}: {error})."
            if note not in self.notes:
                self.notes.append(note)
            return None

    def follow(self, model: nn.Module) -> None:
        """Watch the modules of a model in other threads too: a mode is active in the thread that enters it alone."""
        entered = threading.local()

        def before(*_: Any) -> None:
            if not torch.compiler.is_compiling():
                is_new = all(mode is not self for mode in _get_current_function_mode_stack())
                entered.stack = [*getattr(entered, "stack", []), is_new]
                if is_new:
                    self.__enter__()

        def after(*_: Any) -> None:
            if not torch.compiler.is_compiling() and getattr(entered, "stack", []) and entered.stack.pop():
                self.__exit__(None, None, None)

        for layer in model.modules():
            self.handles.append(layer.register_forward_pre_hook(before, prepend=True))
            self.handles.append(layer.register_forward_hook(after, always_call=True))

    def remove(self) -> None:
        """Take the hooks off graph and model."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
