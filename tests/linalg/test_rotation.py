"""The nearest rotation: value, derivatives of every kind, degenerate input, transforms."""

import pytest
import roma
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

from orthocond.errors import DtypeError, NonFiniteError
from orthocond.linalg import _jacobi as jacobi
from orthocond.linalg import nearest_orthogonal, nearest_rotation

from cases import hostile, noise, rotation

F64 = torch.float64


def oracle(A):
    U, _, Vh = torch.linalg.svd(A.double())
    signs = torch.ones(A.shape[:-1], dtype=F64)
    signs[..., -1] = torch.linalg.det(U @ Vh).sign()
    return (U * signs.unsqueeze(-2)) @ Vh


def a_rotation(d, seed=0):
    Q = rotation(d, seed=seed)
    Q[:, 0] *= torch.linalg.det(Q).sign()
    return Q


def with_values(values, seed=0):
    d = len(values)
    return a_rotation(d, seed) * torch.tensor(values, dtype=F64) @ a_rotation(d, seed + 1).mT


DIFFERENTIABLE = {
    "identity": torch.eye(3, dtype=F64),
    "an exact rotation": a_rotation(3),
    "a reflection": with_values([3.0, 2.0, -1.0]),
    "repeated singular values": with_values([2.0, 2.0, 1.0]),
    "repeated, reflected": with_values([2.0, 2.0, -1.0]),
    "rank d - 1": with_values([2.0, 1.0, 0.0]),
    "1x1": torch.tensor([[-2.0]], dtype=F64),
    "2x2": with_values([2.0, -1.0]),
    "6x6": with_values([3.0, 3.0, 2.0, 1.5, 1.0, -0.5]),
    "tall": noise(5, 3, dtype=F64),
    "wide, in a batch": noise(2, 2, 4, dtype=F64),
    "many": noise(70, 3, 3, dtype=F64),
}


@pytest.mark.parametrize("d", [1, 2, 3, 6, 64])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (F64, 1e-12)])
@pytest.mark.parametrize("batch", [(), (5,), (2, 50)], ids=str)
def test_value(d, dtype, bound, batch):
    # Away from reflections without a unique answer, where two algorithms may differ.
    A = noise(*batch, d, d, dtype=dtype) + 2 * torch.eye(d, dtype=dtype)
    R, margin = nearest_rotation(A, return_margin=True)
    condition = 1 / margin.clamp(min=1e-3).min().item()
    assert R.dtype == dtype
    assert (R - oracle(A)).abs().max() < bound * condition
    assert (torch.linalg.det(R.double()) - 1).abs().max() < 10 * d * torch.finfo(dtype).eps


@pytest.mark.parametrize("batch", [5, 500])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (F64, 1e-12)])
def test_agrees_with_roma(batch, dtype, bound):
    A = noise(batch, 3, 3, dtype=dtype)
    R, margin = nearest_rotation(A, return_margin=True)
    difference = (R - roma.special_procrustes(A, method="svd")).abs().amax((-2, -1))
    assert (difference * margin.clamp(max=1)).max() < bound


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_derivatives(name):
    A = DIFFERENTIABLE[name].clone().requires_grad_()
    if name == "many":
        A = A.detach()[:1].requires_grad_()

        def function(one):  # in a batch that is decomposed together
            return nearest_rotation(torch.cat([one, DIFFERENTIABLE["many"]]))[:1]
    else:
        function = nearest_rotation
    assert gradcheck(function, A, check_forward_ad=True, check_batched_grad=name != "many")
    assert gradgradcheck(function, A, check_fwd_over_rev=True)


