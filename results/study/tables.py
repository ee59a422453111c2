"""The study's tables, from the committed files."""

import math
import re
from collections.abc import Callable

from differences import Table, compared, loss_difference, value_range
from published_tables import controlled_table, inexact_table, published_table, rates_table, summary_table
from records import CONDITIONS, QUARTERS, Group, Record, grouped, groups, read

from orthocond.lab.report import text
from orthocond.lab.report.rows import Estimate, verdict_of
from orthocond.lab.report.statistics import paired_difference

PAPER = {"newton_schulz": "1e5", "svd": "1e12", "svd+sn": "1e5", "svd+nog": "1e6", "svd+olr": "1e4", "svd+ow": "1e3"}
"""Condition numbers of decorrelated batch norm that the paper reports, in the text to Figs. 1 to 4."""
CUTS = {
    "svd, rtol 1e-4": ("stem64", "svd"),
    "svd, rtol 2e-5": ("stem64-lower-rtol", "svd"),
    "svd+ow, rtol 1e-4": ("stem64", "svd+ow"),
    "svd+ow, rtol 3e-4": ("stem64-higher-rtol", "svd+ow"),
}
"""Methods on the stem of 64 channels that keep more or fewer directions, by the cut."""
GAUGED = {
    "svd, rtol 1e-4": ("gauged64", "svd"),
    "svd, rtol 2e-5": ("gauged64", "svd(rtol=2e-5)"),
    "svd+gauge, rtol 1e-4": ("gauged64", "svd+gauge"),
    "svd+gauge, rtol 2e-4": ("gauged64", "svd(rtol=0.0002)+gauge"),
    "svd+gauge, rtol 3e-4": ("gauged64", "svd(rtol=0.0003)+gauge"),
    "svd+gauge, rtol 5e-4": ("gauged64", "svd(rtol=0.0005)+gauge"),
}
"""Cuts with and without gauge, on seeds of their own."""
REASONS = {
    "stem16": "16 channels, 1,000 steps",
    "longer": "16 channels, 5,000 steps",
    "stem64": "64 channels, 1,000 steps",
    "stem64-paper-eps": "64 channels, 1,000 steps, `eps=0.01`, nothing dropped",
}
"""Experiments with and without a reason why the paper's best treatment may not help."""
PRODUCTS = {
    "products16": "16 channels",
    "products64": "64 channels",
    "products64-rate": "64 channels, learning rate 0.3",
    "products64-adamw": "64 channels, AdamW, learning rate 1e-3, weight decay 0.01",
}
"""Experiments with whitening by products alone."""
STATISTICS = {"running": "error %, running statistics", "weight at rest": "after the training", "batch": "each batch's"}
"""What the whitening layer was tested with."""


def with_tables(page: str, runs: list[Record]) -> str:
    """Return the page with each of its tables rewritten."""
    return re.sub(
        r"(<!-- table (\S+) -->\n).*?(<!-- end -->)",
        lambda match: f"{match[1]}\n{_markdown(*TABLES[match[2]](runs))}\n{match[3]}",
        page,
        flags=re.DOTALL,
    )


def sweep_table(runs: list[Record], experiment: str) -> Table:
    rows = []
    for group, *told in compared(groups(runs, experiment)):
        rows.append(
            [
                group.method,
                group.error,
                *told,
                *(group.condition(name) for name in CONDITIONS),
                group.mean("rank_last", "{:.3g}"),
                group.mean("failures", "{:.3g}"),
            ]
        )
    header = ["method", "error %", "difference to svd", "seeds' noise", "cond", "on the support", "with eps"]
    return [*header, "rank", "failures"], rows


def gauge_table(runs: list[Record], experiment: str) -> Table:
    methods = ("bn", "svd", "svd+nog", "svd+gauge", "svd+nog+gauge")
    rows = []
    for group, *told in compared([group for group in groups(runs, experiment) if group.method in methods]):
        rows.append(
            [
                group.method,
                group.error,
                *told,
                *(group.condition(name) for name in CONDITIONS),
                value_range(group.values("below_threshold"), "{:.1%}"),
                value_range(group.values("gauged"), "{:.0f}"),
                group.mean("rank_last", "{:.3g}"),
            ]
        )
    header = ["method", "error %", "difference to svd", "seeds' noise", "cond", "on the support", "with eps"]
    return [*header, "steps below 10", "applied", "rank"], rows


def varied_table(_: list[Record]) -> Table:
    """Return what each variation of gauge changes, with the running statistics and with renewed ones."""
    runs = read("varied")
    found = [Group(runs, "varied", name) for (name,) in grouped(runs, "method")]
    control = found[0]
    rows = []
    for (group, *running), (_, *renewed) in zip(
        compared(found, control.method), compared(found, control.method, "renewed"), strict=True
    ):
        loss = paired_difference(group.by_seed("loss_4"), control.by_seed("loss_4"))
        rows.append(
            [
                group.method,
                group.mean("gauged", "{:.3g}"),
                group.mean("rank_last", "{:.3g}"),
                group.error,
                *running,
                group.mean_std("renewed"),
                *renewed,
                text.difference(None) if group is control else loss_difference(loss),
            ]
        )
    told = [f"difference to {control.method}", "seeds' noise"]
    header = ["", "times applied", "rank", "error %, running statistics", *told, "renewed statistics", *told]
    return [*header, "training loss at the end, difference"], rows


