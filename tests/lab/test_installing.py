"""The advice to install an extra is true for whoever reads it, wherever the package came from."""

import json
from importlib import metadata
from pathlib import Path

import pytest

import orthocond.lab.installing
from orthocond.lab.installing import install_command


class Distribution:
    def __init__(self, origin):
        self.origin = origin

    def read_text(self, name):
        assert name == "direct_url.json"
        return None if self.origin is None else json.dumps(self.origin)


@pytest.fixture
def installed_from(monkeypatch):
    def install(origin):
        monkeypatch.setattr(metadata, "distribution", lambda name: Distribution(origin))

    return install


def test_from_the_index(installed_from):
    installed_from(None)
    assert install_command("lab") == "pip install 'orthocond[lab]'"


def test_from_a_clone(installed_from, tmp_path, monkeypatch):
    clone = tmp_path / "a clone"
    clone.mkdir()
    installed_from({"url": clone.as_uri(), "dir_info": {"editable": True}})
    assert install_command("lab") == f"pip install -e '{clone}[lab]'"
    monkeypatch.chdir(clone)
    assert install_command("ray") == "pip install -e '.[ray]'"
    installed_from({"url": clone.as_uri(), "dir_info": {}})
    assert install_command("lab") == "pip install '.[lab]'"


def test_from_a_repository_or_an_archive(installed_from):
    installed_from({"url": "https://example.org/o.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}})
    assert install_command("lab") == "pip install 'orthocond[lab] @ git+https://example.org/o.git@abc'"
    installed_from({"url": "https://example.org/orthocond-1.whl", "archive_info": {}})
    assert install_command("lab") == "pip install 'orthocond[lab] @ https://example.org/orthocond-1.whl'"


def test_of_sources_that_were_never_installed(monkeypatch, tmp_path):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    root = Path(orthocond.lab.installing.__file__).parents[3]
    assert install_command("lab") == f"pip install -e '{root}[lab]'" or Path.cwd() == root
    monkeypatch.setattr(orthocond.lab.installing, "__file__", str(tmp_path / "site" / "a" / "b" / "installing.py"))
    assert install_command("lab") == "pip install 'orthocond[lab]'"


def test_this_installation(monkeypatch):
    """pip itself says where it came from."""
    recorded = metadata.distribution("orthocond").read_text("direct_url.json")
    if recorded is None or "dir_info" not in json.loads(recorded):
        pytest.skip("this is not an installation from a clone")
    assert install_command("lab").endswith("[lab]'")
    assert "'orthocond[" not in install_command("lab")
