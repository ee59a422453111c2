"""The committed results: the tables on the pages are those of the committed files."""

from pathlib import Path

import charts
import collect
import pytest
import records
import tables
from publish import PAGES

from orthocond.lab.bench.page import markdown
from orthocond.lab.bench.run import read_results

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", PAGES)
def test_the_tables_of_a_page_are_those_of_the_committed_runs(name):
    page = (ROOT / "docs" / name).read_text()
    assert "<!-- table " in page
    assert tables.with_tables(page, records.read("runs")) == page


def test_the_benchmark_s_page_is_that_of_the_committed_figures():
    results = read_results(sorted((ROOT / "results" / "bench").glob("*.json")))
    assert not any(results["quick"].values())
    assert markdown(results, "benchmark.png") == (ROOT / "docs" / "benchmark.md").read_text()


def test_collecting_keeps_what_is_committed_of_other_experiments():
    committed = records.read_text("runs")
    lines = collect._with_others("runs", [{"experiment": "new", "method": "svd", "seed": 0, "another": 1}])
    assert len(lines) == len(committed) + 1
    assert lines[-1]["another"] == 1
    assert lines[-1]["error"] == ""
    assert [{key: line[key] for key in committed[0]} for line in lines[:-1]] == committed


def test_every_method_of_the_committed_runs_has_all_its_seeds():
    runs = records.read("runs")
    for experiment in {run["experiment"] for run in runs}:
        for group in records.groups(runs, experiment):
            seeds = {run["seed"] for run in group.runs}
            assert len(group.runs) == len(seeds) == {"pooling": 3, "longer_bn": 3, "gauged64": 8}.get(experiment, 5)
            assert {run["steps"] for run in group.runs} == {5000 if experiment.startswith("longer") else 1000}


def test_pictures_are_drawn_from_the_committed_files(tmp_path):
    for draw, name in (
        (charts.draw_gauged, "curves"),
        (charts.draw_treated, "curves"),
        (charts.draw_errors, "runs"),
        (charts.draw_spectrum, "spectrum"),
        (charts.draw_published, "published_curves"),
        (charts.draw_published_errors, "published"),
    ):
        file = tmp_path / f"{draw.__name__}.png"
        draw(records.read(name), file)
        assert file.stat().st_size > 10_000
