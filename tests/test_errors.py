"""What is no tensor gets one sentence, from every function and layer that takes tensors."""

import functools
import inspect

import numpy as np
import pytest
import torch

import orthocond
from orthocond import linalg, nn, optim
from orthocond.errors import ArgumentError, DtypeError


def annotations_of(function):
    if not inspect.isfunction(function):
        return ()
    return [parameter.annotation for parameter in inspect.signature(function).parameters.values()]


MATRIX, IMAGES = np.eye(4, dtype=np.float32), np.ones((2, 4, 5, 5), dtype=np.float32)
FUNCTIONS = {
    name: getattr(linalg, name) for name in linalg.__all__ if torch.Tensor in annotations_of(getattr(linalg, name))
}
OTHERS = {"function": torch.exp, "derivative": torch.exp}


def called_with(A, function, **options):
    required = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    given = options | {p.name: A if p.annotation is torch.Tensor else OTHERS.get(p.name, 1) for p in required}
    positional = [given.pop(p.name) for p in required if p.kind is p.POSITIONAL_OR_KEYWORD]
    return function(*positional, **given)


CALLS = {
    **{name: functools.partial(called_with, MATRIX, function) for name, function in FUNCTIONS.items()},
    "nearest_orthogonal_gradient": lambda: optim.nearest_orthogonal_gradient(MATRIX),
    "optimal_learning_rate": lambda: optim.optimal_learning_rate(MATRIX, torch.eye(4)),
    "is_orthogonal": lambda: nn.is_orthogonal(MATRIX),
    "orthogonal_loss": lambda: nn.orthogonal_loss(MATRIX),
    "DecorrelatedBatchNorm1d": lambda: nn.DecorrelatedBatchNorm1d(4)(MATRIX),
    "DecorrelatedBatchNorm2d": lambda: nn.DecorrelatedBatchNorm2d(4).eval()(IMAGES),
    "RotationHead": lambda: nn.RotationHead()(np.ones((2, 9), dtype=np.float32)),
    "CovariancePool2d": lambda: nn.CovariancePool2d()(IMAGES),
    "WhiteningColoring2d": lambda: nn.whiten_color(torch.ones(2, 4, 5, 5), IMAGES),
}


@pytest.mark.parametrize("name", CALLS)
def test_arrays_are_named_with_the_remedy(name):
    with pytest.raises(DtypeError, match=rf"^{name} expected a tensor, got numpy.ndarray; .*torch.as_tensor\(A\)"):
        CALLS[name]()


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if "eps" in inspect.signature(FUNCTIONS[name]).parameters])
def test_an_eps_that_would_get_no_gradient_is_refused(name):
    with pytest.raises(ArgumentError, match=rf"^{name} expected eps to be a number, .* as eps \* torch.eye\(n\)"):
        called_with(torch.eye(4), FUNCTIONS[name], eps=torch.tensor(0.1, requires_grad=True))


def test_lists_too():
    with pytest.raises(DtypeError, match=r"^covariance expected a tensor, got list; "):
        linalg.covariance([[1.0, 2.0]])


@pytest.mark.parametrize(
    "call",
    [
        lambda model: orthocond.treat(model, "0", "nog"),
        lambda model: orthocond.find_pre_svd(model, torch.ones(1, 3)),
        nn.convert_batchnorm,
        nn.fold,
        lambda model: nn.renew_statistics(model, []),
    ],
)
def test_what_is_no_model_is_named(call):
    with pytest.raises(ArgumentError, match=r"^\w+ expected a model \(torch.nn.Module\), got numpy.ndarray; "):
        call(np.eye(3))


def test_an_example_that_is_an_array_is_named():
    model = torch.nn.Sequential(torch.nn.Conv2d(4, 4, 1), nn.DecorrelatedBatchNorm2d(4))
    with pytest.raises(DtypeError, match=r"^find_pre_svd expected a tensor, got numpy.ndarray; "):
        orthocond.find_pre_svd(model, IMAGES)
