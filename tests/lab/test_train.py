"""Training: every method takes real steps, runs resume bit for bit, and what goes wrong is said."""

import json
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from orthocond.errors import ArgumentError
from orthocond.lab.config import changed
from orthocond.lab.data import load_data
from orthocond.lab.display import Silent
from orthocond.lab.methods import ALL, method_list
from orthocond.lab.network import network
from orthocond.lab.presets import preset
from orthocond.lab.records import read_records
from orthocond.lab.report import read_report
from orthocond.lab.runs import DivergedError, RunError, read_config, read_status
from orthocond.lab.state import learning_rate_factor
from orthocond.lab.train import train

from killing import differences, finish, killed_and_resumed, start


def digits(**settings):
    return changed(preset("dbn-digits"), {"steps": 24, "threads": 1, "accelerator": "cpu", **settings})


@pytest.fixture(autouse=True)
def own_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("ORTHOCOND_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """An image folder of two classes, and the same as parquet."""
    folder = tmp_path_factory.mktemp("images")
    draw = np.random.default_rng(0)
    for split in ("train", "val"):
        for n in range(8):
            place = folder / split / f"class{n % 2}"
            place.mkdir(parents=True, exist_ok=True)
            pixels = draw.integers(0, 256, (32, 32, 3), dtype=np.uint8) // (1 + n % 2)
            Image.fromarray(pixels).save(place / f"{n}.png")
    return folder


@pytest.mark.parametrize("method", ["bn", "svd"])
def test_a_rate_of_the_pre_svd_layer_where_there_is_none_or_several(tmp_path, method):
    config = digits(steps=2, method=method, model="resnet-small", meta="gcp", pre_svd_rate=0.01, val_images=20)
    assert train(config, tmp_path / "run").state == "finished"
    last = read_records(tmp_path / "run", "step")[-1]
    assert (last["pre_svd_lr"] < last["lr"]) == (method == "svd")


@pytest.mark.parametrize("settings", [{}, {"optimizer": "adamw", "learning_rate": 1e-3}, {"meta": "gcp"}])
@pytest.mark.parametrize("method", ["svd", "svd+nog+ow"])
def test_the_pre_svd_layer_has_a_rate_of_its_own(tmp_path, settings, method):
    config = digits(steps=6, method=method, **settings)
    names = ("usual", "same", "half")
    for name, rate in zip(names, (None, config.learning_rate, config.learning_rate / 2), strict=True):
        train(changed(config, {"pre_svd_rate": rate}), tmp_path / name)
    usual, same, half = (read_records(tmp_path / name, "step") for name in names)
    assert [record["loss"] for record in same] == [record["loss"] for record in usual]
    assert [record["pre_svd_lr"] for record in half] == pytest.approx([record["lr"] / 2 for record in usual])
    assert [record["lr"] for record in half] == [record["lr"] for record in usual]
    losses = [[record["loss"] for record in each] for each in (usual, half)]
    assert losses[0][0] == losses[1][0]
    assert losses[0][-1] != losses[1][-1]


def test_a_run_learns_and_writes_everything_down(tmp_path):
    outcome = train(digits(steps=110, method="svd+nog+ow+olr"), tmp_path / "run")
    assert outcome.state == "finished"
    assert outcome.val_error < 15
    steps, epochs = (read_records(tmp_path / "run", kind) for kind in ("step", "epoch"))
    assert [record["step"] for record in steps] == list(range(1, 111))
    assert [record["epoch"] for record in epochs] == [1, 2, 3, 4, 5]
    assert epochs[-1]["val_error"] == outcome.val_error
    assert epochs[-1]["val_error5"] <= epochs[-1]["val_error"]
    for record in steps:
        assert 1 <= record["cond_support"] <= record["cond"]
        assert (record["rank"], record["failures"]) == (8, 0)
        assert record["pre_svd_lr"] == (record["eta"] if record["switched"] else record["lr"])
    assert any(record["switched"] for record in steps)
    times = [json.loads(line) for line in (tmp_path / "run" / "times.jsonl").read_text().splitlines()]
    assert sum(record["steps"] for record in times) == 110
    assert all(record["forward"] + record["backward"] + record["update"] < record["seconds"] for record in times)
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    assert {"step/loss", "step/cond_support", "epoch/val_error"} <= set(events.Tags()["scalars"])
    assert events.Scalars("epoch/val_error")[-1].value == pytest.approx(outcome.val_error)


@pytest.mark.parametrize("method", ALL)
@pytest.mark.parametrize("name", ["dbn-digits", "gcp-digits"])
def test_every_method_takes_steps_on_the_digits(tmp_path, name, method):
    if "gauge" in method and name == "gcp-digits":
        with pytest.raises(ArgumentError, match="gauge needs"):
            train(changed(preset(name), {"method": method}), tmp_path / "run")
        return
    settings = {"method": method, "steps": 3, "val_images": 20, "accelerator": "cpu"}
    assert train(changed(preset(name), settings), tmp_path / "run").step == 3
    records = read_records(tmp_path / "run", "step")
    is_watched = method != "bn" or name == "dbn-digits"  # average pooling has no covariance
    assert all((record["cond"] is not None) == is_watched for record in records)


def test_adamw_takes_its_own_steps_with_treatments(tmp_path):
    learned = train(digits(steps=110, method="svd+nog+olr+gauge", **ADAMW), tmp_path / "adamw")
    assert learned.val_error < 40
    state = torch.load(tmp_path / "adamw" / "checkpoint.pt", weights_only=True)["optimizer"]
    assert state["param_groups"][0]["betas"] == (0.9, 0.999)
    assert set(state["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
    assert any(record["gauged"] for record in read_records(tmp_path / "adamw", "step"))
    with pytest.raises(ArgumentError, match="first beta of adamw"):
        digits(momentum=1.0, optimizer="adamw")
    with pytest.raises(ArgumentError, match="optimizer"):
        digits(optimizer="adagrad")


def test_products_record_their_fall_backs_and_that_their_numbers_are_estimates(tmp_path):
    outcome = train(digits(steps=30, method="products+gauge", monitor_exact=10), tmp_path / "run")
    steps = read_records(tmp_path / "run", "step")
    assert [record["step"] for record in steps if not record["estimated"]] == [1, 11, 21]
    assert {type(record["cond_support"]) for record in steps} == {float}
    assert all(record["cond_floor"] is None for record in steps if record["estimated"])
    # Whatever is not decomposed lies inside the solver's bounds, and what gauge has to change doesn't.
    assert 0 < sum(record["fallbacks"] for record in steps) < 30
    for record in steps:
        assert record["fallbacks"] or record["cond_before"] <= 16.0
        assert record["fallbacks"] in (0, 1)
    train(digits(steps=3), tmp_path / "other")
    assert all("fallbacks" not in record for record in read_records(tmp_path / "other", "step"))
    assert {row.method for section in read_report([tmp_path]).sections for row in section.rows} == {
        "products+gauge",
        "svd",
    }
    assert outcome.state == "finished"


@pytest.mark.parametrize("method", method_list("all", with_gauge=False))
def test_every_method_takes_steps_on_the_paper_s_networks(tmp_path, images, method):
    """ResNet-50 with the CIFAR stem, and ResNet-18 with covariance pooling; small batches, of images of our own."""
    common = {"data": str(images), "num_classes": 2, "method": method, "workers": 0, "val_images": 2}
    dbn = {**common, "batch_size": 4, "epochs": 1, "steps": 1, "accelerator": "cpu"}
    assert train(changed(preset("dbn-cifar10"), dbn), tmp_path / "dbn").step == 1
    gcp = {**dbn, "epochs": 2, "steps": 2, "reduction": 64}
    assert train(changed(preset("gcp-imagenet"), gcp), tmp_path / "gcp").step == 2


ADAMW = {"optimizer": "adamw", "learning_rate": 1e-3}


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        *((method, {}) for method in ("svd+sn+nog", "svd+nog+ow+olr", "svd+nog+gauge", "newton_schulz", "bn")),
        *((method, ADAMW) for method in ("svd+nog+olr+gauge", "svd+nog+ow+olr", "products+gauge")),
    ],
)
def test_an_interrupted_run_goes_on_bit_for_bit(tmp_path, method, settings):
    config = digits(steps=50, method=method, checkpoint_every=9, **settings)
    train(config, tmp_path / "whole")

    class Interrupting(Silent):
        def step(self, record):
            if record["step"] in (10, 27):
                signal.raise_signal(signal.SIGTERM)

    for expected in (10, 27):
        outcome = train(config, tmp_path / "parts", resume=True, display=Interrupting())
        assert (outcome.state, outcome.step) == ("interrupted", expected)
        assert read_status(tmp_path / "parts")["state"] == "interrupted"
    assert train(config, tmp_path / "parts", resume=True).state == "finished"
    assert differences(tmp_path / "whole", tmp_path / "parts") == []


@pytest.mark.timeout(200)
def test_a_killed_run_goes_on_bit_for_bit(tmp_path):
    finish(tmp_path / "whole")
    sizes = killed_and_resumed(tmp_path / "broken", kills=4, seed=1)
    assert max(sizes) > 0
    assert differences(tmp_path / "whole", tmp_path / "broken") == []


def test_a_damaged_checkpoint_costs_no_more_than_the_steps_since_the_one_before(tmp_path):
    config = digits(steps=50)
    train(config, tmp_path / "whole")

    class Interrupting(Silent):
        notes = ""

        def step(self, record):
            if record["step"] == 30:
                signal.raise_signal(signal.SIGTERM)

        def note(self, text):
            self.notes += text

    train(config, tmp_path / "parts", display=Interrupting())
    (tmp_path / "parts" / "checkpoint.pt").write_bytes(b"damaged")
    display = Interrupting()
    display.step = lambda record: None
    train(config, tmp_path / "parts", resume=True, display=display)
    assert "checkpoint.pt is damaged and is not used; continuing from step 22" in display.notes
    assert differences(tmp_path / "whole", tmp_path / "parts") == []


def test_a_finished_run_stays_as_it_is(tmp_path):
    train(digits(), tmp_path / "run")
    before = {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()}
    outcome = train(digits(), tmp_path / "run", resume=True)
    assert (outcome.state, outcome.step) == ("finished", 24)
    assert {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()} == before


def test_a_folder_with_a_run_is_refused(tmp_path):
    train(digits(), tmp_path / "run")
    with pytest.raises(RunError, match="add --resume, or choose another folder"):
        train(digits(), tmp_path / "run")
    with pytest.raises(RunError, match=r"begun with learning_rate 0\.1, not 0\.2"):
        train(digits(learning_rate=0.2), tmp_path / "run", resume=True)
    train(digits(checkpoint_every=3, workers=0), tmp_path / "run", resume=True)  # about the place, not the experiment


def test_a_loss_that_is_nan_stops_the_run(tmp_path):
    config = digits(learning_rate=1e12, momentum=0.0, checkpoint_every=1, method="bn")
    with pytest.raises(DivergedError, match=r"stopped at step \d+: .*Try a lower --learning-rate"):
        train(config, tmp_path / "bn")
    status = read_status(tmp_path / "bn")
    assert status["state"] == "failed"
    assert "training stopped at step" in status["error"]


def test_nan_names_the_step_the_condition_number_and_the_last_good_checkpoint(tmp_path, monkeypatch):
    from orthocond.lab import train as module

    calls = []

    def loss(logits, y):
        calls.append(1)
        value = torch.nn.functional.cross_entropy(logits, y)
        return value * float("nan") if len(calls) == 8 else value

    monkeypatch.setattr(module, "_loss", loss)
    with pytest.raises(
        DivergedError, match=r"at step 8: the loss became nan at condition number [\d.]+; the last good"
    ):
        train(digits(checkpoint_every=5), tmp_path / "run")
    assert "checkpoint is that of step 5" in read_status(tmp_path / "run")["error"]
    assert torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["step"] == 5


@pytest.mark.timeout(200)
def test_two_processes_have_the_losses_of_one(tmp_path):
    """In float64 (but Fabric returns float32 logits): in float32 rounding grows to 1e-2 within fifty steps of NOG."""
    settings = ["--epochs", "2", "--precision", "64-true"]
    for name, devices in (("one", "1"), ("two", "2")):
        process = start(tmp_path / name, *settings, "--devices", devices)
        errors = process.communicate(timeout=100)[1]
        assert process.returncode == 0, errors
    one, two = (read_records(tmp_path / name, "step") for name in ("one", "two"))
    assert len(one) == len(two) == 44
    for a, b in zip(one, two, strict=True):
        assert abs(a["loss"] - b["loss"]) < 1e-6
        assert abs(a["cond"] - b["cond"]) < 1e-6 * a["cond"]
    (a, *_), (b, *_) = (read_records(tmp_path / name, "epoch") for name in ("one", "two"))
    assert a["val_error"] == b["val_error"]
    assert abs(a["train_loss"] - b["train_loss"]) < 1e-6


@pytest.mark.timeout(200)
def test_two_processes_go_on_bit_for_bit(tmp_path):
    settings = ["--devices", "2"]
    for name in ("whole", "parts"):
        process = start(tmp_path / name, *settings)
        metrics = tmp_path / name / "metrics.jsonl"
        if name == "parts":
            while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
                time.sleep(0.002)
            process.send_signal(signal.SIGINT)
            errors = process.communicate(timeout=100)[1]
            assert process.returncode == 130, errors
            process = start(tmp_path / name, *settings)
        errors = process.communicate(timeout=100)[1]
        assert process.returncode == 0, errors
    assert differences(tmp_path / "whole", tmp_path / "parts") == []


def test_streamed_data_goes_on_bit_for_bit(tmp_path, images):
    settings = {"data": str(images), "num_classes": 2, "workers": 0, "resize": 16, "crop": 12, "batch_size": 2}
    config = changed(preset("dbn-cifar10-small"), {**settings, "epochs": 3, "accelerator": "cpu"})
    train(config, tmp_path / "whole")

    class Interrupting(Silent):
        def step(self, record):
            if record["step"] == 6:
                signal.raise_signal(signal.SIGTERM)

    config = changed(config, {"checkpoint_every": 3})
    assert train(config, tmp_path / "parts", display=Interrupting()).state == "interrupted"
    train(config, tmp_path / "parts", resume=True)
    assert set(differences(tmp_path / "whole", tmp_path / "parts")) <= {".config.checkpoint_every"}


def test_what_is_refused_leaves_no_run_behind(tmp_path):
    with pytest.raises(ArgumentError, match="gauge needs"):
        train(changed(preset("gcp-digits"), {"method": "svd+gauge"}), tmp_path / "run")
    train(changed(preset("gcp-digits"), {"steps": 2, "val_images": 10}), tmp_path / "run")


def test_weights_that_are_not_finite_stop_it_before_validation(tmp_path):
    config = changed(preset("gcp-digits"), {"steps": 1, "learning_rate": 1e38, "accelerator": "cpu"})
    with pytest.raises(DivergedError, match="training stopped at step 1"):
        train(config, tmp_path / "run")


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path):
    process = start(tmp_path / "run", "--epochs", "1000")
    metrics = tmp_path / "run" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 130, errors
    status = read_status(tmp_path / "run")
    assert status["state"] == "interrupted"
    assert torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["step"] == status["step"]


def test_the_rate_falls_as_the_paper_says():
    factor = learning_rate_factor(preset("dbn-cifar10"), 390, 350 * 390)
    rates = [0.1 * factor(epoch * 390) for epoch in (0, 99, 100, 199, 200, 299, 300, 349)]
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001, 0.0001, 0.0001])
    assert factor(100 * 390 - 1) == 1
    linear = learning_rate_factor(preset("dbn-digits"), 22, 100)
    assert (linear(0), linear(50), linear(100)) == pytest.approx((1, 0.505, 0.01))


half = partial(pytest.param, marks=pytest.mark.half_products)


@pytest.mark.parametrize("precision", [half("bf16-mixed"), half("bf16-true"), "64-true"])
def test_precisions(tmp_path, precision):
    train(digits(steps=3, precision=precision, method="svd+nog"), tmp_path / "run")
    assert all(np.isfinite(record["loss"]) for record in read_records(tmp_path / "run", "step"))


def test_channels_last_takes_the_same_steps(tmp_path):
    settings = {"steps": 6, "precision": "64-true", "method": "svd+nog+ow+olr"}
    for layout in ("false", "true"):
        train(digits(**settings, channels_last=layout), tmp_path / layout)
    losses = [[record["loss"] for record in read_records(tmp_path / layout, "step")] for layout in ("false", "true")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


FAILING = """
import json, os, sys, torch
from pathlib import Path
from orthocond.lab.config import changed
from orthocond.lab.presets import preset
from orthocond.lab.train import train
from orthocond.linalg import solver_failures

rank, calls, svd = int(os.environ.get("LOCAL_RANK", 0)), 0, torch.linalg.svd

def failing(A, *args, **kwargs):
    global calls
    calls += A.shape[-1] > 1  # a layer checks its options with a matrix of one number
    if A.shape[-1] > 1 and calls % (3 + rank) == 0:
        raise torch.linalg.LinAlgError("injected")
    return svd(A, *args, **kwargs)

torch.linalg.svd = failing
out = Path(sys.argv[1])
settings = {"solver": "svd", "steps": 4, "val_images": 8, "batch_size": 8, "devices": "2", "accelerator": "cpu"}
train(changed(preset("gcp-digits"), {**settings, "threads": 1, "monitor": sys.argv[2]}), out / "run")
(out / f"{rank}.json").write_text(json.dumps(sum(solver_failures().values())))
"""


@pytest.mark.timeout(200)
def test_failures_of_all_processes_count_with_those_of_validation(tmp_path):
    (tmp_path / "failing.py").write_text(FAILING)
    command = [sys.executable, str(tmp_path / "failing.py"), str(tmp_path), "none"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    counts = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert min(counts) > 0
    training = sum(record["failures"] for record in read_records(tmp_path / "run", "step"))
    validation = sum(record["failures"] for record in read_records(tmp_path / "run", "epoch"))
    assert min(training, validation) > 0
    assert training + validation == sum(counts)
    (section,) = read_report([tmp_path / "run"]).sections
    assert section.rows[0].failures == sum(counts)


def test_the_condition_number_in_front_of_batch_norm_is_recorded(tmp_path):
    train(digits(method="bn", steps=3, eps=0.01), tmp_path)
    for record in read_records(tmp_path, "step"):
        assert record["rank"] == 8
        assert 1 <= record["cond_eps"] <= record["cond"]


def test_every_fifth_step_is_recorded_also_after_an_interruption(tmp_path):
    config = digits(monitor_every=5, steps=13, monitor="input", monitor_validation=True)
    train(config, tmp_path / "whole")

    class Interrupting(Silent):
        def step(self, record):
            if record["step"] == 10:
                signal.raise_signal(signal.SIGTERM)

    train(config, tmp_path / "parts", display=Interrupting())
    assert train(config, tmp_path / "parts", resume=True).state == "finished"
    assert differences(tmp_path / "whole", tmp_path / "parts") == []
    records = read_records(tmp_path / "parts", "step")
    assert [record["step"] for record in records if record["cond_support"] is not None] == [1, 6, 11]
    (epoch,) = read_records(tmp_path / "parts", "epoch")
    assert epoch["val_cond_floor"] >= epoch["val_cond_support"] >= 1


@pytest.mark.parametrize(
    ("method", "solver"), [("svd", "svd"), ("newton_schulz", "newton_schulz(iterations=7)"), ("bn", None)]
)
def test_solvers_are_chosen_for_the_methods_that_they_fit(method, solver):
    config = digits(method=method, solver="svd,newton_schulz(iterations=7)")
    model, _ = network(config, load_data(config), sync=False)
    assert getattr(model.bn1, "solver", None) == solver


@pytest.mark.parametrize("solver", ["pade", "svd,eigh", "magic", "newton_schulz(steps=3)", "svd("])
def test_solvers_that_fit_no_method_are_refused(solver):
    with pytest.raises(ArgumentError):
        digits(solver=solver)


def test_a_run_of_version_0_1_is_continued_from_its_checkpoint(tmp_path):
    saved, run = Path(__file__).parents[1] / "saved" / "run-0.1", tmp_path / "run"
    shutil.copytree(saved, run)
    (run / "checkpoint.state").rename(run / "checkpoint.pt")  # of step 4 of 5
    status = json.loads((saved / "status.json").read_text())
    (run / "status.json").write_text(json.dumps({**status, "state": "interrupted", "step": 4}))
    config = read_config(run)
    assert (config.method, config.parts) == ("svd+nog+ow+olr", "none")
    outcome = train(config, run, resume=True)
    assert (outcome.state, outcome.step) == ("finished", 5)
    lines = ((folder / "metrics.jsonl").read_text().splitlines() for folder in (saved, run))
    then, now = (list(map(json.loads, each)) for each in lines)
    assert [(record["kind"], record["step"]) for record in now] == [(record["kind"], record["step"]) for record in then]
    assert now[:4] == then[:4]
    for name in ("loss", "lr", "pre_svd_lr", "eta", "cond"):
        assert now[4][name] == pytest.approx(then[4][name], rel=1e-3)


def test_the_condition_number_with_eps_is_that_of_the_method_s_own_eps(tmp_path):
    train(digits(method="svd(eps=0.01, rtol=0)", steps=2, val_images=50), tmp_path)
    record = read_records(tmp_path, "step")[0]
    assert record["cond_eps"] < 0.9 * record["cond"]


def test_eps_as_a_floor_in_a_run(tmp_path):
    found = {}
    for name in ("svd(eps=0.01, rtol=0)", "svd(eps=0.01, rtol=0, clamp=true)"):
        train(digits(method=name, steps=1, val_images=50), tmp_path / name)
        (found[name],) = read_records(tmp_path / name, "step")
    added, raised = found.values()
    assert added["cond"] == raised["cond"] > raised["cond_eps"]
    # With max = eps * raised and min = max / cond: the largest over eps, and (max + eps) / (min + eps).
    ratio = raised["cond_eps"]
    assert added["cond_eps"] == pytest.approx((ratio + 1) / (ratio / raised["cond"] + 1), rel=1e-4)
    assert raised["loss"] != added["loss"]
