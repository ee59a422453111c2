"""Features that don't vary: their rounding is noise, and no layer whitens it."""

import pytest
import torch
from torch import nn

from orthocond import ConditionMonitor, treat
from orthocond.errors import NonFiniteError
from orthocond.linalg import SOLVERS
from orthocond.nn import (
    CovariancePool2d,
    DecorrelatedBatchNorm1d,
    DecorrelatedBatchNorm2d,
    DecorrelatedBatchNorm3d,
    WhiteningColoring2d,
    whiten_color,
)

from cases import noise

CONSTANTS = [sign * 10.0**k for k in range(-6, 7, 2) for sign in (1.0, 0.3, -1.1)]
SHAPES = {
    DecorrelatedBatchNorm1d: [(2, 4), (7, 4), (5, 4, 33), (100_000, 4)],
    DecorrelatedBatchNorm2d: [(32, 4, 16, 16), (500, 4, 3, 3)],
    DecorrelatedBatchNorm3d: [(3, 4, 5, 6, 7)],
}


def options(solver):
    return {"solver": solver} if SOLVERS[solver].has_eigenvalues else {"solver": solver, "eps": 1e-30}


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_blank_batch_leaves_the_layer_as_it_was(solver):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), DecorrelatedBatchNorm2d(8, **options(solver)))
    for _ in range(50):
        model(torch.randn(32, 3, 16, 16))
    x = torch.randn(32, 3, 16, 16)
    before = model.eval()(x)
    y = model.train()(torch.full((32, 3, 16, 16), 0.3))
    y.square().sum().backward()
    assert y.abs().max() < 1e-3
    assert model[0].weight.grad.abs().max() < 1e-3
    after = model.eval()(x)
    assert after.abs().max() < 1.1 * before.abs().max()  # a tenth of the old whitening matrix is gone, nothing else


@pytest.mark.filterwarnings("ignore:.*samples in training")
@pytest.mark.parametrize(("kind", "shape"), [(kind, shape) for kind, shapes in SHAPES.items() for shape in shapes])
@pytest.mark.parametrize("groups", [1, 4])
def test_constant_channels_beside_others_stay_at_the_shift(kind, shape, groups):
    layer = kind(4, groups=groups)
    for constant in CONSTANTS:
        x = noise(*shape)
        x[:, 1] = constant
        x.requires_grad_()
        y = layer(x)
        (to_x,) = torch.autograd.grad(y, x, torch.ones_like(y) + x.detach() * (x.detach().abs() < 10))
        assert y[:, 1].abs().max() < 1e-3, constant
        assert to_x[:, 1].abs().max() < 1e-2, constant
        if groups == 4:
            others = kind(3, groups=3)(x[:, [0, 2, 3]].detach())
            assert torch.allclose(y[:, [0, 2, 3]], others, atol=1e-5), constant


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_neighbouring_numbers_are_one(dtype):
    x = torch.full((64, 3), 3.0, dtype=dtype)
    x[::2] += 3 * torch.finfo(dtype).eps / 2
    assert len(x.unique()) == 2
    assert not DecorrelatedBatchNorm1d(3)(x).any()


@pytest.mark.parametrize("compiled", [False, True])
def test_traced_layers_know_the_noise(compiled):
    layer = DecorrelatedBatchNorm1d(3, affine=False)
    x = torch.full((64, 3), 0.3)
    x[:, 1] = 7.7
    function = torch.compile(layer, backend="aot_eager") if compiled else layer
    assert not function(x).any()
    vmapped = torch.vmap(DecorrelatedBatchNorm1d(3, track_running_stats=False, affine=False))
    assert not vmapped(torch.stack([x, 3 * x])).any()


@pytest.mark.parametrize("constant", CONSTANTS)
def test_one_colour_is_given_the_styles_mean(constant):
    colour = constant * torch.tensor([1.0, 0.5, 0.7]).view(1, 3, 1, 1)
    content, style = colour.expand(1, 3, 33, 31).clone().requires_grad_(), 1 + noise(1, 3, 9, 9)
    for y in (whiten_color(content, style), WhiteningColoring2d()(content, style)):
        (to_content,) = torch.autograd.grad(y, content, noise(*y.shape))
        assert torch.allclose(y, style.mean((2, 3), keepdim=True).expand_as(y), atol=1e-4)
        assert to_content.abs().max() < 1e-3


@pytest.mark.parametrize("constant", CONSTANTS)
def test_pooling_of_one_colour_is_zero_with_no_gradient(constant):
    x = torch.full((2, 4, 9, 9), constant, requires_grad=True)
    y = CovariancePool2d()(x)
    (to_x,) = torch.autograd.grad(y.sum(), x)
    assert not y.any()
    assert not to_x.any()


def test_at_a_large_mean_the_output_is_as_accurate_as_batchnorms():
    x = (noise(5000, 6) + 1e6).contiguous()
    centred = x.double() - x.double().mean(0)
    eigenvalues, U = torch.linalg.eigh(centred.T @ centred / len(x))
    truth = centred @ (U * eigenvalues.rsqrt()) @ U.T
    error = (DecorrelatedBatchNorm1d(6)(x) - truth).abs().max()
    batchnorm = nn.BatchNorm1d(6, eps=1e-12)
    of_batchnorm = (batchnorm(x) - centred / centred.square().mean(0).sqrt()).abs().max()
    assert error < 1e-5
    assert error <= of_batchnorm


def test_the_monitor_counts_noise_to_no_rank():
    model = nn.Sequential(DecorrelatedBatchNorm2d(3), nn.BatchNorm2d(3))
    x = torch.full((8, 3, 5, 5), 0.3)
    x[:, 1] = 7.7
    x[::2] = x[::2].nextafter(torch.tensor(torch.inf))
    with ConditionMonitor(model, layers=["1"]) as monitor:
        model(x)
        model[1](x)
    assert [record["rank"] for record in monitor.history()] == [0, 0, 0]
    assert monitor.history()[0]["cond_support"] == 1.0


def test_gauge_leaves_the_weight_alone_where_there_is_nothing_but_noise():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), DecorrelatedBatchNorm2d(4))
    treatment = treat(model, "0", "gauge")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    treatment.attach(optimizer)
    before = model[0].weight.detach().clone()
    x = torch.full((8, 3, 5, 5), 0.3)
    x[::2] = x[::2].nextafter(torch.tensor(torch.inf))
    model(x).square().sum().backward()
    optimizer.step()
    assert treatment.last.cond_before == 1.0
    assert torch.equal(model[0].weight, before)


def test_healthy_features_are_whitened_as_without_a_floor(monkeypatch):
    x = noise(16, 6, 8, 8) + 0.5
    found = DecorrelatedBatchNorm2d(6)(x)
    monkeypatch.setattr("orthocond.nn._whitening.noise_floor", lambda mean, *_: torch.zeros_like(mean[..., 0]))
    assert torch.equal(found, DecorrelatedBatchNorm2d(6)(x))


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("make", [CovariancePool2d, lambda **given: DecorrelatedBatchNorm2d(4, **given)])
def test_nan_is_told_and_not_taken_for_noise(make, solver):
    x = noise(2, 4, 5, 5)
    x[1, 0, 0, 0] = torch.nan
    with pytest.raises(NonFiniteError):
        make(solver=solver)(x)