POINTS = {
    "identity": lambda d: torch.eye(d, dtype=F64),
    "an exact rotation": a_rotation,
    "a reflection": lambda d: with_values([*torch.linspace(3, 2, d - 1).tolist(), -1.0]),
    "repeated singular values": lambda d: with_values([2.0] * (d - d // 2) + [1.0] * (d // 2)),
    "repeated, reflected": lambda d: with_values([2.0] * (d - 1) + [-1.0]),
    "tall": lambda d: noise(d + 2, d, dtype=F64),
    "wide": lambda d: noise(d, d + 1, dtype=F64),
    "tall, repeated singular values": lambda d: with_values([2.0] * (d + 1))[:, :d],
}


@pytest.mark.parametrize("d", [2, 3, 6, 64])
@pytest.mark.parametrize("point", POINTS)
def test_derivatives_in_every_dimension(point, d):
    A = POINTS[point](d).requires_grad_()
    assert gradcheck(nearest_rotation, A, fast_mode=d > 3)
    assert gradgradcheck(nearest_rotation, A, fast_mode=d > 3)


def test_third_derivatives():
    A = with_values([2.0, 1.0, 0.5])
    once = torch.func.jacfwd(lambda A: nearest_rotation(A)[0, 1])
    thrice = torch.func.jacrev(torch.func.jacfwd(once))(A)
    h = 1e-4
    step = torch.zeros(3, 3, dtype=F64)
    step[1, 2] = h
    twice = torch.func.jacrev(once)
    assert torch.allclose(thrice[..., 1, 2], (twice(A + step) - twice(A - step)) / (2 * h), atol=1e-5)


def test_the_margin_says_how_near_the_jump_is():
    for values, expected in [([2.0, 1.0, 0.5], 0.75), ([2.0, 1.0, -0.5], 0.25), ([2.0, 1.0, -1.0], 0.0)]:
        margin = nearest_rotation(with_values(values), return_margin=True)[1]
        assert abs(margin.item() - expected) < 1e-12
    assert nearest_rotation(torch.zeros(2, 2), return_margin=True)[1] == 0
    assert nearest_rotation(torch.ones(1, 1), return_margin=True)[1] == 2
    tall = torch.diag(torch.tensor([4.0, 2.0, 1.0]))[:, :2]
    assert nearest_rotation(tall, return_margin=True)[1] == 0.5


@pytest.mark.parametrize("batch", [1, 100])
def test_where_there_is_no_derivative_it_is_bounded(batch):
    A = with_values([2.0, 1.0, -1.0]).expand(batch, 3, 3).clone().requires_grad_()
    nearest_rotation(A).pow(3).sum().backward()
    assert A.grad.norm(dim=(-2, -1)).max() < 20


@pytest.mark.parametrize("batch", [1, 100])
@pytest.mark.parametrize("d", [2, 3, 4])
def test_zero_gives_the_identity_and_no_gradient(batch, d):
    A = torch.zeros(batch, d, d, requires_grad=True)
    R = nearest_rotation(A)
    assert torch.equal(R, torch.eye(d).expand(batch, d, d))
    R.pow(3).sum().backward()
    assert not A.grad.any()


SPECIAL = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-30, 1e30, 1e-7, 3e38, 1e-45])
ENTRY = st.one_of(SPECIAL, st.floats(-1e6, 1e6, width=32))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(ENTRY, min_size=9, max_size=9), min_size=1, max_size=3), st.booleans())
def test_hostile_matrices(rows, many):
    A = torch.tensor(rows).view(-1, 3, 3)
    if many:
        A = A.repeat(70, 1, 1)
    A.requires_grad_()
    R = nearest_rotation(A)
    G = torch.autograd.grad(R.pow(3).sum(), A)[0]
    assert torch.isfinite(G).all()
    assert (R.mT @ R - torch.eye(3)).abs().max() < 1e-5
    assert (torch.linalg.det(R) - 1).abs().max() < 1e-5


@pytest.mark.parametrize("d", [2, 3, 4, 6])
@pytest.mark.parametrize("batch", [10, 1250], ids=["by LAPACK", "together"])
def test_ten_thousand_hostile_matrices(d, batch):
    for dtype in (torch.float32, F64):
        for A in hostile(1250, d, dtype, seed=d).split(batch):
            A.requires_grad_()
            R, margin = nearest_rotation(A, return_margin=True)
            (G,) = torch.autograd.grad((R.pow(3) * torch.arange(1.0, 1 + d).to(R)).sum(), A)
            assert R.isfinite().all()
            assert margin.isfinite().all()
            assert G.isfinite().all()
            assert (torch.linalg.det(R.double()) - 1).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types(dtype):
    A = noise(4, 3, 3, dtype=dtype).requires_grad_()
    R = nearest_rotation(A)
    assert R.dtype == dtype
    assert (R - oracle(A.detach())).abs().max() < 2 * torch.finfo(dtype).eps
    R[..., 0].sum().backward()
    assert A.grad.dtype == dtype
    assert torch.isfinite(A.grad).all()


def test_vmap_and_compile():
    A = noise(70, 3, 3)
    assert torch.allclose(torch.vmap(nearest_rotation)(A), nearest_rotation(A), atol=1e-6)
    compiled = torch.compile(nearest_rotation, fullgraph=True)
    one, other = (A.clone().requires_grad_() for _ in range(2))
    for function, x in ((compiled, one), (nearest_rotation, other)):
        function(x)[..., 0].sum().backward()
    assert torch.allclose(one.grad, other.grad, atol=1e-5)


def test_a_matrix_is_independent_of_its_batch_and_unchanged():
    A = noise(100, 3, 3, dtype=F64)
    before = A.clone()
    assert torch.allclose(nearest_rotation(A)[7], nearest_rotation(A[7]), atol=1e-13)
    assert torch.equal(A, before)


def test_rectangular_matrices_get_orthonormal_columns():
    A = noise(5, 3)
    assert torch.allclose(nearest_rotation(A), nearest_orthogonal(A), atol=1e-6)


def test_what_jacobi_does_not_solve_goes_to_lapack(monkeypatch):
    A = noise(100, 3, 3, dtype=F64)
    expected = nearest_rotation(A)
    monkeypatch.setattr(jacobi, "_MAX_SWEEPS", 1)
    assert torch.allclose(nearest_rotation(A), expected, atol=1e-12)


def test_bad_input():
    with pytest.raises(DtypeError, match="nearest_rotation"):
        nearest_rotation(torch.ones(3, 3, dtype=torch.long))
    with pytest.raises(NonFiniteError):
        nearest_rotation(torch.full((3, 3), torch.nan))
    assert nearest_rotation(torch.zeros(0, 3, 3)).shape == (0, 3, 3)
