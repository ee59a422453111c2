"""Rigid and similarity alignment: agreement with others, gradients, degenerate points."""

import numpy as np
import pytest
import roma
import torch
from scipy.spatial.transform import Rotation
from torch.autograd import gradcheck, gradgradcheck

from orthocond.errors import ArgumentError, DtypeError
from orthocond.linalg import nearest_rotation, procrustes

from cases import hostile, noise

F64 = torch.float64


def problem(n=20, d=3, batch=(), noise_size=0.1, dtype=F64, scale=1.0):
    X = noise(*batch, n, d, dtype=F64)
    R = nearest_rotation(noise(*batch, d, d, dtype=F64, seed=2))
    t = noise(*batch, 1, d, dtype=F64, seed=3)
    Y = scale * X @ R.mT + t + noise_size * noise(*batch, n, d, dtype=F64, seed=4)
    return X.to(dtype), Y.to(dtype), noise(*batch, n, dtype=F64, seed=5).square().to(dtype), R, t


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (F64, 1e-12)])
def test_agrees_with_scipy(dtype, bound):
    X, Y, weights, _, _ = problem(dtype=dtype)
    found = procrustes(X, Y, weights, translation=False)
    x, y, w = (part.double().numpy() for part in (X, Y, weights))
    expected, rssd = Rotation.align_vectors(y, x, w)
    assert np.abs(found.rotation.numpy() - expected.as_matrix()).max() < bound
    assert abs(found.residual.item() - rssd**2 / w.sum()) < 2 * bound * rssd**2 / w.sum()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (F64, 1e-12)])
@pytest.mark.parametrize("scale", [False, True])
def test_agrees_with_roma(dtype, bound, scale):
    X, Y, weights, _, _ = problem(batch=(4,), dtype=dtype, scale=2.0 if scale else 1.0)
    found = procrustes(X, Y, weights, scale=scale)
    expected = roma.rigid_points_registration(X.double(), Y.double(), weights.double(), compute_scaling=scale)
    assert (found.rotation - expected[0]).abs().max() < bound
    assert (found.translation - expected[1]).abs().max() < bound
    if scale:
        assert (found.scale - expected[2]).abs().max() < bound


@pytest.mark.parametrize("d", [1, 2, 3, 6])
def test_recovers_a_similarity_in_any_dimension(d):
    X, Y, _, R, t = problem(d=d, batch=(2, 3), noise_size=0.0, scale=2.5)
    found = procrustes(X, Y, scale=True)
    assert torch.allclose(found.rotation, R, atol=1e-10)
    assert torch.allclose(found.scale, torch.tensor(2.5, dtype=F64))
    assert torch.allclose(found.translation, t.squeeze(-2))
    assert found.residual.max() < 1e-20


@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("translation", [False, True])
def test_gradients_with_respect_to_points_and_weights(scale, translation):
    X, Y, weights, _, _ = problem(n=4)
    inputs = tuple(part.requires_grad_() for part in (X, Y, weights + 0.1))

    def function(X, Y, weights):
        found = procrustes(X, Y, weights, scale=scale, translation=translation)
        return found.rotation, found.residual, *([found.scale] * scale), *([found.translation] * translation)

    assert gradcheck(function, inputs, check_forward_ad=True)
    assert gradgradcheck(function, inputs)


DEGENERATE = {
    "one point": lambda X: X[:1],
    "all points are one": lambda X: X[:1].expand_as(X),
    "on a line": lambda X: X[:, :1] * torch.tensor([1.0, 2.0, -1.0]),
    "two points": lambda X: X[:2],
    "zeros": torch.zeros_like,
    "huge": lambda X: X * 1e18,
    "tiny": lambda X: X * 1e-18,
    "far away": lambda X: X + 1e6,
}


