"""Whether a difference exceeds the noise of the seeds: a paired t-test, corrected for the number of comparisons."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["TEST", "Difference", "holm", "paired_difference", "separate_p"]

TEST = (
    "A paired t-test by seed, since the runs of one seed share initial weights and data order: the interval holds the "
    "mean difference to svd with 95% confidence. A difference counts as beyond the noise if its p-value stays "
    "below 0.05 after Holm's correction for the number of methods compared with svd, as borderline if it does so only "
    "without the correction."
)
"""What `paired_difference` and `holm` do, for the reader of a report."""


@dataclass(frozen=True)
class Difference:
    """The mean difference of pairs, its 95% confidence interval and p-value; NaN where they can't be computed."""

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
    spread = math.sqrt(math.fsum((pair - mean) ** 2 for pair in pairs) / (n - 1) / n)
    if spread <= 1e-12 * max(map(abs, pairs)):
        return Difference(mean, nan, nan, nan, n)
    from scipy import stats  # takes a second, which other commands should not wait for

    test = stats.ttest_1samp(pairs, 0.0)
    interval = test.confidence_interval(0.95)
    return Difference(mean, float(interval.low), float(interval.high), float(test.pvalue), n)


def separate_p(first: tuple[float, float], second: tuple[float, float], num: int) -> float:
    """Return the p-value of Welch's t-test for two means with their standard deviations, over ``num`` runs each.

    Example:
        >>> f"{separate_p((19.43, 0.24), (19.99, 0.16), 10):.0e}"  # Table 4 of the paper: NOG against SVD
        '2e-05'
    """
    from scipy import stats

    return float(stats.ttest_ind_from_stats(*first, num, *second, num, equal_var=False).pvalue)


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
