"""What the experiments on CIFAR-10 share: data, augmentation, a small residual network, training and testing."""

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

STEMS = {"rank-deficient": 64, "full rank": 16}
"""Channels of a 3x3 stem: its covariance has rank 27 at most."""


class Block(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.short = nn.Conv2d(inputs, outputs, 1, 2, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)

    def forward(self, x):
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))) + self.short(x))


def network(width: int, norm: nn.Module) -> nn.Sequential:
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


def batches(train: tuple[Tensor, Tensor], steps: int, size: int = 128):
    """Yield augmented batches in an order drawn from torch's generator."""
    order = torch.randperm(len(train[0]))
    for step in range(steps):
        chosen = order[(step * size) % (len(order) - size) :][:size]
        yield augmented(prepared(train[0][chosen])), train[1][chosen]


def optimizer_and_schedule(model: nn.Module, steps: int):
    """SGD as in the paper, the rate falling linearly to a hundredth over the few steps that there are."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    return optimizer, lambda: torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, steps)


def mean_and_std(values: list[float]) -> str:
    """Return values of several seeds as text; a single one has no deviation."""
    if not values:
        return ""
    spread = f" ± {np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
    return f"{np.mean(values):.1f}{spread}"


def experiment(script: str, cases: list[dict], run, table, *, seeds: int) -> None:
    """Run cases x seeds from the command line; a record each in runs.jsonl beside the script, none of them twice."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data", nargs="?", help="without it, the table of the runs that are there is printed")
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", default="", help="cases with this in their description, e.g. 'full rank'")
    parser.add_argument("--worker", default="0/1", help="do every n-th run: 0/2 and 1/2 share the work")
    options = parser.parse_args()
    file = Path(script).with_name("runs.jsonl")
    done = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if options.data is None:
        print(table(done))
        return
    torch.set_num_threads(1)
    train, test = load(options.data, "train"), [part[:5000] for part in load(options.data, "test")]
    worker, workers = map(int, options.worker.split("/"))
    for number, (seed, case) in enumerate(itertools.product(range(options.seeds), cases)):
        key = {**case, "seed": seed, "steps": options.steps}
        known = any(key.items() <= record.items() for record in done)
        if known or number % workers != worker or options.only not in ", ".join(case.values()):
            continue
        start = time.perf_counter()
        record = key | run(train, test, **key) | {"seconds": round(time.perf_counter() - start, 1)}
        with file.open("a") as lines:
            lines.write(json.dumps(record) + "\n")
        print(record, flush=True)
