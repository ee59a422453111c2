"""The command line, by running it."""

import os
import pty
import re
import signal
import subprocess
import sys

import pytest
import torch

from orthocond.lab.installing import install_command
from orthocond.lab.methods import ALL
from orthocond.lab.presets import PRESETS
from orthocond.lab.runs import read_config

SHORT = ["--steps", "3", "--val-images", "20", "--accelerator", "cpu"]


def test_presets_and_methods_are_listed_from_the_registries(command_line):
    for what, names in (("presets", PRESETS), ("methods", ALL)):
        done = command_line(what)
        assert done.returncode == 0
        assert all(name in done.stdout for name in names)


@pytest.mark.parametrize("command", ["train", "compare", "report", "demo", "bench"])
def test_help_shows_an_example(command, command_line):
    done = command_line(command, "--help")
    assert f"Example: orthocond {command}" in done.stdout


def test_an_unknown_subject_of_the_benchmark_is_one_sentence(command_line):
    done = command_line("bench", "solver")
    assert done.returncode == 2
    assert "choose one of solvers, functions, polar, geometry, layers, step. Did you mean 'solvers'?" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_flags_come_before_the_file_and_the_file_before_the_preset(tmp_path, command_line):
    (tmp_path / "own.toml").write_text("learning_rate = 0.03\nseed = 5\n")
    done = command_line(
        "train", "dbn-digits", *SHORT, "--config", tmp_path / "own.toml", "--seed", "6", "--out", tmp_path / "run"
    )
    assert done.returncode == 0, done.stderr
    config = read_config(tmp_path / "run")
    assert (config.learning_rate, config.seed, config.momentum, config.steps) == (0.03, 6, 0.9, 3)
    assert "validation error" in done.stdout
    assert "epoch 1 step 3/3 training error" in done.stderr
    again = command_line("train", "dbn-digits", "--resume", "--out", tmp_path / "run")  # as it was begun
    assert again.returncode == 0
    assert "is finished; there is nothing to do" in again.stderr


def test_the_default_folder_is_named_by_what_is_run(tmp_path, monkeypatch, command_line):
    monkeypatch.chdir(tmp_path)
    done = command_line("train", "dbn-digits", *SHORT, "--method", "svd+ow+nog", "--seed", "2")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "dbn-digits" / "svd+nog+ow" / "seed-2" / "config.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dbn-digit"], "choose one of dbn-digits, .* Did you mean 'dbn-digits'"),
        (["dbn-digits", "--method", "svd+nogg"], "the method 'svd\\+nogg' .* Did you mean 'nog'"),
        (["dbn-digits", "--learning-rate", "fast"], "learning_rate takes a number, got 'fast'"),
        (["dbn-cifar10", "--data", "/nowhere"], "there is no folder /nowhere with data"),
        (["dbn-cifar10", "--data", "."], "neither parquet files nor image folders"),
        (["dbn-digits", "--config", "/nowhere.toml"], "can't read the configuration /nowhere.toml"),
        (["dbn-digits", "--config", "bad.toml"], "unknown setting 'learning_rat'.*Did you mean 'learning_rate'"),
        (["dbn-digits", "--out", "/proc/none/run"], "can't write to /proc/none/run"),
        (["dbn-digits", "--monitor-exact", "5"], "monitor_exact is for methods with products"),
        (["dbn-digits", "--monitor-exact", "5", "--monitor", "none"], "monitor_exact has no effect with monitor=none"),
        (["dbn-digits", "--accelerator", "cuda"], "can't use accelerator cuda"),
    ],
)
def test_a_user_s_mistake_is_one_sentence(tmp_path, monkeypatch, arguments, message, command_line):
    (tmp_path / "bad.toml").write_text("learning_rat = 1\n")
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    monkeypatch.chdir(tmp_path)
    done = command_line("train", *arguments)
    assert done.returncode == 2
    assert re.search(message, done.stderr), done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_a_folder_without_room_keeps_what_is_there(tmp_path, command_line):
    """The kernel refuses to write more than so much of a file, as it does when the disk is full."""
    settings = ["--method", "bn", "--val-images", "20", "--accelerator", "cpu", "--checkpoint-every", "5"]
    arguments = ["train", "dbn-digits", *settings, "--steps", "700", "--epochs", "40", "--out", str(tmp_path / "run")]
    # The metrics reach the limit after some hundred steps, long after the first checkpoints of 130 kB.
    limited = (
        "import resource, runpy; resource.setrlimit(resource.RLIMIT_FSIZE, (136_000, 136_000)); "
        "runpy.run_module('orthocond', run_name='__main__')"
    )
    first = subprocess.run([sys.executable, "-c", limited, *arguments], capture_output=True, text=True, check=False)
    assert first.returncode == 2, first.stderr
    said = first.stderr.strip().splitlines()[-1]
    assert "make room, and continue with --resume" in said
    assert "Traceback" not in first.stderr
    again = command_line(*arguments, "--resume")
    assert again.returncode == 0, again.stderr
    assert "from step" in again.stderr


