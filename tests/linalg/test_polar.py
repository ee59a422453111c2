"""The nearest orthogonal matrix: value, rank, gradient, fallback."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from orthocond.errors import ArgumentError, DtypeError, NonFiniteError
from orthocond.linalg import POLAR_SOLVERS, nearest_orthogonal

from cases import noise, rotation
from oracle import polar, relative_error

SHAPES = [(64, 27), (27, 64), (128, 512), (3, 64, 27), (2, 2, 5, 5), (1, 1), (7, 1)]
ACCURATE = [name for name, solver in POLAR_SOLVERS.items() if solver.has_rank]


def with_condition(shape, cond, dtype=torch.float32):
    *batch, m, n = shape
    k = min(m, n)
    U, V = rotation(m, tuple(batch))[..., :k], rotation(n, tuple(batch), seed=1)[..., :k]
    return ((U * torch.logspace(0, -torch.log10(torch.tensor(cond)).item(), k, dtype=torch.float64)) @ V.mT).to(dtype)


@pytest.mark.parametrize("solver", ACCURATE)
@pytest.mark.parametrize("cond", [1.0, 1e2, 1e4, 1e5])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_value_agrees_with_the_oracle(shape, cond, solver):
    A = with_condition(shape, cond)
    assert relative_error(nearest_orthogonal(A, solver=solver, rtol=1e-6), polar(A)) < 3e-6


@pytest.mark.parametrize("cond", [1.0, 1e2, 5e2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_newton_schulz_converges(shape, cond):
    A = with_condition(shape, cond)
    assert relative_error(nearest_orthogonal(A, solver="newton_schulz"), polar(A)) < 1e-4


@pytest.mark.parametrize("solver", POLAR_SOLVERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtype_is_kept(solver, dtype):
    A = noise(2, 4, 7, dtype=dtype)
    R = nearest_orthogonal(A, solver=solver)
    assert R.dtype == dtype
    assert relative_error(R, polar(A)) < max(2 * torch.finfo(dtype).eps, 1e-12)


@pytest.mark.parametrize("solver", ACCURATE)
def test_float64_is_accurate_to_its_own_precision(solver):
    A = with_condition((20, 30), 1e6, torch.float64)
    assert relative_error(nearest_orthogonal(A, solver=solver), polar(A)) < 1e-9


@pytest.mark.parametrize("solver", POLAR_SOLVERS)
def test_a_zero_matrix_stays_exactly_zero(solver):
    A = torch.zeros(3, 4, 5)
    A[1] = noise(4, 5)
    R = nearest_orthogonal(A, solver=solver)
    assert not R[0].any()
    assert not R[2].any()
    assert relative_error(R[1], polar(A[1])) < 1e-5


@pytest.mark.parametrize("solver", POLAR_SOLVERS)
def test_zero_singular_values_stay_zero(solver):
    A = noise(8, 3) @ noise(3, 20)
    assert torch.linalg.svdvals(nearest_orthogonal(A, solver=solver)).tolist() == pytest.approx(
        [1] * 3 + [0] * 5, abs=1e-3
    )


def test_gram_falls_back_to_svd_for_the_matrices_that_need_it(monkeypatch):
    from orthocond.linalg import _polar

    seen = []
    monkeypatch.setattr(
        _polar, "_by_svd", lambda A, rtol, original=_polar._by_svd: seen.append(len(A)) or original(A, rtol)
    )
    A = torch.stack([with_condition((6, 9), cond) for cond in (2.0, 3e5, 10.0)])
    assert relative_error(nearest_orthogonal(A, rtol=1e-7), polar(A)) < 3e-6
    assert seen == [1]


@pytest.mark.parametrize("solver", POLAR_SOLVERS)
@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (2, 3, 3)], ids=str)
def test_gradcheck_of_both_orders(shape, solver):
    A = noise(*shape, dtype=torch.float64).requires_grad_()
    function = lambda A: nearest_orthogonal(A, solver=solver)
    assert gradcheck(function, A)
    assert gradgradcheck(function, A)


def test_gradcheck_at_equal_singular_values():
    assert gradcheck(nearest_orthogonal, (2 * torch.eye(3, 4, dtype=torch.float64)).requires_grad_())


def test_each_matrix_is_independent_of_its_batch():
    A = noise(3, 4, 6)
    A[1] *= 1e8
    assert torch.allclose(nearest_orthogonal(A), torch.stack([nearest_orthogonal(a) for a in A]), atol=1e-6)


@pytest.mark.parametrize("seed", range(10))
def test_a_small_singular_value_of_float64_is_not_lost(seed):
    U, V = rotation(4, seed=seed), rotation(6, seed=seed + 1)[:, :4]
    A = (U * torch.tensor([1.0, 0.5, 0.1, 1e-9], dtype=torch.float64)) @ V.mT
    assert torch.linalg.svdvals(nearest_orthogonal(A)).tolist() == pytest.approx([1] * 4, abs=1e-6)


@pytest.mark.parametrize("solver", POLAR_SOLVERS)
@pytest.mark.parametrize(
    ("scale", "dtype"), [(1e-200, torch.float64), (1e200, torch.float64), (1e-38, torch.float32), (1e-3, torch.float16)]
)
def test_extreme_scales(solver, scale, dtype):
    A = (scale * noise(3, 5, dtype=torch.float64)).to(dtype).requires_grad_()
    R = nearest_orthogonal(A, solver=solver)
    assert relative_error(R.double() @ R.double().mT, torch.eye(3).double()) < max(1e-5, 10 * torch.finfo(dtype).eps)
    R.backward(100 * torch.ones_like(R))
    assert A.grad.isfinite().all()


@pytest.mark.parametrize("shape", [(64, 27), (27, 64), (1, 1)], ids=str)
@pytest.mark.parametrize("rtol", [None, 1e-2])
def test_one_matrix_with_and_without_a_gradient(shape, rtol):
    A = with_condition(shape, 1e3)
    found = nearest_orthogonal(A, rtol=rtol)
    assert torch.equal(found, nearest_orthogonal(A.requires_grad_(), rtol=rtol))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(found, nearest_orthogonal(A, rtol=rtol))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("solver", POLAR_SOLVERS)
def test_what_is_not_finite_is_counted_in_the_matrix_itself(solver, value, capfd):
    A = torch.ones(4, 3)
    A[1, 2] = value
    with pytest.raises(NonFiniteError, match="1 entries"):
        nearest_orthogonal(A, solver=solver)
    assert not capfd.readouterr().err  # MKL's complaints


def test_scale_does_not_matter():
    A = noise(4, 6)
    for scale in (1e-30, 1e30):
        assert torch.allclose(nearest_orthogonal(scale * A), nearest_orthogonal(A), atol=1e-6)


@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0), (0, 0)], ids=str)
def test_empty(shape):
    assert nearest_orthogonal(torch.ones(shape)).shape == shape


def test_bad_input():
    with pytest.raises(ArgumentError, match=r"expected matrices \(..., m, n\), got \(3,\)"):
        nearest_orthogonal(torch.ones(3))
    with pytest.raises(DtypeError):
        nearest_orthogonal(torch.ones(3, 3, dtype=torch.int))
    with pytest.raises(ArgumentError, match="choose one of gram, svd, newton_schulz"):
        nearest_orthogonal(torch.ones(3, 3), solver="qr")
    with pytest.raises(ArgumentError, match="can't tell the rank"):
        nearest_orthogonal(torch.ones(3, 3), solver="newton_schulz", rtol=0.1)
