"""What version 0.1 wrote still loads: states of treatments, from files that it wrote."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from orthocond import treat
from orthocond.errors import ArgumentError
from orthocond.nn import DecorrelatedBatchNorm2d

from cases import noise

SAVED = Path(__file__).parents[1] / "saved"
STATES = torch.load(SAVED / "treatments-0.1.states", weights_only=True)
SPECS = [
    "none",
    "sn",
    "ol(penalty_weight=0.5)+nog",
    "nog+ow+olr",
    "ow(normalize=false)",
    "olr(rule=exact)",
    "nog(solver=svd)",
    "gauge",
    "nog+gauge(threshold=3.0, scale=unit, momentum=reset)",
    "gauge(metric=weight)",
]


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 4, 3), DecorrelatedBatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 2))


def build(spec):
    model = network()
    treatment = treat(model, "0", spec)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    treatment.attach(optimizer)
    return model, optimizer, treatment


@pytest.mark.parametrize(("spec", "saved"), list(zip(SPECS, STATES, strict=True)), ids=SPECS)
def test_a_state_of_version_0_1_is_taken_over_and_training_goes_on_as_it_did(spec, saved):
    model, optimizer, treatment = build(spec)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    treatment.load_state_dict(saved["treatment"])
    last = saved["treatment"]["last"]
    if last is None:
        assert treatment.last is None
    else:
        assert all(getattr(treatment.last, name) == value for name, value in last.items())
    generator = torch.Generator().manual_seed(3)
    x = F.avg_pool2d(torch.randn(16, 3, 8, 8, generator=generator), 3, 1)
    optimizer.zero_grad()
    (F.cross_entropy(model(x), torch.arange(16) % 2) + treatment.penalty()).backward()
    optimizer.step()
    for name, value in saved["weight_after"].items():
        assert torch.allclose(model.state_dict()[name], value, rtol=1e-3, atol=1e-4), name


def test_a_state_of_another_treatment_is_refused():
    saved = dict(zip(SPECS, STATES, strict=True))
    for own, other in (("gauge", "gauge(metric=weight)"), ("nog+ow+olr", "nog(solver=svd)")):
        with pytest.raises(ArgumentError, match="the state is that of"):
            build(own)[2].load_state_dict(saved[other]["treatment"])


@pytest.mark.parametrize("state", [None, {}, network().state_dict(), {"layer": "0", "spec": "nog"}])
def test_what_is_no_state_is_refused(state):
    with pytest.raises(ArgumentError, match=r"one treatment returned, got .*; pass the entry of the checkpoint"):
        build("nog")[2].load_state_dict(state)


@pytest.mark.parametrize("state", [None, {}, STATES[0]["treatment"]])
def test_what_is_no_state_of_a_group_is_refused(state):
    group = treat(network(), "all", "none", example_input=noise(4, 3, 6, 6))
    with pytest.raises(ArgumentError, match="a TreatmentGroup returned, by layer; pass the entry"):
        group.load_state_dict(state)


def test_states_from_before_there_was_gauge_or_a_metric():
    state = dict(STATES[SPECS.index("nog(solver=svd)")]["treatment"])
    del state["gauge"]
    state["options"] = {"solver": "svd"}
    build("nog(solver=svd)")[2].load_state_dict(state)
    state = {"layer": "0", "spec": "gauge", "options": {"threshold": 10.0}, "last": None}
    build("gauge(metric=weight)")[2].load_state_dict(state)
    with pytest.raises(ArgumentError, match=r"metric='weight'.*not of.*metric='input'"):
        build("gauge")[2].load_state_dict(state)


def test_an_option_that_is_younger_than_the_state_has_its_default():
    state = build("nog")[2].state_dict()
    del state["parts"]["nog"]["options"]["max_norm"]
    build("nog")[2].load_state_dict(state)
    with pytest.raises(ArgumentError, match=r"max_norm=None.*not of.*max_norm=1\.0"):
        build("nog(max_norm=1.0)")[2].load_state_dict(state)
