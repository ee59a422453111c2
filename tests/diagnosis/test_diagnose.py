"""The observer: it sees every call, changes nothing, leaves nothing behind."""

import gc
import threading
import warnings
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import orthocond
from orthocond import diagnose
from orthocond.diagnosis import VERDICTS
from orthocond.linalg import covariance, covariance_sqrth
from orthocond.nn import CovariancePool2d, DecorrelatedBatchNorm2d

from cases import BATCHES, matrices, noise


class Whitening(nn.Module):
    """ZCA as many people write it."""

    def forward(self, x):
        x = x - x.mean(0)
        cov = x.mT @ x / len(x)
        l, U = torch.linalg.eigh(cov)
        return x @ (U * l.clamp(min=1e-12).rsqrt()) @ U.mT


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Sequential(Whitening(), nn.Dropout(0.5)), nn.Linear(8, 3))


def gradients(model, x, watch=None):
    model.zero_grad()
    torch.manual_seed(1)
    if watch is None:
        loss = model(x).square().sum()
        loss.backward()
    else:
        with watch:
            loss = model(x).square().sum()
            loss.backward()
    return [loss.detach(), torch.rand(3), *(p.grad.clone() for p in model.parameters())]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def root(A):
    l, U = torch.linalg.eigh(A)
    return (U * l.sqrt().unsqueeze(-2)) @ U.mT


@pytest.mark.parametrize("samples", [5, 64], ids=["singular", "full rank"])
@pytest.mark.parametrize("given", [True, False], ids=["a model", "no model"])
def test_outputs_gradients_and_random_state_are_the_same_bits(samples, given):
    model, x = network(), noise(samples, 6)
    plain = gradients(model, x)
    watched = gradients(model, x, diagnose(model if given else None))
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(plain, watched, strict=True))


def test_nothing_is_left_behind():
    model, x = network(), noise(64, 6)
    with diagnose(model) as diagnosis:
        loss = model(x).square().sum()
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.modules())
    assert torch._C._len_torch_function_stack() == 0
    loss.backward()  # outside: no hook is left on the graph
    (found,) = diagnosis.findings
    assert found.gradient_finite is None
    assert "No backward pass was seen" in found.reason


def test_the_graph_is_not_kept_alive():
    class Marked(torch.autograd.Function):
        @staticmethod
        def forward(ctx, A):
            ctx.mark = marks[0]
            return A.clone()

        @staticmethod
        def backward(ctx, G):
            return G

    class Mark:
        pass

    marks = [Mark()]
    alive = weakref.ref(marks[0])
    with diagnose() as diagnosis:
        root(Marked.apply(matrices("spread 1e2", 4).requires_grad_())).sum().backward()
        marks.clear()
        assert alive() is None
    assert len(diagnosis.findings) == 1


def test_module_source_and_numbers():
    model, x = network(), noise(64, 6)
    diagnosis = diagnose(model)
    gradients(model, x, diagnosis)
    (found,) = diagnosis.findings
    assert (found.function, found.module) == ("torch.linalg.eigh", "2.0")
    file, _, line = found.source.rpartition(":")
    assert file.endswith("test_diagnose.py")
    assert "eigh(cov)" in Path(file).read_text().splitlines()[int(line) - 1]
    assert (found.shape, found.dtype, found.device) == ((8, 8), "float32", "cpu")
    hidden = model[:2](x)
    expected = orthocond.linalg.spectrum(orthocond.linalg.covariance(hidden, dim=0))
    assert found.rank == expected.rank
    assert found.cond == pytest.approx(expected.cond.item(), rel=1e-3)
    assert found.gap == pytest.approx(expected.gap.item(), rel=1e-2)
    assert found.gradient_finite
    assert found.verdict == "healthy"


def test_without_a_model_a_module_has_the_name_of_its_class():
    diagnosis = diagnose()
    gradients(network(), noise(64, 6), diagnosis)
    assert [found.module for found in diagnosis.findings] == ["Whitening"]


