"""Optimal polynomials for iterations by matrix products alone.

An odd polynomial of a symmetric matrix needs products only, and a composition of them takes every singular value in
``[l, u]`` to 1: that is the sign, the polar factor, and inside the coupled iteration the root. The composition whose
error is smallest for its number of products is the greedy one: each step is the polynomial that is nearest to 1 on the
interval which the step before left (theorem 3.1 of the reference). That polynomial equioscillates, and the algorithm of
Remez finds it; the coefficients here are computed from the bound, none is tabulated.

Reference: Amsel, Persson, Musco, Gower, The Polar Express: optimal matrix sign methods, arXiv 2505.16932 (2025).
"""

import functools
import math

import torch

__all__ = ["Quintic", "quintics"]

Quintic = tuple[float, float, float]
"""``(a, b, c)`` of ``x (a + b x^2 + c x^4)``."""

_CLASSICAL: Quintic = (15 / 8, -10 / 8, 3 / 8)
"""The limit for an interval that shrinks to 1: the fixed point of third order."""
_NARROW = 5e-3
"""Half the width of an interval on which the classical quintic is as good, and the equations below are singular."""
_MOST = 60


def quintics(lower: float, error: float) -> tuple[Quintic, ...]:
    """Return the steps that take ``[lower, 1]`` to within ``error`` of 1, as few as there are.

    Args:
        lower: the smallest singular value, relative to a bound of the largest.
        error: how far from 1 the results may be.

    Example:
        Seven steps, of three products each, from 1e-3 to 1e-7; the classical quintic needs fourteen.

        >>> len(quintics(1e-3, 1e-7))
        7
        >>> x = 1e-3
        >>> for a, b, c in quintics(1e-3, 1e-7):
        ...     x = x * (a + b * x**2 + c * x**4)
        >>> abs(x - 1) < 1e-7
        True
    """
    # The compiler follows the computation, but warns of a cache.
    return _computed(lower, error) if torch.compiler.is_compiling() else _cached(lower, error)


def _computed(lower: float, error: float) -> tuple[Quintic, ...]:
    l, u = lower, 1.0
    steps: list[Quintic] = []
    while max(1 - l, u - 1) > error and len(steps) < _MOST:
        step, deviation = _nearest_to_one(l, u)
        steps.append(step)
        l, u = 1 - deviation, 1 + deviation
    return tuple(steps)


_cached = functools.cache(_computed)


def _nearest_to_one(l: float, u: float) -> tuple[Quintic, float]:
    """Return the odd quintic that is nearest to 1 on ``[l, u]``, and the largest deviation."""
    if u - l < 2 * _NARROW:
        # The deviation is (1 - x)^3 (8 + 9 x + 3 x^2) / 8, about 2.5 (1 - x)^3.
        widest = max(1 - l, u - 1)
        return _CLASSICAL, 2.6 * widest**3
    # Deviations of alternating sign and equal size at l < q < r < u, where q and r are the extremes in between.
    q, r = l + (u - l) / 4, l + 3 * (u - l) / 4
    for _ in range(100):
        a, b, c, deviation = _solved(
            [[x, x**3, x**5, sign, 1.0] for x, sign in ((l, 1.0), (q, -1.0), (r, 1.0), (u, -1.0))]
        )
        # Zeros of the derivative a + 3 b x^2 + 5 c x^4.
        root = math.sqrt(max(9 * b * b - 20 * a * c, 0.0))
        before = q, r
        q, r = sorted(math.sqrt(max((-3 * b + s * root) / (10 * c), l * l)) for s in (-1, 1))
        q, r = min(max(q, l), u), min(max(r, l), u)
        if abs(q - before[0]) + abs(r - before[1]) < 1e-14 * u:
            break
    return (a, b, c), abs(deviation)


def _solved(rows: list[list[float]]) -> list[float]:
    """Return the solution of a small linear system, given as rows with the right-hand side last."""
    n = len(rows)
    for k in range(n):
        pivot = k
        for i in range(k + 1, n):  # a maximum with a key can't be compiled by torch 2.8
            pivot = i if abs(rows[i][k]) > abs(rows[pivot][k]) else pivot
        rows[k], rows[pivot] = rows[pivot], rows[k]
        for i in range(k + 1, n):
            factor = rows[i][k] / rows[k][k]
            rows[i] = [x - factor * y for x, y in zip(rows[i], rows[k], strict=True)]
    solution = [0.0] * n
    for k in reversed(range(n)):
        rest = sum(rows[k][j] * solution[j] for j in range(k + 1, n))
        solution[k] = (rows[k][n] - rest) / rows[k][k]
    return solution
