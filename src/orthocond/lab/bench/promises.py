"""What is promised about time, memory and error, and whether it holds."""

from collections.abc import Callable, Mapping
from functools import partial
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
        for promise, check, *bound in checks:
            entry = subjects.get(subject)
            found = None if entry is None else check([*entry["records"], *entry.get("functions", [])])
            if found is not None:
                rows.append([promise, found[0], "yes" if found[1] else ": ".join(["no", *bound])])
    about = "Medians of this run. Where a promise does not hold and the reason is known, it is given."
    return Table("What is promised", about, ["promise", "found", "holds"], rows)


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


def _one_is_cheap(records: Records, size: int, bound: float) -> tuple[str, bool] | None:
    place = ("contestant", "size", "batch", "spectrum")
    return _below(records, "total", bound, dict(zip(place, (DEFAULT, size, 1, next(iter(SPECTRA))), strict=True)))


def _polar_is_cheap(records: Records, rows: int, columns: int, bound: float) -> tuple[str, bool] | None:
    return _below(records, "total", bound, {"contestant": "gram", "rows": rows, "columns": columns})


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


def _norm_is_cheap(records: Records, batch: int, bound: float) -> tuple[str, bool] | None:
    own = [r for r in records if r["shape"] == [batch, 64, 32, 32] and r["mode"] == "training"]
    ratios = {r["layout"]: r["total"]["ratio"] for r in own if r["contestant"] == "DecorrelatedBatchNorm2d"}
    if not ratios:
        return None
    text = ", ".join(f"{ratio:.2f} {layout}" for layout, ratio in ratios.items())
    return text, max(ratios.values()) <= bound


def _smaller_side_is_cheap(records: Records, shape: list[int], bound: float) -> tuple[str, bool] | None:
    own = {r["contestant"]: r["total"]["ratio"] for r in records if r["shape"] == shape and r["mode"] == "training"}
    if "CovariancePool2d" not in own:
        return None
    factor = own["the same, by the whole covariance"] / own["CovariancePool2d"]
    return f"{factor:.1f}", factor >= bound


def _products_are_cheap(records: Records) -> tuple[str, bool] | None:
    own = [r for r in records if r.get("subject") == "products" and r["shape"][1] == 64 and r["groups"] == 1]
    found = next((float(r["total"]["ratio"]) for r in own if r["contestant"] == "products"), None)
    return None if found is None else (f"{found:.2f}", found <= 1.2)


def _everything_is_cheap(records: Records) -> tuple[str, bool] | None:
    if not any(r["subject"] == "step" and r["network"] == "resnet50" for r in records):
        return None
    added = next(r["seconds"] for r in records if r["subject"] == "added" and r["part"] == "nog+ow+olr")
    percent = 100 * added / step_seconds(records)
    return f"{percent:+.2f}%", percent <= 3


_Check = Callable[[Records], tuple[str, bool] | None]
_ONE_MATRIX = "autograd's overhead and some forty operations of torch around the decomposition of one matrix"
_PRODUCTS = "five products over the features in float32, and the memory they are read from"
_PROMISES: dict[str, list[tuple[str, _Check] | tuple[str, _Check, str]]] = {
    "solvers": [
        (f"{DEFAULT} is the fastest way to a gradient error below {ACCURATE:.0e}", _default_is_fastest),
        (f"{DEFAULT} is the fastest of the methods that are accurate for every spectrum", _default_is_fastest_whatever),
        *(
            (
                f"1x{size}x{size} forward and backward at most {bound} times eigh forward in float64",
                partial(_one_is_cheap, size=size, bound=bound),
                reason,
            )
            for size, bound, reason in (
                (16, 5.0, _ONE_MATRIX),
                (64, 2.2, _ONE_MATRIX),
                (512, 1.6, "five products in float64, which the accuracy of the gradient needs"),
            )
        ),
        (
            "log and powers at most 1.15 times the inverse root of the same size, forward and backward",
            _functions_are_cheap,
            "the operations of their divided differences, 9 to 11 where the root has 2",
        ),
    ],
    "functions": [
        (
            "values within 2e-6 and gradients within 1e-5 in float32, 1e-12 and 1e-10 in float64, as rounding allows",
            _ours_are_accurate,
        )
    ],
    "polar": [
        (
            "nearest_orthogonal at most 1.1 times torch.linalg.svd on 64x27",
            partial(_polar_is_cheap, rows=64, columns=27, bound=1.1),
            _ONE_MATRIX,
        ),
        (
            "nearest_orthogonal at most 0.6 times torch.linalg.svd on 1024x1024",
            partial(_polar_is_cheap, rows=1024, columns=1024, bound=0.6),
            "the decomposition of the Gram matrix in float64, which alone takes longer than that",
        ),
    ],
    "geometry": [
        ("nearest_rotation at most the time of roma on 100000x3x3, forward and backward", _rotations_are_fast),
        ("nearest_rotation at most a tenth of roma's memory on 64x64", _rotations_are_small),
    ],
    "layers": [
        *(
            (
                f"decorrelated batch norm at most {bound} times BatchNorm2d on {batch}x64x32x32 in both layouts",
                partial(_norm_is_cheap, batch=batch, bound=bound),
                _PRODUCTS,
            )
            for batch, bound in ((128, 1.5), (64, 2.0))
        ),
        *(
            (
                f"covariance pooling at least {bound} times as fast as by the whole covariance on "
                f"{'x'.join(map(str, shape))}",
                partial(_smaller_side_is_cheap, shape=shape, bound=bound),
                "the products that form the root from the smaller side, and its decomposition",
            )
            for shape, bound in (([32, 256, 7, 7], 30), ([8, 512, 7, 7], 25), ([32, 256, 14, 14], 1.4))
        ),
        ("whitening by products at most 1.2 times whitening by eigh with 64 channels", _products_are_cheap),
    ],
    "step": [("nog+ow+olr at most +3% of a ResNet-50 step", _everything_is_cheap)],
}


def _below(records: Records, what: str, bound: float, place: dict[str, Any]) -> tuple[str, bool] | None:
    for r in records:
        if all(r.get(key) == value for key, value in place.items()) and what in r:
            return f"{r[what]['ratio']:.2f}", r[what]["ratio"] <= bound
    return None
