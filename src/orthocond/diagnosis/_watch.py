"""Seeing the calls: a function mode that observes decompositions, and the gradients that pass through them."""

import sys
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.linalg import LinAlgError  # type: ignore[attr-defined]  # documented, missing from the stubs
from torch.overrides import TorchFunctionMode

from orthocond._core.private import graph_task_id
from orthocond.diagnosis._calls import (
    MEASURED,
    Call,
    begin,
    entry_of,
    is_ours,
    matrix_of,
    measure,
    measure_failure,
    measure_gradient,
    outputs_of,
)
from orthocond.diagnosis._flow import Flow
from orthocond.diagnosis._record import Record, is_measuring
from orthocond.errors import NonFiniteError, SolverError

__all__ = ["Watch"]


class _Here(threading.local):
    """What happens in a thread."""

    def __init__(self) -> None:
        self.watches: list[Watch] = []
        """Those that are entered, innermost last."""


_here = _Here()


class Watch(TorchFunctionMode):
    """The mode: calls each function unchanged, and records decompositions."""

    def __init__(
        self, names: dict[int, str], record: Record, after_backward: Callable[[Tensor, bool], None] | None = None
    ) -> None:
        super().__init__()
        self.names = names
        self.record = record
        self.handles: list[Any] = []
        self.flow = Flow()
        self.after_backward = after_backward
        """Called with the loss, and with whether all gradients that came back through a decomposition are finite."""
        self.gradients_finite = True

    def __enter__(self) -> Self:
        _here.watches.append(self)
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        _here.watches.pop()

    def __torch_function__(
        self, function: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, and observe it if it is a decomposition."""
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or is_measuring():
            return function(*args, **kwargs)
        entry = entry_of(function, args)
        if entry is None:
            result = function(*args, **kwargs)
            if self.flow:
                self.flow.step(getattr(function, "__name__", ""), args, result)
            if function is torch.Tensor.backward and self.after_backward is not None:
                self.after_backward(args[0], self.gradients_finite)
            return result
        return self._observe(function, entry, args, kwargs)

    def _observe(self, function: Any, entry: tuple[str, str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        frame = sys._getframe(2)
        if entry[1] != "ours" and is_ours(frame):
            return function(*args, **kwargs)  # inside a function of ours, which is seen as a whole
        call: Call | None = self.record.guarded(begin, function, entry, frame, self.names, args, kwargs)
        if call is None:
            return function(*args, **kwargs)
        try:
            result = function(*args, **kwargs)
        except (LinAlgError, NonFiniteError, SolverError) as error:
            call.failure = str(error)
            self.record.guarded(measure_failure, call, matrix_of(args, kwargs))
            self.record.calls.append(call)
            raise
        self.record.guarded(self._finish, call, result, matrix_of(args, kwargs))
        return result

    def _finish(self, call: Call, result: Any, A: Tensor) -> None:
        outputs = outputs_of(call, result)
        self.record.calls.append(call)
        if call.kind != "ours" and ("L" in outputs or "S" in outputs):
            self.flow.begin(outputs["L"] if "L" in outputs else outputs["S"], call.use)
        self.record.later(measure, call, A, {name: outputs[name] for name in MEASURED if name in outputs})
        node = next((output.grad_fn for output in outputs.values() if output.grad_fn is not None), None)
        if node is None:
            return
        call.requires_grad = True
        vectors = {name: outputs[name].detach() for name in ("U", "Vh") if name in outputs}

        def hook(backs: tuple[Tensor | None, ...], incoming: tuple[Tensor | None, ...]) -> None:
            self.record.guarded(self.record.later, measure_gradient, call, vectors, backs, incoming)
            if self.after_backward is not None:  # it needs this at once, and not the whole analysis
                self.gradients_finite &= all(bool(back.isfinite().all()) for back in backs if back is not None)

        self.handles.append(node.register_hook(hook))

    def follow(self, model: nn.Module) -> None:
        """Watch the modules of a model where the mode is not active: in other threads, and in a backward pass."""
        entered = threading.local()

        def before(*_: Any) -> None:
            if not torch.compiler.is_compiling():
                stack = getattr(entered, "stack", [])
                is_new = not any(stack) and (graph_task_id() != -1 or all(watch is not self for watch in _here.watches))
                entered.stack = [*stack, is_new]
                if is_new:
                    self.__enter__()

        def after(*_: Any) -> None:
            if not torch.compiler.is_compiling() and getattr(entered, "stack", []) and entered.stack.pop():
                self.__exit__(None, None, None)

        for layer in model.modules():
            self.handles.append(layer.register_forward_pre_hook(before, prepend=True))
            self.handles.append(layer.register_forward_hook(after, always_call=True))

    def remove(self) -> None:
        """Remove the hooks from graph and model."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
