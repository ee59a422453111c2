"""Treatments under DDP: two processes with half a batch each give the weights that one gives with the whole."""

import gc
import os
from pathlib import Path

import pytest
import torch
import torch.distributed
import torch.multiprocessing
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from orthocond import treat
from orthocond.errors import ArgumentError
from orthocond.nn import DecorrelatedBatchNorm2d

from cases import noise


def network():
    """No batch statistics but the synchronised ones."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        DecorrelatedBatchNorm2d(8, sync=True),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2),
        nn.Flatten(),
        nn.Linear(32, 4),
    ).double()


def trained(wrap, part):
    model = network()
    treatment = treat(model, "0", "nog+ow+olr")
    wrapped = wrap(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    treatment.attach(optimizer)
    for seed in range(5):
        x, y = noise(8, 3, 6, 6, dtype=torch.float64, seed=seed), (torch.arange(8) * (seed + 1)) % 4
        optimizer.zero_grad()
        F.cross_entropy(wrapped(x[part]), y[part]).backward()
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}, treatment.last.learning_rate


def work(rank, folder):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", Path(folder, "rendezvous").as_uri(), rank=rank, world_size=2)
    with pytest.raises(ArgumentError, match="before you wrap it"):
        treat(DistributedDataParallel(network()), "0", "ow")
    torch.save(trained(DistributedDataParallel, slice(4 * rank, 4 * rank + 4)), f"{folder}/{rank}.pt")
    gc.collect()  # what still holds the group would let its threads outlive the interpreter, which aborts then
    torch.distributed.destroy_process_group()


def test_two_processes_give_the_weights_of_one(tmp_path):
    torch.multiprocessing.spawn(work, (str(tmp_path),), nprocs=2)
    whole, rate = trained(lambda model: model, slice(None))
    for rank in (0, 1):
        state, own_rate = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert abs(own_rate - rate) < 1e-9
        for name, value in whole.items():
            assert torch.allclose(state[name], value, atol=1e-9), name
