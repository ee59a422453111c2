"""covariance_sqrth: what matrix_sqrth(covariance(X)) is, from the smaller side of the features."""

import functools

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from orthocond._core import onednn, private
from orthocond.errors import ArgumentError, NonFiniteError
from orthocond.linalg import FUNCTIONS, SOLVERS, covariance, covariance_sqrth, matrix_sqrth
from orthocond.linalg import _smaller_side as smaller_side
from orthocond.linalg._roots import spectral
from orthocond.linalg._smaller_side import spectral_of_samples

from cases import noise
from oracle import relative_error

SHAPES = [(3, 40, 12), (2, 64, 49), (16, 1), (5, 2), (2, 3, 9, 4)]
CUTS = [(0.0, None), (0.0, 1e-2), (1e-3, None), (1e-3, 1e-2)]
CHOICES = [*FUNCTIONS, "power(exponent=0.3)", "power(exponent=1.5)", "power(exponent=-0.25)"]


def features(*shape, spread=1e-2, seed=0, dtype=torch.float32):
    """Features with singular values over two decades, and a mean."""
    return noise(*shape, seed=seed, dtype=dtype) * torch.logspace(0, -2, shape[-2], dtype=dtype).unsqueeze(-1) + 0.5


def truth(X, function, eps, rtol):
    """The function and its gradient for ones, by the whole covariance in float64."""
    leaf = X.detach().double().requires_grad_()
    if not rtol and not eps and function != "exp":
        rtol = X.shape[-2] * torch.finfo(torch.float32).eps
    (value,), eigenvalues = spectral("test", covariance(leaf), (function,), eps=eps, rtol=rtol)
    return leaf, value, eigenvalues


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("eps", "rtol"), CUTS)
@pytest.mark.parametrize("function", CHOICES)
def test_value_and_gradient_are_those_of_the_whole_covariance(shape, eps, rtol, function):
    if function == "exp" and rtol:
        pytest.skip("the exponential drops nothing")
    X = features(*shape)
    leaf = X.clone().requires_grad_()
    (value,), eigenvalues, P, _ = spectral_of_samples("test", leaf, function, eps=eps, rtol=rtol)
    assert P is None  # the whole covariance was not formed
    exact_leaf, exact, exact_eigenvalues = truth(X, function, eps, rtol)
    assert relative_error(value, exact.detach()) < 2e-6
    assert torch.allclose(eigenvalues, exact_eigenvalues, atol=1e-9)
    G = noise(*value.shape, seed=3)
    (found,) = torch.autograd.grad(value, leaf, G)
    (expected,) = torch.autograd.grad(exact, exact_leaf, G.double())
    assert relative_error(found, expected) < 1e-5


@pytest.mark.parametrize("eps", [0.0, 1e-2])
def test_gradients_of_first_and_second_order(eps):
    X = noise(2, 5, 3, dtype=torch.float64).requires_grad_()
    assert gradcheck(lambda X: covariance_sqrth(X, eps=eps), X)
    assert gradgradcheck(lambda X: covariance_sqrth(X, eps=eps), X)


def test_repeated_eigenvalues_and_rank_loss_have_finite_gradients():
    ties = torch.zeros(6, 4)
    ties[0, :2], ties[1, 2:] = torch.tensor([1.0, -1.0]), torch.tensor([1.0, -1.0])
    for X in (ties, torch.zeros(6, 4), torch.full((6, 4), 3.0), noise(6, 1).expand(6, 4)):
        leaf = X.clone().requires_grad_()
        value = covariance_sqrth(leaf)
        exact_leaf, exact, _ = truth(X, "sqrt", 0.0, None)
        G = noise(6, 6, seed=5)
        (found,) = torch.autograd.grad(value, leaf, G)
        (expected,) = torch.autograd.grad(exact, exact_leaf, G.double())
        assert found.isfinite().all()
        assert torch.allclose(found.double(), expected, atol=1e-6)


@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1e-12, 1e12, 1e18, 1e30])
@pytest.mark.parametrize("shape", [(8, 3), (8, 40), (2, 8, 40)], ids=str)
def test_any_scale(shape, scale):
    X = features(*shape).requires_grad_()
    large = (X * scale).detach()
    if X.ndim > 2:  # one matrix alone, beside one of constant features
        large[0], X = 3.0, torch.cat([torch.full_like(X[:1], 3 / scale), X[1:]]).detach().requires_grad_()
    large.requires_grad_()
    value, reference = covariance_sqrth(large), covariance_sqrth(X)
    assert torch.allclose(value / scale, reference, atol=1e-6)
    G = noise(*value.shape)
    (found,), (expected,) = (torch.autograd.grad(y, x, G) for y, x in ((value, large), (reference, X)))
    assert torch.allclose(found, expected, atol=1e-5)  # the root is homogeneous of degree 1 in the features


@pytest.mark.parametrize("shape", [(8, 3), (8, 40)], ids=str)
def test_the_smallest_numbers_have_the_gradient_of_others(shape):
    """Features with few digits left: their covariance has a root, whose gradient is no smaller than ever."""
    for scale in (1e-39, 1e-42, 1e-45):
        X = (noise(*shape) * scale).requires_grad_()
        exact_leaf, exact, _ = truth(X, "sqrt", 0.0, None)
        G = noise(8, 8)
        (found,) = torch.autograd.grad(covariance_sqrth(X), X, G)
        (expected,) = torch.autograd.grad(exact, exact_leaf, G.double())
        assert relative_error(found, expected) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_may_be_large(dtype):
    X = (300 * noise(2, 16, 5)).to(dtype).requires_grad_()
    value = covariance_sqrth(X)
    assert value.dtype == dtype
    assert relative_error(value, matrix_sqrth(covariance(X.detach().double()))) < 1e-2
    value.sum().backward()
    assert X.grad.isfinite().all()


