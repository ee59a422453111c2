"""Re-gauging: the outputs stay, the condition number goes, and what can't be re-gauged is refused."""

import copy
import io
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from orthocond import ConditionMonitor, treat
from orthocond.errors import ArgumentError, NonFiniteError, OrthocondWarning
from orthocond.linalg import covariance, spectrum
from orthocond.nn import (
    CovariancePool2d,
    DecorrelatedBatchNorm1d,
    DecorrelatedBatchNorm2d,
    DecorrelatedBatchNorm3d,
    fold,
    orthogonal_weight,
)
from orthocond.treatments import Gauge, Step
from orthocond.treatments.gauge._metric import cross_covariance

from cases import noise, rotation

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=5e-4),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
}
TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-10}


def gauge_of(treatment):
    return treatment.parts["gauge"]


def step_of(treatment, optimizer):
    return Step(treatment._target, optimizer, optimizer.param_groups[0])


def ill_conditioned_(layer, decades=2.0):
    """Turn and stretch the outputs of a layer, within its groups, so that their covariance is ill conditioned."""
    transposed = isinstance(layer, nn.modules.conv._ConvTransposeNd)
    groups = getattr(layer, "groups", 1)
    weight = layer.weight.data.unflatten(0, (groups, -1))
    weight = weight.transpose(1, 2) if transposed else weight
    size = weight.shape[1]
    stretch = rotation(size) * torch.logspace(0, -decades / 2, size, dtype=torch.float64) @ rotation(size, seed=1)
    weight = torch.einsum("ij,gj...->gi...", stretch.to(weight), weight)
    weight = weight.transpose(1, 2) if transposed else weight
    layer.weight.data.copy_(weight.flatten(0, 1))
    return layer


def outputs(model, x):
    """What a model gives in train and eval mode, without leaving a trace on it."""
    model = copy.deepcopy(model)
    train = model.train()(x).detach()
    return train, model.eval()(x).detach()


def gauged_pair(layer, norm, x, dtype, **options):
    """Return layer and norm in the gauge before and after an application, and the treatment."""
    model = nn.Sequential(layer, norm).to(dtype)
    for seed in range(3):  # running statistics of other batches
        model(x + 0.3 * noise(*x.shape, dtype=dtype, seed=seed + 50))
    treatment = treat(model, "0", [Gauge(**options)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    treatment.attach(optimizer)
    (model(x) ** 3).sum().backward()
    before = copy.deepcopy(model)
    optimizer.step()
    treatment.detach()
    return before, model, treatment


def assert_same_outputs(one, other, x):
    for a, b in zip(outputs(one, x), outputs(other, x), strict=True):
        assert (a - b).norm() <= TOLERANCES[x.dtype] * a.norm()


CASES = {
    "linear": (lambda: nn.Linear(12, 8), lambda **o: DecorrelatedBatchNorm1d(8, **o), (200, 12)),
    "linear, no bias": (lambda: nn.Linear(12, 8, bias=False), lambda **o: DecorrelatedBatchNorm1d(8, **o), (200, 12)),
    "linear, rank 5": (lambda: nn.Linear(5, 8), lambda **o: DecorrelatedBatchNorm1d(8, **o), (200, 5)),
    "conv1d": (lambda: nn.Conv1d(4, 8, 3), lambda **o: DecorrelatedBatchNorm1d(8, **o), (16, 4, 20)),
    "conv2d": (lambda: nn.Conv2d(3, 16, 3, padding=1), lambda **o: DecorrelatedBatchNorm2d(16, **o), (16, 3, 9, 9)),
    "conv2d, rank 27": (lambda: nn.Conv2d(3, 64, 3), lambda **o: DecorrelatedBatchNorm2d(64, **o), (16, 3, 9, 9)),
    "conv2d, groups": (
        lambda: nn.Conv2d(6, 12, 3, groups=3), lambda **o: DecorrelatedBatchNorm2d(12, groups=6, **o), (16, 6, 7, 7)
    ),
    "conv2d, whitened in groups": (
        lambda: nn.Conv2d(3, 12, 3), lambda **o: DecorrelatedBatchNorm2d(12, groups=2, **o), (16, 3, 7, 7)
    ),
    "conv3d": (lambda: nn.Conv3d(3, 8, 2), lambda **o: DecorrelatedBatchNorm3d(8, **o), (8, 3, 5, 5, 5)),
    "transposed": (
        lambda: nn.ConvTranspose2d(4, 8, 3), lambda **o: DecorrelatedBatchNorm2d(8, **o), (16, 4, 5, 5)
    ),
    "transposed, groups": (
        lambda: nn.ConvTranspose1d(4, 8, 3, groups=2), lambda **o: DecorrelatedBatchNorm1d(8, groups=2, **o), (16, 4, 9)
    ),
}  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"rtol": 0.0}, {"rtol": 1e-2}, {"solver": "svd"}], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_outputs_stay_in_train_and_eval_and_the_condition_number_is_one(case, dtype, options):
    make, norm, shape = CASES[case]
    if options.get("rtol") == 0.0 and "rank" in case:
        pytest.skip("with rtol=0 a singular covariance is whitened down to its rounding noise, in any gauge")
    torch.manual_seed(0)
    x = noise(*shape, dtype=dtype) + 0.5
    before, after, treatment = gauged_pair(ill_conditioned_(make()), norm(**options), x, dtype)
    last = treatment.last
    assert last.gauged
    assert last.cond_before > 10
    assert last.cond_after == pytest.approx(1, abs=1e-6)
    assert not torch.allclose(before[0].weight, after[0].weight, rtol=0.1)
    assert_same_outputs(before, after, x)
    after(x)
    rtol = max(after[1].rtol, 1e-5)
    for l in after[1].last_eigenvalues:
        kept = l[l > rtol * l[0]]
        assert kept[0] / kept[-1] < 1.01


