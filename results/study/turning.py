"""How far does the whitened stem turn, for strong and for weak directions of its input?

    python results/study/turning.py CIFAR_DIR [--seeds 3] [--steps 200]

What whitening gives depends on the weight W only through the polar factor Q of W S^(1/2), S the covariance of the input
patches. In the eigenbasis of S a column of Q is what the stem does with one whitened direction of the input. This sums
how far each column moves, every ten steps after the first ten, for svd and for re-gauging with both metrics, on the
64-channel stem of the study. Writes turning.csv beside this file.
"""

import argparse
import itertools

import torch
import torch.nn.functional as F
from records import write
from stepping import CPU, stepping, study_config

from orthocond.lab.config import Config, changed
from orthocond.lab.data import Data, Part, load_data

WAYS = {"svd": "svd", "gauge, metric weight": "svd+gauge(metric=weight)", "gauge": "svd+gauge"}
BANDS = {"1 to 4": (0, 4), "5 to 8": (4, 8), "9 to 12": (8, 12), "13 to 16": (12, 16)}
MARK = 10


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


def turning(config: Config, steps: int) -> torch.Tensor:
    """Return how far each column moved."""
    root, before, moved = patch_root(load_data(config)), None, torch.zeros(27, dtype=torch.float64)
    for state, _ in itertools.islice(stepping(config), steps):
        if state.step % MARK == 0:
            now = polar(state.network.conv1.weight, root, state.network.bn1.rtol)
            moved += 0 if before is None else (now - before).norm(dim=0)
            before = now
    return moved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = study_config(args.data)
    records = []
    for seed in range(args.seeds):
        for way, method in WAYS.items():
            moved = turning(changed(config, {"seed": seed, "method": method}), args.steps)
            means = {band: f"{moved[start:end].mean():.4g}" for band, (start, end) in BANDS.items()}
            records.append({"way": way, "seed": seed, **means})
            print(records[-1], flush=True)
    write("turning", records)


if __name__ == "__main__":
    main()
