"""What every treatment has to keep, alone and in every pair: registering a part is enough to be tested by it."""

import copy
import io
import itertools
import warnings

import torch
from torch import nn
from torch.nn.utils import parametrize

from orthocond import treat
from orthocond.errors import NonFiniteError, OrthocondWarning
from orthocond.nn import DecorrelatedBatchNorm1d
from orthocond.treatments import TREATMENTS

from cases import noise


def specifications():
    """Return each registered part, and each pair that may be combined."""
    excluded = {frozenset((name, other)) for name, part in TREATMENTS.items() for other in part.excludes}
    pairs = (pair for pair in itertools.combinations(TREATMENTS, 2) if frozenset(pair) not in excluded)
    return [*TREATMENTS, *map("+".join, pairs)]


def sgd(parameters, **options):
    return torch.optim.SGD(parameters, **{"lr": 0.02, "momentum": 0.9, "weight_decay": 1e-3, **options})


class Run:
    """A small network in float64, treated, with an optimizer; ``spec=None`` for the plain one."""

    def __init__(self, spec, *, seed=0, make=sgd, wrap=lambda model: model):
        torch.manual_seed(seed)
        norm = DecorrelatedBatchNorm1d(6)
        self.model = nn.Sequential(nn.Linear(8, 6), norm, nn.Tanh(), nn.Linear(6, 1)).double()
        self.model[0].weight.data.mul_(3)
        self.wrapped = wrap(self.model)
        self.treatment = None
        if spec is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", OrthocondWarning)  # what goes ill together is tested elsewhere
                self.treatment = treat(self.wrapped, "0", spec)
        self.optimizer = make(self.model.parameters())
        if self.treatment is not None:
            self.treatment.attach(self.optimizer)

    def loss(self, seed=0):
        """Return a loss whose gradient also points along the weight, so that every part has something to do."""
        x = noise(48, 8, dtype=torch.float64, seed=seed) * torch.logspace(0, -1, 8, dtype=torch.float64)
        trained = self.model[0].weight if self.treatment is None else self.treatment.parameter
        size = self.model[0].weight.square().sum() + trained.square().sum()  # sn takes the former's gradient away
        loss = (self.wrapped(x) - x[:, :1].sin()).square().mean() + 10 * size
        return loss if self.treatment is None else loss + self.treatment.penalty()

    def step(self, seed=0):
        self.optimizer.zero_grad()
        self.loss(seed).backward()
        self.optimizer.step()
        return self

    def steps(self, number):
        for seed in range(number):
            self.step(seed)
        return self

    def state(self):
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}


def assert_equal(one, other, *, atol=None):
    assert one.keys() == other.keys()
    for name, a in one.items():
        b = other[name]
        same = torch.equal(a, b) if atol is None else torch.allclose(a.double(), b.double(), atol=atol, rtol=1e-6)
        assert same, name


def changes_the_target_and_nothing_else(spec):
    plain, treated = Run(None), Run(spec)
    assert type(treated.model[3].weight) is nn.Parameter
    for name, value in plain.model[1:].state_dict().items():
        assert torch.equal(treated.model[1:].state_dict()[name], value), name
    held = [id(p) for group in treated.optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in treated.model.parameters())
    rates = [group["lr"] for group in treated.optimizer.param_groups]
    for run in (plain, treated):
        run.steps(2)
    assert [group["lr"] for group in treated.optimizer.param_groups] == rates
    assert not torch.equal(plain.model[0].weight, treated.model[0].weight)
    if not any(TREATMENTS[name].replaces_weight or TREATMENTS[name].acts_on == "loss" for name in spec.split("+")):
        first, second = Run(None).step(), Run(spec).step()  # the first forward was the same
        for a, b in zip(first.model[3].parameters(), second.model[3].parameters(), strict=True):
            assert torch.equal(a, b)


def notes_what_it_declares(spec):
    run = Run(spec)
    assert run.treatment.last is None
    run.steps(2)
    if run.treatment.last is None:
        assert not run.treatment._acting
        return
    assert list(run.treatment.last) == list(run.treatment.notes)
    for name, note in run.treatment.notes.items():
        value = getattr(run.treatment.last, name)
        if note.kind == "flag":
            assert isinstance(value, bool)
        elif value is not None:
            assert len(value) == 2 if note.kind == "range" else isinstance(value, float | int)
    assert run.treatment.last.learning_rate > 0


