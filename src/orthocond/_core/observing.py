"""Notifying observers of calls of spectral functions; free without observers."""

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor

from orthocond._core.applying import is_plain

__all__ = ["Observation", "notify"]

_observers: "list[WeakMethod[Callable[..., None]]]" = []


class Observation:
    """Has a method called with each spectral function, until `remove`; the method's object is held weakly."""

    def __init__(self, observer: Callable[[str, Tensor, Tensor | None, float, bool], None]) -> None:
        self._reference: WeakMethod[Any] | None = WeakMethod(observer)
        _observers.append(self._reference)

    def __getstate__(self) -> dict[str, Any]:
        return {"_reference": None}  # a copy observes nothing

    def remove(self) -> None:
        """Stop."""
        if self._reference is not None and self._reference in _observers:
            _observers.remove(self._reference)


def notify(caller: str, A: Tensor, eigenvalues: Tensor | None, eps: float, *, clamp: bool) -> None:
    """Tell of a call: its name, its matrices, their eigenvalues where the solver has them, ``eps``, how it enters."""
    if torch.compiler.is_compiling() or not _observers or not is_plain():
        return
    for reference in list(_observers):
        observer = reference()
        if observer is None:
            _observers.remove(reference)
        else:
            observer(caller, A, eigenvalues, eps, clamp)
