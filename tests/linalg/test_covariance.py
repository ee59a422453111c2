"""The covariance of eq. 2."""

import io

import numpy as np
import pytest
import torch

from orthocond.errors import ArgumentError, DtypeError
from orthocond.linalg import covariance
from orthocond.linalg._covariance import noise_floor

from cases import noise


def test_it_is_numpys_biased_covariance():
    X = noise(5, 40, dtype=torch.float64)
    assert np.allclose(covariance(X), np.cov(X.numpy(), bias=True))
    assert torch.allclose(covariance(X.T, dim=0), covariance(X))


def test_it_is_x_j_xt():
    X = noise(2, 3, 4, 10, dtype=torch.float64)
    J = (torch.eye(10) - 1 / 10).double() / 10
    assert torch.allclose(covariance(X), X @ J @ X.mT)
    assert torch.allclose(covariance(X, dim=-2), X.mT @ ((torch.eye(4) - 1 / 4).double() / 4) @ X)


def test_any_dimension_may_hold_the_samples():
    X = noise(20, 3, 4)
    assert torch.allclose(covariance(X, dim=0)[1], covariance(X[:, 1], dim=0), atol=1e-6)


@pytest.mark.parametrize("num_samples", [2, 37, 5000, 10**6])
@pytest.mark.parametrize("mean", [10.0**k for k in range(-6, 7, 2)])
def test_a_large_mean_costs_no_accuracy(mean, num_samples):
    X = noise(3, num_samples) + mean
    truth = covariance(X.double())
    assert ((covariance(X).double() - truth).norm() / truth.norm()).item() < 1e-5  # the rounding of the products


@pytest.mark.parametrize("num_samples", [2, 37, 5000, 10**6])
@pytest.mark.parametrize("mean", [sign * 10.0**k for k in range(-6, 7, 2) for sign in (1.0, -0.3)])
def test_a_constant_is_below_its_noise_floor_and_what_varies_is_above(mean, num_samples):
    levels = torch.tensor([[mean], [0.7 * mean]])
    constant = levels.expand(2, num_samples).clone()
    neighbours = constant.clone()
    neighbours[:, ::2] = constant[:, ::2].nextafter(torch.tensor(torch.inf))  # half of them, in both features at once
    for X in (constant, neighbours):
        largest = torch.linalg.eigvalsh(covariance(X.double()))[-1]
        assert max(largest, torch.linalg.eigvalsh(covariance(X).double())[-1]) <= floor_of(X)
    varying = levels + 1e-5 * levels.abs() * noise(2, num_samples)
    assert torch.linalg.eigvalsh(covariance(varying).double())[-1] > 10 * floor_of(varying)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_rounding_of_a_half_type_counts_where_there_is_nothing_else(dtype):
    constant = torch.full((2, 64), 3.0, dtype=dtype)
    neighbours = constant.clone()
    neighbours[:, ::2] += 3 * torch.finfo(dtype).eps / 2
    assert covariance(neighbours.float()).trace() > 0
    assert floor_of(neighbours) >= covariance(neighbours.float()).trace()
    varying = (constant + noise(2, 64)).to(dtype)
    assert floor_of(varying) == floor_of(varying.float())


def floor_of(X):
    return noise_floor(X.float().mean(-1), covariance(X.float()).trace(), X.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_and_autocast_are_summed_in_float32(dtype):
    X = noise(4, 1000).to(dtype)
    truth = covariance(X.double())
    assert covariance(X).dtype == dtype
    assert torch.allclose(covariance(X).double(), truth, atol=2 * torch.finfo(dtype).eps)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.allclose(covariance(X.float()).double(), truth, atol=1e-5)


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script:DeprecationWarning"
)  # torch's own, on the first forward derivative
def test_gradients_of_every_kind():
    X = noise(2, 3, 5, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(covariance, X, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(covariance, X)
    assert torch.allclose(torch.vmap(covariance)(X), covariance(X))
    compiled = torch.compile(covariance, fullgraph=True, backend="aot_eager")
    G = noise(2, 3, 3, dtype=torch.float64)
    found, truth = (torch.autograd.grad(function(X), X, G)[0] for function in (compiled, covariance))
    assert torch.allclose(found, truth)


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning", "ignore::torch.jit.TracerWarning"
)
def test_transforms_on_transforms_and_a_trace_that_can_be_saved():
    X, G = noise(3, 5, dtype=torch.float64), noise(3, 3, dtype=torch.float64)

    def loss(X):
        return (covariance(X) * G).square().sum()

    truth = torch.func.jacrev(torch.func.jacrev(loss))(X)
    for outer, inner in ((torch.func.jacfwd, torch.func.jacfwd), (torch.func.jacfwd, torch.func.jacrev)):
        assert torch.allclose(outer(inner(loss))(X), truth)
    torch.jit.save(torch.jit.trace(covariance, (X,)), io.BytesIO())


def test_the_gradient_of_features_with_a_large_mean_is_accurate():
    X, G = noise(4, 1000), noise(4, 4)
    truth = (G + G.T).double() / 1000 @ (X.double() - X.double().mean(-1, keepdim=True))
    X = (X + 1000).requires_grad_()
    assert torch.allclose(torch.autograd.grad(covariance(X), X, G)[0].double(), truth, atol=1e-6)


def test_of_the_features_nothing_but_themselves_is_kept():
    X = noise(8, 100).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor), lambda _: None):
        covariance(X)
    assert {tensor.untyped_storage().data_ptr() for tensor in kept} == {X.untyped_storage().data_ptr()}


def test_bad_input():
    with pytest.raises(ArgumentError, match=r"got \(3,\)"):
        covariance(torch.ones(3))
    with pytest.raises(ArgumentError, match="dim=2"):
        covariance(torch.ones(3, 3), dim=2)
    with pytest.raises(ArgumentError, match="at least one sample"):
        covariance(torch.ones(3, 0))
    with pytest.raises(DtypeError):
        covariance(torch.ones(3, 3, dtype=torch.int))
