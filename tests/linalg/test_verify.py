"""Wrong decompositions are found, retried and counted; right ones never are."""

import functools
import math
import random
import warnings
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from orthocond.errors import NonFiniteError, OrthocondWarning, SolverError
from orthocond.linalg import (
    _factor,
    _jacobi,
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

import corruption
from cases import SPECTRA, hostile, matrices, noise, rotation
from corruption import INF, NAN
from oracle import relative_error, root

N = 8


@pytest.fixture(autouse=True)
def fresh_counts():
    solver_failures(reset=True)
    yield
    solver_failures(reset=True)


class Case(NamedTuple):
    """A decomposition, and how to damage what the solver below it returns."""

    decomposed: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
    """The library's: from matrices to the parts."""
    place: tuple[object, str]
    """Where the solver is looked up, for `damaging` to take its place."""
    parts: Callable[[list[torch.Tensor]], list[torch.Tensor]]
    """Views of what it returns as the parts that `corruption.py` knows, the batch first."""
    product: Callable[..., torch.Tensor]
    """The matrices of which these are the parts."""
    counted: str
    kinds: dict
    harmless: dict
    size: tuple[int, int] = (N, N)
    batch: int = 3
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32, torch.complex128)
    alone: bool = True
    """Whether a single matrix is decomposed in this way, too."""


def of_eigenvalues(l, U):
    return (U * l.unsqueeze(-2).to(U)) @ U.mH


def of_singular_values(U, s, Vh):
    return (U * s.unsqueeze(-2).to(U)) @ Vh


CASES = {
    "eigh": Case(
        lambda A: decompose(A, "eigh"),
        (torch.linalg, "eigh"),
        lambda parts: list(parts),
        of_eigenvalues,
        "eigh",
        corruption.OF_EIGENVALUES,
        corruption.HARMLESS_TO_EIGENVALUES,
    ),
    "eigenvalues by the svd": Case(
        lambda A: decompose(A, "svd"),
        (torch.linalg, "svd"),
        lambda parts: [parts[1], parts[0]],
        of_eigenvalues,
        "svd",
        {name: kind for name, kind in corruption.kinds({"vectors": 1}, 0).items() if "unsorted" not in name},
        {},
    ),
    "svd": Case(
        svd,
        (torch.linalg, "svd"),
        lambda parts: [parts[0], parts[1], parts[2].mT],
        of_singular_values,
        "svd",
        corruption.OF_SINGULAR_VALUES,
        corruption.HARMLESS_TO_SINGULAR_VALUES,
        (4, 6),
    ),
    "rotations of 3x3 matrices": Case(
        _factor._signed_svd,
        (_jacobi, "_by_rotations"),
        lambda parts: [parts[0].permute(2, 1, 0), parts[1].T, parts[2].permute(2, 1, 0)],
        lambda U, p, V: of_singular_values(U, p, V.mT),
        "svd",
        corruption.OF_SINGULAR_VALUES,
        corruption.HARMLESS_TO_SINGULAR_VALUES,
        (3, 3),
        64,
        (torch.float64,),
        alone=False,
    ),
}


def damaging(real, parts, change, i):
    """Return a solver whose first result is wrong for the matrix ``i``; None is the only matrix."""
    calls = []

    def solver(A, **options):
        result = [part.clone() for part in real(A, **options)]
        calls.append(A)
        if len(calls) == 1:
            views = parts(result)
            own = views if i is None else [part[i] for part in views]
            neighbour = [part.flip(-1) for part in views] if i is None else [part[i - 1] for part in views]
            for part, new in zip(own, change([part.clone() for part in own], neighbour), strict=True):
                part.copy_(new)
        return result

    return solver


@functools.cache
def with_spectrum(size, batch, dtype, *, tie=False):
    """Matrices of this size, symmetric where it is square and larger than 3x3, none with its neighbour's values."""
    m, n = size
    values = torch.linspace(math.sqrt(2), 0.1, m, dtype=torch.float64)
    if tie:  # the first two, where they descend, and where they ascend
        values[-2] = values[-1] if m > 3 else values[0]
        values[1] = values[0]
    shape = (batch, n, n)
    draw = noise(*shape, dtype=torch.float64), noise(*shape, dtype=torch.float64, seed=2)
    if dtype.is_complex:
        draw = tuple(torch.complex(part, part.roll(1, -1) ** 2) for part in draw)
    U, V = (torch.linalg.qr(part).Q for part in draw)
    if m == n > 3:
        V = U
    else:
        U = torch.linalg.qr(draw[0][:, :m, :m]).Q
    scale = 1 + torch.arange(batch).view(-1, 1, 1) / batch
    return (scale * ((U * values) @ V[..., :m].mH)).to(dtype)


