"""The package as a user gets it: a wheel, torch, and nothing else."""

import os
import re
import subprocess
import sys
import tarfile
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


def test_the_oldest_torch_is_the_same_everywhere():
    (oldest,) = re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8")
    assert re.findall(r"torch==([\d.]+)", workflow) == [f"{oldest}.0"]
    assert f"torch=={oldest}" in run("make", "--dry-run", "--always-make", "compat", cwd=ROOT)
    assert f"Why PyTorch {oldest} is the oldest" in (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")


@pytest.mark.timeout(600)
def test_the_sdist_has_what_its_tests_need(tmp_path):
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path, cwd=ROOT)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as sdist:
        sdist.extractall(tmp_path, filter="data")
    unpacked = tmp_path / archive.name.removesuffix(".tar.gz")
    tracked = run("git", "ls-files", cwd=ROOT).splitlines() if (ROOT / ".git").exists() else []
    for_developers = (".ci/", ".gitignore", ".pre-commit-config.yaml")
    left_out = [name for name in tracked if not (unpacked / name).exists() and not name.startswith(for_developers)]
    assert not left_out
    environment = os.environ | {"PYTHONPATH": str(unpacked / "src")}
    sample = ["tests/linalg/test_registries.py", "tests/test_study.py"]
    told = run(sys.executable, "-m", "pytest", *sample, "-q", "-p", "no:cacheprovider", cwd=unpacked, env=environment)
    assert " passed" in told


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
    told = subprocess.run([python.with_name("orthocond"), "demo"], capture_output=True, text=True)
    sentence = told.stderr.splitlines()[-1]  # after torch's own warning that there is no NumPy
    assert (told.returncode, sentence.partition(" needs")[0]) == (1, "orthocond: the laboratory"), told.stderr
    version, total = run(python, "-c", code, cwd=tmp_path).split()
    assert total == "4.0"
    assert version in wheel.name
