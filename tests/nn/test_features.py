"""Sums, products and maps over the samples of a feature map: the same by every way, and as accurate as float32 is."""

import pytest
import torch

from orthocond._core import onednn, private
from orthocond.linalg._covariance import sum_of_products, symmetric_product
from orthocond.nn import CovariancePool2d, DecorrelatedBatchNorm2d
from orthocond.nn._features import features

from cases import noise

LAYOUTS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last}


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def num_threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(params=["MKL", "oneDNN"])
def way(request, monkeypatch):
    """Both ways on every processor, where torch has oneDNN."""
    function = private.onednn_linear() if request.param == "oneDNN" else None
    if request.param == "oneDNN" and function is None:
        pytest.skip("PyTorch has no oneDNN here")
    monkeypatch.setattr(onednn, "_linear", lambda: function)
    return request.param


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("shape", "groups"), [((9, 64, 32, 32), 1), ((5, 128, 23, 24), 2), ((3, 68, 80, 80), 1)])
@torch.no_grad()
def test_large_features(shape, groups, layout, num_threads, way):
    x, g = (noise(*shape, dtype=torch.float32).to(memory_format=LAYOUTS[layout]) for _ in range(2))
    g = g + 0.5 * x
    weight, other, bias = (noise(groups, shape[1] // groups, n, dtype=torch.float32) for n in [shape[1] // groups] * 3)
    weight, bias = weight.mT, bias[..., 0]  # neither is contiguous
    samples, others = features(x, groups), features(g, groups)
    X, G = (each.double().movedim(1, 0).reshape(groups, shape[1] // groups, -1) for each in (x, g))
    bound = 1e-6 * X.square().sum(-1).max()
    assert torch.allclose(samples.product(samples).double(), X @ X.mT, rtol=0, atol=bound)
    assert torch.allclose(others.product(samples).double(), G @ X.mT, rtol=0, atol=bound)

    def expected(Y):
        return Y.reshape(shape[1], shape[0], *shape[2:]).movedim(0, 1)

    mapped = samples.map(weight, bias).tensor()
    both = samples.map(weight, bias, (other, others)).tensor()
    wide, wide_other, wide_bias = weight.double(), other.double(), bias.double().unsqueeze(-1)
    assert mapped.is_contiguous(memory_format=LAYOUTS[layout])
    assert torch.allclose(mapped.double(), expected(wide @ X + wide_bias), rtol=0, atol=1e-4)
    assert torch.allclose(both.double(), expected(wide @ X + wide_other @ G + wide_bias), rtol=0, atol=2e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layer_is_the_same_by_every_way(layout, num_threads, way):
    x = noise(8, 64, 32, 32, dtype=torch.float32).to(memory_format=LAYOUTS[layout])
    results = []
    for dtype in (torch.float32, torch.float64):
        leaf = x.detach().clone().to(dtype).requires_grad_()
        layer = DecorrelatedBatchNorm2d(64, dtype=dtype)
        y = layer(leaf)
        y.pow(3).sum().backward()
        results.append((y.detach(), leaf.grad, layer.weight.grad))
    for found, expected in zip(*results, strict=True):
        assert torch.allclose(found.double(), expected, rtol=0, atol=5e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_eval_has_its_gradient_by_every_way(layout, num_threads, way):
    layer = DecorrelatedBatchNorm2d(64).eval()
    x = noise(8, 64, 32, 32, dtype=torch.float32).to(memory_format=LAYOUTS[layout]).requires_grad_()
    (to_x,) = torch.autograd.grad(layer(x).sum(), x)
    assert torch.allclose(to_x, torch.ones_like(x))
    with torch.inference_mode():
        assert torch.allclose(layer(x), x, atol=1e-6)


def test_less_precise_products_are_left_to_torch(monkeypatch):
    monkeypatch.setattr(onednn, "_linear", lambda: torch.nn.functional.linear)
    x = torch.ones(2, 2)
    with torch.no_grad():
        assert onednn.is_faster(x)
        assert not onednn.is_faster(x.double())
        before = torch.get_float32_matmul_precision()
        try:
            torch.set_float32_matmul_precision("medium")
            assert not onednn.is_faster(x)
        finally:
            torch.set_float32_matmul_precision(before)
    assert not onednn.is_faster(x)  # a derivative may be asked for


@pytest.mark.parametrize("shape", [(64, 300), (2, 3, 70, 50), (65, 5000), (3, 20, 10)])
@torch.no_grad()
def test_a_symmetric_product(shape):
    X = noise(*shape, dtype=torch.float64)
    found = symmetric_product(X, longest=1000)
    assert torch.allclose(found, sum_of_products(X, X, longest=1000), rtol=1e-12, atol=1e-12)


def test_a_function_of_torch_s_that_has_changed_is_not_used():
    def without_bias(x, weight, bias, *options):
        return x @ weight.mT

    def with_other_arguments(x, weight):
        return x @ weight.mT

    assert not onednn._works(without_bias)
    assert not onednn._works(with_other_arguments)
    assert onednn._works(lambda x, weight, bias, *options: x @ weight.mT + bias)


def test_a_precision_that_is_set_for_each_backend(monkeypatch):
    def refuses():
        raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr(onednn, "_linear", lambda: torch.nn.functional.linear)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", refuses)
    with torch.no_grad():
        assert not onednn.is_faster(torch.ones(2, 2))


def test_pooling_of_an_empty_batch(way):
    for num_positions in (7, 20):
        x = torch.empty(0, 256, num_positions, num_positions, requires_grad=True)
        y = CovariancePool2d()(x)
        y.sum().backward()
        assert y.shape == (0, 256 * 257 // 2)
        assert x.grad.shape == x.shape
