"""Damaged run folders: what can be recovered is, what can't is refused in a sentence, and nothing else changes."""

import json
import os
import pickle
import re
import shlex
import shutil
import signal

import pytest
import torch

from orthocond.lab import cli
from orthocond.lab.config import changed
from orthocond.lab.display import Silent
from orthocond.lab.presets import preset
from orthocond.lab.train import train

from killing import InProcess, differences

FLAGS = ["--steps", "50", "--checkpoint-every", "9", "--val-images", "50", "--threads", "1", "--accelerator", "cpu"]
SETTINGS = dict(zip([flag[2:].replace("-", "_") for flag in FLAGS[::2]], FLAGS[1::2], strict=True))


@pytest.fixture(autouse=True)
def in_process(monkeypatch):
    monkeypatch.setattr(cli, "LocalEngine", InProcess)


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """A finished run, one that was stopped at step 30, and one of which nothing is there but its first steps."""
    folder = tmp_path_factory.mktemp("originals")
    threads = torch.get_num_threads()

    class Stopping(Silent):
        def step(self, record):
            if record["step"] == 30:
                signal.raise_signal(signal.SIGTERM)

    for name, display in (("finished", Silent()), ("stopped", Stopping())):
        train(changed(preset("dbn-digits"), SETTINGS), folder / name / "svd" / "seed-0", display=display)
    torch.set_num_threads(threads)
    return folder


@pytest.fixture
def runs(originals, tmp_path):
    """Copies of them, to be damaged."""
    shutil.copytree(originals, tmp_path / "runs")
    return {name: tmp_path / "runs" / name / "svd" / "seed-0" for name in ("finished", "stopped")}


def content(folder):
    """Everything in a folder but the lock."""
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file() and file.name != "run.lock"
    }


def resumed(command_line, folder, *more):
    done = command_line("train", "dbn-digits", *FLAGS, "--resume", "--out", folder, *more)
    assert "Traceback" not in done.stderr
    return done


