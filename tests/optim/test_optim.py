"""The nearest orthogonal gradient and the optimal learning rate, as plain functions."""

import math

import pytest
import torch
from torch import nn

from orthocond.errors import ArgumentError, NonFiniteError
from orthocond.optim import nearest_orthogonal_gradient, optimal_learning_rate

from cases import noise, rotation


def objective(W, G, eta):
    X = (W - eta * G).flatten(1).double()
    return torch.linalg.matrix_norm(X @ X.T - torch.eye(len(X)).double()).item()


@pytest.mark.parametrize(
    "layer", [nn.Linear(5, 7), nn.Conv2d(3, 8, 3), nn.Conv2d(4, 8, 3, groups=2), nn.ConvTranspose2d(4, 6, 3)], ids=repr
)
def test_gradient_is_the_polar_factor_of_its_matrix(layer):
    transposed, groups = isinstance(layer, nn.ConvTranspose2d), getattr(layer, "groups", 1)
    layer.weight.grad = noise(*layer.weight.shape)
    before = layer.weight.grad.clone()
    found = nearest_orthogonal_gradient(layer.weight, groups=groups, transposed=transposed)
    assert found.shape == layer.weight.shape
    assert torch.equal(layer.weight.grad, before)
    by_output = found.transpose(0, 1) if transposed else found
    for part in by_output.chunk(groups):
        assert torch.allclose(torch.linalg.svdvals(part.flatten(1)), torch.ones(1), atol=1e-5)


def test_gradient_that_is_missing_zero_or_not_finite():
    W = nn.Parameter(torch.eye(3))
    assert nearest_orthogonal_gradient(W) is None
    W.grad = torch.zeros(3, 3)
    assert not nearest_orthogonal_gradient(W).any()
    W.grad = torch.full((3, 3), float("nan"))
    with pytest.raises(NonFiniteError):
        nearest_orthogonal_gradient(W)


def test_papers_rule_is_equation_20():
    W, G = noise(5, 4, 2), noise(5, 4, 2, seed=2)
    w, g = W.flatten().double(), G.flatten().double()
    expected = (w @ w) * (g @ w) / ((w @ w) * (g @ g) + 2 * (g @ w) ** 2)
    assert optimal_learning_rate(W, G) == pytest.approx(expected.item())
    assert optimal_learning_rate(W, -G) == pytest.approx(-expected.item())
    larger = abs(expected.item())
    assert optimal_learning_rate(W, G * expected.sign(), max_lr=larger / 2) == pytest.approx(larger / 2)


def test_exact_rule_is_never_worse_than_a_fine_grid():
    generator = torch.Generator().manual_seed(0)
    for case in range(1000):
        m, n = torch.randint(1, 7, (2,), generator=generator).tolist()
        scale = 10 ** (2 * torch.rand(2, generator=generator) - 1)
        W = scale[0] * torch.randn(m, n, generator=generator, dtype=torch.float64)
        G = scale[1] * torch.randn(m, n, generator=generator, dtype=torch.float64)
        limit = [0.1, 1.0, 10.0][case % 3]
        eta = optimal_learning_rate(W, G, rule="exact", max_lr=limit)
        assert 0 <= eta <= limit
        X = W - torch.linspace(0, limit, 401, dtype=torch.float64).view(-1, 1, 1) * G
        grid = torch.linalg.matrix_norm(X @ X.mT - torch.eye(m)).min().item()
        assert objective(W, G, eta) <= grid * (1 + 1e-9) + 1e-9


def test_exact_rule_without_a_limit_and_at_its_ends():
    W = 2 * torch.eye(3)
    assert optimal_learning_rate(W, torch.eye(3), rule="exact") in (pytest.approx(1.0), pytest.approx(3.0))
    assert optimal_learning_rate(W, torch.eye(3), rule="exact", max_lr=0.5) == 0.5
    assert optimal_learning_rate(0.5 * torch.eye(3), torch.eye(3), rule="exact", max_lr=0.1) == 0.0
    assert objective(W, torch.eye(3), optimal_learning_rate(W, torch.eye(3), rule="exact")) < 1e-6


def test_exact_rule_takes_each_group_of_a_convolution_by_itself():
    W, G = noise(3, 2, 5, dtype=torch.float64), noise(3, 2, 5, dtype=torch.float64, seed=2)
    eta = optimal_learning_rate(W.flatten(0, 1), G.flatten(0, 1), rule="exact", max_lr=1.0, groups=3)
    total = lambda eta: sum(objective(w, g, eta) ** 2 for w, g in zip(W, G, strict=True))
    assert total(eta) <= min(total(x / 400) for x in range(401)) * (1 + 1e-9)


@pytest.mark.parametrize("rule", ["paper", "exact"])
@pytest.mark.parametrize("scale", [1e-28, 1e28])
def test_extreme_gradients(rule, scale):
    W, G = noise(4, 4), noise(4, 4, seed=2)
    assert optimal_learning_rate(W, scale * G, rule=rule) == pytest.approx(
        optimal_learning_rate(W, G, rule=rule) / scale, rel=1e-3
    )
    with pytest.raises(NonFiniteError):
        optimal_learning_rate(W, G / 0, rule=rule)


@pytest.mark.parametrize("rule", ["paper", "exact"])
def test_zero_gradient_has_rate_zero(rule):
    assert optimal_learning_rate(torch.eye(3), torch.zeros(3, 3), rule=rule, max_lr=0.1) == 0.0


def test_bounds_of_proposition_1_hold_under_their_premise():
    n, seen = 6, 0
    for seed in range(200):
        W, G = rotation(n, seed=seed), rotation(n, seed=seed + 1000)
        G = G if (W * G).sum() > 0 else -G
        eta = optimal_learning_rate(W, G)
        assert eta <= n**2 / (n**2 + 2)
        if (W * G).sum() >= 1:  # the premise of the lower bound
            seen += 1
            assert eta >= 1 / (n**2 + 2)
    assert seen > 20


def test_without_the_premise_proposition_1_has_a_counterexample():
    W = torch.eye(2)
    angle = math.pi / 2 - 1e-3
    G = torch.tensor(
        [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
    )  # orthogonal, <W, G> = 0.002
    assert 0 < optimal_learning_rate(W, G) < 1 / (2**2 + 2)
    assert optimal_learning_rate(W, -W) < 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: optimal_learning_rate(torch.eye(2), torch.eye(3)), r"got \(2, 2\) and \(3, 3\)"),
        (lambda: optimal_learning_rate(torch.eye(2), torch.eye(2), rule="best"), "choose one of paper, exact"),
        (lambda: optimal_learning_rate(torch.eye(2), torch.eye(2), max_lr=-1), "max_lr=-1"),
        (lambda: optimal_learning_rate(torch.ones(2), torch.ones(2)), r"expected matrices"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()
