"""Draw docs/whitening.png from runs.jsonl (needs matplotlib)."""

import json
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
SETTINGS = {
    "eps 1e-5, nothing dropped": "small eps,\nnull space inverted",
    "eps 1e-2, nothing dropped (the paper's)": "large eps\n(the paper's)",
    "rtol 1e-4": "null space dropped\n(orthocond)",
    "BatchNorm": "BatchNorm",
}
COLUMNS = {"batch statistics": ("as in training", "#9aa5b1"), "running whitening": ("in evaluation", "#2563eb")}


def main():
    records = [json.loads(line) for line in (HERE / "runs.jsonl").read_text().splitlines()]
    figure, axes = plt.subplots(figsize=(8, 3.2), dpi=160)
    positions = np.arange(len(SETTINGS))
    for offset, (column, (label, color)) in zip((-0.19, 0.19), COLUMNS.items(), strict=True):
        values = [
            [r[column] for r in records if r["stem"] == "rank-deficient" and r["candidate"] == name]
            for name in SETTINGS
        ]
        means = [np.mean(v) for v in values]
        axes.bar(positions + offset, means, 0.36, label=label, color=color)
        for x, seeds in zip(positions + offset, values, strict=True):
            axes.plot([x] * len(seeds), seeds, "o", color="black", markersize=2.5)
        for x, mean in zip(positions + offset, means, strict=True):
            axes.text(x, mean + 3, f"{mean:.0f}", ha="center", fontsize=9)
    axes.set_xticks(positions, SETTINGS.values())
    axes.set_ylabel("test error, %")
    axes.set_ylim(0, 100)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    axes.set_title("Whitening a stem of 64 channels and rank 27 (CIFAR-10, 200 steps, 3 seeds)", fontsize=10)
    figure.tight_layout()
    figure.savefig(HERE.parents[1] / "docs" / "whitening.png")


if __name__ == "__main__":
    main()
