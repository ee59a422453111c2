"""Numbers as readable text, the same in every format; `MISSING` where there is none."""

import math

from orthocond.lab.report.rows import Estimate, Row
from orthocond.lab.report.statistics import Difference

__all__ = [
    "MISSING",
    "condition",
    "difference",
    "error",
    "mean_std",
    "milliseconds",
    "minute",
    "percent",
    "seeds",
    "signed",
]

MISSING = "\N{EN DASH}"


def error(value: float) -> str:
    """Return an error in percent, as the paper prints it.

    Example:
        >>> error(4.0851)
        '4.09'
    """
    return f"{value:.2f}" if math.isfinite(value) else MISSING


def mean_std(estimate: Estimate) -> str:
    """Return mean ± std; the mean alone of one run.

    Example:
        >>> mean_std(Estimate.of([4.0, 4.2]))
        '4.10 ± 0.14'
    """
    spread = f" ± {error(estimate.std)}" if math.isfinite(estimate.std) else ""
    return error(estimate.mean) + spread


def condition(value: float) -> str:
    """Return a condition number with two or three digits.

    Example:
        >>> condition(33.123), condition(1.23e9), condition(math.inf)
        ('33.1', '1.2e9', '∞')
    """
    if math.isinf(value):
        return "∞"
    if math.isnan(value):
        return MISSING
    return f"{value:.3g}" if value < 1000 else f"{value:.1e}".replace("e+0", "e").replace("e+", "e")


def difference(found: Difference | None) -> str:
    """Return a difference to the baseline with its interval: ``-0.42 [-0.55, -0.29]``."""
    if found is None or found.num_pairs == 0:
        return MISSING
    interval = f" [{signed(found.low)}, {signed(found.high)}]" if math.isfinite(found.low) else ""
    return signed(found.mean) + interval


def signed(value: float) -> str:
    """Return a difference with its sign.

    Example:
        >>> signed(-0.421), signed(0.001)
        ('-0.42', '0.00')
    """
    shown = f"{value:+.2f}"
    return "0.00" if shown in ("+0.00", "-0.00") else shown


def seeds(row: Row) -> str:
    """Return the number of runs behind the row, and the state of the others.

    A row of five runs, of which one diverged and one is unfinished, reads ``3 of 5: 1 diverged, 1 unfinished``.
    """
    unfinished = row.num_runs - row.num_finished - row.num_lost
    others = [(row.num_diverged, "diverged"), (row.num_lost, "lost"), (unfinished, "unfinished")]
    told = ", ".join(f"{count} {what}" for count, what in others if count)
    return f"{row.error.num} of {row.num_runs}: {told}" if told else str(row.num_runs)


def milliseconds(mean: float, std: float = math.nan) -> str:
    """Return seconds as milliseconds, with the standard deviation if there is one.

    Example:
        >>> milliseconds(0.04412, 0.0003), milliseconds(1.5)
        ('44.1 ± 0.3', '1500')
    """
    if not math.isfinite(mean):
        return MISSING
    digits = 0 if mean >= 1 else 1 if mean >= 1e-2 else 2
    spread = f" ± {1000 * std:.{digits}f}" if math.isfinite(std) else ""
    return f"{1000 * mean:.{digits}f}{spread}"


def minute(moment: str) -> str:
    """Return an ISO date to the minute.

    Example:
        >>> minute("2026-11-15T22:00:59+00:00")
        '2026-11-15 22:00'
    """
    return moment[:16].replace("T", " ")


def percent(share: float, sign: str = "") -> str:
    """Return a share as whole percents.

    Example:
        >>> percent(0.104, "+"), percent(0.5)
        ('+10%', '50%')
    """
    return f"{share:{sign}.0%}" if math.isfinite(share) else MISSING