def products_table(runs: list[Record]) -> Table:
    """Return what products do beside decompositions, both with gauge: error, training loss, and how they did it."""
    rows = []
    for experiment, title in PRODUCTS.items():
        found = groups(runs, experiment)
        if not found:
            continue
        control = next(group for group in found if group.method == "svd+gauge")
        for group, *told in compared(found, control.method):
            difference = paired_difference(group.by_seed("loss_4"), control.by_seed("loss_4"))
            rows.append(
                [
                    title,
                    group.method,
                    group.error,
                    *told,
                    group.mean("loss_4", "{:.3f}"),
                    text.difference(None) if group is control else loss_difference(difference),
                    value_range(group.values("whitened_by_products"), "{:.1%}"),
                    value_range(group.values("without_decomposition"), "{:.1%}"),
                    value_range(group.values("at_most_threshold"), "{:.1%}"),
                    value_range(group.values("below_threshold"), "{:.1%}"),
                ]
            )
            title = ""
    header = ["", "method", "error %", "difference to svd+gauge", "seeds' noise", "training loss at the end"]
    shares = ["steps whitened by products", "without any decomposition", "cond at most 10", "by the cut 1e-5"]
    return [*header, "difference", *shares], rows


def losses_table(runs: list[Record], experiment: str) -> Table:
    """Return how the training loss of each method differs from that of svd, on the same batches."""
    found = groups(runs, experiment)
    control = next(group for group in found if group.method == "svd")
    rows = []
    for group in found:
        if group.method in ("svd", "bn"):
            continue
        differences = [paired_difference(group.by_seed(name), control.by_seed(name)) for name in QUARTERS]
        rows.append([group.method, *map(loss_difference, differences)])
    rows.insert(0, ["svd itself", *(control.mean(name, "{:.3f}") for name in QUARTERS)])
    return ["method", "steps 1 to 250", "251 to 500", "501 to 750", "751 to 1000"], rows


def rank_table(runs: list[Record], cuts: dict[str, tuple[str, str]], control: str) -> Table:
    """Return how methods that keep more or fewer directions differ from one of them."""
    base = Group(runs, *cuts[control])
    rows = []
    for name, place in cuts.items():
        group = Group(runs, *place)
        differences = [text.difference(None)] * 2
        if name != control:
            error, loss = (
                paired_difference(group.by_seed(value), base.by_seed(value)) for value in ("error", "loss_4")
            )
            differences = [text.difference(error), loss_difference(loss)]
        rows.append([name, group.mean("rank_last", "{:.3g}"), group.error, *differences])
    return ["", "rank", "error %", f"difference to {control}", "of the training loss at the end"], rows


def claims_table(runs: list[Record]) -> Table:
    """Return condition numbers beside the paper's, and on the stem of full rank how they compare with those of svd."""
    rows = []
    for stem16 in groups(runs, "stem16"):
        if stem16.method == "bn":
            continue
        stem64, svd = Group(runs, "stem64", stem16.method), Group(runs, "stem16", "svd")
        row = [stem16.method, PAPER.get(stem16.method, "")]
        row += [stem64.condition("cond"), stem64.condition("cond_support")]
        for name in ("cond", "cond_support"):
            row += [stem16.condition(name), "" if stem16.method == "svd" else _ratio(svd, stem16, name)]
        rows.append(row)
    header = ["method", "paper", "64 channels, raw", "on the support", "16 channels, raw", "lower than svd by"]
    return [*header, "on the support", "lower than svd by"], rows


def _ratio(control: Group, group: Group, name: str) -> str:
    """Return by which factor the control's is higher: the geometric mean over the seeds, with its 95% interval."""
    logs = ({seed: math.log(value) for seed, value in each.by_seed(name).items()} for each in (control, group))
    difference = paired_difference(*logs)
    factors = [float(f"{math.exp(value):.2g}") for value in (difference.mean, difference.low, difference.high)]
    return "{} [{}, {}]".format(*(f"{factor:.1f}" if factor < 10 else f"{factor:,.0f}" for factor in factors))


def switch_table(runs: list[Record]) -> Table:
    rows = []
    experiments = sorted({str(run["experiment"]) for run in runs})
    for experiment in experiments:
        for group in groups(runs, experiment):
            if group.values("switched"):
                share = [100 * run["switched"] / run["steps"] for run in group.runs]
                figures = [group.error, group.condition("cond_support")]
                rows.append([experiment, group.method, value_range(share, "{:.1f}"), *figures])
    return ["experiment", "method", "steps switched, % (seeds)", "error %", "cond on the support"], rows


