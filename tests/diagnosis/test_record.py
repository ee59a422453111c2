"""Measurements wait until somebody reads them; what is read is of the time of the call."""

import pytest
import torch

import orthocond
from orthocond.diagnosis import _record, _watch

from cases import matrices


def watched(spectrum="repeated", *, changes=False):
    """A diagnosis of one pass through eigh, svd and cholesky; ``changes``: then every tensor of it is overwritten."""
    A = matrices(spectrum, 6, (2,), torch.float64).requires_grad_()
    with orthocond.diagnose() as diagnosis:
        l, U = torch.linalg.eigh(A)
        W, s, Vh = torch.linalg.svd(A)
        L = torch.linalg.cholesky(A + torch.eye(6))
        (
            U @ torch.diag_embed(l.clamp(min=1e-3).sqrt()) @ U.mT + W @ torch.diag_embed(s) @ Vh + L
        ).square().sum().backward()
    if changes:
        with torch.no_grad():
            for X in (A, A.grad, l, U, W, s, Vh, L):
                X.fill_(torch.nan)
    return diagnosis


@pytest.mark.parametrize("spectrum", ["spread 1e2", "repeated", "rank-deficient"])
def test_what_the_tensors_hold_later_is_not_read(spectrum):
    at_once = watched(spectrum).to_dicts()
    later = watched(spectrum, changes=True).to_dicts()
    assert len(later) == 3
    assert repr(later) == repr(at_once)  # NaN is not equal to itself


def test_nothing_is_measured_before_it_is_read_and_nothing_twice(monkeypatch):
    measured = []
    for name in ("measure", "measure_gradient"):
        true = getattr(_watch, name)
        monkeypatch.setattr(_watch, name, lambda *args, name=name, true=true: (measured.append(name), true(*args))[1])
    diagnosis = watched()
    assert not measured
    first = diagnosis.to_dicts()
    assert measured == ["measure"] * 3 + ["measure_gradient"] * 3
    assert diagnosis.to_dicts() == first
    assert len(measured) == 6


@pytest.mark.parametrize("held", [0, 1000, 4000])
def test_copies_are_bounded_and_the_findings_are_the_same(held, monkeypatch):
    expected = watched().to_dicts()
    monkeypatch.setattr(_record, "_HELD", held)
    diagnosis = watched()
    waiting = sum(_record._num_bytes(arguments) for _, arguments in diagnosis._record._waiting)
    assert waiting <= held
    assert diagnosis.to_dicts() == expected


def test_reading_inside_adds_no_calls():
    A = torch.eye(3, requires_grad=True)
    with orthocond.diagnose() as outer, orthocond.diagnose() as inner:
        torch.linalg.eigvalsh(A).sum().backward()
        assert len(inner.findings) == len(inner.findings) == 1
        torch.linalg.pinv(A)
    assert [len(diagnosis.findings) for diagnosis in (outer, inner)] == [2, 2]
    assert not outer.notes
    assert not inner.notes
