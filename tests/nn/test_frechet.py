"""The Frechet loss: its running reference, its gradient, and pooling with other functions than the root."""

import pytest
import torch

from orthocond.errors import ArgumentError, NonFiniteError
from orthocond.linalg import covariance, frechet_distance, matrix_logh, matrix_powerh
from orthocond.nn import CovariancePool2d, FrechetLoss

from cases import noise


def test_the_reference_is_that_of_all_samples():
    reference, x = 3 * noise(90, 4) + 1, noise(20, 4, seed=2)
    loss = FrechetLoss(4)
    for batch in reference.split([10, 50, 30]):
        loss.update(batch)
    assert torch.allclose(loss.running_mean, reference.mean(0), atol=1e-5)
    assert torch.allclose(loss.running_covariance, covariance(reference, dim=0), atol=1e-4)
    assert torch.allclose(loss(x), frechet_distance(x, reference, dim=0), rtol=1e-4)
    assert loss.num_samples_tracked == 90


def test_momentum_and_state():
    loss = FrechetLoss(3, momentum=0.5)
    loss(noise(5, 3), noise(40, 3))
    loss(noise(5, 3), noise(40, 3) + 2)
    assert torch.allclose(loss.running_mean, noise(40, 3).mean(0) + 1, atol=1e-5)
    copy = FrechetLoss(3)
    copy.load_state_dict(loss.state_dict())
    loss.eval()
    before = loss.running_mean.clone()
    assert loss(noise(5, 3), noise(40, 3) + 9) == copy(noise(5, 3))
    assert torch.equal(loss.running_mean, before)
    assert repr(loss) == "FrechetLoss(3, momentum=0.5)"


@pytest.mark.parametrize("num_samples", [1, 3, 50])
def test_training_reaches_the_reference(num_samples):
    loss = FrechetLoss(5)
    loss.update(2 * noise(200, 5) + 1)
    x = noise(num_samples, 5, seed=4).requires_grad_()
    before = loss(x).item()
    optimizer = torch.optim.SGD([x], lr=0.2 * num_samples)
    for _ in range(30):
        optimizer.zero_grad()
        loss(x).backward()
        assert x.grad.isfinite().all()
        optimizer.step()
    least = torch.linalg.eigvalsh(loss.running_covariance)[: max(0, 6 - num_samples)].sum().item()
    assert loss(x).item() < least + 0.05 * before


def test_the_reference_may_change_before_the_backward_pass():
    loss, x = FrechetLoss(8, dtype=torch.float64), noise(4, 8, dtype=torch.float64).requires_grad_()
    distance = loss(x, noise(30, 8, seed=2))
    (expected,) = torch.autograd.grad(distance, x, retain_graph=True)
    loss(x, noise(30, 8, seed=3) + 1)
    assert torch.equal(torch.autograd.grad(distance, x)[0], expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_features_that_are_not_finite_leave_the_reference_as_it_was(bad):
    loss = FrechetLoss(3)
    loss.update(noise(10, 3))
    before = [buffer.clone() for buffer in loss.buffers()]
    with pytest.raises(NonFiniteError, match="the reference is unchanged"):
        loss.update(torch.full((4, 3), bad))
    assert all(torch.equal(buffer, value) for buffer, value in zip(loss.buffers(), before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_may_have_large_means(dtype):
    loss, reference = FrechetLoss(3, dtype=dtype), 10 * noise(1000, 3) + 1000
    for batch in reference.split(250):
        loss.update(batch)
    assert {buffer.dtype for buffer in loss.buffers()} == {dtype, torch.long}
    assert torch.allclose(loss.running_mean.float(), reference.mean(0), rtol=4 * torch.finfo(dtype).eps)
    assert loss(reference).isfinite()


def test_compiled_it_is_nan_until_there_is_a_reference():
    loss, x = FrechetLoss(3), noise(5, 3)
    compiled = torch.compile(loss, backend="eager", fullgraph=True)
    assert compiled(x).isnan()
    loss.update(noise(20, 3, seed=2))
    assert torch.allclose(compiled(x), loss(x))


def test_mistakes_are_named():
    with pytest.raises(ArgumentError, match="no reference yet"):
        FrechetLoss(3)(torch.ones(2, 3))
    with pytest.raises(ArgumentError, match=r"expected features \(N, 3\)"):
        FrechetLoss(3).update(torch.ones(2, 4))
    with pytest.raises(ArgumentError, match="momentum in"):
        FrechetLoss(3, momentum=2.0)


@pytest.mark.parametrize(
    ("choice", "function"),
    [("log", matrix_logh), ("power(exponent=0.3)", lambda P: matrix_powerh(P, 0.3))],
)
@pytest.mark.parametrize("size", [2, 6])
def test_pooling_with_another_function(choice, function, size):
    x = noise(2, 8, size, size, dtype=torch.float64).requires_grad_()
    layer = CovariancePool2d(function=choice, vectorize=False)
    assert torch.allclose(layer(x), function(covariance(x.flatten(2))))
    (grad,) = torch.autograd.grad(layer(x).sum(), x)
    assert grad.isfinite().all()
    assert layer.last_eigenvalues.shape == (2, 8)
    assert f"function={choice!r}" in repr(layer)


def test_a_function_that_is_none_is_refused_at_once():
    with pytest.raises(ArgumentError, match="unknown function 'sqr'"):
        CovariancePool2d(function="sqr")
    with pytest.raises(ArgumentError, match="use solver='eigh'"):
        CovariancePool2d(function="log", solver="newton_schulz")
