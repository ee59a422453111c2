"""The eigenvalues in front of the whitening while it trains: the gap that re-gauging makes.

    python results/study/spectrum.py CIFAR_DIR [--seed 300] [--steps 1000]

The covariance of the 64-channel stem, whose rank is 27 at most, is decomposed in float64 every tenth step. Writes
spectrum.csv beside this file: the 30 largest eigenvalues relative to the largest, for svd and for products with gauge.
"""

import argparse
import itertools

import torch
from records import write
from stepping import stepping, study_config

from orthocond.lab.config import changed

METHODS = ("svd", "products+gauge")
EVERY, NUMBER = 10, 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data")
    parser.add_argument("--seed", type=int, default=300)
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = changed(study_config(args.data), {"seed": args.seed})
    records = []
    for method in METHODS:
        for state, _ in itertools.islice(stepping(changed(config, {"method": method})), args.steps):
            norm = state.network.bn1
            if state.step % EVERY == 0 or state.step < EVERY:
                l = norm.last_eigenvalues.flatten().double()
                relative = (l / l[0]).clamp(min=0)[:NUMBER].tolist()
                numbers = {str(k): f"{value:.3g}" for k, value in enumerate(relative, 1)}
                records.append({"method": method, "seed": args.seed, "step": state.step, **numbers})
        fallbacks, total = norm.num_fallbacks
        print(f"{method}: {fallbacks} of {total} covariances decomposed for want of a certificate", flush=True)
    write("spectrum", records)


if __name__ == "__main__":
    main()
