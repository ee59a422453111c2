"""The numbers of a report, recomputed from the run folders with numpy alone, and what each format makes of them."""

import csv
import io
import json
import math
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from orthocond.errors import ArgumentError
from orthocond.lab.report import read_report, write_report
from orthocond.lab.report.charts import charts_of
from orthocond.lab.report.statistics import holm, paired_difference, separate_p
from orthocond.lab.report.tables import error_table

from synthetic_runs import ALL_METHODS, make_run, make_sweep


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sweep(tmp_path_factory.mktemp("runs") / "sweep", seeds=4)


def records(folder: Path, kind: str) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def last_errors(sweep: Path, method: str, name: str = "val_error") -> np.ndarray:
    folders = sorted((sweep / method).iterdir())
    return np.array([records(folder, "epoch")[-1][name] for folder in folders])


def test_errors_are_those_of_the_metrics(sweep):
    (section,) = read_report([sweep]).sections
    assert [row.method for row in section.rows] == [
        "bn", "newton_schulz", "svd", "svd+sn", "svd+ol", "svd+ow", "svd+nog", "svd+olr", "svd+gauge",
        "svd+nog+ow", "svd+nog+sn", "svd+nog+ol", "svd+nog+olr", "svd+ow+olr", "svd+nog+gauge", "svd+nog+ow+olr",
    ]  # fmt: skip
    errors = {method: last_errors(sweep, method) for method in ALL_METHODS}
    ranked = [values for method, values in errors.items() if method.startswith("svd")]
    means, minima = sorted(values.mean() for values in ranked), sorted(values.min() for values in ranked)
    for row in section.rows:
        values = errors[row.method]
        assert row.error.num == row.num_runs == 4
        np.testing.assert_allclose(
            [row.error.mean, row.error.std, row.error.min],
            [values.mean(), values.std(ddof=1), values.min()],
            rtol=1e-12,
        )
        top5 = last_errors(sweep, row.method, "val_error5")
        np.testing.assert_allclose([row.error5.mean, row.error5.min], [top5.mean(), top5.min()], rtol=1e-12)
        best = [
            min(record["val_error"] for record in records(folder, "epoch")) for folder in (sweep / row.method).iterdir()
        ]
        np.testing.assert_allclose([row.best.mean, row.best.min], [np.mean(best), min(best)], rtol=1e-12)
        if row.method in ("newton_schulz", "bn"):  # below the line in the paper's tables
            assert row.place_mean is row.place_min is None
            continue
        place = means.index(min(means, key=lambda mean: abs(mean - values.mean()))) + 1
        assert row.place_mean == (place if place <= 4 else None)
        place = minima.index(values.min()) + 1
        assert row.place_min == (place if place <= 4 else None)


def test_condition_numbers_failures_switches_and_times_are_those_of_the_files(sweep):
    (section,) = read_report([sweep]).sections
    base = None
    for row in sorted(section.rows, key=lambda row: row.method != "svd"):
        ends, failures, switched, seconds = [], 0, [], []
        for folder in sorted((sweep / row.method).iterdir()):
            steps = records(folder, "step")
            tail = [step["cond_support"] for step in steps if step["step"] > 0.9 * len(steps)]
            ends.append(np.median(tail) if tail[0] is not None else np.nan)
            failures += sum(step["failures"] for step in steps)
            switched += [step["switched"] for step in steps if step["switched"] is not None]
            times = [json.loads(line) for line in (folder / "times.jsonl").read_text().splitlines()]
            seconds.append(np.median([time["seconds"] / time["steps"] for time in times]))
        base = np.mean(seconds) if row.method == "svd" else base
        np.testing.assert_allclose(row.conditions["cond_support"].mean, np.exp(np.mean(np.log(ends))), rtol=1e-9)
        assert row.failures == failures
        np.testing.assert_allclose(row.shares["switched"], np.mean(switched) if switched else np.nan, rtol=1e-12)
        np.testing.assert_allclose(row.seconds["step"].mean, np.mean(seconds), rtol=1e-12)
        np.testing.assert_allclose(row.overhead, np.mean(seconds) / base - 1, rtol=1e-9, atol=1e-12)


