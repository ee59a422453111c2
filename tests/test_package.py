"""The package as a user gets it: a wheel, torch, and nothing else."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FORBIDDEN = [
    "numpy",
    "scipy",
    "lightning_fabric",
    "datasets",
    "typer",
    "rich",
    "plotly",
    "matplotlib",
    "tensorboard",
    "sklearn",
    "ray",
]


def run(*command, **options):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_import_needs_torch_alone():
    """Whatever is installed, importing orthocond loads nothing that `import torch` doesn't load by itself."""
    code = "import sys, torch; before = set(sys.modules); import orthocond; print(*sorted(set(sys.modules) - before))"
    loaded = run(sys.executable, "-c", code).split()
    packages = {name.partition(".")[0] for name in loaded} - {"orthocond", "torch"}
    assert not packages - set(sys.stdlib_module_names)
    assert not any(name.startswith("orthocond.lab") for name in loaded)


def test_import_has_no_side_effects():
    assert run(sys.executable, "-W", "error", "-c", "import orthocond") == ""


@pytest.mark.timeout(600)
def test_the_wheel_installs_and_works_in_an_empty_environment(tmp_path):
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
    run(python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", wheel)
    installed = run(python, "-m", "pip", "list", "--format=freeze").lower()
    assert not [name for name in FORBIDDEN if f"\n{name}==" in installed]
    code = (
        "import torch, orthocond; from importlib.resources import files;"
        "assert files('orthocond').joinpath('py.typed').is_file();"
        "print(orthocond.__version__, orthocond.linalg.matrix_sqrth(4 * torch.eye(2)).sum().item())"
    )
    version, total = run(python, "-c", code, cwd=tmp_path).split()
    assert total == "4.0"
    assert version in wheel.name
