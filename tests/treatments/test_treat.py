"""Treatments: the target changes as it should, nothing else does, and optimizers keep working."""

import copy
import io
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

from orthocond import treat
from orthocond.errors import ArgumentError, NonFiniteError, OrthocondWarning
from orthocond.nn import DecorrelatedBatchNorm2d, is_orthogonal, orthogonal_weight

from cases import noise

TABLES = ["none", "sn", "ol", "ow", "nog", "nog+sn", "nog+ol", "nog+ow", "olr", "nog+olr", "ow+olr", "nog+ow+olr"]
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=5e-4),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm1 = DecorrelatedBatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = torch.relu(self.norm1(self.conv1(x)))
        return self.head(torch.relu(self.conv2(x)).mean((2, 3)))


def net(seed=0):
    torch.manual_seed(seed)
    return Net()


def quietly(*args, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OrthocondWarning)
        return treat(*args, **options)


def loss_of(model, treatment=None, seed=0):
    x, y = noise(8, 3, 6, 6, seed=seed), torch.arange(8) % 4
    loss = F.cross_entropy(model(x), y)
    return loss if treatment is None else loss + treatment.penalty()


def step(model, optimizer, treatment=None, seed=0):
    optimizer.zero_grad()
    loss = loss_of(model, treatment, seed)
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("spec", TABLES)
def test_every_combination_of_the_tables(spec, optimizer):
    model = net()
    treatment = quietly(model, "conv1", spec)
    opt = OPTIMIZERS[optimizer](model.parameters())
    treatment.attach(opt)
    rates = [group["lr"] for group in opt.param_groups]
    held = [id(p) for group in opt.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())
    for seed in range(5):
        assert torch.isfinite(torch.tensor(step(model, opt, treatment, seed)))
        assert [group["lr"] for group in opt.param_groups] == rates
    assert all(p.isfinite().all() for p in model.parameters())
    if "ow" in spec:
        assert is_orthogonal(model.conv1.weight, atol=1e-5)


def test_nog_makes_the_step_orthogonal_and_changes_nothing_else():
    plain, treated = net(), net()
    before = treated.conv1.weight.detach().clone()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, treated)]
    treatment = treat(treated, "conv1", "nog").attach(optimizers[1])
    for model, optimizer in zip((plain, treated), optimizers, strict=True):
        step(model, optimizer)
    moved = (treated.conv1.weight.detach() - before).flatten(1) / 0.1
    assert torch.allclose(torch.linalg.svdvals(moved), torch.ones(8), atol=1e-4)
    for (name, a), b in zip(plain.named_parameters(), treated.parameters(), strict=True):
        assert torch.equal(a, b) == (name != "conv1.weight")
    smallest, largest = treatment.last.gradient_range
    assert 0 < smallest < largest < 10
    assert (treatment.last.learning_rate, treatment.last.eta) == (0.1, None)


@pytest.mark.parametrize("rule", ["paper", "exact"])
def test_olr_uses_eta_exactly_where_it_is_between_zero_and_lr(rule):
    model = net()
    treatment = treat(model, "conv1", f"olr(rule={rule})")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    treatment.attach(optimizer)
    outcomes = set()
    for seed in range(20):
        optimizer.zero_grad()
        loss_of(model, seed=seed).backward()
        if seed % 2:  # a gradient along the weight, so that eta* is small and positive
            with torch.no_grad():
                model.conv1.weight.mul_(3 / torch.linalg.matrix_norm(model.conv1.weight.flatten(1), 2))
            model.conv1.weight.grad.copy_(20 * model.conv1.weight)
        before, gradient = model.conv1.weight.detach().clone(), model.conv1.weight.grad.clone()
        optimizer.step()
        last = treatment.last
        assert last.switched == (0 < last.eta < 0.1)
        assert last.learning_rate == (last.eta if last.switched else 0.1)
        assert torch.allclose(model.conv1.weight, before - last.learning_rate * gradient, atol=1e-6)
        outcomes.add(last.switched)
    assert True in outcomes
    assert (False in outcomes) or rule == "exact"


def test_olr_knows_an_optimizer_that_goes_uphill():
    weights = []
    for maximize in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4, bias=False))
        treatment = treat(model, "0", "olr(rule=exact)")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, maximize=maximize)
        treatment.attach(optimizer)
        gradient = torch.randn(4, 4)
        model[0].weight.grad = -gradient if maximize else gradient
        optimizer.step()
        assert treatment.last.switched
        weights.append(model[0].weight.detach())
    assert torch.equal(*weights)


