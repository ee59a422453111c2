"""How often do whitening and covariance pooling as they are usually written fail, in float32, and how often do ours?

    python results/study/failures.py CIFAR_DIR [--seeds 3] [--steps 300]

The networks and the settings of the study. The usual way is autograd through `torch.linalg.eigh` in
float32, with three values of eps. A step fails if the solver raises, or if a gradient is NaN or infinite; then it is
left out, so that the rest can be counted too. Writes failures.csv beside this file.
"""

import argparse
import itertools

import torch
import torch.nn.functional as F
from records import HERE, write

from orthocond.lab.bench.layers import UsualPool, UsualWhitening
from orthocond.lab.config import changed, from_toml
from orthocond.lab.data import Part, load_data
from orthocond.lab.models import build
from orthocond.lab.presets import preset
from orthocond.lab.state import learning_rate_factor
from orthocond.nn import CovariancePool2d, DecorrelatedBatchNorm2d

PLACES = {"16 channels": 16, "64 channels": 64, "pooling": 16}
"""Where a root is taken, and how wide the stem is."""
WAYS = {
    "autograd through eigh, eps 0": 0.0,
    "autograd through eigh, eps 1e-5": 1e-5,
    "autograd through eigh, eps 1e-2": 1e-2,
    "ours": None,
}
"""Who takes it, and with which eps."""


def network(place: str, way: str) -> torch.nn.Module:
    width, eps = PLACES[place], WAYS[way]
    if place == "pooling":
        model = build("resnet-small", num_classes=10, width=width, head="covariance", reduction=32)
        model.pool = CovariancePool2d() if eps is None else UsualPool(eps)
    else:
        model = build("resnet-small", num_classes=10, width=width)
        model.bn1 = DecorrelatedBatchNorm2d(width) if eps is None else UsualWhitening(width, eps)
    return model.to(memory_format=torch.channels_last)


def count_failures(way: str, place: str, seed: int, config, data) -> dict[str, object]:
    torch.manual_seed(seed)
    model = network(place, way)
    optimizer = torch.optim.SGD(
        model.parameters(), config.learning_rate, config.momentum, weight_decay=config.weight_decay
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor(config, config.steps, config.steps))
    num_raised = num_not_finite = 0
    first = None
    batches = itertools.islice(data.train_batches(1, 0, Part(), torch.device("cpu")), config.steps)
    for step, (x, y) in enumerate(batches, 1):
        optimizer.zero_grad()
        try:
            F.cross_entropy(model(x), y).backward()
        except torch.linalg.LinAlgError:
            num_raised += 1
            first = first or step
            continue
        if not all(p.grad.isfinite().all() for p in model.parameters()):
            num_not_finite += 1
            first = first or step
            continue
        optimizer.step()
        schedule.step()
    return {
        "place": place,
        "way": way,
        "seed": seed,
        "steps": config.steps,
        "raised": num_raised,
        "not_finite": num_not_finite,
        "first": first or "",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    torch.set_num_threads(1)
    records = []
    for seed in range(args.seeds):
        settings = {**from_toml(HERE / "settings.toml"), "steps": args.steps, "data": args.data, "seed": seed}
        config = changed(preset("dbn-cifar10-small"), settings)
        data = load_data(config)
        for place, way in itertools.product(PLACES, WAYS):
            records.append(count_failures(way, place, seed, config, data))
            print(records[-1], flush=True)
    write("failures", records)


if __name__ == "__main__":
    main()
