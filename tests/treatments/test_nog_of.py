"""The nearest orthogonal gradient of what SGD makes of the gradient: with weight decay, and with momentum."""

import copy

import pytest
import torch
from torch import nn

import orthocond
from orthocond.errors import ArgumentError
from orthocond.linalg import nearest_orthogonal

RATE, MOMENTUM, DECAY = 0.1, 0.9, 0.05


def trained(of, num_steps=4, **options):
    """Return the weights after each step, and the gradients of the loss there."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 6, 3, bias=False, dtype=torch.float64))
    treatment = orthocond.treat(model, "0", f"nog(of={of})")
    settings = {"lr": RATE, "momentum": MOMENTUM, "weight_decay": DECAY, **options}
    optimizer = torch.optim.SGD(model.parameters(), **settings)
    treatment.attach(optimizer)
    x, y = torch.randn(3, 2, 5, 5, dtype=torch.float64), torch.randn(3, 6, 3, 3, dtype=torch.float64)
    weights, gradients = [model[0].weight.detach().clone()], []
    for _ in range(num_steps):
        optimizer.zero_grad()
        (model(x) - y).square().sum().backward()
        gradients.append(model[0].weight.grad.clone())
        optimizer.step()
        weights.append(model[0].weight.detach().clone())
    return [w.flatten(1) for w in weights], [g.flatten(1) for g in gradients], treatment, optimizer


def test_with_weight_decay_the_decayed_gradient_is_made_orthogonal():
    weights, gradients, _, _ = trained("decayed")
    buffer = torch.zeros_like(weights[0])
    for before, after, gradient in zip(weights, weights[1:], gradients, strict=False):
        buffer = MOMENTUM * buffer + nearest_orthogonal(gradient + DECAY * before)
        torch.testing.assert_close(after, before - RATE * buffer)


def test_with_momentum_the_whole_step_is_made_orthogonal():
    weights, gradients, _, _ = trained("momentum")
    buffer = torch.zeros_like(weights[0])
    for before, after, gradient in zip(weights, weights[1:], gradients, strict=False):
        buffer = MOMENTUM * buffer + gradient + DECAY * before
        torch.testing.assert_close(after, before - RATE * nearest_orthogonal(buffer))


def test_the_momentum_is_saved():
    _, _, treatment, _ = trained("momentum")
    state = copy.deepcopy(treatment.state_dict())
    _, _, other, _ = trained("momentum", num_steps=1)
    other.load_state_dict(state)
    assert torch.equal(other.parts["nog"].state_dict()["momentum"], state["parts"]["nog"]["state"]["momentum"])


@pytest.mark.parametrize("options", [{"nesterov": True}, {"dampening": 0.5}, {"maximize": True}])
def test_what_the_formula_does_not_hold_for_is_refused(options):
    with pytest.raises(ArgumentError, match=r"needs torch\.optim\.SGD without"):
        trained("decayed", **options)


def test_another_optimizer_and_gauge_are_refused():
    model = nn.Sequential(nn.Linear(3, 3))
    treatment = orthocond.treat(model, "0", "nog(of=momentum)")
    optimizer = torch.optim.AdamW(model.parameters())
    treatment.attach(optimizer)
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(ArgumentError, match="got AdamW"):
        optimizer.step()
    whitened = nn.Sequential(nn.Conv2d(3, 4, 1), orthocond.nn.DecorrelatedBatchNorm2d(4))
    with pytest.raises(ArgumentError, match="gauge"):
        orthocond.treat(whitened, "0", "nog(of=decayed)+gauge")
    with pytest.raises(ArgumentError, match="of"):
        orthocond.treat(nn.Sequential(nn.Linear(3, 3)), "0", "nog(of=weight)")
