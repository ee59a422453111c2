"""Sweeps: all runs done once, whatever is killed on the way."""

import io
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

from orthocond.lab import compare as module
from orthocond.lab.compare import LocalEngine, RayEngine, compare, kept_memory, plan, summary, visible_gpus
from orthocond.lab.config import changed
from orthocond.lab.presets import preset
from orthocond.lab.records import read_records
from orthocond.lab.runs import RunError

from killing import KillingEngine, faults

SHORT = changed(preset("dbn-digits"), {"steps": 12, "val_images": 50, "accelerator": "cpu", "checkpoint_every": 2})


def quiet():
    return Console(file=io.StringIO(), width=120)


def command(*more):
    settings = ["--steps", "12", "--val-images", "50", "--accelerator", "cpu"]
    return [sys.executable, "-m", "orthocond", "compare", "dbn-digits", *settings, *map(str, more)]


def test_the_plan_and_its_shards(tmp_path):
    runs = plan(SHORT, ["svd", "bn"], 3, tmp_path)
    assert len({run.folder for run in runs}) == 6
    assert runs[1].folder == tmp_path / "bn" / "seed-0"
    shards = [plan(SHORT, ["svd", "bn"], 3, tmp_path, (number, 4)) for number in (1, 2, 3, 4)]
    assert sorted(run.name for shard in shards for run in shard) == sorted(run.name for run in runs)
    assert [len(shard) for shard in shards] == [2, 2, 1, 1]


@pytest.mark.timeout(200)
def test_a_sweep_from_the_command_line_does_only_what_is_missing(tmp_path):
    arguments = ("--methods", "svd+nog,bn", "--seeds", "2", "--jobs", "2", "--out", tmp_path)
    done = subprocess.run(command(*arguments), capture_output=True, text=True, check=True)
    for text in ("svd+nog seed 1: error", "│svd+nog", "2/2"):
        assert text in done.stdout
    written = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.is_file()}
    (tmp_path / "bn" / "seed-1" / "status.json").unlink()
    again = subprocess.run(command(*arguments), capture_output=True, text=True, check=True)
    assert "svd+nog seed 0:" not in again.stdout
    assert "bn seed 1: error" in again.stdout
    now = {file for file in written if file.exists() and file.stat().st_mtime_ns == written[file]}
    assert all(file.parent == tmp_path / "bn" / "seed-1" for file in set(written) - now)
    errors = [read_records(tmp_path / "bn" / f"seed-{seed}", "epoch")[-1]["val_error"] for seed in (0, 1)]
    assert f"{statistics.fmean(errors):.2f} ± {statistics.stdev(errors):.2f}" in again.stdout


@pytest.mark.timeout(200)
def test_a_run_that_fails_is_tried_again_and_does_not_stop_the_others(tmp_path):
    """With so large a rate the loss becomes NaN with any method; whitening alone does not mind."""
    arguments = ("--methods", "svd,bn", "--seeds", "1", "--learning-rate", "1e30", "--jobs", "2", "--out", tmp_path)
    done = subprocess.run(command(*arguments), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "runs failed:" in done.stderr
    assert "bn seed 0: training stopped at step" in done.stderr
    assert json.loads((tmp_path / "bn" / "seed-0" / "status.json").read_text())["state"] == "failed"
    assert done.stdout.count("bn seed 0: failed") == 2
    assert "Traceback" not in done.stderr


@pytest.mark.timeout(280)
def test_runs_that_are_killed_at_random_are_all_done_in_the_end(tmp_path):
    """Every third run is killed once: the sweep tries it again by itself."""
    runs = plan(SHORT, ["svd+nog", "bn", "svd+gauge"], 2, tmp_path)
    engine = KillingEngine(2, runs[::3], tries=1, seed=0)
    assert compare(runs, engine, quiet()) == []
    assert engine.kills == 2
    assert faults(runs, 12) == []
    assert len(list(tmp_path.rglob("config.json"))) == 6


@pytest.mark.timeout(200)
def test_a_sweep_that_dies_leaves_no_run_behind(tmp_path):
    arguments = ("--methods", "svd", "--seeds", "1", "--epochs", "1000", "--steps", "20000", "--out", tmp_path)
    sweep = subprocess.Popen(command(*arguments), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    metrics = tmp_path / "svd" / "seed-0" / "metrics.jsonl"
    while sweep.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.02)
    sweep.kill()
    sweep.wait()
    deadline = time.monotonic() + 60
    status = metrics.with_name("status.json")
    while json.loads(status.read_text())["state"] != "interrupted":
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.timeout(280)
def test_a_ray_cluster_with_two_workers_one_of_which_is_killed(tmp_path, monkeypatch):
    import ray  # here: it is slow to import

    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        longer = changed(SHORT, {"steps": 300, "epochs": 20, "evaluate_every": 20})
        runs = plan(longer, ["svd", "svd+nog"], 2, tmp_path)

        def kill_one():
            metrics = runs[0].folder / "metrics.jsonl"
            while not (metrics.exists() and metrics.stat().st_size):
                time.sleep(0.01)
            os.kill(holder(runs[0].folder), signal.SIGKILL)
            killed.append(1)

        killed = []
        threading.Thread(target=kill_one, daemon=True).start()
        assert compare(runs, RayEngine(None, cpus=1, gpus=0), quiet()) == []
    finally:
        ray.shutdown()
    assert killed
    for run in runs:
        assert [record["step"] for record in read_records(run.folder, "step")] == list(range(1, 301))


def holder(folder: Path) -> int:
    """Return the process that holds the lock of a run."""
    inode = (folder / "run.lock").stat().st_ino
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        if fields[5].rpartition(":")[2] == str(inode):
            return int(fields[4])
    raise AssertionError("nobody holds the lock")


@pytest.mark.timeout(200)
def test_a_sweep_of_runs_on_two_devices_each(tmp_path):
    done = subprocess.run(
        command("--methods", "svd", "--seeds", "1", "--devices", "2", "--out", tmp_path),
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "svd" / "seed-0" / "environment.json").read_text())["world_size"] == 2
    assert "compare dbn-digits" in (tmp_path / "svd" / "seed-0" / "environment.json").read_text()


