"""The condition number of a run: which of the monitor's numbers it is, over which steps, and what seeds say together.

Tables, headlines, `compare` and the paper's items all use this definition.
"""

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

__all__ = ["CONDITIONS", "CUT", "at_end", "geometric_mean", "measure_of"]

CUT = 1e-5
"""Eigenvalues at or below this part of the largest don't count towards ``cond_support``, whatever the method."""

CONDITIONS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "cond_eps": ("with eps", "Ratio of the largest to the smallest eigenvalue with eps added, or as their floor."),
        "cond_support": (
            "on the support",
            f"Ratio of the largest eigenvalue to the smallest one above {CUT:g} times the largest; for products an "
            "estimate with its own cut, unless monitor_exact is set.",
        ),
        "cond": (
            "raw",
            "Ratio of the largest to the smallest eigenvalue; at rank below full it is rounding noise, or infinite.",
        ),
        "cond_floor": (
            "with the floor of the paper's code",
            "Ratio of the largest to the smallest eigenvalue, both raised to at least 2.2e-16, of a covariance in "
            "float64.",
        ),
    }
)
"""The condition numbers that a run records: name, what a person calls it, and what it is."""

Floats = npt.NDArray[np.float64]


def measure_of(eps: float | None) -> str:
    """Return the one of `CONDITIONS` that an experiment is judged by, from the ``eps`` of its configuration.

    What a layer with ``eps`` divides by is ``cond_eps``. Without, it is ``cond_support``: the layer drops the rest.

    Example:
        >>> measure_of(0.01), measure_of(None)
        ('cond_eps', 'cond_support')
    """
    return "cond_eps" if eps else "cond_support"


def at_end(steps: npt.NDArray[np.int64] | Floats, values: Floats) -> float:
    """Return a run's number at the end of training: the median over the last tenth of its steps; NaN without any.

    Where none was recorded among them, it is the last that was.

    Example:
        >>> at_end(np.arange(1.0, 21.0), np.arange(1.0, 21.0)), at_end(np.array([1.0, 2.0]), np.array([7.0, np.nan]))
        (19.5, 7.0)
    """
    is_known = ~np.isnan(values)
    known = np.sort(values[is_known & (steps > 0.9 * steps.max(initial=0))])
    if not known.size:
        return float(values[is_known][-1]) if is_known.any() else math.nan
    low, high = known[(known.size - 1) // 2], known[known.size // 2]
    return float(low if low == high else 0.5 * low + 0.5 * high)  # infinity less infinity is NaN


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean over seeds, of the positive ones; one infinite value makes it infinite.

    Example:
        >>> geometric_mean([10.0, 1000.0]), geometric_mean([])
        (100.0, nan)
    """
    logs = [math.log10(value) if value < math.inf else math.inf for value in values if value > 0]
    return float(10 ** (math.fsum(logs) / len(logs))) if logs else math.nan
