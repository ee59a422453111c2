"""The condition monitor."""

import copy
import math
import pickle
import sys

import pytest
import torch
from torch import nn

import orthocond.monitor
from orthocond import ConditionMonitor
from orthocond.errors import ArgumentError, NonFiniteError, OrthocondWarning
from orthocond.linalg import covariance, matrix_sqrth, spectrum
from orthocond.nn import CovariancePool2d, DecorrelatedBatchNorm1d, DecorrelatedBatchNorm2d

from cases import noise


class Recorder:
    def __init__(self):
        self.scalars = {}

    def add_scalar(self, tag, scalar_value, global_step=None):
        self.scalars[tag, global_step] = scalar_value


def network():
    return nn.Sequential(nn.Conv2d(3, 64, 3), DecorrelatedBatchNorm2d(64, eps=1e-5), nn.ReLU(), CovariancePool2d())


def test_records_are_those_of_the_spectrum():
    model = network().double()  # in float32 the smallest eigenvalues are rounding noise, which differs between CPUs
    x = noise(4, 3, 9, 9, dtype=torch.float64)
    with ConditionMonitor(model) as monitor:
        model(x)
        model.eval()(x)
        model.train()(noise(4, 3, 9, 9, dtype=torch.float64, seed=2))
    model(x)  # no longer recorded
    history = monitor.history()
    assert [(record["step"], record["layer"]) for record in history] == [(0, "1"), (0, "3"), (1, "1"), (1, "3")]
    features = model[0](x).movedim(1, 0).flatten(1)
    truth = spectrum(covariance(features), eps=1e-5, rtol=1e-4)
    assert history[0]["rank"] == truth.rank
    assert history[0]["cond_support"] == pytest.approx(truth.cond_support.item(), rel=1e-6)
    assert history[0]["cond_eps"] == pytest.approx(truth.cond_eps.item(), rel=1e-6)
    assert history[0]["cond"] > 1e6
    assert history[0]["failures"] == 0
    assert all(type(value) in (int, float, str, bool) for record in history for value in record.values())


@pytest.mark.parametrize("named", [False, True])
def test_an_eps_that_is_a_floor_counts_as_one(named):
    layer = DecorrelatedBatchNorm2d(8, eps=0.5, rtol=0.0, solver="eigh(clamp=true)")
    model, x = nn.Sequential(layer), noise(4, 8, 5, 5) * torch.linspace(0.1, 2, 8).view(-1, 1, 1)
    l = spectrum(covariance(x.movedim(1, 0).flatten(1).double())).eigenvalues
    for eps, bound in ((None, 0.5), (0.25, 0.25)):
        with ConditionMonitor(model, layers=["0"] if named else None, eps=eps) as monitor:
            model(x)
        assert monitor.history()[0]["cond_eps"] == pytest.approx((l.max() / l.min().clamp(min=bound)).item(), rel=1e-4)


def test_a_call_with_an_eps_that_is_a_floor_counts_as_one():
    class Root(nn.Module):
        def forward(self, P):
            return matrix_sqrth(P, solver="eigh(clamp=true)", eps=0.5)

    model = Root()
    with ConditionMonitor(model) as monitor:
        model(torch.diag(torch.tensor([4.0, 1.0, 0.1])))
    assert monitor.history()[0]["cond_eps"] == pytest.approx(8.0)


def test_every():
    model = network()
    with ConditionMonitor(model, every=3) as monitor:
        for _ in range(7):
            model(noise(2, 3, 9, 9))
    assert [record["step"] for record in monitor.history() if record["layer"] == "1"] == [0, 3, 6]


@pytest.mark.parametrize("solver", ["svd", "newton_schulz"])
def test_solvers_of_every_kind_are_watched(solver):
    model = nn.Sequential(DecorrelatedBatchNorm2d(3, solver=solver, eps=1e-3))
    with ConditionMonitor(model) as monitor:
        model(noise(4, 3, 5, 5))
    assert monitor.history()[0]["rank"] == 3


