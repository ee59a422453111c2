"""Which layer feeds which meta-layer."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from orthocond import find_pre_svd
from orthocond.errors import ArgumentError
from orthocond.graph import Feed, Join, arguments, meta_layer_behind
from orthocond.nn import CovariancePool2d, DecorrelatedBatchNorm1d, DecorrelatedBatchNorm2d, orthogonal_weight

from cases import noise


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x):
        return F.relu_(self.bn(self.conv(x)) + x)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nn.Sequential(nn.Conv2d(3, 8, 3), DecorrelatedBatchNorm2d(8)), {"1": "0"}),
        (nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), CovariancePool2d()), {"3": "0"}),
        (
            nn.Sequential(nn.Conv2d(3, 8, 3), Residual(), CovariancePool2d()),
            {"2": Join([Feed("1.conv", (range(8),)), Feed("0", (range(8),))])},
        ),
        (nn.Sequential(orthogonal_weight(nn.Conv2d(3, 8, 3)), DecorrelatedBatchNorm2d(8)), {"1": "0"}),
        (
            nn.Sequential(nn.Flatten(), nn.Linear(75, 8), nn.Unflatten(1, (8, 1, 1)), DecorrelatedBatchNorm2d(8)),
            {"3": "1"},
        ),
        (
            nn.Sequential(nn.Conv2d(3, 8, 1), DecorrelatedBatchNorm2d(8), nn.Conv2d(8, 4, 1), CovariancePool2d()),
            {"1": "0", "3": "2"},
        ),
    ],
)
def test_find_pre_svd(model, expected):
    model.train()
    state = copy.deepcopy(model.state_dict())
    for frozen in (False, True):
        model.requires_grad_(not frozen)
        assert find_pre_svd(model, noise(2, 3, 5, 5)) == expected
    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())


class Gated(nn.Module):
    """Squeeze and excite: the gate is deeper than what it gates, and is not what is decomposed."""

    def __init__(self):
        super().__init__()
        self.conv, self.down, self.up = nn.Conv2d(3, 8, 1), nn.Linear(8, 4), nn.Linear(4, 8)
        self.norm = DecorrelatedBatchNorm2d(8)

    def forward(self, x):
        x = self.conv(x)
        gate = torch.sigmoid(self.up(torch.relu(self.down(x.mean((2, 3))))))
        return self.norm(input=x * gate[:, :, None, None])


class Attending(nn.Module):
    """An attention that uses the weight of its last layer without calling it, and a norm with a weight of images."""

    def __init__(self):
        super().__init__()
        self.linear, self.attention = nn.Linear(8, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.pool = nn.LayerNorm((4, 8)), CovariancePool2d()

    def forward(self, x):
        x = self.norm(self.attention(*[self.linear(x)] * 3)[0])
        return self.pool(x.mT.unflatten(2, (2, 2)))


def test_find_pre_svd_is_not_misled():
    assert find_pre_svd(Gated(), noise(2, 3, 5, 5)) == {"norm": "conv"}
    assert find_pre_svd(Attending(), noise(2, 4, 8)) == {"pool": "attention.out_proj"}


class Siamese(nn.Module):
    """A layer that is called twice, and arguments by name."""

    def __init__(self):
        super().__init__()
        self.conv, self.pool = nn.Conv2d(3, 4, 1), CovariancePool2d()

    def forward(self, a, b):
        return self.pool(self.conv(a)) - self.pool(self.conv(b))


def test_find_pre_svd_with_shared_modules_and_several_inputs():
    x = noise(2, 3, 5, 5)
    for example in ((x, x), {"a": x, "b": x}):
        assert find_pre_svd(Siamese(), example) == {"pool": "conv"}


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = DecorrelatedBatchNorm2d(3)

    def forward(self, x):
        return x


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(3, 3), "found no meta-layer"),
        (nn.Sequential(nn.ReLU(), DecorrelatedBatchNorm2d(3)), "'1' has no layer with a matrix"),
        (Unused(), "did not call the meta-layer 'norm'"),
    ],
)
def test_find_pre_svd_tells_what_is_missing(model, message):
    with pytest.raises(ArgumentError, match=message):
        find_pre_svd(model, noise(2, 3, 3, 3))


class Wired(nn.Module):
    """A model whose forward is a function of the model and its inputs."""

    def __init__(self, wiring, **layers):
        super().__init__()
        self.wiring = wiring
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *inputs):
        return self.wiring(self, *inputs)


def conv(*channels):
    return nn.Conv2d(*channels, 1)


def u_net(m, x):
    skip = m.skip(x)
    return m.norm(torch.cat([skip, m.up(F.max_pool2d(F.relu(skip), 2))], 1))


def interpolated(m, x):
    return m.norm(torch.cat([m.skip(x), F.interpolate(m.up(x[:, :, ::2, ::2]), scale_factor=2)], 1))


def interleaved(m, x):
    return m.norm(torch.stack([m.skip(x), m.up(x)], 2).flatten(1, 2))


def residual(m, x):
    x = m.stem(x)
    return m.norm(x + m.branch(F.relu_(x)))


def conditioned(m, x):
    pooled = x.mean((2, 3))
    return m.norm(m.conv(x) * m.scale(pooled)[:, :, None, None] + m.shift(pooled)[:, :, None, None])


def appended(m, x):
    latent = m.latent(x.mean((2, 3)))[:, :, None, None].expand(-1, -1, *x.shape[2:])
    return m.norm(torch.cat([m.conv(x), latent], 1))


def spatially_gated(m, x):
    return m.norm(m.conv(x) * (1 + torch.sigmoid(m.gate(x))))


def gated_input(m, x):
    return m.norm(x * torch.sigmoid(m.gate(x)))


def attention_by_hand(m, x):
    q, k, v = m.q(x), m.k(x), m.v(x)
    return m.norm((torch.softmax(q @ k.mT, -1) @ v).mT)


def attention_by_torch(m, x):
    q, k, v = (part.unsqueeze(1) for part in (m.q(x), m.k(x), m.v(x)))
    return m.norm(F.scaled_dot_product_attention(q, k, v).squeeze(1).mT)


def uncalled(m, x):
    return m.norm(torch.cat([F.linear(x, m.a.weight, m.a.bias).mT, m.b(x).mT], 1))


def transformer(m, x):
    x = m.embedding(x)
    return m.norm((x + m.attention(x, x, x)[0]).mT)


def noisy(m, x):
    return m.norm(torch.cat([m.skip(x), F.dropout(m.up(x))], 1))


def attending(wiring):
    layers = {name: nn.Linear(8, 8) for name in "qkv"}
    return Wired(wiring, **layers, norm=DecorrelatedBatchNorm1d(8)), noise(2, 6, 8)


def joined(wiring, *, up):
    return Wired(wiring, skip=conv(3, 4), up=conv(up, 4), norm=DecorrelatedBatchNorm2d(8)), noise(2, 3, 6, 6)


IMAGES = noise(2, 3, 6, 6)
ALL = (range(8),)


@pytest.mark.parametrize(
    ("model", "x", "expected"),
    [
        (
            Wired(u_net, skip=conv(3, 4), up=nn.ConvTranspose2d(4, 6, 2, 2), norm=DecorrelatedBatchNorm2d(10)),
            IMAGES,
            Join([Feed("up", (range(4, 10),)), Feed("skip", (range(4),))]),
        ),
        (*joined(interpolated, up=3), Join([Feed("skip", (range(4),)), Feed("up", (range(4, 8),))])),
        (*joined(noisy, up=3), Join([Feed("skip", (range(4),)), Feed("up", (range(4, 8),))])),
        (
            *joined(interleaved, up=3),
            Join([Feed(name, tuple(range(c, c + 1) for c in range(i, 8, 2))) for i, name in enumerate(("skip", "up"))]),
        ),
        (
            Wired(residual, stem=conv(3, 8), branch=conv(8, 8), norm=DecorrelatedBatchNorm2d(8)),
            IMAGES,
            Join([Feed("branch", ALL), Feed("stem", ALL)]),
        ),
        (
            Wired(conditioned, conv=conv(3, 8), scale=nn.Linear(3, 8), shift=nn.Linear(3, 8), norm=CovariancePool2d()),
            IMAGES,
            "conv",
        ),
        (
            Wired(appended, conv=conv(3, 6), latent=nn.Linear(3, 2), norm=DecorrelatedBatchNorm2d(8)),
            IMAGES,
            Join([Feed("conv", (range(6),)), Feed("latent", (range(6, 8),))]),
        ),
        (Wired(spatially_gated, conv=conv(3, 8), gate=conv(3, 8), norm=DecorrelatedBatchNorm2d(8)), IMAGES, "conv"),
        (Wired(gated_input, gate=conv(3, 3), norm=DecorrelatedBatchNorm2d(3)), IMAGES, "gate"),
        (*attending(attention_by_hand), "v"),
        (*attending(attention_by_torch), "v"),
        (
            Wired(uncalled, a=nn.Linear(8, 3), b=nn.Linear(8, 5), norm=DecorrelatedBatchNorm1d(8)),
            noise(2, 6, 8),
            Join([Feed("a", (range(3),)), Feed("b", (range(3, 8),))]),
        ),
        (
            Wired(
                transformer,
                embedding=nn.Linear(4, 8),
                attention=nn.MultiheadAttention(8, 2, batch_first=True),
                norm=DecorrelatedBatchNorm1d(8),
            ),
            noise(2, 6, 4),
            Join([Feed("attention.out_proj", ALL), Feed("embedding", ALL)]),
        ),
    ],
    ids=lambda value: value.wiring.__name__ if isinstance(value, Wired) else "",
)  # fmt: skip
def test_layers_that_meet_in_front_of_a_meta_layer_are_reported_with_their_channels(model, x, expected):
    state, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    for frozen in (False, True):
        model.requires_grad_(not frozen)
        assert find_pre_svd(model, x) == {"norm": expected}
        assert all(parameter.requires_grad is not frozen for parameter in model.parameters())
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.equal(torch.get_rng_state(), generator)  # the dropout of one of them draws


def test_a_meta_layer_that_is_called_for_two_layers_is_fed_by_both():
    model = Wired(lambda m, x: m.pool(m.a(x)) + m.pool(m.b(x)), a=conv(3, 4), b=conv(3, 4), pool=CovariancePool2d())
    join = find_pre_svd(model, IMAGES)["pool"]
    assert str(join) == "'a' (channels 0 to 3) and 'b' (channels 0 to 3)"
    assert join.layers == ("a", "b")


def test_the_meta_layer_behind_a_layer_is_not_shared_with_another():
    model = joined(u_net, up=4)[0]
    model.up = nn.ConvTranspose2d(4, 4, 2, 2)
    with pytest.raises(ArgumentError, match=r"'norm' is fed by several: 'up' \(channels 4 to 7\) and 'skip'"):
        meta_layer_behind(model, "skip", model.skip, IMAGES)


def compiled_in_place(module):
    module.compile(backend="eager")
    return module


@pytest.mark.parametrize("compiled", [lambda part: torch.compile(part, backend="eager"), compiled_in_place])
def test_the_meta_layer_behind_a_layer_is_seen_in_a_compiled_part(compiled):
    part = nn.Sequential(nn.Linear(6, 4), DecorrelatedBatchNorm1d(4))
    model = nn.Sequential(compiled(part), nn.ReLU())
    assert meta_layer_behind(model, "0.0", part[0]) is part[1]


class Batched(nn.Module):
    """A model that takes a batch as one dict."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 1), DecorrelatedBatchNorm2d(4)

    def forward(self, batch):
        return self.norm(self.conv(batch["pixels"]["left"]))


def test_a_dict_that_the_model_takes_as_its_only_argument_is_an_example():
    model = Batched().requires_grad_(False)
    batch = {"pixels": {"left": IMAGES}, "label": torch.arange(2)}
    assert find_pre_svd(model, batch) == {"norm": "conv"}
    assert find_pre_svd(model, {"batch": batch}) == {"norm": "conv"}
    assert find_pre_svd(model, (batch,)) == {"norm": "conv"}
    assert batch["pixels"]["left"] is IMAGES
    assert not IMAGES.requires_grad


def test_a_dict_is_keyword_arguments_where_the_signature_takes_them():
    for forward, expected in (
        (lambda a, b: None, "keywords"),
        (lambda a=None, b=None, c=None: None, "keywords"),
        (lambda **kwargs: None, "keywords"),
        (lambda batch: None, "one"),
        (lambda batch, **kwargs: None, "one"),
    ):
        model = nn.Module()
        model.forward = forward
        args, kwargs = arguments(model, {"a": 1, "b": 2})
        assert (len(args), len(kwargs)) == {"keywords": (0, 2), "one": (1, 0)}[expected]
