"""Thinning of long curves without hiding their spikes: lowest, middle and highest value of each bin."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Floats", "Spread", "smooth", "spread", "thin"]

Floats = npt.NDArray[np.float64]


class Spread(NamedTuple):
    """Lowest, median and highest of several values, each array ``(n,)``; NaN where there are none."""

    low: Floats
    middle: Floats
    high: Floats


def spread(values: Floats) -> Spread:
    """Return lowest, median and highest of each row of ``values`` ``(n, k)``; NaN is no value, infinity is one.

    Example:
        >>> spread(np.array([[3.0, 1.0, np.nan, 8.0]]))
        Spread(low=array([1.]), middle=array([3.]), high=array([8.]))
    """
    if values.shape[1] == 0:
        nothing = np.full(len(values), np.nan)
        return Spread(nothing, nothing, nothing)
    ordered = np.sort(values, axis=1)  # NaN comes last
    last = np.maximum(np.count_nonzero(~np.isnan(values), axis=1) - 1, 0)
    rows = np.arange(len(values))
    lower, upper = ordered[rows, last // 2], ordered[rows, (last + 1) // 2]
    middle = np.where(lower == upper, lower, 0.5 * lower + 0.5 * upper)
    return Spread(ordered[:, 0], middle, ordered[rows, last])


def smooth(values: Floats, width: int) -> Floats:
    """Return the running mean of ``values`` ``(n,)`` over ``width`` of them, centred, over fewer near the ends.

    NaN is no value, and what is next to infinity is infinite.

    Example:
        >>> smooth(np.array([1.0, 2.0, 6.0, np.nan, 4.0]), 3)
        array([1.5, 3. , 4. , 5. , 4. ])
    """
    ends = np.minimum(np.arange(len(values)) + (width + 1) // 2, len(values))
    starts = np.maximum(np.arange(len(values)) - width // 2, 0)

    def within(numbers: Floats) -> Floats:
        sums: Floats = np.concatenate([[0.0], np.cumsum(numbers)])
        difference: Floats = sums[ends] - sums[starts]
        return difference

    is_finite, is_infinite = np.isfinite(values), np.isinf(values)
    counts = within(is_finite.astype(np.float64))
    means = within(np.where(is_finite, values, 0.0)) / np.where(counts > 0, counts, np.nan)
    return np.where(within(is_infinite.astype(np.float64)) > 0, np.inf, means)


def thin(steps: npt.NDArray[np.int64], values: Floats, *, width: int, num_bins: int) -> Spread:
    """Return the spread of ``values`` ``(n,)`` in each bin of ``width`` steps; steps count from 1.

    Example:
        >>> thin(np.array([1, 2, 3, 4]), np.array([5.0, 9.0, 2.0, 2.0]), width=2, num_bins=3).high
        array([ 9.,  2., nan])
    """
    bins = (steps - 1) // width
    inside = (bins >= 0) & (bins < num_bins)
    order = np.argsort(bins[inside], kind="stable")
    bins, values = bins[inside][order], values[inside][order]
    counts = np.bincount(bins, minlength=num_bins)
    first = np.cumsum(counts) - counts
    grid = np.full((num_bins, int(counts.max(initial=0))), np.nan)
    grid[bins, np.arange(len(bins)) - first[bins]] = values
    return spread(grid)
