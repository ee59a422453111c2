"""The contract under DDP, for every registered part and pair: two processes give what one gives with the batch."""

import warnings

import pytest
import torch
import torch.distributed
import torch.multiprocessing
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from orthocond import treat
from orthocond.errors import ArgumentError, OrthocondWarning
from orthocond.nn import DecorrelatedBatchNorm2d

from cases import noise
from contract import specifications
from processes import join, leave

SPECIFICATIONS = [*specifications(), "nog+ow+olr"]


def network():
    """No batch statistics but the synchronised ones."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        DecorrelatedBatchNorm2d(8, sync=True),
        nn.Tanh(),
        nn.Conv2d(8, 8, 3, stride=2),
        nn.Flatten(),
        nn.Linear(32, 4),
    ).double()


def trained(spec, wrap, part):
    model = network()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OrthocondWarning)  # what goes ill together is tested elsewhere
        treatment = treat(model, "0", spec)
    wrapped = wrap(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    treatment.attach(optimizer)
    for seed in range(3):
        x, y = noise(8, 3, 6, 6, dtype=torch.float64, seed=seed), (torch.arange(8) * (seed + 1)) % 4
        optimizer.zero_grad()
        loss = F.cross_entropy(wrapped(x[part]), y[part]) + treatment.penalty()
        # Whitening, and sn, leave no gradient along the weight, so that the rate of olr would be rounding noise.
        (loss + 2 * treatment.parameter.square().sum()).backward()
        optimizer.step()
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return state, dict(treatment.last or {})


def work(rank, folder):
    join(rank, folder)
    with pytest.raises(ArgumentError, match="before you wrap it"):
        treat(DistributedDataParallel(network()), "0", "ow")
    part = slice(4 * rank, 4 * rank + 4)
    found = {spec: trained(spec, DistributedDataParallel, part) for spec in SPECIFICATIONS}
    torch.save(found, f"{folder}/{rank}.pt")
    leave()


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp")
    torch.multiprocessing.spawn(work, (str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1)]


@pytest.mark.parametrize("spec", SPECIFICATIONS)
def test_two_processes_give_the_weights_of_one(spec, processes):
    whole, last = trained(spec, lambda model: model, slice(None))
    for found in processes:
        state, own_last = found[spec]
        assert own_last.keys() == last.keys()
        for name, value in last.items():
            assert own_last[name] == pytest.approx(value, rel=1e-6), name
        for name, value in whole.items():
            assert torch.allclose(state[name], value, atol=1e-8), name
