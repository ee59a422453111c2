"""What the tests of several frameworks use."""

import pytest


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    """Weights & Biases without a network."""
    for name, value in {"MODE": "offline", "DIR": str(tmp_path), "SILENT": "true"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    module = pytest.importorskip(
        "wandb", reason="Weights & Biases isn't installed: pip install wandb (about 80 MB, so no test dependency)"
    )
    yield module
    module.finish()
    module.teardown()
