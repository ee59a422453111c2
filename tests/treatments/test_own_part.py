"""A treatment of one's own: a class in a list; registered, it is everywhere."""

import io

import pytest
import torch
from torch import nn

from orthocond import treat
from orthocond.treatments import Note, Part, _registry, canonical

import registries
from cases import noise
from contract import CONTRACTS, specifications


class Smoothed(Part):
    """The gradient's running mean instead of the gradient."""

    name, acts_on = "smoothed", "gradient"
    description = "Smoothed gradient: its running mean."
    reference = "a test"
    notes = (Note("roughness", "distance of the gradient from its mean"),)

    def __init__(self, *, momentum: float = 0.9) -> None:
        self.momentum, self.mean = momentum, None

    def act(self, step):
        gradient = step.gradient.clone()
        self.mean = gradient if self.mean is None else torch.lerp(gradient, self.mean, self.momentum)
        step.gradient = self.mean
        step.note(roughness=lambda mean=self.mean: (gradient - mean).norm())

    def state_dict(self):
        return {"mean": self.mean}

    def load_state_dict(self, state):
        self.mean = state["mean"]


def build(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    treatment = treat(model, "0", [Smoothed(momentum=0.5), "ow"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, treatment.attach(optimizer)


def step(model, optimizer, treatment, seed):
    optimizer.zero_grad()
    (model(noise(8, 4, seed=seed)).square().mean() + treatment.penalty()).backward()
    optimizer.step()


def test_it_is_trained_saved_and_resumed():
    parts, others, file = build(0), build(1), io.BytesIO()
    for seed in range(3):
        step(*parts, seed)
    assert parts[2].spec == "ow+smoothed(momentum=0.5)"
    assert parts[2].last.roughness > 0
    torch.save([part.state_dict() for part in parts], file)
    file.seek(0)
    for part, state in zip(others, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    for each in (parts, others):
        step(*each, 9)
    assert all(torch.equal(a, b) for a, b in zip(parts[0].parameters(), others[0].parameters(), strict=True))


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setitem(_registry._PARTS, "smoothed", Smoothed)


@pytest.mark.usefixtures("registered")
def test_registered_it_is_everywhere():
    assert canonical("smoothed(momentum=0.5)+nog") == "nog+smoothed(momentum=0.5)"
    specs = [spec for spec in specifications() if "smoothed" in spec]
    assert specs == ["smoothed", *(f"{name}+smoothed" for name in ("nog", "sn", "ol", "ow", "olr", "gauge"))]
    for contract in CONTRACTS:
        contract("smoothed")


@pytest.mark.usefixtures("registered")
def test_registered_it_is_in_the_laboratory_and_the_documentation():
    pytest.importorskip("lightning_fabric", reason="the laboratory isn't installed")
    from typer.testing import CliRunner

    from orthocond.lab.cli import app
    from orthocond.lab.methods import method

    assert method("svd+smoothed+ow").name == "svd+ow+smoothed"
    assert "smoothed gradient" in method("svd+smoothed").description
    output = CliRunner().invoke(app, ["methods"]).output
    assert "smoothed" in output
    assert "its running mean" in output
    assert "`smoothed(momentum=0.9)` | Smoothed gradient" in registries.registry("orthocond.treatments.TREATMENTS")


def test_it_may_act_before_and_after_the_inner_parts():
    order = []

    class Outer(Part):
        name, order = "outer", 10

        def act(self, step):
            order.append(f"before {step.has_inner_parts}")
            yield
            order.append("after")

    class Inner(Part):
        name = "inner"

        def act(self, step):
            order.append(f"inner {step.has_inner_parts}")

    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    treat(model, "0", [Inner(), Outer()]).attach(optimizer)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert order == ["before True", "inner False", "after"]
