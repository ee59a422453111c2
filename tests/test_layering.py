"""The contract of import-linter that private names stay in their package: what it finds, and what it leaves alone."""

from pathlib import Path

import pytest

from layering import crossings

FILES = {
    "house/_core/shared.py": "",
    "house/linalg/_roots.py": "from house._core.shared import anything",
    "house/nn/__init__.py": "from house.linalg import public\nfrom house.nn._norm import Norm",
    "house/nn/_norm.py": "from house import linalg\nfrom house.linalg import _secret\nlinalg._roots.sqrt, linalg.f",
    "house/lab/__init__.py": "from house._core import shared\nfrom house.lab._own import own\nimport torch._C",
    "house/lab/_own.py": "import house.linalg._roots as roots",
}


@pytest.fixture
def house(tmp_path):
    for name, text in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "house"


def test_private_names_of_other_packages_are_found(house):
    assert set(crossings(house, ["house.lab"])) == {
        "house.lab -> house._core.shared",
        "house.lab._own -> house.linalg._roots",
        "house.nn._norm -> house.linalg._secret",
        "house.nn._norm -> house.linalg._roots",
        "house.nn._norm -> house.linalg._roots.sqrt",
    }


def test_the_laboratory_and_the_integrations_have_no_exception():
    package = Path(__file__).parents[1] / "src" / "orthocond"
    sealed = ["orthocond.lab", "orthocond.integrations"]
    assert not [line for line in crossings(package, sealed) if line.startswith(tuple(sealed))]
