"""Eigenvalues below a known noise are dropped, forward and backward."""

import pytest
import torch

from orthocond.errors import NonFiniteError
from orthocond.linalg import SOLVERS
from orthocond.linalg._roots import spectral
from orthocond.linalg._spectrum import spectrum_of

from cases import noise, rotation

SPECTRUM = torch.tensor([4.0, 1.0, 1e-3, 2e-6, 1e-7], dtype=torch.float64)
U = rotation(5)


def with_floor(A, floor, *, solver="eigh", eps=0.0, rtol=None):
    options = {"solver": solver, "gradient": "exact", "eps": eps, "rtol": rtol}
    return spectral("test", A, ("sqrt", "inv_sqrt"), **options, floor=floor)[0]


def matrix(smallest_kept=1e-3):
    return (U * torch.where(SPECTRUM == 1e-3, smallest_kept, SPECTRUM)) @ U.mT


@pytest.mark.parametrize("solver", ["eigh", "svd"])
@pytest.mark.parametrize("batch", [(), (3,), (2, 2)])
def test_what_is_at_or_below_the_floor_is_dropped(solver, batch):
    A, floor = matrix().expand(*batch, 5, 5), torch.full(batch, 5e-6, dtype=torch.float64)
    kept = torch.tensor([1, 1, 1, 0, 0]).double()
    Q, S = with_floor(A, floor, solver=solver)
    assert torch.allclose(Q, ((U * SPECTRUM.sqrt() * kept) @ U.mT).expand_as(A))
    assert torch.allclose(S, ((U * SPECTRUM.rsqrt() * kept) @ U.mT).expand_as(A), atol=1e-6)


def test_each_matrix_has_its_own():
    A, floor = matrix().expand(3, 5, 5), torch.tensor([0.0, 5e-6, 10.0], dtype=torch.float64)
    _, S = with_floor(A, floor)
    for alone, value in zip(floor, S, strict=True):
        assert torch.allclose(with_floor(matrix(), alone)[1], value)
    assert torch.linalg.matrix_rank(S).tolist() == [5, 3, 0]
    mapped = torch.vmap(lambda A, floor: with_floor(A, floor)[1])(A, floor)
    assert torch.allclose(mapped, S)


@pytest.mark.parametrize("rtol", [None, 1e-9])
def test_an_eps_that_outweighs_the_noise_leaves_all_as_it_is(rtol):
    floor = torch.tensor(5e-6, dtype=torch.float64)
    for found, plain in zip(
        with_floor(matrix(), floor, eps=1e-5, rtol=rtol), with_floor(matrix(), None, eps=1e-5, rtol=rtol), strict=True
    ):
        assert torch.equal(found, plain)
    _, S = with_floor(matrix(), floor, eps=1e-6, rtol=rtol)  # here it doesn't
    assert torch.linalg.matrix_rank(S).item() == 3


@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_gradients_of_both_orders(eps):
    # Differences of 1e-6 can't follow the second derivative at 1e-3, of size 1e7, to the tolerance.
    A, floor = matrix(smallest_kept=0.1).requires_grad_(), torch.tensor(5e-4, dtype=torch.float64)
    function = lambda A: with_floor((A + A.mT) / 2, floor, eps=eps)
    assert torch.autograd.gradcheck(function, A, atol=1e-4)
    assert torch.autograd.gradgradcheck(function, A, atol=1e-3)


@pytest.mark.parametrize("solver", [name for name, solver in SOLVERS.items() if not solver.has_eigenvalues])
def test_solvers_without_eigenvalues_drop_what_is_nothing_but_noise(solver):
    A = torch.stack([matrix()[:3, :3], 1e-9 * matrix()[:3, :3]]).requires_grad_()
    Q, S = with_floor(A, torch.full((2,), 1e-6, dtype=torch.float64), solver=solver)
    assert torch.allclose(Q[0], with_floor(A[:1], None, solver=solver)[0][0])
    assert not Q[1].any()
    assert not S[1].any()
    (Q + S).sum().backward()
    assert A.grad[0].any()
    assert not A.grad[1].any()


def test_rank_and_condition_number_know_the_floor():
    found = spectrum_of(SPECTRUM.expand(2, 5), eps=0.0, rtol=0.0, floor=torch.tensor([5e-6, 10.0]))
    assert found.rank.tolist() == [3, 0]
    assert found.cond_support.tolist() == pytest.approx([4000.0, 1.0])


def test_compiled_with_a_floor():
    A, floor = matrix().requires_grad_(), torch.tensor(5e-6, dtype=torch.float64)
    function = lambda A, floor: with_floor(A, floor)[1]
    G = noise(5, 5, dtype=torch.float64)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    found, truth = (torch.autograd.grad(f(A, floor), A, G)[0] for f in (compiled, function))
    assert torch.allclose(found, truth)


@pytest.mark.parametrize("solver", SOLVERS)
def test_nan_is_no_noise(solver):
    A, floor = matrix().repeat(2, 1, 1), torch.tensor([0.0, torch.nan], dtype=torch.float64)
    A[1] = torch.nan
    with pytest.raises(NonFiniteError, match=r"matrix \(1,\) of the batch \(2,\)"):
        with_floor(A, floor, solver=solver)