def test_without_its_dependencies_it_says_what_to_install(tmp_path):
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError(\"No module named 'typer'\", name='typer')")
    command = [sys.executable, "-m", "orthocond", "presets"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1
    advice = f"orthocond: the laboratory needs typer; install it with: {install_command('lab')}"
    assert done.stderr.strip() == advice


def test_a_terminal_gets_a_progress_bar(tmp_path):
    """Under a pseudo-terminal."""
    main, other = pty.openpty()
    command = [sys.executable, "-m", "orthocond", "train", "dbn-digits", *SHORT, "--out", str(tmp_path / "run")]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=other, env=os.environ | {"TERM": "xterm", "COLUMNS": "140"}
    )
    os.close(other)
    shown = b""
    while True:
        try:
            part = os.read(main, 4096)
        except OSError:
            break
        if not part:
            break
        shown += part
    assert process.wait() == 0
    assert b"step 3/3" in shown
    assert b"cond" in shown


@pytest.mark.parametrize("command", ["compare", "report", "bench"])
def test_ctrl_c_is_told_how_to_go_on(tmp_path, command_line, monkeypatch, command):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("orthocond.lab.cli.compare", interrupted)
    monkeypatch.setattr("orthocond.lab.report.command.write_report", interrupted)
    monkeypatch.setattr("orthocond.lab.bench.run.run", interrupted)
    arguments = {"compare": ["dbn-digits", "--out", tmp_path], "report": [tmp_path], "bench": []}[command]
    done = command_line(command, *arguments)
    assert done.returncode == 130
    assert done.stderr.startswith("orthocond: stopped; rerun the command to continue from the last checkpoint")
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.skipif(os.name == "nt", reason="Windows sends no SIGINT to a single process")
@pytest.mark.parametrize(
    "moment",
    [
        "orthocond.linalg._counts",
        "numpy",
        "torch._C",
        "torch.library",
        "torch",
        "orthocond.linalg",
        "orthocond",
        "typer",
    ],
)
def test_ctrl_c_while_modules_are_imported(moment):
    """In a process of its own, which says what it has imported."""
    command = [sys.executable, "-X", "importtime", "-m", "orthocond_command", "presets"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    imported = ""
    while process.poll() is None and imported != moment:
        imported = process.stderr.readline().rpartition("|")[2].strip()
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    told = [line for line in errors.splitlines() if not line.startswith("import time:")]
    assert (process.returncode, out) == (130, ""), errors
    assert told == ["orthocond: stopped; rerun the command to continue from the last checkpoint (train: --resume)"]


def test_ctrl_c_that_is_ignored_stays_so():
    """As in a script that a shell runs in the background."""
    code = (
        "import signal, orthocond_command; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "with orthocond_command._ending_at_ctrl_c(): signal.raise_signal(signal.SIGINT)\n"
        "print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "True\n"


def test_the_demonstration_in_short(tmp_path, command_line):
    done = command_line("demo", "--seeds", "1", "--out", tmp_path, "--methods", "svd,bn")
    assert done.returncode == 0, done.stderr
    assert "on 1,438 handwritten digits" in done.stdout
    again = command_line("demo", "--seeds", "1", "--out", tmp_path, "--methods", "svd,bn")
    assert "all done before" in again.stdout
