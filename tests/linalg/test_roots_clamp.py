"""With clamp=true eps is a floor, f(max(l, eps)): values, exact derivatives across the kink, and what else sees eps."""

import mpmath
import pytest
import torch

from orthocond.errors import ArgumentError, GradientError
from orthocond.linalg import (
    covariance,
    covariance_sqrth,
    matrix_exph,
    matrix_inv_sqrth,
    matrix_logh,
    matrix_powerh,
    matrix_sqrth,
    matrix_sqrth_pair,
)
from orthocond.linalg._roots import spectral

from cases import noise, rotation
from oracle import exact_function, relative_error

EPS = 0.2
SPECTRA = {
    "on both sides": [-1e-6, 0.05, 0.1, 0.5, 1.0, 2.0],
    "ties on both sides": [0.0, 0.0, 0.05, 0.4, 0.4, 1.0],
    "all above": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
    "all below": [0.0, 0.0, 0.01, 0.02, 0.02, 0.04],
}
ROOTS = {"sqrt": (matrix_sqrth, 0.5), "inv_sqrt": (matrix_inv_sqrth, -0.5)}


def matrix(spectrum):
    l, U = torch.tensor(spectrum, dtype=torch.float64), rotation(len(spectrum))
    return (U * l) @ U.mT


def clamped_root(root, solver="eigh", **options):
    return lambda A: root((A + A.mH) / 2, solver=f"{solver}(clamp=true)", **{"eps": EPS, **options})


@pytest.mark.parametrize("solver", ["eigh", "svd"])
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_eigenvalues_below_eps_are_raised_to_it(spectrum, solver):
    A, l = matrix(SPECTRA[spectrum]), torch.tensor(SPECTRA[spectrum], dtype=torch.float64)
    for root, power in ROOTS.values():
        U = rotation(len(l))
        assert torch.allclose(clamped_root(root, solver)(A), (U * l.clamp(min=EPS) ** power) @ U.mT, atol=1e-12)
    Q, S = clamped_root(matrix_sqrth_pair, solver)(A)
    assert torch.allclose(Q @ S, torch.eye(6, dtype=torch.float64), atol=1e-12)
    for function in (matrix_logh, lambda A, **options: matrix_powerh(A, 0.3, **options)):
        raised = function(A + torch.zeros_like(A), solver=f"{solver}(clamp=true)", eps=EPS)
        truth = function((rotation(6) * l.clamp(min=EPS)) @ rotation(6).mT)
        assert torch.allclose(raised, truth, atol=1e-12)


