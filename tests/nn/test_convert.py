"""Into a model: conversion of BatchNorm, and of its checkpoints."""

import copy
import inspect

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from networks import BatchNormAct2d, Net, trained
from orthocond.errors import ArgumentError, OrthocondWarning
from orthocond.nn import (
    DecorrelatedBatchNorm1d,
    DecorrelatedBatchNorm2d,
    DecorrelatedBatchNorm3d,
    convert_batchnorm,
    fold,
)

from cases import noise


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


@pytest.mark.parametrize("statistics", ["kept, not updated", "none, flag set"])
def test_statistics_that_are_switched_off_stay_so(statistics):
    model, x = trained(Net()), noise(4, 3, 8, 8, seed=99)
    if statistics == "kept, not updated":
        model.norm.track_running_stats = False
    else:
        model.norm.running_mean = model.norm.running_var = None
    y = model(x)
    converted = convert_batchnorm(copy.deepcopy(model), ["norm"])
    assert converted.norm.track_running_stats == model.norm.track_running_stats
    if statistics == "kept, not updated":
        assert torch.allclose(converted(x), y, atol=1e-5)
        assert torch.allclose(fold(converted)(x), y, atol=1e-4)
    else:
        assert converted.norm.running_mean is None


@pytest.mark.parametrize("tracks", [True, False])
def test_statistics_can_be_switched_by_an_option(tracks):
    layer = convert_batchnorm(nn.BatchNorm2d(4, track_running_stats=not tracks), track_running_stats=tracks)
    assert layer.track_running_stats == tracks
    assert (layer.running_mean is not None) == tracks
    layer(noise(8, 4, 3, 3))
    assert not tracks or layer.num_batches_tracked == 1


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
    torch.compile(model, backend="aot_eager", fullgraph=True)(x).sum().backward()
    folded = fold(model.eval())
    assert torch.allclose(folded(x), model(x), atol=1e-4)


def test_a_subclass_that_only_normalises_is_converted():
    layer = trained(Plain(4), (20, 4))
    x = noise(5, 4, seed=99)
    with torch.device("meta"):  # the default device, which doesn't matter
        converted = convert_batchnorm(copy.deepcopy(layer))
    assert torch.allclose(converted(x), layer(x), atol=1e-5)


def parametrized(layer):
    parametrize.register_parametrization(layer, "weight", nn.Softplus())
    return layer


def loading_differently(layer):
    layer.register_load_state_dict_pre_hook(lambda *_: None)
    return layer


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Doubled(4), "'1', a Doubled: in training mode it does something other than to normalise"),
        (Frozen(4), "a Frozen: in training mode"),
        (Gated(4), r"BatchNorm doesn't have \(gate\)"),
        (ActFirst(4), "a ActFirst: in training mode"),
        (Broken(4), r"trying it out failed \(TypeError"),
        (parametrized(nn.BatchNorm2d(4)), "it has a parametrization, which .*remove_parametrizations takes away"),
        (prune.random_unstructured(nn.BatchNorm2d(4), "weight", 0.5), r"doesn't have \(weight_mask, weight_orig\)"),
        (loading_differently(nn.BatchNorm2d(4)), "a hook on load_state_dict that is bound to it"),
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


def test_hooks_are_carried_over():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), BatchNormAct2d(4))
    called = []

    def calling(name):
        return lambda module, *_, **__: called.append((name, type(module)))

    handles = []
    for norm in model[1:]:
        norm.register_forward_pre_hook(calling("before"))
        norm.register_forward_hook(calling("after"), with_kwargs=True)
        norm.register_full_backward_pre_hook(calling("before backward"))
        norm.register_full_backward_hook(calling("after backward"))
        norm.register_state_dict_pre_hook(calling("state"))
        handles.append(norm.register_forward_hook(calling("removed"), always_call=True))
    convert_batchnorm(model)
    assert not called  # by trying a subclass out
    model(noise(2, 3, 3, 3)).sum().backward()
    model.state_dict()
    on_the_way = ["before", "after", "removed"]
    names = 2 * on_the_way + 2 * ["before backward", "after backward"] + 2 * ["state"]
    assert called == [(name, DecorrelatedBatchNorm2d) for name in names]
    for handle in handles:
        handle.remove()
    called.clear()
    model(noise(2, 3, 3, 3))
    assert [name for name, _ in called] == 2 * ["before", "after"]


@pytest.mark.skipif("bias" not in inspect.signature(nn.BatchNorm2d).parameters, reason="this torch has no such option")
def test_a_norm_with_a_scale_alone():
    model = nn.Sequential(nn.BatchNorm2d(4, bias=False))
    nn.init.normal_(model[0].weight)
    x = noise(8, 4, 3, 3)
    converted = convert_batchnorm(copy.deepcopy(model))
    assert converted[0].bias is None
    assert torch.allclose(converted.eval()(x), model.eval()(x), atol=1e-5)
    plain = copy.deepcopy(converted[0]).train()
    plain.bias = nn.Parameter(torch.zeros(4))
    assert torch.allclose(converted[0].train()(x), plain(x), atol=1e-6)
    for part in (converted, fold(converted)):
        part.eval()(x)
        part.load_state_dict(part.state_dict())
    assert torch.allclose(fold(converted)(x), converted.eval()(x), atol=1e-5)


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
    for groups in (1, 8):
        with pytest.raises(RuntimeError, match="size mismatch for running_mean"):
            DecorrelatedBatchNorm2d(8, groups=groups).load_state_dict(batchnorm.state_dict())
    with pytest.raises(RuntimeError, match="Unexpected"):
        DecorrelatedBatchNorm2d(4, track_running_stats=False).load_state_dict(batchnorm.state_dict())
    with pytest.raises(RuntimeError, match="Missing"):
        layer.load_state_dict({"weight": torch.ones(4), "bias": torch.ones(4)})
