"""The reproductions: each gets the right verdict, and the advice repairs what can be repaired."""

import re

import pytest
import torch

import orthocond
from orthocond import linalg

from cases import noise
from corpus import CASES, Case

REPAIRABLE = [case for case in CASES if case.repaired is not None]


def each(cases):
    marks = [[pytest.mark.half_products] if case.half_products else [] for case in cases]
    parameters = [pytest.param(case, id=case.name, marks=mark) for case, mark in zip(cases, marks, strict=True)]
    return pytest.mark.parametrize("case", parameters)


def diagnosed(case: Case):
    A = case.start().requires_grad_()
    diagnosis = orthocond.diagnose()
    try:
        with diagnosis:
            case.loss(A).backward()
        assert not case.raises
    except RuntimeError:
        assert case.raises
    return diagnosis


@each(CASES)
def test_verdict(case):
    diagnosis = diagnosed(case)
    (found,) = diagnosis.findings
    assert found.verdict == case.verdict, str(diagnosis)
    assert not diagnosis.notes
    if found.gradient_finite is not None:
        assert found.consistent is case.consistent
    assert case.advice in found.advice
    assert not {"{", "}"} & set(found.reason), "a name in braces was not filled in"
    assert (found.verdict == "healthy") == (found.advice == "")


@each([case for case in CASES if case.advice])
def test_the_advice_names_functions_that_exist(case):
    (found,) = diagnosed(case).findings
    for name in re.findall(r"orthocond\.linalg\.(\w+)", found.advice):
        assert hasattr(linalg, name), name


@each(REPAIRABLE)
def test_the_advice_makes_the_gradient_finite_and_right(case):
    """Against central differences in float64: of the original where its values are right, else of the repair."""
    A = case.start().requires_grad_()
    (G,) = torch.autograd.grad(case.repaired(A), A)
    assert G.isfinite().all()
    wide = case.start().double()
    function = case.loss if case.verdict == "ties" else case.repaired
    for seed in range(3):
        D = noise(*wide.shape, dtype=torch.float64, seed=seed)
        D = D + D.mT if case.symmetric else D
        D, h = D / D.norm(), 1e-5
        difference = (function(wide + h * D) - function(wide - h * D)) / (2 * h)
        error = (difference - (G.double() * D).sum()).abs() / G.double().norm()
        assert error < (1e-6 if A.dtype == torch.float64 else 3e-3)


def test_every_case_cites_a_thread():
    assert len({case.thread for case in CASES}) >= 20
    assert all(re.fullmatch(r"https://github.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", case.thread) for case in CASES)
    assert len({case.name for case in CASES}) == len(CASES)
