"""Torch's private names: only one module knows them, and without each of them the results are the same."""

import inspect
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import orthocond
from orthocond import ConditionMonitor
from orthocond._core import private
from orthocond.linalg import covariance, matrix_inv_sqrth, matrix_sqrth_pair, nearest_orthogonal
from orthocond.nn import DecorrelatedBatchNorm2d, orthogonal_weight

from cases import matrices, noise

SOURCE = Path(orthocond.__file__).parent
# The name of a module that may be loaded; base classes that torch's own pages name; what only the benchmark uses.
ALLOWED = re.compile(r'"torch\._dynamo"|\b_BatchNorm\b|_python_dispatch|_pytree import tree_leaves')
PRIVATE = re.compile(r"torch\.(\w+\.)*_[a-z]|forward_ad\._|modules\.\w+\._|from torch\S* import .*\b_[a-z]")


def test_no_other_module_knows_them():
    found = [
        f"{file.relative_to(SOURCE)}: {line.strip()}"
        for file in SOURCE.rglob("*.py")
        if file != SOURCE / "_core" / "private.py"
        for line in file.read_text(encoding="utf-8").splitlines()
        if PRIVATE.search(line) and not ALLOWED.search(line)
    ]
    assert not found


def test_each_is_found_in_this_version():
    """Not a promise of torch's: where it is red, the slower public way is taken, and the name has to be looked for."""
    for name, (path, otherwise) in private.NAMES.items():
        assert getattr(private, name) is not otherwise, path
    assert hasattr(forward_ad, "_current_level")


def test_a_name_that_torch_has_not_is_replaced(monkeypatch):
    names = {"nothing": ("torch._C._there_is_no_such_name", 1), "nowhere": ("torch._there_is_no_such_module.name", 2)}
    monkeypatch.setattr(private, "NAMES", names)
    assert (private._looked_up("nothing"), private._looked_up("nowhere")) == (1, 2)


def results():
    """Return what the users of the private names compute: values, gradients, transforms, modes, threads."""
    torch.manual_seed(0)
    A = matrices("spread 1e2", 5, (3,), torch.float64)
    leaf = A.clone().requires_grad_()
    Q, S = matrix_sqrth_pair(leaf)
    yield from (Q, S)
    yield torch.autograd.grad((Q * S.cos()).sum(), leaf)[0]
    with torch.no_grad():
        yield matrix_inv_sqrth(A)
    yield torch.vmap(matrix_inv_sqrth)(A)
    yield torch.func.jacrev(lambda X: matrix_inv_sqrth(covariance(X)))(noise(3, 7, dtype=torch.float64))
    yield nearest_orthogonal(noise(4, 6, dtype=torch.float64))
    yield from linear_layer()
    yield from norm()
    with forward_ad.dual_level():
        yield forward_ad.unpack_dual(covariance(forward_ad.make_dual(noise(3, 7), noise(3, 7, seed=1)))).tangent
    yield matrix_inv_sqrth(matrices("spread 1e2", 32, (500,), torch.float64))


def linear_layer():
    layer = orthogonal_weight(nn.Linear(4, 4)).eval()
    with torch.no_grad():
        yield layer.weight.clone()
        yield layer.weight.clone()  # that of the cache


def norm():
    layer = DecorrelatedBatchNorm2d(3).double()
    x = noise(8, 3, 4, 4, dtype=torch.float64).requires_grad_()
    with ConditionMonitor(nn.Sequential(layer)) as monitor:
        y = layer(x)
    yield y
    yield layer.last_eigenvalues
    yield torch.tensor([record["cond"] for record in monitor.history()])
    yield torch.autograd.grad(y.cos().sum(), x)[0]
    with torch.no_grad():
        yield layer.eval()(x).add_(1)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", [*private.NAMES, "forward_ad._current_level", "all of them"])
def test_without_it_the_results_are_the_same(name, monkeypatch, two_threads):
    expected = [value.detach() for value in results()]
    for each in private.NAMES:
        if name in (each, "all of them"):
            monkeypatch.setattr(private, each, private.NAMES[each][1])
    if name in ("forward_ad._current_level", "all of them"):
        monkeypatch.setattr(private, "forward_mode_is_on", lambda: True)
    for value, true in zip(results(), expected, strict=True):
        torch.testing.assert_close(value.detach(), true, rtol=1e-5, atol=1e-6)


def test_forward_mode_may_be_on_where_torch_does_not_say(monkeypatch):
    assert not private.forward_mode_is_on()
    with forward_ad.dual_level():
        assert private.forward_mode_is_on()
    monkeypatch.setattr(private, "forward_ad", object())
    assert private.forward_mode_is_on()


def test_nested_containers_are_mapped_as_torch_does():
    tree = ({"x": torch.ones(2), "rest": [1, (torch.zeros(1), None)]}, "text", inspect.Attribute("a", "data", int, 3))
    doubled = [mapped(torch.Tensor, lambda x: 2 * x, tree) for mapped in (private._mapped, private.tree_map_only)]
    assert str(doubled[0]) == str(doubled[1])
    assert doubled[0][0]["x"].tolist() == [2, 2]
