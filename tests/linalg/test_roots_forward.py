"""Values of the roots against the float64 oracle, and what must not depend on what."""

import pytest
import torch

from orthocond.linalg import SOLVERS, covariance, matrix_inv_sqrth, matrix_sqrth, matrix_sqrth_pair

from cases import BATCHES, SPECTRA, matrices, rotation
from oracle import relative_error, root

EPS = 1e-5
ROOTS = {0.5: matrix_sqrth, -0.5: matrix_inv_sqrth}
EIGEN = [name for name, solver in SOLVERS.items() if solver.has_eigenvalues]
ITERATIVE = [name for name, solver in SOLVERS.items() if not solver.has_eigenvalues]


@pytest.mark.parametrize("solver", EIGEN)
@pytest.mark.parametrize("power", ROOTS)
@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_value_agrees_with_the_oracle(spectrum, batch, power, solver):
    A = matrices(spectrum, 64, batch)
    found = ROOTS[power](A, solver=solver, eps=EPS)
    assert found.shape == A.shape
    assert found.dtype == A.dtype
    assert relative_error(found, root(A, power, eps=EPS)) < 2e-6


@pytest.mark.parametrize("solver", SOLVERS)
def test_residual_of_a_covariance(solver):
    A = covariance(torch.randn(5, 16, 200, generator=torch.Generator().manual_seed(0)))
    Q, S = matrix_sqrth_pair(A, solver=solver)
    tolerance = 1e-5 if SOLVERS[solver].has_eigenvalues else 2e-2 if solver == "pade" else 1e-4
    assert relative_error(Q @ Q, A.double()) < tolerance
    assert relative_error(S @ A @ S, torch.eye(16).double().expand_as(A)) < tolerance


def newton_schulz_scalar(x, options):
    y, z = x, torch.ones_like(x)
    for _ in range(options["iterations"]):
        t = (3 - z * y) / 2
        y, z = y * t, t * z
    return y


def pade_scalar(x, options):
    t = ((1 - x.sqrt()) / (1 + x.sqrt())) ** (2 * options["degree"] + 1)
    return x.sqrt() * (1 + t) / (1 - t)


@pytest.mark.parametrize(("solver", "scalar"), [("newton_schulz", newton_schulz_scalar), ("pade", pade_scalar)])
@pytest.mark.parametrize("spectrum", ["spread 1e2", "spread 1e6", "clustered", "repeated", "identity"])
def test_approximation_has_the_error_it_declares(spectrum, solver, scalar):
    A = matrices(spectrum, 12, (3,), torch.float64)
    norm = torch.linalg.matrix_norm(A, keepdim=True)
    l, U = torch.linalg.eigh(A / norm)
    declared = (U * scalar(l, SOLVERS[solver].options).unsqueeze(-2)) @ U.mT * norm.sqrt()
    assert relative_error(matrix_sqrth(A, solver=solver), declared) < 1e-9


@pytest.mark.parametrize("solver", ["newton_schulz", "pade"])
def test_iterative_solvers_converge_with_more_steps(solver):
    A = matrices("spread 1e2", 8, (), torch.float64)
    options = "(iterations=30)" if solver == "newton_schulz" else "(degree=100)"
    Q, S = matrix_sqrth_pair(A, solver=solver + options)
    assert relative_error(Q, root(A, 0.5)) < 1e-9
    assert relative_error(S, root(A, -0.5)) < 1e-9


def test_pair_is_both_roots():
    A = matrices("rank-deficient", 32, (4,))
    Q, S = matrix_sqrth_pair(A)
    assert torch.equal(Q, matrix_sqrth(A))
    assert torch.equal(S, matrix_inv_sqrth(A))


@pytest.mark.parametrize("power", ROOTS)
def test_null_space_maps_to_zero(power):
    A = matrices("rank-deficient", 64, (2,))
    found = ROOTS[power](A)
    assert relative_error(found, root(A, power, rtol=64 * torch.finfo(torch.float32).eps)) < 2e-6
    assert torch.linalg.matrix_rank(found, rtol=1e-4).tolist() == [27, 27]


def test_rtol_drops_what_it_says_and_nothing_else():
    A = torch.diag(torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64))
    assert matrix_inv_sqrth(A, rtol=0.01).diagonal().tolist() == pytest.approx([1, 0.1**-0.5, 0, 0])
    assert matrix_inv_sqrth(A, rtol=0.01, eps=1.0).diagonal().tolist() == pytest.approx([2**-0.5, 1.1**-0.5, 0, 0])
    assert matrix_inv_sqrth(A, rtol=0.0, eps=1.0).diagonal().tolist() == pytest.approx(
        [(x + 1) ** -0.5 for x in (1, 0.1, 0.01, 0.001)]
    )


@pytest.mark.parametrize("solver", SOLVERS)
def test_each_matrix_is_independent_of_its_batch(solver):
    A = matrices("spread 1e2", 8, (6,))
    A[3] *= 1e6
    alone = torch.stack([matrix_inv_sqrth(matrix, solver=solver) for matrix in A])
    assert relative_error(matrix_inv_sqrth(A, solver=solver), alone.double()) < 1e-6


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("power", ROOTS)
def test_rotation_equivariance(solver, power):
    A = matrices("spread 1e2", 10, (3,), torch.float64)
    R = rotation(10, seed=7)
    turned = ROOTS[power](R @ A @ R.mT, solver=solver)
    assert relative_error(turned, R @ ROOTS[power](A, solver=solver) @ R.mT) < 1e-9


