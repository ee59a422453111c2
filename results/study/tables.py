"""The study's tables and pictures.

    python results/study/tables.py collect RUNS    # from the run folders to the committed files beside this one
    python results/study/tables.py                 # from those files to the tables and pictures in docs/

`runs.csv` has a line for each run, `curves.csv` the condition numbers over the steps. A table in a page stands between
`<!-- table NAME -->` and `<!-- end -->`, and is written anew; what is around it is written by hand.
"""

import csv
import io
import json
import math
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from orthocond.lab.report import text, write_report
from orthocond.lab.report.folders import method_order
from orthocond.lab.report.rows import Estimate, verdict_of
from orthocond.lab.report.statistics import holm, paired_difference

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
PAGES = ("results.md", "gauge.md")
CONDITIONS = ("cond", "cond_support", "cond_eps")
FIRST = 10
"""Steps that are left out of medians and shares: the network has just been initialised."""
THRESHOLD = 10.0
"""Of gauge."""
BIN = 10
QUARTERS = ("loss_1", "loss_2", "loss_3", "loss_4")
"""Training loss, mean over a quarter of the steps."""
PAPER = {"newton_schulz": "1e5", "svd": "1e12", "svd+sn": "1e5", "svd+nog": "1e6", "svd+olr": "1e4", "svd+ow": "1e3"}
"""Condition numbers of decorrelated batch norm that the paper reports, in the text to Figs. 1 to 4."""

Record = dict[str, Any]


def collect(runs: Path) -> None:
    """Write what is kept of the run folders."""
    lines, curves = [], []
    for experiment in sorted(path for path in runs.iterdir() if path.is_dir()):
        by_method: dict[str, list[dict[str, np.ndarray]]] = defaultdict(list)
        for folder in sorted(experiment.glob("*/seed-*")):
            status = json.loads((folder / "status.json").read_text())
            if status["state"] != "finished":
                print(f"{folder}: {status['state']}, left out", file=sys.stderr)
                continue
            config = json.loads((folder / "config.json").read_text())
            line, columns = _run(folder, config)
            lines.append({"experiment": experiment.name, **line})
            by_method[config["method"]].append(columns)
        for method in sorted(by_method, key=method_order):
            curves += [{"experiment": experiment.name, **point} for point in _curve(method, by_method[method])]
        for form in ("csv", "json"):
            write_report([experiment], HERE / f"{experiment.name}.{form}", format=form)
    lines.sort(key=lambda line: (line["experiment"], method_order(line["method"]), line["seed"]))
    (HERE / "runs.csv").write_text(_as_csv(lines))
    (HERE / "curves.csv").write_text(_as_csv(curves))


