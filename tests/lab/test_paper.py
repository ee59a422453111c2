"""The paper's items: its numbers, which runs they take, and the page that shows ours beside them."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from orthocond.errors import ArgumentError
from orthocond.lab.compare import folder_of
from orthocond.lab.paper import EXPERIMENTS, ITEMS, SCALES, chosen_items, config_of
from orthocond.lab.report.item_page import write_items
from orthocond.lab.report.items import view_of
from orthocond.lab.reproduction import planned_runs, step_times
from orthocond.lab.train import train

from synthetic_runs import make_run

PINNED = """
table1 CIFAR-100: svd 19.99 0.16 19.8; svd+sn 19.94 0.33 19.6; svd+ol 19.73 0.28 19.54; svd+ow 20.06 0.17 19.94; \
newton_schulz 19.45 0.33 19.01
table2 CIFAR-100: svd 19.99 0.16 19.8; svd+nog 19.43 0.24 19.15; svd+nog+sn 19.43 0.21 19.2; \
svd+nog+ol 20.14 0.39 19.54; svd+nog+ow 19.22 0.28 18.9; newton_schulz 19.45 0.33 19.01
table3 CIFAR-100: svd 19.99 0.16 19.8; svd+olr 19.5 0.39 18.95; svd+nog+olr 19.77 0.27 19.36; \
svd+ow+olr 20.61 0.22 20.43; svd+nog+ow+olr 19.05 0.31 18.77; newton_schulz 19.45 0.33 19.01
table4 CIFAR-10: svd 4.35 0.09 4.17; svd+sn 4.31 0.1 4.15; svd+ol 4.28 0.07 4.23; svd+ow 4.42 0.09 4.28; \
svd+nog 4.15 0.06 4.04; svd+olr 4.23 0.17 3.98; svd+nog+ow 4.09 0.07 4.01; svd+nog+ow+olr 3.93 0.09 3.85; \
newton_schulz 4.2 0.11 4.11
table4 CIFAR-100: svd 19.99 0.16 19.8; svd+sn 19.94 0.33 19.6; svd+ol 19.73 0.28 19.54; svd+ow 20.06 0.17 19.94; \
svd+nog 19.43 0.24 19.15; svd+olr 19.5 0.39 18.95; svd+nog+ow 19.22 0.28 18.9; svd+nog+ow+olr 19.05 0.31 18.77; \
newton_schulz 19.45 0.33 19.01
table5 ImageNet: svd 5 73.13 91.02; svd+sn 2 73.28 91.11; svd+ol 1 71.75 90.2; svd+ow 2 73.07 90.93; \
svd+nog 1 73.51 91.35; svd+olr 0 73.39 91.26; svd+nog+ow 0 73.71 91.43; svd+nog+ow+olr 0 73.82 91.57; \
newton_schulz 0 73.36 90.96
table6 CIFAR-100: svd 44 95; svd+nog 44 97; svd+olr 44 96; svd+ow 48 102; svd+nog+ow+olr 49 106; newton_schulz 43 93; \
bn 42 90
figure1 CIFAR-100: svd 1e+12 - no; newton_schulz 1e+05 - no; bn 1e+03 - no
figure1 ImageNet: svd 1e+16 - no; newton_schulz 1e+15 - no
figure2 CIFAR-100: svd 1e+12 - no; svd+sn 1e+05 - no; svd+ol - - yes; svd+ow 1e+03 - no
figure3 CIFAR-100: svd 1e+12 - no; svd+nog 1e+06 - no; svd+nog+sn - - no; svd+nog+ol - - no; svd+nog+ow - - no
figure4 CIFAR-100: svd 1e+12 - no; svd+olr 1e+04 - no; svd+nog+olr - - no; svd+ow+olr - - no; svd+nog+ow+olr - - no
figure5 ImageNet: svd 1e+16 - no; svd+ow - 1e+15 no; svd+nog - 2e+15 no; svd+olr - 1e+15 no; svd+nog+ow - - yes; \
svd+nog+ow+olr - 5e+15 no; newton_schulz 1e+15 - no
"""
"""What the paper prints, read off its source line by line."""


def spelled(value):
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.0e}" if value >= 1e3 else str(value)


def test_every_number_of_the_paper_is_as_printed():
    lines = [
        f"{item.name} {experiment}: "
        + "; ".join(f"{method} {' '.join(map(spelled, quote))}" for method, quote in quoted.items())
        for item in ITEMS.values()
        for experiment, quoted in item.quotes.items()
    ]
    assert lines == PINNED.strip().splitlines()


def test_there_are_six_tables_and_five_figures():
    assert list(ITEMS) == [f"table{n}" for n in range(1, 7)] + [f"figure{n}" for n in range(1, 6)]
    assert [item.kind for item in ITEMS.values()] == ["errors"] * 4 + ["accuracies", "times"] + ["conditions"] * 5
    assert [item.name for item in chosen_items(["all", "table1"])] == list(ITEMS)
    with pytest.raises(ArgumentError, match="table7"):
        chosen_items(["table7"])


def test_items_share_their_runs(tmp_path):
    everything = planned_runs(chosen_items(["all"]), "digits", 2, tmp_path, None, {})
    assert len(everything) == len({run.folder for run in everything}) == 2 * (14 + 9)
    assert [run.config.seed for run in everything] == [0] * 23 + [1] * 23
    for item in ITEMS.values():
        own = planned_runs([item], "digits", 2, tmp_path, None, {})
        assert {run.folder for run in own} <= {run.folder for run in everything}
        assert bool(own) == (item.kind != "times")


@pytest.mark.parametrize("scale", SCALES)
def test_layers_and_treatments_are_the_papers_at_every_scale(scale):
    whitening, pooling = (config_of(name, scale) for name in ("CIFAR-100", "ImageNet"))
    assert (whitening.eps, whitening.rtol, whitening.meta, pooling.meta) == (0.01, 0.0, "dbn", "gcp")
    assert {whitening.gradient, pooling.gradient} == {"pade(clamp=true)"}
    assert {whitening.parts, pooling.parts} == {"ow(kind=operator)"}
    assert (pooling.monitor, pooling.monitor_validation) == ("input", True)
    assert EXPERIMENTS["CIFAR-10"]["full"].preset == "dbn-cifar10"


def test_data_is_one_folder_or_one_for_each_dataset(tmp_path):
    assert config_of("CIFAR-100", "small", tmp_path).data == str(tmp_path)
    (tmp_path / "cifar10").mkdir()
    assert config_of("CIFAR-100", "small", tmp_path).data == str(tmp_path / "cifar10")
    with pytest.raises(ArgumentError, match="imagenet, which ImageNet needs"):
        config_of("ImageNet", "full", tmp_path)
    assert config_of("ImageNet", "digits", tmp_path).data is None


SHORT = {"steps": 30, "val_images": 40, "epochs": 2, "threads": 1, "accelerator": "cpu"}
FLAGS = [flag for name, value in SHORT.items() for flag in (f"--{name.replace('_', '-')}", value)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The runs of Figure 1, and of svd+ow for pooling."""
    out = tmp_path_factory.mktemp("paper")
    own = planned_runs([ITEMS["figure1"]], "digits", 1, out, None, SHORT)
    own += [
        run for run in planned_runs([ITEMS["figure5"]], "digits", 1, out, None, SHORT) if run.config.method == "svd+ow"
    ]
    for run in own:
        train(run.config, run.folder)
    return own


