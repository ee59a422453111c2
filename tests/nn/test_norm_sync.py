"""Synchronised whitening: two processes with part of a batch each give what one gives with the whole."""

import pytest
import torch
import torch.distributed
import torch.multiprocessing
from torch import nn

from orthocond.nn import DecorrelatedBatchNorm2d

from cases import noise
from processes import join, leave

CHANNELS = 6


def layer_and_batch(groups, shift):
    layer = DecorrelatedBatchNorm2d(CHANNELS, groups=groups, sync=True, dtype=torch.float64)
    nn.init.uniform_(layer.weight, 0.5, 2, generator=torch.Generator().manual_seed(3))
    x = noise(8, CHANNELS, 3, 3, dtype=torch.float64)
    x = torch.einsum("ij,njhw->nihw", noise(CHANNELS, CHANNELS, dtype=torch.float64, seed=2), x) + shift
    return layer, x, noise(*x.shape, dtype=torch.float64, seed=4)


def outcome(layer, x, g):
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(g)
    parts = {"output": y.detach(), "input gradient": x.grad, "weight": layer.weight.grad, "bias": layer.bias.grad}
    return parts | {name: buffer.clone() for name, buffer in layer.named_buffers()}


def work(rank, sizes, groups, shift, folder):
    join(rank, folder, len(sizes))
    layer, x, g = layer_and_batch(groups, shift)
    torch.save(outcome(layer, x.split(sizes)[rank], g.split(sizes)[rank]), f"{folder}/{rank}.pt")
    leave()


def work_with_one_sided_gradients(rank, folder):
    join(rank, folder)
    layer, x, g = layer_and_batch(1, 0.0)
    x = x.split(4)[rank].clone().requires_grad_(rank == 0)
    layer(x).backward(g.split(4)[rank])
    assert (x.grad is not None) == (rank == 0)
    leave()


@pytest.mark.timeout(60)
def test_a_process_whose_input_needs_no_gradient_does_not_block_the_others(tmp_path):
    torch.multiprocessing.spawn(work_with_one_sided_gradients, (str(tmp_path),), nprocs=2)


@pytest.mark.parametrize(("sizes", "groups", "shift"), [((4, 4), 1, 0.0), ((6, 2), 2, 0.0), ((7, 1), 1, 1e3)])
def test_two_processes_equal_one(tmp_path, sizes, groups, shift):
    torch.multiprocessing.spawn(work, (sizes, groups, shift, str(tmp_path)), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    whole = outcome(*layer_and_batch(groups, shift))
    for name in ("output", "input gradient"):
        assert torch.allclose(torch.cat([first[name], second[name]]), whole[name], atol=1e-8), name
    for name in ("weight", "bias"):  # what DDP averages, and its loss is a mean
        assert torch.allclose(first[name] + second[name], whole[name], atol=1e-8), name
    for name in ("running_mean", "running_whitening", "num_batches_tracked"):
        assert torch.equal(first[name], second[name])
        assert torch.allclose(first[name], whole[name], atol=1e-8), name


def test_sync_without_a_process_group_is_local():
    layer, x, _ = layer_and_batch(1, 0.0)
    assert layer(x).shape == x.shape
