"""The optimal polynomials: their deviation, that no others of their degree do better, and their number."""

import itertools

import pytest
import torch

from orthocond.linalg._schedules import quintics


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
