"""Complex Hermitian matrices: values, gradients, and what they share with real ones."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from orthocond.errors import DtypeError
from orthocond.linalg import (
    FUNCTIONS,
    POLAR_SOLVERS,
    SOLVERS,
    covariance,
    matrix_functionh,
    matrix_inv_sqrth,
    matrix_sqrth,
    matrix_sqrth_pair,
    nearest_orthogonal,
    nearest_rotation,
    spectrum,
)
from orthocond.linalg._roots import spectral

from oracle import SCALARS, exact_function

# By forward mode itself, the first time.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

CONVERGED = {"newton_schulz": "newton_schulz(iterations=40)", "pade": "pade(degree=60, iterations=40)"}


def noise(*shape, seed=0, dtype=torch.complex128):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.complex128).to(dtype)


def hermitian(l, *, seed=0, dtype=torch.complex128):
    l = torch.tensor(l, dtype=torch.float64)
    U = torch.linalg.qr(noise(len(l), len(l), seed=seed)).Q
    A = (U * l) @ U.mH
    return ((A + A.mH) / 2).to(dtype)


def by_name(choice, **options):
    return lambda A: spectral("test", (A + A.mH) / 2, (choice,), **options)[0][0]


@pytest.mark.parametrize("choice", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_value_and_gradient_against_fifty_digits(choice, dtype):
    A, G = hermitian([2.0, 1.0, 1.0 - 1e-9, 0.1], dtype=dtype), noise(4, 4, dtype=dtype, seed=1)
    scalar = SCALARS["sqrt" if choice == "power" else choice]  # the exponent's default
    A = A.requires_grad_()
    value = by_name(choice)(A)
    (gradient,) = torch.autograd.grad(value, A, G)
    assert value.dtype == gradient.dtype == dtype
    wanted = (2e-6, 1e-5) if dtype == torch.complex64 else (1e-12, 1e-10)
    truth = exact_function(A.detach().to(torch.complex128), (G + G.mH) / 2, scalar)
    for found, exact, tolerance in zip((value, gradient), truth, wanted, strict=True):
        assert torch.linalg.norm(found.detach() - exact) < tolerance * torch.linalg.norm(exact)


@pytest.mark.parametrize("choice", FUNCTIONS)
@pytest.mark.parametrize("l", [[1.0, 0.5, 0.5], [1.0, 1.0, 1.0 + 1e-9]], ids=["ties", "near ties"])
def test_derivatives_of_both_orders_and_modes(choice, l):
    A = hermitian(l).requires_grad_()
    assert gradcheck(by_name(choice), A, check_forward_ad=True)
    assert gradgradcheck(by_name(choice), A, check_fwd_over_rev=True)


def test_derivatives_of_a_users_function_and_at_rank_loss():
    A = hermitian([1.0, 0.5, 0.5]).requires_grad_()
    tanh = lambda A: matrix_functionh((A + A.mH) / 2, torch.tanh, lambda x: 1 - torch.tanh(x) ** 2)
    assert gradcheck(tanh, A)
    assert gradgradcheck(tanh, A)
    X = noise(4, 2).requires_grad_()
    for root in (matrix_sqrth, matrix_inv_sqrth):
        assert gradcheck(lambda X: root(X @ X.mH), X, check_forward_ad=True)
        assert gradgradcheck(lambda X: root(X @ X.mH), X)


@pytest.mark.parametrize("solver", SOLVERS)
def test_every_solver(solver):
    A = hermitian([1.0, 0.5, 0.2]).requires_grad_()
    roots = lambda A: matrix_sqrth_pair((A + A.mH) / 2, solver=CONVERGED.get(solver, solver))
    Q, S = roots(A)
    assert torch.allclose(Q @ Q, A)
    assert torch.allclose(Q @ S, torch.eye(3, dtype=A.dtype))
    assert gradcheck(roots, A, check_forward_ad=True)


@pytest.mark.parametrize("solver", POLAR_SOLVERS)
@pytest.mark.parametrize("shape", [(2, 4), (4, 2), (3, 3)], ids=str)
def test_nearest_unitary(solver, shape):
    A = noise(*shape).requires_grad_()
    solver = "newton_schulz(iterations=30)" if solver == "newton_schulz" else solver
    R = nearest_orthogonal(A, solver=solver)
    U, _, Vh = torch.linalg.svd(A.detach(), full_matrices=False)
    assert torch.allclose(R, U @ Vh)
    assert nearest_orthogonal(A.detach().to(torch.complex64)).dtype == torch.complex64
    function = lambda A: nearest_orthogonal(A, solver=solver)
    assert gradcheck(function, A, check_forward_ad=True)
    assert gradgradcheck(function, A, check_fwd_over_rev=True)


def test_covariance_and_spectrum():
    X = noise(3, 7).requires_grad_()
    centred = X.detach() - X.detach().mean(-1, keepdim=True)
    assert torch.allclose(covariance(X), centred @ centred.mH / 7)
    assert gradcheck(covariance, X, check_forward_ad=True)
    assert gradgradcheck(covariance, X)
    found = spectrum(hermitian([4.0, 1.0, 0.0]), eps=1.0)
    assert found.eigenvalues.dtype == torch.float64
    assert found.eigenvalues.tolist() == pytest.approx([4.0, 1.0, 0.0], abs=1e-12)
    assert found.rank.item() == 2
    assert spectrum(hermitian([4.0, 1.0], dtype=torch.complex64)).cond.dtype == torch.float32


def test_real_matrices_with_a_zero_imaginary_part_give_the_real_result():
    A = hermitian([1.0, 0.5, 0.2]).real.contiguous()
    A = A @ A.mT
    for root in (matrix_sqrth, matrix_inv_sqrth):
        assert torch.allclose(root(A.to(torch.complex128)), root(A).to(torch.complex128))


def test_compile_and_vmap():
    torch._dynamo.reset()
    A = torch.stack([hermitian([1.0, 0.5, 0.2], seed=seed) for seed in range(3)])
    assert torch.allclose(torch.vmap(matrix_inv_sqrth)(A), matrix_inv_sqrth(A))
    compiled = torch.compile(matrix_inv_sqrth, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(A), matrix_inv_sqrth(A))


def test_what_is_for_real_matrices_says_so():
    with pytest.raises(DtypeError, match="real floating"):
        nearest_rotation(noise(3, 3))
    with pytest.raises(DtypeError, match="floating or complex"):
        matrix_sqrth(torch.ones(2, 2, dtype=torch.long))


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("shape", [(0, 3, 3), (0, 0), (2, 0, 0)])
def test_empty_batches_and_matrices(solver, shape):
    A = torch.zeros(shape, dtype=torch.complex64, requires_grad=True)
    Q, S = matrix_sqrth_pair(A, solver=solver)
    (Q.abs().sum() + S.abs().sum()).backward()
    assert Q.shape == S.shape == A.grad.shape == shape
