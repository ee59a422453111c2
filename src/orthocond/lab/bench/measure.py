"""Measuring on a noisy machine: contestants take turns, and ratios within one round are reported.

A contestant is a generator function: one call is one pass, and it yields after each of its parts, say forward and
backward, whose times are taken.
"""

import gc
import itertools
import random
import statistics
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = [
    "Budget",
    "Contestant",
    "Spread",
    "alternate",
    "forward_backward",
    "growth_exponent",
    "num_operations",
    "once",
    "peak_bytes",
    "saved_bytes",
    "spread",
]

Contestant = Callable[[], Iterator[None]]


@dataclass(frozen=True)
class Budget:
    """How long contestants take turns."""

    seconds: float
    """No round begins after this many seconds, unless fewer than `fewest` are done."""
    fewest: int = 5
    most: int = 200


class Spread(NamedTuple):
    """A ratio to the reference: the median over the rounds, the quartiles around it, and the median time behind it."""

    ratio: float
    low: float
    high: float
    seconds: float
    rounds: int


def alternate(
    contestants: Mapping[str, Contestant], budget: Budget, device: str = "cpu"
) -> dict[str, list[list[float]]]:
    """Return for each contestant a list of passes, each the seconds of its parts.

    They take turns, so that a slow moment hits them all, and each round has an order of its own: what ran before has
    left the caches to its successor, and is not to be the same for one of them always. The first round is for warming
    up and does not count.

    Example:
        >>> passes = alternate({"sum": once(lambda: sum(range(1000)))}, Budget(seconds=0, fewest=3))
        >>> [len(parts) for parts in passes["sum"]]
        [1, 1, 1]
    """
    passes: dict[str, list[list[float]]] = {name: [] for name in contestants}
    timed = _timed if device == "cpu" else _timed_by_events
    names, order = list(contestants), random.Random(0)  # an order, not a secret
    for name in names:
        timed(contestants[name])
    gc.collect()
    gc.disable()
    try:
        end = time.perf_counter() + budget.seconds
        rounds = 0
        while rounds < budget.fewest or (rounds < budget.most and time.perf_counter() < end):
            for name in order.sample(names, len(names)):
                passes[name].append(timed(contestants[name]))
            rounds += 1
    finally:
        gc.enable()
    return passes


def spread(own: Iterable[Sequence[float]], reference: Iterable[Sequence[float]], part: int | None = None) -> Spread:
    """Return the time of passes over that of the reference's in the same round, of one part or of all together.

    Example:
        >>> spread([[2.0], [4.0], [9.0]], [[1.0], [2.0], [3.0]])
        Spread(ratio=2.0, low=2.0, high=2.5, seconds=4.0, rounds=3)
    """
    mine, others = ([sum(p) if part is None else p[part] for p in passes] for passes in (own, reference))
    ratios = [a / b for a, b in zip(mine, others, strict=True)]
    low, middle, high = statistics.quantiles(ratios, method="inclusive") if len(ratios) > 1 else ratios * 3
    return Spread(middle, low, high, statistics.median(mine), len(ratios))


def once(function: Callable[[], object]) -> Contestant:
    """Return a contestant that has one part."""

    def contestant() -> Iterator[None]:
        function()
        yield

    return contestant


def forward_backward(function: Callable[[Tensor], Tensor], x: Tensor, g: Tensor, *others: Tensor) -> Contestant:
    """Return a contestant with two parts: the function, and its gradient in ``x`` and ``others`` for ``g``."""
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()

    def contestant() -> Iterator[None]:
        y = function(x)
        yield
        torch.autograd.grad(y, (x, *others), g)
        yield

    return contestant


def saved_bytes(forward: Callable[[], object]) -> int:
    """Return the bytes of the tensors that a forward pass keeps for the backward pass, each counted once.

    Example:
        >>> x = torch.ones(4, requires_grad=True)
        >>> saved_bytes(lambda: x.exp()), saved_bytes(lambda: x * 2)
        (16, 0)
    """
    kept: weakref.WeakSet[_Saved] = weakref.WeakSet()

    def pack(tensor: Tensor) -> _Saved:
        saved = _Saved(tensor.detach())  # an output itself would hold its own graph
        kept.add(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
        result = forward()
    storages = [saved.tensor.untyped_storage() for saved in kept]
    del result  # it held the graph, and with it the saved tensors
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def peak_bytes(function: Callable[[], object]) -> int:
    """Return the peak of the bytes of tensors that a function allocated while it ran.

    Memory that a library takes within one operation, without making a tensor of it, is not seen.

    Example:
        >>> x = torch.ones(4)
        >>> peak_bytes(lambda: (x + 1).sum())
        20
    """
    live = _LiveTensors()
    with live:
        function()
    return live.peak


def num_operations(function: Callable[[], object]) -> dict[str, int]:
    """Return how many products of matrices a function takes, and how many operations that compute something.

    On a GPU in eager mode such an operation is a kernel launch, or several: a decomposition counts as one, and its
    library launches many.

    Example:
        >>> A = torch.ones(2, 3, 3)
        >>> num_operations(lambda: (A @ A).mT + 1)
        {'products': 1, 'launches': 2}
    """
    counting = _Operations()
    with counting:
        function()
    return {"products": counting.products, "launches": counting.launches}


class _Operations(TorchDispatchMode):
    """Counts operations, except for views and for memory without contents."""

    def __init__(self) -> None:
        super().__init__()
        self.products = self.launches = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in function._schema.returns)
        if not is_view and not name.startswith(("empty", "detach", "_unsafe_view", "new_empty")):
            self.launches += 1
            self.products += name in ("mm", "bmm", "addmm", "baddbmm", "addmv", "mv")
        return function(*args, **(kwargs or {}))


class _LiveTensors(TorchDispatchMode):
    """Counts the bytes of the tensors that operations create, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {s.data_ptr() for s in map(Tensor.untyped_storage, _tensors((args, kwargs or {})))}
        output = function(*args, **(kwargs or {}))
        for tensor in _tensors(output):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in before and storage not in self._seen:
                self._seen.add(storage)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._freed, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return output

    def _freed(self, size: int) -> None:
        self.now -= size


def _tensors(nest: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(nest) if isinstance(leaf, Tensor)]


@dataclass(frozen=True, eq=False)
class _Saved:
    tensor: Tensor


def growth_exponent(points: Mapping[int, float]) -> float | None:
    """Return ``p`` of the fit ``seconds ~ size^p``, from seconds by size; None for fewer than two sizes.

    Example:
        >>> growth_exponent({16: 1.0, 32: 8.0, 64: 64.0})
        3.0
    """
    if len(points) < 2:
        return None
    x, y = (torch.tensor(list(part), dtype=torch.float64).log2().tolist() for part in (points, points.values()))
    return statistics.linear_regression(x, y).slope


def _timed(contestant: Contestant) -> list[float]:
    seconds = []
    start = time.perf_counter()
    for _ in contestant():
        now = time.perf_counter()
        seconds.append(now - start)
        start = time.perf_counter()
    return seconds


def _timed_by_events(contestant: Contestant) -> list[float]:
    """Return the seconds that the GPU took for each part; the host runs ahead of it, so its clock can't tell."""
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True)]
    marks[0].record()
    for _ in contestant():
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1000 for before, after in itertools.pairwise(marks)]
