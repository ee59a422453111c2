"""What a report makes of runs that are not as they should be."""

import csv
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from orthocond.errors import ArgumentError
from orthocond.lab.report import FORMATS, read_report, watch_report, write_report
from orthocond.lab.report.charts import charts_of
from orthocond.lab.report.thin import spread, thin

from synthetic_runs import ALL_METHODS, make_run, make_sweep

HOSTILE = """</script ><!--</script><script>document.title='owned'</script>"'`|é雪\N{PILE OF POO}*_[x](y)$\\n%{x}"""


def edit_last_epoch(folder: Path, **values: object) -> None:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    lines[-1] = json.dumps(json.loads(lines[-1]) | values)
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("kind", FORMATS)
def test_command_writes_every_format(tmp_path, kind, command_line):
    sweep = make_sweep(tmp_path / "runs", ("bn", "svd", "svd+nog+ow+olr"), 2)
    output = tmp_path / f"out.{kind}"
    result = command_line("report", sweep, "-o", output, "--format", kind)
    assert result.returncode == 0, result.stderr
    assert f"Wrote {output}" in result.stdout
    text = output.read_text()
    assert "svd" in text
    assert "dbn-digits" in text


def test_command_without_output_writes_beside(tmp_path, monkeypatch, command_line):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "run")
    assert command_line("report", "run", "--format", "latex").returncode == 0
    assert (tmp_path / "report.tex").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing"], ["no folder", "train or compare"]),
        (["empty"], ["no run in", "config.json"]),
        (["run", "--format", "pdf"], ["unknown format 'pdf'", "html, md, latex, csv, json"]),
        (["run", "-o", "missing/report.html"], ["can't write", "choose another output"]),
        (["run", "-o", "run/config.json/report.html"], ["can't write", "choose another output"]),
        (["run", "--figures", "run/config.json"], ["can't write figures"]),
        (["run", "--watch", "--format", "md"], ["--watch writes the page alone"]),
        (["broken"], ["no run in", "config.json can't be read"]),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path, monkeypatch, arguments, words, command_line):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/config.json").write_text('{"preset": ')
    result = command_line("report", *arguments)
    assert result.returncode == 2
    assert result.stderr.startswith("orthocond: report ")
    assert len(result.stderr.strip().splitlines()) == 1
    for word in words:
        assert word in result.stderr
    assert not list(tmp_path.glob("**/.*.part"))


def test_no_folder_at_all():
    with pytest.raises(ArgumentError, match="at least one folder"):
        write_report([])


def test_one_seed_has_no_noise_to_compare_with(tmp_path):
    sweep = make_sweep(tmp_path / "runs", ("svd", "svd+nog"), 1)
    (section,) = read_report([sweep]).sections
    treated = section.rows[1]
    assert treated.verdict == "unknown"
    assert math.isnan(treated.error.std)
    assert "one seed" in section.message[0]
    text = write_report([sweep], tmp_path / "report.md", format="md").read_text()
    assert "can't tell" in text
    assert "nan" not in text.lower()


def test_a_half_written_line_is_left_out_and_a_damaged_one_is_named(tmp_path):
    sweep = make_sweep(tmp_path / "runs", ("svd",), 3)
    whole = read_report([sweep]).sections[0]
    metrics = sweep / "svd/seed-0/metrics.jsonl"
    with metrics.open("a") as file:
        file.write('{"kind": "step", "step": 151, "lo')
    with (sweep / "svd/seed-0/times.jsonl").open("a") as file:
        file.write('{"step": 160, "ste')
    (section,) = read_report([sweep]).sections
    assert section.rows == whole.rows
    assert section.experiment.notes == []
    lines = metrics.read_text().splitlines()
    lines[3] = "\0" * 40
    metrics.write_text("\n".join(lines))
    (section,) = read_report([sweep]).sections
    assert section.rows[0].error == whole.rows[0].error
    assert section.experiment.metrics["svd", "0"].num_steps == 149
    assert section.experiment.notes == ["svd, seed 0: line 4 of metrics.jsonl is damaged and left out."]