def test_differences_are_scipys_paired_test(sweep):
    (section,) = read_report([sweep]).sections
    control = last_errors(sweep, "svd")
    ps, ours = [], []
    for row in section.rows:
        if row.method == "svd":
            assert row.difference is None
            continue
        expected = stats.ttest_rel(last_errors(sweep, row.method), control)
        interval = expected.confidence_interval(0.95)
        difference = row.difference
        np.testing.assert_allclose(
            [difference.p, difference.low, difference.high], [expected.pvalue, interval.low, interval.high], rtol=1e-8
        )
        ps.append(expected.pvalue)
        ours.append(row)
    order = np.argsort(ps)
    corrected = np.maximum.accumulate(np.minimum(1, np.sort(ps) * np.arange(len(ps), 0, -1)))
    for position, index in enumerate(order):
        np.testing.assert_allclose(ours[index].p_corrected, corrected[position], rtol=1e-8)
        verdict = "beyond" if corrected[position] < 0.05 else "borderline" if ps[index] < 0.05 else "within"
        assert ours[index].verdict == verdict
    assert {"beyond", "within"} <= {row.verdict for row in ours}


def test_two_means_with_their_deviations_are_compared_by_welchs_test():
    rng = np.random.default_rng(0)
    first, second = rng.normal(4.0, 0.1, 10), rng.normal(4.2, 0.3, 10)
    told = [(values.mean(), values.std(ddof=1)) for values in (first, second)]
    expected = stats.ttest_ind(first, second, equal_var=False).pvalue
    np.testing.assert_allclose(separate_p(*told, 10), expected, rtol=1e-9)


def test_few_or_equal_pairs_tell_nothing():
    assert paired_difference({"0": 1.0}, {"1": 2.0}).num_pairs == 0
    one = paired_difference({"0": 1.0, "1": math.nan}, {"0": 2.0, "1": 2.0})
    assert (one.mean, one.num_pairs) == (-1.0, 1)
    assert math.isnan(one.p)
    same = paired_difference({"0": 1.1, "1": 2.1, "2": 3.1}, {"0": 1.0, "1": 2.0, "2": 3.0})
    assert math.isnan(same.p)
    assert math.isnan(holm([math.nan, 0.01])[0])


def test_csv_and_json_hold_every_digit(sweep, tmp_path):
    table = write_report([sweep], tmp_path / "report.csv", format="csv").read_text()
    content = json.loads(write_report([sweep], tmp_path / "report.json", format="json").read_text())
    rows = {row["method"]: row for row in csv.DictReader(io.StringIO(table))}
    for method in content["experiments"][0]["methods"]:
        values = last_errors(sweep, method["method"])
        assert float(rows[method["method"]]["error_mean"]) == method["error"]["mean"] == values.mean()
        assert [method["errors"][str(seed)] for seed in range(4)] == values.tolist()
    assert rows["bn"]["cond_support"] == ""
    assert len(content["experiments"][0]["runs"]) == 4 * len(ALL_METHODS)


def test_markdown_and_latex_mark_the_best_four_as_the_paper_does(sweep, tmp_path):
    markdown = write_report([sweep], tmp_path / "report.md", format="md", marks="paper").read_text()
    latex = write_report([sweep], tmp_path / "report.tex", format="latex", marks="paper").read_text()
    (section,) = read_report([sweep]).sections
    best = next(row for row in section.rows if row.place_mean == 1)
    assert f"**{best.error.mean:.2f} ± {best.error.std:.2f}** ¹" in markdown
    red = rf"\textbf{{\textcolor{{red}}{{{best.error.mean:.2f} $\pm$ {best.error.std:.2f}}}}}"
    assert red in latex
    assert latex.count(r"\textcolor{cyan}") == 2  # mean and min