def test_failures_are_counted_where_they_happen(monkeypatch):
    model = network()
    original, calls = torch.linalg.eigh, []

    def sometimes(A):
        calls.append(None)
        if len(calls) == 1:
            raise torch.linalg.LinAlgError("no")
        return original(A)

    monkeypatch.setattr(torch.linalg, "eigh", sometimes)
    with ConditionMonitor(model) as monitor:
        model(noise(4, 3, 9, 9))
    assert [record["failures"] for record in monitor.history()] == [1, 0]


def test_log_writes_the_newest_record():
    model = network()
    writer = Recorder()
    with ConditionMonitor(model) as monitor:
        monitor.log(writer, 0)
        model(noise(2, 3, 9, 9))
        monitor.log(writer, 7)
    assert writer.scalars["condition/1/rank", 7] == monitor.latest()["1"]["rank"]
    assert len(writer.scalars) == 12


def test_copies_are_not_watched_and_a_watched_model_can_be_saved():
    model = network()
    with ConditionMonitor(model) as monitor:
        other = copy.deepcopy(model)
        other(noise(2, 3, 9, 9))
        pickle.dumps(model)
    assert monitor.history() == []


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of torch.compile's own
def test_a_compiled_model_is_watched():
    model = network()
    compiled = torch.compile(model, backend="eager")
    with ConditionMonitor(compiled) as monitor:
        for _ in range(3):
            compiled(noise(2, 3, 9, 9))
    assert [(r["layer"], r["step"]) for r in monitor.history()] == [(n, s) for s in range(3) for n in ("1", "3")]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of torch.compile's own
def test_a_second_compiled_model_of_a_class_is_watched_and_one_that_was_called_before():
    torch.compile(network(), backend="eager")(noise(2, 3, 9, 9))
    model = network()
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        with ConditionMonitor(model) as monitor:
            compiled(noise(2, 3, 9, 9))
        compiled(noise(2, 3, 9, 9))  # no longer recorded
        assert [record["layer"] for record in monitor.history()] == ["1", "3"]


KEYS = ["step", "layer", "mode", "cond", "cond_support", "cond_eps", "cond_floor", "rank", "failures", "estimated"]


def gapped(x):
    """Features whose covariance has a gap: 5 of 8 channels are sums of the others."""
    mix = torch.cat([torch.eye(3), 0.7 * noise(5, 3)])
    return torch.einsum("ij,bjhw->bihw", mix, x)


def test_products_are_shown_by_estimates_and_exactly_if_asked(monkeypatch):
    model, inputs = nn.Sequential(DecorrelatedBatchNorm2d(8, solver="products")), noise(8, 3, 9, 9)
    x = gapped(inputs)
    truth = spectrum(covariance(x.movedim(1, 0).flatten(1)), rtol=1e-5)
    with ConditionMonitor(model, exact_every=2) as monitor:
        model(x)
        monkeypatch.setattr(torch.linalg, "eigh", None)
        monkeypatch.setattr(torch.linalg, "eigvalsh", None)
        model(x)  # without any decomposition
    monkeypatch.undo()
    exact, estimate = monitor.history()
    assert (exact["estimated"], estimate["estimated"]) == (False, True)
    assert exact["rank"] == estimate["rank"] == truth.rank == 3
    assert exact["cond_support"] == pytest.approx(truth.cond_support.item(), rel=1e-5)
    assert 0.95 * exact["cond_support"] <= estimate["cond_support"] <= 1.001 * exact["cond_support"]
    assert all(math.isnan(estimate[name]) for name in ("cond", "cond_eps", "cond_floor"))
    row = str(monitor).splitlines()[-1].split()
    assert row[4:9] == ["~3", "-", f"~{estimate['cond_support']:.3g}", "-", "-"]
    written = []
    monitor.log(type("Writer", (), {"add_scalar": lambda self, *args: written.append(args[0])})(), step=0)
    assert [name.rpartition("/")[2] for name in written] == ["cond_support", "rank", "failures"]
    with pytest.raises(ArgumentError, match="exact_every >= 1"):
        ConditionMonitor(model, exact_every=0)


