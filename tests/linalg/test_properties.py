"""Inputs that nobody thought of: nothing non-finite comes out, whatever goes in."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orthocond.linalg import SOLVERS, matrix_sqrth_pair, nearest_orthogonal


@st.composite
def covariances(draw):
    n = draw(st.integers(1, 9))
    batch = draw(st.sampled_from([(), (1,), (2,), (2, 2)]))
    rank = draw(st.integers(0, n))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    scale = 10.0 ** draw(st.floats(-20, 20))
    spread = 10.0 ** draw(st.floats(0, 14))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    l = spread ** -torch.rand(*batch, n, generator=generator, dtype=torch.float64)
    if draw(st.booleans()):  # ties
        l = l[..., :1].expand_as(l).clone()
    l[..., rank:] = 0
    U = torch.linalg.qr(torch.randn(*batch, n, n, generator=generator, dtype=torch.float64)).Q
    if draw(st.booleans()):
        U = torch.eye(n, dtype=torch.float64).expand_as(U)
    return (scale * (U * l.unsqueeze(-2)) @ U.mT).to(dtype)


@settings(max_examples=2000, deadline=None, derandomize=True)
@given(
    A=covariances(),
    eps=st.sampled_from([0.0, 1e-5]),
    rtol=st.sampled_from([None, 0.0, 1e-3]),
    solver=st.sampled_from(["eigh", "svd"]),
)
def test_values_and_gradients_are_finite(A, eps, rtol, solver):
    A.requires_grad_()
    Q, S = matrix_sqrth_pair(A, eps=eps, rtol=rtol, solver=solver)
    assert Q.isfinite().all()
    assert S.isfinite().all()
    (grad,) = torch.autograd.grad(
        (Q.double() / (1 + Q.abs().max())).sum() + (S.double() / (1 + S.abs().max())).sum(), A
    )
    assert grad.isfinite().all()


@pytest.mark.parametrize("solver", [name for name, solver in SOLVERS.items() if not solver.has_eigenvalues])
@settings(max_examples=200, deadline=None, derandomize=True)
@given(A=covariances())
def test_iterative_values_and_gradients_are_finite_with_eps(solver, A):
    A.requires_grad_()
    Q, S = matrix_sqrth_pair(A, eps=1e-5, solver=solver)
    assert Q.isfinite().all()
    assert S.isfinite().all()
    (grad,) = torch.autograd.grad((Q.double() / (1 + Q.abs().max())).sum() + S.double().sum(), A)
    assert grad.isfinite().all()


@settings(max_examples=300, deadline=None, derandomize=True)
@given(A=covariances(), solver=st.sampled_from(["gram", "svd", "newton_schulz"]))
def test_polar_factors_are_finite_and_no_longer_than_one(A, solver):
    A.requires_grad_()
    R = nearest_orthogonal(A, solver=solver)
    assert R.isfinite().all()
    assert torch.linalg.matrix_norm(R.detach().double(), 2).max() < 1.05
    (grad,) = torch.autograd.grad(R.double().sum(), A)
    assert grad.isfinite().all()
