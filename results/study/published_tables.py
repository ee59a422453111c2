"""The study's tables of the paper's own configuration, from the committed files."""

import math
import statistics

from differences import Table, compared
from records import Group, Record, grouped, groups, read

from orthocond.lab.report import text
from orthocond.lab.report.folders import method_order
from orthocond.lab.report.rows import Estimate
from orthocond.lab.report.statistics import paired_difference

SUMMARY = {
    "the paper's configuration": ("published", "error"),
    "the same, renewed statistics": ("published", "renewed"),
    "our defaults, 3,000 steps": ("published-defaults", "error"),
    "our defaults, 1,000 steps": ("stem64", "error"),
    "16 channels, 1,000 steps": ("stem16", "error"),
}
"""Settings of the summary: the experiment, and the error that is compared."""
INEXACT = {
    "published-iterations-5": "5 iterations",
    "published-iterations-8": "8 iterations",
    "published-iterations-12": "12 iterations",
    "published-float32": "`eigh` in float32",
}
"""Experiments with solvers that are not exact."""
RATE, UNCHANGED = "published-rate-", "published"
"""Experiments with a learning rate of the stem, and the one in which it is that of the other layers, 0.1."""
CHOICE_SEED = 450
"""The first of the seeds on which the rates were chosen; those below are compared."""
CONTROLLED = {
    "rtol 1e-4": ("svd", "svd+gauge"),
    "rtol 2e-4": ("svd(rtol=0.0002)", "svd(rtol=0.0002)+gauge"),
}
"""Two cuts without gauge and with it, in ``published-defaults``."""


def published_table(experiment: str, control: str = "svd") -> Table:
    """Return errors with the running statistics and with renewed ones, training loss and condition numbers."""
    found = groups(published_records("published"), experiment)
    curves = groups(published_records("published_curves"), experiment)
    measure, title = (
        ("cond_support", "on the support")
        if experiment.startswith("published-defaults")
        else ("cond_eps", "cond with eps")
    )
    rows = []
    both = zip(compared(found, control), compared(found, control, "renewed"), curves, strict=True) if found else ()
    for (group, *running), (_, *renewed), curve in both:
        rows.append(
            [
                group.method,
                str(len(group.runs)),
                group.error,
                *running,
                group.mean_std("renewed"),
                *renewed,
                group.mean("loss_4", "{:.3f}"),
                group.condition(measure),
                floor_condition(curve),
            ]
        )
    told = [f"difference to {control}", "seeds' noise"]
    header = ["method", "seeds", "error %, running statistics", *told, "renewed statistics", *told]
    return [*header, "training loss at the end", title, "cond with the floor"], rows


def floor_condition(curve: Group) -> str:
    """Return the geometric mean over the seeds of the median over the steps, as for the other condition numbers."""
    medians = [statistics.median(point["cond_floor"] for point in own) for own in grouped(curve.runs, "seed").values()]
    return text.condition(statistics.geometric_mean(medians))


def inexact_table(_: list[Record]) -> Table:
    """Return what treatments do for solvers that are not exact, each against the same solver alone."""
    rows: list[list[str]] = []
    for experiment, title in INEXACT.items():
        control = "svd" if experiment == "published-float32" else "newton_schulz"
        header, own = published_table(experiment, control)
        rows += [[title, *row] for row in own]
    return ["solver", *(name.replace(f"to {control}", "to the solver alone") for name in header)], rows


def rates_table(_: list[Record]) -> Table:
    """Return the errors with each learning rate of the stem, on the seeds that it was chosen on."""
    rows = []
    for (method, experiment), own in grouped(_choosing(), "method", "experiment").items():
        errors = [text.mean_std(Estimate.of([run[name] for run in own])) for name in ("error", "renewed")]
        loss = sum(run["loss_4"] for run in own) / len(own)
        rows.append([method, experiment.removeprefix(RATE), *errors, f"{loss:.3f}", str(len(own))])
    header = ["method", "rate of the stem", "error %, running statistics", "renewed statistics"]
    return [*header, "training loss at the end", "seeds"], sorted(rows, key=lambda row: method_order(row[0]))