def test_estimates_of_full_rank_and_with_eps():
    x = noise(8, 4, 9, 9) * torch.tensor([1.0, 0.9, 0.8, 0.7]).view(4, 1, 1)
    for eps, names in ((0.0, ("cond", "cond_support", "cond_eps")), (0.2, ("cond_eps",))):
        model = nn.Sequential(DecorrelatedBatchNorm2d(4, eps, groups=2, solver="products"))
        with ConditionMonitor(model) as monitor:
            model(x)
        with ConditionMonitor(model, exact_every=1) as other, ConditionMonitor(model, eps=0.1) as third:
            model(x)
        (estimate,), (exact,) = monitor.history(), other.history()
        for name in ("cond", "cond_support", "cond_eps"):
            if name in names:
                assert estimate[name] == pytest.approx(exact[name], rel=0.05)
            else:
                assert math.isnan(estimate[name])
        assert estimate["rank"] == exact["rank"] == 2
        assert math.isnan(third.history()[0]["cond_eps"])  # of another matrix than the layer inverted


def plain():
    return nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64, eps=1e-3), nn.ReLU(inplace=True))


def test_the_input_of_a_plain_batch_norm_is_measured_in_float64():
    model, x = plain(), noise(8, 3, 9, 9)
    with ConditionMonitor(model, layers=["1"]) as monitor:
        model(x)
        model.double()(x.double())
    single, record = monitor.history()
    assert single["rank"] == 27
    assert single["cond"] > 1e12  # a covariance in float32 has more noise
    assert list(record) == KEYS
    features = model[0](x.double()).detach().movedim(1, 0).flatten(1)
    truth = spectrum(covariance(features), eps=1e-3, rtol=1e-5)
    assert record["rank"] == truth.rank == 27
    assert record["cond_support"] == pytest.approx(truth.cond_support.item(), rel=1e-6)
    assert record["cond_eps"] == pytest.approx(truth.cond_eps.item(), rel=1e-6)
    assert record["cond_floor"] == pytest.approx(truth.eigenvalues[0].item() / 2.220446049250313e-16, rel=1e-3)
    assert record["mode"] == "train"


def test_the_floor_of_a_regular_covariance_changes_nothing():
    model = nn.Sequential(DecorrelatedBatchNorm2d(3)).double()
    with ConditionMonitor(model) as monitor:
        model(noise(4, 3, 5, 5, dtype=torch.float64))
    (record,) = monitor.history()
    assert record["cond_floor"] == pytest.approx(record["cond"], rel=1e-12)
    assert record["cond"] == pytest.approx(record["cond_support"], rel=1e-12)


