"""The calls that were seen, and the measurements that wait until somebody reads them."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from orthocond.diagnosis._calls import Call

__all__ = ["Record", "is_measuring"]

_HELD = 2**26
"""So many bytes of copies may wait; when they are more, everything that waits is measured."""


class _Here(threading.local):
    is_measuring = False


_here = _Here()


def is_measuring() -> bool:
    """Return whether a measurement of ours is running in this thread, whose own calls are not to be seen."""
    return _here.is_measuring


class Record:
    """The calls, what could not be seen (``notes``), and the measurements that wait.

    A measurement takes several times as long as a small decomposition, so the training only pays for copies of the
    matrices: what they mean is computed in `settle`, when the findings are read.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.notes: list[str] = []
        self._waiting: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._num_bytes = 0
        self._lock = threading.RLock()

    def note(self, sentence: str) -> None:
        """Add a sentence to the notes, once."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def guarded(self, step: Callable[..., Any], *arguments: Any) -> Any:
        """Measure without side effects: no watch, no graph, and no exception of ours in the user's training."""
        before, _here.is_measuring = _here.is_measuring, True
        try:
            with torch.no_grad():
                return step(*arguments)
        except Exception as error:
            self.note(f"A call could not be analysed ({type(error).__name__}: {error}).")
            return None
        finally:
            _here.is_measuring = before

    def later(self, step: Callable[..., None], *arguments: Any) -> None:
        """Call ``step`` in `settle`, with copies of the tensors among its arguments: their owners may change them."""
        num_bytes = _num_bytes(arguments)
        if self._num_bytes + num_bytes > _HELD:
            self.settle()
        if num_bytes > _HELD:
            self.guarded(step, *arguments)
            return
        self._num_bytes += num_bytes
        self._waiting.append((step, _copied(arguments)))

    def settle(self) -> None:
        """Do what waits, in the order in which it was asked for."""
        with self._lock:
            while self._waiting:
                step, arguments = self._waiting.popleft()
                self.guarded(step, *arguments)
            self._num_bytes = 0


def _num_bytes(tree: Any) -> int:
    if isinstance(tree, Tensor):
        return tree.numel() * tree.element_size()
    return (
        sum(map(_num_bytes, tree.values() if isinstance(tree, dict) else tree)) if isinstance(tree, dict | tuple) else 0
    )


def _copied(tree: Any) -> Any:
    """Return tuples and dicts of tensors with a copy of each tensor."""
    if isinstance(tree, Tensor):
        return tree.detach().clone()
    if isinstance(tree, dict):
        return {name: _copied(each) for name, each in tree.items()}
    return tuple(map(_copied, tree)) if isinstance(tree, tuple) else tree
