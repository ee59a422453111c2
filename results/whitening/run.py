"""Which eps, rtol and running statistic should a whitening stem have? Train small ResNets on CIFAR-10 and see.

    python results/whitening/run.py CIFAR_DIR [--seeds 3] [--steps 200] [--worker 0/1]

CIFAR_DIR holds train.parquet and test.parquet in the hub's layout. Each finished run adds a line to runs.jsonl beside
this file; runs that are there already are not repeated. One training serves all running statistics, because they
don't act on it: after it the same network is tested, on the first 5,000 test images, with the statistics of the test
batch, with the running whitening matrix, and with the whitening matrix of the running covariance.
"""

import argparse
import io
import itertools
import json
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from orthocond.linalg import matrix_inv_sqrth, spectrum
from orthocond.nn import DecorrelatedBatchNorm2d

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
STEMS = {"rank-deficient": 64, "full rank": 16}


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


class Block(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.short = nn.Conv2d(inputs, outputs, 1, 2, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)

    def forward(self, x):
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))) + self.short(x))


def network(width, options):
    norm = nn.BatchNorm2d(width) if options is None else TrackedNorm(width, **options)
    stem = [nn.Conv2d(3, width, 3, 1, 1, bias=False), norm, nn.ReLU()]
    blocks = [Block(width, 32), Block(32, 64), Block(64, 128)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def load(folder, split):
    table = pq.read_table(Path(folder) / f"{split}.parquet")
    pixels = np.stack([np.asarray(Image.open(io.BytesIO(row["bytes"]))) for row in table["img"].to_pylist()])
    x = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()
    return x, torch.tensor(table["label"].to_pylist())


def prepared(x):
    mean, std = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2470, 0.2435, 0.2616])
    return (x.float() / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1)


def augmented(x: Tensor) -> Tensor:
    n = len(x)
    padded = F.pad(x, (4, 4, 4, 4))
    rows = torch.randint(0, 9, (n, 1)) + torch.arange(32)
    columns = torch.randint(0, 9, (n, 1)) + torch.arange(32)
    columns = torch.where(torch.rand(n, 1) < 0.5, columns, columns.flip(1))
    return padded[torch.arange(n)[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


@torch.no_grad()
def error(model, x, y):
    wrong = sum(
        (model(prepared(a)).argmax(1) != b).sum().item() for a, b in zip(x.split(500), y.split(500), strict=True)
    )
    return 100 * wrong / len(y)


def run(train, test, stem, name, seed, steps):
    torch.manual_seed(seed)
    model = network(STEMS[stem], CANDIDATES[name]).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, steps)
    order = torch.randperm(len(train[0]))
    start, losses = time.perf_counter(), []
    for step in range(steps):
        chosen = order[(step * 128) % 49920 :][:128]
        loss = F.cross_entropy(model(augmented(prepared(train[0][chosen]))), train[1][chosen])
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


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--worker", default="0/1", help="do every n-th run: 0/2 and 1/2 share the work")
    options = parser.parse_args()
    torch.set_num_threads(1)
    train, test = load(options.data, "train"), [part[:5000] for part in load(options.data, "test")]
    worker, workers = map(int, options.worker.split("/"))
    done = [json.loads(line) for line in RUNS.read_text().splitlines()] if RUNS.exists() else []
    known = {(r["stem"], r["candidate"], r["seed"], r["steps"]) for r in done}
    jobs = itertools.product(range(options.seeds), STEMS, CANDIDATES)
    for number, (seed, stem, name) in enumerate(jobs):
        if number % workers != worker or (stem, name, seed, options.steps) in known:
            continue
        record = run(train, test, stem, name, seed, options.steps)
        with RUNS.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(record, flush=True)


if __name__ == "__main__":
    main()