FUNCTIONS = {
    "torch.linalg.eigh": lambda A: torch.linalg.eigh(A).eigenvalues,
    "torch.linalg.eigvalsh": torch.linalg.eigvalsh,
    "torch.linalg.svd": lambda A: torch.linalg.svd(A).S,
    "torch.linalg.svdvals": torch.linalg.svdvals,
    "torch.linalg.pinv": torch.linalg.pinv,
    "torch.linalg.cholesky": torch.linalg.cholesky,
    "torch.linalg.cholesky_ex": lambda A: torch.linalg.cholesky_ex(A).L,
    "torch.svd": lambda A: torch.svd(A).S,
    "torch.Tensor.svd": lambda A: A.svd().S,
    "torch.pinverse": torch.pinverse,
    "torch.Tensor.pinverse": lambda A: A.pinverse(),
    "orthocond.linalg.matrix_sqrth": orthocond.linalg.matrix_sqrth,
    "orthocond.linalg.matrix_inv_sqrth": lambda A: orthocond.linalg.matrix_inv_sqrth(A, solver="newton_schulz"),
    "orthocond.linalg.matrix_sqrth_pair": lambda A: orthocond.linalg.matrix_sqrth_pair(A)[1],
    "orthocond.linalg.matrix_logh": orthocond.linalg.matrix_logh,
    "orthocond.linalg.matrix_powerh": lambda A: orthocond.linalg.matrix_powerh(A, -0.25),
    "orthocond.linalg.matrix_exph": orthocond.linalg.matrix_exph,
    "orthocond.linalg.matrix_functionh": lambda A: orthocond.linalg.matrix_functionh(A, torch.sin, torch.cos),
    "orthocond.linalg.spectral_projector": lambda A: orthocond.linalg.spectral_projector(A, 2),
    "orthocond.linalg.nearest_orthogonal": orthocond.linalg.nearest_orthogonal,
    "orthocond.linalg.nearest_rotation": orthocond.linalg.nearest_rotation,
}


@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_is_seen_once(name, batch):
    A = matrices("spread 1e2", 5, batch).requires_grad_()
    with diagnose() as diagnosis:
        FUNCTIONS[name](A).sum().backward()
    (found,) = diagnosis.findings
    assert found.function == name
    assert not diagnosis.notes
    assert (found.verdict, found.gradient_finite, found.consistent) == ("healthy", True, True)
    assert found.shape == (*batch, 5, 5)
    assert found.cond == pytest.approx(100, rel=0.5)
    assert found.num_matrices == A[..., 0, 0].numel()


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize("shape", [(7, 4), (4, 7), (2, 6, 3)], ids=str)
def test_rectangular_matrices(shape, complete):
    A = noise(*shape).requires_grad_()
    with diagnose() as diagnosis:
        U, S, Vh = torch.linalg.svd(A, full_matrices=complete)
        k = S.shape[-1]
        ((U[..., :k] * S.unsqueeze(-2)) @ Vh[..., :k, :]).sin().sum().backward()
    (found,) = diagnosis.findings
    assert (found.verdict, found.consistent, diagnosis.notes) == ("healthy", True, [])
    assert 0.5 < found.amplification < 2


def test_the_amplification_is_one_for_a_well_posed_gradient():
    """The well-posed part is the true gradient where nothing is tied: by divided differences in float64."""
    A = matrices("spread 1e2", 6, dtype=torch.float64).requires_grad_()
    with diagnose() as diagnosis:
        root(A).sin().sum().backward()
    assert diagnosis.findings[0].amplification == pytest.approx(1, rel=1e-6)


def test_near_ties_in_float32_are_ties_and_in_float64_are_not():
    A = torch.eye(6, dtype=torch.float64) + 1e-8 * noise(6, 6, dtype=torch.float64)
    A = (A + A.mT) / 2
    verdicts = []
    for dtype in (torch.float32, torch.float64):
        B = A.to(dtype).requires_grad_()
        with diagnose() as diagnosis:
            (root(B) * noise(6, 6, dtype=dtype)).sum().backward()
        verdicts.append(diagnosis.findings[0].verdict)
    assert verdicts == ["ties", "healthy"]