def test_runs_of_another_configuration_are_not_taken_for_these(tmp_path, capsys, monkeypatch):
    runs = plan(SHORT, ["bn"], 1, tmp_path)
    assert compare(runs, LocalEngine(1), quiet()) == []
    with pytest.raises(RunError, match=r"was begun with learning_rate 0\.1, not 0\.5"):
        compare(plan(changed(SHORT, {"learning_rate": 0.5}), ["bn"], 1, tmp_path), LocalEngine(1), quiet())


def test_a_shard_without_runs_has_nothing_to_do(command_line):
    done = command_line(*command("--methods", "bn", "--seeds", "1", "--shard", "8/8")[3:])
    assert done.returncode == 0
    assert "nothing to do" in done.stdout


def test_the_table_while_runs_are_going_on(tmp_path):
    runs = plan(SHORT, ["svd", "bn"], 2, tmp_path)
    console = Console(file=io.StringIO(), width=100)
    console.print(summary(runs))
    assert "0/2" in console.file.getvalue()
    assert module.mean_and_std([]) == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "svd+nogg"], "Did you mean 'nog'"),
        (["--shard", "9/8"], "--shard takes a number and how many there are"),
        (["--engine", "rai"], "Did you mean 'ray'"),
        (["--method", "svd"], "compare takes --methods, not a single method"),
        (["--engine", "ray", "--devices", "2"], "a run on a Ray cluster has one device"),
        (["--dataset", "uoft-cs/cifar10", "--data", "/nowhere"], "there is no folder /nowhere"),
    ],
)
def test_bad_input(tmp_path, command_line, arguments, message):
    done = command_line(*command("--out", tmp_path, *arguments)[3:])
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.rglob("config.json"))


def test_each_run_gets_a_gpu_of_its_own(tmp_path, monkeypatch):
    seen = []

    class Started:
        def __init__(self, *_, env, **__):
            seen.append(env.get("CUDA_VISIBLE_DEVICES"))

        def poll(self):
            return 0

        def communicate(self):
            pass

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(subprocess, "Popen", Started)
    engine = LocalEngine(4, gpus=["3", "5", "GPU-7"])
    runs = plan(preset("dbn-digits"), ["svd", "bn", "svd+nog", "svd+ow"], 1, tmp_path)
    handles = [engine.start(run) for run in runs]
    assert seen == ["3", "5", "GPU-7", "3"]  # four runs on three: the first is shared
    for handle in handles[1:]:
        assert handle.poll() == ""
    engine.start(runs[0])
    two = plan(changed(preset("dbn-digits"), {"devices": "2"}), ["svd"], 1, tmp_path)
    engine.start(two[0])
    on_cpu = plan(changed(preset("dbn-digits"), {"accelerator": "cpu"}), ["svd"], 1, tmp_path)
    engine.start(on_cpu[0])
    assert seen[4:] == ["5", "GPU-7,3", None]


def test_a_run_keeps_its_memory_unless_the_user_chose_otherwise(tmp_path, monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))
    for name in [name for name in os.environ if name.startswith("MALLOC_")] + ["GLIBC_TUNABLES", "LD_PRELOAD"]:
        monkeypatch.delenv(name, raising=False)
    environments = []

    class Started:
        def __init__(self, *_, env, **__):
            environments.append(env)

    monkeypatch.setattr(subprocess, "Popen", Started)
    (run,) = plan(SHORT, ["svd"], 1, tmp_path)
    LocalEngine(1).start(run)
    assert int(environments[0]["MALLOC_TRIM_THRESHOLD_"]) > int(environments[0]["MALLOC_MMAP_THRESHOLD_"]) > 2**31
    for name, value in [("MALLOC_ARENA_MAX", "1"), ("GLIBC_TUNABLES", "glibc.malloc.check=0"), ("LD_PRELOAD", "tc.so")]:
        with monkeypatch.context() as patched:
            patched.setenv(name, value)
            LocalEngine(1).start(run)
        assert environments[-1][name] == value
        assert "MALLOC_TRIM_THRESHOLD_" not in environments[-1]
    for library in (("", ""), ("glibc", "2.31")):
        monkeypatch.setattr(platform, "libc_ver", lambda library=library: library)
        assert kept_memory() == {}


def test_visible_gpus_are_those_that_the_environment_names(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 6")
    assert visible_gpus() == ["4", "6"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible_gpus() == ["0", "1"]
