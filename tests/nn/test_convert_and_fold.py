"""Into a model and out of it again: conversion of BatchNorm, folding for inference, export."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from orthocond.errors import ArgumentError, OrthocondWarning
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


class Net(nn.Module):
    """A residual network in small, with a stem to be whitened."""

    def __init__(self, bias=False):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=bias)
        self.norm = nn.BatchNorm2d(8)
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = torch.relu(self.norm(self.stem(x)))
        return self.head((x + self.body(x)).mean((2, 3)))


def trained(model, shape=(16, 3, 8, 8), steps=20):
    for seed in range(steps):
        model.train()(noise(*shape, seed=seed))
    return model.eval()


def test_a_converted_model_gives_the_same_outputs_in_eval():
    model = trained(Net())
    nn.init.normal_(model.norm.weight)
    converted = convert_batchnorm(copy.deepcopy(model))
    assert isinstance(converted.norm, DecorrelatedBatchNorm2d)
    assert isinstance(converted.body[1], DecorrelatedBatchNorm2d)
    assert not converted.norm.training
    x = noise(4, 3, 8, 8, seed=99)
    assert torch.allclose(converted(x), model(x), atol=1e-5)
    assert converted.norm.num_batches_tracked == 20


def test_only_the_named_layers_are_converted_and_their_parameters_stay_the_same_objects():
    model = Net()
    weight = model.norm.weight
    convert_batchnorm(model, ["norm"], groups=2, rtol=1e-2)
    assert model.norm.weight is weight
    assert (model.norm.groups, model.norm.rtol) == (2, 1e-2)
    assert isinstance(model.body[1], nn.BatchNorm2d)


def test_a_batchnorm_checkpoint_comes_in_through_the_conversion():
    source, model = trained(Net()), Net()
    nn.init.normal_(source.norm.weight)
    model.load_state_dict(source.state_dict())
    assert torch.equal(convert_batchnorm(model).norm.weight, source.norm.weight)


@pytest.mark.parametrize(
    ("layer", "cls"),
    [
        (nn.BatchNorm1d(4), DecorrelatedBatchNorm1d),
        (nn.BatchNorm3d(4, affine=False), DecorrelatedBatchNorm3d),
        (nn.BatchNorm2d(4, track_running_stats=False, momentum=None), DecorrelatedBatchNorm2d),
        (nn.SyncBatchNorm(4), DecorrelatedBatchNorm2d),
        (nn.BatchNorm2d(4, dtype=torch.float64), DecorrelatedBatchNorm2d),
    ],
)
def test_a_single_layer_is_returned_converted(layer, cls):
    new = convert_batchnorm(layer)
    assert type(new) is cls
    assert new.momentum == layer.momentum
    assert new.sync == isinstance(layer, nn.SyncBatchNorm)
    if layer.weight is not None:
        assert new.weight.dtype == layer.weight.dtype


def test_a_shared_layer_stays_shared():
    bn = nn.BatchNorm2d(4)
    model = convert_batchnorm(nn.Sequential(bn, nn.ReLU(), bn))
    assert isinstance(model[0], DecorrelatedBatchNorm2d)
    assert model[0] is model[2]


def test_nothing_is_converted_where_one_layer_cannot_be():
    model = nn.Sequential(nn.BatchNorm2d(4), nn.BatchNorm2d(6))
    with pytest.raises(ArgumentError, match=r"convert_batchnorm of '1'.*groups=4"):
        convert_batchnorm(model, groups=4)
    assert isinstance(model[0], nn.BatchNorm2d)
    with pytest.raises(ArgumentError, match="expected a list of names"):
        convert_batchnorm(model, "0")
    assert convert_batchnorm(model, ["0"], momentum=0.2)[0].momentum == 0.2


def test_unknown_names_are_listed():
    with pytest.raises(ArgumentError, match="unknown BatchNorm layer 'nrm'; choose one of norm, body"):
        convert_batchnorm(Net(), ["nrm"])


class BatchNormAct2d(nn.BatchNorm2d):
    """Written like timm's: a norm with dropout and activation inside, and a forward of its own."""

    def __init__(
        self,
        num_features,
        eps=1e-5,
        momentum=0.1,
        affine=True,
        track_running_stats=True,
        apply_act=True,
        act_layer=nn.ReLU,
        act_kwargs=None,
        inplace=True,
        drop_layer=None,
        device=None,
        dtype=None,
    ):
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.drop = drop_layer() if drop_layer is not None else nn.Identity()
        self.act = act_layer(inplace=inplace, **(act_kwargs or {})) if act_layer and apply_act else nn.Identity()

    def forward(self, x):
        use_batch = self.training or (self.running_mean is None and self.running_var is None)
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
        tracks = not self.training or self.track_running_stats
        statistics = (self.running_mean, self.running_var) if tracks else (None, None)
        x = nn.functional.batch_norm(x, *statistics, self.weight, self.bias, use_batch, self.momentum, self.eps)
        return self.act(self.drop(x))


