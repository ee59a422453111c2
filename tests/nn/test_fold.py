"""Out of a model again: folding for inference, export."""

import copy
import io
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel

from networks import BatchNormAct2d, Net, trained
from orthocond import ConditionMonitor, treat
from orthocond.errors import OrthocondWarning
from orthocond.nn import (
    CovariancePool2d,
    DecorrelatedBatchNorm1d,
    DecorrelatedBatchNorm2d,
    DecorrelatedBatchNorm3d,
    convert_batchnorm,
    fold,
    orthogonal_weight,
)

from cases import noise


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_fold_of_a_model(bias, groups):
    model = trained(convert_batchnorm(Net(bias=bias), groups=groups))
    for norm in (model.norm, model.body[1]):
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    before = copy.deepcopy(model.state_dict())
    folded = fold(model)
    x = noise(4, 3, 8, 8, seed=99)
    assert torch.allclose(folded(x), model(x), atol=1e-4)
    assert not any("orthocond" in type(layer).__module__ for layer in folded.modules())
    assert isinstance(folded.norm, nn.Identity)
    assert folded.body[0].groups == (1 if groups == 1 else 2)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


LAYERS = {
    "linear": (nn.Linear(5, 6), DecorrelatedBatchNorm1d, (30, 5)),
    "conv1d": (nn.Conv1d(5, 6, 3, stride=2), DecorrelatedBatchNorm1d, (8, 5, 20)),
    "conv2d, reflected": (nn.Conv2d(5, 6, 3, padding=1, padding_mode="reflect"), DecorrelatedBatchNorm2d, (4, 5, 9, 9)),
    "conv3d": (nn.Conv3d(5, 6, (1, 2, 3), bias=False), DecorrelatedBatchNorm3d, (4, 5, 4, 5, 6)),
    "depthwise": (nn.Conv2d(6, 6, 3, groups=6), DecorrelatedBatchNorm2d, (4, 6, 9, 9)),
    "transposed": (nn.ConvTranspose2d(5, 6, 3, stride=2), DecorrelatedBatchNorm2d, (4, 5, 6, 6)),
    "transposed, grouped": (nn.ConvTranspose1d(4, 6, 3, groups=2), DecorrelatedBatchNorm1d, (4, 4, 20)),
}


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("name", LAYERS)
def test_fold_of_every_kind_of_layer(name, groups):
    layer, norm, shape = LAYERS[name]
    model = trained(nn.Sequential(layer, norm(6, groups=groups)), shape)
    folded = fold(model)
    x = noise(*shape, seed=99)
    assert torch.allclose(folded(x), model(x), atol=1e-4)
    assert isinstance(folded[1], nn.Identity)


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (DecorrelatedBatchNorm1d, (9, 4)),
        (DecorrelatedBatchNorm1d, (9, 4, 5)),
        (DecorrelatedBatchNorm2d, (9, 4, 5, 5)),
        (DecorrelatedBatchNorm3d, (9, 4, 3, 3, 3)),
    ],
)
def test_fold_where_nothing_is_in_front(norm, shape):
    for model in (trained(norm(4), shape), trained(nn.Sequential(nn.ReLU(), norm(4)), shape)):
        folded, x = fold(model), noise(*shape, seed=99)
        assert torch.allclose(folded(x), model(x), atol=1e-4)
        assert not any(isinstance(layer, norm) for layer in folded.modules())


class Shared(nn.Module):
    """The convolution's output goes two ways, so it must not change."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1), DecorrelatedBatchNorm2d(3)

    def forward(self, x):
        y = self.conv(x)
        return y + self.norm(y)


class Untraceable(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1), DecorrelatedBatchNorm2d(3)
        self.sequence = nn.Sequential(nn.Conv2d(3, 3, 1), DecorrelatedBatchNorm2d(3))

    def forward(self, x):
        y = self.norm(self.conv(x))
        return self.sequence(y if y.sum() > 0 else 2 * y)


def test_a_layer_whose_output_goes_two_ways_is_left_alone():
    model = trained(Shared())
    folded, x = fold(model), noise(4, 3, 8, 8, seed=99)
    assert torch.allclose(folded(x), model(x), atol=1e-4)
    assert isinstance(folded.norm, nn.Conv2d)


class TakesApart(Untraceable):
    """Uses the parts of its sequence one by one."""

    def forward(self, x):
        y = self.norm(self.conv(x)).abs()
        for layer in self.sequence:
            y = layer(y)
            x = x + (y if y.sum() > 0 else 2 * y)
        return x


class TakesApartByName(Untraceable):
    def forward(self, x):
        y = x if x.sum() > 0 else 2 * x
        for layer in self.children():
            y = layer(y)
        return y


@pytest.mark.parametrize(
    ("cls", "merges", "warnings"),
    [
        (Untraceable, True, {"norm": "Untraceable can't be traced"}),
        (
            TakesApart,
            False,
            {"norm": "TakesApart can't", "sequence.1": "may use the parts of its 'sequence' one by one"},
        ),
        (TakesApartByName, False, {"norm": "TakesApartByName can't", "sequence.1": "one by one"}),
    ],
)
def test_fold_changes_only_what_it_can_see_through_and_says_why(cls, merges, warnings):
    model = trained(cls())
    with pytest.warns(OrthocondWarning) as given:
        folded = fold(model)
    x = noise(4, 3, 8, 8, seed=99)
    assert torch.allclose(folded(x), model(x), atol=1e-4)
    assert isinstance(folded.norm, nn.Conv2d)
    assert isinstance(folded.sequence[1], nn.Identity) == merges
    assert len(given) == len(warnings)
    for warning, (name, reason) in zip(given, warnings.items(), strict=True):
        assert f"{name!r} became a 1x1 convolution, because" in str(warning.message)
        assert reason in str(warning.message)


class WithoutForward(nn.Module):
    """As of frameworks whose models have steps instead."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def training_step(self, batch):
        return self.net(batch).sum()


