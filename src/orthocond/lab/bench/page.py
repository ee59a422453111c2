"""The page and the chart from results.

``python -m orthocond.lab.bench.page docs/benchmark.md results/bench/*.json``
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orthocond.lab.bench.promises import promises
from orthocond.lab.bench.run import SUBJECTS, BenchError, read_results
from orthocond.lab.bench.solvers import ACCURATE, DEFAULT
from orthocond.lab.bench.tables import Table, tables

__all__ = ["draw", "main", "markdown", "write_page"]

_INTRODUCTION = """# What it costs

`make bench` writes this page from the results in `results/bench`; don't edit it. Every number is a ratio between
contestants that took turns in one run: the median over the rounds, with the quartiles in brackets. The package
`orthocond.lab.bench` defines the contestants and how they are measured.
"""
_COLUMNS = 3
_AXIS_START, _AXIS_END = 1e-9, 1e2
"""Errors outside of this range are drawn at its ends; gradients that are not finite, at the upper end."""


def main() -> None:
    """Write the page that the first argument names from the results that the others name."""
    if len(sys.argv) < 3:
        sys.exit("usage: python -m orthocond.lab.bench.page PAGE RESULTS...")
    page, *files = map(Path, sys.argv[1:])
    try:
        write_page(page, files)
    except BenchError as error:
        sys.exit(str(error))


def write_page(page: Path, files: list[Path]) -> None:
    """Write the page, and beside it the chart with the same name, from files of results."""
    results = read_results(files)
    chart = page.with_suffix(".png")
    has_chart = "solvers" in results["subjects"]
    if has_chart:
        draw(results["subjects"]["solvers"]["records"], chart)
    page.write_text(markdown(results, chart.name if has_chart else None), encoding="utf-8")


def markdown(results: Mapping[str, Any], chart: str | None) -> str:
    """Return the page: what is promised, the chart, the tables of every subject, and where they were measured."""
    subjects = results["subjects"]
    parts = [_INTRODUCTION]
    if any(results["quick"].values()):
        parts.append("**From a quick run: whether it works, not how fast.**\n")
    promised = promises(subjects)
    parts.append(_as_markdown(promised))
    if any(row[-1] == "no" for row in promised.rows):
        parts.append("[Limits](limits.md) says more about those that don't hold.\n")
    if chart is not None:
        parts.append(f"![Time against gradient error of every way to an inverse root]({chart})\n")
    for name in SUBJECTS:
        if name in subjects:
            parts += [_as_markdown(table) for table in tables(name, subjects[name])]
            parts.append(_measured_where(name, subjects[name], results["environment"][name]))
    return "\n".join(parts)


def draw(records: list[dict[str, Any]], file: Path) -> None:
    """Draw time against gradient error: one panel for each spectrum, a point for each contestant."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = 64 if any(r["size"] == 64 for r in records) else records[0]["size"]
    batch = 64 if any((r["size"], r["batch"]) == (size, 64) for r in records) else records[0]["batch"]
    own = [r for r in records if (r["size"], r["batch"]) == (size, batch) and "total" in r]
    spectra, names = (list(dict.fromkeys(r[key] for r in own)) for key in ("spectrum", "contestant"))
    num_rows = len(spectra) // _COLUMNS + 1  # with a place left for the legend
    size_in_inches = (3 * _COLUMNS, 3 * num_rows)
    figure, grid = plt.subplots(num_rows, _COLUMNS, figsize=size_in_inches, sharey=True, squeeze=False, dpi=130)
    axes, spare = grid.flat[: len(spectra)], grid.flat[len(spectra) :]
    colors = plt.get_cmap("tab20")
    for panel, spectrum in zip(axes, spectra, strict=True):
        panel.axvline(ACCURATE, color="#bbbbbb", linewidth=0.8, linestyle="--")
        for index, name in enumerate(names):
            for r in own:
                if (r["spectrum"], r["contestant"]) == (spectrum, name):
                    total, error = r["total"], r["gradient_error"]
                    panel.errorbar(
                        _AXIS_END if error is None else min(max(error, _AXIS_START), _AXIS_END),
                        total["ratio"],
                        yerr=[[total["ratio"] - total["low"]], [total["high"] - total["ratio"]]],
                        marker="*" if name == DEFAULT else "o",
                        markersize=13 if name == DEFAULT else 6,
                        color=colors(index % 20),
                        linestyle="none",
                        label=name,
                    )
        panel.set(xscale="log", yscale="log", xlim=(_AXIS_START, 3 * _AXIS_END), title=spectrum)
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_formatter("{x:g}")
        panel.tick_params(axis="y", which="minor", labelsize=7)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in spare:
        panel.axis("off")
    spare[0].legend(*axes[0].get_legend_handles_labels(), loc="center", frameon=False, fontsize=8.5, borderpad=0)
    figure.supylabel("forward and backward over eigh forward", fontsize=10)
    figure.supxlabel("relative error of the gradient (at the right edge: not finite)", fontsize=10)
    figure.suptitle(f"Inverse roots of {batch}x{size}x{size}, float32: further left and lower is better", fontsize=11)
    figure.tight_layout()
    figure.savefig(file)
    plt.close(figure)


def _as_markdown(table: Table) -> str:
    lines = [f"## {table.title}", "", table.note, "", *map(_line, (table.columns, ["---"] * len(table.columns)))]
    return "\n".join([*lines, *map(_line, table.rows), ""])


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _measured_where(name: str, entry: Mapping[str, Any], environment: Mapping[str, Any]) -> str:
    where = ", ".join(
        f"{environment[key]}{unit}" for key, unit in (("processor", ""), ("threads", " threads")) if environment[key]
    )
    return (
        f"*`orthocond bench {name}`: {entry['seconds']:.0f} s on {where}, torch {environment['torch']}, "
        f"{environment['started'][:10]}.*\n"
    )


if __name__ == "__main__":
    main()
