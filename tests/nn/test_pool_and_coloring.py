"""Covariance pooling and whitening-colouring."""

import pytest
import torch
from torch.autograd import gradcheck

from orthocond.errors import ArgumentError, NonFiniteError
from orthocond.linalg import SOLVERS, covariance
from orthocond.nn import CovariancePool2d, WhiteningColoring2d, whiten_color

from cases import noise
from oracle import relative_error, root


def test_pool_is_the_root_of_the_covariance():
    x = noise(3, 6, 5, 5)
    Q = CovariancePool2d(vectorize=False)(x)
    assert relative_error(Q, root(covariance(x.flatten(2)), 0.5)) < 1e-5
    row, column = torch.triu_indices(6, 6)
    assert torch.equal(CovariancePool2d()(x), Q[:, row, column])
    assert CovariancePool2d()(x).shape == (3, 21)


@pytest.mark.parametrize("shape", [(2, 4, 3, 3), (2, 6, 2, 2), (1, 5, 1, 1)], ids=str)
def test_pool_gradient_also_with_fewer_positions_than_channels(shape):
    x = noise(*shape, dtype=torch.float64).requires_grad_()
    assert gradcheck(CovariancePool2d(), x)
    y = CovariancePool2d()(x.float())
    (grad,) = torch.autograd.grad(y.square().sum(), x)
    assert grad.isfinite().all()


@pytest.mark.parametrize("shape", [(2, 6, 2, 2), (70, 70, 2, 2)], ids=str)  # the second in parts of the batch
def test_the_triangle_has_the_derivatives_of_the_matrix(shape):
    row, column = torch.triu_indices(shape[1], shape[1])

    def derivatives(pooled):
        x = noise(*shape, dtype=torch.float64).requires_grad_()
        value = pooled(x)
        (first,) = torch.autograd.grad(value.pow(3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        return value, first, second

    whole = CovariancePool2d(vectorize=False)
    for found, expected in zip(
        derivatives(CovariancePool2d()), derivatives(lambda x: whole(x)[:, row, column]), strict=True
    ):
        assert torch.allclose(found, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("solver", SOLVERS)
def test_pool_keeps_the_eigenvalues_of_training(solver):
    layer, x = CovariancePool2d(solver=solver, eps=1e-3), noise(3, 4, 6, 6)
    layer.eval()(x)
    assert layer.last_eigenvalues is None
    layer.train()(x)
    assert torch.allclose(
        layer.last_eigenvalues.float(), torch.linalg.eigvalsh(covariance(x.flatten(2))).flip(-1), atol=1e-5
    )


def test_half_precision_features_may_be_large():
    x = (300 * noise(2, 4, 6, 6)).half()
    for y in (CovariancePool2d()(x), whiten_color(x, x)):
        assert y.dtype == torch.float16
        assert y.isfinite().all()


def test_pool_repr_and_errors():
    assert repr(CovariancePool2d(eps=1e-5, gradient="pade")) == (
        "CovariancePool2d(vectorize=True, eps=1e-05, rtol=None, gradient='pade')"
    )
    with pytest.raises(ArgumentError, match=r"\(B, C, H, W\), got \(2, 3\)"):
        CovariancePool2d()(torch.ones(2, 3))
    with pytest.raises(ArgumentError, match="CovariancePool2d got an unknown solver"):
        CovariancePool2d(solver="x")
    for bad in ({"solver": None}, {"function": torch.log}):
        with pytest.raises(ArgumentError, match=r"CovariancePool2d .*; choose one of"):
            CovariancePool2d(**bad)
    with pytest.raises(NonFiniteError, match="CovariancePool2d"):
        CovariancePool2d()(torch.full((2, 3, 4, 4), float("nan")))


def moments(x):
    return x.flatten(2).mean(-1), covariance(x.flatten(2))


@pytest.mark.parametrize("batch", [1, 2])
def test_coloring_gives_the_styles_moments(batch):
    content, style = noise(2, 4, 8, 8), 3 + noise(batch, 4, 9, 7, seed=2) * torch.tensor([1.0, 2, 3, 4]).view(4, 1, 1)
    y = whiten_color(content, style)
    for found, expected in zip(moments(y), moments(style), strict=True):
        assert torch.allclose(found, expected.expand_as(found), atol=1e-3)


def test_coloring_with_its_own_style_changes_nothing():
    x = noise(2, 4, 8, 8)
    assert torch.allclose(whiten_color(x, x), x, atol=1e-4)


def test_coloring_gradient_and_rank_deficient_content():
    content, style = (noise(1, 3, 3, 3, dtype=torch.float64, seed=s).requires_grad_() for s in (1, 2))
    assert gradcheck(WhiteningColoring2d(), (content, style))
    flat = noise(1, 8, 2, 2).requires_grad_()  # rank 3 of 8
    y = whiten_color(flat, noise(1, 8, 6, 6))
    y.square().sum().backward()
    assert flat.grad.isfinite().all()
    assert y.abs().max() < 50


def test_coloring_keeps_the_contents_eigenvalues_and_tells_bad_shapes():
    layer, x = WhiteningColoring2d(), noise(2, 4, 8, 8)
    layer(x, x)
    assert layer.last_eigenvalues.shape == (2, 4)
    with pytest.raises(ArgumentError, match=r"got \(2, 4, 8, 8\) and \(3, 4, 8, 8\)"):
        layer(x, noise(3, 4, 8, 8))
    with pytest.raises(ArgumentError, match="unknown gradient"):
        WhiteningColoring2d(gradient="x")
    with pytest.raises(ArgumentError, match="unknown solver None"):
        WhiteningColoring2d(solver=None)


@pytest.mark.parametrize("size", [2, 5])  # fewer positions than channels, and more
def test_pool_exports_with_a_dynamic_batch(size):
    pool, batch = CovariancePool2d(), torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(pool, (noise(5, 8, size, size),), dynamic_shapes=({0: batch},))
    x = noise(9, 8, size, size, seed=2)
    assert torch.allclose(program.module()(x), pool(x), atol=1e-3)


@pytest.mark.parametrize("places", [2, 4])
def test_jacobians_by_batched_gradients(places):
    x = torch.randn(1, 9, places, places, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows, together = (torch.autograd.functional.jacobian(CovariancePool2d(), x, vectorize=v) for v in (False, True))
    assert torch.allclose(together, rows)
