"""Running the paper's items: which runs they take, which are shared, and the time of a step for Table 6."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orthocond.errors import ArgumentError, check_choice
from orthocond.lab.bench import step
from orthocond.lab.bench.run import check_place, write_results
from orthocond.lab.compare import Run, plan
from orthocond.lab.paper import EXPERIMENTS, SCALES, Item, config_of
from orthocond.lab.runs import environment

__all__ = ["known_step_times", "planned_runs", "step_times"]


def planned_runs(
    items: Sequence[Item], scale: str, seeds: int, out: Path, data: Path | None, settings: Mapping[str, Any]
) -> list[Run]:
    """Return the runs that items take, seed by seed; a run that several of them need is there once.

    Raises:
        ArgumentError: a scale, setting or folder of data that isn't there.
    """
    check_choice(scale, SCALES, "scale", "paper")
    wanted: dict[str, dict[str, None]] = {}
    configs = {}
    for item in items:
        for experiment in item.quotes if item.kind != "times" else ():
            place = EXPERIMENTS[experiment][scale]
            configs[place.preset] = config_of(experiment, scale, data, settings)
            wanted.setdefault(place.preset, {}).update(dict.fromkeys(item.methods(experiment)))
    runs = [run for name, methods in wanted.items() for run in plan(configs[name], list(methods), seeds, out / name)]
    return sorted(runs, key=lambda run: run.config.seed)


def step_times(items: Sequence[Item], scale: str, out: Path, device: str) -> dict[str, Any] | None:
    """Return what ``bench step`` measured for Table 6, from the last time if it is there; None if no item needs it."""
    if all(item.kind != "times" for item in items):
        return None
    if (known := known_step_times(items, scale, out)) is None:
        file, config = out / "step.json", config_of("CIFAR-100", scale)
        check_place(file)
        records = step.measure(step.Cell("step"), quick=False, config=config, device=device, seconds=20.0)
        about = environment(device=device, world_size=1)
        write_results({"environment": about, "quick": False, "subjects": {"step": {"records": records}}}, file)
        known = known_step_times(items, scale, out)
    return known


def known_step_times(items: Sequence[Item], scale: str, out: Path) -> dict[str, Any] | None:
    """Return what ``bench step`` measured for Table 6 before; None if it did not, or if no item needs it.

    Raises:
        ArgumentError: the file is damaged, or of another scale.
    """
    file = out / "step.json"
    if not file.is_file() or all(item.kind != "times" for item in items):
        return None
    try:
        times: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["subjects"]["step"]
        records = [record for record in times["records"] if record["subject"] == "step"]
        presets = {record["preset"] for record in records}
        is_whole = {record["method"] for record in records} >= set(step.PAPER)
    except (OSError, ValueError, KeyError, TypeError):
        is_whole = False
    if not is_whole:
        raise ArgumentError(f"{file} holds no times of a step; remove it, and they are measured again.")
    if presets != {config_of("CIFAR-100", scale).preset}:
        raise ArgumentError(
            f"{file} holds times of another scale ({', '.join(sorted(presets))}); choose another folder with --out."
        )
    return times