def chosen_rates() -> dict[str, str]:
    """Return for each method the experiment with the rate of the lowest mean error, on the seeds for that choice.

    Raises:
        ValueError: the rates of a method were run on different seeds, or a run has no error.
    """
    means: dict[str, dict[str, float]] = {}
    seeds: dict[str, set[tuple[float, ...]]] = {}
    for (method, experiment), own in grouped(_choosing(), "method", "experiment").items():
        means.setdefault(method, {})[experiment] = statistics.mean(run["error"] for run in own)
        seeds.setdefault(method, set()).add(tuple(run["seed"] for run in own))
    for method, errors in means.items():
        if len(seeds[method]) > 1 or not all(map(math.isfinite, errors.values())):
            raise ValueError(f"the rates of {method} can't be compared: seeds {seeds[method]}, mean errors {errors}.")
    return {method: min(errors, key=errors.__getitem__) for method, errors in means.items()}


def published_records(name: str) -> list[Record]:
    """Return the committed records, and as experiment ``tuned`` each method with its chosen rate on fresh seeds."""
    records, chosen = read(name), chosen_rates()
    places = {(UNCHANGED if rate == f"{RATE}0.1" else rate, method) for method, rate in chosen.items()}
    fresh = [
        {**record, "experiment": "tuned"}
        for record in records
        if (record["experiment"], record["method"]) in places and record["seed"] < CHOICE_SEED
    ]
    for method in chosen.keys() - {record["method"] for record in fresh}:
        raise ValueError(
            f"{chosen[method]} is best for {method} and has no run of it on seeds below {CHOICE_SEED}; add it to "
            "results/study/run."
        )
    return records + fresh


def _choosing() -> list[Record]:
    return [run for run in read("published") if run["experiment"].startswith(RATE) and run["seed"] >= CHOICE_SEED]


def summary_table(runs: list[Record]) -> Table:
    """Return the difference of each method to svd, in every setting in which both were run."""
    published = published_records("published")
    ours = {run["experiment"] for run in runs}
    columns = {title: (runs if name in ours else published, name, value) for title, (name, value) in SUMMARY.items()}
    differences: dict[str, dict[str, str]] = {}
    for title, (records, experiment, value) in columns.items():
        found = groups(records, experiment)
        for group, difference, verdict in compared(found, name=value) if found else ():
            mark = {"beyond": "**", "borderline": "*"}.get(verdict, "")
            num_seeds = len(group.runs)
            cell = group.mean_std(value) if group.method == "svd" else difference
            if group.method == "svd" or num_seeds < max(len(each.runs) for each in found):
                cell = f"{cell} ({num_seeds})"
            differences.setdefault(group.method, {})[title] = f"{mark}{cell}{mark}"
    rows = [
        [method, *(differences[method].get(title, "") for title in SUMMARY)]
        for method in sorted(differences, key=method_order)
    ]
    return ["method", *SUMMARY], sorted(rows, key=lambda row: row[0] != "svd")


def controlled_table(_: list[Record]) -> Table:
    """Return what the cut changes without gauge, with it, and in the difference between the two."""
    runs = published_records("published")
    columns = {
        title: [Group(runs, "published-defaults", name) for name in names] for title, names in CONTROLLED.items()
    }
    errors = [[group.by_seed("error") for group in both] for both in columns.values()]
    gained = [{seed: gauged[seed] - plain[seed] for seed in gauged.keys() & plain} for plain, gauged in errors]
    rows = [
        [
            name,
            *(both[place].error for both in columns.values()),
            text.difference(paired_difference(errors[1][place], errors[0][place])),
        ]
        for place, name in enumerate(("svd", "svd+gauge"))
    ]
    differences = [text.difference(paired_difference(gauged, plain)) for plain, gauged in errors]
    rows.append(["difference", *differences, text.difference(paired_difference(gained[1], gained[0]))])
    return ["", *CONTROLLED, "from the first cut to the second"], rows
