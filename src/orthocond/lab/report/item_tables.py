"""The tables of the paper's items: the paper's numbers, ours, whether the direction agrees, and whether it is noise."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from orthocond.lab.conditions import CONDITIONS, geometric_mean
from orthocond.lab.paper import NUM_RUNS, Condition, Item
from orthocond.lab.report import text
from orthocond.lab.report.folders import is_ranked
from orthocond.lab.report.rows import BASELINE, VERDICTS, Row, places, verdict_of
from orthocond.lab.report.statistics import holm, paired_difference, separate_p
from orthocond.lab.report.tables import Cell, Table, below_the_line

__all__ = ["accuracy_table", "condition_table", "error_table", "time_table"]

_NOISE = f"Noise: whether ours exceeds that of the seeds. Direction: whether both are on the same side of {BASELINE}."


def error_table(quotes: Mapping[str, Mapping[str, Any]], rows: Sequence[Row]) -> Table:
    """Return Tables 1 to 4: errors of one or several experiments of the paper, and ours."""
    header, lines = ["method"], [[Cell(row.method)] for row in rows]
    for name, quoted in quotes.items():
        header += [f"paper, {name}", "min", f"to {BASELINE}"]
        ranked = {method: quote for method, quote in quoted.items() if is_ranked(method)}
        by_mean, by_min = (places({method: quote[at] for method, quote in ranked.items()}) for at in (0, 2))
        base = quoted[BASELINE]
        for row, line in zip(rows, lines, strict=True):
            quote = quoted[row.method]
            apart = ""
            if row.method != BASELINE:
                p = separate_p(quote[:2], base[:2], NUM_RUNS)
                apart = f"{text.signed(quote.mean - base.mean)}{'*' if p < 0.05 else ''}"
            line += [
                Cell(f"{quote.mean:.2f} ± {quote.std:.2f}", by_mean.get(row.method)),
                Cell(f"{quote.min:.2f}", by_min.get(row.method)),
                Cell(apart or text.MISSING),
            ]
    header += ["ours, last epoch", "min", "best epoch", f"to {BASELINE}", "direction", "noise"]
    for row, line in zip(rows, lines, strict=True):
        differences = [quoted[row.method].mean - quoted[BASELINE].mean for quoted in quotes.values()]
        line += [
            Cell(text.mean_std(row.error), row.place_mean),
            Cell(text.error(row.error.min), row.place_min),
            Cell(text.mean_std(row.best)),
            Cell(text.difference(row.difference)),
            Cell(_directions(differences, round(row.difference.mean, 2) if row.difference else math.nan)),
            Cell(VERDICTS.get(row.verdict, text.MISSING), verdict=row.verdict),
        ]
    caption = (
        f"Validation error in percent, mean ± standard deviation and lowest: the paper's of {NUM_RUNS} runs, ours of "
        f"{_runs(rows)}. A star marks a difference of the paper that exceeds its own noise (Welch's test from its "
        f"means and deviations, p < 0.05). {_NOISE} The authors' script reports the best epoch."
    )
    return Table("errors", caption, header, lines, below_the_line([row.method for row in rows]))


def accuracy_table(quoted: Mapping[str, Any], rows: Sequence[Row]) -> Table:
    """Return Table 5: failures of the solver and accuracies, with arrows as in the paper."""
    header = ["method", "paper: failures", "top-1 %", "top-5 %"]
    header += ["ours: failures", "top-1 %", "top-5 %", "top-1, best epoch", "direction", "noise"]
    ranked = {method: quote for method, quote in quoted.items() if is_ranked(method)}
    by_top1, by_top5 = (places({method: -quote[at] for method, quote in ranked.items()}) for at in (1, 2))
    base = quoted[BASELINE]
    own = {row.method: (100 - row.error.mean, 100 - row.error5.mean) for row in rows}
    nothing = (math.nan, math.nan)
    lines = []
    for row in rows:
        quote, (top1, top5), ours = quoted[row.method], own[row.method], own.get(BASELINE, nothing)
        of_paper = [
            Cell(f"{value:.2f}{_arrow(value - reference, row.method, 1)}", ranking.get(row.method))
            for value, reference, ranking in ((quote.top1, base.top1, by_top1), (quote.top5, base.top5, by_top5))
        ]
        failures = row.failures / row.num_runs if row.num_runs else math.nan
        lines.append(
            [
                Cell(row.method),
                Cell(str(quote.failures)),
                *of_paper,
                Cell(f"{failures:.3g}"),
                Cell(f"{text.error(top1)}{_arrow(top1 - ours[0], row.method, 2)}", row.place_mean),
                Cell(f"{text.error(top5)}{_arrow(top5 - ours[1], row.method, 2)}"),
                Cell(text.error(100 - row.best.mean)),
                Cell(
                    text.MISSING
                    if row.method == BASELINE
                    else _directions([quote.top1 - base.top1], round(top1 - ours[0], 2))
                ),
                Cell(VERDICTS.get(row.verdict, text.MISSING), verdict=row.verdict),
            ]
        )
    caption = (
        "Failures: attempts of the solver that did not converge in one training, in all processes and in validation; "
        f"ours is the mean over the runs. Accuracy in percent, arrows: more or less than {BASELINE}; the paper's of "
        f"one run, ours of {_runs(rows)}. {_NOISE}"
    )
    return Table("errors", caption, header, lines, below_the_line([row.method for row in rows]))


def condition_table(quoted: Mapping[str, Condition], ends: Mapping[str, Mapping[str, float]], measure: str) -> Table:
    """Return what the paper's text says about a figure's curves, and our numbers at the end of training.

    Args:
        quoted: what the paper says, by method.
        ends: the condition number at the end of each run, by method and seed.
        measure: one of `CONDITIONS`.
    """
    logs = {
        method: {seed: math.log10(value) for seed, value in runs.items() if 0 < value < math.inf}
        for method, runs in ends.items()
    }
    control = logs.get(BASELINE, {})
    differences = {method: paired_difference(own, control) for method, own in logs.items() if method != BASELINE}
    corrected = dict(zip(differences, holm([found.p for found in differences.values()]), strict=True))
    base = geometric_mean(ends.get(BASELINE, {}).values())
    lines = []
    for method, runs in ends.items():
        value, found = geometric_mean(runs.values()), differences.get(method)
        verdict = verdict_of(found, corrected[method]) if found is not None else ""
        low, high = min(runs.values(), default=math.nan), max(runs.values(), default=math.nan)
        many = len(runs) > 1 and low < high
        lines.append(
            [
                Cell(method),
                Cell(_said(quoted[method])),
                Cell(text.condition(value) + (f" ({text.condition(low)} to {text.condition(high)})" if many else "")),
                Cell(f"{value / base:.2g}" if found is not None and base > 0 and value < math.inf else text.MISSING),
                Cell(_lower(quoted, method, value, base)),
                Cell(VERDICTS.get(verdict, text.MISSING), verdict=verdict),
            ]
        )
    header = ["method", "paper", "ours", f"times {BASELINE}'s", "direction", "noise"]
    caption = (
        f"Paper: what its text says of the curve. Ours: condition number {CONDITIONS[measure][0]}, median over the "
        f"last tenth of the steps, geometric mean over the seeds (lowest to highest). {_NOISE} Within 1% there is no "
        "difference. The test is on the logarithm."
    )
    return Table("conditions", caption, header, lines, below_the_line(list(ends)))


def time_table(item: Item, results: Mapping[str, Any]) -> tuple[str, Table]:
    """Return a title and Table 6: milliseconds forward and backward, and the extra time of each method."""
    (quoted,) = item.quotes.values()
    records = {record["method"]: record for record in results["records"] if record["subject"] == "step"}
    about = next(iter(records.values()))
    rounds = about["total"][BASELINE]["rounds"]
    lines = []
    for method in (name for name in quoted if name in records):
        quote, record = quoted[method], records[method]
        added = sum(quote) / sum(quoted[BASELINE]) - 1
        ours = record["total"][BASELINE]
        low, high = ours["low"] - 1, ours["high"] - 1
        is_noise = low <= 0 <= high
        lines.append(
            [
                Cell(method),
                *(Cell(str(value)) for value in quote),
                Cell(text.MISSING if method == BASELINE else text.percent(added, "+")),
                *(Cell(text.milliseconds(record[part][BASELINE]["seconds"])) for part in ("forward", "backward")),
                Cell(
                    text.MISSING
                    if method == BASELINE
                    else f"{text.percent(ours['ratio'] - 1, '+')} [{text.percent(low, '+')}, {text.percent(high, '+')}]"
                ),
                Cell(text.MISSING if method == BASELINE else _directions([added], ours["ratio"] - 1)),
                Cell(text.MISSING if method == BASELINE else "within" if is_noise else "beyond"),
            ]
        )
    header = ["method", "paper: FP ms", "BP ms", f"to {BASELINE}"]
    header += ["ours: FP ms", "BP ms", f"to {BASELINE}", "direction", "noise"]
    caption = (
        "Milliseconds of a training step: forward pass (FP), and backward pass (BP) with the optimizer's step, where "
        "the treatments act. Ours: "
        f"{about['network']}, {about['batch_size']} images, on {about['device']}; median of {rounds} rounds in which "
        "the methods take turns, with quartiles of the ratio. Beyond the noise: both quartiles on one side."
    )
    title = f"CIFAR-100 in the paper, {about['preset']} here"
    return title, Table("times", caption, header, lines, below_the_line([line[0].text for line in lines]))


def _said(quote: Condition) -> str:
    if quote.about is not None:
        return f"about {_printed(quote.about)}"
    if quote.below_svd is not None:
        return f"{_printed(quote.below_svd)} below {BASELINE}"
    return "lower" if quote.is_lower else "not stated"


def _printed(value: float) -> str:
    """Return a power of ten as the paper prints it: ``1e5``, ``2e15``."""
    return f"{value:.0e}".replace("e+0", "e").replace("e+", "e")


def _lower(quoted: Mapping[str, Condition], method: str, value: float, base: float) -> str:
    """Return whether our number is on the same side of svd's as the paper's."""
    quote, control = quoted[method], quoted[BASELINE].about
    if method == BASELINE:
        return text.MISSING
    is_lower = quote.is_lower or quote.below_svd is not None
    if quote.about is not None and control is not None:
        is_lower = quote.about < control
    return _directions(
        [-1.0 if is_lower else math.nan], 0.0 if math.isclose(value, base, rel_tol=0.01) else value - base
    )


def _directions(of_paper: Sequence[float], ours: float) -> str:
    known = [value for value in of_paper if value]
    if not any(map(math.isfinite, known)) or math.isnan(ours):
        return text.MISSING
    if ours == 0:
        return "no difference"
    agrees = [(value < 0) == (ours < 0) for value in known]
    return "agrees" if all(agrees) else "opposite" if not any(agrees) else "agrees with one"


def _arrow(difference: float, method: str, digits: int) -> str:
    """Return a difference of accuracies as Table 5 prints it, half a unit rounded up.

    Example:
        >>> _arrow(91.57 - 91.02, "svd+nog+ow+olr", 1), _arrow(73.28 - 73.13, "svd+sn", 1)
        (' (↑ 0.6)', ' (↑ 0.2)')
        >>> _arrow(-1e-12, "svd+sn", 2)
        ' (0.00)'
    """
    if method == BASELINE or not math.isfinite(difference):
        return ""
    shown = f"{abs(difference) + 1e-9:.{digits}f}"
    arrow = "" if float(shown) == 0 else "↓ " if difference < 0 else "↑ "
    return f" ({arrow}{shown})"


def _runs(rows: Sequence[Row]) -> str:
    numbers = sorted({row.error.num for row in rows})
    shown = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
    return f"{shown} run{'' if numbers == [1] else 's'}"