def with_errors(folder, **errors):
    """A sweep whose methods have these last validation errors, by seed."""
    for method, values in errors.items():
        for seed, value in enumerate(values):
            run = make_run(folder / method / f"seed-{seed}", method, seed)
            lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            lines[-1]["val_error"] = value
            (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_the_best_are_marked_only_where_a_difference_is_beyond_the_noise(tmp_path):
    alike = with_errors(tmp_path / "alike", bn=[4.0, 4.4, 4.1], svd=[4.2, 4.1, 4.3], newton_schulz=[4.3, 4.0, 4.4])
    (section,) = read_report([alike]).sections
    assert not any(row.is_best for row in section.rows)
    assert section.message[1].startswith("bn has the lowest validation error, 4.17")
    table = error_table(section.experiment, section.rows)
    assert "No method is marked" in table.caption
    assert "differs from svd by more than the noise" in section.message[0]
    differ = with_errors(tmp_path / "differ", bn=[4.0, 4.4, 4.1], svd=[4.1, 4.3, 4.2], newton_schulz=[7.0, 7.5, 7.1])
    (section,) = read_report([differ]).sections
    assert {row.method: row.is_best for row in section.rows} == {"bn": True, "svd": True, "newton_schulz": False}
    assert "newton_schulz is worse than svd" in " ".join(section.message)
    cells = {row[0].text: row[1] for row in error_table(section.experiment, section.rows).rows}
    assert [cells[method].is_best for method in ("bn", "svd", "newton_schulz")] == [True, True, False]
    assert all(cell.place is None for cell in cells.values())
    assert "**4.17 ± 0.21**" in write_report([differ], tmp_path / "report.md", format="md").read_text()
    assert r"\textcolor" not in write_report([differ], tmp_path / "report.tex", format="latex").read_text()
    with pytest.raises(ArgumentError, match="Did you mean 'paper'"):
        write_report([differ], tmp_path / "report.md", format="md", marks="papers")


def test_the_lowest_error_is_in_the_first_row(sweep):
    make_run(sweep / "unfinished", "svd+sn+olr", 0, state="failed")
    try:
        (section,) = read_report([sweep]).sections
        table = error_table(section.experiment, section.rows)
        means = {row.method: row.error.mean for row in section.rows}
        shown = [means[row[0].text] for row in table.rows]
        assert shown[:-1] == sorted(shown[:-1])
        assert table.rows[-1][0].text == "svd+sn+olr"
    finally:
        shutil.rmtree(sweep / "unfinished")


def test_a_quantity_that_never_changes_is_a_sentence(tmp_path):
    run = make_run(tmp_path / "run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line |= {"rank": 9} if line["kind"] == "step" else {}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (section,) = read_report([tmp_path]).sections
    charts = {chart.key: chart for chart in charts_of(section.experiment)}
    assert charts["rank"].views == []
    assert charts["rank"].sentences == ["Rank: 9 at every step, for svd."]
    assert charts["conditioning"].sentences == []


def test_the_chart_of_errors_opens_where_methods_differ(sweep):
    (section,) = read_report([sweep]).sections
    progress = next(chart for chart in charts_of(section.experiment) if chart.key == "progress")
    view = progress.views[0]
    (first, last), (low, high) = view.zoom
    late = np.concatenate([np.concatenate([lines.low[-3:], lines.high[-3:]]) for lines in view.series.values()])
    assert low < late.min() < late.max() < high
    assert high < 0.6 * max(lines.high.max() for lines in view.series.values())
    assert 1 <= first < last == view.x[-1]


def test_two_epochs_are_shown_whole(tmp_path):
    for seed in range(2):
        run = make_run(tmp_path / f"run-{seed}", seed=seed)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        kept = [line for line in lines if line["kind"] == "step" or line["epoch"] <= 2]
        for line in kept:
            line |= {"val_error": {1: 80.0, 2: 20.0 + seed}[line["epoch"]]} if line["kind"] == "epoch" else {}
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    (section,) = read_report([tmp_path]).sections
    view = next(chart for chart in charts_of(section.experiment) if chart.key == "progress").views[0]
    assert list(view.x) == [1, 2]
    assert view.zoom is None


def test_losses_are_smoothed_and_the_raw_ones_are_there(sweep):
    (section,) = read_report([sweep]).sections
    smoothed, raw = next(chart for chart in charts_of(section.experiment) if chart.key == "loss").views
    for method, lines in smoothed.series.items():
        assert np.abs(np.diff(lines.middle)).mean() < 0.5 * np.abs(np.diff(raw.series[method].middle)).mean()
        np.testing.assert_allclose(lines.middle.mean(), raw.series[method].middle.mean(), rtol=0.1)


def test_pooling_shows_top_5(tmp_path):
    sweep = make_sweep(tmp_path / "runs", ("svd", "svd+nog"), 2, preset="gcp-digits")
    text = write_report([sweep], tmp_path / "report.md", format="md").read_text()
    top5 = last_errors(sweep, "svd+nog", "val_error5")
    assert "top-5 error %" in text
    assert f"{top5.mean():.2f} ± {top5.std(ddof=1):.2f}" in text


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")
def test_latex_compiles(sweep, tmp_path):
    hostile = r"""<script>\input{/etc/passwd}</script> & 50% of $x_1^2$ #~{[ "é" 雪 |"""
    make_run(tmp_path / "hostile", "svd", 0, preset=hostile)
    write_report([sweep, tmp_path / "hostile"], tmp_path / "tables.tex", format="latex")
    (tmp_path / "paper.tex").write_text(
        r"\documentclass{article}\usepackage[T1]{fontenc}\usepackage{booktabs,xcolor,graphicx}"
        r"\begin{document}\input{tables.tex}\end{document}"
    )
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    assert (tmp_path / "paper.pdf").stat().st_size > 10_000
