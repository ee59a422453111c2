"""The contract of every spectral function, found through the registry; values and gradients against 50 digits."""

import math

import mpmath
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from orthocond.errors import ArgumentError, GradientError
from orthocond.linalg import (
    FUNCTIONS,
    GRADIENTS,
    SOLVERS,
    matrix_exph,
    matrix_functionh,
    matrix_inv_sqrth,
    matrix_logh,
    matrix_powerh,
    matrix_sqrth,
)
from orthocond.linalg._roots import spectral

from cases import matrices, noise, rotation
from oracle import SCALARS, SCHUR, exact_function, relative_error, schur_function, schur_function_of_samples

# By forward mode itself, the first time.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

EIGEN = [name for name, solver in SOLVERS.items() if solver.has_eigenvalues]
CHOICES = [name for name, entry in FUNCTIONS.items() if not entry.options]
CHOICES += [f"power(exponent={p})" for p in (-2, -0.25, 0.3, 1, 2.5)]
POINTS = {
    "random": matrices("spread 1e2", 3, (), torch.float64),
    "ties": matrices("repeated", 4, (), torch.float64),
    "near ties": matrices("clustered", 3, (), torch.float64),
    "identity": torch.eye(2, dtype=torch.float64).expand(2, 2, 2),
}


@pytest.mark.parametrize("exponent", [None, -0.9, -0.25, 0.3, 1.0])
def test_divided_differences_over_the_range_of_float64(exponent):
    entry, options = (FUNCTIONS["log"], ()) if exponent is None else (FUNCTIONS["power"], (exponent,))
    scalar = mpmath.log if exponent is None else lambda x: mpmath.power(x, exponent)
    l = torch.tensor([1e-140, 1e-100, 1.0, 1.0 + 2e-16, 3.0, 1e100, 1e308], dtype=torch.float64)
    F = entry.first(l, *options)
    assert torch.equal(F, F.mT)
    with mpmath.workdps(50):
        x = [mpmath.mpf(value) for value in l.tolist()]
        for i in range(len(x)):
            for j in range(i):
                expected = (scalar(x[i]) - scalar(x[j])) / (x[i] - x[j])
                assert abs(F[i, j].item() - expected) <= 1e-12 * abs(expected) + 1e-300  # below that, digits are lost


def by_name(choice, **options):
    """The function of a name, as layers call it."""
    return lambda A: spectral("test", A, (choice,), **options)[0][0]


def tanh(A, **options):
    return matrix_functionh(A, torch.tanh, lambda x: 1 - torch.tanh(x) ** 2, **options)


def scalar_of(choice):
    name, _, rest = choice.partition("(exponent=")
    if not rest:
        return SCALARS[name]
    exponent = mpmath.mpf(float(rest[:-1]))
    return lambda x: SCALARS[name](x, exponent)


def schur_of(choice):
    name, _, rest = choice.partition("(exponent=")
    return (lambda M: SCHUR[name](M, float(rest[:-1]))) if rest else SCHUR[name]


def symmetrised(function):
    return lambda X: function((X + X.mH) / 2)


def gradient_of(function, A, G):
    A = A.clone().requires_grad_()
    return torch.autograd.grad(function(A), A, G)[0]


def with_gap(n, gap, cond, dtype=torch.float64):
    """A matrix of a condition number, whose two largest and two smallest eigenvalues are ``gap`` apart, relatively.

    Turned, a float32 matrix can't hold eigenvalues that are small against others: there only the pairs are turned.
    """
    l = 2 * torch.logspace(0, -math.log10(cond), n, dtype=torch.float64)
    if n > 2 or cond == 1:
        l[1] = l[0] * (1 - gap)
    if n > 3:
        l[-2] = l[-1] * (1 + gap)
    U = torch.eye(n, dtype=torch.float64)
    blocks = [slice(n)] if dtype == torch.float64 or cond <= 1e4 else [slice(min(2, n - 1)), slice(max(2, n - 2), n)]
    for block in blocks:
        U[block, block] = rotation(len(U[block]), seed=n)
    A = ((U * l) @ U.mT).to(dtype)
    return (A + A.mT) / 2