@pytest.mark.parametrize("num_units", [0, 1, 3, 5, 12])
def test_eigenvalues_a_few_rounding_errors_apart_are_equal(num_units):
    A = torch.diag(torch.tensor([0.25, 0.5, 1 - num_units * torch.finfo(torch.float64).eps, 1.0], dtype=torch.float64))
    with diagnose() as diagnosis:
        torch.linalg.eigh(A.requires_grad_())[1].mul(noise(4, 4, dtype=torch.float64)).sum().backward()
    (finding,) = diagnosis.findings
    assert finding.verdict == "ill-posed"


def test_a_cast_behind_the_call_does_not_make_a_loss_ill_posed():
    A = torch.eye(5, dtype=torch.float64).requires_grad_()
    with diagnose() as diagnosis:
        l, U = torch.linalg.eigh(A)
        l, U = l.float(), U.float()
        ((U * l.sqrt()) @ U.mT * noise(5, 5)).sum().backward()
    assert (diagnosis.findings[0].verdict, diagnosis.findings[0].consistent) == ("ties", True)


def test_the_worst_matrix_of_a_batch_is_described():
    A = torch.stack([matrices("spread 1e2", 4), torch.eye(4), matrices("spread 1e2", 4)]).requires_grad_()
    with diagnose() as diagnosis:
        (root(A) * noise(4, 4)).sum().backward()
    (found,) = diagnosis.findings
    assert (found.verdict, found.gap, found.num_affected, found.num_matrices) == ("ties", 0, 1, 3)


def test_several_calls_and_several_backward_passes():
    A, B = torch.eye(3).requires_grad_(), matrices("spread 1e2", 3).requires_grad_()
    with diagnose() as diagnosis:
        for X in (B, A):
            Q = root(X)
            Q.trace().backward(retain_graph=True)
            Q.sum().backward()
    assert [found.verdict for found in diagnosis.findings] == ["healthy", "ties"]
    text = str(diagnosis)
    assert text.startswith("2 decompositions in 1 place of the code, 1 with a problem.")
    assert "worst of 2 calls" in text


def test_repeated_and_nested_use():
    A = matrices("spread 1e2", 3).requires_grad_()
    outer, inner = diagnose(), diagnose()
    with outer, inner:
        root(A).sum().backward()
        with outer:
            pass
    with inner:
        root(A).sum().backward()
    assert len(outer.findings) == 1
    assert len(inner.findings) == 2
    assert all(found.gradient_finite for found in (*outer.findings, *inner.findings))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_counts_once(reentrant):
    x = noise(64, 6).requires_grad_()
    model = network()
    with diagnose(model) as diagnosis:
        checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
    (found,) = diagnosis.findings
    assert (found.gradient_finite, found.module) == (True, "2.0")
    assert not diagnosis.notes


def test_what_was_seen_before_an_exception_is_kept():
    A = (torch.ones(3, 3) * 2).requires_grad_()
    diagnosis = diagnose()

    def step():
        with diagnosis:
            assert root(A).isfinite().all(), "the loss is NaN"

    A.data[0, 0] -= 1e-6
    with pytest.raises(AssertionError, match="the loss is NaN"):
        step()
    (found,) = diagnosis.findings
    assert found.verdict == "singular"
    assert "matrix_sqrth(A, rtol=1e-4)" in found.advice


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_matrix_that_is_not_finite(name, bad):
    A = torch.eye(3)
    A[0, 0] = bad
    diagnosis = diagnose()
    try:
        with diagnosis:
            FUNCTIONS[name](A.requires_grad_())
    except (RuntimeError, ValueError):
        pass
    (found,) = diagnosis.findings
    assert (found.verdict, found.function) == ("non-finite input", name)


def test_a_gradient_that_is_nan_before_it_arrives():
    A = matrices("spread 1e2", 3).requires_grad_()
    with diagnose() as diagnosis:
        (root(A).sum() * float("nan")).backward()
    (found,) = diagnosis.findings
    assert (found.verdict, found.consistent) == ("non-finite input", None)
    assert "The cause comes after this call" in found.advice


