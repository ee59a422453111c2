"""What is promised about time, memory and error, and whether it holds."""

from collections.abc import Callable, Mapping
from typing import Any

from orthocond.lab.bench.functions import OURS
from orthocond.lab.bench.problems import SPECTRA
from orthocond.lab.bench.solvers import ACCURATE, DEFAULT
from orthocond.lab.bench.tables import Records, Table, always_accurate, fastest, mean_times, step_seconds

__all__ = ["promises"]


def promises(subjects: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return what is promised, what was found, and whether it holds, as far as it was measured."""
    rows = []
    for subject, checks in _PROMISES.items():
        for promise, check in checks:
            entry = subjects.get(subject)
            found = None if entry is None else check([*entry["records"], *entry.get("functions", [])])
            if found is not None:
                rows.append([promise, found[0], "yes" if found[1] else "no"])
    return Table("What is promised", "Medians of this run.", ["promise", "found", "holds"], rows)


def _default_is_fastest(records: Records) -> tuple[str, bool] | None:
    cells = dict.fromkeys((r["size"], r["batch"], r["spectrum"]) for r in records)
    best = {key: fastest([r for r in records if (r["size"], r["batch"], r["spectrum"]) == key]) for key in cells}
    won = sum(winner is not None and winner["contestant"] == DEFAULT for winner in best.values())
    return f"in {won} of {len(best)}", won == len(best)


def _default_is_fastest_whatever(records: Records) -> tuple[str, bool] | None:
    names = always_accurate(records)
    if DEFAULT not in names:
        return "it is not accurate", False
    times = mean_times(records, names).values()
    won = sum(min(own, key=lambda name: own[name]) == DEFAULT for own in times)
    return f"at {won} of {len(times)} sizes", won == len(times)


def _small_is_cheap(records: Records) -> tuple[str, bool] | None:
    place = ("contestant", "size", "batch", "spectrum")
    return _below(records, "total", 2.5, dict(zip(place, (DEFAULT, 64, 1, next(iter(SPECTRA))), strict=True)))


def _functions_are_cheap(records: Records) -> tuple[str, bool] | None:
    own = [r for r in records if r["contestant"].startswith(("matrix_logh", "matrix_powerh"))]
    largest = max((float(r["over_root"]["ratio"]) for r in own), default=None)
    return None if largest is None else (f"{largest:.2f}", largest <= 1.15)


def _ours_are_accurate(records: Records) -> tuple[str, bool] | None:
    own = [r for r in records if r["contestant"] == OURS]
    within, total = (sum(r[key] for r in own) for key in ("within", "problems"))
    return f"{within} of {total}", within == total


def _rotations_are_fast(records: Records) -> tuple[str, bool] | None:
    return _over_roma(records, 3, 100_000, lambda r: float(r["total"]["ratio"]), 1.0)


def _rotations_are_small(records: Records) -> tuple[str, bool] | None:
    return _over_roma(records, 64, 2, lambda r: float(r["peak"]), 0.1)


def _over_roma(
    records: Records, size: int, batch: int, measured: Callable[[dict[str, Any]], float], bound: float
) -> tuple[str, bool] | None:
    own = {r["contestant"]: measured(r) for r in records if (r["size"], r["batch"]) == (size, batch)}
    if "roma" not in own:
        return None
    ratio = own["nearest_rotation"] / own["roma"]
    return f"{ratio:.2g}", ratio <= bound


def _norm_is_cheap(records: Records) -> tuple[str, bool] | None:
    own = [r for r in records if r["shape"] == [128, 64, 32, 32] and r["mode"] == "training"]
    ratios = {r["layout"]: r["total"]["ratio"] for r in own if r["contestant"] == "DecorrelatedBatchNorm2d"}
    if not ratios:
        return None
    layout = min(ratios, key=lambda name: ratios[name])
    return f"{ratios[layout]:.2f}, {layout}", ratios[layout] <= 2


def _products_are_cheap(records: Records) -> tuple[str, bool] | None:
    own = [r for r in records if r["subject"] == "products" and r["shape"][1] == 64 and r["groups"] == 1]
    found = next((float(r["total"]["ratio"]) for r in own if r["contestant"] == "products"), None)
    return None if found is None else (f"{found:.2f}", found <= 1.2)


def _everything_is_cheap(records: Records) -> tuple[str, bool] | None:
    if not any(r["subject"] == "step" and r["network"] == "resnet50" for r in records):
        return None
    added = next(r["seconds"] for r in records if r["subject"] == "added" and r["part"] == "nog+ow+olr")
    percent = 100 * added / step_seconds(records)
    return f"{percent:+.2f}%", percent <= 3


_PROMISES: dict[str, list[tuple[str, Callable[[Records], tuple[str, bool] | None]]]] = {
    "solvers": [
        (f"{DEFAULT} is the fastest way to a gradient error below {ACCURATE:.0e}", _default_is_fastest),
        (f"{DEFAULT} is the fastest of the methods that are accurate for every spectrum", _default_is_fastest_whatever),
        ("1x64x64 forward and backward at most 2.5 times eigh forward in float64", _small_is_cheap),
        (
            "log and powers at most 1.15 times the inverse root of the same size, forward and backward",
            _functions_are_cheap,
        ),
    ],
    "functions": [
        (
            "values within 2e-6 and gradients within 1e-5 in float32, 1e-12 and 1e-10 in float64, as rounding allows",
            _ours_are_accurate,
        )
    ],
    "geometry": [
        ("nearest_rotation at most the time of roma on 100000x3x3, forward and backward", _rotations_are_fast),
        ("nearest_rotation at most a tenth of roma's memory on 64x64", _rotations_are_small),
    ],
    "layers": [
        ("decorrelated batch norm at most 2 times BatchNorm2d on 128x64x32x32 in the better layout", _norm_is_cheap),
        ("whitening by products at most 1.2 times whitening by eigh with 64 channels", _products_are_cheap),
    ],
    "step": [("nog+ow+olr at most +3% of a ResNet-50 step", _everything_is_cheap)],
}


def _below(records: Records, what: str, bound: float, place: dict[str, Any]) -> tuple[str, bool] | None:
    for r in records:
        if all(r[key] == value for key, value in place.items()) and what in r:
            return f"{r[what]['ratio']:.2f}", r[what]["ratio"] <= bound
    return None
