"""Wrong decompositions are found, retried and counted; right ones never are."""

import math
import random
import warnings

import pytest
import torch

from orthocond.errors import NonFiniteError, OrthocondWarning, SolverError
from orthocond.linalg import (
    matrix_exph,
    matrix_inv_sqrth,
    matrix_sqrth,
    nearest_orthogonal,
    nearest_rotation,
    solver_failures,
    spectrum,
)
from orthocond.linalg._decompose import decompose, svd
from orthocond.linalg._verify import verified_eigen, verified_svd

from cases import SPECTRA, matrices, noise, rotation
from oracle import relative_error, root

N = 8
LAST = N - 1


@pytest.fixture(autouse=True)
def fresh_counts():
    solver_failures(reset=True)
    yield
    solver_failures(reset=True)


def columns(**changes):
    """A change of single columns of ``U``: ``c3="zero"`` or ``c3=(factor, other column)``."""

    def change(l, U):
        W = U.clone()
        for name, (factor, other) in changes.items():
            W[:, int(name[1:])] = factor * U[:, other]
        return l, W

    return change


def turned(i, j, angle):
    """Two eigenvectors rotated into each other."""

    def change(l, U):
        W = U.clone()
        W[:, i] = math.cos(angle) * U[:, i] + math.sin(angle) * U[:, j]
        W[:, j] = math.cos(angle) * U[:, j] - math.sin(angle) * U[:, i]
        return l, W

    return change


def entry(i, j, value):
    def change(l, U):
        W = U.clone()
        W[i, j] = value
        return l, W

    return change


def value(i, new):
    """A change of one eigenvalue, or of all for ``...``."""

    def change(l, U):
        k = l.clone()
        k[i] = new(l[i]) if callable(new) else new
        return k, U

    return change


def permuted(order, *, vectors):
    index = torch.tensor(order)
    return lambda l, U: (l[index], U[:, index] if vectors else U)


def noisy(size, *, column=None):
    def change(l, U):
        W = U + size * noise(N, N, dtype=U.dtype)
        if column is not None:
            W = torch.where(torch.arange(N) == column, W, U)
        return l, W

    return change