def test_approximate_gradients_of_our_own_at_ties():
    A = torch.eye(3).requires_grad_()
    with diagnose() as diagnosis:
        orthocond.linalg.matrix_sqrth(A, gradient="pade")[0, 1].backward()
    (found,) = diagnosis.findings
    assert found.verdict == "ties"
    assert 'gradient="exact"' in found.advice


def test_a_null_space_that_eps_keeps():
    X = noise(8, 5)
    P = (X @ X.mT).requires_grad_()
    verdicts = []
    for options in ({"eps": 1e-7}, {"eps": 1e-2}, {"rtol": 1e-4}, {"eps": 1e-7, "rtol": 1e-4}):
        with diagnose() as diagnosis:
            orthocond.linalg.matrix_inv_sqrth(P, **options).sum().backward()
            orthocond.linalg.matrix_sqrth(P, **options).sum().backward()
        verdicts.append([found.verdict for found in diagnosis.findings])
    assert verdicts == [["ill-conditioned", "healthy"]] + [["healthy", "healthy"]] * 3


def test_a_pseudo_inverse_that_inverts_noise():
    A = torch.diag(torch.tensor([1.0, 1e-2, 1e-6])).requires_grad_()
    with diagnose() as diagnosis:
        torch.linalg.pinv(A).sum().backward()
        torch.linalg.pinv(A, rtol=1e-4).sum().backward()
    assert [found.verdict for found in diagnosis.findings] == ["ill-conditioned", "healthy"]
    assert "torch.linalg.pinv(A, rtol=1e-4)" in diagnosis.findings[0].advice


PSEUDO_INVERSES = {
    "rtol": lambda A, t: torch.linalg.pinv(A, rtol=t),
    "atol": lambda A, t: torch.linalg.pinv(A, atol=t),
    "the larger of two": lambda A, t: torch.linalg.pinv(A, atol=t, rtol=1e-10),
    "rcond": lambda A, t: torch.linalg.pinv(A, rcond=t),
    "rcond by place": lambda A, t: torch.linalg.pinv(A, t),
    "tensor rtol": lambda A, t: torch.linalg.pinv(A, rtol=torch.tensor(t)),
    "tensor atol": lambda A, t: torch.linalg.pinv(A, atol=torch.tensor([t])),
    "tensor rcond by place": lambda A, t: torch.linalg.pinv(A, torch.tensor(t)),
    "pinverse": lambda A, t: torch.pinverse(A, rcond=t),
    "pinverse by place": lambda A, t: torch.pinverse(A, t),
    "method": lambda A, t: A.pinverse(t),
}


@pytest.mark.parametrize(("tolerance", "verdict"), [(1e-3, "healthy"), (1e-9, "ill-conditioned")])
@pytest.mark.parametrize("name", PSEUDO_INVERSES)
def test_every_tolerance_of_a_pseudo_inverse_is_read(name, tolerance, verdict):
    A = torch.diag(torch.tensor([1.0, 1.0, 1e-6])).requires_grad_()
    (plain,) = torch.autograd.grad(PSEUDO_INVERSES[name](A, tolerance).sum(), A)
    with diagnose() as diagnosis:
        (watched,) = torch.autograd.grad(PSEUDO_INVERSES[name](A, tolerance).sum(), A)
    assert torch.equal(plain, watched)
    assert not diagnosis.notes
    assert [found.verdict for found in diagnosis.findings] == [verdict]


@pytest.mark.parametrize("option", ["atol", "rtol"])
@pytest.mark.parametrize(
    ("tolerance", "num_affected"),
    [([1e-3, 1e-9, 1e-3], 2), ([[1e-3], [1e-9]], 3), ([[1e-3] * 3, [1e-3, 1e-3, 1e-9]], 1)],
)
def test_a_batch_has_a_tolerance_for_each_matrix(tolerance, num_affected, option):
    A = torch.diag(torch.tensor([1.0, 1.0, 1e-6])).repeat(2, 3, 1, 1).requires_grad_()
    tolerance = torch.tensor(tolerance, dtype=torch.float64)
    with diagnose() as diagnosis:
        torch.linalg.pinv(A, **{option: tolerance}).sum().backward()
        tolerance.zero_()  # what it holds later is not read
    (found,) = diagnosis.findings
    assert (found.verdict, found.num_affected, found.num_matrices) == ("ill-conditioned", num_affected, 6)