@pytest.mark.parametrize("solver", SOLVERS)
def test_input_is_untouched(solver):
    A = matrices("spread 1e2", 6, (2,)).requires_grad_()
    before = A.detach().clone()
    matrix_sqrth(A, solver=solver).sum().backward()
    assert torch.equal(A, before)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("shape", [(0, 4, 4), (3, 1, 1), (1, 1), (0, 0), (2, 0, 0)], ids=str)
def test_edge_shapes(solver, shape):
    A = 4 * torch.ones(shape)
    A.requires_grad_()
    Q = matrix_sqrth(A, solver=solver)
    assert Q.shape == shape
    Q.sum().backward()
    if A.numel():
        assert torch.allclose(Q, 2 * torch.ones(shape))
        assert torch.allclose(A.grad, 0.25 * torch.ones(shape), rtol=1e-4)


@pytest.mark.parametrize("solver", SOLVERS)
def test_zero_matrix_has_zero_roots(solver):
    Q, S = matrix_sqrth_pair(torch.zeros(2, 3, 3), solver=solver)
    assert not Q.any()
    assert not S.any()


@pytest.mark.filterwarnings("ignore:a matrix far from symmetric:orthocond.errors.OrthocondWarning")
def test_asymmetric_input_counts_by_its_symmetric_part():
    A = torch.tensor([[5.0, 8.0], [0.0, 5.0]])
    assert torch.allclose(matrix_sqrth(A), torch.tensor([[2.0, 1.0], [1.0, 2.0]]))


def test_non_contiguous_input():
    A = matrices("spread 1e2", 8, (2, 3))
    strided = A.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2)
    assert not strided.is_contiguous()
    assert torch.equal(matrix_sqrth(strided), matrix_sqrth(A))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("solver", SOLVERS)
def test_dtype_is_kept(solver, dtype):
    A = matrices("spread 1e2", 8, (2,), torch.float64).to(dtype)
    Q, S = matrix_sqrth_pair(A, solver=solver, eps=1e-2)
    assert Q.dtype == S.dtype == dtype
    if SOLVERS[solver].has_eigenvalues:
        assert relative_error(Q, root(A, 0.5, eps=1e-2)) < 2 * torch.finfo(dtype).eps + 1e-12
        assert relative_error(S, root(A, -0.5, eps=1e-2)) < 2 * torch.finfo(dtype).eps + 1e-12


def test_what_the_dtype_cannot_hold_saturates():
    S = matrix_inv_sqrth(torch.full((1, 1), 1e-12, dtype=torch.bfloat16).half() + 0)
    assert S.isfinite().all()
    A = torch.full((1, 1), 1e-30, requires_grad=True)  # the gradient is -5e44
    matrix_inv_sqrth(A).sum().backward()
    assert A.grad.item() == -torch.finfo(torch.float32).max


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(("scale", "dtype"), [(1e-4, torch.float16), (1e-30, torch.float32), (1e-30, torch.bfloat16)])
def test_gradients_too_large_for_the_dtype_saturate(solver, scale, dtype):
    A = (scale * torch.eye(3)).to(dtype).requires_grad_()
    matrix_inv_sqrth(A, solver=solver).sum().backward()
    assert A.grad.isfinite().all()
    assert A.grad.abs().max() > 1e4


@pytest.mark.parametrize("options", [{"rtol": 0.0}, {"rtol": 1e-30}, {"eps": 1e-90}])
def test_a_root_that_float32_can_not_hold_is_the_largest_number(options):
    A = torch.diag(torch.tensor([1.0, 1e-45])) @ torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    assert torch.isfinite(matrix_inv_sqrth(A, **options)).all()


@pytest.mark.parametrize("solver", ["eigh", "svd"])
@pytest.mark.parametrize("size", [1e-300, 1e-250, 1e-200, 1e-100, 1e100, 1e300])
def test_every_scale_of_float64(solver, size):
    """Roots and their gradients are those of the matrix of size 1, scaled; what is too large saturates."""
    A = matrices("spread 1e2", 6, dtype=torch.float64)
    plain, scaled = A.clone().requires_grad_(), (A * size).requires_grad_()
    with torch.no_grad():
        scaled.copy_((scaled + scaled.mT) / 2)
    for function, power in ((matrix_sqrth, 0.5), (matrix_inv_sqrth, -0.5)):
        expected, found = function(plain, solver=solver), function(scaled, solver=solver)
        assert torch.allclose(found / size**power, expected, rtol=1e-9)
        (to_plain,), (to_scaled,) = (torch.autograd.grad(y.sum(), x) for y, x in ((expected, plain), (found, scaled)))
        assert to_scaled.isfinite().all()
        largest = torch.finfo(torch.float64).max
        truth = to_plain * (size**0.5) ** (2 * power - 2) if power > 0 or size > 1e-240 else to_plain * 1e300 * 1e300
        assert torch.allclose(to_scaled / 1e10, truth.clamp(-largest, largest) / 1e10, rtol=1e-9)