def test_what_is_dropped_stays_dropped_and_is_not_lost():
    torch.manual_seed(0)
    x = noise(400, 12, dtype=torch.float64)
    layer = ill_conditioned_(nn.Linear(12, 8), decades=8)  # half of it below rtol
    before, after, treatment = gauged_pair(layer, DecorrelatedBatchNorm1d(8), x, torch.float64)
    assert treatment.last.gauged
    assert_same_outputs(before, after, x)
    ranks = []
    for model in (before, after):
        model(x)
        l = model[1].last_eigenvalues[0]
        ranks.append(int((l > 1e-4 * l[0]).sum()))
        assert l[-1] > 1e-10 * l[0]
    assert ranks[0] == ranks[1] < 8


@pytest.mark.parametrize("scale", ["trace", "weight", "unit"])
def test_scales(scale):
    torch.manual_seed(0)
    x = noise(300, 12, dtype=torch.float64)
    layer = ill_conditioned_(nn.Linear(12, 8))
    norm = DecorrelatedBatchNorm1d(8, groups=2)
    before, after, _ = gauged_pair(layer, norm, x, torch.float64, scale=scale)
    assert_same_outputs(before, after, x)
    for half in (slice(0, 4), slice(4, 8)):
        old, new = (model[0](x).T[half] for model in (before, after))
        if scale == "trace":
            assert covariance(new).trace().item() == pytest.approx(covariance(old).trace().item())
        elif scale == "weight":
            assert after[0].weight[half].norm().item() == pytest.approx(before[0].weight[half].norm().item())
        else:
            assert torch.allclose(covariance(new), torch.eye(4, dtype=torch.float64), atol=1e-9)


def test_groups_below_the_threshold_are_left_alone():
    torch.manual_seed(0)
    x = noise(400, 8, dtype=torch.float64)
    layer = nn.Linear(8, 8)
    layer.weight.data.copy_(torch.eye(8))
    ill_conditioned_(part := nn.Linear(8, 4))
    layer.weight.data[4:] = part.weight.data
    before, after, treatment = gauged_pair(layer, DecorrelatedBatchNorm1d(8, groups=2), x, torch.float64)
    assert torch.allclose(before[0].weight[:4], after[0].weight[:4], atol=1e-12)
    assert not torch.allclose(before[0].weight[4:], after[0].weight[4:])
    assert 1 < treatment.last.cond_after < 10


