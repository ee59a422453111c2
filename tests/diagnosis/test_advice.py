"""Advice is code to paste: it runs as it is printed, also where the argument of the call is an expression."""

import contextlib

import pytest
import torch

import orthocond
from orthocond.diagnosis._report import _numbers

from cases import matrices


def advised(decompose):
    """The indented lines of the advice for what ``decompose()`` does."""
    with orthocond.diagnose() as diagnosis, contextlib.suppress(torch.linalg.LinAlgError):
        decompose().backward()
    (found,) = diagnosis.findings
    assert found.verdict != "healthy"
    return found, [line.strip() for line in found.advice.split("\n") if line.startswith("    ")]


def pasted(code, **names):
    return eval(code.partition(" = ")[2] or code, {"torch": torch, "orthocond": orthocond, **names})


def test_cholesky_of_an_expression():
    A, B = -torch.eye(3) / 2, torch.diag(torch.tensor([0.5, 1.5, 2.5])).requires_grad_()
    _, (root, shifted) = advised(lambda: torch.linalg.cholesky(A + B).sum())  # which is singular
    assert root == "Q = orthocond.linalg.matrix_sqrth(A + B)"
    assert torch.allclose(pasted(root, A=A, B=B).square(), A + B)
    assert torch.allclose(pasted(shifted, A=A, B=B).square(), A + B, atol=1e-4)


def test_low_rank_of_an_expression():
    A = (torch.ones(4, 3) * 2).requires_grad_()
    B = torch.ones(4, 3)

    def loss():
        U, S, Vh = torch.linalg.svd(A + B, full_matrices=False)
        return (U @ torch.diag(S) @ Vh).sum()

    _, (code,) = advised(loss)
    assert code.startswith("orthocond.linalg.spectral_projector((A + B) @ (A + B).mT, 1) @ (A + B)")
    assert torch.allclose(pasted(code, A=A, B=B), A + B, atol=1e-5)


def test_singular_values_are_not_called_eigenvalues():
    A = torch.eye(3, dtype=torch.float64).requires_grad_()
    found, (code,) = advised(lambda: torch.linalg.svdvals(A)[0])
    assert found.verdict == "ill-posed"
    assert pasted(code, A=A, k=2).item() == pytest.approx(2)
    assert "svdvals" in code
    with orthocond.diagnose() as diagnosis:
        torch.linalg.svdvals(A)
    assert "between singular values" in str(diagnosis)


def test_the_first_singular_vectors_are_the_largest():
    A = matrices("repeated", 4, (), torch.float64).requires_grad_()
    found, (code,) = advised(lambda: torch.linalg.svd(A)[0].sum())
    assert found.verdict == "ill-posed"
    assert code.endswith("# in place of U[:, :k]")
    assert "singular vectors" in _numbers(found)
    found, (code,) = advised(lambda: torch.linalg.eigh(A)[1].sum())
    assert code.endswith("# in place of U[:, -k:]")