def test_complex_samples():
    X = torch.complex(noise(7, 3, dtype=torch.float64), noise(7, 3, dtype=torch.float64, seed=2)).requires_grad_()
    assert torch.allclose(covariance_sqrth(X), matrix_sqrth(covariance(X)), atol=1e-7)
    assert gradcheck(lambda X: covariance_sqrth(X, eps=0.1), X)


def test_vmap_and_per_sample_gradients():
    X = features(4, 9, 3)
    assert torch.allclose(torch.vmap(covariance_sqrth)(X), covariance_sqrth(X), atol=1e-6)
    loss = lambda X: covariance_sqrth(X).pow(3).sum()
    mapped = torch.vmap(torch.func.grad(loss))(X)
    leaf = X.clone().requires_grad_()
    loss(leaf).backward()
    assert torch.allclose(mapped, leaf.grad, atol=1e-5)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_forward_mode_and_hessian():
    X, H = noise(4, 2, dtype=torch.float64), noise(4, 2, dtype=torch.float64, seed=2)
    loss = lambda X: covariance_sqrth(X).pow(3).sum()
    _, tangent = torch.func.jvp(loss, (X,), (H,))
    assert torch.allclose(tangent, (torch.func.grad(loss)(X) * H).sum())
    assert torch.allclose(torch.func.jacrev(torch.func.grad(loss))(X), torch.func.hessian(loss)(X))


@pytest.mark.parametrize("eps", [0.0, 0.5])
def test_compile_without_a_graph_break(eps):
    function = lambda X: 2 * covariance_sqrth(X + 1, eps=eps)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    results = []
    for each in (function, compiled):
        X = features(2, 9, 4).requires_grad_()
        value = each(X)
        results.append((value, *torch.autograd.grad(value.square().sum(), X)))
    for plain, traced in zip(*results, strict=True):
        assert torch.allclose(plain, traced, atol=1e-5)


def test_a_matrix_whose_noise_exceeds_eps_changes_no_other():
    X = noise(2, 6, 3)
    X[1] += 1e6  # whose rounding is larger than eps
    together = covariance_sqrth(X, eps=1e-3)
    for alone, value in zip(X, together, strict=True):
        assert torch.allclose(covariance_sqrth(alone, eps=1e-3), value)
    assert torch.allclose(together[0], matrix_sqrth(covariance(X[0]), eps=1e-3), atol=1e-5)


def test_many_samples_and_other_solvers_take_the_covariance():
    few, many = noise(6, 4), noise(6, 40)
    for solver in SOLVERS:
        options = {"solver": solver, "eps": 1e-2}
        for X in (few, many):
            expected = matrix_sqrth(covariance(X), **options)
            assert torch.allclose(covariance_sqrth(X, **options), expected, atol=1e-5)
    X = few.clone().requires_grad_()
    (found,) = torch.autograd.grad(covariance_sqrth(X, gradient="taylor", eps=1e-2).sum(), X)
    whole = lambda X: matrix_sqrth(covariance(X), gradient="taylor", eps=1e-2)
    (expected,) = torch.autograd.grad(whole(X).sum(), X)
    assert torch.equal(found, expected)


def test_samples_along_any_dimension_and_errors(monkeypatch):
    X = noise(3, 8, 5)
    for dim, moved in ((-1, X), (1, X.mT), (0, X.movedim(-1, 0))):
        assert torch.allclose(covariance_sqrth(moved, dim=dim), covariance_sqrth(X), atol=1e-6)
    with pytest.raises(ArgumentError, match="covariance_sqrth got dim=3"):
        covariance_sqrth(X, dim=3)
    with pytest.raises(ArgumentError, match="covariance_sqrth got an unknown solver"):
        covariance_sqrth(X, solver="x")
    with pytest.raises(ArgumentError, match="covariance_sqrth expected a finite number eps"):
        covariance_sqrth(X, eps=-1.0)
    with pytest.raises(NonFiniteError):
        covariance_sqrth(torch.full((4, 2), torch.inf))
    assert covariance_sqrth(torch.empty(3, 8, 5, device="meta")).shape == (3, 8, 8)
    sizes = []
    decompose = smaller_side.decompose
    monkeypatch.setattr(smaller_side, "decompose", lambda K, method: (sizes.append(K.shape), decompose(K, method))[1])
    functools.reduce(torch.add, (covariance_sqrth(X), covariance_sqrth(X, solver="svd")))
    assert sizes == [(3, 5, 5)] * 2


@pytest.mark.parametrize("way", ["MKL", "oneDNN"])
@pytest.mark.parametrize(("shape", "num_threads"), [((5, 256, 49), 1), ((2, 512, 49), 2)])
def test_large_products_are_as_accurate_by_either_library(way, shape, num_threads, monkeypatch):
    function = private.onednn_linear() if way == "oneDNN" else None
    if way == "oneDNN" and function is None:
        pytest.skip("PyTorch has no oneDNN here")
    monkeypatch.setattr(onednn, "_linear", lambda: function)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    X, results = features(*shape), []
    for dtype in (torch.float32, torch.float64):
        leaf = X.detach().clone().to(dtype).requires_grad_()
        (value,), *_ = spectral_of_samples("test", leaf, "sqrt", upper=True)
        results.append((value.detach(), *torch.autograd.grad(value.cos().sum(), leaf)))
    torch.set_num_threads(before)
    for found, expected, bound in zip(*results, (2e-6, 1e-5), strict=True):
        assert torch.allclose(found.double(), expected, rtol=0, atol=bound * float(expected.abs().max()))