class PassesOn(nn.Module):
    """What it does first can't be traced."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        if not bool(torch.isfinite(x).all()):
            raise ValueError
        return self.net(x)


class First(nn.Module):
    """Its norm is the first layer of a part, and what is in front of that can't be seen."""

    def __init__(self):
        super().__init__()
        self.conv, self.part = nn.Conv2d(3, 4, 1), PassesOn(nn.Sequential(DecorrelatedBatchNorm2d(4), nn.ReLU()))

    def forward(self, x):
        return self.part(self.conv(x if x.sum() > 0 else -x))


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (PassesOn, lambda m: m.net),
        (WithoutForward, lambda m: m.net),
        (nn.DataParallel, lambda m: m.module),
        (AveragedModel, lambda m: m.module),
        (lambda m: nn.ModuleDict({"a": m}), lambda m: m["a"]),
        (lambda m: nn.ModuleList([nn.ReLU(), m]), lambda m: m[1]),
        (lambda m: PassesOn(nn.ModuleList([nn.Sequential(PassesOn(m))])), lambda m: m.net[0][0].net),
        (lambda m: nn.ModuleDict({"a": nn.ModuleDict({"b": PassesOn(m)})}), lambda m: m["a"]["b"].net),
        (lambda m: torch.compile(m, backend="eager"), lambda m: m._orig_mod),
    ],
)
def test_fold_inside_what_cannot_be_traced(wrap, unwrap):
    for inner in (
        nn.Sequential(nn.Conv2d(3, 4, 1), DecorrelatedBatchNorm2d(4), nn.ReLU()),
        nn.Sequential(convert_batchnorm(Net())),
    ):
        model = wrap(trained(inner)).eval()
        folded = unwrap(fold(model))
        x = noise(4, 3, 8, 8, seed=99)
        assert torch.allclose(folded(x), inner(x), atol=1e-4)
        assert any(isinstance(layer, nn.Identity) for layer in folded.modules())


def test_a_norm_at_the_entrance_of_a_part_says_why_it_stays():
    model = trained(First())
    with pytest.warns(OrthocondWarning, match=r"'part.net.0' became .* because PassesOn can't be traced"):
        folded = fold(model)
    x = noise(4, 3, 8, 8, seed=99)
    assert torch.allclose(folded(x), model(x), atol=1e-4)


def test_fold_of_a_model_that_is_watched_and_treated():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), DecorrelatedBatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1))
    treatment = treat(model, "0", "gauge").attach(torch.optim.SGD(model.parameters(), lr=0.1))
    with ConditionMonitor(model) as monitor:
        model(noise(8, 3, 6, 6)).sum().backward()
        hooks = [len(layer._forward_hooks) for layer in model]
        folded = fold(model)
        assert isinstance(folded[1], nn.Identity)
        assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in folded.modules())
        folded(noise(8, 3, 6, 6))
        assert len(monitor.history()) == 1
    assert hooks[0] > 0
    treatment.detach()
    x = noise(8, 3, 6, 6, seed=9)
    assert torch.allclose(folded(x), model.eval()(x), atol=1e-4)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_the_keys_can_be_kept_so_that_the_unfolded_architecture_loads_them(bias, affine):
    architecture = Net(bias=bias)
    for parent, name in ((architecture, "norm"), (architecture.body, "1")):
        setattr(parent, name, nn.BatchNorm2d(8, eps=1e-3, affine=affine))
    model = trained(convert_batchnorm(copy.deepcopy(architecture), groups=2))
    for norm in (model.norm, model.body[1]):
        for part in norm.parameters():
            nn.init.normal_(part)
    folded, x = fold(model, keep_keys=True), noise(4, 3, 8, 8, seed=99)
    assert torch.allclose(folded(x), model(x), atol=1e-4)
    assert type(folded.norm) is nn.BatchNorm2d
    assert str(architecture.load_state_dict(folded.state_dict())) == "<All keys matched successfully>"
    assert torch.allclose(architecture.eval()(x), model(x), atol=1e-4)
    converted = convert_batchnorm(architecture)
    converted.load_state_dict(folded.state_dict())
    assert torch.allclose(converted(x), model(x), atol=1e-4)


