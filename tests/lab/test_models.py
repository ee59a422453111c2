"""The residual networks against their published sizes, and with the meta-layers in."""

import pytest
import torch

from orthocond import find_pre_svd
from orthocond.errors import ArgumentError
from orthocond.lab.models import build

from cases import noise

PUBLISHED = {18: 11_689_512, 34: 21_797_672, 50: 25_557_032, 101: 44_549_160, 152: 60_192_808}


@pytest.mark.parametrize("depth", PUBLISHED)
def test_parameter_counts_are_the_published_ones(depth):
    with torch.device("meta"):
        assert sum(p.numel() for p in build(f"resnet{depth}").parameters()) == PUBLISHED[depth]


def test_the_stem_for_small_images_is_whitened_and_found():
    model = build("resnet50", num_classes=100, small_images=True, stem="dbn")
    x = noise(2, 3, 32, 32)
    assert find_pre_svd(model, x) == {"bn1": "conv1"}
    assert model(x).shape == (2, 100)
    assert model.conv1.weight.shape == (64, 3, 3, 3)
    assert model.maxpool(x) is x


def test_the_head_pools_covariances_and_its_layer_is_found():
    model = build("resnet18", num_classes=5, head="covariance", reduction=16)
    x = noise(2, 3, 64, 64)
    assert model(x).shape == (2, 5)
    assert model.fc.in_features == 136
    assert find_pre_svd(model, x) == {"pool": "reduce.0"}
    join = find_pre_svd(build("resnet18", num_classes=5, head="covariance"), x)["pool"]
    assert join.layers == ("layer4.1.conv2", "layer4.0.conv2", "layer4.0.downsample.0")
    assert {feed.channels for feed in join} == {(range(512),)}


@pytest.mark.parametrize(("last_stride", "places"), [(2, (7, 7)), (1, (14, 14))])
def test_the_last_stride_is_the_number_of_places_that_are_pooled(last_stride, places):
    with torch.device("meta"):
        model = build("resnet18", num_classes=5, head="covariance", reduction=8, last_stride=last_stride)
        shapes = []
        model.reduce.register_forward_hook(lambda *seen: shapes.append(seen[-1].shape[2:]))
        model.eval()(torch.empty(1, 3, 224, 224))
    assert shapes == [places]


def test_bad_input():
    with pytest.raises(ArgumentError, match="choose one of resnet18, resnet34, resnet50, resnet101, resnet152"):
        build("resnet20")
    with pytest.raises(ArgumentError, match="no meta-layer for them"):
        build("resnet18", eps=1e-3)
    with pytest.raises(ArgumentError, match="choose one of bn, dbn"):
        build("resnet18", stem="x")