NAN, INF = float("nan"), float("inf")
CORRUPTIONS = {
    **{f"column {i} is {j}": columns(**{f"c{i}": (1.0, j)}) for i, j in ((0, LAST), (LAST, 0), (6, LAST), (LAST, 6))},
    **{f"column {i} is zero": columns(**{f"c{i}": (0.0, i)}) for i in (0, 4, LAST)},
    **{f"column {i} times {x}": columns(**{f"c{i}": (x, i)}) for i in (0, LAST) for x in (2.0, 0.5, 1 + 1e-6, 1e-3)},
    **{f"column {i} is {x}": columns(**{f"c{i}": (x, i)}) for i in (0, LAST) for x in (NAN, INF)},
    "columns swapped": columns(c0=(1.0, LAST), c7=(1.0, 0)),
    "neighbours swapped": columns(c6=(1.0, LAST), c7=(1.0, 6)),
    "columns mixed up": permuted([3, 0, 7, 1, 6, 2, 5, 4], vectors=True),
    **{f"turned by {x}": turned(LAST, 6, x) for x in (1.0, 1e-3, 1e-6, math.pi / 2)},
    **{f"turned far by {x}": turned(0, LAST, x) for x in (1.0, 1e-3, 1e-6)},
    **{f"noise {x}": noisy(x) for x in (1.0, 1e-3, 1e-6, 1e-9)},
    **{f"noise {x} in a column": noisy(x, column=LAST) for x in (1.0, 1e-3, 1e-6)},
    **{f"noise {x} in the first": noisy(x, column=0) for x in (1.0, 1e-3, 1e-6)},
    **{f"an entry is {x}": entry(2, 5, x) for x in (NAN, INF, -INF, 0.0, 1e3, 1e300)},
    "a row of zeros": lambda l, U: (l, torch.where(torch.arange(N)[:, None] == 3, 0.0, U)),
    "two rows swapped": lambda l, U: (l, U[torch.tensor([1, 0, *range(2, N)])]),
    "a row changed its sign": lambda l, U: (l, torch.where(torch.arange(N)[:, None] == 3, -U, U)),
    "the first is garbage": lambda l, U: (l, torch.cat([noise(N, 1, dtype=U.dtype), U[:, 1:]], 1)),
    "half of them zero": lambda l, U: (l, torch.where(torch.arange(N) < N // 2, U, 0.0)),
    "transposed": lambda l, U: (l, U.mT.clone()),
    "reversed": lambda l, U: (l, U.flip(-1)),
    "rolled": lambda l, U: (l, U.roll(1, -1)),
    "the identity": lambda l, U: (l, torch.eye(N, dtype=U.dtype)),
    "zeros": lambda l, U: (l, torch.zeros_like(U)),
    "ones": lambda l, U: (l, torch.ones_like(U)),
    "NaN throughout": lambda l, U: (l * NAN, U * NAN),
    "rounded to float32": lambda l, U: (l, U.float().double()),
    "rounded to float16": lambda l, U: (l, U.half().double()),
    "all of it twice as large": lambda l, U: (l, 2 * U),
    "larger, with values to match": lambda l, U: (l / 4, 2 * U),
    "values rounded to float32": lambda l, U: (l.float().double() * (1 + 1e-8), U),
    **{f"value {i} is {x}": value(i, x) for i in (0, 4, LAST) for x in (NAN, INF, -1.0)},
    **{f"the last value is {x}": value(LAST, x) for x in (0.0, 1e300, -INF)},
    **{f"the last value times {x}": value(LAST, lambda l, x=x: l * x) for x in (1 + 1e-6, 2.0, -1.0)},
    **{f"values times {x}": value(..., lambda l, x=x: l * x) for x in (0.0, 0.5, 2.0, 1 + 1e-9, -1.0, 1e20, NAN)},
    **{f"values plus {x}": value(..., lambda l, x=x: l + x) for x in (1.0, 1e-6, -1e-6, -1.0)},
    "values squared": value(..., lambda l: l * l),
    "roots of the values": value(..., lambda l: l.abs().sqrt()),
    "values reversed": permuted(range(LAST, -1, -1), vectors=False),
    "values rolled": lambda l, U: (l.roll(1), U),
    "unsorted, with their vectors": permuted(range(LAST, -1, -1), vectors=True),
    "the last two unsorted, with their vectors": permuted([*range(6), 7, 6], vectors=True),
    "somebody else's": lambda l, U: torch.linalg.eigh(matrices("spread 1e6", N, dtype=l.dtype)),
}


def corrupting(change, *, only=lambda A: A.ndim > 2):
    """`torch.linalg.eigh`, but the second matrix of a batch, or each, comes back wrong."""
    real = torch.linalg.eigh

    def eigh(A):
        l, U = real(A)
        if not only(A):
            return l, U
        l, U = l.clone(), U.clone()
        if A.ndim > 2:
            l[1], U[1] = change(l[1], U[1])
            return l, U
        return change(l, U)

    return eigh


def test_there_are_a_hundred_kinds():
    assert 2 * len(CORRUPTIONS) >= 100


@pytest.mark.parametrize("name", CORRUPTIONS)
@pytest.mark.parametrize("spectrum", ["spread 1e2", "rank-deficient"])
def test_every_corruption_is_found_retried_and_counted(monkeypatch, spectrum, name):
    A = matrices(spectrum, N, (3,))
    expected = matrix_sqrth(A)
    assert solver_failures()["eigh"] == 0
    monkeypatch.setattr(torch.linalg, "eigh", corrupting(CORRUPTIONS[name]))
    found = matrix_sqrth(A)
    assert solver_failures()["eigh"] == 1
    assert torch.equal(found[::2], expected[::2])
    assert torch.allclose(found[1], expected[1], atol=1e-6)


@pytest.mark.parametrize("name", ["column 0 is zero", "transposed", "values times nan", "unsorted, with their vectors"])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_what_is_always_wrong_goes_to_the_svd(monkeypatch, name, shape):
    A = matrices("spread 1e2", N, shape, torch.float64)
    monkeypatch.setattr(torch.linalg, "eigh", corrupting(CORRUPTIONS[name], only=lambda A: True))
    found = matrix_sqrth(A)
    monkeypatch.undo()
    assert relative_error(found, root(A, 0.5)) < 1e-12
    counts = solver_failures()
    assert counts["eigh"] == (2 if shape == () else 3)
    assert counts["svd"] == 0


def test_an_error_says_what_was_tried(monkeypatch):
    monkeypatch.setattr(torch.linalg, "eigh", corrupting(CORRUPTIONS["transposed"], only=lambda A: True))
    monkeypatch.setattr(torch.linalg, "svd", lambda A, **_: (A, A.diagonal(), A))
    with pytest.raises(SolverError, match=r"right result .*eigh in float64, eigh with a jitter, svd"):
        matrix_sqrth(matrices("spread 1e2", N))


def test_indefinite_matrices_by_the_svd():
    """Equal singular values of opposite sign: the singular vectors need not be eigenvectors."""
    A = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    assert torch.allclose(matrix_exph(A, solver="svd"), torch.linalg.matrix_exp(A))
    turn = rotation(6)
    A = (turn * torch.tensor([-2.0, -1.0, -1.0, 1.0, 1.0, 2.0])) @ turn.mT
    assert torch.allclose(matrix_exph(A, solver="svd"), torch.linalg.matrix_exp((A + A.mT) / 2))


SVD_CORRUPTIONS = {
    "a column of U": lambda U, s, Vh: (columns(c2=(1.0, 0))(s, U)[1], s, Vh),
    "a row of V": lambda U, s, Vh: (U, s, torch.cat([Vh[:1], Vh[:1], Vh[2:]])),
    "a value": lambda U, s, Vh: (U, s * torch.tensor([1.0, 0.5, 1.0, 1.0]), Vh),
    "NaN": lambda U, s, Vh: (U, s * NAN, Vh),
    "a negative value": lambda U, s, Vh: (U * torch.tensor([1, 1, 1, -1]), s * torch.tensor([1, 1, 1, -1]), Vh),
    "unsorted": lambda U, s, Vh: (U.flip(-1), s.flip(-1), Vh.flip(-2)),
    "a scaled V": lambda U, s, Vh: (U, s / 2, 2 * Vh),
    "zeros": lambda U, s, Vh: (U, s, 0 * Vh),
}


@pytest.mark.parametrize("name", SVD_CORRUPTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_wrong_singular_values_and_vectors(monkeypatch, name, dtype):
    A = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0), dtype=dtype)
    expected = nearest_orthogonal(A, solver="svd")
    real, calls = torch.linalg.svd, []

    def wrong(A, **options):
        parts = [part.clone() for part in real(A, **options)]
        calls.append(A.shape)
        if A.ndim > 2:
            for whole, new in zip(parts, SVD_CORRUPTIONS[name](*(part[1] for part in parts)), strict=True):
                whole[1] = new
        return parts

    monkeypatch.setattr(torch.linalg, "svd", wrong)
    assert torch.allclose(nearest_orthogonal(A, solver="svd"), expected)
    assert solver_failures()["svd"] == 1
    assert calls == [A.shape, A.shape[1:]]


def test_one_matrix_with_a_wrong_svd_is_transposed_then_left_to_the_gram_matrix(monkeypatch):
    A = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = nearest_rotation(A)
    real, calls = torch.linalg.svd, []

    def wrong(A, **options):
        U, s, Vh = real(A, **options)
        calls.append(0)
        return (U, s, 2 * Vh) if len(calls) <= times else (U, s, Vh)

    monkeypatch.setattr(torch.linalg, "svd", wrong)
    for times in (1, 2):
        calls.clear()
        solver_failures(reset=True)
        assert torch.allclose(nearest_rotation(A), expected)
        assert solver_failures()["svd"] == times


def healthy(n, dtype, batch, generator):
    """Matrices of every scale and rank."""
    real = torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32
    A = torch.randn(batch, n, n, generator=generator, dtype=torch.complex128 if dtype.is_complex else torch.float64)
    Q = torch.linalg.qr(A).Q
    l = torch.rand(batch, n, generator=generator, dtype=torch.float64)
    l = 10 ** (-16 * l * torch.rand(batch, 1, generator=generator))
    l = l * (torch.rand(batch, n, generator=generator) < 3 * torch.rand(batch, 1, generator=generator))
    l = l * torch.where(
        torch.rand(batch, 1, generator=generator) < 0.2, torch.randn(batch, n, generator=generator).sign(), 1.0
    )
    ties = torch.rand(batch, 1, generator=generator) < 0.2
    l = torch.where(ties, l[:, :1].round(), l)
    most = 290 if real == torch.float64 else 36
    scale = 10 ** (most * (2 * torch.rand(batch, 1, generator=generator, dtype=torch.float64) - 1))
    A = (Q * (l * scale).unsqueeze(-2)) @ Q.mH
    return (A / 2 + A.mH / 2).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.complex128], ids=str)
