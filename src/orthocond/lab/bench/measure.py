"""Measuring on a noisy machine: contestants take turns, and only ratios within one run are reported."""

import time
from collections.abc import Callable, Mapping

__all__ = ["alternate"]


def alternate(
    contestants: Mapping[str, Callable[[], object]], *, repeats: int = 15, warmup: int = 2
) -> dict[str, list[float]]:
    """Return the seconds of each repeat for each contestant; they take turns, so that a slow moment hits them all.

    Example:
        >>> seconds = alternate({"nothing": lambda: None, "sum": lambda: sum(range(1000))}, repeats=3)
        >>> {name: len(times) for name, times in seconds.items()}
        {'nothing': 3, 'sum': 3}
    """
    for _ in range(warmup):
        for contestant in contestants.values():
            contestant()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(repeats):
        for name, contestant in contestants.items():
            start = time.perf_counter()
            contestant()
            seconds[name].append(time.perf_counter() - start)
    return seconds