@pytest.mark.parametrize(
    ("layer", "shape", "dim"),
    [
        (nn.Linear(5, 3), (4, 7, 5), -1),
        (nn.LayerNorm(5), (4, 7, 5), -1),
        (nn.MultiheadAttention(5, 1, batch_first=True), (4, 7, 5), -1),
        (nn.Conv1d(5, 3, 1), (4, 5, 7), 1),
        (nn.BatchNorm1d(5), (30, 5), 1),
        (nn.ReLU(inplace=True), (4, 5, 7), 1),  # measured before it overwrites its input
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_where_the_channels_of_a_named_layer_are(layer, shape, dim):
    x = (noise(*shape, dtype=torch.float64).movedim(dim, -1) * torch.arange(1, 6)).movedim(-1, dim)
    model = nn.ModuleDict({"layer": layer.double()})
    inputs = [x.clone()] * (3 if isinstance(layer, nn.MultiheadAttention) else 1)
    with ConditionMonitor(model, layers="layer") as monitor:
        model["layer"](*inputs)
    truth = spectrum(covariance(x.movedim(dim, 0).flatten(1)))
    assert monitor.history()[0]["cond"] == pytest.approx(truth.cond.item())


def test_watching_a_layer_changes_nothing():
    def results(watched):
        torch.manual_seed(0)
        model = plain()
        monitor = ConditionMonitor(model, layers=["1", "2"]) if watched else None
        y = model(noise(4, 3, 9, 9))
        y.square().sum().backward()
        assert monitor is None or len(monitor.history()) == 2
        return [y, *(parameter.grad for parameter in model.parameters()), *model.buffers()]

    assert all(torch.equal(one, other) for one, other in zip(results(True), results(False), strict=True))


def test_one_cut_for_all_solvers():
    options = [
        {},
        {"rtol": 0.0, "eps": 1e-2},
        {"solver": "newton_schulz", "eps": 1e-2},
        {"solver": "svd", "rtol": 1e-2},
    ]
    x = plain()[0](noise(8, 3, 9, 9)).detach()
    x = torch.cat([x, noise(8, 8, 7, 7) * 1e-5], 1)  # a direction that a layer's own cut keeps or drops
    seen = []
    for option in options:
        model = nn.Sequential(DecorrelatedBatchNorm2d(72, **option))
        with ConditionMonitor(model) as monitor:
            model(x)
        seen.append((monitor.history()[0]["rank"], monitor.history()[0]["cond_support"]))
    assert {rank for rank, _ in seen} == {27}
    assert max(cond for _, cond in seen) == pytest.approx(min(cond for _, cond in seen), rel=1e-2)


def test_another_cut():
    model = nn.Sequential(nn.BatchNorm1d(3))
    x = torch.cat([noise(50, 1), 0.1 * noise(50, 1, seed=2), 0.01 * noise(50, 1, seed=3)], 1)
    for rtol, rank in ((None, 3), (1e-3, 2), (0.5, 1)):
        with ConditionMonitor(model, layers=["0"], rtol=rtol) as monitor:
            model(x)
        assert monitor.history()[0]["rank"] == rank


def test_eval_forwards_are_recorded_where_asked_for():
    model, x = network().double(), noise(4, 3, 9, 9, dtype=torch.float64)
    with ConditionMonitor(model, evaluation=True) as monitor:
        model(x)
        eigenvalues = model[1].last_eigenvalues
        for _ in range(2):
            model.eval()(x)
        assert model[1].last_eigenvalues is eigenvalues  # those of the last training batch
        model.train()(x)
    records = monitor.history()
    assert [(r["step"], r["mode"]) for r in records if r["layer"] == "1"] == [
        (0, "train"), (1, "eval"), (1, "eval"), (1, "train")
    ]  # fmt: skip
    first, second = (r for r in records[:4] if r["layer"] == "1")
    for name in ("cond_support", "cond_eps", "rank"):
        assert first[name] == pytest.approx(second[name], rel=1e-6)
    assert monitor.latest()["3"]["mode"] == "train"
    writer = Recorder()
    monitor.log(writer, 0)
    assert {tag.rpartition("/")[0] for tag, _ in writer.scalars} == {
        "condition/1", "condition/3", "condition/eval/1", "condition/eval/3"
    }  # fmt: skip


def test_many_records_are_those_of_single_ones(monkeypatch):
    """They are reduced many at a time; layers of several dtypes, shapes and solvers are among them."""

    def records(largest_buffer):
        monkeypatch.setattr(orthocond.monitor, "_LARGEST_BUFFER", largest_buffer)
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 6, 1),
            DecorrelatedBatchNorm2d(6, solver="newton_schulz"),
            nn.BatchNorm2d(6),
            CovariancePool2d(),
        )
        with ConditionMonitor(model, layers=["2"], evaluation=True) as monitor:
            for i in range(4):
                model.train(i % 2 == 0)(noise(4 + i, 3, 5, 5, seed=i))
        return monitor.history()

    assert len(records(0)) == 12
    assert records(0) == records(100) == records(10**6)