def unavoidable(A, G, scalar, truth):
    """The error that rounding the entries of A would cause: no method that sees rounded numbers can do better."""
    E = noise(*A.shape, dtype=torch.float64, seed=5)
    E = (E + E.mT) / 2 * torch.finfo(torch.float64).eps * torch.linalg.matrix_norm(A.double(), 2)
    moved = exact_function(A.double() + E, G, scalar)
    return [relative_error(there, here) for there, here in zip(moved, truth, strict=True)]


GAPS = [0.0, *(10.0**-k for k in range(16, 0, -1))]
CONDITIONS = [10.0**k for k in range(0, 13, 2)]
# Every gap with two or three condition numbers, every one of these with all gaps, sizes 2 to 12 in turn. The whole grid
# is measured by `orthocond bench functions`.
GRID = [
    (2 + (5 * i + 3 * j) % 11, gap, cond)
    for i, gap in enumerate(GAPS)
    for j, cond in enumerate(CONDITIONS)
    if (i + j) % 3 == 0
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("n", "gap", "cond"), GRID)
def test_value_and_gradient_have_the_digits_that_the_input_allows(n, gap, cond, dtype):
    A, G = with_gap(n, gap, cond, dtype), noise(n, n, dtype=dtype)
    G = (G + G.mT) / 2
    wanted = (2e-6, 1e-5) if dtype == torch.float32 else (1e-12, 1e-10)
    for choice in ("sqrt", "inv_sqrt", "log", "exp", "power(exponent=-0.25)", "tanh"):
        function = tanh if choice == "tanh" else by_name(choice, rtol=0.0)
        found = function(A), gradient_of(function, A, G)
        truth = exact_function(A, G, scalar_of(choice))
        errors = [relative_error(each, exact) for each, exact in zip(found, truth, strict=True)]
        if all(error < tolerance for error, tolerance in zip(errors, wanted, strict=True)):
            continue
        limits = unavoidable(A, G, scalar_of(choice), truth)
        for error, tolerance, limit in zip(errors, wanted, limits, strict=True):
            assert error < max(tolerance, 100 * limit), choice


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [32, 64, 128])
@pytest.mark.parametrize("choice", [*CHOICES, "tanh"])
def test_large_matrices_agree_with_scipy_without_eigenvectors(choice, n, dtype):
    function = tanh if choice == "tanh" else by_name(choice, rtol=0.0)
    wanted = (2e-6, 1e-5) if dtype == torch.float32 else (1e-12, 1e-10)
    G = noise(n, n, dtype=dtype)
    for spectrum in ("spread 1e2", "repeated", "clustered", "identity"):
        A = 2 * matrices(spectrum, n, (), dtype)  # log would be about 0 at the identity, known to few digits
        truth = schur_function(A, G, schur_of(choice))
        assert relative_error(function(A), truth[0]) < wanted[0], spectrum
        assert relative_error(gradient_of(function, A, G), truth[1]) < wanted[1], spectrum


