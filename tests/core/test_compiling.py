"""Hooks that compiled code notices."""

import copy
import io

import pytest
import torch
from torch import nn

from orthocond._core.compiling import HookNotice, uncompiled

from cases import noise

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of torch.compile's own


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)

    def forward(self, x):
        return self.norm(self.first(x))


class Counter:
    """Counts the calls of a layer by a hook."""

    def __init__(self, layer):
        self.layer, self.calls = layer, 0
        self.handles = [layer.register_forward_hook(self.count), HookNotice(layer)]

    @uncompiled
    def count(self, layer, *_):
        self.calls += layer is self.layer

    def remove(self):
        for handle in self.handles:
            handle.remove()


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(model):
    return torch.compile(model, backend="eager")


X = noise(4, 3)


def test_a_second_model_of_a_class():
    compiled(Net())(X)
    model = Net()
    other = compiled(model)
    counter = Counter(model.norm)
    other(X)
    other(X)
    assert counter.calls == 2


def test_a_model_that_was_called_before():
    model = Net()
    run = compiled(model)
    run(X)
    counter = Counter(model.norm)
    run(X)
    counter.remove()
    run(X)
    assert counter.calls == 1


@pytest.mark.parametrize("first", [0, 1])
def test_two_models_of_a_class_in_turns(first):
    models = [Net(), Net()]
    counter = Counter(models[1].norm)
    runs = [compiled(model) for model in models]
    for i in (first, 1 - first, 0, 1):
        runs[i](X)
    assert counter.calls == 2


def test_it_leaves_the_layer_as_it_was():
    layer = nn.Linear(2, 2)
    before = set(vars(layer))
    one, two = HookNotice(layer), HookNotice(layer)
    one.remove()
    one.remove()
    assert "forward" in vars(layer)  # the other one's
    two.remove()
    assert set(vars(layer)) == before


def test_a_forward_of_its_own_is_kept():
    layer = nn.Linear(2, 2)
    layer.forward = own = lambda x: 2 * x
    HookNotice(layer).remove()
    assert layer.forward is own


def test_copies_use_their_own_weights():
    layer = nn.Linear(2, 2)
    notice = HookNotice(layer)
    saved = io.BytesIO()
    torch.save(layer, saved)
    saved.seek(0)
    for other in (copy.deepcopy(layer), torch.load(saved, weights_only=False)):
        with torch.no_grad():
            other.weight.zero_()
            other.bias.zero_()
        assert not other(noise(3, 2)).any()
        assert layer(noise(3, 2)).all()
    notice.remove()
