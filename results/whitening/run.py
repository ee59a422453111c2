"""Which eps, rtol and running statistic should a whitening stem have? Train small ResNets on CIFAR-10 and see.

    python results/whitening/run.py CIFAR_DIR [--seeds 3] [--steps 200] [--worker 0/1]

CIFAR_DIR holds train.parquet and test.parquet in the hub's layout. Each finished run adds a line to runs.jsonl beside
this file; runs that are there already are not repeated. One training serves all running statistics, because they
don't act on it: after it the same network is tested, on the first 5,000 test images, with the statistics of the test
batch, with the running whitening matrix, and with the whitening matrix of the running covariance.
"""

import itertools
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from orthocond.linalg import matrix_inv_sqrth, spectrum
from orthocond.nn import DecorrelatedBatchNorm2d

sys.path.insert(0, str(Path(__file__).parents[1]))
from cifar_small import STEMS, batches, error, experiment, mean_and_std, network, optimizer_and_schedule

CANDIDATES = {
    "BatchNorm": None,
    "eps 1e-5, nothing dropped": {"eps": 1e-5, "rtol": 0.0},
    "eps 1e-2, nothing dropped (the paper's)": {"eps": 1e-2, "rtol": 0.0},
    "rtol 1e-5": {"eps": 0.0, "rtol": 1e-5},
    "rtol 1e-4": {"eps": 0.0, "rtol": 1e-4},
    "rtol 1e-3": {"eps": 0.0, "rtol": 1e-3},
    "rtol 1e-2": {"eps": 0.0, "rtol": 1e-2},
}


class TrackedNorm(DecorrelatedBatchNorm2d):
    """Keeps the running covariance as well, to compare."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.register_buffer("running_covariance", torch.eye(self.num_features)[None].clone())

    def _keep(self, statistics):
        super()._keep(statistics)
        self.running_covariance.lerp_(statistics.covariance, self.momentum)

    def use_running_covariance(self):
        rtol = None if self.eps > 0 and not self.rtol else self.rtol
        self.running_whitening.copy_(matrix_inv_sqrth(self.running_covariance, eps=self.eps, rtol=rtol))


def run(train, test, stem, candidate, seed, steps):
    torch.manual_seed(seed)
    width, options = STEMS[stem], CANDIDATES[candidate]
    model = network(width, nn.BatchNorm2d(width) if options is None else TrackedNorm(width, **options)).train()
    optimizer, make_schedule = optimizer_and_schedule(model, steps)
    schedule = make_schedule()
    losses = []
    for x, y in batches(train, steps):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    record = {"loss": float(np.mean(losses[-20:]))}
    norm = model[1]
    if isinstance(norm, TrackedNorm):
        found = spectrum(torch.diag(norm.last_eigenvalues[0]), rtol=max(norm.rtol, 1e-7))
        record |= {"rank": found.rank.item(), "cond_support": found.cond_support.item()}
    model.eval()
    record["running whitening"] = error(model, *test)
    if isinstance(norm, TrackedNorm):
        norm.use_running_covariance()
        record["running covariance"] = error(model, *test)
    norm.train()  # the statistics of the test batch, for the stem alone
    record["batch statistics"] = error(model, *test)
    return record


def table(records):
    """Return a Markdown table of the test errors, mean and standard deviation over the seeds."""
    columns = ("running whitening", "running covariance", "batch statistics")
    lines = ["| stem | setting | rank kept | " + " | ".join(columns) + " |", "| --- | --- | --- | --- | --- | --- |"]
    for stem, name in itertools.product(STEMS, CANDIDATES):
        rows = [r for r in records if (r["stem"], r["candidate"]) == (stem, name)]
        ranks = sorted({r["rank"] for r in rows if "rank" in r})
        kept = "" if not ranks else f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
        cells = [mean_and_std([r[column] for r in rows if column in r]) for column in columns]
        lines.append(f"| {stem} | {name} | {kept} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    cases = [{"stem": stem, "candidate": name} for stem, name in itertools.product(STEMS, CANDIDATES)]
    experiment(__file__, cases, run, table, seeds=3)
