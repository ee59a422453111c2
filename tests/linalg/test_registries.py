"""The registries describe themselves, can't be changed, and are all there is."""

import pytest
import torch

from orthocond import linalg

REGISTRIES = [linalg.SOLVERS, linalg.GRADIENTS, linalg.POLAR_SOLVERS]


@pytest.mark.parametrize("registry", REGISTRIES)
def test_entries_describe_themselves(registry):
    for name, entry in registry.items():
        assert entry.name == name
        assert entry.description.endswith(".")
        assert entry.reference
        assert all(default > 0 for default in entry.options.values())


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
