"""Why do some whitenings train alike on the stem of 64 channels, and test so differently?

    python results/study/evaluated.py CIFAR_DIR RUNS

Trained networks of RUNS, tested with three statistics of the whitening layer: the running ones, averages over the last
batches of the training, while the weight moved; averages over 100 batches with the weight as it is at the end; and each
test batch's own. Writes evaluated.csv beside this file. (The file in the repository was written when the second kind
were averages of the same batches with a momentum of 0.1.)
"""

import itertools
import sys
from pathlib import Path

import torch
from records import write
from torch import nn

from orthocond.lab.config import Config, changed
from orthocond.lab.data import Data, Part, load_data
from orthocond.lab.network import network
from orthocond.lab.runs import RunFolder, read_config
from orthocond.nn import renew_statistics

CPU = torch.device("cpu")
EVALUATED = (
    ("stem64", "svd"),
    ("stem64", "newton_schulz"),
    ("stem64-paper-eps", "svd"),
    ("stem64-paper-eps", "svd+nog+ow+olr"),
    ("stem64-paper-eps", "newton_schulz"),
)


@torch.no_grad()
def errors(config: Config, data: Data, folder: Path) -> dict[str, float]:
    model = trained(config, data, folder)
    found = {"running": error(model, data)}
    model.bn1.train()
    found["batch"] = error(model, data)
    renew(model, data)
    found["weight at rest"] = error(model, data)
    return found


def trained(config: Config, data: Data, folder: Path) -> nn.Module:
    """Return the network of a run as it is at the end, for evaluation."""
    model, _ = network(config, data, sync=False)
    with RunFolder(folder) as run:
        model.load_state_dict(run.load_checkpoint()["model"])
    return model.eval()


@torch.no_grad()
def renew(model: nn.Module, data: Data) -> None:
    """Recompute the running statistics of the stem over 100 batches, with the weight as it is."""
    batches = itertools.islice(data.train_batches(1, 0, Part(), CPU), 100)
    renew_statistics(nn.Sequential(model.conv1, model.bn1), batches)
    model.eval()


@torch.no_grad()
def error(model: nn.Module, data: Data) -> float:
    wrong = [model(x).argmax(1) != y for x, y in data.val_batches(Part(), CPU)]
    return round(100 * torch.cat(wrong).double().mean().item(), 2)


def main(data_folder: str, runs: str) -> None:
    torch.set_num_threads(1)
    records = []
    for experiment, method in EVALUATED:
        for folder in sorted(Path(runs, experiment, method).iterdir()):
            config = changed(read_config(folder), {"data": data_folder})
            about = {"experiment": experiment, "method": method, "seed": config.seed}
            records.append({**about, **errors(config, load_data(config), folder)})
            print(records[-1], flush=True)
    write("evaluated", records)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
