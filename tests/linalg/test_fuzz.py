"""A short run of the fuzzer; the long one is ``python tests/linalg/fuzz.py --matrices 100000``."""

import fuzz
import numpy as np
import pytest
import torch

from orthocond.linalg import _eigen

pytestmark = pytest.mark.skipif(not fuzz.IS_EXTENDED, reason="NumPy's longdouble is float64 on this machine")


@pytest.mark.parametrize("seed", [0, 1])
def test_nothing_is_wrong(seed):
    found = fuzz.fuzz(700, seed)
    assert found["matrices"] == 700
    assert found["wrong"] == 0
    assert found["false alarms"] == 0
    assert found["left to rounding noise, so only finite"] < 140


def test_the_fuzzer_sees_an_error(monkeypatch, capsys):
    right = _eigen.function_of
    monkeypatch.setattr(_eigen, "function_of", lambda *arguments: right(*arguments) * (1 + 1e-4))
    assert fuzz.fuzz(300, 0)["wrong"] > 30
    assert "wrong" in capsys.readouterr().err


def test_the_oracle_decomposes():
    A = torch.randn(5, 7, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    A = (A + A.mT).numpy().astype(np.longdouble)
    l, U = fuzz.jacobi(A)
    assert (np.diff(l, axis=1) >= 0).all()
    unit = 100 * np.finfo(np.longdouble).eps
    assert np.abs(U @ (l[:, :, None] * U.swapaxes(1, 2)) - A).max() < unit * 10
    assert np.abs(U.swapaxes(1, 2) @ U - np.eye(7)).max() < unit