def test_several_tolerances_for_one_matrix_are_said_to_be_unseen():
    A = noise(2, 3, 3)
    tolerances = torch.full((2, 1), 1e-3)
    expected = torch.linalg.pinv(A, rtol=tolerances)
    with diagnose() as diagnosis:
        assert torch.equal(torch.linalg.pinv(A, rtol=tolerances), expected)
    assert "several tolerances for one matrix" in diagnosis.notes[0]


def test_the_default_tolerance_of_a_pseudo_inverse_is_that_of_torch():
    calls = {
        torch.linalg.pinv: "healthy",
        lambda A: torch.linalg.pinv(A, atol=0.0): "healthy",
        lambda A: torch.linalg.pinv(A, atol=1e-30): "ill-conditioned",  # then the default of rtol is zero
        torch.pinverse: "ill-conditioned",  # its default is 1e-15, in float32 too
    }
    A = torch.diag(torch.tensor([1.0, 1.0, 1e-8])).requires_grad_()
    with diagnose() as diagnosis:
        for pseudo_inverse in calls:
            result = pseudo_inverse(A)
            result.sum().backward()
            keeps_noise = result[2, 2] > 0
            assert keeps_noise == (calls[pseudo_inverse] == "ill-conditioned")
    assert [found.verdict for found in diagnosis.findings] == list(calls.values())


