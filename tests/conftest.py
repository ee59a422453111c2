"""What must be known before torch is imported, and before a test runs: what torch can do on this CPU."""

import importlib.util
from pathlib import Path

import pytest


def _processor():
    """Load ``orthocond.lab.processor`` by its path: importing the package would import torch."""
    package = Path(importlib.util.find_spec("orthocond").origin).parent
    spec = importlib.util.spec_from_file_location("processor", package / "lab" / "processor.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PROCESSOR = _processor()
PROCESSOR.prepare()  # in the environment: workers and processes that tests start inherit it


# What needs more than torch and the packages of the extra "test": the laboratory, the site, the built package, tools.
BEYOND_THE_LIBRARY = {
    "lab",
    "layering.py",
    "test_docs.py",
    "test_examples.py",
    "test_layering.py",
    "test_notebooks.py",
    "test_package.py",
    "test_pictures.py",
    "test_site.py",
    "test_study.py",
}


def pytest_addoption(parser):
    parser.addoption("--library", action="store_true", help="the library's tests alone, for other versions of torch")


def pytest_ignore_collect(collection_path, config):
    if config.getoption("--library") and collection_path.name in BEYOND_THE_LIBRARY:
        return True
    return None


def pytest_configure(config):
    config.addinivalue_line("markers", "half_products: needs matrix products or convolutions in half precision")


def pytest_report_header():
    return f"what torch can do on this CPU: {PROCESSOR.prepare()} ({PROCESSOR.ANSWER})"


def pytest_runtest_setup(item):
    if item.get_closest_marker("half_products") and not PROCESSOR.has_half_products():
        pytest.skip(PROCESSOR.reason())


@pytest.fixture(autouse=True)
def every_warning_is_new():
    """What the library says once in a process, it says once in a test."""
    from orthocond.linalg import _decompose

    _decompose._warned.clear()
