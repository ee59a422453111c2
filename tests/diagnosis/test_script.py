"""Somebody's script, run unchanged until the first NaN."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from orthocond.diagnosis._record import Record
from orthocond.diagnosis.script import main, run_script
from orthocond.errors import ArgumentError
from orthocond.lab import main as lab_main

SCRIPT = """
import argparse, sys
from pathlib import Path
import torch
import helper

parser = argparse.ArgumentParser()
parser.add_argument("--samples", type=int, default=64)
parser.add_argument("--fail", action="store_true")
options = parser.parse_args()
torch.manual_seed(0)
layer = torch.nn.Linear(4, 8)
optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
for step in range(20):
    try:
        x = layer(torch.randn(options.samples, 4) ** 2) ** 2
        x = x - x.mean(0)
        l, U = torch.linalg.eigh(x.mT @ x / len(x))
        loss = ((U * l.rsqrt()) @ U.mT).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    except Exception:
        print("caught")
    print("step", step)
if options.fail:
    raise ValueError("of the script itself")
print(helper.NAME, Path(sys.argv[0]).name, __name__)
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "helper.py").write_text("NAME = 'a module beside it'")
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    yield path
    sys.modules.pop("helper", None)


def test_a_healthy_script_runs_to_its_end(script, capsys):
    before = sys.argv, list(sys.path)
    assert run_script(script) == 0
    text = capsys.readouterr().out
    assert "step 19\na module beside it train.py __main__" in text
    assert "20 backward passes of" in text
    assert "20 decompositions in 1 place of the code, all healthy." in text
    assert (sys.argv, sys.path) == before
    assert torch._C._len_torch_function_stack() == 0


def test_it_stops_at_the_first_nan(script, capsys):
    assert run_script(script, ["--samples", "5"]) == 1
    text = capsys.readouterr().out
    assert "step" not in text
    assert "caught" not in text
    assert "1 backward pass of" in text
    assert "SINGULAR: torch.linalg.eigh (" in text
    assert f"{script.name}:18" in text
    assert "matrix_inv_sqrth" in text


def test_it_stops_after_so_many_passes(script, capsys):
    assert run_script(script, passes=3) == 0
    text = capsys.readouterr().out
    assert "step 1\n" in text
    assert "step 2\n" not in text


def test_nothing_is_analysed_before_the_end(script, monkeypatch):
    settle, seen = Record.settle, []
    monkeypatch.setattr(Record, "settle", lambda record: (seen.append(len(record.calls)), settle(record))[1])
    run_script(script, passes=4)
    assert set(seen) == {4}


def test_a_script_that_fails(script, capsys):
    assert run_script(script, ["--fail"]) == 1
    printed = capsys.readouterr()
    assert "ValueError: of the script itself" in printed.err
    assert "20 decompositions in 1 place" in printed.out


def test_a_script_that_exits(tmp_path, capsys):
    path = tmp_path / "exits.py"
    path.write_text("import sys; sys.exit(3)")
    assert run_script(path) == 1
    path.write_text("import sys; sys.exit()")
    assert run_script(path) == 0
    assert "No decomposition was seen." in capsys.readouterr().out


def test_bad_input(tmp_path, script, capsys):
    with pytest.raises(ArgumentError, match="no script"):
        run_script(tmp_path / "nothing.py")
    with pytest.raises(ArgumentError, match="passes >= 1"):
        run_script(script, passes=0)
    with pytest.raises(SystemExit) as ended:
        main(["nothing.py"])
    assert ended.value.code == 2
    assert "nothing.py" in capsys.readouterr().err


def test_the_module_is_a_command(script):
    command = [sys.executable, "-m", "orthocond.diagnosis", "--passes", "2", script, "--samples", "30"]
    root = Path(__file__).parents[2] / "src"
    done = subprocess.run(
        command, capture_output=True, text=True, env={"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert "2 backward passes" in done.stdout


def test_the_laboratory_has_the_same_command(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["orthocond", "diagnose", "--passes", "2", str(script), "--samples", "5"])
    with pytest.raises(SystemExit) as ended:
        lab_main()
    assert ended.value.code == 1
    assert "SINGULAR" in capsys.readouterr().out
