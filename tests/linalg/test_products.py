"""The solver of products alone: right inside its bounds, decomposed outside, and never wrong."""

import threading

import fuzz_products
import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from orthocond import treat
from orthocond.errors import ArgumentError, NonFiniteError, OrthocondWarning
from orthocond.linalg import _half as half
from orthocond.linalg import _products as products
from orthocond.linalg import matrix_inv_sqrth, matrix_sqrth, matrix_sqrth_pair, solver_failures, solver_fallbacks
from orthocond.linalg._gap import condition_on_support
from orthocond.nn import DecorrelatedBatchNorm2d

from cases import noise, rotation
from oracle import relative_error

KEPT, DROPPED = 0.0625, 2e-4


def covariances(eigenvalues, seed=0):
    n = eigenvalues.shape[-1]
    U = rotation(n, tuple(eigenvalues.shape[:-1]), seed)
    A = (U * eigenvalues.unsqueeze(-2)) @ U.mT
    return ((A + A.mT) / 2).float()


def inside(count, n, generator):
    """Eigenvalues within the bounds, of every rank, and of every size."""
    uniform = torch.rand(count, n, generator=generator, dtype=torch.float64)
    rank = torch.randint(1, n + 1, (count, 1), generator=generator)
    l = torch.where(torch.arange(n) < rank, KEPT**uniform, DROPPED * uniform / n**0.125)
    l[:, 0] = 1
    return l * 10 ** (20 * torch.rand(count, 1, generator=generator, dtype=torch.float64) - 10)


def compare(A, G, H, solver="products"):
    """The errors of the pair and of its gradient against a decomposition in float64 that drops the same."""
    found, truth = A.clone().requires_grad_(), A.double().requires_grad_()
    pair, exact = matrix_sqrth_pair(found, solver=solver), matrix_sqrth_pair(truth, rtol=DROPPED)
    size = torch.linalg.matrix_norm(truth.detach(), keepdim=True).sqrt()
    (slope,) = torch.autograd.grad(pair, found, [G / size.float(), H * size.float()])
    (exact_slope,) = torch.autograd.grad(exact, truth, [G / size, H * size])
    values = max(relative_error(each, true.detach()) for each, true in zip(pair, exact, strict=True))
    return values, relative_error(slope, exact_slope)


def test_a_thousand_covariances_inside_the_bounds():
    """The long run is ``python tests/linalg/fuzz_products.py --matrices 10000``."""
    found = fuzz_products.fuzz(1000, seed=0, kinds=("inside",))
    assert (found["matrices"], found["wrong"], found["decomposed"]) == (1000, 0, 0)


@pytest.mark.parametrize("kind", fuzz_products.OUTSIDE)
def test_outside_the_bounds_it_is_decomposed_or_right(kind):
    failures = solver_failures()
    found = fuzz_products.fuzz(200, seed=0, kinds=(kind,))
    assert (found["matrices"], found["wrong"]) == (200, 0)
    assert solver_failures() == failures
    if kind in ("gap", "negative"):
        assert found["decomposed"] > 190


