"""The head that predicts rotations."""

import copy

import pytest
import torch
from torch import nn

from orthocond.errors import ArgumentError
from orthocond.nn import RotationHead

from cases import noise


def test_it_learns_rotations():
    torch.manual_seed(0)
    angles = torch.linspace(-3, 3, 64)
    sine, cosine = angles.sin(), angles.cos()
    R = torch.stack([cosine, -sine, sine, cosine], -1).unflatten(-1, (2, 2))
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 4), RotationHead(2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(100):
        optimizer.zero_grad()
        loss = (model(angles.unsqueeze(-1)) - R).square().sum((-2, -1)).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]


def test_habits_of_a_module():
    head = RotationHead()
    x = noise(2, 5, 9)
    assert head(x).shape == (2, 5, 3, 3)
    assert torch.equal(copy.deepcopy(head)(x), head(x))
    assert repr(head) == "RotationHead(3)"
    assert not head.state_dict()


def test_bad_input():
    with pytest.raises(ArgumentError, match=r"expected \(..., 9\), got \(2, 4\); use RotationHead\(2\)"):
        RotationHead()(torch.zeros(2, 4))
    with pytest.raises(ArgumentError, match=r"use Linear\(..., 9\)"):
        RotationHead()(torch.zeros(2, 6))
    with pytest.raises(ArgumentError, match="dim >= 1"):
        RotationHead(0)
