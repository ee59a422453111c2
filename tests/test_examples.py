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
    [
        ("own_model.py", "largest difference after folding"),
        ("own_optimizer.py", "still orthogonal: True"),
        ("pose_from_points.py", "the network's gradient, by hand: nan"),
    ],
)
def test_examples_run(name, expected):
    assert expected in run(EXAMPLES / name)


def test_learned_weights_align_in_spite_of_outliers(tmp_path):
    output = run(EXAMPLES / "alignment_with_outliers.py", tmp_path / "picture.png")
    plain, learned = (float(line.split()[-2]) for line in output.splitlines() if line.startswith("median error"))
    assert learned < 0.2 * plain
    assert (tmp_path / "picture.png").stat().st_size > 1000


def test_a_generator_learns_by_the_frechet_distance(tmp_path):
    output = run(EXAMPLES / "digits_generator.py", tmp_path / "picture.png")
    assert "usual formula: distance 11.4" in output
    assert "norm of the gradient nan" in output
    before, after = (float(line.split()[-1]) for line in output.splitlines() if line.startswith("distance"))
    assert after < 0.1 * before
    assert (tmp_path / "picture.png").stat().st_size > 1000


def test_the_ddp_example_runs_on_two_processes():
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    assert "the same weights on all processes: True" in run(*launcher, EXAMPLES / "ddp.py")


def test_callbacks_of_lightning_on_two_processes(tmp_path):
    assert "the same weights on all processes: True" in run(EXAMPLES / "with_lightning.py", 2, tmp_path)


def test_callbacks_of_transformers_on_two_processes(tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    assert "the same weights on all processes: True" in run(*launcher, EXAMPLES / "with_transformers.py", tmp_path)