def error_of(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return f"{lines[-1]['val_error']:.2f}%"


def everyone(command_line, runs, folder):
    """What train, compare and report say of a run's error, in this order."""
    sweep = folder.parents[1]
    told = [resumed(command_line, folder)]
    told.append(command_line("compare", "dbn-digits", *FLAGS, "--methods", "svd", "--seeds", "1", "--out", sweep))
    output = sweep / "report.json"
    report = command_line("report", sweep, "-o", output, "--format", "json")
    assert report.returncode == 0, report.stderr
    assert all("Traceback" not in done.stderr for done in told)
    (experiment,) = json.loads(output.read_text())["experiments"]
    return told[0], told[1], experiment


def rewritten(folder, name, **parts):
    """Replace parts of a checkpoint; it is as whole as any."""
    state = torch.load(folder / name, weights_only=True)
    torch.save({**state, **parts}, folder / name)


def test_a_finished_run_without_its_checkpoints_stays_finished(runs, command_line):
    folder = runs["finished"]
    for file in folder.glob("checkpoint*"):
        file.unlink()
    before = content(folder)
    done = resumed(command_line, folder)
    assert done.returncode == 0, done.stderr
    assert error_of(folder) in done.stdout
    assert "is finished; there is nothing to do" in done.stderr
    assert content(folder) == before
    (folder / "status.json").unlink()  # and without what it said of itself
    assert error_of(folder) in resumed(command_line, folder).stdout
    assert content(folder)["metrics.jsonl"] == before["metrics.jsonl"]
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"


@pytest.mark.parametrize("index", [b"", b"[]", b"{", b"\xff\xfe", b'["0"]', None])
def test_checkpoints_need_no_other_file(runs, command_line, originals, index):
    """Up to version 0.1, checkpoint.json held their checksums, and they were overwritten when it was lost."""
    folder = runs["stopped"]
    if index is None:
        (folder / "checkpoint.json").unlink(missing_ok=True)
    else:
        (folder / "checkpoint.json").write_bytes(index)
    done = resumed(command_line, folder)
    assert done.returncode == 0, done.stderr
    assert "from step 30" in done.stderr
    assert differences(originals / "finished" / "svd" / "seed-0", folder) == []


def test_without_a_whole_checkpoint_it_is_refused_with_the_command_that_starts_over(
    runs, originals, command_line, monkeypatch
):
    folder = runs["stopped"]
    for name in ("checkpoint.pt", "checkpoint.previous.pt"):
        (folder / name).write_bytes((folder / name).read_bytes()[:-200])
    before = content(folder)
    done = resumed(command_line, folder)
    assert done.returncode == 2
    assert "checkpoint.previous.pt is damaged and is not used" in done.stderr
    assert "nothing was changed" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert content(folder) == before
    program, *arguments = shlex.split(done.stderr.partition("start over with: ")[2])
    assert program == "orthocond"
    done = command_line(*arguments, "--threads", "1", "--accelerator", "cpu")
    assert done.returncode == 0, done.stderr
    assert content(folder.with_name("seed-0.old-1")) == before
    differing = differences(originals / "finished" / "svd" / "seed-0", folder)
    assert [name for name in differing if not name.startswith(".config.")] == []


def test_checkpoints_that_were_deleted_are_not_taken_for_none(runs, command_line):
    folder = runs["stopped"]
    for file in folder.glob("checkpoint*"):
        file.unlink()
    before = content(folder)
    done = resumed(command_line, folder)
    assert (done.returncode, content(folder)) == (2, before)
    assert "no checkpoint in" in done.stderr
    assert "--restart" in done.stderr


def test_a_run_that_died_before_its_first_checkpoint_begins_again(runs, originals, command_line):
    folder = runs["stopped"]
    for file in folder.glob("checkpoint*"):
        file.unlink()
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(b"".join(lines[:8]) + lines[8][:40])
    (folder / "status.json").write_text('{"state": "running", "step": 0, "total_steps": 50}')
    done = resumed(command_line, folder)
    assert done.returncode == 0, done.stderr
    assert differences(originals / "finished" / "svd" / "seed-0", folder) == []


@pytest.mark.parametrize("damage", ["a byte", "a null", "two lines in one", "another kind", "no step", "deep"])
def test_one_bad_line_does_not_change_a_result(runs, command_line, damage):
    folder = runs["finished"]
    error = error_of(folder)
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    at = 40  # of the second epoch
    lines[at] = {
        "a byte": lines[at].replace(b'"loss"', b'"lo\xffs"'),
        "a null": lines[at].replace(b":", b"\0", 1),
        "two lines in one": lines[at].replace(b"\n", b" "),
        "another kind": lines[at].replace(b'"step"', b'"stop"', 1),
        "no step": lines[at].replace(b'"step":', b'"stop":'),
        "deep": b"[" * 100_000 + b"\n",
    }[damage]
    (folder / "metrics.jsonl").write_bytes(b"".join(lines))
    trained, compared, report = everyone(command_line, runs, folder)
    assert error in trained.stdout
    assert f"line {at + 1} of metrics.jsonl is damaged and left out" in trained.stderr
    assert error[:-1] in compared.stdout
    assert f"svd seed 0: line {at + 1} of metrics.jsonl is damaged and left out" in compared.stderr
    assert f"{report['methods'][0]['error']['mean']:.2f}%" == error
    assert f"svd, seed 0: line {at + 1} of metrics.jsonl is damaged and left out." in report["notes"]


@pytest.mark.parametrize("damage", ["cut", "a byte", "a digit", "empty", "missing", "folder", "no text"])
def test_an_early_error_is_never_taken_for_the_last(runs, command_line, damage):
    folder = runs["finished"]
    file = folder / "metrics.jsonl"
    data = file.read_bytes()
    lines = data.splitlines(keepends=True)
    if damage in ("missing", "folder"):
        file.unlink()
    if damage == "folder":
        file.mkdir()
    changes = {
        "cut": b"".join(lines[:-3]),
        "a byte": b"".join(lines[:-1]) + lines[-1].replace(b":", b"\xff", 1),
        "a digit": re.sub(rb'("val_error": )\d', rb"\g<1>9", data[: -len(lines[-1])])
        + re.sub(rb'("val_error": )\d', rb"\g<1>9", lines[-1]),
        "empty": b"",
        "no text": bytes(range(128, 256)) * 20,
    }
    if damage in changes:
        file.write_bytes(changes[damage])
    trained, compared, report = everyone(command_line, runs, folder)
    assert trained.returncode == 0, trained.stderr
    assert "validation error" not in trained.stdout
    assert "can't be known" in trained.stderr
    assert "--restart" in trained.stderr
    assert compared.returncode == 0, compared.stderr
    assert "its error can't be known" in compared.stderr
    assert report["methods"][0]["error"]["mean"] is None
    assert any("its error can't be known" in note for note in report["notes"])


@pytest.mark.parametrize(
    "damage", ["missing", "empty", "[]", '{"preset": 1}', '{"preset": "dbn-digits"', "\0\0", "folder"]
)
@pytest.mark.parametrize("name", ["finished", "stopped"])
def test_a_lost_configuration_is_restored_from_a_checkpoint(runs, originals, command_line, name, damage):
    folder = runs[name]
    config = (folder / "config.json").read_bytes()
    (folder / "config.json").unlink()
    if damage == "folder":
        (folder / "config.json").mkdir()
        done = resumed(command_line, folder)
        assert (done.returncode, len(done.stderr.strip().splitlines())) == (2, 1)
        return
    if damage != "missing":
        (folder / "config.json").write_text("" if damage == "empty" else damage)
    done = resumed(command_line, folder)
    assert done.returncode == 0, done.stderr
    assert "it is restored from a checkpoint" in done.stderr
    assert (folder / "config.json").read_bytes() == config
    assert differences(originals / "finished" / "svd" / "seed-0", folder) == []


def test_a_lost_configuration_without_a_copy_is_refused(runs, command_line):
    folder = runs["finished"]
    for name in ("config.json", "checkpoint.pt", "checkpoint.previous.pt"):
        (folder / name).unlink()
    before = content(folder)
    for more in ([], ["--resume"]):
        done = command_line("train", "dbn-digits", *FLAGS, "--out", folder, *more)
        assert (done.returncode, content(folder)) == (2, before)
        assert len(done.stderr.strip().splitlines()) == 1
    assert "--restart" in done.stderr
    report = command_line("report", folder.parents[1], "-o", folder / "report.html")
    assert (report.returncode, len(report.stderr.strip().splitlines())) == (2, 1)
    assert "config.json is missing" in report.stderr


class Evil:
    def __init__(self, place):
        self.place = str(place)

    def __reduce__(self):
        return os.mkdir, (self.place,)


CRAFTED = {
    "a file outside": lambda folder: rewritten(folder, "checkpoint.pt", sizes={"../../victim.txt": 0}),
    "a negative size": lambda folder: rewritten(folder, "checkpoint.pt", sizes={"metrics.jsonl": -1, "times.jsonl": 0}),
    "a step beyond the last": lambda folder: rewritten(folder, "checkpoint.pt", step=10**9),
    "a step that is none": lambda folder: rewritten(folder, "checkpoint.pt", step=True),
    "another run": lambda folder: rewritten(folder, "checkpoint.pt", config={"preset": "dbn-digits", "seed": 7}),
    "a setting that is none": lambda folder: rewritten(folder, "checkpoint.pt", config={"preset": "x", "seeed": 7}),
    "no model": lambda folder: rewritten(folder, "checkpoint.pt", model=None),
    "other weights": lambda folder: rewritten(folder, "checkpoint.pt", model={"weight": torch.zeros(3)}),
    "other momentum": lambda folder: rewritten(folder, "checkpoint.pt", optimizer={"state": {}, "param_groups": []}),
    "no random state": lambda folder: rewritten(folder, "checkpoint.pt", random={}),
    "code": lambda folder: rewritten(folder, "checkpoint.pt", model=Evil(folder / "evil")),
    "a list": lambda folder: torch.save([1, 2], folder / "checkpoint.pt"),
    "a pickle": lambda folder: (folder / "checkpoint.pt").write_bytes(pickle.dumps(Evil(folder / "evil"))),
    "a flipped bit": lambda folder: flip(folder / "checkpoint.pt"),
    "an empty file": lambda folder: (folder / "checkpoint.pt").write_bytes(b""),
    "a folder": lambda folder: ((folder / "checkpoint.pt").unlink(), (folder / "checkpoint.pt").mkdir()),
    "a link to nothing": lambda folder: (
        (folder / "checkpoint.pt").unlink(),
        (folder / "checkpoint.pt").symlink_to("nowhere"),
    ),
}


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("crafted", CRAFTED)
def test_a_checkpoint_that_somebody_made_up_is_named_and_not_used(runs, originals, command_line, crafted):
    folder = runs["stopped"]
    victim = folder.parents[1] / "victim.txt"
    victim.write_text("precious")
    CRAFTED[crafted](folder)
    done = resumed(command_line, folder)
    if crafted != "a folder":
        assert done.returncode == 0, done.stderr
        assert "is not used; continuing from step 27" in done.stderr
        assert differences(originals / "finished" / "svd" / "seed-0", folder) == []
    else:  # the next checkpoint can't be written
        assert (done.returncode, "put that right" in done.stderr) == (2, True)
    assert victim.read_text() == "precious"
    assert not (folder / "evil").exists()


def test_lost_lines_are_made_up_for_from_the_checkpoint_before(runs, originals, command_line):
    folder = runs["stopped"]
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(b"".join(lines[:-2]))
    (folder / "times.jsonl").unlink()
    done = resumed(command_line, folder)
    assert done.returncode == 0, done.stderr
    assert "metrics.jsonl is shorter than it was at the checkpoint; continuing from step 27" in done.stderr
    assert "times.jsonl has lost lines" in done.stderr
    assert differences(originals / "finished" / "svd" / "seed-0", folder) == []


@pytest.mark.parametrize("name", ["metrics.jsonl", "times.jsonl", "status.json", "environment.json", "run.lock"])
@pytest.mark.parametrize("run", ["finished", "stopped"])
def test_a_folder_in_the_place_of_a_file(runs, command_line, run, name):
    folder = runs[run]
    (folder / name).unlink(missing_ok=True)
    (folder / name).mkdir()
    done = resumed(command_line, folder)
    assert done.returncode in (0, 2)
    if done.returncode == 2:
        assert len([line for line in done.stderr.splitlines() if line.startswith("orthocond: ")]) == 1
    sweep = folder.parents[1]
    compared = command_line("compare", "dbn-digits", *FLAGS, "--methods", "svd", "--seeds", "1", "--out", sweep)
    assert compared.returncode in (0, 1)
    report = command_line("report", sweep, "-o", sweep / "report.html")
    assert report.returncode == 0, report.stderr
    assert "Traceback" not in compared.stderr + report.stderr


@pytest.mark.parametrize(
    "status",
    [
        '{"state": null, "step": null, "total_steps": null, "seconds": null}',
        '{"state": "running", "step": 30, "total_steps": 50, "seconds": "abc"}',
        '{"state": "running", "step": "x", "total_steps": 1e400, "seconds": NaN}',
        '{"state": ["finished"], "step": {}, "total_steps": -5, "seconds": true}',
        "[]",
        "[" * 100_000,
        "\udcff",
    ],
)
def test_a_status_that_is_none(runs, originals, command_line, status):
    for folder in runs.values():
        (folder / "status.json").write_bytes(status.encode(errors="surrogateescape"))
        sweep = folder.parents[1]
        report = command_line("report", sweep, "-o", sweep / "report.html")
        assert report.returncode == 0, report.stderr
        arguments = ["--methods", "svd", "--seeds", "1", "--out", sweep]
        done = command_line("compare", "dbn-digits", *FLAGS, *arguments)
        assert done.returncode == 0, done.stderr
        assert differences(originals / "finished" / "svd" / "seed-0", folder) == []


def test_one_run_that_cannot_be_used_does_not_end_a_sweep(runs, originals, command_line):
    sweep = runs["finished"].parents[1]
    shutil.copytree(runs["finished"], sweep / "bn" / "seed-0")
    for name in ("config.json", "checkpoint.pt", "checkpoint.previous.pt"):
        (sweep / "bn" / "seed-0" / name).unlink()
    done = command_line("compare", "dbn-digits", *FLAGS, "--methods", "bn,svd", "--seeds", "1", "--out", sweep)
    assert done.returncode == 1
    assert "1 of 2 runs failed" in done.stderr
    assert "bn seed 0: config.json in" in done.stderr
    assert error_of(runs["finished"])[:-1] in done.stdout
    assert "Traceback" not in done.stderr