@pytest.mark.parametrize("n", [32, 128])
@pytest.mark.parametrize("choice", [*CHOICES, "tanh"])
def test_large_matrices_of_low_rank_agree_with_scipy(choice, n):
    """With equal eigenvalues besides; the default rtol drops the null space, and f(0) is 0 there, or 1 for exp."""
    function = tanh if choice == "tanh" else by_name(choice)
    l = matrices("repeated", n // 3, (), torch.float64)  # as X^T X
    X = rotation(n)[:, : n // 3] @ torch.linalg.cholesky(l).mT
    G = noise(n, n, dtype=torch.float64)
    truth = schur_function_of_samples(X, G, schur_of(choice), at_zero=float(choice == "exp"))
    assert relative_error(function(X @ X.mT), truth[0]) < 1e-12
    assert relative_error(gradient_of(lambda X: function(X @ X.mT), X, G), truth[1]) < 1e-10


def test_the_float64_oracle_is_the_one_with_50_digits():
    A, G = matrices("repeated", 6, (), torch.float64), noise(6, 6, dtype=torch.float64)
    for choice in (*CHOICES, "tanh"):
        pairs = zip(schur_function(A, G, schur_of(choice)), exact_function(A, G, scalar_of(choice)), strict=True)
        for found, exact in pairs:
            assert relative_error(found, exact) < 1e-12, choice


@pytest.mark.parametrize("choice", [*CHOICES, "tanh"])
@pytest.mark.parametrize("point", POINTS)
def test_derivatives_of_both_orders_and_modes(point, choice):
    function = symmetrised(tanh if choice == "tanh" else by_name(choice))
    A = POINTS[point].clone().requires_grad_()
    assert gradcheck(function, A, check_forward_ad=True, check_batched_forward_grad=True, check_batched_grad=True)
    assert gradgradcheck(function, A, check_fwd_over_rev=True)


@pytest.mark.parametrize("choice", [*CHOICES, "tanh"])
def test_second_derivatives_are_the_same_in_either_order_of_modes(choice):
    """Forward over reverse, reverse over forward, and the same mode twice, along one direction."""
    function = tanh if choice == "tanh" else by_name(choice)
    low_rank = noise(4, 2, dtype=torch.float64)
    points = [*(point.clone() for point in POINTS.values()), *([] if choice == "exp" else [low_rank @ low_rank.mT])]
    for A in points:
        G, H = (noise(*A.shape, dtype=torch.float64, seed=seed) for seed in (2, 3))
        G, H = G + G.mT, H + H.mT
        value = lambda A, G=G: (function(A) * G).sum()
        along = lambda A, H=H, value=value: torch.func.jvp(value, (A,), (H,))[1]
        orders = {
            "forward over reverse": torch.func.jvp(torch.func.grad(value), (A,), (H,))[1],
            "reverse over forward": torch.func.grad(along)(A),
            "reverse over reverse": torch.func.grad(lambda A, value=value: (torch.func.grad(value)(A) * H).sum())(A),
        }
        twice = torch.func.jvp(along, (A,), (H,))[1]
        expected = orders.pop("forward over reverse")
        for name, found in orders.items():
            assert relative_error(found, expected) < 1e-11, name
        assert float(twice) == pytest.approx(float((expected * H).sum()), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("choice", [*CHOICES, "tanh"])
def test_forward_and_reverse_mode_are_adjoint_on_a_thousand_problems(choice):
    """``<G, J H> = <J^T G, H>``, for spectra and sizes of all kinds; each of 20 batches has 50 problems."""
    function = tanh if choice == "tanh" else by_name(choice)
    for number in range(20):
        n, spectrum = 2 + number % 6, ("spread 1e2", "repeated", "clustered", "rank-deficient", "identity")[number % 5]
        if (choice, spectrum) == ("exp", "rank-deficient"):
            spectrum = "spread 1e2"
        A = matrices(spectrum, n, (50,), torch.float64) * torch.linspace(0.1, 3, 50).double()[:, None, None]
        G, H = (noise(50, n, n, dtype=torch.float64, seed=2 * number + k) for k in range(2))
        forward = torch.func.jvp(function, (A,), (H,))[1]
        backward = gradient_of(function, A, G)
        one, other = (G * forward).sum((-2, -1)), (backward * H).sum((-2, -1))
        size = backward.flatten(-2).norm(dim=-1) * H.flatten(-2).norm(dim=-1)
        assert ((one - other).abs() <= 1e-11 * size).all()


@pytest.mark.parametrize("choice", [choice for choice in CHOICES if choice != "exp"])
def test_derivatives_between_kept_and_dropped(choice):
    l = torch.tensor([1.0, 1.0, 1e-2, 1e-2], dtype=torch.float64)  # ties on both sides of the cut
    U = rotation(4)
    A = ((U * l) @ U.mT).requires_grad_()
    function = symmetrised(by_name(choice, rtol=0.1))
    assert gradcheck(function, A, check_forward_ad=True)
    assert gradgradcheck(function, A, check_fwd_over_rev=True)


@pytest.mark.parametrize("choice", [choice for choice in CHOICES if choice != "exp"])
def test_rank_loss_is_no_loss_of_gradients(choice):
    X = noise(5, 2, dtype=torch.float64).requires_grad_()
    function = lambda X: by_name(choice)(X @ X.mT)
    assert not function(X.detach() * 0).any()
    assert gradcheck(function, X, check_forward_ad=True)
    assert gradgradcheck(function, X)


@pytest.mark.parametrize("choice", CHOICES)
def test_second_differences_are_exact_at_every_distance(choice):
    """The second derivative along one direction, at gaps around the switch from quotients to the series."""
    for gap in (0.0, 1e-12, 1e-6, 1e-3, 0.05, 0.099, 0.101, 0.3, 0.9):
        A = torch.diag(torch.tensor([1.0, 1.0 - gap, 1.0 - gap / 3], dtype=torch.float64)).requires_grad_()
        G = noise(3, 3, dtype=torch.float64)
        G = (G + G.mT) / 2
        (first,) = torch.autograd.grad((by_name(choice)(A) * G).sum(), A, create_graph=True)
        (second,) = torch.autograd.grad((first * G).sum(), A)
        step = mpmath.mpf("1e-20")
        with mpmath.workdps(60):
            moved = [
                exact_quadratic(A.detach(), G, scalar_of(choice), sign * step) for sign in (1, 0, -1)
            ]  # <G, f(A + s G)>
            expected = (moved[0] - 2 * moved[1] + moved[2]) / step**2
        assert float((second * G).sum()) == pytest.approx(float(expected), rel=1e-11, abs=1e-12)


def exact_quadratic(A, G, scalar, step):
    A, G = mpmath.matrix(A.tolist()), mpmath.matrix(G.tolist())
    l, U = mpmath.eigsy(A + step * G)
    value = U * mpmath.diag([scalar(x) for x in l]) * U.T
    return sum(value[i, j] * G[i, j] for i in range(A.rows) for j in range(A.cols))


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("solver", EIGEN)
def test_each_matrix_is_independent_of_its_batch_and_of_the_basis(solver, choice):
    function = by_name(choice, solver=solver)
    A, G = matrices("spread 1e2", 6, (5,), torch.float64), noise(5, 6, 6, dtype=torch.float64)
    A[2] *= 40
    assert relative_error(function(A), torch.stack([function(each) for each in A])) < 1e-11
    alone = torch.stack([gradient_of(function, a, g) for a, g in zip(A, G, strict=True)])
    assert relative_error(gradient_of(function, A, G), alone) < 1e-9
    R = rotation(6, seed=7)
    assert relative_error(function(R @ A @ R.mT), R @ function(A) @ R.mT) < 1e-9


@pytest.mark.parametrize("choice", CHOICES)
def test_shapes_dtypes_and_input(choice):
    function = by_name(choice, eps=1e-2)
    for shape in [(0, 4, 4), (2, 0, 0), (3, 1, 1)]:
        A = torch.ones(shape, requires_grad=True)
        function(A).sum().backward()
        assert A.grad.shape == shape
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        A = matrices("spread 1e2", 4, (2,), dtype)
        before = A.clone()
        assert function(A).dtype == dtype
        assert torch.equal(A, before)


@pytest.mark.parametrize("choice", ["log", "exp", "power(exponent=0.3)", "tanh"])
def test_vmap_and_compile(choice):
    function = tanh if choice == "tanh" else by_name(choice)
    A = matrices("spread 1e2", 4, (3,), torch.float64)
    assert torch.allclose(torch.vmap(function)(A), function(A))
    torch._dynamo.reset()
    compiled = torch.compile(lambda A: 2 * function(A + 0), fullgraph=True, backend="aot_eager")
    assert torch.allclose(gradient_of(compiled, A, A), 2 * gradient_of(function, A, A))


@pytest.mark.parametrize("rule", GRADIENTS)
def test_the_gradient_rules_apply_to_every_function_of_positive_matrices(rule):
    A, G = matrices("spread 1e12", 4, (), torch.float64), noise(4, 4, dtype=torch.float64)
    choice = "clip(bound=1e12)" if rule == "clip" else rule
    for function in (matrix_logh, lambda A, **options: matrix_powerh(A, 0.3, **options)):
        exact = gradient_of(function, A, G)
        assert relative_error(gradient_of(lambda A: function(A, gradient=choice), A, G), exact) < 1e-4


def test_the_functions_are_what_they_are_called():
    A = matrices("spread 1e2", 6, (2,), torch.float64)
    assert torch.allclose(matrix_powerh(A, 3), A @ A @ A)
    assert torch.allclose(matrix_powerh(A, -1), torch.linalg.inv(A))
    assert torch.allclose(matrix_powerh(A, 0), torch.eye(6).double().expand_as(A))
    assert torch.equal(matrix_powerh(A, 0.5), matrix_sqrth(A))
    assert torch.equal(matrix_powerh(A, -0.5, solver="newton_schulz"), matrix_inv_sqrth(A, solver="newton_schulz"))
    assert torch.allclose(matrix_exph(-A), torch.linalg.matrix_exp(-A))
    assert torch.allclose(matrix_exph(matrix_logh(A)), A)
    assert torch.allclose(matrix_exph(A, eps=1.0), torch.e * matrix_exph(A))
    sine, cosine = matrix_functionh(A, torch.sin, torch.cos), matrix_functionh(A, torch.cos, lambda x: -torch.sin(x))
    assert torch.allclose(sine @ sine + cosine @ cosine, torch.eye(6).double().expand_as(A))


def test_what_a_float64_can_not_hold_is_a_large_number():
    A = torch.diag(torch.tensor([1000.0, 900.0, -900.0], dtype=torch.float64)).requires_grad_()
    value = matrix_exph(A)
    value.sum().backward()
    assert value.isfinite().all()
    assert A.grad.isfinite().all()
    tiny = (1e-200 * torch.eye(2, dtype=torch.float64)).requires_grad_()
    matrix_powerh(tiny, -3, rtol=0.0).sum().backward()
    assert tiny.grad.isfinite().all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda A: matrix_powerh(A, float("nan")), "finite number as exponent"),
        (lambda A: matrix_powerh(A, torch.tensor(0.3)), "matrix_exph"),
        (lambda A: matrix_powerh(A, 0.3, solver="newton_schulz"), "use solver='eigh'"),
        (lambda A: matrix_logh(A, solver="pade"), "use solver='eigh'"),
        (lambda A: matrix_exph(A, rtol=0.1), "no null space to drop"),
        (lambda A: matrix_exph(A, gradient="taylor"), "leave gradient='exact'"),
        (lambda A: matrix_functionh(A, 3, torch.cos), "function to be callable"),
        (lambda A: matrix_functionh(A, torch.sin, lambda x: x.sum()), "element by element"),
        (lambda A: matrix_functionh(A - A, torch.log, torch.reciprocal), "finite value at the eigenvalue 0"),
        (lambda A: by_name("power(exponent=inf)")(A), "takes a number, e.g. exponent=0.5"),
        (lambda A: by_name("cube")(A), "unknown function 'cube'; choose one of sqrt"),
    ],
)
def test_a_mistake_is_named_with_its_remedy(call, message):
    with pytest.raises(ArgumentError, match=message):
        call(torch.eye(3))


def test_a_derivative_that_autograd_can_not_differentiate_says_so():
    A = matrices("spread 1e2", 3, (), torch.float64).requires_grad_()
    value = matrix_functionh(A, torch.tanh, lambda x: (1 - torch.tanh(x) ** 2).detach())
    (grad,) = torch.autograd.grad(value.sum(), A, create_graph=True)
    with pytest.raises(GradientError, match="write `derivative` with torch operations"):
        grad.sum().backward()
    straight = matrix_functionh(A, lambda x: 3 * x + 1, lambda x: torch.full_like(x, 3.0))
    (grad,) = torch.autograd.grad(straight.sum(), A, create_graph=True)
    assert torch.allclose(grad, torch.full((3, 3), 3.0, dtype=torch.float64))
    assert not torch.autograd.grad(grad.sum(), A)[0].any()
