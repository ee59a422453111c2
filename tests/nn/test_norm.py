"""Decorrelated batch norm: what it computes, its gradient, its habits and its errors."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad as fwAD
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from orthocond.errors import ArgumentError, DtypeError, NonFiniteError, OrthocondWarning
from orthocond.linalg import SOLVERS, covariance
from orthocond.nn import CovariancePool2d, DecorrelatedBatchNorm1d, DecorrelatedBatchNorm2d, DecorrelatedBatchNorm3d

from cases import noise

INPUTS = {
    "(N, C)": (DecorrelatedBatchNorm1d, (200, 6)),
    "(N, C, L)": (DecorrelatedBatchNorm1d, (20, 6, 9)),
    "NCHW": (DecorrelatedBatchNorm2d, (8, 6, 7, 5)),
    "NCHW, long": (DecorrelatedBatchNorm2d, (2, 6, 17, 16)),
    "NCDHW": (DecorrelatedBatchNorm3d, (4, 6, 5, 4, 3)),
}
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def correlated(*shape, dtype=torch.float32, seed=1):
    """Features with a random covariance and mean."""
    mixing = noise(shape[1], shape[1], dtype=torch.float64, seed=seed)
    x = torch.einsum("ij,nj...->ni...", mixing, noise(*shape, dtype=torch.float64, seed=seed + 1))
    return (x + noise(1, shape[1], *[1] * (len(shape) - 2), dtype=torch.float64, seed=seed + 2)).to(dtype).contiguous()


def samples(x, groups=1):
    """(groups, c, M)"""
    return x.movedim(1, 0).reshape(groups, x.shape[1] // groups, -1)


def reference(x, gamma, beta, groups=1, eps=0.0):
    """The definition in float64, with the root by the oracle's way: Schur through eigh of the covariance."""
    X = samples(x.double(), groups)
    mean = X.mean(-1, keepdim=True)
    P = (X - mean) @ (X - mean).mT / X.shape[-1]
    l, U = torch.linalg.eigh(P)
    Y = (U * (l + eps).rsqrt().unsqueeze(-2)) @ U.mT @ (X - mean)
    Y = Y.reshape(x.shape[1], x.shape[0], *x.shape[2:]).movedim(0, 1)
    shape = (1, -1) + (1,) * (x.ndim - 2)
    return Y * gamma.double().view(shape) + beta.double().view(shape)


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("kind", INPUTS)
def test_output_is_white_and_gradients_are_those_of_the_definition(kind, channels_last, groups):
    cls, shape = INPUTS[kind]
    if channels_last and len(shape) not in LAST:
        pytest.skip("no channels last layout in so few dimensions")
    layer = cls(6, groups=groups)
    nn.init.uniform_(layer.weight, 0.5, 2)
    nn.init.uniform_(layer.bias)
    x = correlated(*shape)
    x = (x.to(memory_format=LAST[len(shape)]) if channels_last else x).requires_grad_()
    g = noise(*shape, seed=5)
    y = layer(x)
    found = torch.autograd.grad(y, (x, layer.weight, layer.bias), g)
    assert y.stride() == x.stride()
    white = (y.detach() - layer.bias.view(1, -1, *[1] * (x.ndim - 2))) / layer.weight.view(1, -1, *[1] * (x.ndim - 2))
    assert torch.allclose(covariance(samples(white, groups)), torch.eye(6 // groups), atol=1e-3)
    assert samples(white).mean(-1).abs().max() < 1e-4
    truth = reference(x, layer.weight, layer.bias, groups)
    condition = torch.linalg.cond(covariance(samples(x.detach().double(), groups))).max().item()
    assert torch.allclose(y.double(), truth, atol=1e-5 + 4 * torch.finfo(x.dtype).eps * condition)
    for gradient, exact in zip(
        found, torch.autograd.grad(truth, (x, layer.weight, layer.bias), g.double()), strict=True
    ):
        assert torch.linalg.vector_norm(gradient - exact) < 1e-4 * torch.linalg.vector_norm(exact)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("shift", [0.0, 1e3])
def test_gradcheck(solver, shift):
    options = {"newton_schulz": "(iterations=40)", "pade": "(degree=80, iterations=40)"}.get(solver, "")
    layer = DecorrelatedBatchNorm2d(3, solver=solver + options, dtype=torch.float64)
    x = (correlated(5, 3, 2, 2, dtype=torch.float64) + shift).requires_grad_()
    function = lambda x, w, b: torch.func.functional_call(layer, {"weight": w, "bias": b}, x)
    assert gradcheck(function, (x, layer.weight, layer.bias), atol=1e-4)


@pytest.mark.parametrize("groups", [1, 2])
def test_gradgradcheck(groups):
    layer = DecorrelatedBatchNorm1d(4, groups=groups, dtype=torch.float64)
    x = correlated(9, 4, dtype=torch.float64).requires_grad_()
    function = lambda x, w, b: torch.func.functional_call(layer, {"weight": w, "bias": b}, x)
    assert gradgradcheck(function, (x, layer.weight, layer.bias))


def test_a_mean_far_from_zero_costs_no_accuracy():
    x = correlated(16, 8, 8, 8)
    far = x + 1000 * x.std()
    y = DecorrelatedBatchNorm2d(8)(far)
    assert torch.allclose(covariance(samples(y)[0]), torch.eye(8), atol=1e-3)
    centred = (far.double() - far.double().mean((0, 2, 3), keepdim=True)).float()
    assert torch.allclose(y, DecorrelatedBatchNorm2d(8)(centred), atol=2e-2)


def test_a_mean_far_from_zero_in_one_group_alone():
    x = torch.cat([100 * noise(16, 4, 8, 8), 100 + 0.1 * noise(16, 4, 8, 8, seed=2)], 1)
    y = DecorrelatedBatchNorm2d(8, groups=2)(x)
    assert torch.allclose(covariance(samples(y, 2)), torch.eye(4), atol=1e-3)


@pytest.mark.parametrize("shift", [0.5, 1e3])
def test_hooks_that_copy_what_is_saved_change_nothing(shift):
    x, g = correlated(6, 4, 5, 5) + shift, noise(6, 4, 5, 5)
    found = []
    for pack in (lambda t: t, lambda t: t.clone()):
        layer, leaf = DecorrelatedBatchNorm2d(4), x.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = layer(leaf)
        y.backward(g)
        found.append((leaf.grad, layer.weight.grad))
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_runs_it_as_often_as_batchnorm(use_reentrant, solver):
    x, g = correlated(6, 4, 5, 5), noise(6, 4, 5, 5)
    layer, batchnorm, gradients = DecorrelatedBatchNorm2d(4, solver=solver), nn.BatchNorm2d(4), []
    for run in (layer, batchnorm, DecorrelatedBatchNorm2d(4, solver=solver)):
        leaf = x.clone().requires_grad_()
        model = lambda x, run=run: torch.sin(run(1.5 * x))
        y = checkpoint(model, leaf, use_reentrant=use_reentrant) if len(gradients) < 2 else model(leaf)
        y.backward(g)
        gradients.append(leaf.grad)
    assert torch.equal(gradients[0], gradients[2])
    assert layer.num_batches_tracked <= batchnorm.num_batches_tracked == 2


def test_a_batch_too_small_for_full_rank_is_said_once():
    layer = DecorrelatedBatchNorm2d(8)
    with pytest.warns(OrthocondWarning, match="8 samples in training for the 8 channels: .* rank 7 at most"):
        layer(noise(2, 8, 2, 2))
    layer(noise(2, 8, 2, 1))  # said already
    DecorrelatedBatchNorm2d(8)(noise(1, 8, 3, 3))
    DecorrelatedBatchNorm2d(8).eval()(noise(2, 8, 2, 2))
    with pytest.warns(OrthocondWarning, match="4 channels of each of the 2 groups"):
        DecorrelatedBatchNorm2d(8, groups=2)(noise(1, 8, 2, 2))


def test_torch_func():
    layer = DecorrelatedBatchNorm1d(3, track_running_stats=False, affine=False)
    x = correlated(9, 3)
    loss = lambda x: layer(x).pow(3).sum()
    leaf = x.clone().requires_grad_()
    loss(leaf).backward()
    assert torch.allclose(torch.func.grad(loss)(x), leaf.grad, atol=1e-3)


@pytest.mark.parametrize("transform", [torch.func.jacrev, torch.func.vmap])
@pytest.mark.parametrize("make", [lambda: DecorrelatedBatchNorm1d(3, track_running_stats=False), CovariancePool2d])
def test_a_forward_of_torch_func_leaves_nothing_behind(transform, make):
    layer = make()
    x = correlated(9, 3) if layer.__class__ is DecorrelatedBatchNorm1d else correlated(2, 3, 4, 4)
    layer(x)
    before = layer.last_eigenvalues.clone()
    transform(layer)(x if transform is torch.func.jacrev else x[None])
    assert torch.equal(copy.deepcopy(layer).last_eigenvalues, before)
    torch.save(layer, io.BytesIO())


def test_forward_mode_and_batched_gradients():
    layer, x = DecorrelatedBatchNorm1d(3, track_running_stats=False).double(), correlated(9, 3, dtype=torch.float64)
    expected = torch.autograd.functional.jacobian(layer, x)
    assert torch.allclose(torch.autograd.functional.jacobian(layer, x, vectorize=True), expected)
    tangent = noise(9, 3, dtype=torch.float64, seed=5)
    with fwAD.dual_level():
        turned = fwAD.unpack_dual(layer(fwAD.make_dual(x, tangent))).tangent
    assert torch.allclose(turned, torch.einsum("ijkl,kl->ij", expected, tangent))


def test_statistics_can_be_estimated_without_gradients():
    layer = DecorrelatedBatchNorm2d(4)
    with torch.inference_mode():
        layer(correlated(6, 4, 5, 5))
    with torch.no_grad():
        layer(correlated(6, 4, 5, 5))
    assert layer.num_batches_tracked == 2


def test_frozen_parts_get_no_gradient():
    layer = DecorrelatedBatchNorm2d(4)
    layer(correlated(6, 4, 5, 5)).sum().backward()  # the input needs none
    assert layer.weight.grad is not None
    layer.requires_grad_(False)
    x = correlated(6, 4, 5, 5).requires_grad_()
    layer(x).pow(3).sum().backward()
    assert x.grad is not None


def test_a_rank_deficient_stem_is_the_same_in_training_and_eval():
    conv = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    layer = DecorrelatedBatchNorm2d(64)
    for seed in range(60):
        x = noise(16, 3, 8, 8, seed=seed)
        y = layer(conv(x))
    y.square().mean().backward()
    assert conv.weight.grad.isfinite().all()
    assert layer.last_eigenvalues.shape == (1, 64)
    kept = (layer.last_eigenvalues[0] > 1e-4 * layer.last_eigenvalues[0, 0]).sum()
    assert 20 <= kept <= 27
    training = y.abs().max()
    assert layer.eval()(conv(x)).abs().max() < 2 * training


def test_nothing_dropped_is_the_papers_setting():
    layer = DecorrelatedBatchNorm2d(4, eps=1e-2, rtol=0.0)
    x = correlated(8, 4, 5, 5)
    assert torch.allclose(layer(x).double(), reference(x, layer.weight, layer.bias, eps=1e-2), atol=1e-4)


def test_a_dead_channel_stays_at_the_shift():
    x = correlated(8, 4, 5, 5)
    x[:, 2] = 7.0
    layer = DecorrelatedBatchNorm2d(4)
    nn.init.constant_(layer.bias, 0.25)
    assert torch.allclose(layer(x)[:, 2], torch.tensor(0.25), atol=1e-4)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics(momentum):
    layer = DecorrelatedBatchNorm2d(3, momentum=momentum)
    batches = [correlated(8, 3, 4, 4, seed=seed) for seed in (1, 11, 21)]
    mean, whitening = torch.zeros(3), torch.eye(3)
    for number, x in enumerate(batches, 1):
        layer(x)
        weight = momentum or 1 / number
        X = samples(x)[0]
        S = torch.linalg.inv(_root(covariance(X)))
        mean, whitening = mean.lerp(X.mean(-1), weight), whitening.lerp(S, weight)
    assert layer.num_batches_tracked == 3
    assert torch.allclose(layer.running_mean, mean, atol=1e-5)
    assert torch.allclose(layer.running_whitening[0], whitening, atol=1e-4)
    x = correlated(8, 3, 4, 4, seed=31)
    expected = torch.einsum("ij,njhw->nihw", whitening, x - mean.view(1, 3, 1, 1))
    assert torch.allclose(layer.eval()(x), expected, atol=1e-4)
    assert layer.num_batches_tracked == 3


def _root(P):
    l, U = torch.linalg.eigh(P)
    return (U * l.sqrt()) @ U.T


def test_without_running_statistics_eval_uses_the_batch():
    layer = DecorrelatedBatchNorm2d(3, track_running_stats=False)
    x = correlated(8, 3, 4, 4)
    assert layer.running_mean is None
    assert torch.equal(layer(x), layer.eval()(x))
    assert list(layer.state_dict()) == ["weight", "bias"]


def test_statistics_stop_and_go_on_as_those_of_batchnorm():
    layer, x = DecorrelatedBatchNorm2d(3), correlated(8, 3, 4, 4)
    layer(x)
    state = copy.deepcopy(layer.state_dict())
    layer.track_running_stats = False
    layer(3 * x)
    assert all(torch.equal(layer.state_dict()[name], value) for name, value in state.items())
    layer.track_running_stats = True
    layer(3 * x)
    assert layer.num_batches_tracked == 2


def test_without_affine_part():
    layer = DecorrelatedBatchNorm2d(3, affine=False)
    assert layer.weight is None
    assert list(layer.parameters()) == []
    y = layer(correlated(8, 3, 4, 4))
    assert torch.allclose(covariance(samples(y)[0]), torch.eye(3), atol=1e-4)
    layer.eval()(correlated(8, 3, 4, 4))


def test_a_whitening_matrix_too_large_for_float16_leaves_eval_finite():
    layer = DecorrelatedBatchNorm2d(16).half()
    scales = 1e-3 * torch.logspace(0, -1.9, 16).view(-1, 1, 1)
    x = (noise(8, 16, 9, 9) * scales).half()
    layer(x)
    assert layer.eval()(x).isfinite().all()


def test_a_mean_too_large_for_float16_leaves_the_running_mean_finite():
    layer = DecorrelatedBatchNorm2d(4).half()
    layer(1e5 * noise(8, 4, 5, 5) + 3e6)
    assert layer.running_mean.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types(dtype):
    x = correlated(8, 4, 6, 6)
    layer = DecorrelatedBatchNorm2d(4)
    y = layer(x.to(dtype).requires_grad_())
    assert y.dtype == dtype
    y.float().square().sum().backward()
    assert torch.allclose(y.float(), DecorrelatedBatchNorm2d(4)(x.to(dtype).float()), atol=20 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("create_graph", [False, True])
def test_autocast_keeps_the_statistics_in_float32(create_graph):
    x = correlated(8, 4, 6, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        leaf = x.clone().requires_grad_()
        y = DecorrelatedBatchNorm2d(4)(leaf)
        (to_leaf,) = torch.autograd.grad(y.pow(3).sum(), leaf, create_graph=create_graph)
    other = x.clone().requires_grad_()
    DecorrelatedBatchNorm2d(4)(other).pow(3).sum().backward()
    assert torch.equal(y, DecorrelatedBatchNorm2d(4)(x))
    assert torch.allclose(to_leaf, other.grad, atol=1e-5)


def test_compile():
    layer = DecorrelatedBatchNorm2d(4)
    compiled = torch.compile(copy.deepcopy(layer), backend="aot_eager", fullgraph=True)
    x = correlated(4, 4, 5, 5)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    layer(a).pow(3).sum().backward()
    compiled(b).pow(3).sum().backward()
    assert torch.allclose(a.grad, b.grad, atol=1e-3)


@pytest.mark.parametrize("solver", SOLVERS)
def test_last_eigenvalues(solver):
    layer = DecorrelatedBatchNorm2d(6, groups=2, solver=solver, eps=1e-5)
    assert layer.last_eigenvalues is None
    x = correlated(8, 6, 5, 5).requires_grad_()
    layer(x)
    expected = torch.linalg.eigvalsh(covariance(samples(x.detach(), 2))).flip(-1)
    found = layer.last_eigenvalues
    assert not found.requires_grad
    assert torch.allclose(found.float(), expected, rtol=1e-3)
    layer.eval()(correlated(8, 6, 5, 5, seed=9))
    assert torch.equal(layer.last_eigenvalues, found)


def test_saved_for_backward_is_little_more_than_the_input():
    x = correlated(32, 64, 16, 16).requires_grad_()

    def saved_bytes(layer):
        seen = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: seen.update({t.data_ptr(): t.nbytes}) or t, lambda t: t
        ):
            layer(x)
        return sum(seen.values())

    assert saved_bytes(DecorrelatedBatchNorm2d(64)) < 1.3 * saved_bytes(nn.BatchNorm2d(64))


def test_state_dict_round_trip_copy_and_pickle():
    layer = DecorrelatedBatchNorm2d(4, groups=2, momentum=0.3, eps=1e-4)
    x = correlated(8, 4, 5, 5)
    layer(x)
    layer.eval()
    fresh = DecorrelatedBatchNorm2d(4, groups=2).eval()
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    for other in (fresh, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), layer(x))
    assert layer.state_dict()._metadata[""]["version"] == 1


def test_reset_parameters():
    layer = DecorrelatedBatchNorm2d(4)
    nn.init.normal_(layer.weight)
    layer(correlated(8, 4, 5, 5))
    layer.reset_parameters()
    assert torch.equal(layer.weight, torch.ones(4))
    assert torch.equal(layer.running_whitening[0], torch.eye(4))
    assert layer.num_batches_tracked == 0


@pytest.mark.parametrize("groups", [1, 2])
def test_a_default_device_does_not_matter(groups):
    with torch.device("meta"):
        layer = DecorrelatedBatchNorm2d(4, groups=groups, device="cpu")
    assert torch.equal(layer.running_whitening, torch.eye(4 // groups).expand(groups, -1, -1))


def test_a_parametrized_scale():
    layer, plain = DecorrelatedBatchNorm2d(4), DecorrelatedBatchNorm2d(4)
    parametrize.register_parametrization(layer, "weight", nn.Softplus())
    x = correlated(8, 4, 5, 5)
    y = layer(x)
    assert torch.allclose(y, plain(x) * layer.weight.view(4, 1, 1), atol=1e-5)
    y.square().sum().backward()
    assert layer.parametrizations.weight.original.grad.all()


def test_repr_says_what_it_is():
    text = repr(DecorrelatedBatchNorm2d(8, groups=2, solver="newton_schulz", eps=1e-3, sync=True))
    assert text == (
        "DecorrelatedBatchNorm2d(8, momentum=0.1, affine=True, track_running_stats=True, eps=0.001, rtol=None, "
        "solver='newton_schulz', groups=2, sync=True)"
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: DecorrelatedBatchNorm2d(8, groups=3),
            "num_features=8 and groups=3; pass a divisor",
        ),
        (lambda: DecorrelatedBatchNorm2d(8, eps=-1), "eps=-1"),
        (lambda: DecorrelatedBatchNorm2d(8, solver="qr"), "choose one of eigh"),
        (lambda: DecorrelatedBatchNorm2d(8, gradient="qr"), "choose one of exact"),
        (lambda: DecorrelatedBatchNorm2d(8, solver="pade", rtol=0.1), "no eigenvalues to drop"),
        (lambda: DecorrelatedBatchNorm2d(8)(torch.ones(2, 4, 3, 3)), r"\(N, C, H, W\) with C=8, got \(2, 4, 3, 3\)"),
        (lambda: DecorrelatedBatchNorm2d(8)(torch.ones(2, 8)), r"got \(2, 8\)"),
        (lambda: DecorrelatedBatchNorm1d(8)(torch.ones(2, 8, 3, 3)), r"\(N, C\) or \(N, C, L\)"),
        (lambda: DecorrelatedBatchNorm1d(8)(torch.ones(1, 8)), "at least two samples in training, got 1"),
        (lambda: DecorrelatedBatchNorm2d(8)(torch.ones(0, 8, 3, 3)), "at least two samples in training, got 0"),
        (
            lambda: DecorrelatedBatchNorm2d(8)(torch.ones(2, 8, 3, 3, dtype=torch.int)),
            "got torch.int32",
        ),
    ],
)
def test_bad_input(make, message):
    with pytest.raises((ArgumentError, DtypeError), match=message) as caught:
        make()
    assert "DecorrelatedBatchNorm" in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_features_that_are_not_finite(value):
    x = correlated(4, 8, 3, 3)
    x[1, 2, 0, 0] = value
    layer = DecorrelatedBatchNorm2d(8)
    with pytest.raises(NonFiniteError, match=r"DecorrelatedBatchNorm2d\(8"):
        layer(x)
    assert layer.running_mean.isfinite().all()