class Plain(nn.BatchNorm1d):
    """A subclass with other defaults, nothing else."""

    def __init__(self, num_features):
        super().__init__(num_features, eps=1e-3)


class Doubled(nn.BatchNorm2d):
    def forward(self, x):
        return 2 * super().forward(x)


class Frozen(nn.BatchNorm2d):
    def forward(self, x):
        return nn.functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)


class Gated(nn.BatchNorm2d):
    def __init__(self, num_features):
        super().__init__(num_features)
        self.gate = nn.Parameter(torch.ones(num_features))


class ActFirst(BatchNormAct2d):
    def forward(self, x):
        return super().forward(self.act(x))


class Broken(nn.BatchNorm2d):
    def forward(self, x, y):
        return super().forward(x) + y


def test_a_norm_with_dropout_and_activation_inside_keeps_them():
    act = {"act_layer": nn.LeakyReLU, "act_kwargs": {"negative_slope": 0.2}, "drop_layer": nn.Dropout}
    model = nn.Sequential(nn.Conv2d(3, 4, 3), BatchNormAct2d(4, eps=1e-3, **act), nn.Conv2d(4, 4, 1))
    model = trained(model)
    nn.init.normal_(model[1].weight)
    before, x = copy.deepcopy(model), noise(8, 3, 7, 7, seed=99)
    norm = convert_batchnorm(model)[1]
    assert type(norm) is DecorrelatedBatchNorm2d
    assert [type(part) for part in norm.children()] == [nn.Dropout, nn.LeakyReLU]
    assert not norm.drop.training
    assert torch.allclose(model(x), before(x), atol=1e-5)
    norm.train()
    torch.manual_seed(0)
    y = norm(model[0](x))
    plain = convert_batchnorm(nn.BatchNorm2d(4))
    plain.load_state_dict(norm.state_dict())
    torch.manual_seed(0)
    assert torch.equal(y, norm.act(norm.drop(plain(model[0](x)))))
    assert (y == 0).float().mean() > 0.4  # dropout at work
    model.train()(x).sum().backward()
    folded = fold(model.eval())
    assert torch.allclose(folded(x), model(x), atol=1e-4)


def test_a_subclass_that_only_normalises_is_converted():
    layer = trained(Plain(4), (20, 4))
    x = noise(5, 4, seed=99)
    assert torch.allclose(convert_batchnorm(copy.deepcopy(layer))(x), layer(x), atol=1e-5)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Doubled(4), "'1', a Doubled: in training mode it does something other than to normalise"),
        (Frozen(4), "a Frozen: in training mode"),
        (Gated(4), r"BatchNorm hasn't \(gate\)"),
        (ActFirst(4), "a ActFirst: in training mode"),
        (Broken(4), r"trying it out failed \(TypeError"),
        (nn.LazyBatchNorm2d(), "'1': a LazyBatchNorm2d doesn't know its number of channels yet; call the model once"),
    ],
)
def test_what_cannot_be_converted_faithfully_is_refused(layer, message):
    model = nn.Sequential(nn.BatchNorm2d(4), layer)
    for names in (None, ["1"]):
        with pytest.raises(ArgumentError, match=message):
            convert_batchnorm(model, names)
    assert type(model[0]) is nn.BatchNorm2d
    assert type(convert_batchnorm(model, ["0"])[0]) is DecorrelatedBatchNorm2d


def test_a_lazy_norm_that_has_been_called_is_converted():
    model = nn.Sequential(nn.LazyBatchNorm2d())
    model(noise(4, 3, 5, 5))
    assert convert_batchnorm(model)[0].num_features == 3


