"""The registries describe themselves, can't be changed, and are all there is."""

import pytest
import torch

from orthocond import linalg
from orthocond.linalg._solver import Solver

REGISTRIES = [linalg.FUNCTIONS, linalg.SOLVERS, linalg.GRADIENTS, linalg.POLAR_SOLVERS]


@pytest.mark.parametrize("registry", REGISTRIES)
def test_entries_describe_themselves(registry):
    for name, entry in registry.items():
        assert entry.name == name
        assert entry.description.endswith(".")
        assert entry.reference
        numbers = [default for default in entry.options.values() if type(default) in (int, float)]
        assert entry.signed_options or all(default > 0 for default in numbers)


@pytest.mark.parametrize("registry", REGISTRIES)
def test_they_are_frozen(registry):
    with pytest.raises(TypeError):
        registry["mine"] = None
    with pytest.raises(AttributeError):
        next(iter(registry.values())).name = "mine"


def test_an_option_in_the_name_reaches_the_solver():
    A = torch.diag(torch.tensor([1.0, 1e-3]))
    coarse = linalg.matrix_sqrth(A, solver="newton_schulz(iterations=2)")
    fine = linalg.matrix_sqrth(A, solver="newton_schulz( iterations = 25 )")
    assert abs(coarse[1, 1] - 1e-3**0.5) > 100 * abs(fine[1, 1] - 1e-3**0.5)


def test_a_solver_is_its_entry(monkeypatch):
    """Registering is enough: the functions call what the entry carries, with the options of its name."""
    calls = []

    def solve(A, functions, *, gradient, eps, rtol, floor, steps):
        calls.append((functions, eps, steps))
        return tuple(A + eps for _ in functions), None

    mine = Solver("mine", "One of a test.", "nobody", {"steps": 3}, has_eigenvalues=False, solve=solve)
    monkeypatch.setattr("orthocond.linalg._roots.SOLVERS", {**linalg.SOLVERS, "mine": mine})
    A = torch.eye(2)
    assert torch.equal(linalg.matrix_sqrth(A, solver="mine(steps=5)", eps=1.0), A + 1)
    assert calls == [((("sqrt", ()),), 1.0, 5)]
    with pytest.raises(ValueError, match="square root and its inverse alone"):
        linalg.matrix_logh(A, solver="mine")
