"""Gradients of the roots: against the oracle, by gradcheck, at ties, and of second order."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from orthocond.errors import GradientError
from orthocond.linalg import (
    GRADIENTS,
    SOLVERS,
    covariance,
    matrix_inv_sqrth,
    matrix_logh,
    matrix_sqrth,
    matrix_sqrth_pair,
)
from orthocond.linalg._roots import spectral

from cases import BATCHES, SPECTRA, matrices, noise, rotation
from oracle import relative_error, root_gradient

EPS = 1e-5
ROOTS = {0.5: matrix_sqrth, -0.5: matrix_inv_sqrth}
EIGEN = [name for name, solver in SOLVERS.items() if solver.has_eigenvalues]
CONVERGED = {"newton_schulz": "newton_schulz(iterations=40)", "pade": "pade(degree=60, iterations=40)"}
POINTS = {
    "random": matrices("spread 1e2", 5, (2,), torch.float64),
    "ties": matrices("repeated", 5, (), torch.float64),
    "identity": torch.eye(4, dtype=torch.float64),
    "1x1": torch.full((1, 1), 3.0, dtype=torch.float64),
}


def gradient_of(function, A, G):
    A = A.clone().requires_grad_()
    return torch.autograd.grad(function(A), A, G)[0]


def symmetrised(function):
    return lambda X: function((X + X.mT) / 2)


@pytest.mark.parametrize("solver", EIGEN)
@pytest.mark.parametrize("power", ROOTS)
@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_gradient_agrees_with_the_oracle(spectrum, batch, power, solver):
    A = matrices(spectrum, 64, batch)
    G = noise(*A.shape)
    found = gradient_of(lambda A: ROOTS[power](A, solver=solver, eps=EPS), A, G)
    assert found.isfinite().all()
    assert relative_error(found, root_gradient(A, G, power, eps=EPS)) < 1e-5


def test_of_the_test_autograd_through_eigh_is_not_finite_at_ties():
    def by_autograd(A):
        l, U = torch.linalg.eigh(A)
        return (U * l.sqrt().unsqueeze(-2)) @ U.mT

    A, G = matrices("identity", 8), noise(8, 8)
    assert not gradient_of(by_autograd, A, G).isfinite().all()
    assert torch.allclose(gradient_of(matrix_sqrth, A, G), (G + G.mT) / 4, atol=1e-6)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("root", [matrix_sqrth, matrix_inv_sqrth, matrix_sqrth_pair])
@pytest.mark.parametrize("point", POINTS)
def test_gradcheck_of_both_orders(point, root, solver):
    A = POINTS[point].clone().requires_grad_()
    function = symmetrised(lambda A: root(A, solver=CONVERGED.get(solver, solver)))
    assert gradcheck(function, A)
    assert gradgradcheck(function, A)


@pytest.mark.parametrize("eps", [0.0, 0.1])
@pytest.mark.parametrize("root", [matrix_sqrth, matrix_inv_sqrth, matrix_sqrth_pair])
def test_gradcheck_between_kept_and_dropped(root, eps):
    l = torch.tensor([1.0, 1.0, 0.5, 0.3, 1e-2, 1e-2, 2e-3], dtype=torch.float64)  # ties on both sides of the cut
    U = rotation(7)
    A = ((U * l) @ U.mT).requires_grad_()
    function = symmetrised(lambda A: root(A, eps=eps, rtol=0.1))
    assert gradcheck(function, A)
    assert gradgradcheck(function, A)


@pytest.mark.parametrize("root", [matrix_sqrth, matrix_inv_sqrth])
def test_gradcheck_of_a_rank_deficient_covariance(root):
    X = noise(6, 3, dtype=torch.float64).requires_grad_()
    function = lambda X: root(X @ X.mT)
    assert gradcheck(function, X)
    assert gradgradcheck(function, X)


def test_gradient_stays_bounded_where_an_eigenvalue_crosses_the_cut():
    A = torch.diag(torch.tensor([1.0, 0.1 + 1e-12, 0.1 - 1e-12], dtype=torch.float64))
    found = gradient_of(lambda A: matrix_inv_sqrth(A, rtol=0.1), A, noise(3, 3, dtype=torch.float64))
    assert found.abs().max() < 100


def test_null_directions_have_no_gradient():
    A = torch.diag(torch.tensor([1.0, 0.0, 0.0]))
    for root in ROOTS.values():
        found = gradient_of(root, A, noise(3, 3))
        assert not found[1:, 1:].any()
        assert found[0].all()


@pytest.mark.parametrize("solver", SOLVERS)
def test_each_gradient_is_independent_of_its_batch(solver):
    A, G = matrices("spread 1e2", 8, (5,)), noise(5, 8, 8)
    A[2] *= 1e4
    function = lambda A: matrix_inv_sqrth(A, solver=solver)
    alone = torch.stack([gradient_of(function, a, g) for a, g in zip(A, G, strict=True)])
    assert relative_error(gradient_of(function, A, G), alone.double()) < 1e-5


@pytest.mark.parametrize("rule", GRADIENTS)
def test_rules_agree_where_eigenvalues_are_far_apart(rule):
    A, G = matrices("spread 1e12", 4, (2,), torch.float64), noise(2, 4, 4, dtype=torch.float64)
    for root in ROOTS.values():
        exact = gradient_of(lambda A: root(A, eps=1e-13), A, G)
        found = gradient_of(lambda A: root(A, eps=1e-13, gradient="clip(bound=1e12)" if rule == "clip" else rule), A, G)
        assert relative_error(found, exact) < 1e-8


@pytest.mark.parametrize("rule", GRADIENTS)
def test_rules_are_as_bounded_at_ties_as_they_declare(rule):
    found = gradient_of(lambda A: matrix_sqrth(A, gradient=rule), matrices("identity", 5), noise(5, 5))
    assert bool(found.isfinite().all()) == GRADIENTS[rule].bounded


def test_taylor_approaches_the_exact_gradient_with_its_degree():
    A, G = matrices("spread 1e2", 6, (), torch.float64), noise(6, 6, dtype=torch.float64)
    exact = gradient_of(matrix_sqrth, A, G)
    errors = [
        relative_error(gradient_of(lambda A: matrix_sqrth(A, gradient=f"taylor(degree={d})"), A, G), exact)
        for d in (2, 9, 50)
    ]
    assert errors[0] > 10 * errors[1] > 1000 * errors[2]


def test_taylor_stays_bounded_on_a_rank_deficient_covariance():
    P = covariance(30 * noise(64, 27) @ noise(27, 1000, seed=2))
    found = gradient_of(lambda P: matrix_sqrth(P, eps=1e-5, gradient="taylor"), P, matrix_sqrth(P, eps=1e-5))
    assert found.abs().max() < 2


@pytest.mark.parametrize("solver", ["newton_schulz", "pade"])
def test_iterative_solvers_give_null_matrices_no_gradient(solver):
    assert not gradient_of(lambda A: matrix_sqrth(A, solver=solver), torch.zeros(3, 3), torch.ones(3, 3)).any()


def test_only_the_exact_rule_is_differentiable_again():
    A = matrices("spread 1e2", 4).requires_grad_()
    (grad,) = torch.autograd.grad(matrix_sqrth(A, gradient="taylor").sum(), A, create_graph=True)
    with pytest.raises(RuntimeError, match="use gradient='exact'"):
        grad.sum().backward()


@pytest.mark.parametrize("root", [matrix_sqrth, matrix_inv_sqrth])
@pytest.mark.parametrize("point", ["ties", "1x1"])
def test_third_and_fourth_derivative_of_the_roots(root, point):
    A = POINTS[point][..., :3, :3].clone().requires_grad_()
    G = noise(*A.shape, dtype=torch.float64)
    function = symmetrised(lambda A: (G * root(A, eps=0.1)).pow(2).sum())

    def gradient(A):
        return torch.autograd.grad(function(A), A, create_graph=True)[0]

    def third(A):
        (grad,) = torch.autograd.grad((gradient(A) * G).sum(), A, create_graph=True)
        return torch.autograd.grad((grad * G).sum(), A, create_graph=True)[0]

    assert gradgradcheck(gradient, A)
    assert gradcheck(third, A)


@pytest.mark.parametrize(
    "function",
    [lambda A: matrix_sqrth(A, rtol=0.1), lambda A: matrix_inv_sqrth(A, rtol=0.1), matrix_logh],
    ids=["sqrt, dropped", "inv_sqrt, dropped", "log"],
)
def test_a_third_derivative_that_is_missing_says_so(function):
    A = matrices("spread 1e2", 4, (), torch.float64).requires_grad_()
    grad = A
    for _ in range(2):
        (grad,) = torch.autograd.grad(
            function(A).square().sum() if grad is A else grad.square().sum(), A, create_graph=True
        )
    with pytest.raises(GradientError, match="is differentiable twice"):
        grad.sum().backward()


def test_iterative_solvers_are_differentiable_to_every_order():
    x = torch.tensor([[2.0]], dtype=torch.float64, requires_grad=True)
    y = matrix_sqrth(x, solver="newton_schulz")
    for _ in range(3):
        (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert y.item() == pytest.approx(3 / 8 * 2**-2.5)


def test_one_of_two_roots_may_go_unused():
    A, G = matrices("spread 1e2", 5), noise(5, 5)
    for solver in SOLVERS:
        for index, root in enumerate(ROOTS.values()):
            pair = gradient_of(lambda A: matrix_sqrth_pair(A, solver=solver)[index], A, G)
            assert relative_error(pair, gradient_of(lambda A: root(A, solver=solver), A, G).double()) < 1e-6


@pytest.mark.parametrize("solver", ["eigh", "svd"])
def test_gradients_of_both_roots_are_added_before_they_are_narrowed(solver):
    A = (1e-4 * torch.eye(2)).half().requires_grad_()
    Q, S = matrix_sqrth_pair(A, solver=solver)
    (S - Q).sum().backward()
    assert A.grad.isfinite().all()
    assert A.grad[0, 0] == -torch.finfo(torch.float16).max


def test_gradients_are_symmetrised_before_they_are_narrowed():
    A = (1e-4 * torch.eye(2)).half().requires_grad_()
    G = torch.tensor([[0.0, 0.21], [0.0, 0.0]], dtype=torch.float16)  # 1e5 in one entry, 5e4 in its symmetric part
    (found,) = torch.autograd.grad(matrix_inv_sqrth(A), A, G)
    (truth,) = torch.autograd.grad(matrix_inv_sqrth(wide := A.detach().double().requires_grad_()), wide, G.double())
    assert torch.allclose(found.double(), truth, rtol=1e-3)


def test_pade_as_published_is_finite_at_ties_and_the_exact_gradient_away_from_them():
    """The authors raise eigenvalues to the machine epsilon, and replace infinite entries of K by the largest."""
    A, G = matrices("spread 1e2", 6, (), torch.float64), noise(6, 6, dtype=torch.float64)
    exact = gradient_of(matrix_sqrth, A, G)
    assert relative_error(gradient_of(lambda A: matrix_sqrth(A, gradient="pade(clamp=true)"), A, G), exact) < 1e-8
    for spectrum in ("identity", "repeated", "rank-deficient"):
        A = matrices(spectrum, 6, (3,))
        for root in ROOTS.values():
            assert (
                gradient_of(lambda A: root(A, eps=1e-3, gradient="pade(clamp=true)"), A, noise(3, 6, 6))
                .isfinite()
                .all()
            )


def test_pade_as_published_replaces_what_overflows():
    l = torch.tensor([1.0, 1.0, 3.0], dtype=torch.float64)
    kernel = GRADIENTS["pade"].kernel
    found = kernel(l, clamp=True)
    assert found[0, 1] == found[1, 0] == 0.5  # the largest of the others: 1 / (3 - 1)
    assert torch.equal(found[:, 2], torch.tensor([-0.5, -0.5, 0.0], dtype=torch.float64))
    assert kernel(l, clamp=False)[0, 1].isinf()


@pytest.mark.parametrize("spectrum", ["spread 1e2", "repeated", "rank-deficient"])
@pytest.mark.parametrize("choice", ["sqrt", "inv_sqrt", "log", "exp", "power(exponent=-0.25)", "power(exponent=-3)"])
@pytest.mark.parametrize("batch", [(), (1,), (1, 1)], ids=str)
def test_one_float32_matrix_as_one_of_many(batch, choice, spectrum):
    A = matrices(spectrum, 5, (2,), torch.float32)
    G = noise(2, 5, 5)
    many = A.clone().requires_grad_()
    (values,), eigenvalues = spectral("test", many, (choice,))
    (expected,) = torch.autograd.grad(values, many, G)
    one = A[0].reshape(*batch, 5, 5).requires_grad_()
    (value,), own = spectral("test", one, (choice,))
    assert own.shape == (*batch, 5)
    assert not own.requires_grad
    assert torch.allclose(own.flatten(), eigenvalues[0], rtol=1e-10, atol=1e-12 * eigenvalues[0, -1].item())
    (found,) = torch.autograd.grad(value, one, G[0].reshape(one.shape), retain_graph=True)
    for mine, theirs in ((value, values[0]), (found, expected[0])):
        assert torch.allclose(mine.view(5, 5), theirs, rtol=1e-5, atol=1e-6 * theirs.abs().max().item())
    (again,) = torch.autograd.grad(value, one, G[0].reshape(one.shape), create_graph=True)  # by the general function
    assert torch.allclose(again, found, rtol=1e-5, atol=1e-6 * found.abs().max().item())


@pytest.mark.parametrize("spectrum", ["spread 1e2", "rank-deficient"])
def test_hooks_see_all_that_one_matrix_keeps(spectrum):
    A = matrices(spectrum, 5, (), torch.float32).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.clone()) or len(kept) - 1, kept.__getitem__):
        root = matrix_sqrth(A)
    assert any(each.dtype == torch.bool for each in kept) == (spectrum == "rank-deficient")  # which ones are dropped
    (found,) = torch.autograd.grad(root, A, torch.eye(5))
    (expected,) = torch.autograd.grad(matrix_sqrth(A), A, torch.eye(5))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("n", [16, 300])
def test_one_float32_matrix_of_any_size(n):
    X = torch.randn(1, n, 2 * n, generator=torch.Generator().manual_seed(0))
    A = (X @ X.mT / (2 * n)).requires_grad_()
    G = torch.randn(2, 1, n, n, generator=torch.Generator().manual_seed(1))
    (matrix_sqrth(A).mul_(2) * G[0]).sum().backward()  # its result is no view, which could not be changed in place
    root = matrix_sqrth(A)
    (together,) = torch.autograd.grad(root, A, 2 * G, is_grads_batched=True, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):  # has no say in the backward pass either
        (alone,) = torch.autograd.grad(root, A, 2 * G[0])
    for gradient in (together[0], alone):
        assert torch.allclose(gradient, A.grad, rtol=1e-5, atol=1e-6 * A.grad.abs().max().item())
