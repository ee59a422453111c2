"""Run folders as the laboratory writes them, made up from a seed: no training, but numbers like a training's."""

import json
import math
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from orthocond.lab.methods import ALL as ALL_METHODS

_GAIN = {"sn": 0.04, "ol": 0.06, "ow": -0.05, "nog": 0.2, "olr": 0.12, "gauge": 0.15}
_CONDITION = {"sn": 0.4, "ol": 0.25, "ow": 0.1, "nog": 0.3, "olr": 0.2, "gauge": 0.05}


def make_run(
    folder: Path,
    method: str = "svd",
    seed: int = 0,
    *,
    epochs: int = 6,
    steps_per_epoch: int = 25,
    state: str = "finished",
    status: dict[str, Any] | None = None,
    environment: dict[str, Any] | None = None,
    **config: Any,
) -> Path:
    """Write the folder of one run and return it; ``config`` overrides fields of its configuration."""
    folder.mkdir(parents=True)
    preset = config.get("preset", "dbn-digits")
    settings = {
        "preset": preset,
        "method": method,
        "seed": seed,
        "dataset": "digits",
        "data": None,
        "model": "resnet18",
        "meta": "gcp" if str(preset).startswith("gcp") else "dbn",
        "epochs": epochs,
        "batch_size": 128,
        "learning_rate": 0.1,
        "milestones": [30, 45],
        "eps": 1e-5,
        "threads": 1,
        **config,
    }
    total = epochs * steps_per_epoch
    done = total if state == "finished" else total // 2
    began = datetime(2026, 11, 15, 20, 0, tzinfo=UTC) + timedelta(minutes=7 * seed)
    (folder / "config.json").write_text(json.dumps(settings))
    surroundings = {
        "orthocond": "0.1.0",
        "commit": "3a4a8dd1c0ffee",
        "dirty": False,
        "torch": "2.13.0",
        "python": "3.11.7",
        "platform": "Linux",
        "processor": "x86_64",
        "threads": 1,
        "device": "cpu",
        "world_size": 1,
        "started": began.isoformat(),
        "command": f"orthocond train {preset} --method {method} --seed {seed}",
    }
    (folder / "environment.json").write_text(json.dumps(surroundings | (environment or {})))
    progress = {
        "state": state,
        "step": done,
        "total_steps": total,
        "epoch": done // steps_per_epoch,
        "error": "The covariance holds NaN." if state == "failed" else None,
        "updated": (began + timedelta(minutes=5)).isoformat(),
        "seconds": 0.05 * done,
    }
    (folder / "status.json").write_text(json.dumps(progress | (status or {})))
    rng = np.random.default_rng([seed, *method.encode(errors="surrogatepass")])
    shared = np.random.default_rng(seed).normal(0, 0.15)  # what the methods of one seed have in common
    treatments = method.split("+")[1:]
    lines = _steps(rng, method, treatments, done, steps_per_epoch)
    _add_epochs(lines, rng, shared, method, treatments, done // steps_per_epoch, epochs, steps_per_epoch)
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    slower = 1 + 0.08 * ("ow" in treatments) + 0.02 * len(treatments) - 0.05 * (method == "bn")
    times = []
    for step in range(20, done + 1, 20):
        seconds = 20 * 0.05 * slower * rng.lognormal(0, 0.03)
        parts = {"forward": 0.33 * seconds, "backward": 0.6 * seconds, "update": 0.04 * seconds}
        times.append(json.dumps({"step": step, "steps": 20, "seconds": seconds, **parts}))
    (folder / "times.jsonl").write_text("".join(line + "\n" for line in times))
    return folder


def make_sweep(folder: Path, methods: tuple[str, ...] = ALL_METHODS, seeds: int = 5, **options: Any) -> Path:
    """Write a folder as compare does: one run for each method and seed."""
    for method in methods:
        for seed in range(seeds):
            make_run(folder / method / f"seed-{seed}", method, seed, **options)
    return folder


def _steps(rng: np.random.Generator, method: str, treatments: list[str], done: int, steps_per_epoch: int) -> list[str]:
    t = np.arange(1, done + 1)
    decay = np.exp(-3 * t / max(done, 1))
    loss = 0.15 + 2.2 * decay * rng.lognormal(0, 0.12, done)
    level = 400 * math.prod(_CONDITION.get(name, 1.0) for name in treatments) + 3
    walk = np.cumsum(rng.normal(0, 0.6 / math.sqrt(max(done, 1)), done))
    support = 1 + level * (1 - 0.9 * np.exp(-8 * t / max(done, 1))) * np.exp(walk) * rng.lognormal(0, 0.15, done)
    support[rng.random(done) < 0.002] *= 30  # spikes
    raw = support * 10 ** rng.uniform(5, 7, done)
    with_eps = np.minimum(support * 50, 1e5)
    rate = 0.1 * 0.1 ** (t // max(1, done // 2))
    eta = np.abs(rng.normal(0.05, 0.05, done)) * (0.3 + decay)
    switched = eta < rate
    failed = rng.random(done) < (3 / max(done, 1) if method == "svd" else 0)
    rank = 27 - (rng.random(done) < 0.01)
    lines = []
    for i in range(done):
        cond = "Infinity" if rng.random() < 0.001 else repr(float(raw[i]))
        numbers = f'"cond": {cond}, "cond_support": {float(support[i])!r}, "cond_eps": {float(with_eps[i])!r}'
        numbers += f', "rank": {rank[i]}'
        if method == "bn":
            numbers = '"cond": null, "cond_support": null, "cond_eps": null, "rank": null'
        olr = "olr" in treatments
        own = float(eta[i]) if olr and switched[i] else float(rate[i])
        switch = (
            f'"eta": {float(eta[i])!r}, "switched": {"true" if switched[i] else "false"}'
            if olr
            else '"eta": null, "switched": null'
        )
        lines.append(
            f'{{"kind": "step", "step": {i + 1}, "epoch": {i // steps_per_epoch + 1}, "loss": {float(loss[i])!r}, '
            f'"lr": {float(rate[i])!r}, "pre_svd_lr": {own!r}, {switch}, {numbers}, "failures": {int(failed[i])}}}'
        )
    return lines


def _add_epochs(
    lines: list[str],
    rng: np.random.Generator,
    shared: float,
    method: str,
    treatments: list[str],
    done: int,
    epochs: int,
    steps_per_epoch: int,
) -> None:
    final = 4.4 - sum(_GAIN.get(name, 0) for name in treatments) - (0.15 if method == "newton_schulz" else 0)
    for epoch in range(done, 0, -1):
        error = final + shared + rng.normal(0, 0.06) + 55 * math.exp(-7 * epoch / epochs)
        record = {
            "kind": "epoch",
            "epoch": epoch,
            "step": epoch * steps_per_epoch,
            "train_loss": 0.15 + 2 * math.exp(-3 * epoch / epochs),
            "train_error": 0.6 * error,
            "train_error5": 0.1 * error,
            "val_loss": 0.25 + 2 * math.exp(-3 * epoch / epochs) + rng.normal(0, 0.01),
            "val_error": error,
            "val_error5": 0.2 * error,
        }
        lines.insert(epoch * steps_per_epoch, json.dumps(record))