SCHEDULERS = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.2, total_steps=10),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 0.9**n),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.LinearLR(o, 0.1, 1, 2), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_never_see_the_optimal_rate(name):
    histories = []
    for spec in ("none", "nog+ow+olr"):
        model = net()
        treatment = treat(model, "conv1", spec)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        treatment.attach(optimizer)
        scheduler, rates = SCHEDULERS[name](optimizer), []
        for seed in range(6):
            step(model, optimizer, treatment, seed)
            scheduler.step()
            rates.append([group["lr"] for group in optimizer.param_groups])
        histories.append(rates)
    plain, treated = histories
    assert treated == plain


def test_reduce_on_plateau_and_a_tensor_learning_rate():
    model = net()
    treatment = treat(model, "conv1", "nog+ow+olr")
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1))
    treatment.attach(optimizer)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    step(model, optimizer, treatment)
    scheduler.step(1.0)
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.1])


def test_a_tensor_learning_rate_is_that_of_one_group_alone():
    moved = []
    for spec in ("none", "olr"):
        model = net()
        treatment = treat(model, "conv1", spec)
        optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1))
        treatment.attach(optimizer)
        loss_of(model).backward()
        with torch.no_grad():
            model.conv1.weight.grad.copy_(20 * model.conv1.weight)
        before = model.head.weight.detach().clone()
        optimizer.step()
        moved.append(model.head.weight.detach() - before)
    assert treatment.last.switched
    assert torch.equal(*moved)


