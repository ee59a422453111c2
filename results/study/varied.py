"""Which part of re-gauging harms the error with the cut 1e-4? One thing is varied at a time.

    python results/study/varied.py CIFAR_DIR RUNS [JOBS]

The 64-channel stem of the study, 1,000 steps, on seeds that are used for nothing else. A *weak* direction has an
eigenvalue between 1e-4 and 2e-4 of the largest in the first step: gauge makes it as strong as the others, and with the
cut 2e-4 the layer would drop it. Finished runs are kept in RUNS/varied.jsonl, so this may be stopped and started again.
At the end it writes varied.csv beside this file.
"""

import json
import math
import multiprocessing
import os
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache, partial
from pathlib import Path

import torch
from evaluated import error
from records import THRESHOLD, Record, write
from stepping import Vary, stepping, study_config
from torch import nn

from orthocond.lab.compare import kept_memory
from orthocond.lab.config import changed
from orthocond.lab.data import Data, load_data
from orthocond.treatments import Treatment

STEPS = 1000
SEEDS = range(700, 708)
WEAK = (1e-4, 2e-4)


def from_step(start: int, _: nn.Module, treatment: Treatment | None, optimizer: torch.optim.Optimizer) -> None:
    """Let gauge act from a step on."""
    assert treatment is not None
    gauge, taken = treatment.parts["gauge"], 0
    gauge.threshold = math.inf

    def count(*_: object) -> None:
        nonlocal taken
        taken += 1
        if taken == start - 1:
            gauge.threshold = THRESHOLD

    optimizer.register_step_post_hook(count)


def weak_speed(factor: float, model: nn.Module, _: Treatment | None, optimizer: torch.optim.Optimizer) -> None:
    """Multiply the gradient of the weak directions of the outputs, from the first change of gauge on."""
    weak: torch.Tensor | None = None

    def multiply(*_: object) -> None:  # after gauge, which was attached before
        nonlocal weak
        if weak is None:
            weak = weak_directions(model.bn1)
        gradient = model.conv1.weight.grad
        gradient += ((factor - 1) * weak @ (weak.mT @ gradient.flatten(1))).view_as(gradient)

    optimizer.register_step_pre_hook(multiply)


def weak_directions(norm: nn.Module) -> torch.Tensor:
    """Return the weak directions of the last batch, as columns."""
    l, U = torch.linalg.eigh(norm.last_batch().covariance[0].double())
    relative = l / l[-1]
    return U[:, (relative > WEAK[0]) & (relative <= WEAK[1])].float()


VARIANTS: dict[str, tuple[str, Vary | None]] = {
    "svd": ("svd", None),
    "svd+gauge": ("svd+gauge", None),
    "momentum from zero": ("svd+gauge(momentum=reset)", None),
    "covariance of size 1": ("svd+gauge(scale=unit)", None),
    "first at step 100": ("svd+gauge", partial(from_step, 100)),
    "weak directions at a tenth of the speed": ("svd+gauge", partial(weak_speed, 0.1)),
    "weak directions at ten times the speed": ("svd+gauge", partial(weak_speed, 10.0)),
}


def run(data_folder: str, variant: str, seed: int) -> Record:
    """Train and test one network."""
    torch.set_num_threads(1)
    method, vary = VARIANTS[variant]
    config = changed(study_config(data_folder, STEPS), {"seed": seed, "method": method})
    data = _data(data_folder)
    losses, ranks, weak = [], [], 0
    for step, model, loss in stepping(config, data, vary):
        losses.append(loss)
        if step == 1:
            weak = weak_directions(model.bn1).shape[1]
        if step > STEPS - STEPS // 10:
            l = model.bn1.last_eigenvalues.flatten()
            ranks.append(int((l > 1e-5 * l.max()).sum()))
    return {
        "experiment": "varied",
        "method": variant,
        "seed": seed,
        "error": error(model.eval(), data),
        "loss_4": f"{statistics.fmean(losses[-STEPS // 4 :]):.5g}",
        "rank_last": statistics.median(ranks),
        "weak": weak,
    }


@cache
def _data(folder: str) -> Data:
    return load_data(study_config(folder, STEPS))


def main(data_folder: str, runs: Path, jobs: int) -> None:
    runs.mkdir(parents=True, exist_ok=True)
    kept = runs / "varied.jsonl"
    done: dict[tuple[str, int], Record] = {}
    for line in kept.read_text().splitlines() if kept.exists() else ():
        record = json.loads(line)
        done[record["method"], record["seed"]] = record
    wanted = [(variant, seed) for seed in SEEDS for variant in VARIANTS]
    os.environ.update(kept_memory())
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool, kept.open("a") as file:
        running = [pool.submit(run, data_folder, *key) for key in wanted if key not in done]
        for future in as_completed(running):
            record = future.result()
            done[record["method"], record["seed"]] = record
            print(record, flush=True)
            file.write(json.dumps(record) + "\n")
            file.flush()
    write("varied", [done[variant, seed] for variant in VARIANTS for seed in SEEDS])


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) == 4 else os.cpu_count() or 1)
