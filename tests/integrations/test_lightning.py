"""Lightning's real Trainer with the callbacks."""

import csv

import lightning
import pytest
import torch
from torch import nn

import orthocond
from orthocond.integrations.lightning import ConditionCallback, TreatmentCallback
from orthocond.nn import DecorrelatedBatchNorm1d, is_orthogonal

from cases import noise

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers:UserWarning",
    "ignore:.*num_workers:UserWarning",
    "ignore:.*LeafSpec:FutureWarning",
    "ignore:.*checkpoint directory .* exists:UserWarning",
    "ignore::DeprecationWarning",
)
SPECS = ["nog+ow+olr", "ol+nog", "nog+gauge", "sn", "olr(steps=4)", "none"]


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 4), DecorrelatedBatchNorm1d(4), nn.Linear(4, 1))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, _):
        return (self.net(batch[0]) - batch[0][:, :1].square()).square().mean()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def loader():
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(noise(96, 6)), batch_size=32)


def trainer(folder, callbacks, epochs=2, logger=False, **options):
    return lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=epochs, logger=logger, callbacks=callbacks, default_root_dir=folder,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        log_every_n_steps=2, **options,
    )  # fmt: skip


@pytest.mark.parametrize("spec", SPECS)
def test_fit_a_second_fit_and_resume_to_the_bit(spec, tmp_path):
    whole, callback = Module(), TreatmentCallback("net.0", spec)
    straight = trainer(tmp_path, [callback])
    straight.fit(whole, loader())
    assert callback.treatment.last is not None or spec in ("sn", "none")

    first = trainer(tmp_path, [TreatmentCallback("net.0", spec)], epochs=1)
    first.fit(Module(), loader())
    first.save_checkpoint(tmp_path / "half.ckpt")
    resumed, again = Module(), TreatmentCallback("net.0", spec)
    trainer(tmp_path, [again]).fit(resumed, loader(), ckpt_path=tmp_path / "half.ckpt")
    for (name, a), b in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert again.treatment.state_dict().keys() == callback.treatment.state_dict().keys()

    before = whole.net[2].weight.detach().clone()
    trainer(tmp_path, [callback], epochs=1).fit(whole, loader())  # with another trainer and another optimizer
    assert not torch.equal(whole.net[2].weight, before)
    if "ow" in spec:
        assert is_orthogonal(whole.net[0].weight, atol=1e-5)


@pytest.mark.parametrize("accumulated", [1, 3])
def test_the_penalty_is_that_of_a_loop_which_adds_it_to_the_loss(accumulated, tmp_path):
    module = Module()
    callback = TreatmentCallback("net.0", "ol(penalty_weight=0.7)")
    trainer(tmp_path, [callback], epochs=1, accumulate_grad_batches=accumulated).fit(module, loader())
    other = Module()
    treatment = orthocond.treat(other, "net.0", "ol(penalty_weight=0.7)")
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    for i, batch in enumerate(loader(), 1):
        ((other.training_step(batch, 0) + treatment.penalty()) / accumulated).backward()
        if i % accumulated == 0:
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_the_logger_gets_condition_numbers_and_what_the_treatment_did(tmp_path):
    logger = lightning.pytorch.loggers.CSVLogger(tmp_path, name="", version="")
    callbacks = [TreatmentCallback("net.0", "ol+nog"), ConditionCallback(layers=["net.2"])]
    trainer(tmp_path, callbacks, logger=logger).fit(Module(), loader())
    logger.save()
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    assert {"condition/net.1/rank", "condition/net.2/cond_support", "treatment/net.0/learning_rate",
            "treatment/net.0/gradient_range_max", "treatment/net.0/penalty"} <= set(rows[0])  # fmt: skip
    assert {row["condition/net.1/rank"] for row in rows} == {"4.0", ""}
    assert [int(row["step"]) for row in rows] == sorted([1, 3, 5] * 2)
    assert "net.1" in str(callbacks[1].monitor)


def test_weights_and_biases_gets_them_too(wandb, tmp_path):
    logger = lightning.pytorch.loggers.WandbLogger(save_dir=tmp_path, offline=True)
    callbacks = [TreatmentCallback("net.0", "ol+nog"), ConditionCallback(layers=["net.2"])]
    trainer(tmp_path, callbacks, logger=logger).fit(Module(), loader())
    summary = dict(logger.experiment.summary)
    assert {"condition/net.1/cond", "condition/net.2/cond_support", "treatment/net.0/penalty"} <= set(summary)
    assert (summary["condition/net.1/rank"], summary["trainer/global_step"]) == (4, 5)


def test_accumulated_batches_log_once_for_each_step(tmp_path):
    logger = lightning.pytorch.loggers.CSVLogger(tmp_path, name="", version="")
    logged = []
    log_metrics = logger.log_metrics
    logger.log_metrics = lambda metrics, step: logged.append((step, min(metrics))) or log_metrics(metrics, step)
    callbacks = [TreatmentCallback("net.0", "ol"), ConditionCallback()]
    trainer(tmp_path, callbacks, epochs=4, logger=logger, accumulate_grad_batches=3).fit(Module(), loader())
    ours = [(step, name.partition("/")[0]) for step, name in logged if "/" in name]
    assert ours == [(1, "treatment"), (1, "condition"), (3, "treatment"), (3, "condition")]


def test_the_layer_is_found_from_the_example_input(tmp_path):
    module = Module()
    module.example_input_array = noise(8, 6)
    callback = TreatmentCallback("auto", "nog+gauge")
    trainer(tmp_path, [callback], epochs=1).fit(module, loader())
    assert callback.treatment.name == "net.0"


class Compiled(Module):
    def __init__(self):
        super().__init__()
        self.net = torch.compile(self.net, backend="aot_eager")


class CompiledInPlace(Module):
    def __init__(self):
        super().__init__()
        self.net.compile(backend="aot_eager")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of torch.compile's own
@pytest.mark.parametrize("spec", ["nog+ow+olr", "ol+nog+gauge"])
@pytest.mark.parametrize("make", [lambda: torch.compile(Module(), backend="aot_eager"), Compiled, CompiledInPlace],
                         ids=["module", "part", "in place"])  # fmt: skip
def test_compiled_modules_train_like_others(make, spec, tmp_path):
    torch.compiler.reset()
    runs = []
    for module in (Module(), make()):
        callbacks = [TreatmentCallback("net.0", spec), ConditionCallback(layers=["net.2"])]
        for epochs in (1, 2):  # the second fit finds compiled code
            trainer(tmp_path, callbacks, epochs=epochs).fit(module, loader())
        runs.append((callbacks[0].treatment.last, callbacks[1].monitor.history(), list(module.parameters())))
    (plain, records, weights), (last, history, others) = runs
    assert list(last) == list(plain)
    assert [(r["step"], r["layer"], r["rank"]) for r in history] == [
        (r["step"], r["layer"], r["rank"]) for r in records
    ]
    assert len(records) == 2 * 6
    for a, b in zip(weights, others, strict=True):
        assert torch.allclose(a, b, atol=1e-3)


def test_a_checkpoint_of_another_treatment_is_refused(tmp_path):
    first = trainer(tmp_path, [TreatmentCallback("net.0", "nog")], epochs=1)
    first.fit(Module(), loader())
    first.save_checkpoint(tmp_path / "nog.ckpt")
    with pytest.raises(orthocond.errors.ArgumentError, match=r"the state is that of nog.* on 'net.0', not of olr"):
        trainer(tmp_path, [TreatmentCallback("net.0", "olr")]).fit(Module(), loader(), ckpt_path=tmp_path / "nog.ckpt")