def test_a_model_without_batchnorm_says_so():
    with pytest.warns(OrthocondWarning, match="found no BatchNorm layer in the model; nothing was converted"):
        convert_batchnorm(nn.Sequential(nn.Linear(2, 2)))
    with pytest.warns(OrthocondWarning, match="got an empty list of names; nothing was converted"):
        convert_batchnorm(Net(), [])
    with pytest.raises(ArgumentError, match="unknown BatchNorm layer 'bn1'; there is no BatchNorm layer to choose"):
        convert_batchnorm(nn.Sequential(nn.Linear(2, 2)), ["bn1"])


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("eps", [1e-5, 0.1])
def test_a_batchnorm_checkpoint_loads_into_the_converted_model(groups, eps):
    source = trained(Net())
    for norm in (source.norm, source.body[1]):
        norm.eps = eps
        nn.init.normal_(norm.weight)
    fresh = Net()
    fresh.norm.eps = fresh.body[1].eps = eps
    model = trained(convert_batchnorm(fresh, groups=groups))
    state = source.state_dict()
    keys = list(state)
    assert str(model.load_state_dict(state, strict=True)) == "<All keys matched successfully>"
    assert list(state) == keys
    x = noise(4, 3, 8, 8, seed=99)
    assert torch.allclose(model(x), source(x), atol=1e-5)
    assert model.norm.num_batches_tracked == 20
    assert "norm.running_whitening" in model.state_dict()
    assert "norm.running_var" not in model.state_dict()


def test_states_of_every_kind_load():
    layer, batchnorm = DecorrelatedBatchNorm2d(4), trained(nn.BatchNorm2d(4), (8, 4, 3, 3))
    old = batchnorm.state_dict()
    del old["num_batches_tracked"]  # as before torch 0.4.1
    layer.load_state_dict(old)
    assert layer.num_batches_tracked == 0
    layer.load_state_dict(batchnorm.state_dict(), assign=True)
    assert layer.running_mean is batchnorm.running_mean or torch.equal(layer.running_mean, batchnorm.running_mean)
    other = DecorrelatedBatchNorm2d(4)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.running_whitening, layer.running_whitening)
    with pytest.raises(RuntimeError, match="size mismatch for running_mean"):
        DecorrelatedBatchNorm2d(8).load_state_dict(batchnorm.state_dict())
    with pytest.raises(RuntimeError, match="Unexpected"):
        DecorrelatedBatchNorm2d(4, track_running_stats=False).load_state_dict(batchnorm.state_dict())
    with pytest.raises(RuntimeError, match="Missing"):
        layer.load_state_dict({"weight": torch.ones(4), "bias": torch.ones(4)})


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


@pytest.mark.parametrize("cls", [Shared, Untraceable])
def test_fold_changes_only_what_it_can_see_through(cls):
    model = trained(cls())
    folded, x = fold(model), noise(4, 3, 8, 8, seed=99)
    assert torch.allclose(folded(x), model(x), atol=1e-4)
    assert isinstance(folded.norm, nn.Conv2d)
    assert not any(isinstance(layer, DecorrelatedBatchNorm2d) for layer in folded.modules())


class Tied(nn.Module):
    """The weight is used a second time."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(5, 6), DecorrelatedBatchNorm1d(6)

    def forward(self, x):
        return torch.nn.functional.linear(self.norm(self.linear(x)), self.linear.weight.t())


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
    folded, x = fold(model), noise(*shape, seed=99)
    assert torch.allclose(folded(x), model(x), atol=1e-4)
    assert any(isinstance(layer, nn.Identity) for layer in folded.modules()) == merges


def test_fold_respects_hooks():
    model = nn.Sequential(
        nn.Conv2d(3, 3, 1), DecorrelatedBatchNorm2d(3), nn.Conv2d(3, 3, 1), DecorrelatedBatchNorm2d(3)
    )
    model[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    model[3].register_forward_hook(lambda module, inputs, output: output + 1)
    trained(model, (8, 3, 6, 6))
    folded, x = fold(model), noise(8, 3, 6, 6, seed=99)
    assert torch.allclose(folded(x), model(x), atol=1e-4)


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
    torch.onnx.export(fold(model), (x,), verbose=False).save(file)
    session = onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert torch.allclose(torch.from_numpy(found), model(x), atol=1e-4)