def test_damaged_and_whole_files_are_read_alike(tmp_path):
    run = make_run(tmp_path / "run", "svd+olr")
    whole = read_report([run]).sections[0].experiment.metrics["svd+olr", "0"]
    with (run / "metrics.jsonl").open("a") as file:
        file.write("no JSON\n")
    slow = read_report([run]).sections[0].experiment.metrics["svd+olr", "0"]
    assert slow.records.damaged == (157,)
    assert (slow.epochs, slow.num_steps, slow.counts) == (whole.epochs, whole.num_steps, whole.counts)
    for name, curve in whole.curves.items():
        np.testing.assert_array_equal(slow.curves[name], curve)
    assert set(slow.shares) == set(whole.shares)
    for name, share in whole.shares.items():
        np.testing.assert_array_equal(slow.shares[name], share)


def test_values_that_do_not_belong_are_no_values(tmp_path):
    run = make_run(tmp_path / "run", seed=0)
    odd = [
        {"kind": "step", "step": 1e300, "loss": 1.0},
        {"kind": "step", "step": -3, "loss": [1], "failures": "many", "switched": "yes"},
        {"kind": "step", "step": 151, "cond": {"a": 1}, "loss": "low"},
        {"kind": "epoch", "epoch": 10**9, "val_error": 5.0},
        {"kind": "epoch", "epoch": 7, "step": "x", "val_error": "low"},
        {"kind": "note"},
        [1, 2],
    ]
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in odd)
    (run / "status.json").write_text('{"state": "finished", "seconds": "long", "step": {}}')
    (run / "times.jsonl").write_text('{"step": 20, "steps": 0, "seconds": 1}\n{"steps": "x"}\n7\n')
    (section,) = read_report([run]).sections
    assert section.experiment.metrics["svd", "0"].num_steps == 151
    assert section.rows[0].num_lost == 1  # what can't be read may be later epochs
    for kind in FORMATS:
        write_report([run], tmp_path / "report", format=kind)


def test_two_presets_are_two_sections(tmp_path):
    make_sweep(tmp_path / "runs/a", ("svd", "svd+nog"), 2)
    make_sweep(tmp_path / "runs/b", ("svd", "bn"), 3, preset="gcp-digits")
    first, second = read_report([tmp_path / "runs"]).sections
    assert [first.experiment.title, second.experiment.title] == ["dbn-digits", "gcp-digits"]
    assert [row.num_runs for row in first.rows + second.rows] == [2, 2, 3, 3]


def test_two_configurations_of_a_preset_are_not_averaged(tmp_path):
    make_sweep(tmp_path / "runs/a", ("svd",), 2)
    make_sweep(tmp_path / "runs/b", ("svd",), 2, learning_rate=0.2, threads=2)
    first, second = read_report([tmp_path / "runs"]).sections
    assert {first.experiment.title, second.experiment.title} == {
        "dbn-digits (learning_rate 0.1)",
        "dbn-digits (learning_rate 0.2)",
    }
    assert "several configurations" in first.experiment.notes[0]
    assert [row.num_runs for row in first.rows + second.rows] == [2, 2]


def test_what_may_differ_between_comparable_runs(tmp_path):
    for seed in range(3):
        make_run(tmp_path / "runs" / str(seed), "svd", seed, data=f"/data/{seed}", threads=seed + 1, devices=str(seed))
    (section,) = read_report([tmp_path / "runs"]).sections
    assert section.rows[0].num_runs == 3
    assert section.experiment.notes == []


def test_runs_of_different_versions_and_machines_are_named(tmp_path):
    make_run(tmp_path / "runs/0", seed=0)
    make_run(tmp_path / "runs/1", seed=1, environment={"commit": "another", "threads": 8})
    (section,) = read_report([tmp_path / "runs"]).sections
    assert section.experiment.notes == [
        "The runs are not of one version: they differ in commit.",
        "Their times are not comparable: the runs differ in threads.",
    ]


