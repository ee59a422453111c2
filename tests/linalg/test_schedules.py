"""The optimal polynomials: their deviation, that no others of their degree do better, and their number."""

import itertools

import pytest
import torch

from orthocond.linalg import matrix_sqrth_pair, nearest_orthogonal, solver_failures
from orthocond.linalg._schedules import quintics

from cases import rotation
from oracle import polar, relative_error, root


def composed(steps, x):
    for a, b, c in steps:
        x = x * (a + b * x**2 + c * x**4)
    return x


@pytest.mark.parametrize("lower", [1e-6, 1e-3, 0.0185, 0.19, 0.5, 0.999])
@pytest.mark.parametrize("error", [1e-3, 1e-7, 1e-13])
def test_everything_between_the_bounds_comes_as_near_as_asked(lower, error):
    x = torch.logspace(torch.tensor(lower).log10(), 0, 100_001, dtype=torch.float64).clamp(lower, 1)
    assert (composed(quintics(lower, error), x) - 1).abs().max() <= error + 1e-14


def test_seven_steps_where_the_classical_quintic_takes_fourteen():
    assert len(quintics(1e-3, 1e-7)) == 7
    classical = next(k for k in itertools.count() if 1 - composed([(1.875, -1.25, 0.375)] * k, 1e-3) < 1e-7)
    assert classical == 14


@pytest.mark.parametrize("lower", [0.01, 0.2, 0.8])
def test_the_first_step_equioscillates_so_that_none_is_better(lower):
    """Chebyshev: deviations of equal size and alternating sign, one more than there are coefficients."""
    x = torch.linspace(lower, 1, 400_001, dtype=torch.float64)
    deviation = composed(quintics(lower, 1e-7)[:1], x) - 1
    largest = deviation.abs().max()
    peaks = deviation[deviation.abs() > largest * (1 - 1e-6)].sign()
    assert int((peaks[1:] != peaks[:-1]).sum()) + 1 == 4


def test_nothing_to_do():
    assert quintics(1.0, 1e-7) == ()


def at_the_bound(bound, n):
    """Values down to ``bound`` times their own norm."""
    values = torch.logspace(0, -1, n, dtype=torch.float64)
    for _ in range(2):
        values[-1] = 1.001 * bound * values.norm()
    return values


@pytest.mark.parametrize("bound", [1e-2, 1e-3, 1e-4])
@pytest.mark.parametrize("n", [3, 64])
def test_roots_and_polar_factors_of_spectra_at_the_bound(bound, n):
    before = solver_failures()
    l, U, V = at_the_bound(bound, n), rotation(n), rotation(n, seed=1)
    A = ((U * l) @ U.mT).float()
    for found, power in zip(matrix_sqrth_pair(A, solver=f"newton_schulz(bound={bound})"), (0.5, -0.5), strict=True):
        assert relative_error(found, root(A, power)) < 1e-5 + 3e-7 / bound
    M = ((U * l) @ V.mT).float()
    assert relative_error(nearest_orthogonal(M, solver=f"newton_schulz(bound={bound})"), polar(M)) < 1e-5 + 3e-7 / bound
    assert solver_failures() == before


def test_below_the_bound_is_a_failure_with_the_right_result():
    solver_failures(reset=True)
    A = torch.diag(torch.tensor([1.0, 1e-6]))
    Q, S = matrix_sqrth_pair(A.expand(2, 2, 2), solver="newton_schulz(bound=1e-2)")
    assert torch.allclose(Q, torch.diag(torch.tensor([1.0, 1e-3])).expand(2, 2, 2), atol=1e-6)
    assert torch.allclose(S[0].diagonal(), torch.tensor([1.0, 1e3]))
    assert solver_failures()["newton_schulz"] == 2
    assert torch.allclose(nearest_orthogonal(A, solver="newton_schulz(bound=1e-2)"), torch.eye(2), atol=1e-5)
    assert solver_failures(reset=True)["newton_schulz"] == 3


@pytest.mark.parametrize("solver", ["newton_schulz", "newton_schulz(bound=1e-2)", "pade(degree=20)", "products"])
@pytest.mark.parametrize("scale", [1e-37, 1e-30, 1e30, 1e37])
def test_any_scale_that_the_dtype_holds(solver, scale):
    A = (torch.diag(torch.tensor([1.0, 0.5, 0.25])) * scale).requires_grad_()
    Q, S = matrix_sqrth_pair(A, solver=solver)
    for found, power in ((Q, 0.5), (S, -0.5)):
        assert relative_error(found, root(A, power)) < 1e-4
    (slope,) = torch.autograd.grad(Q.sum(), A)
    assert torch.allclose(slope.diagonal() * scale**0.5, torch.tensor([0.5, 0.5**0.5, 1.0]), rtol=1e-3)
