"""What happens when a solver fails or the input is bad."""

import pytest
import torch

from orthocond.errors import ArgumentError, DtypeError, NonFiniteError, OrthocondError, SolverError
from orthocond.linalg import (
    matrix_inv_sqrth,
    matrix_sqrth,
    matrix_sqrth_pair,
    nearest_orthogonal,
    solver_failures,
    spectrum,
)

from cases import matrices
from oracle import relative_error, root


@pytest.fixture(autouse=True)
def fresh_counts():
    solver_failures(reset=True)
    yield
    solver_failures(reset=True)


def failing(function, *, times, only=None):
    """``function``, but the first ``times`` calls (those where ``only(A)``) don't converge."""
    calls = 0

    def wrapped(A, **options):
        nonlocal calls
        if only is None or only(A):
            calls += 1
            if calls <= times:
                raise torch.linalg.LinAlgError("did not converge")
        return function(A, **options)

    return wrapped


def failures():
    """The counts of the decompositions."""
    return {name: solver_failures()[name] for name in ("eigh", "svd")}


def test_a_batch_that_fails_is_solved_one_by_one(monkeypatch):
    A = matrices("spread 1e2", 6, (3,))
    monkeypatch.setattr(torch.linalg, "eigh", failing(torch.linalg.eigh, times=1, only=lambda A: A.ndim == 3))
    assert relative_error(matrix_sqrth(A), root(A, 0.5)) < 1e-6
    assert failures() == {"eigh": 0, "svd": 0}


@pytest.mark.parametrize(("times", "expected"), [(1, 1), (2, 2)])
def test_jitter_and_svd_are_the_retries_in_float64(monkeypatch, times, expected):
    A = matrices("spread 1e2", 6)
    monkeypatch.setattr(torch.linalg, "eigh", failing(torch.linalg.eigh, times=times))
    assert relative_error(matrix_sqrth(A), root(A, 0.5)) < 1e-6
    assert failures() == {"eigh": expected, "svd": 0}


def test_float64_is_the_first_retry_where_it_was_float32(monkeypatch):
    from orthocond.linalg._decompose import decompose

    A = matrices("spread 1e2", 6)
    expected = torch.linalg.eigvalsh(A.double())
    stubborn = failing(torch.linalg.eigh, times=9, only=lambda A: A.dtype == torch.float32)
    monkeypatch.setattr(torch.linalg, "eigh", stubborn)
    assert torch.allclose(decompose(A, "eigh")[0].double(), expected, atol=1e-6)
    assert failures() == {"eigh": 1, "svd": 0}


def test_svd_is_the_last_retry(monkeypatch):
    A = matrices("spread 1e2", 6, (2,))
    monkeypatch.setattr(torch.linalg, "eigh", failing(torch.linalg.eigh, times=99))
    value = matrix_sqrth(A)
    monkeypatch.undo()
    assert relative_error(value, root(A, 0.5)) < 1e-6


def test_what_cannot_be_solved_says_what_was_tried(monkeypatch):
    monkeypatch.setattr(torch.linalg, "eigh", failing(torch.linalg.eigh, times=99))
    monkeypatch.setattr(torch.linalg, "svd", failing(torch.linalg.svd, times=99))
    with pytest.raises(
        SolverError,
        match=r"6x6 matrix of torch.float64 .*tried: eigh in float64, eigh with a jitter, svd.*eps",
    ):
        matrix_sqrth(matrices("spread 1e2", 6))
    assert failures() == {"eigh": 2, "svd": 1}
    assert solver_failures(reset=True)["eigh"] == 2
    assert failures() == {"eigh": 0, "svd": 0}


def test_the_polar_factor_survives_an_svd_that_fails(monkeypatch):
    A = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    expected = nearest_orthogonal(A, solver="svd")
    monkeypatch.setattr(torch.linalg, "svd", failing(torch.linalg.svd, times=1))
    assert torch.allclose(nearest_orthogonal(A, solver="svd"), expected, atol=1e-6)
    assert solver_failures()["svd"] == 1