def test_an_error_that_is_nan_is_told_and_not_averaged(tmp_path):
    sweep = make_sweep(tmp_path / "runs", ("svd", "svd+nog"), 4)
    edit_last_epoch(sweep / "svd+nog/seed-2", val_error=math.nan)
    (section,) = read_report([sweep]).sections
    treated = section.rows[1]
    assert (treated.num_diverged, treated.error.num, treated.difference.num_pairs) == (1, 3, 3)
    assert math.isfinite(treated.error.mean)
    assert section.message[-1] == "Of 8 runs: 1 diverged."
    assert treated.place_mean is None  # a method that diverges isn't the best
    for kind in FORMATS:
        text = write_report([sweep], tmp_path / "report", format=kind).read_text()
        assert "diverged" in text


def test_unfinished_failed_missing_and_doubled_runs_are_named(tmp_path):
    sweep = make_sweep(tmp_path / "runs", ("svd", "svd+nog"), 3)
    shutil.rmtree(sweep / "svd+nog/seed-2")
    shutil.rmtree(sweep / "svd+nog/seed-1")
    make_run(sweep / "svd+nog/seed-1", "svd+nog", 1, state="failed")
    make_run(sweep / "svd+ow", "svd+ow", 0, state="running")
    make_run(tmp_path / "runs/again", "svd", 0)
    (tmp_path / "runs/odd").mkdir()
    (tmp_path / "runs/odd/config.json").write_text("[]")
    (sweep / "svd/seed-1/environment.json").unlink()
    report = read_report([sweep])
    (section,) = report.sections
    notes = "\n".join(section.experiment.notes)
    assert "svd+nog, seed 1: failed at step 75 of 150" in notes
    assert "The covariance holds NaN; its error is not in the table." in notes
    assert "svd+ow, seed 0: killed at step 75 of 150" in notes  # no process is there
    assert "Seed 2 is missing for svd+ow, svd+nog." in notes
    assert "svd, seed 0 was run twice" in notes
    assert any("odd" in problem for problem in report.problems)
    assert any("environment.json" in problem for problem in report.problems)
    rows = {row.method: row for row in section.rows}
    assert (rows["svd"].error.num, rows["svd+nog"].error.num, rows["svd+ow"].error.num) == (3, 1, 0)
    for kind in FORMATS:
        write_report([sweep], tmp_path / "report", format=kind)


def test_a_run_that_has_only_begun(tmp_path):
    run = make_run(tmp_path / "run", state="running")
    for name in ("metrics.jsonl", "times.jsonl", "status.json"):
        (run / name).unlink()
    for kind in FORMATS:
        write_report([run], tmp_path / "report", format=kind)
    assert "unknown at step 0" in (read_report([run]).sections[0].experiment.notes[0])


def test_order_of_treatments_in_a_name_does_not_matter(tmp_path):
    make_run(tmp_path / "runs/0", "svd+nog+ow", 0)
    make_run(tmp_path / "runs/1", "svd+ow+nog", 1)
    (section,) = read_report([tmp_path / "runs"]).sections
    assert [(row.method, row.num_runs) for row in section.rows] == [("svd+nog+ow", 2)]


@pytest.mark.parametrize("kind", FORMATS)
def test_hostile_names_are_text(tmp_path, kind):
    hostile = HOSTILE + "\ud800"
    make_run(tmp_path / "runs/<img src=x onerror=alert(1)>", hostile, 0, preset=hostile, note=hostile)
    make_run(tmp_path / "runs/svd", "svd", 0, preset=hostile, note=hostile, environment={"commit": hostile})
    text = write_report([tmp_path / "runs"], tmp_path / "report", format=kind).read_text(encoding="utf-8")
    if kind == "html":
        assert "<script>document" not in text
        assert "<img" not in text
        assert text.lower().count("</script") == 3  # the page's own
        assert "<!--" not in text
    if kind == "md":
        assert "<script>" not in text.replace("\\<", "")
        body = [line for line in text.splitlines() if line.startswith("| ")]
        columns = [line.replace("\\|", "").count("|") for line in body]
        assert len(set(columns[:4])) == 1  # a bar in a name makes no column
    if kind == "latex":
        assert text.isascii()
        assert r"\textless{}/script\textgreater{}" in text


