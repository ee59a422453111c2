"""The committed results: the tables on the pages are those of the committed files."""

import os
import subprocess
from functools import partial
from pathlib import Path

import charts
import collect
import published
import pytest
import tables
import torch
import varied
from publish import PAGES
from records import grouped, groups, read, read_text
from stepping import stepping
from typer.testing import CliRunner

import orthocond.lab.cli
from orthocond.lab.bench.page import markdown
from orthocond.lab.bench.run import read_results
from orthocond.lab.config import changed
from orthocond.lab.presets import preset
from orthocond.lab.runs import RunFolder
from orthocond.lab.train import train
from orthocond.linalg import matrix_sqrth, nearest_orthogonal

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


def digits(**settings):
    return changed(preset("dbn-digits"), {"steps": 4, "seed": 3, **settings})


def test_a_run_of_a_script_is_a_run_of_the_laboratory(tmp_path):
    config = digits(method="svd+nog+ow+olr")
    train(config, tmp_path / "run")
    with RunFolder(tmp_path / "run") as run:
        expected = run.load_checkpoint()["model"]
    *_, (state, _) = stepping(config)
    weights = state.network.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in expected.items())


def test_gauge_first_acts_at_the_step_that_the_variation_says():
    config = digits(method="svd+gauge")
    for start in (2, 3):
        changes = [state.treatment.last.gauged for state, _ in stepping(config, partial(varied.from_step, start))]
        assert changes.index(True) == start - 1


@pytest.mark.parametrize("factor", [0.1, 3.0])
@pytest.mark.parametrize("num_weak", [0, 1, 2])
def test_weak_directions_turn_at_the_speed_of_the_variation(factor, num_weak):
    torch.manual_seed(0)
    patches = torch.randn(4, 50, dtype=torch.float64)
    root = matrix_sqrth(torch.cov(patches, correction=0))
    Q = nearest_orthogonal(torch.randn(6, 4, dtype=torch.float64))
    W = 2 * torch.linalg.solve(root, Q.mT).mT  # as gauge leaves it: W S^(1/2) = 2 Q
    outputs = Q @ torch.linalg.qr(torch.randn(4, num_weak, dtype=torch.float64)).Q
    inputs = Q.mT @ outputs
    target = torch.randn(6, 4, dtype=torch.float64)
    gradient = torch.func.grad(lambda W: (nearest_orthogonal(W @ root) * target).sum())(W)
    step = gradient @ torch.linalg.inv(root @ root)  # in the metric of the input

    def turned(step):
        return torch.func.jvp(lambda W: nearest_orthogonal(W @ root), (W,), (step,))[1]

    plain = turned(step)
    varied_step = varied.with_speed(factor, step, W, *varied.weak_inputs(W, patches, outputs))
    torch.testing.assert_close(turned(varied_step) @ inputs, factor * plain @ inputs)
    torch.testing.assert_close(outputs.mT @ turned(varied_step), factor * outputs.mT @ plain)
    others = torch.eye(4, dtype=torch.float64) - inputs @ inputs.mT
    beside = torch.eye(6, dtype=torch.float64) - outputs @ outputs.mT
    torch.testing.assert_close(beside @ turned(varied_step) @ others, beside @ plain @ others)


def test_a_variation_that_fails_does_not_stop_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(varied, "train_and_test", lambda *_: {"error": 1.0})
    assert "error" in varied.run("", tmp_path, ("svd", 700))
    assert "kept" in varied.run("", tmp_path, ("svd", 700))

    def diverges(*_):
        raise ValueError("NaN")

    monkeypatch.setattr(varied, "train_and_test", diverges)
    assert "failed" in varied.run("", tmp_path, ("svd", 701))
    assert [file.name for file in tmp_path.iterdir()] == ["varied-svd-700.json"]
