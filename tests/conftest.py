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


def pytest_configure(config):
    config.addinivalue_line("markers", "half_products: needs matrix products or convolutions in half precision")


def pytest_report_header():
    return f"what torch can do on this CPU: {PROCESSOR.prepare()} ({PROCESSOR.ANSWER})"


def pytest_runtest_setup(item):
    if item.get_closest_marker("half_products") and not PROCESSOR.has_half_products():
        pytest.skip(PROCESSOR.reason())