def test_a_weight_that_the_user_parametrized_keeps_its_parameter():
    model = net()
    nn.utils.parametrizations.spectral_norm(model.conv1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    treat(model, "conv1", "nog").attach(optimizer)
    step(model, optimizer)
    nn.utils.parametrizations.weight_norm(model.conv2)
    with pytest.raises(ArgumentError, match="made of several tensors"):
        treat(model, "conv2", "nog").attach(optimizer)


def every_optimizer():
    for name in sorted(torch.optim.__all__):
        cls = getattr(torch.optim, name, None)
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer:
            yield pytest.param(cls, id=name, marks=[pytest.mark.half_products] if name == "Muon" else [])


@pytest.mark.parametrize("cls", list(every_optimizer()))
def test_every_optimizer_of_torch(cls):
    if cls is torch.optim.SparseAdam:
        pytest.skip("it takes sparse gradients alone")
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)]
    model = nn.Sequential(*layers)  # matrices alone, as Muon wants them
    treatment = treat(model, "0", "nog+ow+olr")
    optimizer = cls(model.parameters(), lr=0.01)
    if cls is torch.optim.LBFGS:
        with pytest.raises(ArgumentError, match="LBFGS"):
            treatment.attach(optimizer)
        return
    treatment.attach(optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        (model(noise(4, 6)) - 1).square().mean().backward()
        optimizer.step()
        assert [group["lr"] for group in optimizer.param_groups] == [0.01]
    assert treatment.last is not None
    assert is_orthogonal(layers[0].weight, atol=1e-5)


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}, {"differentiable": False}])
def test_implementations_agree(options):
    weights = []
    for chosen in ({}, options):
        model = net()
        treatment = treat(model, "conv1", "nog")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **chosen)
        treatment.attach(optimizer)
        for seed in range(3):
            step(model, optimizer, treatment, seed)
        weights.append(model.conv1.weight.detach())
    assert torch.allclose(*weights, atol=1e-5)


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_are_unscaled_before_the_treatment(fused):
    model = net()
    before = model.conv1.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    treatment = treat(model, "conv1", "nog")
    treatment.attach(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(loss_of(model)).backward()
    scaler.step(optimizer)
    scaler.update()
    moved = (model.conv1.weight.detach() - before).flatten(1) / 0.1
    assert torch.allclose(torch.linalg.svdvals(moved), torch.ones(8), atol=1e-3)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_scaler_skips_is_skipped(fused):
    model = net()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    treat(model, "conv1", "nog").attach(optimizer)
    scaler = torch.amp.GradScaler("cpu")
    loss = loss_of(model.eval())
    scaler.scale(loss).backward()
    model.conv1.weight.grad[0, 0, 0, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.conv1.weight, before["conv1.weight"])


def test_the_users_clipping_comes_first():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    treat(model, "conv1", "nog").attach(optimizer)
    loss_of(model).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    before = model.conv1.weight.detach().clone()
    optimizer.step()
    moved = (model.conv1.weight.detach() - before).flatten(1) / 0.1
    assert torch.allclose(torch.linalg.svdvals(moved), torch.ones(8), atol=1e-4)


def test_accumulation_missing_gradients_closures_and_frozen_layers():
    model = net()
    treatment = treat(model, "conv1", "nog")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    treatment.attach(optimizer)
    optimizer.step()  # no gradient anywhere
    assert treatment.last is None
    for seed in (0, 1):
        loss_of(model, seed=seed).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    before = model.conv1.weight.detach().clone()

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    for call in (lambda: optimizer.step(closure), lambda: optimizer.step(closure=closure)):
        assert call().item() > 0
        moved = (model.conv1.weight.detach() - before).flatten(1) / 0.1
        assert torch.allclose(torch.linalg.svdvals(moved), torch.ones(8), atol=1e-4)
        before = model.conv1.weight.detach().clone()
    model.conv1.weight.requires_grad_(False)
    step(model, optimizer)
    assert torch.equal(model.conv1.weight, before)


def test_a_gradient_that_is_not_finite_is_an_error():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    treat(model, "conv1", "nog").attach(optimizer)
    model.conv1.weight.grad = torch.full_like(model.conv1.weight, float("nan"))
    with pytest.raises(NonFiniteError):
        optimizer.step()


@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: torch.compile(m, backend="eager"), nn.DataParallel])
def test_wrapped_models_and_prefixed_names(wrap):
    model = net()
    wrapped = wrap(model)
    name = next(name for name, _ in wrapped.named_modules() if name.endswith("conv1"))
    for given in ("conv1", name, model.conv1):
        assert treat(wrapped, given, "nog").layer is model.conv1


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("spec", ["ow", "nog+ow", "nog+ow+olr"])
def test_ow_stays_orthogonal(spec, normalize):
    model = net()
    treatment = treat(model, "conv1", spec.replace("ow", f"ow(normalize={normalize})"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    treatment.attach(optimizer)
    for seed in range(100):
        step(model, optimizer, treatment, seed % 4)
    weight = model.conv1.weight.detach().flatten(1)
    assert torch.allclose(weight @ weight.T, torch.eye(8), atol=1e-5)


def test_ow_as_an_operator_trains():
    model = net()
    treatment = treat(model, "conv1", "nog+ow(kind=operator)+olr")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    treatment.attach(optimizer)
    losses = [step(model, optimizer, treatment) for _ in range(20)]
    assert losses[-1] < losses[0]
    with pytest.raises(ArgumentError, match="no plain weight can replace"):
        treatment.remove()


def test_sn_has_norm_one():
    model = net()
    treatment = treat(model, "conv1", "sn")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    treatment.attach(optimizer)
    for seed in range(100):
        step(model, optimizer, treatment, seed % 4)
    assert torch.linalg.svdvals(model.conv1.weight.flatten(1))[0].item() == pytest.approx(1, abs=1e-2)


def test_ol_penalty_falls_when_trained_alone():
    model = net()
    treatment = treat(model, "conv1", "ol(penalty_weight=2.0)")
    optimizer = torch.optim.SGD(model.conv1.parameters(), lr=0.01)
    penalties = []
    for _ in range(100):
        optimizer.zero_grad()
        penalty = treatment.penalty()
        penalty.backward()
        optimizer.step()
        penalties.append(penalty.item())
    assert penalties[-1] < 0.1 * penalties[0]
    assert treat(net(), "conv1", "nog").penalty().item() == 0


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(6, 9),
        nn.Conv1d(6, 4, 3),
        nn.Conv3d(6, 4, 2),
        nn.ConvTranspose2d(6, 4, 3),
        nn.Conv2d(6, 4, 3, groups=2),
        nn.ConvTranspose1d(6, 4, 3, groups=2),
    ],
    ids=repr,
)
@pytest.mark.parametrize("spec", ["nog+ow+olr", "ol", "sn+nog"])
def test_every_kind_of_layer(layer, spec):
    model = nn.Sequential(copy.deepcopy(layer))
    treatment = treat(model, "0", spec)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    treatment.attach(optimizer)
    dimensions = layer.weight.ndim - 2
    x = noise(4, 6, *[5] * dimensions)
    for _ in range(3):
        optimizer.zero_grad()
        (model(x).square().mean() + treatment.penalty()).backward()
        optimizer.step()
    assert model[0].weight.isfinite().all()