def _run(folder: Path, config: Record) -> tuple[Record, dict[str, np.ndarray]]:
    records = [json.loads(entry) for entry in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["kind"] == "step"]
    columns = {name: np.array([_number(record[name]) for record in steps]) for name in (*CONDITIONS, "rank")}
    losses = np.array([record["loss"] for record in steps])
    later = np.arange(len(steps)) >= FIRST
    times = [json.loads(entry) for entry in (folder / "times.jsonl").read_text().splitlines()]
    line: Record = {
        "method": config["method"],
        "seed": config["seed"],
        "steps": len(steps),
        "error": next(record["val_error"] for record in reversed(records) if record["kind"] == "epoch"),
        **{name: _digits(float(np.mean(part))) for name, part in zip(QUARTERS, np.split(losses, 4), strict=True)},
        **{name: _digits(_median(columns[name][later])) for name in CONDITIONS},
        "largest_cond_support": _digits(np.max(columns["cond_support"][later])),
        "below_threshold": _digits(float(np.mean(columns["cond_support"][later] < THRESHOLD))),
        "rank_last": _digits(_median(columns["rank"][-len(steps) // 10 :])),
        "switched": _count(steps, "switched"),
        "gauged": _count(steps, "gauged"),
        "failures": sum(record["failures"] or 0 for record in steps),
        "seconds": _digits(statistics.median(record["seconds"] / record["steps"] for record in times)),
    }
    if config["method"] == "bn":
        line |= dict.fromkeys(("largest_cond_support", "below_threshold"), "")
    return line, columns


def _curve(method: str, runs: list[dict[str, np.ndarray]]) -> Iterable[Record]:
    """Yield the median, lowest and highest of the seeds, of the medians of every `BIN` steps."""
    if method == "bn":
        return
    for start in range(0, min(len(run["cond"]) for run in runs) - BIN + 1, BIN):
        point: Record = {"method": method, "step": start + BIN // 2}
        for name in ("cond_support", "cond"):
            values = [_median(run[name][start : start + BIN]) for run in runs]
            point |= {
                name: _digits(statistics.median(values)),
                f"{name}_low": _digits(min(values)),
                f"{name}_high": _digits(max(values)),
            }
        yield point


def publish() -> None:
    """Write the tables and pictures of the pages."""
    runs = read("runs")
    for page in (DOCS / name for name in PAGES):
        page.write_text(with_tables(page.read_text(), runs))
    draw_gauged(read("curves"), DOCS / "gauge.png")
    draw_treated(read("curves"), DOCS / "conditions.png")
    draw_errors(runs, DOCS / "results.png")


def read(name: str) -> list[Record]:
    """Return the records of a committed file, its numbers as numbers."""
    with (HERE / f"{name}.csv").open(newline="") as file:
        return [{key: _parsed(value) for key, value in record.items()} for record in csv.DictReader(file)]


def with_tables(page: str, runs: list[Record]) -> str:
    """Return the page with each of its tables written anew."""
    return re.sub(
        r"(<!-- table (\S+) -->\n).*?(<!-- end -->)",
        lambda match: f"{match[1]}\n{_table(*TABLES[match[2]](runs))}\n{match[3]}",
        page,
        flags=re.DOTALL,
    )


class Group:
    """The runs of one method in one experiment."""

    def __init__(self, runs: list[Record], experiment: str, method: str) -> None:
        self.method = method
        self.runs = [run for run in runs if (run["experiment"], run["method"]) == (experiment, method)]

    def values(self, name: str) -> list[float]:
        return [float(run[name]) for run in self.runs if run[name] != ""]

    def by_seed(self, name: str) -> dict[str, float]:
        return {str(run["seed"]): float(run[name]) for run in self.runs}

    @property
    def error(self) -> str:
        return text.mean_std(Estimate.of(self.values("error")))

    def condition(self, name: str) -> str:
        """The geometric mean over the seeds of each run's median."""
        values = self.values(name)
        return text.condition(statistics.geometric_mean(values)) if values else ""

    def mean(self, name: str, form: str) -> str:
        values = self.values(name)
        return form.format(statistics.mean(values)) if values else ""


def groups(runs: list[Record], experiment: str) -> list[Group]:
    names = {run["method"] for run in runs if run["experiment"] == experiment}
    return [Group(runs, experiment, name) for name in sorted(names, key=method_order)]


Table = tuple[list[str], list[list[str]]]


def compared(found: list[Group]) -> Iterable[tuple[Group, str, str]]:
    """Yield each method with its difference to svd, and what the noise of the seeds makes of it."""
    control = next(group for group in found if group.method == "svd").by_seed("error")
    differences = [
        None if group.method == "svd" else paired_difference(group.by_seed("error"), control) for group in found
    ]
    corrected = holm([math.nan if difference is None else difference.p for difference in differences])
    for group, difference, p in zip(found, differences, corrected, strict=True):
        yield group, text.difference(difference), verdict_of(difference, p)


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
        below = group.values("below_threshold")
        rows.append(
            [
                group.method,
                group.error,
                *told,
                *(group.condition(name) for name in CONDITIONS),
                f"{min(below):.1%} to {max(below):.1%}" if below else "",
                f"{min(group.values('gauged')):.0f} to {max(group.values('gauged')):.0f}"
                if group.values("gauged")
                else "",
                group.mean("rank_last", "{:.3g}"),
            ]
        )
    header = ["method", "error %", "difference to svd", "seeds' noise", "cond", "on the support", "with eps"]
    return [*header, "steps below 10", "applied", "rank"], rows


def losses_table(runs: list[Record], experiment: str) -> Table:
    """Return how the training loss of each method differs from that of svd, on the same batches."""
    found = groups(runs, experiment)
    control = next(group for group in found if group.method == "svd")
    rows = []
    for group in found:
        if group.method in ("svd", "bn"):
            continue
        differences = [paired_difference(group.by_seed(name), control.by_seed(name)) for name in QUARTERS]
        rows.append([group.method, *(f"{d.mean:+.3f} [{d.low:+.3f}, {d.high:+.3f}]" for d in differences)])
    rows.insert(0, ["svd itself", *(control.mean(name, "{:.3f}") for name in QUARTERS)])
    return ["method", "steps 1 to 250", "251 to 500", "501 to 750", "751 to 1000"], rows


CUTS = {
    "svd, rtol 1e-4": ("stem64", "svd"),
    "svd, rtol 2e-5": ("stem64-lower-rtol", "svd"),
    "svd+gauge, rtol 1e-4": ("stem64", "svd+gauge"),
    "svd+ow, rtol 1e-4": ("stem64", "svd+ow"),
    "svd+ow, rtol 3e-4": ("stem64-higher-rtol", "svd+ow"),
}
"""Methods on the stem of 64 channels that keep more or fewer directions, by the cut."""


def rank_table(runs: list[Record], names: Iterable[str], control: str) -> Table:
    """Return how methods differ from one that keeps as many directions, or other ones."""
    base = Group(runs, *CUTS[control])
    rows = []
    for name in names:
        group = Group(runs, *CUTS[name])
        differences = [text.difference(None)] * 2
        if name != control:
            error, loss = (
                paired_difference(group.by_seed(value), base.by_seed(value)) for value in ("error", "loss_4")
            )
            differences = [text.difference(error), f"{loss.mean:+.3f} [{loss.low:+.3f}, {loss.high:+.3f}]"]
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
                rows.append([experiment, group.method, f"{min(share):.1f} to {max(share):.1f}", *figures])
    return ["experiment", "method", "steps switched, % (seeds)", "error %", "cond on the support"], rows


def changes_table(runs: list[Record]) -> Table:
    """Return each setting that was changed, against the same method and seeds without the change."""
    rows = []
    for experiment in sorted({str(run["experiment"]) for run in runs if "-" in str(run["experiment"])}):
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
    failures = read("failures")
    rows = []
    for place, way in dict.fromkeys((str(record["place"]), str(record["way"])) for record in failures):
        own = [record for record in failures if (record["place"], record["way"]) == (place, way)]
        total = sum(record["steps"] for record in own)
        counts = [f"{sum(record[name] for record in own):.0f} of {total:.0f}" for name in ("raised", "not_finite")]
        rows.append([place, way, *counts, str(len(own))])
    return ["", "root", "solver raised", "gradient not finite", "seeds"], rows


def evaluated_table(runs: list[Record]) -> Table:
    """Return errors by the statistics that the whitening layer was tested with, beside the loss it was trained to."""
    found = read("evaluated")
    rows = []
    for experiment, method in dict.fromkeys((str(record["experiment"]), str(record["method"])) for record in found):
        own = [record for record in found if (record["experiment"], record["method"]) == (experiment, method)]
        loss = Group(runs, experiment, method).mean("loss_4", "{:.3f}")
        errors = [text.mean_std(Estimate.of([record[name] for record in own])) for name in STATISTICS]
        rows.append([experiment, method, loss, *errors])
    return ["experiment", "method", "training loss at the end", *STATISTICS.values()], rows


def turning_table(_: list[Record]) -> Table:
    found = read("turning")
    bands = [name for name in found[0] if name not in ("way", "seed")]
    rows = []
    for way in dict.fromkeys(str(record["way"]) for record in found):
        own = [record for record in found if record["way"] == way]
        rows.append([way, *(text.mean_std(Estimate.of([record[band] for record in own])) for band in bands)])
    return ["method", *(f"directions {band}" for band in bands)], rows


TABLES: dict[str, Callable[[list[Record]], Table]] = {
    **{name: lambda runs, name=name: sweep_table(runs, name) for name in ("stem16", "stem64", "pooling")},
    "gauge16": lambda runs: gauge_table(runs, "stem16"),
    "gauge64": lambda runs: gauge_table(runs, "stem64"),
    "losses16": lambda runs: losses_table(runs, "stem16"),
    "losses64": lambda runs: losses_table(runs, "stem64"),
    "rank": lambda runs: rank_table(runs, list(CUTS)[:3], "svd, rtol 2e-5"),
    "cuts": lambda runs: rank_table(runs, [name for name in CUTS if "gauge" not in name], "svd, rtol 1e-4"),
    "claims": claims_table,
    "switch": switch_table,
    "changes": changes_table,
    "reasons": reasons_table,
    "failures": failures_table,
    "turning": turning_table,
    "evaluated": evaluated_table,
}


STATISTICS = {"running": "error %, running statistics", "weight at rest": "after the training", "batch": "each batch's"}
STEMS = {"stem16": "16 channels, full rank", "stem64": "64 channels, rank 27 at most"}
REASONS = {
    "stem16": "16 channels, 1,000 steps",
    "longer": "16 channels, 5,000 steps",
    "stem64": "64 channels, 1,000 steps",
    "stem64-paper-eps": "64 channels, 1,000 steps, `eps=0.01`, nothing dropped",
}


GAUGED = {"svd": "#0072b2", "svd+nog": "#e69f00", "svd+gauge": "#009e73"}
TREATED = {
    "svd": "#0072b2",
    "svd+sn": "#56b4e9",
    "svd+olr": "#cc79a7",
    "newton_schulz": "#999999",
    "svd+nog": "#e69f00",
    "svd+ow": "#d55e00",
    "svd+ol": "#000000",
    "svd+gauge": "#009e73",
}
"""Methods of a picture, and their colours."""


def draw_gauged(curves: list[Record], file: Path) -> None:
    """Draw the condition number on the support, with the range of the seeds."""
    figure, axes = _stems()
    for axis, experiment in zip(axes, STEMS, strict=True):
        for method, colour in GAUGED.items():
            steps, own = _line(axis, curves, experiment, method, "cond_support", colour)
            low, high = ([point[f"cond_support_{end}"] for point in own] for end in ("low", "high"))
            axis.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)
        axis.axhline(THRESHOLD, color="black", linewidth=0.8, linestyle=":")
    axes[0].set_ylabel("condition number on the support")
    axes[0].text(990, THRESHOLD * 1.1, "threshold", ha="right", fontsize=9)
    axes[1].legend(loc="center right")
    figure.savefig(file, dpi=110, metadata={"Software": None})


def draw_treated(curves: list[Record], file: Path) -> None:
    """Draw the raw condition number of each treatment."""
    figure, axes = _stems()
    for axis, experiment in zip(axes, STEMS, strict=True):
        for method, colour in TREATED.items():
            _line(axis, curves, experiment, method, "cond", colour)
    axes[0].set_ylabel("condition number, median of the seeds")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center")
    figure.savefig(file, dpi=110, metadata={"Software": None})


def _stems() -> tuple[Any, Any]:
    figure, axes = _pyplot().subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for axis, title in zip(axes, STEMS.values(), strict=True):
        axis.set(yscale="log", title=title, xlabel="step")
    return figure, axes


def _line(
    axis: Any, curves: list[Record], experiment: str, method: str, name: str, colour: str
) -> tuple[list[float], list[Record]]:
    own = [point for point in curves if (point["experiment"], point["method"]) == (experiment, method)]
    steps = [point["step"] for point in own]
    axis.plot(steps, [point[name] for point in own], color=colour, label=method)
    return steps, own


def draw_errors(runs: list[Record], file: Path) -> None:
    """Draw the errors of all seeds."""
    plt = _pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.6), sharey=True, layout="constrained")
    names = [group.method for group in groups(runs, "stem16")][::-1]
    for axis, (experiment, title) in zip(axes, STEMS.items(), strict=True):
        for place, name in enumerate(names):
            errors = Group(runs, experiment, name).values("error")
            axis.plot(errors, [place] * len(errors), "o", color="#56b4e9", markersize=5)
            axis.plot([statistics.mean(errors)], [place], "|", color="black", markersize=16)
        axis.set(title=title, xlabel="error in percent, one dot a seed, the bar their mean")
        axis.set_yticks(range(len(names)), names)
        axis.grid(axis="y", alpha=0.3)
    figure.savefig(file, dpi=110, metadata={"Software": None})


def _pyplot() -> Any:
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    return plt


def _table(header: list[str], rows: list[list[str]]) -> str:
    figures = [
        [cell.replace(" ", "\N{NO-BREAK SPACE}") if cell[:1] in "+-0123456789" else cell for cell in row]
        for row in rows
    ]
    lines = [header, ["---"] * len(header), *figures]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _as_csv(records: list[Record]) -> str:
    file = io.StringIO()
    writer = csv.DictWriter(file, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return file.getvalue()


def _median(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if known.size else math.nan


def _count(steps: list[Record], name: str) -> int | str:
    known = [record[name] for record in steps if record[name] is not None]
    return sum(known) if known else ""


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _digits(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.5g}"


def _parsed(value: str) -> Any:
    try:
        return float(value)
    except ValueError:
        return value


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "collect":
        collect(Path(sys.argv[2]))
    elif len(sys.argv) == 1:
        publish()
    else:
        sys.exit(__doc__)
