"""A few trials of chaos; ``python tests/lab/chaos.py --minutes N --seed S`` is the long version."""

import os

import pytest
import torch

from chaos import Chaos


@pytest.mark.timeout(280)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="its processes kill themselves as POSIX does")
def test_nothing_is_lost_and_nothing_invented(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    threads = torch.get_num_threads()
    try:
        chaos = Chaos(tmp_path, seed=11)
        for number in range(10):
            chaos.trial(number)
    finally:
        torch.set_num_threads(threads)
    assert chaos.faults == []
    assert chaos.counts["damages"] >= 9