def test_no_false_alarm(dtype):
    generator = torch.Generator().manual_seed(0)
    for n, batch in ((1, 20), (2, 100), (3, 100), (8, 100), (27, 30), (64, 5), (130, 1)):
        for A in (healthy(n, dtype, batch, generator), healthy(n, dtype, 1, generator)):
            for method in ("eigh", "svd") if (torch.linalg.eigvalsh(A) >= 0).all() else ("eigh",):
                decompose(A, method)
            svd(A)
    assert set(solver_failures().values()) == {0}


def test_the_largest_and_the_smallest_numbers():
    for size in (1e307, 1e300, 1e-300, 1e-307, 5e-324):
        A = size * matrices("spread 1e2", 16, dtype=torch.float64)
        decompose((A + A.mT) / 2, "eigh")
        svd(A)
    decompose(torch.full((16, 16), 1e307, dtype=torch.float64), "eigh")
    assert set(solver_failures().values()) == {0}


@pytest.mark.parametrize("name", [name for name in SPECTRA if name not in ("identity", "zero")])
def test_one_by_one_and_together_agree(name):
    A = matrices(name, N, (3,), torch.float64)
    l, U = torch.linalg.eigh(A)
    U[1, :, 0] = 2 * U[1, :, 0]
    assert verified_eigen(A, l, U).wrong.tolist() == [False, True, False]
    assert [verified_eigen(A[i], l[i], U[i]).wrong is not None for i in range(3)] == [False, True, False]
    assert verified_eigen(A[::2], l[::2], U[::2]).wrong is None
    parts = torch.linalg.svd(A)
    assert verified_svd(A, *parts) is None


