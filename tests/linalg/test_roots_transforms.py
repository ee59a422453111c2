"""The roots under vmap, torch.func, torch.compile and autocast."""

import functools

import pytest
import torch
from torch.autograd import forward_ad

from orthocond.errors import NonFiniteError
from orthocond.linalg import (
    POLAR_SOLVERS,
    SOLVERS,
    matrix_exph,
    matrix_inv_sqrth,
    matrix_logh,
    matrix_powerh,
    matrix_sqrth,
    matrix_sqrth_pair,
    nearest_orthogonal,
)

from cases import matrices, noise

ROOTS = (matrix_sqrth, matrix_inv_sqrth)
# Compiled, `products` has no branch to fall back on: test_products.py.
WITH_BRANCHES = [name for name in SOLVERS if name != "products"]


@pytest.mark.parametrize("solver", SOLVERS)
def test_vmap(solver):
    A = matrices("spread 1e2", 6, (4, 3))
    function = lambda A: matrix_sqrth_pair(A, solver=solver)
    for mapped, direct in zip(torch.vmap(function, in_dims=1, out_dims=1)(A), function(A), strict=True):
        assert torch.allclose(mapped, direct, atol=1e-6)


@pytest.mark.parametrize("solver", SOLVERS)
def test_per_sample_gradients(solver):
    A, G = matrices("spread 1e2", 6, (4,)), noise(4, 6, 6)
    loss = lambda A, G: (G * matrix_inv_sqrth(A, solver=solver)).sum()
    mapped = torch.vmap(torch.func.grad(loss))(A, G)
    leaf = A.clone().requires_grad_()
    loss(leaf, G).backward()
    assert torch.allclose(mapped, leaf.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("spectrum", ["repeated", "rank-deficient"])
def test_the_gradients_of_several_directions_at_once(spectrum):
    A = matrices(spectrum, 3, (2,), torch.float64).requires_grad_()
    value, G = matrix_sqrth(A), noise(4, 2, 3, 3, dtype=torch.float64)
    (together,) = torch.autograd.grad(value, A, G, is_grads_batched=True, retain_graph=True)
    alone = [torch.autograd.grad(value, A, each, retain_graph=True)[0] for each in G]
    assert torch.allclose(together, torch.stack(alone))


def test_jacobian_and_hessian_by_vmap():
    A = matrices("repeated", 3, (), torch.float64)
    jacobian = torch.func.jacrev(matrix_sqrth)(A)
    expected = torch.autograd.functional.jacobian(matrix_sqrth, A)
    assert torch.allclose(jacobian, expected)
    loss = lambda A: matrix_sqrth(A).pow(3).sum()
    hessian = torch.func.jacrev(torch.func.grad(loss))(A)
    assert torch.allclose(hessian, torch.autograd.functional.hessian(loss, A))


@pytest.mark.parametrize("solver", WITH_BRANCHES)
@pytest.mark.parametrize("rtol", [None, 1e-3])
def test_compile_without_a_graph_break(solver, rtol):
    if rtol and not SOLVERS[solver].has_eigenvalues:
        pytest.skip("this solver has no eigenvalues to drop")
    function = lambda A: 2 * matrix_inv_sqrth(A + 1, solver=solver, eps=1e-2 * (rtol is None), rtol=rtol) + 1
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    A, G = matrices("spread 1e2", 5, (2,)), noise(2, 5, 5)
    results = []
    for each in (function, compiled):
        leaf = A.clone().requires_grad_()
        value = each(leaf)
        results.append((value, torch.autograd.grad(value, leaf, G)[0]))
    for direct, traced in zip(*results, strict=True):
        assert torch.allclose(direct, traced, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("solver", [*SOLVERS, "eigh(clamp=true)", "eigh(wide=false)"])
def test_compile_of_the_pair_with_changing_eps(solver):
    """Each eps gets its own value, and from the second on all share one graph."""
    torch.compiler.reset()  # what other tests compiled of the same functions counts towards the limit
    num_graphs = []

    def counting(graph, example_inputs):
        num_graphs[-1] += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, example_inputs)

    compiled = torch.compile(
        lambda A, eps: torch.cat(matrix_sqrth_pair(A, solver=solver, eps=eps)), fullgraph=True, backend=counting
    )
    A = matrices("spread 1e2", 4)
    for eps in (0.1, 0.2, 0.3, 0.4, 0.5):
        num_graphs.append(0)
        leaf, copy = A.clone().requires_grad_(), A.clone().requires_grad_()
        compiled(leaf, eps).sum().backward()
        torch.cat(matrix_sqrth_pair(copy, solver=solver, eps=eps)).sum().backward()
        assert torch.allclose(leaf.grad, copy.grad, rtol=1e-4)
    if torch.__version__ >= (2, 9) or not solver.startswith(("eigh", "svd")):  # 2.8 compiles these anew for each number
        assert num_graphs[2:] == [0, 0, 0]


@pytest.mark.parametrize("solver", ["newton_schulz(iterations=5)", "eigh(clamp=true)"])
def test_compile_with_dynamic_sizes_and_an_option(solver):
    function = lambda A: matrix_inv_sqrth(A, solver=solver, eps=0.1)
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="eager")
    for n in (4, 5):
        A = matrices("spread 1e2", n, (2,))
        assert torch.allclose(compiled(A), function(A), atol=1e-4)


@pytest.mark.parametrize("solver", WITH_BRANCHES)
def test_compiled_code_meets_non_finite_input_too(solver):
    compiled = torch.compile(lambda A: matrix_sqrth(A, solver=solver), fullgraph=True, backend="aot_eager")
    with pytest.raises(NonFiniteError):
        compiled(torch.full((3, 3), float("nan")))