def test_a_pool_in_eval_mode_is_recorded_by_its_worst_image():
    model, x = nn.Sequential(CovariancePool2d()).double().eval(), noise(4, 3, 9, 9, dtype=torch.float64)
    with ConditionMonitor(model, evaluation=True) as monitor:
        model(x)
    assert monitor.history()[0]["cond"] == pytest.approx(spectrum(covariance(x.flatten(2))).cond.max().item())


@pytest.mark.parametrize("look", ["history", "latest", "drain", "close", "__str__", "_repr_html_", "__exit__"])
def test_only_eval_forwards_are_not_passed_over_in_silence(look):
    model = network().eval()
    monitor = ConditionMonitor(model)
    assert monitor.history() == []  # nothing was called yet
    model(noise(2, 3, 9, 9))
    with pytest.warns(OrthocondWarning, match=r"every forward was in eval mode.*evaluation=True"):
        getattr(monitor, look)(*[None] * 3 * (look == "__exit__"))
    assert monitor.history() == []  # said once


def test_features_that_are_not_finite_do_not_end_the_run():
    model = plain()
    with ConditionMonitor(model, layers=["1"]) as monitor:
        model(torch.full((2, 3, 9, 9), torch.nan))
    (record,) = monitor.history()
    assert math.isnan(record["cond"])
    assert math.isnan(record["cond_support"])
    assert record["rank"] == 0


def test_a_layer_without_features_is_said_to_be_none():
    model = nn.Sequential(nn.Embedding(4, 3))
    with ConditionMonitor(model, layers=["0"]) as monitor:
        with pytest.warns(OrthocondWarning, match=r"can't watch '0' \(Embedding\): its input is torch.int64 \(2, 2\)"):
            model(torch.ones(2, 2, dtype=torch.long))
        model(torch.ones(2, 2, dtype=torch.long))
    assert monitor.history() == []


@pytest.mark.parametrize("model", [None, "resnet18", torch.ones(2, 2)], ids=["None", "str", "tensor"])
def test_what_is_no_model_is_said_to_be_none(model):
    with pytest.raises(ArgumentError, match=r"ConditionMonitor expected a model \(torch.nn.Module\), got"):
        ConditionMonitor(model)


def test_the_monitors_own_decompositions_are_not_the_layers_failures(monkeypatch):
    model = nn.Sequential(nn.BatchNorm2d(3), DecorrelatedBatchNorm2d(3, solver="newton_schulz"))
    original, calls = torch.linalg.eigh, []

    def sometimes(A):
        calls.append(None)
        if len(calls) % 2:
            raise torch.linalg.LinAlgError("no")
        return original(A)

    monkeypatch.setattr(torch.linalg, "eigh", sometimes)
    with ConditionMonitor(model, layers=["0"]) as monitor:
        model(noise(4, 3, 9, 9))
    assert calls
    assert [record["failures"] for record in monitor.history()] == [0, 0]


def test_names_of_wrapped_models():
    model = plain()
    model[1] = torch.compile(model[1], backend="eager")
    for name in ("1", "1._orig_mod", "module.1"):
        with ConditionMonitor(torch.compile(model, backend="eager"), layers=[name]) as monitor:
            assert list(monitor._layers) == ["1"]


def test_table():
    model = network()
    monitor = ConditionMonitor(model, layers=["2"], evaluation=True)
    assert "no records yet" in str(monitor)
    assert "no records yet" in monitor._repr_html_()
    for _ in range(3):
        model(noise(2, 3, 9, 9))
    model.eval()(noise(2, 3, 9, 9))
    monitor.drain()  # the table knows of them nevertheless
    head, *rows = str(monitor).splitlines()
    assert head.split()[:4] == ["layer", "mode", "records", "last"]
    assert [row.split()[:4] for row in rows] == [
        [layer, mode, records, step]
        for mode, records, step in (("train", "3", "2"), ("eval", "1", "3"))
        for layer in ("1", "2", "3")
    ]
    assert monitor._repr_html_().count("<tr>") == 7
    assert "ConditionMonitor(layers=['1', '3', '2']" in repr(monitor)


