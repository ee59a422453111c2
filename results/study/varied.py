"""Which part of re-gauging harms the error with the cut 1e-4? One thing is varied at a time; plan.md has the reasons.

    python results/study/varied.py CIFAR_DIR RUNS [JOBS]

The stem of 64 channels with our defaults, 3,000 steps, on seeds that are used for nothing else. A *weak* direction has
an eigenvalue between 1e-4 and 2e-4 of the largest in the first step: gauge makes it as strong as the others, and with
the cut 2e-4 the layer would drop it. A finished run is a file in RUNS, so this may be stopped and started again. At the
end it writes varied.csv beside this file.
"""

import json
import math
import multiprocessing
import os
import statistics
import sys
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from evaluated import error, renew
from records import HERE, THRESHOLD, Record, write
from stepping import Vary, stepping
from torch import Tensor

from orthocond.lab.compare import kept_memory
from orthocond.lab.config import Config, changed, from_toml
from orthocond.lab.data import load_data
from orthocond.lab.presets import preset
from orthocond.lab.runs import environment
from orthocond.lab.state import RunState

SEEDS = range(700, 708)
WEAK = (1e-4, 2e-4)
CONTROL = "svd+gauge"


def from_step(start: int, state: RunState) -> None:
    """Let gauge act from a step on."""
    assert state.treatment is not None
    gauge, taken = state.treatment.parts["gauge"], 0
    gauge.threshold = math.inf

    def count(*_: object) -> None:
        nonlocal taken
        taken += 1
        if taken == start - 1:
            gauge.threshold = THRESHOLD

    state.plain_optimizer.register_step_post_hook(count)


def weak_speed(factor: float, state: RunState) -> None:
    """Multiply the speed at which the stem turns a weak direction of the input or of its output, against any other one.

    The weak inputs stay those of the first step; the weak outputs are what the stem makes of them at each step.
    """
    convolution, norm = state.network.conv1, state.network.bn1
    patches: Tensor | None = None
    weak: tuple[Tensor, Tensor] | None = None

    def keep(_: object, inputs: tuple[Tensor]) -> None:
        nonlocal patches
        if patches is None:
            patches = F.unfold(inputs[0], 3, padding=1).movedim(1, 0).flatten(1).double()

    def multiply(*_: object) -> None:  # after gauge, which was attached before
        nonlocal weak
        if weak is None:
            weak = weak_inputs(convolution.weight.flatten(1).double(), patches, weak_outputs(norm))
        weight, gradient = (tensor.flatten(1).double() for tensor in (convolution.weight, convolution.weight.grad))
        slowed = with_speed(factor, gradient, weight, *weak)
        convolution.weight.grad.copy_(slowed.view_as(convolution.weight))

    convolution.register_forward_pre_hook(keep)
    state.plain_optimizer.register_step_pre_hook(torch.no_grad()(multiply))


def weak_outputs(norm: torch.nn.Module) -> Tensor:
    """Return the weak directions of the last batch's covariance, as columns."""
    l, U = torch.linalg.eigh(norm.last_batch().covariance[0].double())
    relative = l / l[-1]
    return U[:, (relative > WEAK[0]) & (relative <= WEAK[1])]


def weak_inputs(W: Tensor, patches: Tensor, U: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weak inputs of a weight with the weak outputs U, as ``a`` and ``b`` with b^T a = I.

    With the covariance S of the patches, M = W S^(1/2) has the weak inputs v = M^T U. A step D of the weight is the
    step D S^(1/2) of M, which moves them by D b, and D b a^T is the part of D that does so.
    """
    S = torch.cov(patches, correction=0)
    a = W.mT @ U
    b = torch.linalg.solve(a.mT @ S @ a, (S @ a).mT).mT
    return a, b


def with_speed(factor: float, step: Tensor, W: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return a step of the weight with its part from or to weak directions multiplied by a factor."""
    U, _ = torch.linalg.qr(W @ b)
    rest = step - U @ (U.mT @ step)
    rest = rest - (rest @ b) @ a.mT
    return rest + factor * (step - rest)


VARIANTS: dict[str, tuple[str, Vary | None]] = {
    CONTROL: (CONTROL, None),
    "momentum from zero": ("svd+gauge(momentum=reset)", None),
    "first at step 100": (CONTROL, partial(from_step, 100)),
    "weak directions at a tenth of the speed": (CONTROL, partial(weak_speed, 0.1)),
}


def varied_config(data: str, seed: int, method: str) -> Config:
    """Return the configuration of the experiment ``published-defaults``."""
    ours = {"eps": 0.0, "rtol": WEAK[0], "gradient": "exact", "parts": "none"}
    settings = from_toml(HERE / "published.toml") | ours | {"data": data, "seed": seed, "method": method}
    return changed(preset("dbn-cifar10-small"), settings)


def train_and_test(data_folder: str, variant: str, seed: int) -> Record:
    torch.set_num_threads(1)
    method, vary = VARIANTS[variant]
    config = varied_config(data_folder, seed, method)
    losses, ranks, changes, weak = [], [], 0, 0
    for state, loss in stepping(config, vary):
        model = state.network
        losses.append(loss)
        changes += int(state.treatment.last.gauged)
        if state.step == 1:
            weak = weak_outputs(model.bn1).shape[1]
        if state.step > state.total_steps - state.total_steps // 10:
            l = model.bn1.last_eigenvalues.flatten()
            ranks.append(int((l > model.bn1.rtol * l.max()).sum()))
    data = load_data(config)
    with_running = error(model.eval(), data)
    renew(model, data)
    return {
        "experiment": "varied",
        "method": variant,
        "seed": seed,
        "error": with_running,
        "renewed": error(model, data),
        "loss_4": f"{statistics.fmean(losses[-len(losses) // 4 :]):.5g}",
        "rank_last": statistics.median(ranks),
        "weak": weak,
        "gauged": changes,
        "processor": environment(device="cpu", world_size=1)["processor"],
    }


def run(data_folder: str, runs: Path, key: tuple[str, int]) -> str:
    """Make a run unless it is there, and return what to show of it."""
    file = place(runs, *key)
    if file.exists():
        return f"{file.name}: kept"
    try:
        record = train_and_test(data_folder, *key)
    except Exception as problem:
        return f"{file.name}: failed, {problem!r}"
    partial_file = file.with_suffix(".partial")
    partial_file.write_text(json.dumps(record))
    partial_file.replace(file)
    return str(record)


def place(runs: Path, variant: str, seed: int) -> Path:
    return runs / f"varied-{variant.replace(' ', '-')}-{seed}.json"


def main(data_folder: str, runs: Path, jobs: int) -> int:
    runs.mkdir(parents=True, exist_ok=True)
    os.environ.update(kept_memory())
    keys = [(variant, seed) for seed in SEEDS for variant in VARIANTS]
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for told in pool.imap_unordered(partial(run, data_folder, runs), keys):
            print(told, flush=True)
    files = [place(runs, variant, seed) for variant in VARIANTS for seed in SEEDS]
    missing = [file.name for file in files if not file.exists()]
    if missing:
        print(f"varied.csv is not written without {', '.join(missing)}.", file=sys.stderr)
        return 1
    write("varied", [json.loads(file.read_text()) for file in files])
    return 0


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) == 4 else os.cpu_count() or 1))