@pytest.mark.parametrize("solver", POLAR_SOLVERS)
def test_compile_and_vmap_of_the_polar_factor(solver):
    A = noise(3, 4, 6)
    function = lambda A: nearest_orthogonal(A, solver=solver)
    compiled = torch.compile(lambda A: function(A) + 1, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(A), function(A) + 1, atol=1e-6)
    assert torch.allclose(torch.vmap(function)(A), function(A), atol=1e-6)


@pytest.mark.parametrize("solver", SOLVERS)
def test_autocast_does_not_lower_the_precision(solver):
    A, G = matrices("spread 1e2", 16, (2,)), noise(2, 16, 16)
    results = []
    for enabled in (False, True):
        leaf = A.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            value = matrix_sqrth(leaf, solver=solver)
            value.backward(G)
        assert value.dtype == torch.float32
        results.append((value, leaf.grad))
    for plain, cast in zip(*results, strict=True):
        assert torch.equal(plain, cast)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.trace.* deprecated")
@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
@pytest.mark.parametrize("n", [3, 4])
@pytest.mark.parametrize("function", [*ROOTS, functools.partial(matrix_sqrth, solver="products"), nearest_orthogonal])
def test_a_trace_may_hold_several_decompositions_of_a_size(function, n, batch):
    twice = lambda A: function(A) + function(A @ A)
    traced = torch.jit.trace(twice, (matrices("spread 1e2", n, batch),), check_trace=False)
    A = matrices("repeated", n, batch)
    assert torch.allclose(traced(A), twice(A), rtol=1e-3, atol=1e-3)


def test_meta_tensors_have_shapes():
    assert matrix_sqrth(torch.empty(3, 4, 4, device="meta")).shape == (3, 4, 4)
    assert nearest_orthogonal(torch.empty(3, 4, 5, device="meta")).shape == (3, 4, 5)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # by forward mode itself, the first time
@pytest.mark.parametrize("solver", SOLVERS)
def test_forward_mode_without_gradients(solver):
    with torch.no_grad(), forward_ad.dual_level():
        A = forward_ad.make_dual(torch.eye(3), torch.ones(3, 3))
        tangent = forward_ad.unpack_dual(matrix_sqrth(A, solver=solver)).tangent
    assert torch.allclose(tangent, torch.full((3, 3), 0.5), atol=1e-2)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("function", [*ROOTS, matrix_logh, matrix_exph])
def test_forward_over_reverse_and_reverse_over_forward_agree(function):
    A = matrices("repeated", 3, (), torch.float64)
    loss = lambda A: function(A).pow(3).sum()
    twice = torch.func.jacrev(torch.func.jacrev(loss))(A)
    assert torch.allclose(torch.func.hessian(loss)(A), twice)
    assert torch.allclose(torch.func.jacrev(torch.func.jacfwd(loss))(A), twice)
    assert torch.allclose(torch.func.jacfwd(torch.func.jacfwd(loss))(A), twice)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_the_derivative_and_its_adjoint_agree_on_a_thousand_problems():
    """<H, D f(A)[G]> = <D f(A)^*[H], G>, by forward and by reverse mode."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(250):
        n, power = int(torch.randint(1, 7, (), generator=generator)), 4 * float(torch.rand((), generator=generator)) - 2
        X, G, H = torch.randn(3, n, n, generator=generator, dtype=torch.float64)
        A = X @ X.mT if n % 2 else X[:, :1] @ X[:, :1].mT  # the even ones have rank 1
        for function in (*ROOTS, matrix_logh, functools.partial(matrix_powerh, exponent=power)):
            _, tangent = torch.func.jvp(function, (A,), (G,))
            leaf = A.clone().requires_grad_()
            (cotangent,) = torch.autograd.grad(function(leaf), leaf, H)
            size = (H.norm() * tangent.norm() + G.norm() * cotangent.norm()).item()
            assert abs(float((H * tangent).sum() - (cotangent * G).sum())) <= 1e-12 * size


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("solver", SOLVERS)
def test_compiled_forward_mode_drops_nothing(solver):
    """It leaves the graph where it may, else it raises; torch's own loses a custom jvp (issue 192985)."""
    torch._dynamo.reset()
    A = matrices("repeated", 3, (), torch.float64)
    A, G = A + A.trace() * torch.eye(3), noise(3, 3, dtype=torch.float64)  # within what every solver is made for
    function = lambda A: matrix_inv_sqrth(A, solver=solver)
    tangent = lambda A, G: torch.func.jvp(function, (A,), (G,))[1]
    assert torch.allclose(torch.compile(tangent, backend="aot_eager")(A, G), tangent(A, G))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Observed exception"):
        torch.compile(tangent, backend="aot_eager", fullgraph=True)(A, G)
    compiled = torch.compile(function, backend="aot_eager")
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(compiled(forward_ad.make_dual(A, G))).tangent
    assert torch.allclose(found, tangent(A, G))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_forward_mode_can_be_nested():
    """PyTorch would drop terms by itself: it turns forward mode off within a custom jvp."""
    A = matrices("repeated", 2, (), torch.float64)
    loss = lambda A: matrix_inv_sqrth(A).pow(3).sum()
    jacfwd, jacrev = torch.func.jacfwd, torch.func.jacrev
    third = jacrev(jacrev(jacrev(loss)))(A)
    assert torch.allclose(jacfwd(jacfwd(jacfwd(loss)))(A), third)
    assert torch.allclose(jacfwd(jacfwd(jacrev(loss)))(A), third)