def test_keys_are_kept_of_norms_with_an_activation_inside():
    architecture = nn.Sequential(nn.Conv2d(3, 4, 1), BatchNormAct2d(4))
    architecture[1].act = nn.PReLU()
    model = trained(convert_batchnorm(copy.deepcopy(architecture)))
    folded, x = fold(model, keep_keys=True), noise(4, 3, 8, 8, seed=99)
    assert torch.allclose(folded(x), model(x), atol=1e-4)
    architecture.load_state_dict(folded.state_dict())
    assert torch.allclose(architecture.eval()(x), model(x), atol=1e-4)


def test_keys_that_cannot_be_kept_are_named():
    model = trained(convert_batchnorm(nn.Sequential(nn.ReLU(), nn.BatchNorm2d(3))))
    with pytest.warns(OrthocondWarning, match="'1' became a 1x1 convolution with keys of its own, because no linear"):
        fold(model, keep_keys=True)
    with pytest.warns(OrthocondWarning, match=r"in front of 'body.1' has another shape .* mixes the groups"):
        fold(trained(convert_batchnorm(Net())), keep_keys=True)


class Tied(nn.Module):
    """The weight is used a second time."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(5, 6), DecorrelatedBatchNorm1d(6)

    def forward(self, x):
        return torch.nn.functional.linear(self.norm(self.linear(x)), self.linear.weight.t())


class Penalized(nn.Module):
    """Returns a second number, which doesn't depend on the input."""

    def __init__(self, penalty):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), DecorrelatedBatchNorm2d(4)
        self.penalty = penalty

    def forward(self, x):
        return self.norm(self.conv(x)), self.penalty(self)


PENALTIES = {
    "parameters": lambda net: sum(p.square().sum() for p in net.conv.parameters()),
    "named_parameters": lambda net: dict(net.named_parameters())["conv.weight"].abs().sum(),
    "state_dict": lambda net: net.conv.state_dict()["bias"].norm(),
    "data": lambda net: next(net.parameters()).data.sum(),
    "a list": lambda net: torch.cat([p.flatten() for p in net.conv.parameters()]).norm(),
}


@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("penalty", PENALTIES.values(), ids=PENALTIES)
def test_fold_leaves_a_weight_alone_that_the_model_computes_with(penalty, frozen, context):
    model = trained(Penalized(penalty), (8, 3, 6, 6)).requires_grad_(not frozen)
    reason = "'norm' became a 1x1 convolution, because the model also computes with the parameters of 'conv'"
    x = noise(8, 3, 6, 6, seed=99)
    with context():
        with pytest.warns(OrthocondWarning, match=reason):
            folded = fold(model)
        for output, expected in zip(folded(x), model(x), strict=True):
            assert torch.allclose(output, expected, atol=1e-4)
    assert isinstance(folded.norm, nn.Conv2d)
    assert all(p.requires_grad != frozen for p in folded.conv.parameters())


@pytest.mark.parametrize("with_layer", [True, False])
def test_fold_says_when_the_model_computes_with_parameters_that_disappear(with_layer):
    model = Penalized(lambda net: sum(p.square().sum() for p in net.parameters()))
    if not with_layer:
        model.conv = nn.ReLU()
    trained(model, (8, 4 - with_layer, 6, 6))
    with pytest.warns(OrthocondWarning, match="the parameters of 'norm'; compare the outputs"):
        folded = fold(model)
    assert isinstance(folded.norm, nn.Conv2d)


def test_what_a_model_asks_of_a_parameter_besides_its_numbers_does_not_matter():
    def penalty(net):
        weight = next(net.parameters())
        return weight.new_zeros(3, device=weight.device) + torch.ones_like(weight).sum() * weight.numel()

    folded = fold(trained(Penalized(penalty), (8, 3, 6, 6)))
    assert isinstance(folded.norm, nn.Identity)


class Optional(nn.Module):
    """The convolution's output goes two ways unless an argument is given."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1), DecorrelatedBatchNorm2d(3)

    def forward(self, x, skip=None):
        y = self.conv(x)
        return self.norm(input=y) + (y if skip is None else skip)


class Outer(nn.Module):
    """Can't be traced, but its part can."""

    def __init__(self):
        super().__init__()
        self.part = Net()

    def forward(self, x):
        return self.part(x if x.sum() > 0 else x + 1)


