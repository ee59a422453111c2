"""Orthogonal weights by parametrization, by operator, by loss, and the predicate."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrize

from orthocond._core.layout import Layout
from orthocond.errors import ArgumentError, NonFiniteError
from orthocond.nn import is_orthogonal, orthogonal_loss, orthogonal_weight
from orthocond.nn._exponential import exponential

from cases import noise, rotation

LAYERS = {
    "square": lambda: nn.Linear(6, 6),
    "wide": lambda: nn.Linear(9, 4),
    "tall": lambda: nn.Linear(4, 9),
    "very tall": lambda: nn.Linear(3, 40),
    "very wide": lambda: nn.Conv2d(16, 5, 3),
    "stem": lambda: nn.Conv2d(3, 64, 3),
    "grouped": lambda: nn.Conv2d(8, 12, 3, groups=4),
    "transposed": lambda: nn.ConvTranspose2d(4, 6, 3),
    "transposed and grouped": lambda: nn.ConvTranspose1d(4, 6, 3, groups=2),
    "conv3d": lambda: nn.Conv3d(2, 3, 2),
}


def matrix_of(layer):
    return Layout.of(layer).matrix(layer.weight.detach())


def is_frame(matrix, atol=1e-5):
    gram = matrix @ matrix.mT if matrix.shape[-2] <= matrix.shape[-1] else matrix.mT @ matrix
    return torch.allclose(gram, torch.eye(gram.shape[-1]).expand_as(gram), atol=atol)


@pytest.mark.parametrize("name", LAYERS)
def test_weight_is_orthogonal_and_trains(name):
    layer = orthogonal_weight(LAYERS[name]())
    assert is_frame(matrix_of(layer))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    target = torch.randn_like(layer.weight)
    losses = []
    for _ in range(20):
        loss = (layer.weight - target).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert is_frame(matrix_of(layer))


def test_a_square_weight_is_the_papers_formula():
    layer = nn.Linear(5, 5)
    W = layer.weight.detach().clone()
    orthogonal_weight(layer)
    assert torch.allclose(layer.weight, torch.linalg.matrix_exp(W - W.T), atol=1e-6)
    assert torch.equal(layer.parametrizations.weight.original, W)


@pytest.mark.parametrize("shape", [(7, 5), (12, 5), (5, 7), (5, 12), (30, 3)])
def test_a_rectangular_weight_stands_in_a_square_one(shape):
    layer = nn.Linear(shape[1], shape[0]).double()
    W = layer.weight.detach().clone()
    orthogonal_weight(layer, normalize=False)
    tall = W if shape[0] >= shape[1] else W.T
    square = nn.functional.pad(tall, (0, tall.shape[0] - tall.shape[1]))
    expected = torch.linalg.matrix_exp(square - square.T)[:, : tall.shape[1]]
    assert torch.allclose(layer.weight, expected if tall is W else expected.T, atol=1e-12)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("shape", [(4, 4), (7, 3), (3, 8)])
def test_gradcheck_of_the_parametrization(shape, normalize):
    layer = orthogonal_weight(nn.Linear(shape[1], shape[0]).double(), normalize=normalize)
    kernel = layer.parametrizations.weight[0]
    assert torch.autograd.gradcheck(kernel, noise(*shape, dtype=torch.float64).requires_grad_())


@pytest.mark.parametrize("shape", [(6, 6), (9, 4), (4, 9)])
def test_an_orthogonal_weight_stays_as_it_is(shape):
    layer = nn.Linear(shape[1], shape[0])
    frame = rotation(9)[: shape[0], : shape[1]] if shape != (6, 6) else rotation(6)
    frame = torch.linalg.qr(frame if shape[0] >= shape[1] else frame.T).Q
    frame = (frame if shape[0] >= shape[1] else frame.T).float()
    layer.weight.data.copy_(frame)
    orthogonal_weight(layer)
    assert torch.allclose(layer.weight, frame, atol=1e-6)
    layer.weight = -frame
    assert torch.allclose(layer.weight, -frame, atol=1e-6)
    assert is_frame(matrix_of(layer))


def test_parametrize_utilities_copies_and_state():
    layer = orthogonal_weight(nn.Conv2d(3, 8, 3))
    layer.weight = torch.linalg.qr(torch.randn(27, 8)).Q.T.reshape(8, 3, 3, 3)
    weight = layer.weight.detach().clone()
    with parametrize.cached():
        assert layer.weight is layer.weight
    for other in (copy.deepcopy(layer), orthogonal_weight(nn.Conv2d(3, 8, 3))):
        other.load_state_dict(layer.state_dict())
        assert torch.allclose(other.weight, weight, atol=1e-6)
    parametrize.remove_parametrizations(layer, "weight")
    assert torch.equal(layer.weight, weight)
    assert type(layer) is nn.Conv2d


def test_in_eval_the_exponential_is_computed_once_and_never_out_of_date(monkeypatch):
    conv = orthogonal_weight(nn.Conv2d(3, 8, 3)).eval()
    computed = []
    exponential = torch.linalg.matrix_exp
    monkeypatch.setattr(torch.linalg, "matrix_exp", lambda A: computed.append(None) or exponential(A))
    trained = conv.parametrizations.weight.original

    def truth():
        with torch.enable_grad():
            return conv.weight.detach()

    changes = {
        "nothing": lambda: None,
        "in place": lambda: trained.add_(0.1),
        "behind autograd's back": lambda: trained.data.mul_(2),
        "what was returned": lambda: conv.weight.zero_(),
        "the base": lambda: setattr(conv, "weight", rotation(27)[:8].float().view(8, 3, 3, 3)),
        "dtype": lambda: conv.double(),
        "state": lambda: conv.load_state_dict(orthogonal_weight(nn.Conv2d(3, 8, 3)).state_dict()),
    }
    with torch.no_grad():
        for change in changes.values():
            change()
            assert torch.equal(conv.weight, truth())
            assert len(computed) > 0
            computed.clear()
            assert torch.equal(conv.weight, conv.weight)
            assert not computed
        with torch.inference_mode():
            assert is_orthogonal(conv.weight)
    conv.train()
    assert conv.weight.requires_grad
    assert copy.deepcopy(conv.eval()).weight.equal(conv.weight)


def test_the_weight_that_is_kept_is_no_answer_to_a_tangent_or_a_tracer():
    linear = orthogonal_weight(nn.Linear(4, 4)).eval()
    kernel, W = linear.parametrizations.weight[0], linear.parametrizations.weight.original.detach()
    with torch.no_grad():
        kept = kernel(W)
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward AD"):
            kernel(forward_ad.make_dual(W, torch.ones(4, 4)))
        traced = make_fx(lambda W: kernel(W))(W)
        assert torch.equal(traced(W), kept)
        assert torch.equal(traced(2 * W + 1), kernel(2 * W + 1))


def test_a_kept_weight_is_not_that_of_another_formula_and_old_pickles_have_none():
    linear = orthogonal_weight(nn.Linear(4, 4), normalize=False).eval()
    kernel, W = linear.parametrizations.weight[0], 50 * noise(4, 4)
    with torch.no_grad():
        unbounded = kernel(W)
        kernel.normalize = True
        assert not torch.allclose(kernel(W), unbounded)
        kernel.__dict__.pop("_last")
        assert is_orthogonal(kernel(W))


@pytest.mark.parametrize("channels", [(4, 4), (3, 8), (8, 3)])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("mode", ["zeros", "circular"])
def test_operator_preserves_the_norm_of_images(channels, stride, mode):
    layer = nn.Conv2d(*channels, 3, stride=stride, padding=1, bias=False, padding_mode=mode)
    orthogonal_weight(layer, kind="operator")
    nn.init.normal_(layer.weight, std=0.3)
    x = noise(5, channels[0], 8, 8)
    y = layer(x)
    assert y.shape == (5, channels[1], 8 // stride, 8 // stride)
    before, after = (torch.linalg.vector_norm(z.flatten(1), dim=1) for z in (x, y))
    if channels[1] >= channels[0] * stride**2:
        assert torch.allclose(before, after, rtol=1e-4)
    else:
        assert (after <= 1.0001 * before).all()


def test_operator_is_orthogonal_as_a_matrix_and_trains():
    layer = orthogonal_weight(nn.Conv2d(2, 2, 3, padding=1).double(), kind="operator")
    basis = torch.eye(2 * 16, dtype=torch.float64).view(32, 2, 4, 4)
    matrix = layer(basis).sub(layer.bias.view(1, 2, 1, 1)).flatten(1)
    assert torch.allclose(matrix @ matrix.T, torch.eye(32, dtype=torch.float64), atol=1e-6)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    losses = []
    for _ in range(10):
        loss = (layer(basis) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_operator_whose_kernel_is_not_finite_says_so(bad, normalize):
    layer = orthogonal_weight(nn.Conv2d(4, 4, 3, padding=1), kind="operator", normalize=normalize)
    nn.init.constant_(layer.weight, bad)
    with pytest.raises(NonFiniteError, match="kernel of an orthogonal convolution holds NaN or infinity"):
        layer(noise(1, 4, 5, 5))


@pytest.mark.parametrize("channels", [(4, 4), (2, 6), (6, 2)])
@pytest.mark.parametrize("scale", [1e-3, 0.1, 1.0, 5.0])
def test_operator_is_the_exponential_of_its_convolution(channels, scale):
    layer = orthogonal_weight(nn.Conv2d(*channels, 3, padding=1, bias=False), kind="operator", normalize=False)
    nn.init.normal_(layer.weight, std=scale)
    kernel = (layer.weight - layer.weight.flip(-1, -2).transpose(0, 1)).detach().double()
    size = len(kernel)
    basis = torch.eye(size * 9, dtype=torch.float64).view(-1, size, 3, 3)
    L = nn.functional.conv2d(basis, kernel, padding=1).flatten(1).T
    x = noise(5, channels[0], 3, 3)
    padded = nn.functional.pad(x.double(), (0, 0, 0, 0, 0, size - channels[0])).flatten(1)
    truth = (padded @ torch.linalg.matrix_exp(L).T).view(5, size, 3, 3)[:, : channels[1]]
    # The error of exp(L) for a kernel in float32, its rounding, grows with the norm of L.
    assert torch.allclose(layer(x).double(), truth, atol=1e-6 * layer.norm_bound)


@pytest.mark.parametrize("tolerance", [0.1, 1e-2, 1e-3, 1e-5, 1e-7, None])
@pytest.mark.parametrize("normalize", [True, False])
def test_the_operator_keeps_its_tolerance_with_fewer_convolutions(tolerance, normalize, monkeypatch):
    layer = orthogonal_weight(
        nn.Conv2d(2, 6, 3, padding=1, bias=False).double(), kind="operator", normalize=normalize, tolerance=tolerance
    )
    x = noise(5, 2, 4, 4, dtype=torch.float64)
    truth = copy.deepcopy(layer)
    truth.tolerance = 1e-15
    counts = []
    for each in (layer, truth):
        calls = []
        convolve = each._convolve
        monkeypatch.setattr(each, "_convolve", lambda *of, calls=calls, go=convolve: calls.append(1) or go(*of))
        counts.append((each(x), len(calls)))
    (found, count), (expected, most) = counts
    errors = (found - expected).flatten(1).norm(dim=1) / x.flatten(1).norm(dim=1)
    assert errors.max() < (tolerance or 3e-8)
    assert count < most
    if normalize:
        assert count == {0.1: 2, 1e-2: 3, 1e-3: 4, 1e-5: 6, 1e-7: 8, None: 8}[tolerance]


@pytest.mark.parametrize("tolerance", [0.0, -1e-3, 0.5, float("nan")])
def test_a_tolerance_that_is_none_is_refused(tolerance):
    with pytest.raises(ArgumentError, match=r"0 < tolerance <= 0\.1"):
        orthogonal_weight(nn.Conv2d(2, 6, 3, padding=1), kind="operator", tolerance=tolerance)


def test_a_tolerance_without_a_series_is_refused():
    with pytest.raises(ArgumentError, match="kind='kernel' is exact"):
        orthogonal_weight(nn.Conv2d(2, 6, 3, padding=1), tolerance=1e-3)


def test_a_state_of_version_0_1_loads_into_the_operator():
    layer = orthogonal_weight(nn.Conv2d(2, 3, 3, padding=1), kind="operator", normalize=False)
    state = layer.state_dict()
    state["_extra_state"] = {"num_repeats": 7}
    layer.load_state_dict(state)
    assert layer.norm_bound == 7


def test_gradcheck_of_the_operator():
    layer = orthogonal_weight(nn.Conv2d(1, 2, 3, padding=1).double(), kind="operator")

    def images(x, weight):
        return torch.func.functional_call(layer, {"weight": weight}, x)

    inputs = noise(2, 1, 3, 3, dtype=torch.float64), layer.weight.detach()
    assert torch.autograd.gradcheck(images, tuple(each.requires_grad_() for each in inputs), atol=1e-5)


@pytest.mark.parametrize("shape", [(64, 27), (16, 16), (8, 40)])
@pytest.mark.parametrize("scale", [2.0**-20, 1.0, 65536.0, 1e30])
def test_the_gradient_is_as_accurate_at_any_scale_of_the_loss(shape, scale):
    layer = orthogonal_weight(nn.Linear(*shape[::-1], bias=False))
    wide = copy.deepcopy(layer).double()
    G = noise(*shape)
    found, truth = (torch.autograd.grad(each.weight, list(each.parameters()), g)[0]
                    for each, g in ((layer, scale * G), (wide, G.double())))  # fmt: skip
    assert ((found.double() / scale - truth).norm() / truth.norm()).item() < 3e-6


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of torch.compile's own
def test_operator_survives_copies_compile_and_state():
    layer = orthogonal_weight(nn.Conv2d(3, 8, 3, padding=1), kind="operator")
    x = noise(2, 3, 6, 6)
    y = layer(x)
    fresh = orthogonal_weight(nn.Conv2d(3, 8, 3, padding=1), kind="operator")
    fresh.load_state_dict(layer.state_dict())
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), fresh):
        assert torch.allclose(other(x), y, atol=1e-6)
    compiled = torch.compile(layer, backend="aot_eager")
    assert torch.allclose(compiled(x), y, atol=1e-5)


@pytest.mark.parametrize("stride", [1, 2])
def test_a_normalised_operator_is_orthogonal_however_large_its_kernel_and_compiles(stride):
    layer = orthogonal_weight(nn.Conv2d(2, 8, 3, stride, 1, bias=False), kind="operator", normalize=True)
    nn.init.normal_(layer.weight, std=10)
    x = noise(3, 2, 6, 6)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for each in (layer, compiled):
        assert torch.linalg.vector_norm(each(x)).item() == pytest.approx(torch.linalg.vector_norm(x).item(), rel=1e-4)


@pytest.mark.parametrize("shape", [(5, 5), (9, 4), (4, 20)])
def test_a_normalised_kernel_is_the_formula_with_a_bounded_exponent(shape):
    W = noise(*shape, dtype=torch.float64)
    for scale in (1e-3, 1.0, 1e3):
        layer = nn.Linear(shape[1], shape[0]).double()
        layer.weight.data.copy_(scale * W)
        orthogonal_weight(layer, normalize=True)
        tall = scale * (W if shape[0] >= shape[1] else W.T)
        square = nn.functional.pad(tall, (0, tall.shape[0] - tall.shape[1]))
        skew = square - square.T
        rms = (skew.square().sum() / min(tall.shape[0], 2 * tall.shape[1])).sqrt()
        expected = torch.linalg.matrix_exp(skew / rms.clamp(min=1))[:, : tall.shape[1]]
        assert torch.allclose(layer.weight, expected if shape[0] >= shape[1] else expected.T, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_change_of_dtype_leaves_it_orthogonal(dtype):
    layer = nn.Linear(32, 64, bias=False)
    nn.init.orthogonal_(layer.weight)
    orthogonal_weight(layer)
    assert is_orthogonal(layer.to(dtype).double().weight)


def test_a_half_precision_orthogonal_weight_stays_as_it_is():
    layer = nn.Linear(16, 16).bfloat16()
    layer.weight.data.copy_(rotation(16))
    weight = layer.weight.detach().clone()
    orthogonal_weight(layer)
    assert torch.allclose(layer.weight, weight, atol=0.02)


def test_loss_is_the_papers_and_its_gradient_exists_at_its_minimum():
    W = noise(4, 3, 2, 2)
    flat = W.flatten(1)
    assert torch.allclose(orthogonal_loss(W), torch.linalg.matrix_norm(flat @ flat.T - torch.eye(4)))
    eye = torch.eye(3, requires_grad=True)
    orthogonal_loss(eye).backward()
    assert eye.grad.isfinite().all()
    assert torch.autograd.gradcheck(orthogonal_loss, noise(3, 5, dtype=torch.float64).requires_grad_())


def test_predicate():
    Q = rotation(9).float()
    assert is_orthogonal(Q)
    assert is_orthogonal(Q[:4])
    assert is_orthogonal(Q[:, :4].reshape(9, 2, 2))
    assert not is_orthogonal(1.01 * Q)
    assert is_orthogonal(1.01 * Q, atol=0.1)
    assert is_orthogonal(Q.bfloat16())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: orthogonal_weight(nn.Linear(3, 3), kind="cayley"),
            "choose one of kernel, operator",
        ),
        (lambda: orthogonal_weight(nn.ReLU()), "no tensor 'weight' in ReLU"),
        (lambda: orthogonal_weight(nn.Linear(3, 3), "wight"), "no tensor 'wight'"),
        (lambda: orthogonal_weight(nn.BatchNorm2d(3)), r"expected matrices \(..., m, n\), got \(3,\)"),
        (lambda: orthogonal_weight(orthogonal_weight(nn.Linear(3, 3))), "a parametrization on 'weight' already"),
        (lambda: orthogonal_weight(nn.Linear(3, 3), kind="operator"), "weight of an nn.Conv2d, got Linear.weight"),
        (lambda: orthogonal_weight(nn.Conv2d(3, 3, 3), kind="operator"), "padding k // 2"),
        (
            lambda: orthogonal_weight(nn.Conv2d(3, 3, 3, padding=1, padding_mode="reflect"), kind="operator"),
            "zeros or circular",
        ),
        (
            lambda: orthogonal_weight(nn.Conv2d(3, 8, 3, padding=1), kind="operator")(torch.ones(1, 5, 4, 4)),
            r"images \(N, 3, H, W\), got \(1, 5, 4, 4\)",
        ),
        (
            lambda: orthogonal_weight(orthogonal_weight(nn.Conv2d(3, 8, 3, padding=1), kind="operator")),
            "orthogonal operator already",
        ),
        (
            lambda: orthogonal_weight(nn.Conv2d(3, 3, 3, 2, 1), kind="operator")(torch.ones(1, 3, 5, 5)),
            "a stride of 2|stride of 2 expected",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()


@pytest.mark.parametrize(
    ("shape", "groups", "transposed"), [((8, 3, 3), 2, False), ((8, 3, 3), 2, True), ((4, 5), 1, False)]
)
def test_the_matrix_of_a_kernel_and_back(shape, groups, transposed):
    weight = noise(*shape)
    layout = Layout(groups, transposed)
    assert torch.equal(layout.kernel(layout.matrix(weight), weight), weight)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_the_exponential_has_a_hessian_by_every_mode():
    A = noise(3, 3, dtype=torch.float64)
    cubes = lambda A: exponential(A).pow(3).sum()
    reverse = torch.func.jacrev(torch.func.jacrev(cubes))(A)
    assert torch.allclose(torch.func.hessian(cubes)(A), reverse)
    assert torch.allclose(torch.func.jacfwd(torch.func.jacfwd(cubes))(A), reverse)
