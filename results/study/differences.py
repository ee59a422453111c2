"""How the study's tables tell a difference between methods."""

import math
from collections.abc import Iterable

from records import Group

from orthocond.lab.report import text
from orthocond.lab.report.rows import verdict_of
from orthocond.lab.report.statistics import Difference, holm, paired_difference

Table = tuple[list[str], list[list[str]]]
"""A header and rows."""


def compared(found: list[Group], control: str = "svd", name: str = "error") -> Iterable[tuple[Group, str, str]]:
    """Yield each method with its difference to another one, and what the noise of the seeds makes of it."""
    (errors,) = (group.by_seed(name) for group in found if group.method == control)
    differences = [
        None if group.method == control else paired_difference(group.by_seed(name), errors) for group in found
    ]
    corrected = holm([math.nan if difference is None else difference.p for difference in differences])
    for group, difference, p in zip(found, differences, corrected, strict=True):
        yield group, text.difference(difference), verdict_of(difference, p)


def loss_difference(difference: Difference) -> str:
    return f"{difference.mean:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}]"


def value_range(values: list[float], form: str) -> str:
    return f"{form.format(min(values))} to {form.format(max(values))}" if values else ""
