"""The committed results: the tables on the pages are those of the committed files."""

import os
import subprocess
from pathlib import Path

import charts
import collect
import published
import pytest
import tables
from publish import PAGES
from records import grouped, groups, read, read_text
from typer.testing import CliRunner

import orthocond.lab.cli
from orthocond.lab.bench.page import markdown
from orthocond.lab.bench.run import read_results

ROOT = Path(__file__).parents[1]
STUDY = ROOT / "results" / "study"

a_shell_script = pytest.mark.skipif(os.name == "nt", reason="the study is a shell script")


@pytest.mark.parametrize("name", PAGES)
def test_the_tables_of_a_page_are_those_of_the_committed_runs(name):
    page = (ROOT / "docs" / name).read_text()
    assert "<!-- table " in page
    assert tables.with_tables(page, read("runs")) == page


def test_the_benchmark_s_page_is_that_of_the_committed_figures():
    results = read_results(sorted((ROOT / "results" / "bench").glob("*.json")))
    assert not any(results["quick"].values())
    assert markdown(results, "benchmark.png") == (ROOT / "docs" / "benchmark.md").read_text()


def test_collecting_keeps_what_is_committed_of_other_experiments():
    committed = read_text("runs")
    lines = collect._with_others("runs", [{"experiment": "new", "method": "svd", "seed": 0, "another": 1}])
    assert len(lines) == len(committed) + 1
    assert lines[-1]["another"] == 1
    assert lines[-1]["error"] == ""
    assert [{key: line[key] for key in committed[0]} for line in lines[:-1]] == committed


def test_a_run_that_is_repeated_replaces_its_line_and_its_curve():
    for name in ("published", "published_curves"):
        committed = read_text(name)
        runs = grouped(committed, "experiment", "method", "seed")
        key, again = next(iter(runs.items()))
        replaced = published._replaced(committed, [{**record, "cond_eps": "1"} for record in again])
        assert {record["cond_eps"] for record in grouped(replaced, "experiment", "method", "seed")[key]} == {"1"}
        assert published._replaced(replaced, again) == committed


def test_every_method_of_the_committed_runs_has_all_its_seeds():
    runs = read("runs")
    for experiment in {run["experiment"] for run in runs}:
        for group in groups(runs, experiment):
            seeds = {run["seed"] for run in group.runs}
            assert len(group.runs) == len(seeds) == {"pooling": 3, "longer_bn": 3, "gauged64": 8}.get(experiment, 5)
            assert {run["steps"] for run in group.runs} == {5000 if experiment.startswith("longer") else 1000}


@a_shell_script
def test_the_script_asks_for_the_committed_runs_and_for_no_others(tmp_path, monkeypatch):
    asked_for = []
    monkeypatch.setattr(orthocond.lab.cli, "load_data", lambda _: None)
    monkeypatch.setattr(orthocond.lab.cli, "carry_out", lambda runs, _: asked_for.extend(runs))
    for command in commands_of(called_by_the_script(tmp_path)[1]):
        done = CliRunner().invoke(orthocond.lab.cli.app, command)
        assert done.exit_code == 0, (command, done.output, done.exception)
    committed = [
        (run["experiment"], run["method"], int(run["seed"])) for name in ("runs", "published") for run in read(name)
    ]
    assert len(committed) == len(set(committed))
    expected = {(run.folder.parts[-3], run.config.method, run.config.seed) for run in asked_for}
    assert sorted(set(committed) - expected) == []
    assert sorted(expected - set(committed)) == []


@a_shell_script
def test_runs_that_fail_do_not_stop_those_after_them(tmp_path):
    _, calls = called_by_the_script(tmp_path)
    done, same = called_by_the_script(tmp_path, "case $* in */pooling*|*/turning.py*) exit 1;; esac")
    assert same == calls
    assert done.returncode == 1
    assert "Not finished: pooling turning.py." in done.stderr


@a_shell_script
@pytest.mark.parametrize("code", [2, 130], ids=["wrong input", "Ctrl-C"])
def test_wrong_input_and_ctrl_c_stop_the_script(tmp_path, code):
    done, (call,) = called_by_the_script(tmp_path, f"exit {code}")
    assert call[0] == "-m"
    assert done.returncode == code
    assert done.stderr == ""


def commands_of(calls):
    """Return the arguments of each call of orthocond; the other calls are scripts of the study."""
    scripts = [Path(words[0]) for words in calls if words[0] != "-m"]
    assert scripts
    assert all(script.parent == STUDY and script.is_file() for script in scripts)
    return [words[2:] for words in calls if words[0] == "-m"]


def called_by_the_script(folder, ending=""):
    """Return how the study's script ended, and the arguments of each call of Python that it made."""
    calls, python = folder / "calls", folder / "python"
    calls.write_text("")
    python.write_text(f"""#!/usr/bin/env bash\nprintf '%s\\37' "$@" >> '{calls}'; echo >> '{calls}'\n{ending}\n""")
    python.chmod(0o755)
    environment = {**os.environ, "PATH": os.pathsep.join([str(folder), os.environ["PATH"]])}
    arguments = [STUDY / "run", folder, folder / "runs", "1"]
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment, check=False)
    return done, [line.split("\37")[:-1] for line in calls.read_text().splitlines()]


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
        draw(read(name), file)
        assert file.stat().st_size > 10_000