def test_the_fuzzer_sees_an_error(monkeypatch, capsys):
    right = products.certified_roots

    def wrong(*arguments):
        found = right(*arguments)
        return found._replace(S=found.S * (1 + 1e-4))

    monkeypatch.setattr(products, "certified_roots", wrong)
    assert fuzz_products.fuzz(100, seed=0, kinds=("inside",))["wrong"] == 100
    assert "wrong: inside" in capsys.readouterr().err


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_half_products_are_as_accurate_as_those_of_float32(precision, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    types = set()
    original = half._half_product
    monkeypatch.setattr(half, "_half_product", lambda A, B: types.add((A.dtype, B.dtype)) or original(A, B))
    solver_fallbacks(reset=True)
    for number, n in enumerate((1, 3, 16, 64)):
        A = covariances(inside(60, n, generator), seed=number)
        values, slopes = compare(A, noise(60, n, n), noise(60, n, n, seed=2), f"products(precision={precision})")
        assert values < 1e-5
        assert slopes < 1e-4
    assert solver_fallbacks() == {"products": 0}
    assert types == {(getattr(torch, precision),) * 2}
    A = A.double()  # has no terms of half types, and needs none
    exact = matrix_sqrth(A, rtol=DROPPED)
    assert relative_error(matrix_sqrth(A, solver=f"products(precision={precision})"), exact) < 1e-12


def test_plain_half_products_get_no_certificate(monkeypatch):
    for name, (dtype, _, bits) in half.PRECISIONS.items():
        if name != "float32":
            monkeypatch.setitem(half.PRECISIONS, name, (dtype, 1, bits))
    A = covariances(inside(60, 16, torch.Generator().manual_seed(0)))
    for precision in ("float16", "bfloat16"):
        solver_fallbacks(reset=True)
        matrix_sqrth(A, solver=f"products(precision={precision})")
        assert solver_fallbacks() == {"products": 60}


def test_each_matrix_decides_for_itself():
    good, bad = torch.diag(torch.tensor([1.0, 0.5, 0.0])), torch.diag(torch.tensor([1.0, 0.01, 0.0]))
    solver_fallbacks(reset=True)
    A = torch.stack([good, bad, good]).requires_grad_()
    S = matrix_inv_sqrth(A, solver="products")
    assert solver_fallbacks() == {"products": 1}
    (slope,) = torch.autograd.grad(S, A, noise(3, 3, 3))
    for k in range(3):
        alone = A.detach()[k].requires_grad_()
        root = matrix_inv_sqrth(alone, solver="products")
        (alone_slope,) = torch.autograd.grad(root, alone, noise(3, 3, 3)[k])
        assert torch.allclose(root, S[k], atol=1e-6)
        assert torch.allclose(alone_slope, slope[k], rtol=1e-4, atol=1e-4)


def test_nothing_is_decomposed_where_it_is_certified(monkeypatch):
    monkeypatch.setattr(products, "eigen_functions", None)
    A = covariances(inside(3, 8, torch.Generator().manual_seed(0))).requires_grad_()
    matrix_inv_sqrth(A, solver="products").sum().backward()
    monkeypatch.setattr(torch.linalg, "eigh", None)
    condition_on_support(A.detach(), matrix_inv_sqrth(A, solver="products").detach())


def test_memory_does_not_grow_with_the_steps():
    A = covariances(inside(2, 8, torch.Generator().manual_seed(0))).requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        matrix_inv_sqrth(A, solver="products")
    assert sum(saved) <= 6 * A.numel()


def test_eps_zero_matrices_noise_and_errors():
    A = torch.diag(torch.tensor([1.0, 0.3, 0.0]))
    assert torch.allclose(matrix_inv_sqrth(A, solver="products", eps=0.2), matrix_inv_sqrth(A, eps=0.2), atol=1e-5)
    assert matrix_sqrth(torch.zeros(3, 3), solver="products").abs().max() == 0
    assert matrix_inv_sqrth(torch.zeros(2, 3, 3), solver="products").abs().max() == 0
    with pytest.raises(NonFiniteError):
        matrix_sqrth(torch.full((2, 2), torch.nan), solver="products")
    with pytest.raises(ArgumentError, match="0 < dropped < kept < 1"):
        matrix_sqrth(A, solver="products(kept=1e-5)")
    with pytest.raises(ArgumentError, match="float32, float16, bfloat16"):
        matrix_sqrth(A, solver="products(precision=float8)")
    with pytest.raises(ArgumentError, match="dropped < kept / n"):  # no gap is left by the bound of the largest
        matrix_sqrth(A, solver="products(kept=0.5, dropped=0.45)")
    with pytest.raises(NonFiniteError, match=r"matrix \(1, 2\) of the batch \(2, 4\)"):
        matrix_sqrth(A.repeat(2, 4, 1, 1).index_put([torch.tensor(i) for i in (1, 2, 0, 0)], torch.tensor(torch.nan)),
                     solver="products")  # fmt: skip


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_forward_mode_is_the_adjoint():
    A = covariances(torch.tensor([1.0, 0.5, 0.2, 1e-5, 0.0], dtype=torch.float64)).requires_grad_()
    G, H = noise(5, 5), noise(5, 5, seed=2)
    function = lambda A: matrix_inv_sqrth(A, solver="products")
    _, tangent = torch.func.jvp(function, (A.detach(),), (G,))
    (cotangent,) = torch.autograd.grad(function(A), A, H)
    assert torch.allclose((H * tangent).sum(), (cotangent * G).sum(), rtol=1e-4)


def operators(graph):
    return {str(node.target) for node in graph.nodes if node.op == "call_function"}


def are_plain(names):
    """Whether a graph has no operator of linear algebra, no custom one and no branch."""
    return not any(word in name for name in names for word in ("linalg", "orthocond", "cond", "eigh", "svd"))


def assert_as_eager(compiled, x, g):
    """Assert that a compiled layer does what a new one does in eager mode, forward and backward."""
    results = []
    for layer in (compiled, DecorrelatedBatchNorm2d(6, solver="products")):
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        results.append((y, *torch.autograd.grad(y, leaf, g)))
    for traced, plain in zip(*results, strict=True):
        assert torch.allclose(traced, plain, atol=1e-5)


def test_a_compiled_training_step_is_products_alone():
    graphs = []

    def recorded(graph, inputs):
        graphs.append(graph.graph)
        return make_boxed_func(graph)

    x, g = noise(8, 6, 10, 10), noise(8, 6, 10, 10, seed=2)
    layer = DecorrelatedBatchNorm2d(6, solver="products")
    backend = aot_autograd(fw_compiler=recorded, bw_compiler=recorded)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    assert_as_eager(compiled, x, g)
    assert len(graphs) == 2
    for graph in graphs:
        names = operators(graph) - {"aten.linalg_vector_norm.default"}
        assert are_plain(names), names
        assert any("bmm" in name for name in names)
    flat = x.clone()
    flat[:, 0] *= 0.05  # within the gap: compiled code has no branch, and says so
    assert compiled(flat).isnan().all()


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_for_several_sizes(dynamic):
    function = lambda A: matrix_sqrth(A, solver="products")
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for n in (5, 3):  # the second time as a symbol, with dynamic=True the first time too
        A = covariances(torch.linspace(1.0, 0.3, n)).requires_grad_()
        assert torch.allclose(compiled(A), function(A), atol=1e-5)
        slopes = [torch.autograd.grad(each(A), A, noise(n, n))[0] for each in (compiled, function)]
        assert torch.allclose(*slopes, atol=1e-5)


def test_a_layer_compiled_for_any_batch():
    compiled = torch.compile(
        DecorrelatedBatchNorm2d(6, solver="products"), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for batch in (8, 5):
        x, g = noise(batch, 6, 10, 10), noise(batch, 6, 10, 10, seed=2)
        assert_as_eager(compiled, x, g)


@pytest.mark.filterwarnings("ignore")  # the exporters' own
def test_export_and_onnx_of_the_training_forward():
    onnxscript = pytest.importorskip("onnxscript", reason="ONNX export needs onnxscript")
    assert onnxscript
    x = noise(8, 6, 10, 10)
    exported = torch.export.export(DecorrelatedBatchNorm2d(6, solver="products"), (x,))
    assert are_plain(operators(exported.graph)), operators(exported.graph)
    assert torch.allclose(exported.module()(x), DecorrelatedBatchNorm2d(6, solver="products")(x), atol=1e-5)
    program = torch.onnx.export(DecorrelatedBatchNorm2d(6, solver="products"), (x,), dynamo=True, verbose=False)
    kinds = {node.op_type for node in program.model.graph}
    assert "MatMul" in kinds
    assert not {"If", "Loop", "Scan"} & kinds
    assert all(node.domain in ("", "ai.onnx") for node in program.model.graph)


def trained(solver, spec, steps=40):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), DecorrelatedBatchNorm2d(16, solver=solver), nn.Flatten(), nn.Linear(576, 4)
    )
    treatment = treat(model, "0", spec)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    treatment.attach(optimizer)
    generator, decisions = torch.Generator().manual_seed(1), []
    mixing = torch.tensor([[1.0, 0.9, 0.8], [0.0, 0.2, 0.1], [0.0, 0.0, 0.05]]).T
    for _ in range(steps):
        x = torch.einsum("ij,bjhw->bihw", mixing, torch.randn(16, 3, 8, 8, generator=generator))
        loss = nn.functional.cross_entropy(model(x), torch.randint(0, 4, (16,), generator=generator))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        decisions.append((bool(treatment.last["gauged"]), treatment.last["cond_before"]))
    return model, decisions