def test_nothing_to_check():
    assert verified_eigen(torch.ones(0, 3, 3), torch.ones(0, 3), torch.ones(0, 3, 3)).wrong is None
    assert verified_svd(torch.ones(2, 0, 3), torch.ones(2, 0, 0), torch.ones(2, 0), torch.ones(2, 0, 3)) is None


def test_the_random_state_is_the_user_s():
    before, python = torch.get_rng_state(), random.getstate()
    A = noise(37, 37, dtype=torch.float64)
    first = matrix_sqrth(A @ A.mT)
    assert torch.equal(before, torch.get_rng_state())
    assert python == random.getstate()
    assert torch.equal(first, matrix_sqrth(A @ A.mT))


def test_in_inference_mode_first():
    A = noise(41, 41, dtype=torch.float64)
    A = (A @ A.mT).requires_grad_()
    with torch.inference_mode():
        matrix_sqrth(A)
    matrix_sqrth(A).sum().backward()
    assert A.grad.isfinite().all()


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("shape", [(3, 3), (2, 3, 3)])
def test_input_that_is_not_finite_is_no_failure(bad, shape):
    A = torch.eye(3).expand(shape).clone()
    A[..., 0, 0] = bad
    for function in (matrix_sqrth, spectrum, nearest_orthogonal, nearest_rotation):
        with pytest.raises(NonFiniteError):
            function(A)
    assert set(solver_failures().values()) == {0}


def test_compiled_code_is_verified_too(monkeypatch):
    A = matrices("spread 1e2", N, (3,))
    expected = matrix_sqrth(A)
    compiled = torch.compile(matrix_sqrth, fullgraph=True, backend="aot_eager")
    compiled(A)
    monkeypatch.setattr(torch.linalg, "eigh", corrupting(CORRUPTIONS["noise 1e-06"]))
    assert torch.allclose(compiled(A), expected, atol=1e-6)
    assert solver_failures()["eigh"] == 1


def test_a_negative_eigenvalue_is_told_once():
    with pytest.warns(OrthocondWarning, match=r"negative eigenvalue, -1 times"):
        matrix_sqrth(-torch.eye(3))
    matrix_inv_sqrth(-torch.eye(3))  # warnings are errors here


def test_a_matrix_far_from_symmetric_is_told_once():
    A = torch.eye(3)
    A[0, 1] = 0.5
    with pytest.warns(OrthocondWarning, match=r"far from symmetric.* differ by 0.5 of"):
        matrix_sqrth(A)
    matrix_sqrth(A)
    with pytest.warns(OrthocondWarning, match="negative"):  # another reason
        matrix_sqrth(torch.stack([torch.eye(3), -torch.eye(3)]))


def test_compiled_code_warns_too():
    compiled = torch.compile(matrix_sqrth, fullgraph=True, backend="aot_eager")
    with pytest.warns(OrthocondWarning, match="far from symmetric"):
        compiled(torch.tensor([[2.0, 1.0], [0.0, 2.0]]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_rounding_is_not_told(dtype):
    X = noise(64, 20, dtype=torch.float32).to(dtype)
    A = (X.float() @ X.float().mT).to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        matrix_sqrth(A)
        matrix_sqrth(A * (1 + torch.finfo(dtype).eps * noise(64, 64)).to(dtype))
        matrix_exph(-torch.eye(3, dtype=dtype))  # where every sign is welcome