def test_figure_1_shows_batch_norm_and_the_measures_of_the_paper(runs):
    whitening, pooling = view_of(ITEMS["figure1"], "digits", runs, None).panels
    assert whitening.methods == ["svd", "newton_schulz", "bn"]
    (chart,) = whitening.charts
    assert chart.views[0].key == "cond_eps"
    assert set(chart.views[0].series) == {"svd", "newton_schulz", "bn"}
    assert whitening.table.rules == {1}
    rows = {row[0].text: [cell.text for cell in row] for row in whitening.table.rows}
    assert rows["bn"][1] == "about 1e3"
    assert rows["bn"][4] in ("agrees", "opposite", "no difference")
    assert pooling.charts[0].views[0].key == "cond_floor"
    ours = float(pooling.table.rows[0][2].text)
    assert ours > 1e10  # 16 channels over 16 places have rank 15: the largest eigenvalue over 2.2e-16


def test_figure_5_is_the_later_stage_with_the_spikes_of_evaluation(runs):
    (panel,) = view_of(ITEMS["figure5"], "digits", runs, None).panels
    view = panel.charts[0].views[0]
    assert min(view.x) > 15
    assert 30.0 in view.x  # the validation after the last step
    assert sorted(view.x) == list(view.x)
    assert panel.methods == ["svd", "svd+ow", "newton_schulz"]


