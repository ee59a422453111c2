"""The folder of a run: whole or not at all, held by one process, damage found."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch

from orthocond.lab.presets import preset
from orthocond.lab.records import read_records
from orthocond.lab.runs import RunError, RunFolder, environment, is_alive, read_config


def state(step, **parts):
    """A checkpoint with everything that one has."""
    empty = {name: {} for name in ("model", "optimizer", "scheduler", "treatment", "precision", "random")}
    whole = {"config": dataclasses.asdict(preset("dbn-digits")), "step": step, **empty, "totals": torch.zeros(4)}
    weights = {"weight": torch.full((100,), float(step))}
    return {**whole, "sizes": {"metrics.jsonl": 0, "times.jsonl": 0}, "model": weights, **parts}


def begun(path):
    folder = RunFolder(path)
    folder.begin(preset("dbn-digits"), environment(device="cpu", world_size=1))
    return folder


@pytest.mark.parametrize("program", ["/venv/bin/orthocond", "/src/orthocond/__main__.py"])
def test_the_command_is_one_that_can_be_typed_again(program, monkeypatch):
    monkeypatch.setattr(sys, "argv", [program, "train", "dbn-digits", "--out", "my runs"])
    monkeypatch.delenv("ORTHOCOND_COMMAND", raising=False)
    assert environment(device="cpu", world_size=1)["command"] == "orthocond train dbn-digits --out 'my runs'"


def test_what_is_begun_is_there(tmp_path):
    with begun(tmp_path / "a" / "run") as folder:
        assert folder.holds_a_run
    assert read_config(tmp_path / "a" / "run") == preset("dbn-digits")
    about = json.loads((tmp_path / "a" / "run" / "environment.json").read_text())
    assert about["torch"] == torch.__version__


def test_the_last_two_checkpoints_are_kept(tmp_path):
    with begun(tmp_path) as folder:
        assert folder.load_checkpoint() is None
        for step in range(4):
            folder.save_checkpoint(state(step))
        assert folder.load_checkpoint()["step"] == 3
        (tmp_path / "checkpoint.pt").unlink()  # killed between the two renames
        assert folder.load_checkpoint()["step"] == 2
        assert not folder.warnings


@pytest.mark.parametrize("damage", ["flipped bit", "cut", "empty", "other"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tmp_path, damage):
    with begun(tmp_path) as folder:
        folder.save_checkpoint(state(1))
        folder.save_checkpoint(state(2))
        file = tmp_path / "checkpoint.pt"
        data = bytearray(file.read_bytes())
        if damage == "flipped bit":
            data[data.index(torch.full((100,), 2.0).numpy().tobytes()) + 40] ^= 1
        file.write_bytes({"flipped bit": data, "cut": data[:-100], "empty": b"", "other": b"x" * len(data)}[damage])
        assert folder.load_checkpoint()["step"] == 1
        (warning,) = folder.warnings
        assert str(file) in warning
        folder.save_checkpoint(state(3))  # a damaged one must not take the place of the good one
        assert torch.load(tmp_path / "checkpoint.previous.pt", weights_only=True)["step"] == 1
        assert folder.load_checkpoint()["step"] == 3


def test_a_flipped_bit_anywhere_in_a_checkpoint_is_noticed_or_without_effect(tmp_path):
    """The archive's checksums cover what is loaded; between its parts there are bytes that nobody reads."""
    with begun(tmp_path) as folder:
        folder.save_checkpoint(state(2))
        file = tmp_path / "checkpoint.pt"
        data, number_unnoticed = file.read_bytes(), 0
        for position in range(0, len(data), 23):
            damaged = bytearray(data)
            damaged[position] ^= 1 << position % 8
            file.write_bytes(damaged)
            loaded = folder.load_checkpoint()
            if loaded is not None:
                number_unnoticed += 1
                assert torch.equal(loaded.pop("model")["weight"], state(2)["model"]["weight"])
                assert torch.equal(loaded.pop("totals"), torch.zeros(4))
                assert loaded == {name: value for name, value in state(2).items() if name in loaded}
        assert len(folder.warnings) + number_unnoticed == len(range(0, len(data), 23))
        assert folder.warnings


def test_dying_again_and_again_in_the_middle_of_a_checkpoint_loses_none(tmp_path, monkeypatch):
    with begun(tmp_path) as folder:
        folder.save_checkpoint(state(1))
        folder.save_checkpoint(state(2))
        replace = os.replace

        def die(source, target):
            if str(target).endswith(".pt"):
                raise KeyboardInterrupt
            replace(source, target)

        for step in range(3, 40):
            with monkeypatch.context() as patch:
                patch.setattr(os, "replace", die)
                with pytest.raises(KeyboardInterrupt):
                    folder.save_checkpoint(state(step))
            assert folder.load_checkpoint()["step"] == 2
        folder.save_checkpoint(state(40))
        assert folder.load_checkpoint()["step"] == 40
        assert not folder.warnings


def test_nothing_is_unpickled(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "evil"),)

    with begun(tmp_path / "run") as folder:
        folder.save_checkpoint(state(1, model=Evil()))
        assert folder.load_checkpoint() is None
        assert "holds something else than a checkpoint and is not used" in folder.warnings[0]
    assert not (tmp_path / "evil").exists()


def test_a_checkpoint_that_cannot_be_written_leaves_the_others(tmp_path):
    """The kernel refuses to write more than so much of a file, as it does when the disk is full."""
    with begun(tmp_path) as folder:
        folder.save_checkpoint(state(1))
    code = f"""
import resource, torch
from orthocond.lab.runs import RunError, RunFolder
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
with RunFolder({str(tmp_path)!r}) as folder:
    try:
        folder.save_checkpoint({{"step": 2, "big": torch.zeros(10000)}})  # fails before anybody looks at it
    except RunError as error:
        print(error)
    print(folder.load_checkpoint()["step"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    message, step = done.stdout.strip().splitlines()
    assert "can't write a checkpoint" in message
    assert "what was written before is intact: make room, and continue with --resume" in message
    assert step == "1"
    assert not list(tmp_path.glob("*.partial"))


def test_lines_are_cut_back(tmp_path):
    with begun(tmp_path) as folder:
        folder.append("metrics.jsonl", [{"kind": "step", "step": 1}])
        sizes = folder.sizes()
        folder.append("metrics.jsonl", [{"kind": "step", "step": 2}, {"kind": "epoch", "step": 2}])
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"kind": "step", "st')
        assert [record["step"] for record in read_records(tmp_path, "step")] == [1, 2]
        folder.cut(sizes)
        assert (tmp_path / "metrics.jsonl").read_text() == '{"kind": "step", "step": 1}\n'
        os.truncate(tmp_path / "metrics.jsonl", 3)
        with pytest.raises(RunError, match="shorter than it was at the checkpoint"):
            folder.cut(sizes)


def test_one_process_at_a_time(tmp_path):
    code = f"""
from orthocond.lab.runs import RunFolder, is_alive
print("alive", is_alive({str(tmp_path)!r}))
RunFolder({str(tmp_path)!r})
"""
    with begun(tmp_path):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert "in progress in another process; wait for it, or choose another folder with --out" in done.stderr
        assert "alive True" in done.stdout
    assert not is_alive(tmp_path)
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).returncode == 0
    assert not is_alive(tmp_path / "none")


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"can't write to .*choose another folder with --out"):
        RunFolder(tmp_path / "file" / "run")