def test_plot():
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="matplotlib is optional")
    model = nn.Sequential(nn.BatchNorm1d(3))
    monitor = ConditionMonitor(model, layers=["0"], evaluation=True)
    model(noise(9, 3))
    model(torch.ones(9, 3))
    model.eval()(noise(9, 3))
    axes = pyplot.figure().add_subplot()
    assert monitor.plot(axes, number="cond") is axes
    (train, evaluated) = axes.get_lines()
    assert list(train.get_xdata()) == [0, 1]
    assert list(evaluated.get_xdata()) == [2]
    assert axes.get_yscale() == "log"
    assert monitor.plot(number="rank").get_yscale() == "linear"
    with pytest.raises(ArgumentError, match=r"unknown number 'conds'.*Did you mean 'cond'"):
        monitor.plot(number="conds")
    pyplot.close("all")


def test_plot_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        ConditionMonitor(network()).plot()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ConditionMonitor(network(), every=0), "every >= 1, got 0"),
        (lambda: ConditionMonitor(network(), rtol=-1.0), "rtol >= 0, got rtol=-1.0"),
        (lambda: ConditionMonitor(nn.Sequential(nn.Linear(3, 3)), layers=["00"]), "unknown layer '00'"),
        (lambda: ConditionMonitor(net := network(), layers=[net[1]]), "expected dotted names, got .*layers=\\['1'\\]"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()


class OwnWhitening(nn.Module):
    """Calls functions of the library in its own code, one of them twice."""

    def forward(self, x):
        P = orthocond.linalg.covariance(x, dim=0)
        root = orthocond.linalg.matrix_inv_sqrth(P, eps=1e-3)
        return x @ root @ orthocond.linalg.matrix_inv_sqrth(P + torch.eye(len(P)), solver="newton_schulz")


def own_network():
    return nn.Sequential(nn.Linear(4, 3), nn.Sequential(OwnWhitening(), nn.Linear(3, 2)))


def test_calls_in_the_code_of_modules_are_recorded():
    model, x = own_network(), noise(50, 4)
    with ConditionMonitor(model, every=2) as monitor:
        for _ in range(3):
            model(x).sum().backward()
        OwnWhitening()(x)  # of no model that is watched
    first, second = "1.0:matrix_inv_sqrth", "1.0:matrix_inv_sqrth (2)"
    assert [(r["step"], r["layer"], r["mode"]) for r in monitor.history()] == [
        (step, layer, "train") for step in (0, 2) for layer in (first, second)
    ]
    P = orthocond.linalg.covariance(model[0](x).detach(), dim=0)
    for name, A, eps in ((first, P, 1e-3), (second, P + torch.eye(3), 0.0)):
        expected, record = orthocond.linalg.spectrum(A, eps=eps), monitor.latest()[name]
        assert record["cond"] == pytest.approx(expected.cond.item(), rel=1e-4)
        assert record["cond_eps"] == pytest.approx(expected.cond_eps.item(), rel=1e-4)
        assert record["rank"] == 3
    assert first in str(monitor)
    model(x)
    assert len(monitor.history()) == 4


def test_calls_in_eval_mode_and_in_a_checkpoint():
    from torch.utils.checkpoint import checkpoint

    model, x = own_network(), noise(50, 4).requires_grad_()
    with ConditionMonitor(model, evaluation=True) as monitor:
        checkpoint(model, x, use_reentrant=False).sum().backward()
        model.eval()(x)
    assert [r["mode"] for r in monitor.history()] == ["train"] * 2 + ["eval"] * 2


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_forward_that_a_checkpoint_repeats_is_recorded_once(use_reentrant):
    from torch.utils.checkpoint import checkpoint

    model = nn.Sequential(nn.Conv2d(3, 4, 1), DecorrelatedBatchNorm2d(4))
    with ConditionMonitor(model) as monitor:
        for _ in range(3):
            x = noise(8, 3, 5, 5).requires_grad_()
            checkpoint(model, x, use_reentrant=use_reentrant).square().sum().backward()
    assert [record["step"] for record in monitor.history()] == [0, 1, 2]


def test_forwards_of_torch_func_are_not_recorded():
    model, x = nn.Sequential(CovariancePool2d()), noise(2, 3, 4, 4)
    with ConditionMonitor(model) as monitor:
        model(x)
        torch.func.vmap(model)(x[None])
        model(x)
    assert [record["step"] for record in monitor.history()] == [0, 1]


def test_a_forward_that_raised_is_not_recorded_by_the_next():
    model = nn.Sequential(CovariancePool2d())
    with ConditionMonitor(model) as monitor:
        model(noise(2, 3, 4, 4))
        with pytest.raises(NonFiniteError):
            model(torch.full((2, 3, 4, 4), torch.nan))
        torch.func.vmap(model)(noise(1, 2, 3, 4, 4))
    assert [record["step"] for record in monitor.history()] == [0]


def test_a_monitor_that_is_forgotten_stops():
    import gc

    from orthocond._core import observing

    model = own_network()
    monitor = ConditionMonitor(model)
    (own,) = (reference for reference in observing._observers if reference() == monitor._called)
    del monitor, model
    gc.collect()
    assert own() is None
    own_network()(noise(50, 4))
    assert own not in observing._observers


def test_a_model_with_nothing_to_watch_is_told_so():
    with (
        pytest.warns(OrthocondWarning, match=r"recorded nothing.*layers=\['bn1'\].*convert_batchnorm"),
        ConditionMonitor(nn.Linear(3, 3)) as monitor,
    ):
        pass
    assert monitor.history() == []


def test_a_meta_layer_that_is_named_is_measured_in_float64():
    """The floor of the paper's code is 2.2e-16, so what counts is the largest eigenvalue over it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 16, 1), CovariancePool2d())
    x = torch.randn(4, 2, 6, 6)
    own, named = ConditionMonitor(model), ConditionMonitor(model, layers=["1"])
    model(x)
    samples = model[0](x).detach().double().flatten(2)
    largest = torch.linalg.eigvalsh(orthocond.linalg.covariance(samples)).amax(-1)
    assert own.history()[0]["rank"] == named.history()[0]["rank"] == 2
    floor = named.history()[0]["cond_floor"]
    assert floor == pytest.approx(float(largest.max() / torch.finfo(torch.float64).eps), rel=1e-3)


def test_one_eps_for_all_layers():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    monitor = ConditionMonitor(model, layers=["1"], eps=0.5)
    x = torch.randn(8, 3, 5, 5)
    model(x)
    features = model[0](x).detach().double().movedim(1, 0).flatten(1)
    eigenvalues = torch.linalg.eigvalsh(orthocond.linalg.covariance(features))
    expected = (eigenvalues[-1] + 0.5) / (eigenvalues[0] + 0.5)
    assert monitor.history()[0]["cond_eps"] == pytest.approx(float(expected), rel=1e-6)
    with pytest.raises(ArgumentError, match="eps"):
        ConditionMonitor(model, layers=["1"], eps=-1.0)


def test_a_resumed_run_records_the_forwards_that_it_would_have():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    monitor = ConditionMonitor(model, 3, layers=["1"])
    monitor.resume(7)
    for _ in range(6):
        model(torch.randn(2, 3, 5, 5))
    assert [record["step"] for record in monitor.history()] == [9, 12]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_step_without_a_certificate_has_rank_0():
    model = nn.Sequential(DecorrelatedBatchNorm1d(8, solver="products"))
    x = torch.randn(40, 8, generator=torch.Generator().manual_seed(0)) * torch.logspace(0, -3, 8)
    with ConditionMonitor(model) as monitor:
        assert torch.compile(model, backend="eager")(x).isnan().all()
    (record,) = monitor.history()
    assert record["rank"] == 0
    assert math.isnan(record["cond_support"])