def test_gauge_with_products_decides_and_does_what_it_does_with_eigenvalues():
    (model, decisions), (reference, expected) = (trained(solver, "gauge") for solver in ("products", "eigh"))
    assert [gauged for gauged, _ in decisions] == [gauged for gauged, _ in expected]
    assert any(gauged for gauged, _ in decisions)
    for (_, cond), (_, exact) in zip(decisions, expected, strict=True):
        assert 0.95 * exact <= cond <= 1.001 * exact
    assert torch.allclose(model[0].weight, reference[0].weight, rtol=1e-2, atol=1e-3)
    fallbacks, total = model[1].num_fallbacks
    assert fallbacks == sum(gauged for gauged, _ in decisions)
    assert total == 40


def test_a_layer_counts_its_own_fall_backs_whatever_other_threads_do(monkeypatch):
    layer, other = (DecorrelatedBatchNorm2d(4, solver="products") for _ in range(2))
    good = noise(8, 4, 6, 6)
    bad = good * torch.tensor([1.0, 1.0, 1.0, 0.1]).view(4, 1, 1)
    is_inside, may_leave, roots = threading.Event(), threading.Event(), products.certified_roots

    def waiting(*args):
        if threading.current_thread() is thread:
            is_inside.set()
            assert may_leave.wait(60)
        return roots(*args)

    thread = threading.Thread(target=lambda: layer(good))
    monkeypatch.setattr(products, "certified_roots", waiting)
    thread.start()
    assert is_inside.wait(60)
    other(bad)
    may_leave.set()
    thread.join()
    assert (layer.num_fallbacks, other.num_fallbacks) == ((0, 1), (1, 1))


def test_a_layer_without_a_gap_says_so_once():
    layer = DecorrelatedBatchNorm2d(4, solver="products")
    x = noise(8, 4, 6, 6) * torch.tensor([1.0, 1.0, 1.0, 0.1]).view(4, 1, 1)
    for _ in range(99):
        layer(x)
    with pytest.warns(OrthocondWarning, match="decomposed 100 of its 100 covariances"):
        layer(x)
    layer(x)
    assert layer.num_fallbacks == (101, 101)