@pytest.mark.parametrize("first", ["=", "+", "-", "@", "\t", "\r"])
def test_no_cell_is_a_formula(tmp_path, first):
    name = f"{first}HYPERLINK(1)"
    make_run(tmp_path / "runs", name, preset=name)
    text = write_report([tmp_path / "runs"], tmp_path / "report.csv", format="csv").read_bytes().decode()
    (row,) = csv.DictReader(io.StringIO(text, newline=""))
    assert [row[column][0] for column in ("experiment", "preset", "method")] == ["'"] * 3
    assert float(row["error_mean"]) > 0


def test_half_of_a_surrogate_pair_is_drawn_as_a_question_mark(tmp_path):
    make_run(tmp_path / "runs/0", "svd\ud800", 0, preset="\udfff")
    write_report([tmp_path / "runs"], tmp_path / "report.html", figures=tmp_path / "figures")
    assert "svd?" in (tmp_path / "figures/1---cond.svg").read_text()


def test_a_number_too_large_for_a_float(tmp_path):
    run = make_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "step", "step": 151, "loss": 10**400}) + "\n" + "no JSON\n")
    for kind in FORMATS:
        write_report([run], tmp_path / "report", format=kind)


def test_figures_are_png_and_svg(tmp_path, command_line):
    sweep = make_sweep(tmp_path / "runs", ("bn", "svd", "svd+olr+$x_1$"), 2, epochs=2)
    result = command_line("report", sweep, "-o", tmp_path / "report.html", "--figures", tmp_path / "figures")
    assert result.returncode == 0, result.stderr
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    for view in ("cond", "cond_support", "cond_eps", "pre_svd_lr", "switched", "val_error", "loss", "loss_smoothed"):
        assert f"1-dbn-digits-{view}.png" in names
        assert f"1-dbn-digits-{view}.svg" in names
    assert (tmp_path / "figures/1-dbn-digits-cond.png").read_bytes().startswith(b"\x89PNG")
    assert "svd+olr+$x_1$" in (tmp_path / "figures/1-dbn-digits-cond.svg").read_text()


@pytest.mark.parametrize("value", ["Infinity", "null", "1.0", "0.0"])
@pytest.mark.parametrize("each", [1, 2])
def test_series_may_be_infinite_empty_or_constant(tmp_path, command_line, value, each):
    run = make_run(tmp_path / "run", epochs=2)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    numbers = re.compile(r'("(?:cond\w*|loss|rank|pre_svd_lr)": )[^,}]+')
    lines = [numbers.sub(rf"\g<1>{value}", line) if n % each == 0 else line for n, line in enumerate(lines)]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    result = command_line("report", run, "-o", tmp_path / "report.html", "--figures", tmp_path / "figures")
    assert result.returncode == 0, result.stderr
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert ("1-dbn-digits-cond_eps.png" in names) == (each == 2)  # what never changes is a sentence
    for kind in FORMATS:
        write_report([run], tmp_path / f"report.{kind}", format=kind)


