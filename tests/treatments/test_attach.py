"""Optimizers as people have them: wrapped, with a scheduler that is there already, with clipping."""

import pytest
import torch
from torch import nn

from orthocond import treat
from orthocond.errors import ArgumentError
from orthocond.nn import DecorrelatedBatchNorm1d

from cases import noise


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), DecorrelatedBatchNorm1d(4), nn.Linear(4, 1))


def step(model, optimizer, seed=0):
    optimizer.zero_grad()
    model(noise(32, 6, seed=seed)).square().mean().backward()
    optimizer.step()


class Wrapper(torch.optim.Optimizer):
    """Made as Accelerate's: an optimizer by type, which never was initialised and hands everything on."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure=None):
        return self.optimizer.step(closure)


class Holder:
    """No optimizer by type."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


@pytest.mark.parametrize("wrap", [Wrapper, Holder, lambda o: Wrapper(Wrapper(o))])
def test_the_optimizer_inside_is_found(wrap):
    model = network()
    treatment = treat(model, "0", "nog+ow+olr")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    treatment.attach(wrap(optimizer))
    step(model, optimizer)
    assert treatment.last.eta is not None


def test_fabric():
    model = network()
    treatment = treat(model, "0", "nog+ow+olr")
    fabric = pytest.importorskip("lightning_fabric").Fabric(accelerator="cpu", devices=1)
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    treatment.attach(optimizer)
    loss = wrapped(noise(32, 6)).square().mean()
    fabric.backward(loss)
    optimizer.step()
    assert treatment.last.eta is not None


def test_what_is_no_optimizer_and_no_scheduler_is_refused():
    treatment = treat(model := network(), "0", "nog")
    with pytest.raises(ArgumentError, match=r"attach expected an optimizer of torch.*got list"):
        treatment.attach([])
    with pytest.raises(ArgumentError, match=r"attach expected a scheduler of torch, got int"):
        treatment.attach(torch.optim.SGD(model.parameters(), lr=0.1), scheduler=5)


SCHEDULERS = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.2, total_steps=10),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 0.9**n),
    "cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.2, 2),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.LinearLR(o, 0.1, 1, 2), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "chained": lambda o: torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.ConstantLR(o, 0.5), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("when", ["before", "after", "before, and passed"])
def test_a_scheduler_may_be_made_before_or_after(name, when):
    histories = []
    for is_treated in (False, True):
        model = network()
        treatment = treat(model, "0", "nog+ow+olr")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if when == "after" and is_treated:
            treatment.attach(optimizer)
        scheduler, rates = SCHEDULERS[name](optimizer), []
        if when != "after" and is_treated:
            treatment.attach(optimizer, scheduler=scheduler if "passed" in when else None)
        if not is_treated:
            treatment.detach()
        for seed in range(6):
            step(model, optimizer, seed)
            scheduler.step()
            rates.append([group["lr"] for group in optimizer.param_groups])
        histories.append(rates)
    assert histories[0] == histories[1]


def test_a_plateau_scheduler_lowers_the_rate():
    model = network()
    treatment = treat(model, "0", "olr")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, min_lr=[0.001])
    treatment.attach(optimizer, scheduler=scheduler)
    for loss in (1.0, 2.0):
        step(model, optimizer)
        scheduler.step(loss)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.01])


@pytest.mark.parametrize("order", [(0, 2), (2, 0)])
def test_two_rates_in_one_step_leave_the_group_as_it_was(order):
    model = network()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    treatments = [treat(model, str(i), "olr").attach(optimizer) for i in order]
    before = {key: list(optimizer.param_groups[0][key]) for key in ("params", "param_names")}
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.extend(len(group["params"]) for group in optimizer.param_groups))
    for parameter in model.parameters():
        parameter.grad = 20 * parameter.detach()
    optimizer.step()
    assert seen == [4, 1, 1]
    assert all(treatment.last.switched for treatment in treatments)
    assert len(optimizer.param_groups) == 1
    for key, values in before.items():
        assert all(a is b for a, b in zip(optimizer.param_groups[0][key], values, strict=True))


def test_the_scheduler_of_another_optimizer_is_refused():
    model = network()
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    scheduler = torch.optim.lr_scheduler.StepLR(first, 1)
    with pytest.raises(ArgumentError, match="scheduler of another optimizer"):
        treat(model, "0", "olr").attach(second, scheduler=scheduler)
    assert len(second.param_groups) == 1


@pytest.mark.parametrize(("max_norm", "expected"), [(0.5, 0.5), (100.0, 2.0)])
def test_nog_clips_what_it_made(max_norm, expected):
    model = network()
    treatment = treat(model, "0", f"nog(max_norm={max_norm})")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    treatment.attach(optimizer)
    (1e3 * model(noise(32, 6)).square().mean()).backward()
    model[0].weight.grad.add_(torch.eye(4, 6))  # of full rank: the norm of what nog makes is the root of 4
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)  # which nog undoes
    optimizer.step()
    assert model[0].weight.grad.norm().item() == pytest.approx(expected, rel=1e-5)
    model[0].weight.grad.zero_()
    optimizer.step()
    assert not model[0].weight.grad.any()


def along_the_weight(model, sign):
    model[0].weight.grad = sign * 20 * model[0].weight.detach().clone()


def test_olr_for_the_first_steps_alone_and_after_a_checkpoint():
    def build():
        model = network()
        treatment = treat(model, "0", "olr(steps=3)")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, optimizer, treatment.attach(optimizer)

    def switched(model, optimizer, treatment):
        along_the_weight(model, 1)
        optimizer.step()
        return treatment.last.switched, treatment.last.eta is None

    first, second = build(), build()
    assert [switched(*first) for _ in range(2)] == [(True, False)] * 2
    second[2].load_state_dict(first[2].state_dict())
    for parts in (first, second):
        assert [switched(*parts) for _ in range(2)] == [(True, False), (False, True)]


@pytest.mark.parametrize("negative", [False, True])
def test_olr_uphill_only_where_asked_for(negative):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    treatment = treat(model, "0", f"olr(negative={negative})").attach(optimizer)
    along_the_weight(model, -1)
    optimizer.step()
    assert treatment.last.eta < 0
    assert treatment.last.switched == negative
    assert treatment.last.learning_rate == (treatment.last.eta if negative else 0.1)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1]


def test_a_treatment_shows_itself_in_a_notebook():
    model = network()
    treatment = treat(model, "0", "nog(max_norm=0.5)")
    assert "Treatment(layer=&#x27;0&#x27;, spec=&#x27;nog(max_norm=0.5)&#x27;), not attached" in treatment._repr_html_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    treatment.attach(optimizer)
    step(model, optimizer)
    assert "<td>learning_rate</td><td>0.1</td>" in treatment._repr_html_()


@pytest.mark.parametrize("scale", [None, 4.0])
def test_the_penalty_can_be_added_in_the_step(scale):
    weights = []
    for penalty in (False, True):
        model = network()
        treatment = treat(model, "0", "ol")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=scale is not None)
        treatment.attach(optimizer, penalty=penalty)
        loss = model(noise(32, 6)).square().mean()
        (loss if penalty else loss + treatment.penalty()).backward()
        if scale is not None:  # as a GradScaler leaves it for a fused optimizer
            for parameter in model.parameters():
                parameter.grad.mul_(scale)
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.tensor(0.0)
        optimizer.step()
        weights.append(model[0].weight)
    assert torch.allclose(*weights, atol=1e-6)