def test_what_is_missing_is_run_and_nothing_else(runs, command_line):
    root = runs[0].folder.parents[2]
    missing = next(run for run in runs if run.config.method == "bn")
    for file in sorted(missing.folder.iterdir()):
        file.unlink()
    before = {run.folder: (run.folder / "metrics.jsonl").stat().st_mtime_ns for run in runs if run is not missing}
    arguments = ["paper", "figure1", "--seeds", 1, "--jobs", 1, "--out", root, *FLAGS]
    done = command_line(*arguments)
    assert done.returncode == 0, done.stderr
    assert "1 of 5 runs to do" in done.stdout
    assert missing.is_finished
    assert before == {folder: (folder / "metrics.jsonl").stat().st_mtime_ns for folder in before}
    assert "0 of 5 runs to do" in command_line(*arguments).stdout
    page = (root / "figure1.html").read_text()
    assert "only directions can be compared" in page
    assert "about 1e12" in page


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="process groups are killed as POSIX does")
@pytest.mark.timeout(280)
def test_killed_in_the_middle_it_does_what_is_missing(tmp_path, command_line):
    arguments = ["paper", "figure2", "--seeds", 1, "--jobs", 2, "--out", tmp_path, *FLAGS, "--checkpoint-every", 2]
    paper = subprocess.Popen(
        [sys.executable, "-m", "orthocond", *map(str, arguments)], stdout=subprocess.DEVNULL, start_new_session=True
    )
    planned = planned_runs([ITEMS["figure2"]], "digits", 1, tmp_path, None, SHORT)
    while not any(run.is_finished for run in planned):
        assert paper.poll() is None
        time.sleep(0.02)
    os.killpg(paper.pid, signal.SIGKILL)  # the sweep and its runs
    paper.wait()
    finished = [run for run in planned if run.is_finished]
    files = {file: file.read_bytes() for run in finished for file in run.folder.iterdir()}
    again = command_line(*arguments)
    assert again.returncode == 0, again.stderr
    assert f"{4 - len(finished)} of 4 runs to do" in again.stdout
    assert {file: file.read_bytes() for run in finished for file in run.folder.iterdir()} == files
    assert all(run.is_finished for run in planned)


def test_the_page_of_all_items_has_eleven(runs, tmp_path):
    times = {"records": [_times(method) for method in ITEMS["table6"].methods("CIFAR-100")]}
    page = write_items(chosen_items(["all"]), "digits", runs, times, tmp_path / "paper.html").read_text()
    assert re.findall(r'<article id="(\w+)"', page) == list(ITEMS)
    for number in ("19.45 ± 0.33", "73.36 (↑ 0.2)", "73.07 (↓ 0.1)", "106", "1e15 below svd"):
        assert number in page


def _times(method):
    spread = {"ratio": 1.1, "low": 1.05, "high": 1.2, "seconds": 0.1, "rounds": 8}
    about = {"preset": "dbn-digits", "network": "convnet", "batch_size": 32, "device": "cpu"}
    return {"subject": "step", "method": method, **about} | {
        part: {"svd": spread} for part in ("forward", "backward", "total")
    }


