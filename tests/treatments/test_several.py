"""Several Pre-SVD layers: which are meant is said, and treated together they are one object."""

import io

import pytest
import torch
from torch import nn

from orthocond import treat
from orthocond.errors import ArgumentError, OrthocondWarning
from orthocond.nn import DecorrelatedBatchNorm2d, is_orthogonal
from orthocond.treatments import Gauge, TreatmentGroup

from cases import noise


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 1), DecorrelatedBatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1), DecorrelatedBatchNorm2d(4)
    )  # fmt: skip


class Joined(nn.Module):
    def __init__(self):
        super().__init__()
        self.skip, self.up, self.norm = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1), DecorrelatedBatchNorm2d(8)

    def forward(self, x):
        return self.norm(torch.cat([self.skip(x), self.up(x)], 1))


EXAMPLE = noise(4, 3, 5, 5)


@pytest.mark.parametrize("spec", ["nog+ow+olr", "nog+gauge", "ol+nog"])
def test_all_are_attached_saved_loaded_and_detached_together(spec):
    def build(seed):
        model = network(seed)
        treatment = treat(model, "all", spec, example_input=EXAMPLE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, treatment.attach(optimizer)

    def step(parts, seed):
        model, optimizer, treatment = parts
        optimizer.zero_grad()
        (model(noise(16, 3, 5, 5, seed=seed)).pow(3).mean() + treatment.penalty()).backward()
        optimizer.step()

    parts = build(0)
    model, optimizer, treatment = parts
    assert isinstance(treatment, TreatmentGroup)
    assert list(treatment.treatments) == ["0", "3"]
    assert len(optimizer.param_groups) == 1
    for seed in range(3):
        step(parts, seed)
    assert all(last.learning_rate > 0 for last in treatment.last.values())
    assert (treatment.penalty().item() > 0) == ("ol+" in spec)
    file = io.BytesIO()
    torch.save([part.state_dict() for part in parts], file)
    file.seek(0)
    others = build(1)
    for part, state in zip(others, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    assert others[2].last == treatment.last
    for each in (parts, others):
        step(each, 9)
    for a, b in zip(model.state_dict().values(), others[0].state_dict().values(), strict=True):
        assert torch.equal(a, b)
    treatment.remove()
    assert [type(model[i]) for i in (0, 3)] == [nn.Conv2d, nn.Conv2d]
    assert not model[0]._forward_hooks
    step(parts, 10)
    with pytest.raises(ArgumentError, match="is that of the layers 0, 3, not of skip, up"):
        treat(Joined(), "all", spec.replace("+gauge", ""), example_input=EXAMPLE).load_state_dict(
            treatment.state_dict()
        )


def test_first_all_and_auto():
    model = network()
    assert treat(model, "first", "nog", example_input=EXAMPLE).layer is model[0]
    with pytest.raises(ArgumentError, match=r"several Pre-SVD layers \(0, 3\).*layer='first' or layer='all'"):
        treat(model, "auto", "nog", example_input=EXAMPLE)
    with pytest.raises(ArgumentError, match="layer='all' needs an example_input"):
        treat(model, "all", "nog")
    model = Joined()
    sentence = r"'norm' is fed by several layers: 'skip' \(channels 0 to 3\) and 'up' \(channels 4 to 7\); .*'first'"
    with pytest.raises(ArgumentError, match=sentence):
        treat(model, "auto", "nog", example_input=EXAMPLE)
    assert treat(model, "first", "nog", example_input=EXAMPLE).name == "skip"
    assert list(treat(model, "all", "nog", example_input=EXAMPLE).treatments) == ["skip", "up"]


def test_a_layer_may_be_called_all():
    model = nn.Sequential()
    model.all = nn.Linear(2, 2)
    assert treat(model, "all", "nog").layer is model.all


def test_parts_are_not_shared():
    treatment = treat(network(), "all", ["ow", "nog"], example_input=EXAMPLE)
    first, second = treatment.treatments.values()
    assert first.parts["nog"] is not second.parts["nog"]
    gauge = Gauge(threshold=3.0)
    treatment = treat(network(), "all", [gauge], example_input=EXAMPLE)
    assert all(each.parts["gauge"].threshold == 3.0 for each in treatment.treatments.values())
    treat(network(), "0", [gauge])
    with pytest.raises(ArgumentError, match=r"this gauge\(threshold=3.0\) treats a layer already"):
        treat(network(), "0", [gauge])


def test_all_or_none():
    model = network()
    model.insert(4, nn.ReLU())
    with pytest.raises(ArgumentError, match="'Relu' first"):
        treat(model, "all", "gauge", example_input=EXAMPLE)
    model = network()
    treatment = treat(model, "all", "ow", example_input=EXAMPLE)
    assert is_orthogonal(model[0].weight, atol=1e-5)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with pytest.raises(ArgumentError, match="does not hold the parameter of '3'"):
        treatment.attach(optimizer)
    treatment.attach(torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_warning_is_given_once():
    with pytest.warns(OrthocondWarning, match="goes to zero") as caught:
        treat(network(), "all", "olr+ow", example_input=EXAMPLE)
    assert len(caught) == 1