def changes_table(runs: list[Record]) -> Table:
    """Return each setting that was changed, against the same method and seeds without the change.

    An experiment with one is called after the one without: ``stem64-paper-eps`` is ``stem64`` with the paper's eps.
    """
    rows = []
    names = {str(run["experiment"]) for run in runs} - set(PRODUCTS)
    for experiment in sorted(name for name in names if "-" in name):
        base = experiment.partition("-")[0]
        for group in groups(runs, experiment):
            before = Group(runs, base, group.method)
            difference = paired_difference(group.by_seed("error"), before.by_seed("error"))
            rows.append(
                [
                    experiment,
                    group.method,
                    before.error,
                    group.error,
                    text.difference(difference),
                    verdict_of(difference, difference.p),
                    f"{before.condition('cond')} to {group.condition('cond')}",
                    f"{before.condition('cond_support')} to {group.condition('cond_support')}",
                    f"{before.condition('cond_eps')} to {group.condition('cond_eps')}",
                    f"{before.mean('rank_last', '{:.3g}')} to {group.mean('rank_last', '{:.3g}')}",
                ]
            )
    header = ["experiment", "method", "before", "after", "difference", "seeds' noise", "cond", "on the support"]
    return [*header, "with eps", "rank"], rows


def reasons_table(runs: list[Record]) -> Table:
    """Return how the paper's best treatment differs from svd, where a reason why it may not is taken away."""
    rows = []
    for experiment, title in REASONS.items():
        best, control = (Group(runs, experiment, method) for method in ("svd+nog+ow+olr", "svd"))
        difference = paired_difference(best.by_seed("error"), control.by_seed("error"))
        rows.append([title, control.error, best.error, text.difference(difference), str(len(best.runs))])
    return ["", "svd", "svd+nog+ow+olr", "difference", "seeds"], rows


def failures_table(_: list[Record]) -> Table:
    rows = []
    for (place, way), own in grouped(read("failures"), "place", "way").items():
        total = sum(record["steps"] for record in own)
        counts = [f"{sum(record[name] for record in own):.0f} of {total:.0f}" for name in ("raised", "not_finite")]
        rows.append([place, way, *counts, str(len(own))])
    return ["", "root", "solver raised", "gradient not finite", "seeds"], rows


def evaluated_table(runs: list[Record]) -> Table:
    """Return errors by the statistics that the whitening layer was tested with, beside the loss it was trained to."""
    rows = []
    for (experiment, method), own in grouped(read("evaluated"), "experiment", "method").items():
        loss = Group(runs, experiment, method).mean("loss_4", "{:.3f}")
        errors = [text.mean_std(Estimate.of([record[name] for record in own])) for name in STATISTICS]
        rows.append([experiment, method, loss, *errors])
    return ["experiment", "method", "training loss at the end", *STATISTICS.values()], rows


def turning_table(_: list[Record]) -> Table:
    found = read("turning")
    bands = [name for name in found[0] if name not in ("way", "seed")]
    rows = []
    for (way,), own in grouped(found, "way").items():
        rows.append([way, *(text.mean_std(Estimate.of([record[band] for record in own])) for band in bands)])
    return ["method", *(f"directions {band}" for band in bands)], rows


TABLES: dict[str, Callable[[list[Record]], Table]] = {
    **{name: lambda runs, name=name: sweep_table(runs, name) for name in ("stem16", "stem64", "pooling")},
    "gauge16": lambda runs: gauge_table(runs, "stem16"),
    "gauge64": lambda runs: gauge_table(runs, "stem64"),
    "losses16": lambda runs: losses_table(runs, "stem16"),
    "losses64": lambda runs: losses_table(runs, "stem64"),
    "products": products_table,
    "cuts": lambda runs: rank_table(runs, CUTS, "svd, rtol 1e-4"),
    "gauged": lambda runs: rank_table(runs, GAUGED, "svd, rtol 1e-4"),
    "controlled": controlled_table,
    "varied": varied_table,
    "claims": claims_table,
    "switch": switch_table,
    "changes": changes_table,
    "reasons": reasons_table,
    "failures": failures_table,
    "turning": turning_table,
    "evaluated": evaluated_table,
    "summary": summary_table,
    "published": lambda _: published_table("published"),
    "published-defaults": lambda _: published_table("published-defaults"),
    "published-batch-128": lambda _: published_table("published-batch-128"),
    "tuned": lambda _: published_table("tuned"),
    "inexact": inexact_table,
    "rates": rates_table,
}


def _markdown(header: list[str], rows: list[list[str]]) -> str:
    figures = [
        [cell.replace(" ", "\N{NO-BREAK SPACE}") if cell.strip("*")[:1] in "+-0123456789" else cell for cell in row]
        for row in rows
    ]
    lines = [header, ["---"] * len(header), *figures]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
