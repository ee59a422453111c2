"""The condition monitor."""

import copy
import pickle

import pytest
import torch
from torch import nn

from orthocond import ConditionMonitor
from orthocond.errors import ArgumentError
from orthocond.linalg import covariance, spectrum
from orthocond.nn import CovariancePool2d, DecorrelatedBatchNorm2d

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
    assert all(type(value) in (int, float, str) for record in history for value in record.values())


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
    assert len(writer.scalars) == 10


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


def test_bad_input():
    with pytest.raises(ArgumentError, match="no meta-layer"):
        ConditionMonitor(nn.Linear(3, 3))
    with pytest.raises(ArgumentError, match="every >= 1, got 0"):
        ConditionMonitor(network(), every=0)
