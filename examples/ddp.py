"""Synchronised whitening and a treatment under DDP, two processes on the CPU.

torchrun --nproc_per_node=2 examples/ddp.py
"""

import gc

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import orthocond
from orthocond.nn import DecorrelatedBatchNorm2d

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1, bias=False),
    DecorrelatedBatchNorm2d(16, sync=True),  # mean and covariance over all processes
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(4),
    nn.Flatten(),
    nn.Linear(256, 10),
)
treatment = orthocond.treat(model, "0", "nog")
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
treatment.attach(optimizer)


def train(rank: int) -> None:
    parallel = DistributedDataParallel(model)
    torch.manual_seed(rank)  # each process has its own data
    for _ in range(10):
        x, y = torch.randn(16, 3, 16, 16), torch.randint(10, (16,))
        loss = F.cross_entropy(parallel(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


dist.init_process_group("gloo")
train(dist.get_rank())
total = model[0].weight.detach().double().sum().reshape(1)
sums = [torch.zeros_like(total) for _ in range(dist.get_world_size())]
dist.all_gather(sums, total)
if dist.get_rank() == 0:
    print("the same weights on all processes:", all(torch.equal(value, sums[0]) for value in sums))
# With nothing left that holds the process group, its threads end here. At exit they could abort the process.
gc.collect()
dist.destroy_process_group()