INDEFINITE = torch.tensor([[1.0, 2.0, 0.0], [2.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
SEMIDEFINITE = torch.diag(torch.tensor([1.0, 1.0, 0.0]))


@pytest.mark.parametrize("triangle", ["both", "lower", "upper"])
@pytest.mark.parametrize(
    ("A", "reason"),
    [(INDEFINITE, "a negative eigenvalue (-1)"), (SEMIDEFINITE, "singular up to rounding")],
    ids=["indefinite", "semidefinite"],
)
def test_a_failed_cholesky_factor_in_the_loss(A, reason, triangle):
    A = {"both": A, "lower": A.tril(), "upper": A.triu()}[triangle].clone().requires_grad_()
    with diagnose() as diagnosis:
        L, info = torch.linalg.cholesky_ex(A, upper=triangle == "upper")
        L.sum().backward()
    (found,) = diagnosis.findings
    assert info > 0
    assert found.verdict == "singular"
    assert reason in found.reason
    assert "Cholesky factor" in found.reason
    assert found.advice


def test_a_failed_cholesky_factor_in_one_element_of_a_batch():
    A = torch.stack([torch.eye(3), INDEFINITE, 2 * torch.eye(3)]).requires_grad_()
    with diagnose() as diagnosis:
        torch.linalg.cholesky_ex(A).L.sum().backward()
    (found,) = diagnosis.findings
    assert (found.verdict, found.num_affected, found.num_matrices) == ("singular", 1, 3)
    assert "negative eigenvalue (-1)" in found.reason


def test_a_failed_cholesky_factor_that_the_loss_leaves_out():
    A = torch.stack([torch.eye(3), INDEFINITE]).requires_grad_()
    with diagnose() as diagnosis:
        torch.linalg.cholesky_ex(A)
        L, info = torch.linalg.cholesky_ex(A)
        L.where((info == 0)[:, None, None], 0.0).sum().backward()
    assert [found.verdict for found in diagnosis.findings] == ["healthy", "healthy"]


@pytest.mark.parametrize("factor", [torch.linalg.cholesky, partial(torch.linalg.cholesky_ex, check_errors=True)])
@pytest.mark.parametrize("triangle", ["both", "lower", "upper"])
def test_a_failed_cholesky_factor_that_raises(triangle, factor):
    A, diagnosis = {"both": INDEFINITE, "lower": INDEFINITE.tril(), "upper": INDEFINITE.triu()}[triangle], diagnose()
    with pytest.raises(torch.linalg.LinAlgError), diagnosis:
        factor(A, upper=triangle == "upper")
    (found,) = diagnosis.findings
    assert found.verdict == "singular"
    assert found.cond == pytest.approx(3)
    assert "negative eigenvalue (-1)" in found.reason


@pytest.mark.filterwarnings("ignore:torch.cholesky is deprecated:UserWarning")
@pytest.mark.parametrize("factor", [torch.linalg.cholesky, torch.linalg.cholesky_ex, torch.cholesky])
def test_rank_and_gap_are_unknown_after_a_cholesky_factorisation(factor):
    with diagnose() as diagnosis:
        factor(torch.diag(torch.tensor([4.0, 3.0, 2.0, 1.0, 1.0])))
    (found,) = diagnosis.findings
    assert (found.verdict, found.rank, found.gap) == ("healthy", None, None)
    assert found.cond == pytest.approx(4, rel=0.1)
    assert "rank" not in str(diagnosis)


def test_layers_of_our_own():
    model = nn.Sequential(nn.Conv2d(3, 6, 3), DecorrelatedBatchNorm2d(6), CovariancePool2d())
    with diagnose(model) as diagnosis:
        model(noise(4, 3, 8, 8)).sum().backward()
    assert {(found.function, found.module) for found in diagnosis.findings} == {
        ("orthocond.nn.DecorrelatedBatchNorm2d", "1"),
        ("orthocond.nn.CovariancePool2d", "2"),
    }
    assert {found.verdict for found in diagnosis.findings} == {"healthy"}


@pytest.mark.parametrize("solver", ["eigh", "newton_schulz"])
@pytest.mark.parametrize("num_samples", [4, 8, 64])
def test_pooling_is_told_by_its_covariance_and_not_by_its_samples(num_samples, solver):
    X = noise(2, 8, num_samples, dtype=torch.float64).requires_grad_()
    with diagnose() as diagnosis:
        covariance_sqrth(X, solver=solver).sum().backward()
    (found,) = diagnosis.findings
    assert not diagnosis.notes
    assert found.shape == (2, 8, 8)
    assert found.rank == min(8, num_samples - 1)
    if found.rank == 8:
        conds = torch.linalg.cond(covariance(X.detach()))
        assert any(found.cond == pytest.approx(float(cond), rel=1e-6) for cond in conds)
    assert f"8x8 float64 on cpu, 2 of 2 matrices: rank {found.rank} of 8" in str(diagnosis)


@pytest.mark.parametrize(("num_zero", "said"), [(1, "divides by it."), (2, "or by the differences between them.")])
def test_one_zero_eigenvalue_is_spoken_of_in_the_singular(num_zero, said):
    A = torch.diag(torch.tensor([0.0] * num_zero + [2.0, 3.0])).requires_grad_()
    with diagnose() as diagnosis:
        l, U = torch.linalg.eigh(A)
        (U * l.sqrt() @ U.mT).sum().backward()
    assert said in diagnosis.findings[0].reason


def test_threads_of_a_model_are_seen_and_those_of_others_are_not():
    model, other, x = network(), network(), noise(64, 6)
    with diagnose(model) as diagnosis:
        workers = [threading.Thread(target=lambda m=m: m(x).sum().backward()) for m in (model, model, other)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert [(found.module, found.gradient_finite) for found in diagnosis.findings] == [("2.0", True)] * 2


def test_diagnoses_in_two_threads_do_not_mix():
    counts = {}

    def run(number):
        with diagnose() as diagnosis:
            for _ in range(number):
                root(matrices("spread 1e2", 3).requires_grad_()).sum().backward()
        counts[number] = len(diagnosis.findings)

    workers = [threading.Thread(target=run, args=(number,)) for number in (3, 5)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert counts == {3: 3, 5: 5}


def test_a_compiled_region_is_said_to_be_unseen():
    torch._dynamo.reset()
    function = torch.compile(lambda A: root(A).sum(), backend="eager")
    A = matrices("spread 1e2", 3).requires_grad_()
    plain = torch.autograd.grad(function(A), A)
    with diagnose() as diagnosis:
        watched = torch.autograd.grad(function(A), A)
    assert same(plain, watched)
    assert "can't be seen" in str(diagnosis)
    model = torch.compile(network(), backend="eager")
    with diagnose(model) as diagnosis:
        pass
    assert "force_eager" in diagnosis.notes[0]
    with torch.compiler.set_stance("force_eager"), diagnose() as diagnosis:
        function(A).backward()
    assert len(diagnosis.findings) == 1


def test_transforms_of_torch_func_are_said_to_be_unseen():
    A = matrices("spread 1e2", 3, (4,))
    expected = torch.func.vmap(torch.linalg.eigvalsh)(A)
    with diagnose() as diagnosis:
        assert torch.equal(torch.func.vmap(torch.linalg.eigvalsh)(A), expected)
    assert not diagnosis.findings
    assert "torch.func" in diagnosis.notes[0]


def test_the_function_of_the_eigenvalues_is_recognised():
    cases = {
        "matrix_sqrth(A)": lambda l: l.clamp(min=1e-6).sqrt(),
        "matrix_inv_sqrth(A)": lambda l: 1 / (l + 1e-5) ** 0.5,
        "matrix_powerh(A, -1)": lambda l: l.reciprocal(),
        "matrix_powerh(A, 0.25)": lambda l: l.sqrt().sqrt(),
        "matrix_logh(A)": lambda l: torch.log(l),
        "matrix_exph(A)": lambda l: l.exp(),
        "matrix_functionh": lambda l: l.sin(),
    }
    for expected, function in cases.items():
        A = torch.eye(3).requires_grad_()
        with diagnose() as diagnosis:
            l, U = torch.linalg.eigh(A)
            (U @ torch.diag(function(l)) @ U.mT)[0, 1].backward()
        assert expected in diagnosis.findings[0].advice


def test_both_roots_are_one_pair():
    A = torch.eye(3).requires_grad_()
    with diagnose() as diagnosis:
        l, U = torch.linalg.eigh(A)
        Q, S = (U * l.sqrt()) @ U.mT, (U * l.rsqrt()) @ U.mT
        (Q[0, 1] + S[1, 2]).backward()
    assert "Q, S = orthocond.linalg.matrix_sqrth_pair(A)" in diagnosis.findings[0].advice


def test_worst_first_and_plain_text():
    A, B = torch.eye(3).requires_grad_(), matrices("spread 1e2", 3).requires_grad_()
    with diagnose() as diagnosis:
        torch.linalg.eigvalsh(B).sum().backward()
        root(A)[0, 1].backward()
    lines = str(diagnosis).splitlines()
    verdicts = [line.partition(":")[0] for line in lines if line and line[0].isupper()]
    assert verdicts == ["TIES", "HEALTHY"]
    assert max(map(len, lines)) <= 120
    assert [found["verdict"] for found in diagnosis.to_dicts()] == ["healthy", "ties"]
    assert [VERDICTS.index(name.lower()) for name in verdicts] == sorted(VERDICTS.index(n.lower()) for n in verdicts)
    table = diagnosis._repr_html_()
    assert table.count("<tr>") == table.count("</tr>") == 3
    assert "&lt;" not in table or "<script" not in table


def test_nothing_seen():
    with diagnose() as diagnosis:
        torch.ones(3).sum()
    assert str(diagnosis) == "No decomposition was seen."


def test_it_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        diagnosis = diagnose()
        gradients(network(), noise(64, 6), diagnosis)
    assert diagnosis.findings


def test_the_condition_number_of_a_cholesky_factorisation():
    with diagnose() as diagnosis:
        torch.linalg.cholesky(torch.tensor([[2.0, 1.0], [1.0, 2.0]]))
    assert diagnosis.findings[0].cond == pytest.approx(3, rel=0.05)


def test_a_diagnosis_holds_no_graph_of_the_user():
    A = torch.eye(2, requires_grad=True) * 2
    node = weakref.ref(A)
    with diagnose() as diagnosis:
        torch.linalg.cholesky(input=A)
    assert len(diagnosis.findings) == 1
    del A
    gc.collect()
    assert node() is None