@pytest.mark.parametrize("options", [{}, {"rtol": 1e-2}], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_the_pending_gradient_is_that_of_the_new_weight(case, dtype, options):
    make, norm, shape = CASES[case]
    torch.manual_seed(0)
    x = noise(*shape, dtype=dtype) + 0.5
    model = nn.Sequential(ill_conditioned_(make()), norm(**options)).to(dtype)
    target = noise(*model(x).shape, dtype=dtype, seed=9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    treatment = treat(model, "0", "gauge(metric=weight)").attach(optimizer)
    (model(x) - target).pow(3).sum().backward()
    before = model[0].weight.grad.clone()
    optimizer.step()
    assert treatment.last.gauged
    pending = model[0].weight.grad.clone()
    optimizer.zero_grad()
    (model(x) - target).pow(3).sum().backward()
    true = model[0].weight.grad
    assert (before - true).norm() > 0.1 * true.norm()
    assert (pending - true).norm() <= (1e-3 if dtype == torch.float32 else 1e-9) * true.norm()


class Net(nn.Module):
    def __init__(self, channels=8, **options):
        super().__init__()
        self.conv1 = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.norm1 = DecorrelatedBatchNorm2d(channels, **options)
        self.conv2 = nn.Conv2d(channels, 8, 3, padding=1)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = torch.relu(self.norm1(self.conv1(x)))
        return self.head(torch.relu(self.conv2(x)).mean((2, 3)))


def net(seed=0, **options):
    torch.manual_seed(seed)
    return Net(**options)


def images(seed=0, num=16):
    """Smooth images, whose patches have an ill-conditioned covariance."""
    return F.avg_pool2d(noise(num, 3, 10, 10, seed=seed), 3, 1)


def exact(spec):
    return spec.replace("olr", "olr(rule=exact)")


def step(model, optimizer, seed=0, treatment=None):
    optimizer.zero_grad()
    x = images(seed)
    loss = F.cross_entropy(model(x), (x.mean((2, 3)).argmax(1) + seed) % 4)
    if treatment is not None:
        loss = loss + 0 * treatment.penalty()  # which pulls towards another condition number
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("spec", ["gauge", "nog+gauge", "ol+gauge", "gauge+olr", "ol+nog+olr+gauge"])
@pytest.mark.filterwarnings("ignore:olr with only one")
def test_training_keeps_the_condition_number_below_the_threshold(spec, optimizer):
    model = net()
    treatment = treat(model, "conv1", spec)
    opt = OPTIMIZERS[optimizer](model.parameters())
    treatment.attach(opt)
    applied, conds = 0, []
    for seed in range(40):
        assert math.isfinite(step(model, opt, seed, treatment))
        last = treatment.last
        assert last.gauged == (last.cond_before > 10)
        assert last.cond_after == (pytest.approx(1) if last.gauged else last.cond_before)
        applied += last.gauged
        conds.append(last.cond_before)
    assert conds[0] > 10
    assert 1 <= applied <= 4
    assert sum(cond <= 10 for cond in conds[10:]) >= 0.95 * 30
    assert model.conv1.weight.isfinite().all()


def test_nothing_happens_below_the_threshold():
    plain, treated = net(), net()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (plain, treated)]
    treatment = treat(treated, "conv1", "gauge(threshold=1e6)").attach(optimizers[1])
    for seed in range(3):
        for model, optimizer in zip((plain, treated), optimizers, strict=True):
            step(model, optimizer, seed)
        assert not treatment.last.gauged
        assert treatment.last.cond_before == treatment.last.cond_after > 10
    for (name, a), b in zip(plain.state_dict().items(), treated.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("case", CASES)
def test_the_covariance_of_outputs_with_inputs_gives_that_of_the_outputs(case):
    make, norm, shape = CASES[case]
    torch.manual_seed(0)
    x = noise(*shape, dtype=torch.float64) + 5.0
    model = nn.Sequential(make(), norm()).double()
    treatment = treat(model, "0", "gauge")
    model(x)
    rows = gauge_of(treatment)._rows
    W, WS = rows(model[0].weight.detach()), rows(cross_covariance(model[0], (x,), {}))
    assert torch.allclose(WS @ W.mT, model[1].last_batch().covariance, atol=1e-12)


@pytest.mark.parametrize("spec", ["gauge", "nog+gauge", "gauge+olr", "nog+gauge+olr"])
@pytest.mark.parametrize("channels", [(8, 8), (6, 12)])
@pytest.mark.filterwarnings("ignore:olr with only one")
def test_training_goes_as_it_would_go_on_white_inputs(spec, channels):
    """After the change, a step of the weight is that of the weight which white inputs would have."""
    fan_in, fan_out = channels
    torch.manual_seed(0)
    x = noise(200, fan_in, dtype=torch.float64) * torch.logspace(0, -1.5, fan_in, dtype=torch.float64) + 1
    y = noise(200, 1, dtype=torch.float64, seed=3)

    def network():
        torch.manual_seed(1)
        norm = DecorrelatedBatchNorm1d(fan_out, rtol=1e-8)
        return nn.Sequential(nn.Linear(fan_in, fan_out), norm, nn.Tanh(), nn.Linear(fan_out, 1)).double()

    def trained(model, treatment, x, steps):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
        if treatment is not None:
            treatment.attach(optimizer)
        outputs = []
        for _ in range(steps):
            optimizer.zero_grad()
            outputs.append(model(x))
            (outputs[-1] - y).square().mean().backward()
            optimizer.step()
        return torch.stack(outputs).detach()

    gauged = network()
    treatment = treat(gauged, "0", exact(spec))
    found = trained(gauged, treatment, x, 20)
    root = gauge_of(treatment)._metric(torch.eye(fan_in, dtype=torch.float64)[None])[0]

    white = network()
    P = covariance(white[0](x).detach().T)
    l, U = torch.linalg.eigh(P)
    kept = l > 1e-8 * l.max()
    whitening = (U[:, kept] / l[kept].sqrt()) @ U[:, kept].T
    start = l[kept].mean().sqrt() * whitening @ white[0].weight.detach()
    white[0].weight.data.copy_(torch.linalg.solve(root, start, left=False))
    rest = spec.replace("+gauge", "").replace("gauge+", "").replace("gauge", "none")
    expected = trained(white, treat(white, "0", exact(rest)), (x - x.mean(0)) @ root, 20)
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-8)
    assert (found[-1] - found[0]).norm() > 0.1 * found[0].norm()
    assert covariance(((x - x.mean(0)) @ root).T).std() < covariance(x.T).std()  # it was not white before


@pytest.mark.parametrize("spec", ["gauge", "nog+gauge"])
@pytest.mark.parametrize("first", [0, 4])
def test_the_scale_does_not_change_the_training(spec, first):
    outputs = []
    for scale in ("trace", "weight", "unit"):
        model = net().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
        treatment = treat(model, "conv1", spec.replace("gauge", f"gauge(scale={scale})")).attach(optimizer)
        for seed in range(10):
            optimizer.zero_grad()
            smooth = images(seed).double()
            x = smooth if seed >= first else noise(*smooth.shape, seed=seed, dtype=torch.float64)
            F.cross_entropy(model(x), x.mean((2, 3)).argmax(1)).backward()
            optimizer.step()
            assert treatment.last.gauged or seed != first
            assert not treatment.last.gauged or seed >= first
        outputs.append(model(images(9).double()))
    assert torch.allclose(outputs[0], outputs[1], atol=1e-6)
    assert torch.allclose(outputs[0], outputs[2], atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_weights(dtype):
    torch.manual_seed(0)
    layer = nn.Conv2d(2, 3, 1, bias=False)
    x = noise(20, 2, 64, 64) + 5.0  # more samples than float16 can count, and a mean
    expected = cross_covariance(layer.to(dtype).double(), (x.to(dtype).double(),), {})
    found = cross_covariance(layer.to(dtype), (x.to(dtype),), {})
    assert torch.allclose(found.double(), expected, rtol=1e-3, atol=1e-4)


def test_a_gradient_in_half_precision_does_not_overflow():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    treatment = treat(model, "conv1", "gauge").attach(optimizer)
    step(model, optimizer)
    half = step_of(treatment, optimizer)
    half._grad = torch.full(model.conv1.weight.shape, 6e4, dtype=torch.float16)
    gauge_of(treatment)._measure(half, gauge_of(treatment)._metric.squared())
    assert half.gradient.isfinite().all()


def test_an_input_that_was_overwritten_is_noticed():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    treatment = treat(model, "conv1", "gauge").attach(optimizer)
    x = images()
    model(x).square().sum().backward()
    x.copy_(5 * images(1))
    weight, gradient = model.conv1.weight.detach().clone(), model.conv1.weight.grad.clone()
    with pytest.warns(OrthocondWarning, match="overwritten before the optimizer's step"):
        optimizer.step()
    assert not treatment.last.gauged
    assert torch.allclose(model.conv1.weight, weight - 0.1 * gradient, atol=1e-6)


def test_a_layer_with_more_arguments_than_its_input():
    class Up(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = ill_conditioned_(nn.ConvTranspose2d(3, 6, 3, stride=2))
            self.norm = DecorrelatedBatchNorm2d(6)

        def forward(self, x):
            return self.norm(self.conv(x, output_size=(12, 12)))

    torch.manual_seed(0)
    model, x = Up().double(), noise(8, 3, 5, 5, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    treatment = treat(model, "conv", "gauge(metric=weight)", example_input=x).attach(optimizer)
    model(x).pow(3).sum().backward()
    optimizer.step()
    assert treatment.last.gauged
    pending = model.conv.weight.grad.clone()
    optimizer.zero_grad()
    model(x).pow(3).sum().backward()
    assert torch.allclose(pending, model.conv.weight.grad, atol=1e-9)


def test_nothing_is_held_after_the_step_nor_by_copies():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    treatment = treat(model, "conv1", "gauge").attach(optimizer)
    other = copy.deepcopy(model)
    other(images())
    (copied,) = (hook.__self__ for hook in other.conv1._forward_hooks.values())
    assert copied.module is None
    assert not vars(copied)
    assert gauge_of(treatment)._seen is gauge_of(treatment)._inputs is None
    step(model, optimizer)
    assert gauge_of(treatment)._seen is gauge_of(treatment)._inputs is None
    model.conv1(images())  # without the norm behind it
    optimizer.step()
    assert gauge_of(treatment)._inputs is None


def test_the_metric_of_the_weight_is_no_metric():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    treatment = treat(model, "conv1", "gauge(metric=weight)").attach(optimizer)
    step(model, optimizer)
    assert treatment.last.gauged
    assert treatment.state_dict()["parts"]["gauge"]["state"] is None


@pytest.mark.half_products
def test_under_autocast_and_by_keyword():
    class Keyword(Net):
        def forward(self, x):
            x = torch.relu(self.norm1(self.conv1(input=x)))
            return self.head(torch.relu(self.conv2(x)).mean((2, 3)))

    torch.manual_seed(0)
    model = Keyword()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    treatment = treat(model, "conv1", "gauge").attach(optimizer)
    for seed in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(images(seed)), torch.arange(16) % 4)
        loss.backward()
        optimizer.step()
        assert treatment.last.gauged == (seed == 0)
    assert model.conv1.weight.isfinite().all()


def test_nog_is_orthogonal_where_the_input_is_white():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    treatment = treat(model, "conv1", "gauge+nog").attach(optimizer)
    seen = []
    gauge_step = gauge_of(treatment)._step

    def spied(step):
        done = gauge_step(step)
        seen.append(model.conv1.weight.detach().clone())
        return done

    gauge_of(treatment)._step = spied
    step(model, optimizer)
    assert treatment.last.gauged
    moved = (model.conv1.weight.detach() - seen[0]).flatten(1).double() / 0.1
    moved = gauge_of(treatment)._metric.inverse()(moved[None])
    assert torch.allclose(torch.linalg.svdvals(moved), torch.ones(8, dtype=torch.float64), atol=1e-3)
    assert treatment.last.gradient_range[1] > 0


@pytest.mark.parametrize("momentum", ["keep", "reset", "transform"])
@pytest.mark.parametrize(("optimizer", "key"), [("sgd", "momentum_buffer"), ("adamw", "exp_avg")])
def test_momenta(momentum, optimizer, key):
    model = net()
    opt = OPTIMIZERS[optimizer](model.parameters())
    step(model, opt)
    treatment = treat(model, "conv1", f"gauge(momentum={momentum})")
    old, weight = opt.state[model.conv1.weight][key].clone(), model.conv1.weight.detach().clone()
    x = images(3)
    model(x)
    treatment.attach(opt)
    model(x)
    with torch.no_grad():
        is_changed, *_ = gauge_of(treatment)._step(step_of(treatment, opt))
    assert is_changed
    new = opt.state[model.conv1.weight][key]
    if momentum == "keep":
        assert torch.equal(new, old)
    elif momentum == "reset":
        assert not new.any()
    else:  # contragredient: the product with the weight stays
        assert torch.allclose((new * model.conv1.weight).sum(), (old * weight).sum(), rtol=1e-3)
        assert not torch.equal(new, old)


def test_threshold_one_acts_at_every_step_and_only_the_trace_rule_lets_the_weight_grow():
    norms = {}
    for scale in ("trace", "unit", "weight"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), DecorrelatedBatchNorm1d(8), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        treatment = treat(model, "0", f"gauge(threshold=1.0, scale={scale})").attach(optimizer)
        before = []
        for seed in range(60):
            optimizer.zero_grad()
            model(noise(100, 8, seed=seed)).square().mean().backward()
            optimizer.step()
            assert treatment.last.gauged
            before.append(model[0].weight.detach().norm().item())
        norms[scale] = before[-1] / before[0]
    assert norms["trace"] > 5  # 1 / (1 - 8/99) a step on the squared norm
    assert 0.5 < norms["unit"] < 2
    assert norms["weight"] == pytest.approx(1, rel=1e-2)


@pytest.mark.filterwarnings("ignore:.*samples in training for:orthocond.errors.OrthocondWarning")
@pytest.mark.parametrize("batch", [2, 4, 9, 12, 20])
def test_a_tiny_batch_is_not_taken_for_ill_conditioned(batch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), DecorrelatedBatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    treatment = treat(model, "0", "gauge").attach(optimizer)
    applied, norm = 0, model[0].weight.norm().item()
    for seed in range(100):
        optimizer.zero_grad()
        model(noise(batch, 8, seed=seed)).square().mean().backward()
        optimizer.step()
        applied += treatment.last.gauged
    assert applied <= 1
    assert model[0].weight.norm().item() < 3 * norm
    assert batch < 4 or treatment.last.cond_before > 2


def test_a_dead_channel_stays_dead_and_harms_nobody():
    torch.manual_seed(0)
    layer = ill_conditioned_(nn.Conv2d(3, 8, 3))
    layer.weight.data[2], layer.bias.data[2] = 0, 0
    x = noise(16, 3, 9, 9)
    before, after, treatment = gauged_pair(layer, DecorrelatedBatchNorm2d(8), x, torch.float32)
    assert treatment.last.gauged
    assert after[0].weight[2].abs().max() < 1e-5 * after[0].weight.abs().max()
    assert_same_outputs(before, after, x)


@pytest.mark.parametrize("threshold", [1.0, 10.0])
def test_rank_zero_and_rank_one_are_left_alone(threshold):
    for rank in (0, 1):
        torch.manual_seed(0)
        layer = nn.Conv2d(3, 8, 3)
        layer.weight.data[rank:] = 0
        model = nn.Sequential(layer, DecorrelatedBatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 9, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        treatment = treat(model, "0", f"gauge(threshold={threshold})").attach(optimizer)
        before = copy.deepcopy(model[0].state_dict())
        model(noise(16, 3, 5, 5)).square().mean().backward()
        optimizer.step()
        assert (treatment.last.gauged, treatment.last.cond_before, treatment.last.cond_after) == (False, 1, 1)
        assert all(torch.equal(value, before[name]) for name, value in model[0].state_dict().items())


def test_one_group_of_rank_zero():
    torch.manual_seed(0)
    layer = ill_conditioned_(nn.Linear(12, 8))
    layer.weight.data[:4] = 0
    x = noise(300, 12)
    before, after, treatment = gauged_pair(layer, DecorrelatedBatchNorm1d(8, groups=2), x, torch.float32)
    assert treatment.last.gauged
    assert after[0].weight.isfinite().all()
    assert_same_outputs(before, after, x)


def test_nan_is_an_error_of_the_layer_and_what_was_seen_before_is_not_used_again():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    treatment = treat(model, "conv1", "gauge").attach(optimizer)
    step(model, optimizer)
    assert treatment.last.gauged
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(NonFiniteError):
        model(torch.full((4, 3, 8, 8), float("nan")))
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    assert (treatment.last.gauged, treatment.last.cond_before) == (False, None)
    assert torch.equal(model.conv1.weight, before["conv1.weight"])


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_scaler_skips_changes_nothing(fused):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    treatment = treat(model, "conv1", "gauge").attach(optimizer)
    scaler = torch.amp.GradScaler("cpu")
    before = model.conv1.weight.detach().clone()
    for value in (float("nan"), None):
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(images()), torch.arange(16) % 4)).backward()
        if value is not None:
            model.conv1.weight.grad[0, 0, 0, 0] = value
        scaler.step(optimizer)
        scaler.update()
        if value is not None:
            assert torch.equal(model.conv1.weight, before)
    assert treatment.last.gauged


def test_checkpoints():
    def build(seed):
        model = net(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, treat(model, "conv1", "gauge+nog").attach(optimizer)

    parts = build(0)
    for seed in range(3):
        step(*parts[:2], seed)
    file = io.BytesIO()
    torch.save([part.state_dict() for part in parts], file)
    file.seek(0)
    others = build(1)
    for part, state in zip(others, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    assert others[2].last == parts[2].last
    for seed in range(3, 8):
        for each in (parts, others):
            step(*each[:2], seed)
    for a, b in zip(parts[0].state_dict().values(), others[0].state_dict().values(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ArgumentError, match=r"threshold=10\.0.*not of.*threshold=5\.0"):
        treat(net(), "conv1", "gauge(threshold=5.0)+nog").load_state_dict(parts[2].state_dict())


def test_detach_stops_it_and_copies_are_left_alone():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    treatment = treat(model, "conv1", "gauge").attach(optimizer)
    other = copy.deepcopy(model)
    other(images())
    pickle.loads(pickle.dumps(model))
    assert gauge_of(treatment)._seen is None
    treatment.remove()
    model(images())
    assert gauge_of(treatment)._seen is None
    assert not model.norm1._forward_hooks
    treatment.attach(optimizer)
    step(model, optimizer)
    assert treatment.last.gauged
    x = images(5)
    assert torch.allclose(fold(model)(x), model.eval()(x), atol=1e-4)


def test_with_a_monitor_and_running_statistics_left_out():
    model = net(track_running_stats=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    treatment = treat(model, "conv1", "gauge").attach(optimizer)
    with ConditionMonitor(model, rtol=model.norm1.rtol) as monitor:
        step(model, optimizer)
    assert monitor.history()[0]["cond_support"] == pytest.approx(treatment.last.cond_before)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of torch.compile's own
def test_a_compiled_model():
    model = net()
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    treatment = treat(compiled, "conv1", "gauge").attach(optimizer)
    applied = 0
    for seed in range(5):
        step(compiled, optimizer, seed)
        applied += treatment.last.gauged
    assert 1 <= applied < 5


class Untraceable(Net):
    def forward(self, x):
        return super().forward(x if x.sum() > 0 else -x)


class Attended(nn.Module):
    """Tokens through a linear layer, turned for the norm: only a run shows which dimension the channels are."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 8), DecorrelatedBatchNorm1d(8)

    def forward(self, x):
        return self.norm(self.linear(x).transpose(1, 2))


def test_the_norm_is_found_with_an_example_where_the_code_does_not_show_it():
    x = images()
    for model in (Untraceable(), net(), nn.Sequential(net())):
        name = next(name for name, layer in model.named_modules() if name.endswith("conv1"))
        treatment = treat(model, name, "gauge", example_input=x)
        assert gauge_of(treatment).norm is next(m for m in model.modules() if isinstance(m, DecorrelatedBatchNorm2d))
        assert treat(model, "auto", "gauge", example_input=x).layer is treatment.layer
    with pytest.raises(ArgumentError, match=r"can't see from the model's code.*example_input"):
        treat(Untraceable(), "conv1", "gauge")


def test_tokens():
    torch.manual_seed(0)
    model, x = Attended().double(), noise(40, 8, 6, dtype=torch.float64)  # as many tokens as channels
    with pytest.raises(ArgumentError, match="'transpose' first"):
        treat(model, "linear", "gauge")
    treatment = treat(model, "linear", "gauge(threshold=2.0)", example_input=x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    treatment.attach(optimizer)
    (model(x) ** 3).sum().backward()
    before = copy.deepcopy(model)
    optimizer.step()
    assert treatment.last.gauged
    assert_same_outputs(before, model, x)
    wrong = nn.Sequential(nn.Linear(6, 8), DecorrelatedBatchNorm1d(8)).double()  # its norm whitens the tokens
    with pytest.raises(ArgumentError, match="channels are rearranged"):
        treat(wrong, "0", "gauge", example_input=x)
    treat(wrong, "0", "gauge").attach(torch.optim.SGD(wrong.parameters(), lr=0.1))
    with pytest.raises(ArgumentError, match="three dimensions"):
        wrong(x)


class Branched(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), DecorrelatedBatchNorm2d(8)

    def forward(self, x):
        x = self.conv(x)
        return self.norm(x) + x


class Twice(Branched):
    def forward(self, x):
        return self.norm(self.conv(x)) + self.norm(self.conv(-x))


class Reading(Branched):
    def forward(self, x):
        return self.norm(self.conv(x)) + self.conv.weight.sum()


def tied():
    model = nn.Sequential(nn.Conv2d(8, 8, 1), DecorrelatedBatchNorm2d(8), nn.Conv2d(8, 8, 1))
    model[2].weight = model[0].weight
    return model


def stem(*between, **options):
    return nn.Sequential(nn.Conv2d(3, 8, 3), *between, DecorrelatedBatchNorm2d(8, **options))


@pytest.mark.parametrize("example", [False, True])
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Conv2d(3, 8, 3), CovariancePool2d()), "needs a whitening layer .* CovariancePool2d does not"),
        (stem(nn.ReLU()), "'Relu' first"),
        (stem(nn.BatchNorm2d(8)), "BatchNorm.*' first"),
        (stem(nn.Dropout(0.5)), "'Dropout' first"),
        (stem(nn.MaxPool2d(2)), "'MaxPool2.*' first"),
        (stem(eps=1e-2, rtol=0.0), "eps=0 behind .* got eps=0.01.*by rtol"),
        (stem(solver="newton_schulz", rtol=None), "knows which directions it drops .* use one of eigh, svd, products"),
        (nn.Sequential(nn.Conv2d(3, 9, 3, groups=3), DecorrelatedBatchNorm2d(9)), "give it groups=3"),
        (nn.Sequential(orthogonal_weight(nn.Conv2d(3, 8, 3)), DecorrelatedBatchNorm2d(8)), "has to be a free one"),
        (nn.Sequential(spectral_norm(nn.Conv2d(3, 8, 3)), DecorrelatedBatchNorm2d(8)), "has to be a free one"),
        (tied(), "serves another layer"),
        (Branched(), "goes to"),
        (Twice(), "2 times"),
        (nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), "no meta-layer"),
    ],
)
def test_what_can_not_be_gauged_is_refused(model, message, example):
    before = copy.deepcopy(model.state_dict())
    channels = 8 if message.startswith("serves") else 3
    given = {"example_input": noise(4, channels, 9, 9)} if example else {}
    layer = "conv" if isinstance(model, Branched) else "0"
    with pytest.raises(ArgumentError, match=f"(?i){message}"):
        treat(model, layer, "gauge", **given)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()
                   if not isinstance(module, DecorrelatedBatchNorm2d))  # fmt: skip


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: treat(net(), "conv1", "gauge+ow"), "can't combine gauge with ow: .* use gauge without"),
        (lambda: treat(net(), "conv1", "sn+gauge"), "which sn constrains"),
        (lambda: treat(net(), "conv2", "gauge"), "'relu' first"),
        (lambda: treat(net(), "head", "gauge"), "no meta-layer follows it"),
        (lambda: treat(Reading(), "conv", "gauge"), "without calling it"),
        (lambda: treat(net(), "conv1", "gauge(threshold=0.5)"), "threshold >= 1"),
        (lambda: treat(net(), "conv1", "gauge(threshold=nan)"), "threshold >= 1"),
        (lambda: treat(net(), "conv1", "gauge(scale=det)"), "choose one of trace, weight, unit"),
        (lambda: treat(net(), "conv1", "gauge(momentum=lose)"), "choose one of keep, reset, transform"),
        (lambda: treat(net(), "conv1", "gauge(metric=output)"), "choose one of input, weight"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()


def test_a_weight_that_was_constrained_since_is_refused_when_attached():
    model = net()
    treatment = treat(model, "conv1", "gauge")
    treat(model, "conv1", "ow")
    with pytest.raises(ArgumentError, match="gauge replaces the weight"):
        treatment.attach(torch.optim.SGD(model.parameters(), lr=0.1))


def test_spectrum_after_agrees_with_the_next_forward():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    treatment = treat(model, "conv1", "gauge").attach(optimizer)
    step(model, optimizer)
    found = spectrum(covariance(model.conv1(images()).movedim(1, 0).flatten(1)), rtol=1e-4)
    assert found.cond_support.item() == pytest.approx(treatment.last.cond_after, rel=1e-3)