def test_checkpoints_of_optimizer_and_treatment():
    def build(seed):
        model = net(seed)
        treatment = treat(model, "conv1", "nog+ow+olr")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, treatment.attach(optimizer)

    model, optimizer, treatment = build(0)
    for seed in range(3):
        step(model, optimizer, treatment, seed)
    file = io.BytesIO()
    parts = (model, optimizer, treatment)
    torch.save([part.state_dict() for part in parts], file)
    file.seek(0)
    others = build(1)
    for part, state in zip(others, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    assert others[2].last == treatment.last
    for each in (parts, others):
        step(*each, seed=9)
    for a, b in zip(model.parameters(), others[0].parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_step_that_fails_leaves_the_scheduled_rate():
    model = net()
    treatment = treat(model, "conv1", "olr")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    treatment.attach(optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def fail(*_):
        raise RuntimeError("no")

    handle = optimizer.register_step_pre_hook(fail)
    loss_of(model).backward()
    with torch.no_grad():
        model.conv1.weight.grad.copy_(20 * model.conv1.weight)
    with pytest.raises(RuntimeError, match="no"):
        optimizer.step()
    handle.remove()
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.1
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.05]


def test_a_frozen_weight_stays_frozen_and_what_others_put_there_stays():
    model = net()
    model.conv1.requires_grad_(False)
    assert not treat(model, "conv1", "ow").parameter.requires_grad
    model = net()
    nn.utils.parametrizations.spectral_norm(model.conv1)
    treat(model, "conv1", "nog").remove()
    assert parametrize.is_parametrized(model.conv1)


def test_the_state_of_another_kind_is_refused():
    state = treat(net(), "conv1", "ow(normalize=false)").state_dict()
    with pytest.raises(ArgumentError, match=r"normalize=False.*not of ow.*normalize=True"):
        treat(net(), "conv1", "ow(normalize=true)").load_state_dict(state)


def test_detach_and_remove():
    model = net()
    treatment = treat(model, "conv1", "nog+ow")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    treatment.attach(optimizer)
    step(model, optimizer)
    weight = model.conv1.weight.detach().clone()
    treatment.detach()
    loss_of(model).backward()
    before = treatment.parameter.grad.clone()
    optimizer.step()
    assert torch.equal(treatment.parameter.grad, before)  # no longer made orthogonal
    treatment.attach(optimizer)
    weight = model.conv1.weight.detach().clone()
    treatment.remove()
    assert torch.equal(model.conv1.weight, weight)
    assert type(model.conv1) is nn.Conv2d
    assert not parametrize.is_parametrized(model.conv1)


def test_named_parameters_keep_their_names():
    model = net()
    treatment = treat(model, "conv1", "nog+ow+olr")
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    treatment.attach(optimizer)
    step(model, optimizer, treatment)
    (group,) = optimizer.param_groups
    assert group["param_names"] == [name for name, _ in model.named_parameters()]
    assert all(a is b for a, b in zip(group["params"], model.parameters(), strict=True))


@pytest.mark.parametrize("spec", ["olr+ow", "olr+nog"])
def test_a_combination_that_the_paper_advises_against_warns_once(spec):
    with pytest.warns(OrthocondWarning, match="goes to zero") as caught:
        treat(net(), "conv1", spec)
    assert len(caught) == 1


def test_the_exact_rate_of_an_orthogonal_kernel_warns():
    with pytest.warns(OrthocondWarning, match="rounding noise around zero") as caught:
        treat(net(), "conv1", "nog+ow+olr(rule=exact)")
    assert len(caught) == 1


def attached(spec, make):
    treatment = quietly(model := net(), "conv1", spec)
    return treatment.attach(make(model))


def made_before():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return treat(model, "conv1", "ow").attach(optimizer)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: treat(net(), "conv1", "nog+qr"), "unknown treatment 'qr'; choose one of nog, sn, ol, ow, olr, gauge"),
        (lambda: treat(net(), "conv_1", "nog"), "unknown layer 'conv_1'.*Did you mean 'conv1'"),
        (lambda: treat(net(), nn.Linear(2, 2), "nog"), "is not in the model"),
        (lambda: treat(net(), 0, "nog"), r"a layer as a module or by its dotted name, got int; pass e\.g\. 'conv1'"),
        (lambda: treat(net(), ["conv1"], "nog"), "by its dotted name, got list"),
        (lambda: treat(net(), "norm1", "nog"), r"'norm1' \(DecorrelatedBatchNorm2d\) has no matrix for a weight"),
        (lambda: treat(net(), "conv1", "nog(speed=3)"), "unknown option 'speed'; its options are: solver=gram"),
        (lambda: treat(net(), "conv1", "olr(rule=best)"), "choose one of paper, exact"),
        (lambda: treat(net(), "conv1", "ow(kind=x)"), "choose one of kernel, operator"),
        (lambda: treat(net(), "conv1", "nog(solver=x)"), "choose one of gram, svd, newton_schulz"),
        (lambda: treat(net(), "auto", "nog"), "needs an example_input"),
        (lambda: treat(nn.Sequential(orthogonal_weight(nn.Linear(2, 2))), "0", "ow"), "already; remove it"),
        (lambda: attached("nog", lambda m: torch.optim.SGD(m.head.parameters(), 0.1)), "does not hold"),
        (made_before, "make the optimizer after treat"),
        (lambda: (t := attached("nog", lambda m: torch.optim.SGD(m.parameters()))).attach(t._optimizer), "already"),
        (lambda: treat(net(), "head", "nog").load_state_dict(treat(net(), "conv1", "nog").state_dict()), "not of nog"),
    ],
)  # fmt: skip
def test_bad_input(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()


def test_auto_treats_what_is_found():
    treatment = treat(net(), "auto", "nog", example_input=noise(2, 3, 6, 6))
    assert treatment.name == "conv1"
