"""Distances between covariances and Gaussians: values, gradients at the points where the usual formula has none."""

import ot
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from orthocond.errors import ArgumentError, DtypeError
from orthocond.linalg import bures_distance, covariance, frechet_distance, gaussian_frechet_distance

from cases import matrices, noise

F64 = torch.float64

# By forward mode itself, the first time.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")


def usual(m1, A, m2, B):
    """By eigenvalues in float64, as the FID is usually written."""

    def root(A):
        l, U = torch.linalg.eigh(A)
        return (U * l.clamp(min=0).sqrt().unsqueeze(-2)) @ U.mT

    Q = root(A)
    middle = root(Q @ B @ Q)
    trace = lambda A: A.diagonal(dim1=-2, dim2=-1).sum(-1)
    return (m1 - m2).square().sum(-1) + trace(A) + trace(B) - 2 * trace(middle)


def gaussian(X):
    return X.mean(-1), covariance(X)


@pytest.mark.parametrize(("d", "N", "M"), [(4, 30, 20), (12, 5, 8), (6, 3, 50), (6, 50, 3), (3, 3, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_features_agree_with_the_usual_formula(d, N, M, dtype):
    X, Y = noise(2, d, N, dtype=dtype), 2 * noise(2, d, M, dtype=dtype, seed=2) + 1
    truth = usual(*gaussian(X.double()), *gaussian(Y.double()))
    # Of a singular covariance the usual formula takes roots of rounding noise.
    tolerance = 1e-5 if dtype == torch.float32 else 1e-9 if min(N, M) > d else 1e-6
    assert torch.allclose(frechet_distance(X, Y).double(), truth, rtol=tolerance)
    assert torch.allclose(frechet_distance(X, gaussian(Y)).double(), truth, rtol=tolerance)
    assert torch.allclose(gaussian_frechet_distance(*gaussian(X), *gaussian(Y)).double(), truth, rtol=100 * tolerance)
    assert torch.allclose(frechet_distance(X.mT, Y.mT, dim=-2).double(), truth, rtol=tolerance)
    assert frechet_distance(X, Y).dtype == dtype


def test_agrees_with_pot():
    X, Y = noise(5, 40, dtype=F64), 2 * noise(5, 30, dtype=F64, seed=2) + 1
    distance = ot.gaussian.empirical_bures_wasserstein_distance(X.mT, Y.mT, reg=0.0)
    assert float(frechet_distance(X, Y)) == pytest.approx(float(distance) ** 2, rel=1e-9)


@pytest.mark.parametrize("spectrum", ["spread 1e2", "repeated", "identity"])
def test_derivatives_of_covariances(spectrum):
    A, B = matrices(spectrum, 3, (), F64), matrices("spread 1e2", 3, (2,), F64) + torch.eye(3).double()
    function = lambda A, B: bures_distance((A + A.mT) / 2, (B + B.mT) / 2)
    inputs = (A.requires_grad_(), B.requires_grad_())
    assert gradcheck(function, inputs, check_forward_ad=True)
    assert gradgradcheck(function, inputs)


@pytest.mark.parametrize(("d", "N", "M"), [(3, 6, 5), (5, 3, 4), (4, 3, 9)])
def test_derivatives_of_features(d, N, M):
    X, Y = noise(d, N, dtype=F64).requires_grad_(), noise(d, M, dtype=F64, seed=3).requires_grad_()
    assert gradcheck(frechet_distance, (X, Y), check_forward_ad=True)
    reference = gaussian(Y.detach())
    assert gradcheck(lambda X: frechet_distance(X, reference), X, check_forward_ad=True)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize(("d", "N"), [(4, 20), (8, 3)])
def test_at_equal_features_distance_and_gradient_are_zero(d, N, dtype):
    X = noise(d, N, dtype=dtype).requires_grad_()
    distance = frechet_distance(X, X.detach())
    distance.backward()
    assert 0 <= distance.item() < 1e-5
    assert X.grad.abs().max() < 1e-3 * torch.finfo(dtype).eps ** 0.25
    A = covariance(X.detach()).requires_grad_()
    bures_distance(A, A.detach()).backward()
    assert A.grad.isfinite().all()
    assert A.grad.abs().max() < 1.5


def test_the_usual_formula_has_no_gradient_there():
    X = torch.zeros(4, 5, dtype=F64, requires_grad=True)
    usual(*gaussian(X), *gaussian(noise(4, 5, dtype=F64))).backward()
    assert not X.grad.isfinite().all()


@pytest.mark.parametrize("X", [torch.zeros(4, 5), torch.ones(4, 5), torch.ones(4, 1), torch.ones(2, 9)], ids=str)
def test_constant_features_have_finite_gradients(X):
    Y = noise(*X.shape)
    for x, y in ((X, Y), (Y, X), (X, X)):
        x = x.clone().requires_grad_()
        distance = frechet_distance(x, y)
        distance.backward()
        assert distance.isfinite()
        assert x.grad.isfinite().all()


def test_complex_covariances():
    X = torch.randn(3, 9, generator=torch.Generator().manual_seed(0), dtype=torch.complex128)
    A = covariance(X).requires_grad_()
    distance = bures_distance(A, torch.eye(3, dtype=A.dtype))
    expected = (torch.linalg.eigvalsh(A.detach()).sqrt() - 1).square().sum()
    assert distance.dtype == F64
    assert torch.allclose(distance, expected)
    assert gradcheck(lambda A: bures_distance((A + A.mH) / 2, torch.eye(3, dtype=A.dtype)), A)


def test_vmap_and_batches():
    X, Y = noise(3, 4, 9, dtype=F64), noise(3, 4, 7, dtype=F64, seed=2)
    together = frechet_distance(X, Y)
    assert torch.allclose(torch.vmap(frechet_distance)(X, Y), together)
    assert torch.allclose(torch.stack([frechet_distance(x, y) for x, y in zip(X, Y, strict=True)]), together)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bures_distance(torch.eye(2), torch.eye(3)), "got 2 and 3"),
        (lambda: frechet_distance(torch.ones(2, 5), torch.ones(3, 5)), "got 2 and 3"),
        (lambda: frechet_distance(torch.ones(2, 0), torch.ones(2, 5)), "at least one sample"),
        (lambda: frechet_distance(torch.ones(2, 5), torch.ones(2, 5), dim=4), "the samples' dimension"),
        (lambda: gaussian_frechet_distance(torch.ones(3), torch.eye(2), torch.ones(2), torch.eye(2)), r"\(3,\) and"),
        (lambda: frechet_distance(torch.ones(2, 5), (torch.ones(2, 1), torch.eye(2))), r"\(2, 1\) and"),
        (lambda: frechet_distance(torch.ones(2, 5), (torch.ones(1), torch.eye(2))), r"\(1,\) and"),
        (
            lambda: frechet_distance(torch.ones(2, 5), (torch.eye(2),)),
            r"a tuple of length 1; pass \(mean, covariance\)",
        ),
        (lambda: bures_distance(torch.zeros(2, 3, 3), torch.zeros(4, 3, 3)), r"broadcast, got \(2,\) and \(4,\)"),
        (lambda: frechet_distance(torch.ones(2, 3, 5), torch.ones(4, 3, 5)), r"broadcast, got \(2,\) and \(4,\)"),
        (
            lambda: frechet_distance(torch.ones(2, 3, 5), (torch.ones(4, 3), torch.eye(3))),
            r"\(2,\) and \(4,\) and \(\)",
        ),
        (
            lambda: gaussian_frechet_distance(*gaussian(torch.ones(2, 3, 5)), *gaussian(torch.ones(4, 3, 5))),
            "broadcast",
        ),
    ],
)
def test_a_mistake_is_named(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()


def test_a_mean_that_is_a_list_is_named():
    with pytest.raises(DtypeError, match="gaussian_frechet_distance expected a tensor, got list"):
        gaussian_frechet_distance([0.0], torch.eye(1), torch.zeros(1), torch.eye(1))