@pytest.mark.parametrize("solver", ["newton_schulz", "pade"])
def test_an_iteration_that_diverges_is_rescued_and_counted(solver):
    A = torch.diag(torch.tensor([1.0, 0.5, -0.4])).requires_grad_()
    Q, S = matrix_sqrth_pair(A, solver=solver + "(iterations=40)")
    (Q + S).sum().backward()
    assert A.grad.isfinite().all()
    if solver == "newton_schulz":
        assert torch.allclose(Q, torch.diag(torch.tensor([1.0, 0.5**0.5, 0.0])))
        assert solver_failures()["newton_schulz"] == 1


@pytest.mark.parametrize("solver", ["newton_schulz", "pade"])
def test_iterative_solvers_meet_non_finite_input_too(solver):
    with pytest.raises(NonFiniteError):
        matrix_sqrth(torch.full((3, 3), float("nan")), solver=solver)


def test_one_svd_that_fails_leaves_its_neighbours_alone(monkeypatch):
    A = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = nearest_orthogonal(A, solver="svd")
    monkeypatch.setattr(torch.linalg, "svd", failing(torch.linalg.svd, times=1, only=lambda A: A.ndim == 3))
    assert torch.equal(nearest_orthogonal(A, solver="svd"), expected)
    assert failures()["svd"] == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("function", [matrix_sqrth, matrix_inv_sqrth, matrix_sqrth_pair, nearest_orthogonal, spectrum])
def test_non_finite_input_names_the_matrix(function, value):
    A = torch.eye(3).repeat(2, 2, 1, 1)
    A[1, 0, 2, 2] = value
    with pytest.raises(NonFiniteError, match=r"matrix \(1, 0\) of the batch \(2, 2\)"):
        function(A)


def test_huge_finite_input_is_not_mistaken_for_infinity():
    A = torch.full((16, 16), 1e307, dtype=torch.float64)  # its sum is not finite
    assert matrix_sqrth(A).isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (
            torch.ones(3, 4),
            {},
            ArgumentError,
            r"expected square matrices \(..., n, n\), got \(3, 4\); pass a covariance",
        ),
        (torch.ones(3), {}, ArgumentError, r"got \(3,\)"),
        (torch.ones(2, 2, dtype=torch.long), {}, DtypeError, "torch.int64; convert it"),
        (torch.ones(2, 2, dtype=torch.bool), {}, DtypeError, "floating or complex tensor, got torch.bool"),
        (torch.eye(2), {"eps": -1.0}, ArgumentError, "finite number eps >= 0, got eps=-1.0"),
        (torch.eye(2), {"eps": float("nan")}, ArgumentError, "eps=nan"),
        (torch.eye(2), {"rtol": -1e-3}, ArgumentError, "rtol=-0.001"),
        (
            torch.eye(2),
            {"solver": "eig"},
            ArgumentError,
            "choose one of eigh, svd, newton_schulz, pade.*. Did you mean 'eigh'",
        ),
        (torch.eye(2), {"gradient": "x"}, ArgumentError, "choose one of exact, naive, taylor, pade, clip"),
        (torch.eye(2), {"solver": "eigh(steps=3)"}, ArgumentError, "the options of eigh are: clamp=false"),
        (torch.eye(2), {"solver": "newton_schulz(steps=3)"}, ArgumentError, "are: iterations=15"),
        (
            torch.eye(2),
            {"solver": "newton_schulz(iterations=many)"},
            ArgumentError,
            "iterations takes a whole number > 0",
        ),
        (
            torch.eye(2),
            {"solver": "newton_schulz", "rtol": 0.1},
            ArgumentError,
            "no eigenvalues to drop; use solver='eigh'",
        ),
        (torch.eye(2), {"solver": "pade", "gradient": "naive"}, ArgumentError, "a gradient of its own"),
        (torch.eye(2), {"gradient": "clip(bound=nan)"}, ArgumentError, "bound takes a number > 0"),
        (torch.eye(2), {"gradient": "taylor(degree=9"}, ArgumentError, "closing parenthesis"),
        (torch.eye(2), {"solver": None}, ArgumentError, "unknown solver None"),
    ],
)
@pytest.mark.parametrize("function", [matrix_sqrth, matrix_inv_sqrth, matrix_sqrth_pair])
def test_bad_input_is_told_with_the_remedy(function, arguments, options, error, message):
    with pytest.raises(error, match=message) as caught:
        function(arguments, **options)
    assert isinstance(caught.value, OrthocondError)
    assert function.__name__ in str(caught.value)
    assert "\n" not in str(caught.value)
