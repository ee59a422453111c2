"""The real Trainer of Transformers with the callbacks."""

import pytest
import torch
import transformers
from torch import nn

import orthocond
from orthocond.integrations.transformers import ConditionCallback, TreatmentCallback
from orthocond.nn import DecorrelatedBatchNorm1d, is_orthogonal

from cases import noise

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
SPECS = ["nog+ow+olr", "ol+nog", "nog+gauge", "sn", "olr(steps=4)", "none"]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 4), DecorrelatedBatchNorm1d(4), nn.Linear(4, 1))

    def forward(self, x, labels=None):  # the trainer asks for it
        return {"loss": (self.net(x) - x[:, :1].square()).square().mean()}


DATA = [{"x": row, "labels": torch.zeros(())} for row in noise(96, 6)]


def trainer(folder, callbacks, steps=6, model=None, **options):
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=32, use_cpu=True, learning_rate=0.1,
        optim="sgd", logging_steps=2, save_strategy="steps", save_steps=3, report_to=options.pop("report_to", "none"),
        disable_tqdm=True, lr_scheduler_type="linear", seed=0, max_grad_norm=0.0, **options,
    )  # fmt: skip
    return transformers.Trainer(
        model=Model() if model is None else model, args=arguments, train_dataset=DATA, callbacks=callbacks
    )


@pytest.mark.parametrize("spec", SPECS)
def test_train_again_and_resume_to_the_bit(spec, tmp_path):
    callback = TreatmentCallback("net.0", spec)
    straight = trainer(tmp_path, [callback])
    straight.train()
    again = TreatmentCallback("net.0", spec)
    resumed = trainer(tmp_path, [again])
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for (name, a), b in zip(straight.model.state_dict().items(), resumed.model.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert str(again.treatment.state_dict()) == str(callback.treatment.state_dict())
    before = straight.model.net[2].weight.detach().clone()
    straight.train()
    assert not torch.equal(straight.model.net[2].weight, before)
    if "ow" in spec:
        assert is_orthogonal(straight.model.net[0].weight, atol=1e-5)


@pytest.mark.parametrize("accumulated", [1, 3])
def test_the_penalty_is_that_of_a_loop_which_adds_it_to_the_loss(accumulated, tmp_path):
    steps = 3 // accumulated
    made = trainer(
        tmp_path,
        [TreatmentCallback("net.0", "ol(penalty_weight=0.7)")],
        steps=steps,
        gradient_accumulation_steps=accumulated,
    )
    batches = [batch["x"] for _, batch in zip(range(3), made.get_train_dataloader(), strict=False)]
    made.train()
    other = Model()
    treatment = orthocond.treat(other, "net.0", "ol(penalty_weight=0.7)")
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    for i, x in enumerate(batches, 1):
        ((other(x)["loss"] + treatment.penalty()) / accumulated).backward()
        if i % accumulated == 0:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    if accumulated == 3:  # the order within the step doesn't matter
        for a, b in zip(made.model.parameters(), other.parameters(), strict=True):
            assert torch.allclose(a, b, atol=1e-6)
    else:
        assert orthocond.nn.orthogonal_loss(made.model.net[0].weight) < orthocond.nn.orthogonal_loss(
            Model().net[0].weight
        )


class Reporter(transformers.TrainerCallback):
    """Stands where TensorBoard's does: before the callbacks of the user."""

    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs, **_):
        self.seen.append(dict(logs))


def test_the_reports_get_condition_numbers_and_what_the_treatment_did(tmp_path):
    reporter = Reporter()
    callbacks = [reporter, TreatmentCallback("net.0", "ol+nog"), ConditionCallback(layers=["net.2"])]
    pytest.importorskip("tensorboard", reason="tensorboard is installed with the laboratory alone")
    made = trainer(tmp_path, callbacks, report_to="tensorboard")
    made.train()
    wanted = {"condition/net.1/rank", "condition/net.2/cond_support", "treatment/net.0/learning_rate",
              "treatment/net.0/gradient_range_max", "treatment/net.0/penalty"}  # fmt: skip
    logged = [logs for logs in made.state.log_history if "loss" in logs]
    assert [logs["step"] for logs in logged] == [2, 4, 6]
    for logs in (*logged, *(logs for logs in reporter.seen if "loss" in logs)):
        assert wanted <= set(logs)
    assert logged[0]["condition/net.1/rank"] == 4
    assert b"condition/net.1/rank" in b"".join(file.read_bytes() for file in tmp_path.rglob("events.out.*"))


def test_weights_and_biases_gets_them_too(wandb, tmp_path):
    callbacks = [TreatmentCallback("net.0", "ol+nog"), ConditionCallback(layers=["net.2"])]
    trainer(tmp_path, callbacks, report_to="wandb").train()
    summary = dict(wandb.run.summary)
    wanted = {"condition/net.1/cond", "condition/net.2/cond_support", "treatment/net.0/penalty"}
    assert {f"train/{name}" for name in wanted} <= set(summary)  # the prefix is that of the trainer
    assert (summary["train/condition/net.1/rank"], summary["train/global_step"]) == (4, 6)


@pytest.mark.parametrize("spec", ["nog+ow+olr", "ol+nog+gauge"])
def test_a_compiled_model_trains_like_another(spec, tmp_path):
    torch.compiler.reset()
    runs = []
    for options in ({}, {"torch_compile": True, "torch_compile_backend": "aot_eager"}):
        callbacks = [TreatmentCallback("net.0", spec), ConditionCallback(layers=["net.2"])]
        made = trainer(tmp_path, callbacks, **options)
        made.train()
        logged = [(logs["step"], sorted(logs), logs["condition/net.1/rank"]) for logs in made.state.log_history[:-1]]
        runs.append((logged, list(made.model.parameters())))
    (plain, weights), (compiled, others) = runs
    assert [step for step, *_ in plain] == [2, 4, 6]
    assert compiled == plain
    for a, b in zip(weights, others, strict=True):
        assert torch.allclose(a, b, atol=1e-3)


def test_a_callback_that_comes_too_late_or_whose_model_was_replaced_says_so(tmp_path):
    late = trainer(tmp_path, [])
    late.add_callback(TreatmentCallback("net.0", "ow"))
    with pytest.raises(orthocond.errors.ArgumentError, match=r"pass the model itself, and the callback in Trainer"):
        late.train()
