"""Is a difference larger than the noise of the seeds: a paired t-test, corrected for the number of comparisons."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["TEST", "Difference", "holm", "paired_difference", "t_quantile", "t_two_sided"]

TEST = (
    "A paired t-test by seed, since the runs of one seed share initial weights and data order: the interval holds the "
    "mean difference to svd with 95% confidence. A difference counts as beyond the noise if its p-value stays "
    "below 0.05 after Holm's correction for the number of methods compared with svd, as borderline if it does so only "
    "without the correction."
)
"""What `paired_difference` and `holm` do, for the reader of a report."""


@dataclass(frozen=True)
class Difference:
    """The mean difference of pairs, its 95% confidence interval and p-value; NaN where they can't be had."""

    mean: float
    low: float
    high: float
    p: float
    num_pairs: int


def paired_difference(treated: Mapping[str, float], control: Mapping[str, float]) -> Difference:
    """Return the mean difference ``treated - control`` over the seeds that both have with finite values.

    One pair has no interval. Neither have pairs that differ all by the same: that is coarse rounding (an error is a
    number of images), not certainty.

    Example:
        >>> paired_difference({"0": 4.0, "1": 4.2, "2": 4.4}, {"0": 4.3, "1": 4.4, "2": 4.9}).num_pairs
        3
    """
    pairs = [treated[seed] - control[seed] for seed in treated if seed in control]
    pairs = [pair for pair in pairs if math.isfinite(pair)]
    n, nan = len(pairs), math.nan
    if n == 0:
        return Difference(nan, nan, nan, nan, 0)
    mean = math.fsum(pairs) / n
    if n == 1:
        return Difference(mean, nan, nan, nan, 1)
    error = math.sqrt(math.fsum((pair - mean) ** 2 for pair in pairs) / (n - 1) / n)
    if error <= 1e-12 * max(map(abs, pairs)):
        return Difference(mean, nan, nan, nan, n)
    margin = t_quantile(0.95, n - 1) * error
    return Difference(mean, mean - margin, mean + margin, t_two_sided(mean / error, n - 1), n)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values after Holm's correction for their number; NaN is no comparison and stays NaN.

    Reference: Holm, A simple sequentially rejective multiple test procedure, 1979.

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    order = sorted((p, index) for index, p in enumerate(p_values) if not math.isnan(p))
    corrected, largest = [math.nan] * len(p_values), 0.0
    for position, (p, index) in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - position) * p))
        corrected[index] = largest
    return corrected


def t_two_sided(t: float, df: int) -> float:
    """Return the probability that Student's t with ``df`` degrees of freedom is at least ``|t|`` away from zero.

    For whole ``df`` it is a finite sum in the angle ``atan(|t| / sqrt(df))``: Abramowitz and Stegun, 26.7.3 and 26.7.4.

    Example:
        >>> round(t_two_sided(2.776445, 4), 6)
        0.05
    """
    angle = math.atan(abs(t) / math.sqrt(df))
    cosine, sine = math.cos(angle), math.sin(angle)
    if df == 1:
        return 1 - 2 * angle / math.pi
    term, total = (cosine, 0.0) if df % 2 else (1.0, 0.0)
    for k in range(2 if df % 2 else 1, df, 2):
        total += term
        term *= cosine**2 * k / (k + 1)
    inside = 2 / math.pi * (angle + sine * total) if df % 2 else sine * total
    return min(1.0, max(0.0, 1 - inside))


def t_quantile(confidence: float, df: int) -> float:
    """Return the t that holds ``confidence`` of Student's distribution between ``-t`` and ``t``.

    Example:
        >>> round(t_quantile(0.95, 4), 3)
        2.776
    """
    low, high = 0.0, 1.0
    while t_two_sided(high, df) > 1 - confidence:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_two_sided(middle, df) > 1 - confidence else (low, middle)
    return high
