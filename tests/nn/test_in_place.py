"""In-place operations behind the layers: what BatchNorm allows, they allow, and no derivative suffers."""

import copy

import pytest
import torch
from torch import nn

from orthocond.linalg import SOLVERS
from orthocond.nn import (
    KINDS,
    CovariancePool2d,
    DecorrelatedBatchNorm1d,
    DecorrelatedBatchNorm2d,
    DecorrelatedBatchNorm3d,
    RotationHead,
    WhiteningColoring2d,
    convert_batchnorm,
    orthogonal_weight,
)

from cases import noise


class BasicBlock(nn.Module):
    """Torchvision's block of ResNet-18 and 34, line by line, but for ``inplace``."""

    expansion = 1

    def __init__(self, inplanes, planes, stride=1, downsample=None, inplace=True):
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=inplace)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = downsample

    def forward(self, x):
        identity = x
        out = self.conv1(x)
        out = self.bn1(out)
        out = self.relu(out)
        out = self.conv2(out)
        out = self.bn2(out)
        if self.downsample is not None:
            identity = self.downsample(x)
        return self.relu(joined(out, identity, self.relu.inplace))


class Bottleneck(nn.Module):
    """Torchvision's block of ResNet-50 and deeper, line by line, but for ``inplace``."""

    expansion = 4

    def __init__(self, inplanes, planes, stride=1, downsample=None, inplace=True):
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = nn.Conv2d(planes, 4 * planes, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * planes)
        self.relu = nn.ReLU(inplace=inplace)
        self.downsample = downsample

    def forward(self, x):
        identity = x
        out = self.conv1(x)
        out = self.bn1(out)
        out = self.relu(out)
        out = self.conv2(out)
        out = self.bn2(out)
        out = self.relu(out)
        out = self.conv3(out)
        out = self.bn3(out)
        if self.downsample is not None:
            identity = self.downsample(x)
        return self.relu(joined(out, identity, self.relu.inplace))


def joined(out, identity, inplace):
    if inplace:
        out += identity
        return out
    return out + identity


class ResNet(nn.Module):
    """Torchvision's ResNet, narrow, with a stem, a block that downsamples and ``more`` that don't."""

    def __init__(self, block, more, inplace=True):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=inplace)
        width = 4 * block.expansion
        downsample = nn.Sequential(nn.Conv2d(8, width, 1, stride=2, bias=False), nn.BatchNorm2d(width))
        others = [block(width, 4, inplace=inplace) for _ in range(more)]
        self.layer1 = nn.Sequential(block(8, 4, 2, downsample, inplace), *others)
        self.fc = nn.Linear(width, 5)

    def forward(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        return self.fc(torch.flatten(self.layer1(x).mean((2, 3)), 1))


def pair(block, more):
    """A converted network that works in place, and the same one that doesn't."""
    torch.manual_seed(0)
    in_place, plain = ResNet(block, more).double(), ResNet(block, more, inplace=False).double()
    plain.load_state_dict(in_place.state_dict())
    return convert_batchnorm(in_place), convert_batchnorm(plain)


@pytest.mark.parametrize("block", [BasicBlock, Bottleneck])
@pytest.mark.parametrize(("mode", "compiled"), [("train", False), ("eval", False), ("train", True)])
def test_a_torchvision_resnet(block, compiled, mode):
    in_place, plain = pair(block, more=0 if compiled else 1)
    assert not any(isinstance(layer, nn.BatchNorm2d) for layer in in_place.modules())
    x = noise(6, 3, 8, 8, dtype=torch.float64).requires_grad_()
    for model in (in_place, plain):
        model(x)  # for eval: statistics other than at the start
        model.train(mode == "train")
    run = torch.compile(in_place, backend="aot_eager") if compiled else in_place
    gradients = []
    for model, called in ((in_place, run), (plain, plain)):
        leaves = (x, *model.parameters())
        once = torch.autograd.grad(called(x).square().sum(), leaves, create_graph=True)
        norm = once[0].square().sum()
        if compiled and called is run:
            with pytest.raises(RuntimeError, match="does not currently support double backward"):  # torch's own limit
                torch.autograd.grad(norm, leaves[:-1])
        twice = () if compiled else torch.autograd.grad(norm, leaves[:-1])
        gradients.append((*once, *twice))
    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(one, other, rtol=1e-7, atol=1e-9 * other.abs().max().item())
    assert torch.allclose(in_place.bn1.running_whitening, plain.bn1.running_whitening)


CHANGES = {
    "relu_": lambda y: nn.functional.relu(y, inplace=True),
    "+=": lambda y: y.__iadd__(1.5),
    "slice": lambda y: (y[:, :1].mul_(2), y)[1],
    "dropout": lambda y: nn.functional.dropout(y, 0.0, inplace=True).sigmoid_(),
}
SHAPES = {
    "(N, C)": (DecorrelatedBatchNorm1d, (40, 6)),
    "(N, C, L)": (DecorrelatedBatchNorm1d, (8, 6, 9)),
    "(N, C, 1)": (DecorrelatedBatchNorm1d, (40, 6, 1)),
    "NCHW": (DecorrelatedBatchNorm2d, (8, 6, 3, 4)),
    "NHWC": (DecorrelatedBatchNorm2d, (8, 6, 3, 4)),
    "transposed": (DecorrelatedBatchNorm2d, (8, 6, 3, 4)),
    "NCDHW": (DecorrelatedBatchNorm3d, (8, 6, 3, 2, 2)),
    "NDHWC": (DecorrelatedBatchNorm3d, (8, 6, 3, 2, 2)),
}


def stored(x, layout):
    if layout == "transposed":
        return x.mT.contiguous().mT
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if layout in ("NHWC", "NDHWC") else x


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("layout", SHAPES)
def test_every_layout(layout, groups, affine, mode):
    cls, shape = SHAPES[layout]
    layer = cls(6, groups=groups, affine=affine)
    layer(noise(*shape))
    layer.train(mode == "train")
    check(layer, stored(noise(*shape, seed=2), layout))


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_solver(solver, dtype):
    check(DecorrelatedBatchNorm2d(4, solver=solver), noise(8, 4, 3, 3, dtype=torch.float32).to(dtype))
    for vectorize in (True, False):
        check(CovariancePool2d(solver=solver, vectorize=vectorize), noise(3, 4, 5, 5).to(dtype))


def test_the_other_layers():
    style = noise(2, 4, 5, 5, seed=3)
    coloring = WhiteningColoring2d()
    check(lambda x: coloring(x, style), noise(2, 4, 5, 5))
    for kind in KINDS:
        check(orthogonal_weight(nn.Conv2d(4, 4, 3, padding=1), kind=kind), noise(2, 4, 5, 5))
    check(orthogonal_weight(nn.Linear(4, 4)), noise(9, 4))
    check(RotationHead(2), noise(9, 4))


def check(layer, x):
    """Each change in place has the gradients of the same change to a copy, and without gradients it is allowed."""
    copied = copy.deepcopy(layer)
    for name, change in CHANGES.items():
        gradients = []
        for module, prepare in ((layer, lambda y: y), (copied, torch.clone)):
            leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
            changed = change(prepare(module(leaf)))
            gradients.append(torch.autograd.grad(changed.float().square().sum(), leaf)[0])
        assert torch.equal(*gradients), name
    for context in (torch.no_grad, torch.enable_grad):
        with context():
            y = layer(x)
        y += torch.ones(y.shape, dtype=y.dtype, requires_grad=True)
        assert y.requires_grad