@pytest.mark.parametrize("name", ROOTS)
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_derivatives_of_both_orders_and_modes(spectrum, name):
    A = matrix(SPECTRA[spectrum]).requires_grad_()
    assert torch.autograd.gradcheck(clamped_root(ROOTS[name][0]), A, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(clamped_root(ROOTS[name][0]), A, atol=1e-4)


def test_derivatives_where_rtol_drops_and_eps_raises():
    A = matrix([1e-4, 2e-4, 0.05, 0.1, 0.5, 1.0]).requires_grad_()
    root = clamped_root(matrix_inv_sqrth, rtol=1e-2)
    assert torch.linalg.matrix_rank(root(A.detach())) == 4
    assert torch.autograd.gradcheck(root, A)
    assert torch.autograd.gradgradcheck(root, A, atol=1e-3)


@pytest.mark.parametrize("exponent", [1.0, 0.9, 0.5])
def test_a_floor_below_all_normal_numbers(exponent):
    A = torch.diag(torch.tensor([0.0, 1e307], dtype=torch.float64)).requires_grad_()
    value = matrix_powerh(A, exponent, solver="eigh(clamp=true)", eps=1e-322)
    (gradient,) = torch.autograd.grad(value.sum(), A)
    assert torch.allclose(gradient[0, 1], torch.tensor(1e307, dtype=torch.float64).pow(exponent - 1), rtol=1e-10)


def test_complex_matrices():
    Z = torch.complex(noise(4, 4, dtype=torch.float64), noise(4, 4, dtype=torch.float64, seed=2))
    A = (0.05 * Z @ Z.mH).requires_grad_()
    assert (torch.linalg.eigvalsh(A.detach()) < EPS).sum() == 2
    assert torch.autograd.gradcheck(clamped_root(matrix_sqrth), A)
    assert torch.autograd.gradgradcheck(clamped_root(matrix_sqrth), A, atol=1e-4)


@pytest.mark.parametrize("gap", [1e-1, 1e-6, 1e-12, 0.0])
def test_close_to_the_kink_the_gradient_is_that_of_fifty_digits(gap):
    A = torch.diag(torch.tensor([EPS + gap, EPS - gap, EPS + 2 * gap, 1.0], dtype=torch.float64))
    G = noise(4, 4, dtype=torch.float64)

    def scalar(x):
        return 1 / mpmath.sqrt(max(x, mpmath.mpf(EPS)))

    leaf = A.clone().requires_grad_()
    value = clamped_root(matrix_inv_sqrth)(leaf)
    (gradient,) = torch.autograd.grad(value, leaf, G)
    if gap:
        truth, slope = exact_function(A, G, scalar)
        assert relative_error(value, truth) < 1e-13
        assert relative_error(gradient, slope) < 1e-10
    assert gradient.isfinite().all()
    assert (gradient[0, 0] == 0) == (gap == 0)  # at the kink itself the slope is that of the constant


def test_gradients_of_a_rank_deficient_float32_matrix_are_finite():
    X = noise(3, 16, 5)
    A = covariance(X).requires_grad_()
    for root, _ in ROOTS.values():
        (gradient,) = torch.autograd.grad(clamped_root(root, eps=1e-3)(A).sum(), A)
        assert gradient.isfinite().all()
        assert gradient.abs().max() > 0


def test_the_published_rules_see_the_eigenvalues_that_were_decomposed():
    A, G = matrix(SPECTRA["on both sides"]), noise(6, 6, dtype=torch.float64)
    found = {}
    for rule in ("exact", "naive", "pade(clamp=true)"):
        leaf = A.clone().requires_grad_()
        (found[rule],) = torch.autograd.grad(clamped_root(matrix_inv_sqrth, gradient=rule)(leaf), leaf, G)
    assert relative_error(found["naive"], found["exact"]) < 1e-5  # the negative eigenvalue, -1e-6, counts as zero there
    assert relative_error(found["pade(clamp=true)"], found["exact"]) < 1e-5


def test_the_smaller_side_gives_the_same():
    X = noise(2, 12, 5, dtype=torch.float64).requires_grad_()
    options = {"solver": "eigh(clamp=true)", "eps": 0.5}
    few, whole = covariance_sqrth(X, **options), matrix_sqrth(covariance(X), **options)
    assert torch.allclose(few, whole, atol=1e-12)
    G = noise(2, 12, 12, dtype=torch.float64)
    (of_few,), (of_whole,) = (torch.autograd.grad(each, X, G, retain_graph=True) for each in (few, whole))
    assert torch.allclose(of_few, of_whole, atol=1e-12)
    small = noise(6, 3, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda X: covariance_sqrth(X, **options), small, atol=1e-4)


def test_noise_above_eps_is_still_dropped():
    A, floor = matrix([1e-9, 1e-9, 0.1, 1.0]), torch.tensor(1e-6, dtype=torch.float64)
    ranks = []
    for eps in (1e-7, 1e-5):
        (S,), _ = spectral("test", A, ("inv_sqrt",), solver="eigh(clamp=true)", eps=eps, floor=floor)
        ranks.append(torch.linalg.matrix_rank(S).item())
    assert ranks == [2, 4]


def test_without_eps_there_is_nothing_to_raise_to():
    A = matrix([0.0, 0.5, 1.0])
    assert torch.equal(matrix_inv_sqrth(A, solver="eigh(clamp=true)"), matrix_inv_sqrth(A))


def test_vmap():
    A = torch.stack([matrix(SPECTRA[name]) for name in SPECTRA])
    root = clamped_root(matrix_inv_sqrth)
    assert torch.allclose(torch.vmap(root)(A), root(A))


def test_what_it_refuses():
    A = matrix([0.1, 0.5, 1.0])
    with pytest.raises(ArgumentError, match="Leave clamp=false"):
        matrix_exph(A, solver="eigh(clamp=true)", eps=0.1)
    with pytest.raises(ArgumentError, match="clamp takes true or false"):
        matrix_sqrth(A, solver="eigh(clamp=0.1)")
    with pytest.raises(ArgumentError, match="the options of newton_schulz are"):
        matrix_sqrth(A, solver="newton_schulz(clamp=true)", eps=0.1)
    leaf = A.clone().requires_grad_()
    first = torch.autograd.grad(clamped_root(matrix_sqrth)(leaf).sum(), leaf, create_graph=True)[0]
    second = torch.autograd.grad(first.square().sum(), leaf, create_graph=True)[0]
    with pytest.raises(GradientError, match="dropped or clamped"):
        torch.autograd.grad(second.square().sum(), leaf)