@pytest.mark.parametrize("weighted", ["equal", "zero", "one"])
@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("name", DEGENERATE)
def test_degenerate_points_are_defined_and_finite(name, scale, weighted):
    X, Y, _, _, _ = problem(dtype=torch.float32)
    X, Y = (DEGENERATE[name](part).clone().requires_grad_() for part in (X, Y))
    weights = torch.full(X.shape[:-1], 0.0 if weighted != "equal" else 1.0)
    if weighted == "one":
        weights[0] = 1.0
    weights.requires_grad_()
    found = procrustes(X, Y, weights, scale=scale)
    loss = sum(part.pow(2).sum() for part in found[:3]) + found.residual.sum().clamp(max=1e30)
    gradients = torch.autograd.grad(loss, (X, Y, weights))
    assert all(torch.isfinite(part).all() for part in (*found, *gradients))
    assert (torch.linalg.det(found.rotation) - 1).abs() < 1e-5


@pytest.mark.parametrize("d", [2, 3, 6])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_hostile_points(d, dtype):
    points = hostile(1000, d, dtype, seed=d)
    for scale in (False, True):
        inputs = [part.clone().requires_grad_() for part in (points, points.roll(1, 0), points[..., 0].abs())]
        found = procrustes(*inputs, scale=scale)
        gradients = torch.autograd.grad(found.rotation.pow(3).sum(), inputs)
        assert all(torch.isfinite(part).all() for part in (*found, *gradients))


def test_one_point_is_moved_and_nothing_turned():
    found = procrustes(torch.tensor([[1.0, 2.0]]), torch.tensor([[4.0, 4.0]]), scale=True)
    assert torch.equal(found.rotation, torch.eye(2))
    assert found.scale == 1
    assert torch.equal(found.translation, torch.tensor([3.0, 2.0]))


def test_a_point_without_weight_does_not_matter():
    X, Y, _, _, _ = problem()
    weights = torch.ones(20, dtype=F64)
    weights[3] = 0
    moved = Y.clone()
    moved[3] += 100
    for one, other in zip(procrustes(X, Y, weights), procrustes(X, moved, weights), strict=True):
        assert torch.allclose(one, other)


def test_batches_broadcast_and_are_independent():
    X, Y, weights, _, _ = problem(batch=(4,))
    one = procrustes(X[0], Y, weights)
    for i in range(4):
        for part, alone in zip(one, procrustes(X[0], Y[i], weights[i]), strict=True):
            assert torch.allclose(part[i], alone, atol=1e-12)
    for part, mapped in zip(one, torch.vmap(procrustes, (None, 0, 0))(X[0], Y, weights), strict=True):
        assert torch.allclose(part, mapped, atol=1e-12)


def test_compiled_without_a_graph_break():
    X, Y, weights, _, _ = problem(dtype=torch.float32)
    compiled = torch.compile(lambda X: procrustes(X, Y, weights, scale=True), fullgraph=True)
    for part, expected in zip(compiled(X), procrustes(X, Y, weights, scale=True), strict=True):
        assert torch.allclose(part, expected, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types(dtype):
    X, Y, weights, R, _ = problem(noise_size=0.0, dtype=dtype)
    found = procrustes(X.requires_grad_(), Y, weights)
    assert {part.dtype for part in found} == {dtype}
    assert (found.rotation.double() - R).abs().max() < 8 * torch.finfo(dtype).eps
    found.rotation.sum().backward()
    assert torch.isfinite(X.grad).all()


def test_bad_input():
    X = torch.zeros(4, 3)
    with pytest.raises(ArgumentError, match=r"\(4, 3\) and \(5, 3\); pass as many points"):
        procrustes(X, torch.zeros(5, 3))
    with pytest.raises(ArgumentError, match=r"weights .* for 4 points, got \(3,\)"):
        procrustes(X, X, torch.ones(3))
    with pytest.raises(ArgumentError, match=r"broadcast, got \(5,\) and \(1,\) and \(6,\)"):
        procrustes(X.expand(5, 4, 3), X[None], torch.ones(6, 4))
    with pytest.raises(DtypeError):
        procrustes(X, X.long())
