"""How far does the whitened stem turn, for strong and for weak directions of its input?

    python results/study/turning.py CIFAR_DIR [--seeds 3] [--steps 200]

What whitening gives depends on the weight W only through the polar factor Q of W S^(1/2), S the covariance of the input
patches. In the eigenbasis of S a column of Q is what the stem does with one whitened direction of the input. This sums
how far each column moves, every ten steps after the first ten, for svd and for re-gauging with both metrics, on the
64-channel stem of the study. Writes turning.csv beside this file.
"""

import argparse

import torch
import torch.nn.functional as F
from records import HERE, write

from orthocond.lab.config import Config, changed, from_toml
from orthocond.lab.data import Data, Part, load_data
from orthocond.lab.network import network
from orthocond.lab.presets import preset
from orthocond.lab.state import learning_rate_factor

WAYS = {"svd": ("svd", "input"), "gauge, metric weight": ("svd+gauge", "weight"), "gauge": ("svd+gauge", "input")}
BANDS = {"1 to 4": (0, 4), "5 to 8": (4, 8), "9 to 12": (8, 12), "13 to 16": (12, 16)}
MARK = 10
CPU = torch.device("cpu")


def patch_root(data: Data) -> torch.Tensor:
    """Return V diag(l)^(1/2) for the covariance V diag(l) V^T of patches, the strongest first."""
    batches = data.train_batches(1, 0, Part(), CPU)
    patches = [F.unfold(next(batches)[0], 3, padding=1).mT.flatten(0, 1) for _ in range(8)]
    Z = torch.cat(patches).double()
    l, V = torch.linalg.eigh(torch.cov(Z.T))
    return (V * l.sqrt()).flip(1)


def polar(weight: torch.Tensor, root: torch.Tensor, rtol: float) -> torch.Tensor:
    """Return the polar factor on its support."""
    U, s, Vh = torch.linalg.svd(weight.detach().flatten(1).double() @ root, full_matrices=False)
    return (U * (s.square() > rtol * s[0] ** 2)) @ Vh


def turning(method: str, metric: str, config: Config, data: Data) -> torch.Tensor:
    """Return how far each column moved."""
    torch.manual_seed(config.seed)
    model, treatment = network(changed(config, {"method": method, "metric": metric}), data, sync=False)
    optimizer = torch.optim.SGD(
        model.parameters(), config.learning_rate, config.momentum, weight_decay=config.weight_decay
    )
    if treatment is not None:
        treatment.attach(optimizer)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor(config, 1000, 1000))
    root, rtol = patch_root(data), model.bn1.rtol
    before, moved = None, torch.zeros(27, dtype=torch.float64)
    model.train()
    for step, (x, y) in enumerate(data.train_batches(1, 0, Part(), CPU), 1):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        schedule.step()
        if step % MARK == 0:
            now = polar(model.conv1.weight, root, rtol)
            moved += 0 if before is None else (now - before).norm(dim=0)
            before = now
        if step == config.steps:
            return moved
    raise SystemExit("too few images for so many steps")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    settings = from_toml(HERE / "settings.toml") | {"data": args.data, "width": 64, "steps": args.steps}
    config = changed(preset("dbn-cifar10-small"), settings)
    data = load_data(config)
    records = []
    for seed in range(args.seeds):
        for way, (method, metric) in WAYS.items():
            moved = turning(method, metric, changed(config, {"seed": seed}), data)
            means = {band: f"{moved[start:end].mean():.4g}" for band, (start, end) in BANDS.items()}
            records.append({"way": way, "seed": seed, **means})
            print(records[-1], flush=True)
    write("turning", records)


if __name__ == "__main__":
    main()
