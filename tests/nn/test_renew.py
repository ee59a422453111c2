"""Renewed running statistics: means over all batches, and nothing else changed."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import update_bn

from orthocond.errors import ArgumentError, OrthocondWarning
from orthocond.nn import DecorrelatedBatchNorm1d, DecorrelatedBatchNorm2d, renew_statistics

from cases import noise


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        DecorrelatedBatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Conv2d(4, 5, 1),
        nn.BatchNorm2d(5),
    )


BATCHES = [noise(8, 3, 6, 6, seed=seed) for seed in range(5)]


def buffers(module):
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def test_the_statistics_are_means_over_the_batches_with_everything_else_in_eval():
    net = model()
    net[3].train(False)
    net[1].momentum = 0.3
    net(BATCHES[0] + 7)  # old statistics, to be forgotten
    modes = [layer.training for layer in net.modules()]
    renew_statistics(net, BATCHES)
    inputs = [net[0](x) for x in BATCHES]
    means = [y.mean((0, 2, 3)) for y in inputs]
    assert torch.allclose(net[1].running_mean, torch.stack(means).mean(0), atol=1e-5)
    whitenings = []
    for y in inputs:
        layer = DecorrelatedBatchNorm2d(4, momentum=None)
        layer(y)
        whitenings.append(layer.running_whitening)
    assert torch.allclose(net[1].running_whitening, torch.stack(whitenings).mean(0), atol=1e-4)
    assert [layer.training for layer in net.modules()] == modes
    assert (net[1].momentum, net[5].momentum) == (0.3, 0.1)
    assert net[1].num_batches_tracked == net[5].num_batches_tracked == 5
    again = buffers(net)
    renew_statistics(net.train(), BATCHES)  # dropout is off: nothing is left to chance
    assert all(torch.equal(value, again[name]) for name, value in net.named_buffers())


def test_plain_batchnorm_gets_what_update_bn_gives_it():
    ours = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 1), nn.BatchNorm2d(5))
    theirs = copy.deepcopy(ours)
    renew_statistics(ours, BATCHES)
    update_bn(BATCHES, theirs)
    for (name, value), expected in zip(ours.named_buffers(), theirs.buffers(), strict=True):
        assert torch.allclose(value, expected), name


class Keywords(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = DecorrelatedBatchNorm2d(3)

    def forward(self, images, scale=1.0):
        return self.norm(images) * scale


class AnyKeywords(Keywords):
    def forward(self, images, **others):
        assert set(others) == {"label"}
        return self.norm(images)


@pytest.mark.parametrize("cls", [Keywords, AnyKeywords])
def test_batches_of_every_kind(cls):
    labels = torch.zeros(8)
    kinds = [
        [{"images": x, "label": labels} for x in BATCHES],
        *([] if cls is AnyKeywords else [BATCHES, ((x, labels) for x in BATCHES), [[x, labels] for x in BATCHES]]),
    ]
    for batches in kinds:
        net = cls()
        renew_statistics(net, batches, device="cpu")
        assert torch.allclose(net.norm.running_mean, torch.cat(BATCHES).mean((0, 2, 3)), atol=1e-6)


class Elsewhere(torch.Tensor):
    """A tensor on another device, which comes when asked to."""

    def to(self, device):
        return self.as_subclass(torch.Tensor) if device == "cpu" else self


def test_inputs_are_moved_where_asked():
    seen, net = [], Keywords()
    net.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(type((args + tuple(kwargs.values()))[0])), with_kwargs=True
    )
    x = BATCHES[0].as_subclass(Elsewhere)
    for batch in (x, [x], {"images": x}):
        renew_statistics(net, [batch])
        renew_statistics(net, [batch], device="cpu")
    assert seen == 3 * [Elsewhere, torch.Tensor]


def test_nothing_changes_where_a_batch_fails():
    net = model()
    net(BATCHES[0])
    net[3].eval()
    before, modes = buffers(net), [layer.training for layer in net.modules()]
    for batches, error, message in [
        ([BATCHES[1], noise(8, 2, 6, 6)], RuntimeError, "channels"),
        ([], ArgumentError, "got no batch; .* used up"),
        (iter(()), ArgumentError, "got no batch"),
        ([{"pictures": BATCHES[0]}], ArgumentError, "keys pictures, but the model's arguments are input; "),
        (BATCHES[0], ArgumentError, r"one Tensor; pass a list, \[batch\]"),
        ({"x": 1}, ArgumentError, "one dict"),
    ]:
        with pytest.raises(error, match=message):
            renew_statistics(net, batches)
        assert all(torch.equal(value, before[name]) for name, value in net.named_buffers())
        assert [layer.training for layer in net.modules()] == modes
        assert net[1].momentum == 0.1


class Auxiliary(nn.Module):
    """A head that is used in training alone."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = DecorrelatedBatchNorm1d(3), nn.BatchNorm1d(3)

    def forward(self, x):
        return self.head(self.norm(x)) if self.training else self.norm(x)


def test_what_is_without_effect_says_so():
    with pytest.warns(OrthocondWarning, match="found no norm with running statistics"):
        renew_statistics(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False)), [noise(3, 2)])
    net = Auxiliary()
    net.head.running_mean.fill_(3)
    with pytest.warns(OrthocondWarning, match="left head unchanged"):
        renew_statistics(net, [noise(9, 3)])
    assert torch.equal(net.head.running_mean, torch.full((3,), 3.0))


def test_statistics_that_are_switched_off_stay_as_they_are():
    net = model()
    net[1].track_running_stats = False
    before = buffers(net[1])
    renew_statistics(net, BATCHES)  # without a warning
    assert all(torch.equal(value, before[name]) for name, value in net[1].named_buffers())
    assert net[5].num_batches_tracked == 5
    with pytest.warns(OrthocondWarning, match="found no norm with running statistics"):
        renew_statistics(net[:2], BATCHES)


def test_no_gradients_and_no_changed_weights():
    net = model()
    before = [weight.clone() for weight in net.parameters()]
    with torch.enable_grad():
        renew_statistics(net, BATCHES)
    assert all(torch.equal(a, b) and a.grad is None for a, b in zip(net.parameters(), before, strict=True))
    assert not any(buffer.requires_grad for buffer in net.buffers())


def test_a_compiled_model_is_renewed_without_a_graph_break():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    net, plain = nn.Sequential(DecorrelatedBatchNorm2d(3)), nn.Sequential(DecorrelatedBatchNorm2d(3))
    renew_statistics(torch.compile(net, backend=backend), BATCHES)
    renew_statistics(plain, BATCHES)
    assert torch.allclose(net[0].running_whitening, plain[0].running_whitening, atol=1e-5)
    assert net[0].num_batches_tracked == 5
    assert net.training
    assert len(graphs) == 1
