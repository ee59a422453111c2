"""Treating all or nothing: what a failure leaves behind is what was there before."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy

from torch import Tensor, nn

from orthocond.treatments._part import Part
from orthocond.treatments._target import Target

__all__ = ["restored_on_failure"]


@contextmanager
def restored_on_failure(targets: Iterable[Target], parts: Iterable[Part]) -> Iterator[None]:
    """Leave the layers and the parts as they were, values of tensors included, if what is done with them raises."""
    modules = dict.fromkeys(module for target in targets for module in target.layer.modules())
    kept = [*map(_Kept, modules), *map(_Kept, parts)]
    tensors = {tensor for module in modules for tensor in (*module._parameters.values(), *module._buffers.values())}
    values = [(tensor, tensor.detach(), tensor.detach().clone()) for tensor in tensors if isinstance(tensor, Tensor)]
    try:
        yield
    except BaseException:
        for target in targets:
            target.detach()
        for each in kept:
            each.restore()
        for tensor, data, value in values:
            tensor.data = data.copy_(value)
        raise


class _Kept:
    """A module's or part's class and attributes."""

    def __init__(self, owner: nn.Module | Part) -> None:
        self._owner, self._class = owner, type(owner)
        self._has_property = "weight" in vars(self._class)
        self._attributes = {**vars(owner)}
        self._contents = {name: copy(value) for name, value in vars(owner).items() if isinstance(value, dict | set)}

    def restore(self) -> None:
        self._owner.__class__ = self._class
        if "weight" in vars(self._class) and not self._has_property:  # of a class that was parametrized before
            del self._class.weight  # type: ignore[union-attr]
        vars(self._owner).clear()
        vars(self._owner).update(self._attributes)
        for name, contents in self._contents.items():  # in place: the handles of hooks refer to the dict itself
            self._attributes[name].clear()
            self._attributes[name].update(contents)
