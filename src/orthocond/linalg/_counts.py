"""Counts for solvers: attempts that failed, and matrices that were decomposed for lack of a certificate."""

import threading
from collections import Counter
from types import TracebackType
from typing import Self

__all__ = ["FallbackCount", "count_failure", "count_fallbacks", "solver_failures", "solver_fallbacks"]


class _Counts:
    """Counts by name, of this process, from any thread."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self._counter: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, name: str, times: int) -> None:
        with self._lock:
            self._counter[name] += times

    def read(self, *, reset: bool) -> dict[str, int]:
        with self._lock:
            counts = {name: self._counter[name] for name in self._names}
            if reset:
                self._counter.clear()
        return counts


_failures = _Counts("eigh", "svd", "newton_schulz", "pade")
_fallbacks = _Counts("products")


def solver_failures(*, reset: bool = False) -> dict[str, int]:
    """Return how many attempts at a root or decomposition failed, by the solver that failed.

    An attempt fails if it does not converge, or if its result is wrong: every decomposition is checked. The counts are
    those of this process since it started, or since the last ``reset``. An attempt that fails is retried (see
    `SolverError` for what happens when all retries fail), so a count above zero does not mean that a result is
    missing. The paper reports these counts as *failure times* (Table 5).

    Args:
        reset: set all counts to zero after reading them.

    Returns:
        The number of failed attempts for each solver, zeros included.

    Example:
        >>> list(solver_failures())
        ['eigh', 'svd', 'newton_schulz', 'pade']
    """
    return _failures.read(reset=reset)


def solver_fallbacks(*, reset: bool = False) -> dict[str, int]:
    """Return how many matrices were decomposed because a certificate of their solver did not hold.

    A fall-back is not a failure: its result is that of ``"eigh"``. The counts are those of this process since it
    started, or since the last ``reset``.

    Args:
        reset: set the counts to zero after reading them.

    Returns:
        The number of matrices for each solver that has a certificate.

    Example:
        >>> import torch
        >>> from orthocond.linalg import matrix_sqrth, solver_fallbacks
        >>> _ = solver_fallbacks(reset=True)
        >>> _ = matrix_sqrth(torch.diag(torch.tensor([1.0, 0.5, 0.0])), solver="products")
        >>> solver_fallbacks()
        {'products': 0}
        >>> _ = matrix_sqrth(torch.diag(torch.tensor([1.0, 0.01, 0.0])), solver="products")  # within the gap
        >>> solver_fallbacks()
        {'products': 1}
    """
    return _fallbacks.read(reset=reset)


def count_failure(solver: str, times: int = 1) -> None:
    """Count attempts that failed."""
    _failures.add(solver, times)


def count_fallbacks(solver: str, times: int) -> None:
    """Count matrices that were decomposed for lack of a certificate."""
    _fallbacks.add(solver, times)
    innermost: FallbackCount | None = getattr(_counting, "innermost", None)
    if innermost is not None:
        innermost.number += times


_counting = threading.local()


class FallbackCount:
    """Counts the fall-backs inside a ``with`` block, in this thread: those of one layer, say.

    Example:
        >>> with FallbackCount() as outer:
        ...     count_fallbacks("products", 2)
        ...     with FallbackCount() as inner:
        ...         count_fallbacks("products", 1)
        >>> outer.number, inner.number
        (3, 1)
    """

    def __init__(self) -> None:
        self.number = 0
        self._outer: FallbackCount | None = None

    def __enter__(self) -> Self:
        self._outer = getattr(_counting, "innermost", None)
        _counting.innermost = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _counting.innermost = self._outer
        if self._outer is not None:
            self._outer.number += self.number
