"""Into a model and out of it again: conversion of BatchNorm, folding for inference, export."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from orthocond.errors import ArgumentError
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