def detach_and_remove_restore(spec):
    run = Run(spec).steps(2)
    run.treatment.detach()
    hooks = [run.optimizer._optimizer_step_pre_hooks, run.optimizer._optimizer_step_post_hooks]
    hooks += [hooks for module in run.model.modules() for hooks in (module._forward_hooks, module._forward_pre_hooks)]
    assert not any(hooks)
    run.treatment.attach(run.optimizer)
    run.step()
    run.model.eval()  # where reading the weight changes nothing
    weight = run.model[0].weight.detach().clone()
    run.treatment.remove()
    run.model.train()
    assert type(run.model[0]) is nn.Linear
    assert type(run.model[0].weight) is nn.Parameter
    assert not parametrize.is_parametrized(run.model[0])
    assert torch.equal(run.model[0].weight, weight)
    run.treatment.remove()  # again, without harm
    plain = Run(None)
    plain.model.load_state_dict(run.model.state_dict())
    run.treatment, run.optimizer = None, sgd(run.model.parameters())
    assert_equal(plain.step().state(), run.step().state())


def resumes_bit_for_bit(spec):
    run, file = Run(spec).steps(3), io.BytesIO()
    torch.save([part.state_dict() for part in (run.model, run.optimizer, run.treatment)], file)
    file.seek(0)
    other = Run(spec, seed=1)
    parts = (other.model, other.optimizer, other.treatment)
    for part, state in zip(parts, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    assert other.treatment.last == run.treatment.last
    for seed in (7, 8):
        run.step(seed)
        other.step(seed)
    assert_equal(run.state(), other.state())
    assert other.treatment.last == run.treatment.last


def closures_accumulation_and_scaled_gradients_give_the_same(spec):
    expected = Run(spec).steps(2).state()

    def by_closure(run, seed):
        def closure():
            run.optimizer.zero_grad()
            loss = run.loss(seed)
            loss.backward()
            return loss

        run.optimizer.step(closure)

    def by_halves(run, seed):
        run.optimizer.zero_grad()
        rng = copy.deepcopy(run.model[1].state_dict())
        (run.loss(seed) / 2).backward()
        run.model[1].load_state_dict(rng)  # one batch counts once
        (run.loss(seed) / 2).backward()
        run.optimizer.step()

    def scaled(run, seed):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        run.optimizer.zero_grad()
        scaler.scale(run.loss(seed)).backward()
        scaler.step(run.optimizer)
        scaler.update()

    ways = [(by_closure, {}), (by_halves, {}), (scaled, {}), (scaled, {"fused": True})]
    for way, options in ways:
        if way is by_halves and "sn" in spec.split("+"):
            continue  # a power iteration at each forward
        run = Run(spec, make=lambda p, options=options: sgd(p, **options))
        for seed in range(2):
            way(run, seed)
        assert_equal(expected, run.state(), atol=1e-7)


def implementations_and_groups_give_the_same(spec):
    expected = Run(spec).steps(2).state()

    def in_groups(parameters):
        first, *rest = parameters
        return sgd([{"params": [first, *rest[2:]]}, {"params": rest[:2], "lr": 0.02}])

    for make in (
        lambda p: sgd(p, foreach=True),
        lambda p: sgd(p, foreach=False),
        lambda p: sgd(p, fused=True),
        in_groups,
    ):
        run = Run(spec, make=make).steps(2)
        assert_equal(expected, run.state(), atol=1e-8)


def copies_and_frozen_layers_are_left_alone(spec):
    run, other = Run(spec).step(), Run(spec).step()
    copied = copy.deepcopy(run.model)
    copied(noise(8, 8, dtype=torch.float64)).sum().backward()
    assert_equal(run.step(1).state(), other.step(1).state())
    weight = run.treatment.parameter
    weight.requires_grad_(False)
    before = weight.detach().clone()
    run.optimizer.zero_grad()
    run.model(noise(8, 8, dtype=torch.float64)).sum().backward()
    run.optimizer.step()
    assert torch.equal(weight, before)
    assert not run.treatment._acting or run.treatment.last is None


def zero_and_nan_gradients(spec):
    run = Run(spec, make=lambda p: sgd(p, momentum=0.0, weight_decay=0.0))
    parameter = run.treatment.parameter
    before = parameter.detach().clone()
    parameter.grad = torch.zeros_like(parameter)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OrthocondWarning)  # no forward was seen
        run.optimizer.step()
    assert torch.equal(parameter, before)
    parameter.grad = torch.full_like(parameter, torch.nan)
    try:
        run.optimizer.step()
    except NonFiniteError:
        assert torch.equal(parameter, before)
    else:
        assert parameter.isnan().any()  # never a silent repair


def compiles(spec):
    torch.compiler.reset()
    expected = Run(spec).steps(2)
    run = Run(spec, wrap=lambda model: torch.compile(model, backend="eager")).steps(2)
    assert_equal(expected.state(), run.state(), atol=1e-7)
    assert (run.treatment.last is None) == (expected.treatment.last is None)


CONTRACTS = [
    changes_the_target_and_nothing_else,
    notes_what_it_declares,
    detach_and_remove_restore,
    resumes_bit_for_bit,
    closures_accumulation_and_scaled_gradients_give_the_same,
    implementations_and_groups_give_the_same,
    copies_and_frozen_layers_are_left_alone,
    zero_and_nan_gradients,
]
