"""Projectors and single eigenvectors: value, derivatives at ties, the edge, transforms."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from orthocond.errors import ArgumentError
from orthocond.linalg import spectral_projector, top_eigenvector

from cases import hostile, noise, rotation

F64 = torch.float64

SPECTRA = {
    "spread": [5.0, 3.0, 2.0, 1.0, -1.0],
    "ties inside": [4.0, 4.0, 2.0, 1.0, 0.5],
    "ties outside": [4.0, 3.0, 1.0, 1.0, 1.0],
    "ties on both sides": [4.0, 4.0, 1.0, 1.0, 1.0],
    "rank two": [4.0, 3.0, 0.0, 0.0, 0.0],
    "negative": [-1.0, -1.0, -3.0, -3.0, -4.0],
}


def matrix(spectrum, dtype=F64):
    U = rotation(5)
    return ((U * torch.tensor(spectrum, dtype=F64)) @ U.mT).to(dtype)


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (F64, 1e-13)])
@pytest.mark.parametrize("name", SPECTRA)
def test_value(name, dtype, bound, largest):
    A = matrix(SPECTRA[name], dtype)
    Q = spectral_projector(A, 2 if largest else 3, largest=largest)
    U = torch.linalg.eigh(A.double()).eigenvectors
    U = U[:, -2:] if largest else U[:, :3]
    assert Q.dtype == dtype
    assert (Q - U @ U.mT).abs().max() < bound


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("name", SPECTRA)
def test_derivatives_see_only_the_gap_at_the_edge(name, largest):
    A = matrix(SPECTRA[name]).requires_grad_()

    def function(A):
        return spectral_projector(A, 2 if largest else 3, largest=largest)

    assert gradcheck(function, A, check_forward_ad=True)
    assert gradgradcheck(function, A, check_fwd_over_rev=True)


def test_the_two_projectors_add_up_to_the_identity():
    A = noise(3, 5, 5, dtype=F64)
    both = spectral_projector(A, 2) + spectral_projector(A, 3, largest=False)
    assert torch.allclose(both, torch.eye(5, dtype=F64), atol=1e-14)


@pytest.mark.parametrize("k", [0, 5])
def test_nothing_and_everything(k):
    A = noise(2, 5, 5).requires_grad_()
    Q = spectral_projector(A, k)
    assert torch.equal(Q, (k > 0) * torch.eye(5).expand(2, 5, 5))


def test_a_closed_gap_is_bounded():
    A = torch.eye(4).requires_grad_()
    Q = spectral_projector(A, 2)
    assert torch.allclose(Q @ Q, Q, atol=1e-6)
    Q.pow(3).sum().backward()
    assert A.grad.abs().max() < 10


EIGENVECTORS = {
    "spread": [5.0, 3.0, 2.0, 1.0, -1.0],
    "ties elsewhere": [4.0, 2.0, 2.0, 2.0, 1.0],
    "rank one": [4.0, 0.0, 0.0, 0.0, 0.0],
}


@pytest.mark.parametrize("name", EIGENVECTORS)
def test_the_top_eigenvector(name):
    A = matrix(EIGENVECTORS[name])
    v = top_eigenvector(A)
    assert torch.allclose(A @ v, EIGENVECTORS[name][0] * v)
    assert v[v.abs().argmax()] > 0
    assert gradcheck(top_eigenvector, A.requires_grad_(), check_forward_ad=True)
    assert gradgradcheck(top_eigenvector, A)


def test_the_sign_does_not_follow_the_solvers():
    A = matrix(EIGENVECTORS["spread"])
    for seed in range(5):
        permutation = torch.randperm(5, generator=torch.Generator().manual_seed(seed))
        v = top_eigenvector(A[permutation][:, permutation])
        assert torch.allclose(v, top_eigenvector(A)[permutation])


def test_the_smallest_eigenvector_in_a_batch_with_others():
    A = noise(3, 4, 6, 6, dtype=F64)
    A = A @ A.mT
    v = top_eigenvector(A, largest=False)
    smallest = torch.linalg.eigvalsh(A)[..., 0]
    assert torch.allclose((A @ v.unsqueeze(-1)).squeeze(-1), smallest.unsqueeze(-1) * v, atol=1e-10)
    assert torch.allclose(v[1, 2], top_eigenvector(A[1, 2], largest=False))


@pytest.mark.parametrize("function", [lambda A: spectral_projector(A, 2), top_eigenvector])
def test_transforms_and_half_types(function):
    A = noise(4, 5, 5)
    A = A @ A.mT
    assert torch.allclose(torch.vmap(function)(A), function(A), atol=1e-6)
    compiled = torch.compile(function, fullgraph=True)
    one, other = (A.clone().requires_grad_() for _ in range(2))
    for f, x in ((compiled, one), (function, other)):
        f(x)[..., 0].sum().backward()
    assert torch.allclose(one.grad, other.grad, rtol=1e-4, atol=1e-5)
    half = function(A.half().requires_grad_())
    assert half.dtype == torch.float16
    assert torch.isfinite(half).all()


def test_hostile_matrices_are_finite():
    for i in range(200):
        A = noise(5, 5, seed=i) * 10.0 ** (i % 61 - 30)
        A[i % 5] = 0 if i % 2 else A[0]
        A.requires_grad_()
        loss = spectral_projector(A, 1 + i % 4).pow(3).sum() + top_eigenvector(A).pow(3).sum()
        (G,) = torch.autograd.grad(loss, A)
        assert torch.isfinite(loss)
        assert torch.isfinite(G).all()


def test_bad_input():
    for k in (4, 1.5):
        with pytest.raises(ArgumentError, match=f"an integer 0 <= k <= 3 for 3x3 matrices, got k={k}"):
            spectral_projector(torch.eye(3), k)
    with pytest.raises(ArgumentError, match="at least 1x1"):
        top_eigenvector(torch.zeros(0, 0))


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_hostile_matrices(dtype):
    A = hostile(1000, 4, dtype, seed=4).requires_grad_()
    for function in (lambda A: spectral_projector(A, 2), top_eigenvector):
        value = function(A)
        (G,) = torch.autograd.grad(value.pow(3).sum(), A)
        assert torch.isfinite(value).all()
        assert torch.isfinite(G).all()