def checked(monkeypatch, case, change, dtype, i, *, is_found, tie=False):
    """Decompose with a solver that is wrong once, for one matrix of a batch or for a matrix alone."""
    A = with_spectrum(case.size, case.batch, dtype, tie=tie)
    A = A if i is not None else A[1]
    with monkeypatch.context() as patched:
        real = getattr(*case.place)
        patched.setattr(*case.place, damaging(real, case.parts, change, i))
        found = case.decomposed(A)
    assert solver_failures(reset=True)[case.counted] == is_found
    size = A.abs().max()
    assert (case.product(*found) - A).abs().max() < 100 * A.shape[-1] * torch.finfo(dtype).eps * size
    if i is not None:  # the others keep what they had
        others = torch.arange(len(A)) != i
        expected = case.decomposed(A)
        assert solver_failures(reset=True)[case.counted] == 0
        assert all(torch.equal(part[others], other[others]) for part, other in zip(found, expected, strict=True))


def test_there_are_a_hundred_kinds_of_damage_to_each():
    assert {name: len(case.kinds) for name, case in CASES.items() if len(case.kinds) < 100} == {}
    assert sum(len(case.kinds) for case in CASES.values()) > 800


KINDS = [(name, kind) for name, case in CASES.items() for kind in case.kinds]


@pytest.mark.parametrize(("name", "kind"), KINDS, ids=[f"{name}, {kind}" for name, kind in KINDS])
def test_every_kind_of_damage_is_found_retried_and_counted(monkeypatch, name, kind):
    case = CASES[name]
    is_fine = any(word in kind for word in corruption.FINE)
    for dtype in case.dtypes:
        if is_fine and dtype == torch.float32:
            continue
        places = (0, case.batch // 2, case.batch - 1) if dtype == torch.float64 else (case.batch - 1,)
        for i in (*places, *([None] if case.alone else [])):
            checked(monkeypatch, case, case.kinds[kind], dtype, i, is_found=True)


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name, case in CASES.items() for kind in case.harmless], ids=str
)
def test_what_is_no_damage_raises_no_alarm(monkeypatch, name, kind):
    case = CASES[name]
    for dtype in case.dtypes:
        for i in (0, case.batch - 1, *([None] if case.alone else [])):
            checked(monkeypatch, case, case.harmless[kind], dtype, i, is_found=False, tie=True)


@pytest.mark.parametrize("kind", corruption.OF_EIGENVALUES)
def test_the_root_of_one_small_matrix(monkeypatch, kind):
    """Which has a way of its own."""
    A = matrices("spread 1e2", N)
    expected = matrix_sqrth(A)
    case = CASES["eigh"]
    monkeypatch.setattr(torch.linalg, "eigh", damaging(torch.linalg.eigh, case.parts, case.kinds[kind], None))
    assert torch.allclose(matrix_sqrth(A), expected, atol=1e-6)
    assert solver_failures()["eigh"] == 1


def always_wrong(kind):
    """Return `torch.linalg.eigh` with this damage to each matrix, each time."""
    real, change = torch.linalg.eigh, CASES["eigh"].kinds[kind]

    def eigh(A):
        l, U = real(A.reshape(-1, *A.shape[-2:]))
        for i in range(len(l)):
            l[i], U[i] = change([l[i].clone(), U[i].clone()], None)
        return l.reshape(A.shape[:-1]), U.reshape(A.shape)

    return eigh


@pytest.mark.parametrize(
    "kind",
    ["vectors: the first column zeroed", "vectors: transposed", "values: all NaN", "unsorted, with their vectors"],
)
@pytest.mark.parametrize("shape", [(), (3,)])
def test_what_is_always_wrong_goes_to_the_svd(monkeypatch, kind, shape):
    A = matrices("spread 1e2", N, shape, torch.float64)
    monkeypatch.setattr(torch.linalg, "eigh", always_wrong(kind))
    found = matrix_sqrth(A)
    monkeypatch.undo()
    assert relative_error(found, root(A, 0.5)) < 1e-12
    counts = solver_failures()
    assert counts["eigh"] == (2 if shape == () else 9)
    assert counts["svd"] == 0


def test_an_error_says_what_was_tried(monkeypatch):
    monkeypatch.setattr(torch.linalg, "eigh", always_wrong("vectors: transposed"))
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_no_false_alarm_for_rotations(dtype):
    for seed in range(4):
        nearest_rotation(hostile(2000, 3, dtype, seed))
    # Ties, reflections, and low ranks, exactly.
    values = torch.cartesian_prod(*[torch.tensor([-1.0, 0.0, 1e-300, 0.5, 1.0], dtype=torch.float64)] * 3)
    Q = rotation(3, (len(values),)), rotation(3, (len(values),), seed=1)
    for A in (torch.diag_embed(values), (Q[0] * values.unsqueeze(-2)) @ Q[1].mT, values.unsqueeze(-2).expand(-1, 3, 3)):
        nearest_rotation(A.to(dtype))
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
    case = CASES["eigh"]
    change = case.kinds["vectors: all noisy, a little"]
    monkeypatch.setattr(torch.linalg, "eigh", damaging(torch.linalg.eigh, case.parts, change, 1))
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