def test_watching_writes_again_when_a_run_changed(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", state="running")
    written = []

    def sleep(_: float) -> None:
        if len(written) == 1 and "seen" not in state:
            state.add("seen")  # nothing changed: not written again
        elif len(written) == 1:
            (run / "status.json").write_text(json.dumps({"state": "finished"}))
        else:
            raise KeyboardInterrupt

    state: set[str] = set()
    monkeypatch.setattr(time, "sleep", sleep)
    path = watch_report([run], tmp_path / "report.html", on_written=lambda path: written.append(path.read_text()))
    assert len(written) == 2
    assert 'http-equiv="refresh"' in written[0]
    assert "killed at step" in written[0]
    assert "killed at step" not in written[1]
    assert 'http-equiv="refresh"' not in path.read_text()


def test_command_watches_until_it_is_interrupted(tmp_path, monkeypatch, command_line):
    def sleep(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    result = command_line("report", make_run(tmp_path / "run"), "--watch", "-o", tmp_path / "report.html")
    assert result.returncode == 0
    assert result.stdout.count("Wrote") == 2


def test_thinning_keeps_every_bins_extremes():
    rng = np.random.default_rng(0)
    values = rng.lognormal(0, 1, 1000)
    values[[17, 503]] = [1e9, math.inf]
    values[700:720] = math.nan
    thinned = thin(np.arange(1, 1001), values, width=10, num_bins=101)
    for index in range(100):
        part = values[10 * index : 10 * index + 10]
        expected = [np.nan] * 3 if np.isnan(part).all() else [np.min(part), np.median(part), np.max(part)]
        np.testing.assert_array_equal([curve[index] for curve in thinned], expected)
    assert np.isnan(thinned.high[100])
    assert np.isnan(spread(np.empty((2, 0))).middle).all()


def test_infinite_condition_numbers_are_shown_as_such(tmp_path):
    for seed in range(2):
        run = make_run(tmp_path / "runs" / str(seed), "svd", seed)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        lines = [line | {"cond": math.inf, "cond_eps": math.nan} if "cond" in line else line for line in lines]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (section,) = read_report([tmp_path / "runs"]).sections
    assert section.rows[0].conditions["cond"].mean == math.inf
    assert math.isnan(section.rows[0].conditions["cond_eps"].mean)
    assert math.isfinite(section.rows[0].conditions["cond_support"].mean)
    content = json.loads(write_report([tmp_path / "runs"], tmp_path / "report.json", format="json").read_text())
    assert content["experiments"][0]["methods"][0]["conditions"]["cond"]["mean"] == "inf"
    write_report([tmp_path / "runs"], tmp_path / "report.html", figures=tmp_path / "figures")


def test_a_large_sweep_is_read_in_little_memory(tmp_path):
    """14 methods and 10 seeds: 5,000 steps each, or as many as REPORT_STEPS says (50,000 take 2 GB of disk)."""
    steps = int(os.environ.get("REPORT_STEPS", "5000"))
    for method in ALL_METHODS[:14]:
        first = make_run(tmp_path / "runs" / method / "seed-0", method, epochs=20, steps_per_epoch=steps // 20)
        config = json.loads((first / "config.json").read_text())
        for seed in range(1, 10):
            other = shutil.copytree(first, first.with_name(f"seed-{seed}"))
            (other / "config.json").write_text(json.dumps(config | {"seed": seed}))
    script = """if True:
        import pathlib, sys, time
        from orthocond.lab.report import write_report
        began = time.perf_counter()
        path = write_report([sys.argv[1]], sys.argv[2])
        status = pathlib.Path("/proc/self/status")
        lines = status.read_text().splitlines() if status.exists() else ["VmHWM: 0 kB"]
        peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
        print(time.perf_counter() - began, peak / 1e6, path.stat().st_size / 1e6)"""
    command = [sys.executable, "-c", script, str(tmp_path / "runs"), str(tmp_path / "report.html")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)
    seconds, gigabytes, megabytes = map(float, done.stdout.split())
    print(f"{seconds:.1f} s, {gigabytes:.2f} GB, page {megabytes:.1f} MB")  # how fast is for a person to judge
    assert gigabytes < 2
    assert megabytes < 10


def test_the_highest_step_survives_thinning(tmp_path):
    run = make_run(tmp_path / "run", epochs=10, steps_per_epoch=250)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    highest = max(record["cond_support"] for record in records if record["kind"] == "step")
    (section,) = read_report([run]).sections
    assert section.experiment.metrics["svd", "0"].curves["cond_support"].high.max() == highest
    (view,) = (view for view in charts_of(section.experiment)[0].views if view.key == "cond_support")
    assert len(view.x) <= 400
    assert view.series["svd"].peak.max() == highest
