"""Which eps, rtol and running statistic should a whitening stem have? Train small ResNets on CIFAR-10 and see.

    python results/whitening/run.py CIFAR_DIR [--seeds 3] [--steps 200] [--worker 0/1]

CIFAR_DIR holds train.parquet and test.parquet in the hub's layout. Each finished run adds a line to runs.jsonl beside
this file; runs that are there already are not repeated. One training serves all running statistics, because they
don't act on it: after it the same network is tested, on the first 5,000 test images, with the statistics of the test
batch, with the running whitening matrix, and with the whitening matrix of the running covariance.
"""

import argparse
import itertools
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from orthocond.linalg import matrix_inv_sqrth, spectrum
from orthocond.nn import DecorrelatedBatchNorm2d

sys.path.insert(0, str(Path(__file__).parents[1]))
from cifar_small import STEMS, batches, error, load, mean_and_std, network, optimizer_and_schedule

RUNS = Path(__file__).with_name("runs.jsonl")
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


def run(train, test, stem, name, seed, steps):
    torch.manual_seed(seed)
    width, options = STEMS[stem], CANDIDATES[name]
    model = network(width, nn.BatchNorm2d(width) if options is None else TrackedNorm(width, **options)).train()
    optimizer, make_schedule = optimizer_and_schedule(model, steps)
    schedule = make_schedule()
    start, losses = time.perf_counter(), []
    for x, y in batches(train, steps):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    record = {"stem": stem, "candidate": name, "seed": seed, "steps": steps, "loss": float(np.mean(losses[-20:]))}
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
    return record | {"seconds": round(time.perf_counter() - start, 1)}


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


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("data", nargs="?", help="without it, the table of the runs that are there is printed")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", default="", help="settings with this in their name, e.g. 'rtol 1e-3' or 'full rank'")
    parser.add_argument("--worker", default="0/1", help="do every n-th run: 0/2 and 1/2 share the work")
    options = parser.parse_args()
    done = [json.loads(line) for line in RUNS.read_text().splitlines()] if RUNS.exists() else []
    if options.data is None:
        print(table(done))
        return
    torch.set_num_threads(1)
    train, test = load(options.data, "train"), [part[:5000] for part in load(options.data, "test")]
    worker, workers = map(int, options.worker.split("/"))
    known = {(r["stem"], r["candidate"], r["seed"], r["steps"]) for r in done}
    jobs = itertools.product(range(options.seeds), STEMS, CANDIDATES)
    for number, (seed, stem, name) in enumerate(jobs):
        if (
            options.only not in f"{stem}, {name}"
            or number % workers != worker
            or (stem, name, seed, options.steps) in known
        ):
            continue
        record = run(train, test, stem, name, seed, options.steps)
        with RUNS.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(record, flush=True)


if __name__ == "__main__":
    main()
