"""The examples run."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(*command):
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("name", "expected"),
    [("own_model.py", "largest difference after folding"), ("own_optimizer.py", "still orthogonal: True")],
)
def test_examples_run(name, expected):
    assert expected in run(EXAMPLES / name)


def test_the_ddp_example_runs_on_two_processes():
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    assert "the same weights on all processes: True" in run(*launcher, EXAMPLES / "ddp.py")