def test_times_are_measured_once_and_damage_is_named(tmp_path):
    items = [ITEMS["table6"]]
    assert step_times([ITEMS["table1"]], "digits", tmp_path, "cpu") is None
    (tmp_path / "step.json").write_text("{}")
    with pytest.raises(ArgumentError, match="remove it"):
        step_times(items, "digits", tmp_path, "cpu")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["table9"], "table9"),
        (["table1", "--scale", "huge"], "huge"),
        (["table1", "--method", "svd"], "leave out --method"),
        (["table1", "--scale", "small", "--data", "/nowhere"], "/nowhere"),
        (["table6", "--epochs", "1"], "leave out --epochs"),
        (["table6", "--seeds", "2"], "leave out --seeds"),
        (["table6", "--jobs", "1"], "leave out --jobs"),
        (["table6", "--data", "."], "leave out --data"),
    ],
)
def test_mistakes_are_told_in_a_sentence(command_line, tmp_path, arguments, said):
    done = command_line("paper", *arguments, "--out", tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("item", ["table1", "table6"])
def test_a_folder_that_is_a_file_is_told_before_the_runs(command_line, tmp_path, item):
    (tmp_path / "file").write_text("mine")
    done = command_line("paper", item, "--out", tmp_path / "file")
    assert done.returncode == 2
    assert done.stderr.strip().endswith("choose another folder with --out.")
    assert not done.stdout
    assert (tmp_path / "file").read_text() == "mine"


def test_what_is_not_as_the_scale_has_it_is_on_the_page(runs, tmp_path):
    page = write_items([ITEMS["figure1"]], "digits", runs, None, tmp_path / "page.html").read_text()
    assert "Other settings than those of the scale: epochs 2, steps 30, val_images 40." in page
    assert "Covariance pooling decomposes by eigh here" in page
    usual = planned_runs([ITEMS["table1"]], "digits", 1, tmp_path, None, {})
    page = write_items([ITEMS["table1"]], "digits", usual, None, tmp_path / "page.html").read_text()
    assert "Other settings" not in page
    assert "decomposes by" not in page


def test_a_page_of_times_speaks_of_no_runs(tmp_path):
    times = {"records": [_times(method) for method in ITEMS["table6"].methods("CIFAR-100")]}
    page = write_items([ITEMS["table6"]], "digits", [], times, tmp_path / "page.html").read_text()
    assert "0 of 0 runs" not in page


def test_runs_that_cannot_be_read_leave_the_other_items(tmp_path):
    damaged = planned_runs([ITEMS["table1"]], "digits", 1, tmp_path, None, {})
    for run in damaged:
        run.folder.mkdir(parents=True)
        (run.folder / "config.json").write_text("{")
    view = view_of(ITEMS["table1"], "digits", damaged, None)
    assert not view.panels
    assert "config.json can't be read" in view.problems[0]


def test_a_difference_that_is_shown_as_zero_has_no_direction(tmp_path):
    planned = [
        run
        for run in planned_runs([ITEMS["table1"]], "digits", 3, tmp_path, None, {})
        if run.config.method in ("svd", "svd+sn")
    ]
    for run in planned:
        settings = {name: value for name, value in vars(run.config).items() if name not in ("method", "seed", "epochs")}
        make_run(run.folder, run.config.method, run.config.seed, epochs=1, **settings)
        error = 5.0 + 0.001 * (run.config.method == "svd+sn")
        metrics = run.folder / "metrics.jsonl"
        *steps, last = metrics.read_text().splitlines()
        metrics.write_text("\n".join([*steps, json.dumps({**json.loads(last), "val_error": error})]) + "\n")
    (panel,) = view_of(ITEMS["table1"], "digits", planned, None).panels
    row = next(row for row in panel.table.rows if row[0].text == "svd+sn")
    assert "no difference" in [cell.text for cell in row]


def test_times_of_another_scale_are_not_shown(tmp_path):
    records = [_times(method) for method in ITEMS["table6"].methods("CIFAR-100")]
    (tmp_path / "step.json").write_text(json.dumps({"subjects": {"step": {"records": records}}}))
    assert step_times([ITEMS["table6"]], "digits", tmp_path, "cpu") == {"records": records}
    with pytest.raises(ArgumentError, match=r"another scale \(dbn-digits\)"):
        step_times([ITEMS["table6"]], "small", tmp_path, "cpu")


def test_without_an_item_they_are_listed(command_line):
    done = command_line("paper")
    assert all(name in done.stdout for name in ITEMS)


def test_folders_are_those_of_a_sweep(tmp_path):
    for run in planned_runs([ITEMS["table1"]], "digits", 1, tmp_path, None, {}):
        assert run.folder == folder_of(tmp_path / run.config.preset, run.config)
