"""The probe of the CPU: what it answers where torch works, works under a setting, or doesn't work; and who heeds it."""

import os
import platform
import subprocess
import sys

import pytest
import torch

from orthocond.errors import ArgumentError
from orthocond.lab import processor
from orthocond.lab.bench import polar
from orthocond.lab.config import changed
from orthocond.lab.presets import preset
from orthocond.lab.train import train

ISA = "ONEDNN_MAX_CPU_ISA"


@pytest.fixture
def unknown(monkeypatch):
    """An environment in which nobody has asked yet."""
    for name in (processor.ANSWER, ISA):
        monkeypatch.setenv(name, "")  # so that what the test leaves there is taken back
        monkeypatch.delenv(name)


def works_under(*settings):
    """Return work that kills its process except under the settings, as SIGILL does."""
    return f"import os\nif os.environ.get({ISA!r}) not in {settings!r}: os.abort()"


CASES = {
    processor.PLAIN: (None, *processor.SETTINGS),
    **{setting: processor.SETTINGS[number:] for number, setting in enumerate(processor.SETTINGS)},
    processor.NOTHING: (),
}


@pytest.mark.parametrize("answer", CASES)
def test_the_strongest_setting_that_works_is_chosen_and_kept(unknown, monkeypatch, answer):
    monkeypatch.setattr(processor, "_WORK", works_under(*CASES[answer]))
    assert processor.prepare() == answer
    assert os.environ.get(ISA) == (answer if answer in processor.SETTINGS else None)
    monkeypatch.setattr(processor, "_WORK", "raise SystemExit(1)")  # it would have to ask again
    assert processor.prepare() == answer
    assert processor.has_half_products() == (answer != processor.NOTHING)


def test_an_exception_and_an_endless_trial_are_failures(unknown, monkeypatch):
    monkeypatch.setattr(processor, "_WORK", "raise RuntimeError('could not create a primitive')")
    assert processor.probe() == processor.NOTHING

    def endless(*_, timeout, **__):
        raise subprocess.TimeoutExpired("python", timeout)

    monkeypatch.setattr(subprocess, "run", endless)
    assert processor.probe() == processor.NOTHING


def test_the_real_work_is_done_where_it_can_be(monkeypatch):
    """The probe's program itself has no mistake: it answers what the tests were started with."""
    monkeypatch.delenv(processor.ANSWER)
    if (answer := processor.probe()) == processor.NOTHING:
        pytest.skip(processor.reason())
    assert answer in (processor.PLAIN, *processor.SETTINGS)


def test_an_unknown_answer_is_refused(monkeypatch):
    monkeypatch.setenv(processor.ANSWER, "AMX")
    with pytest.raises(ValueError, match=r"ORTHOCOND_CPU is one of plain, .*, got 'AMX'; unset it"):
        processor.prepare()


def test_the_answer_reaches_the_processes_that_tests_start():
    answer = processor.prepare()
    script = f"import os; print(os.environ[{processor.ANSWER!r}], os.environ.get({ISA!r}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    inherited, setting = done.stdout.split()
    assert inherited == answer
    assert answer not in processor.SETTINGS or setting == answer


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available(),
    reason="ONEDNN_MAX_CPU_ISA is for oneDNN on x86-64",
)
def test_onednn_heeds_a_setting_that_comes_after_the_import_of_torch():
    script = (
        f"import os, torch; os.environ.update({ISA}='SSE41', ONEDNN_VERBOSE='1');"
        "torch.nn.functional.conv2d(torch.ones(2, 8, 16, 16), torch.ones(16, 8, 3, 3))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "isa:Intel SSE4.1" in done.stdout


def test_who_needs_half_products_goes_without_them(monkeypatch, tmp_path):
    monkeypatch.setenv(processor.ANSWER, processor.NOTHING)
    names = set(polar.contestants(polar.Cell(64, 64)))
    assert "Muon's five steps" not in names
    assert "Muon's five steps, float32" in names
    config = changed(preset("dbn-digits"), {"precision": "bf16-mixed", "accelerator": "cpu", "steps": 1})
    with pytest.raises(ArgumentError, match="can't train with the precision bf16-mixed: torch can't multiply in half"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.half_products
def test_where_they_work_muon_competes():
    assert "Muon's five steps" in polar.contestants(polar.Cell(64, 64))
