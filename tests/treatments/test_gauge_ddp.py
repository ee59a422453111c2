"""Re-gauging under DDP: all processes apply the same matrix, whether the statistics are synchronised or not."""

import pytest
import torch
import torch.multiprocessing
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from orthocond import treat
from orthocond.nn import DecorrelatedBatchNorm2d

from cases import noise
from processes import join, leave

STEPS = 12


def network(sync):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        DecorrelatedBatchNorm2d(8, sync=sync),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2),
        nn.Flatten(),
        nn.Linear(32, 4),
    ).double()


def trained(wrap, part, spec, sync):
    model = network(sync)
    treatment = treat(model, "0", spec.replace("gauge", "gauge(threshold=5.0)"))
    wrapped = wrap(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    treatment.attach(optimizer)
    applied, conds = [], []
    for seed in range(STEPS):
        x = F.avg_pool2d(noise(16, 3, 8, 8, dtype=torch.float64, seed=seed), 3, 1)
        y = (torch.arange(16) * (seed + 1)) % 4
        optimizer.zero_grad()
        F.cross_entropy(wrapped(x[part]), y[part]).backward()
        optimizer.step()
        applied.append(treatment.last.gauged)
        conds.append((treatment.last.cond_before, treatment.last.cond_after))
    return {name: value.detach().clone() for name, value in model.state_dict().items()}, applied, conds


def work(rank, folder, spec, sync):
    join(rank, folder)
    found = trained(DistributedDataParallel, slice(8 * rank, 8 * rank + 8), spec, sync)
    torch.save(found, f"{folder}/{rank}.pt")
    leave()


@pytest.mark.parametrize(("spec", "sync"), [("gauge", True), ("gauge", False), ("nog+gauge", True)])
def test_two_processes_apply_the_same(tmp_path, spec, sync):
    torch.multiprocessing.spawn(work, (str(tmp_path), spec, sync), nprocs=2)
    (first, applied, conds), (second, *others) = (
        torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1)
    )
    assert [applied, conds] == others
    assert 1 <= sum(applied) < STEPS
    for name, value in first.items():
        own_statistics = not sync and name in ("1.running_mean", "1.running_whitening")
        assert own_statistics or torch.equal(value, second[name]), name
    if sync:  # and what one process does with the whole batch
        whole, applied_alone, conds_alone = trained(lambda model: model, slice(None), spec, sync)
        assert applied == applied_alone
        assert torch.allclose(torch.tensor(conds), torch.tensor(conds_alone), rtol=1e-6)
        for name, value in whole.items():
            assert torch.allclose(first[name], value, atol=1e-8), name