class Three(nn.Module):
    """A linear layer along the sequence, and a norm across it."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(5, 6), DecorrelatedBatchNorm1d(6)

    def forward(self, x):
        return self.norm(self.linear(x))


@pytest.mark.parametrize(
    ("make", "shape", "merges"),
    [
        (Tied, (20, 5), False),
        (Optional, (8, 3, 6, 6), False),
        (Three, (20, 6, 5), False),
        (Three, (20, 5), True),
        (lambda: convert_batchnorm(Outer()), (8, 3, 6, 6), True),
    ],
)
def test_fold_merges_only_what_is_safe(make, shape, merges):
    model = trained(make(), shape)
    says = pytest.warns(OrthocondWarning, match="'linear' maps another dimension") if len(shape) == 3 else nullcontext()
    with says:
        folded = fold(model)
    x = noise(*shape, seed=99)
    assert torch.allclose(folded(x), model(x), atol=1e-4)
    assert any(isinstance(layer, nn.Identity) for layer in folded.modules()) == merges


def test_fold_does_not_import_the_compiler():
    """During a trace that would break it: it would record what `torch.fx` has replaced."""
    code = (
        "import sys, torch",
        "from orthocond.nn import DecorrelatedBatchNorm2d, fold",
        "class Net(torch.nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        "        self.conv, self.norm = torch.nn.Conv2d(3, 4, 3), DecorrelatedBatchNorm2d(4)",
        "    def forward(self, x):",
        "        return self.norm(self.conv(x)) + torch.arange(4).view(4, 1, 1)",
        "before = 'torch._dynamo' in sys.modules",
        "assert isinstance(fold(Net()).norm, torch.nn.Identity)",
        "assert ('torch._dynamo' in sys.modules) == before",
    )
    done = subprocess.run([sys.executable, "-c", "\n".join(code)], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr


def test_fold_respects_hooks():
    model = nn.Sequential(
        nn.Conv2d(3, 3, 1), DecorrelatedBatchNorm2d(3), nn.Conv2d(3, 3, 1), DecorrelatedBatchNorm2d(3)
    )
    model[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    model[3].register_forward_hook(lambda module, inputs, options, output: output + 1, with_kwargs=True)
    trained(model, (8, 3, 6, 6))
    with pytest.warns(OrthocondWarning, match="'1' became a 1x1 convolution, because '0' has a hook") as given:
        folded = fold(model)
    assert len(given) == 1
    x = noise(8, 3, 6, 6, seed=99)
    assert torch.allclose(folded(x), model(x), atol=1e-4)
    assert isinstance(folded[3], nn.Identity)


def test_fold_keeps_what_depends_on_the_batch_and_frozen_weights_frozen():
    model = nn.Sequential(nn.Conv2d(3, 8, 1), DecorrelatedBatchNorm2d(8), CovariancePool2d())
    model[0].requires_grad_(False)
    folded = fold(trained(model, (8, 3, 6, 6)))
    assert isinstance(folded[1], nn.Identity)
    assert isinstance(folded[2], CovariancePool2d)
    assert not folded[0].weight.requires_grad
    untracked = DecorrelatedBatchNorm2d(3, track_running_stats=False)
    assert isinstance(fold(untracked), DecorrelatedBatchNorm2d)
    assert isinstance(fold(nn.Sequential(untracked))[0], DecorrelatedBatchNorm2d)


def test_fold_removes_parametrizations():
    model = convert_batchnorm(Net())
    orthogonal_weight(model.stem)
    parametrize.register_parametrization(model.head, "weight", nn.Identity())
    parametrize.register_parametrization(model.norm, "weight", nn.Softplus())
    folded, x = fold(trained(model)), noise(4, 3, 8, 8, seed=99)
    assert torch.allclose(folded(x), model(x), atol=1e-4)
    assert not any(parametrize.is_parametrized(layer) for layer in folded.modules())
    assert parametrize.is_parametrized(model.stem)


def test_a_folded_model_exports():
    model = trained(convert_batchnorm(Net()))
    x = noise(4, 3, 8, 8, seed=99)
    exported = torch.export.export(fold(model), (x,))
    assert torch.allclose(exported.module()(x), model(x), atol=1e-4)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # of the exporter's own
def test_a_folded_model_runs_in_onnxruntime():
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    pytest.importorskip("onnxscript", reason="torch's ONNX exporter needs onnxscript")
    model = trained(convert_batchnorm(Net()))
    x = noise(4, 3, 8, 8, seed=99)
    file = io.BytesIO()
    torch.onnx.export(fold(model), (x,), verbose=False, dynamo=True).save(file)
    session = onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert torch.allclose(torch.from_numpy(found), model(x), atol=1e-4)
