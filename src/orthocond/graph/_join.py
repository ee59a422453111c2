"""Several layers in front of one meta-layer, and the channels that each of them produces."""

import itertools
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from orthocond.graph._running import arguments, evaluating, mapped, random_state_kept, tensors

__all__ = ["Feed", "Join", "fed_channels", "runs"]


class Feed(NamedTuple):
    """A layer that feeds a meta-layer, and the channels of the meta-layer's input that depend on it.

    Example:
        >>> print(Feed("up", (range(8, 16),)))
        'up' (channels 8 to 15)
    """

    layer: str
    """The dotted name."""
    channels: tuple[range, ...]
    """Runs of consecutive channels, ascending."""

    def __str__(self) -> str:
        parts = ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in self.channels)
        return f"{self.layer!r} (channel{'s' * (sum(map(len, self.channels)) != 1)} {parts or 'unknown'})"


class Join(tuple[Feed, ...]):
    """The layers that feed one meta-layer, as `find_pre_svd` reports them: the deepest first.

    The deepest layer has the longest path from the input: for a residual addition, the last layer of the branch.
    Layers of equal depth are in the order of their channels.

    Example:
        >>> import torch
        >>> from orthocond import find_pre_svd
        >>> from orthocond.nn import DecorrelatedBatchNorm2d
        >>> class Residual(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.stem, self.branch = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1)
        ...         self.norm = DecorrelatedBatchNorm2d(8)
        ...
        ...     def forward(self, x):
        ...         x = self.stem(x)
        ...         return self.norm(x + self.branch(x))
        >>> join = find_pre_svd(Residual(), torch.randn(2, 3, 5, 5))["norm"]
        >>> join.layers
        ('branch', 'stem')
        >>> print(join)
        'branch' (channels 0 to 7) and 'stem' (channels 0 to 7)
    """

    __slots__ = ()

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers' dotted names."""
        return tuple(feed.layer for feed in self)

    def __str__(self) -> str:
        *first, last = map(str, self)
        return f"{', '.join(first)} and {last}"

    def __repr__(self) -> str:
        return f"Join({list(self)!r})"


def runs(channels: Iterable[int]) -> tuple[range, ...]:
    """Return the runs of consecutive numbers in a set.

    Example:
        >>> runs({0, 1, 2, 7})
        (range(0, 3), range(7, 8))
    """
    found: list[range] = []
    for channel in sorted(channels):
        if found and found[-1].stop == channel:
            found[-1] = range(found[-1].start, channel + 1)
        else:
            found.append(range(channel, channel + 1))
    return tuple(found)


def fed_channels(model: nn.Module, example: Any, meta: str, layers: list[str]) -> dict[str, set[int]]:
    """Return for each layer the channels of the meta-layer's input that depend on its output.

    The channels are found by perturbation: for each layer the model runs with the output of that layer raised, then
    lowered, and the outputs of the others fixed, so that only direct paths count, whatever operations are on them. If
    a weight is used without calling its layer, the weight is changed instead.
    """
    args, kwargs = arguments(model, example)
    names = {module: name for name, module in model.named_modules() if name in layers}
    held: dict[str, list[Any]] = {name: [] for name in layers}
    replayed: dict[str, Iterator[Any]] = {}
    changed, sign, reached = "", 1, list[Tensor]()

    def after(module: nn.Module, _: Any, output: Any) -> Any:
        name = names[module]
        if name not in replayed:  # the first run
            held[name].append(mapped(_copy, output))
            return output
        return mapped(partial(_shifted, sign=sign if name == changed else 0), next(replayed[name], output))

    def before(_: nn.Module, inputs: tuple[Any, ...], named_inputs: dict[str, Any]) -> None:
        reached.extend(mapped(_copy, tensor) for tensor in tensors((inputs, named_inputs))[:1])

    def run(parameters: dict[str, Tensor]) -> list[Tensor]:
        reached.clear()
        with random_state_kept(model):  # a model that draws random numbers draws the same ones each time
            torch.func.functional_call(model, parameters, mapped(_copy, args), mapped(_copy, kwargs))
        return list(reached)

    found: dict[str, set[int]] = {}
    with evaluating(model) as handles, torch.no_grad():
        handles += [module.register_forward_hook(after) for module in names]
        handles.append(model.get_submodule(meta).register_forward_pre_hook(before, with_kwargs=True))
        usual = run({})
        for changed, sign in itertools.product(layers, (1, -1)):  # one of them is beyond a ReLU
            replayed.update((name, iter(outputs)) for name, outputs in held.items())
            own = {} if held[changed] else _shifted_weights(model, changed, sign)
            found.setdefault(changed, set()).update(*map(_differing, usual, run(own)))
    return found


def _shifted_weights(model: nn.Module, layer: str, sign: int) -> dict[str, Tensor]:
    parameters = model.get_submodule(layer).named_parameters(recurse=False)
    return {f"{layer}.{name}".lstrip("."): _shifted(parameter, sign) for name, parameter in parameters}


def _copy(tensor: Tensor) -> Tensor:  # for a model that works in place
    return tensor.detach().clone()


def _shifted(tensor: Tensor, sign: int) -> Tensor:
    if sign == 0 or not tensor.is_floating_point():
        return _copy(tensor)
    return tensor.detach() + sign * 10 * (1 + tensor.detach().abs().amax())


def _differing(before: Tensor, after: Tensor) -> set[int]:
    """Return the channels, in the second dimension, in which two tensors differ."""
    if before.shape != after.shape:
        return set(range(before.shape[1]))
    return set((before != after).movedim(1, 0).flatten(1).any(1).nonzero().flatten().tolist())
