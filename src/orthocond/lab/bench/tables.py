"""The results as tables of text."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from orthocond.lab.bench.functions import FUNCTIONS, OURS, TRUTHS
from orthocond.lab.bench.problems import EPS, SPECTRA
from orthocond.lab.bench.solvers import ACCURATE, DEFAULT

__all__ = ["Records", "Table", "always_accurate", "fastest", "mean_times", "step_seconds", "tables"]

Records = list[dict[str, Any]]

_MILD = 1e4
"""Largest condition number for which errors of the functions are shown; beyond it, rounding the matrix decides."""

_TRUTH_NOTES = {
    "50 digits": "The truth is computed with 50 digits.",
    "SciPy": "The truth is SciPy's function of the block matrix [[A, G], [0, A]] in float64, which needs no "
    "eigenvectors; beyond this condition number it has too few digits itself.",
}


@dataclass(frozen=True)
class Table:
    """A table of text; the first column names the rows."""

    title: str
    note: str
    columns: list[str]
    rows: list[list[str]]


def tables(subject: str, entry: Mapping[str, Any]) -> list[Table]:
    """Return the tables of a subject's results."""
    makers: dict[str, Callable[[Mapping[str, Any]], list[Table]]] = {
        "solvers": lambda entry: [
            _errors(entry["records"]),
            _fastest(entry["records"]),
            _whatever(entry["records"]),
            _growth(entry["growth"]),
            *([_functions(entry["functions"])] if "functions" in entry else []),
        ],
        "functions": lambda entry: [
            _accuracy([r for r in entry["records"] if r["truth"] == truth], truth)
            for truth in TRUTHS
            if any(r["truth"] == truth for r in entry["records"])
        ],
        "polar": lambda entry: [_polar(entry["records"])],
        "geometry": lambda entry: [_geometry(entry["records"])],
        "layers": lambda entry: [
            (_by_products if name == "products" else _layers)(entry["records"], name)
            for name in _LAYERS
            if any(r["subject"] == name for r in entry["records"])
        ],
        "step": lambda entry: [_steps(entry["records"]), _added(entry["records"])],
    }
    return makers[subject](entry)


def _errors(records: Records) -> Table:
    size = 64 if any(r["size"] == 64 for r in records) else records[0]["size"]
    own = [r for r in records if (r["size"], r["batch"]) == (size, 1)]
    spectra = list(dict.fromkeys(r["spectrum"] for r in own))
    rows = []
    for name in dict.fromkeys(r["contestant"] for r in own):
        mine = {r["spectrum"]: r for r in own if r["contestant"] == name}
        first = mine[spectra[0]]
        rows.append(
            [
                name,
                _times(first.get("forward")),
                _times(first.get("total")),
                _number(first.get("saved"), "{:.1f}"),
                *(_error(mine[spectrum]) for spectrum in spectra),
            ]
        )
    return Table(
        f"Inverse roots of 1x{size}x{size}, float32",
        f"Inverse roots of `A + {EPS:.0e} I`, whose condition number is at most {1 / EPS:.0e}. The columns are the "
        f"time relative to `torch.linalg.eigh` forward in float64 ({spectra[0]}; quartiles over the rounds in "
        "brackets), the memory kept for the backward pass relative to the matrix, and the relative error of the "
        "gradient for each spectrum.",
        ["contestant", "forward", "forward and backward", "kept", *spectra],
        rows,
    )


def _fastest(records: Records) -> Table:
    rows, spectra = [], [name for name in SPECTRA if any(r["spectrum"] == name for r in records)]
    for size, batch in dict.fromkeys((r["size"], r["batch"]) for r in records):
        row = [f"{batch}x{size}x{size}"]
        for spectrum in spectra:
            own = [r for r in records if (r["size"], r["batch"], r["spectrum"]) == (size, batch, spectrum)]
            best = fastest(own)
            if best is None:
                row.append("none" if own else "")
                continue
            default = next((r for r in own if r["contestant"] == DEFAULT and "total" in r), None)
            behind = f"{default['total']['ratio'] / best['total']['ratio']:.2f}" if default is not None else "failed"
            row.append(best["contestant"] + (f" ({behind})" if best is not default else ""))
        rows.append(row)
    return Table(
        f"The fastest way to a gradient error below {ACCURATE:.0e}",
        f"In parentheses, where another method is faster than {DEFAULT}: the time of {DEFAULT} relative to it. Empty: "
        "not measured. Large batches are measured with one spectrum, and still larger ones not at all, because a round "
        "would take minutes.",
        ["matrices", *spectra],
        rows,
    )


def _whatever(records: Records) -> Table:
    names = always_accurate(records)
    rows = []
    for (size, batch), means in mean_times(records, names).items():
        cells = [f"{means[name] / means[DEFAULT]:.2f}" if DEFAULT in means else "" for name in names if name in means]
        rows.append([f"{batch}x{size}x{size}", *cells])
    return Table(
        "Accurate whatever the spectrum",
        f"If you don't know the spectrum, you need a method that is below {ACCURATE:.0e} on all of them. "
        f"Those methods, with the time forward and backward relative to {DEFAULT}: geometric means over the measured "
        "spectra.",
        ["matrices", *names],
        rows,
    )


def always_accurate(records: Records) -> list[str]:
    """Return the contestants that are accurate wherever they were measured, the default first."""
    names = dict.fromkeys(r["contestant"] for r in records)
    kept = [name for name in names if all(map(_is_accurate, (r for r in records if r["contestant"] == name)))]
    return sorted(kept, key=lambda name: name != DEFAULT)


def mean_times(records: Records, names: list[str]) -> dict[tuple[int, int], dict[str, float]]:
    """Return the mean time of the contestants for each size and batch."""
    means: dict[tuple[int, int], dict[str, float]] = {}
    for size, batch in dict.fromkeys((r["size"], r["batch"]) for r in records):
        for name in names:
            place = (size, batch, name)
            own = [r["total"]["ratio"] for r in records if (r["size"], r["batch"], r["contestant"]) == place]
            means.setdefault((size, batch), {})[name] = statistics.geometric_mean(own)
    return means


def _growth(growth: Records) -> Table:
    batches, sizes = (list(dict.fromkeys(key for g in growth for key in g[which])) for which in ("in_size", "in_batch"))
    return Table(
        "How the time grows",
        "Fitted exponents of the time forward and backward: in the size for each batch, in the batch for each size.",
        ["contestant", *(f"size, batch {b}" for b in batches), *(f"batch, size {n}" for n in sizes)],
        [
            [
                g["contestant"],
                *(_number(g["in_size"].get(b), "{:.2f}") for b in batches),
                *(_number(g["in_batch"].get(n), "{:.2f}") for n in sizes),
            ]
            for g in growth
        ],
    )


def _functions(records: Records) -> Table:
    names = list(dict.fromkeys(r["contestant"] for r in records))
    by_place = {(r["size"], r["batch"], r["contestant"]): r for r in records}
    return Table(
        "Other functions over the inverse root",
        "Time forward and backward, relative to `matrix_inv_sqrth` of the same matrices.",
        ["matrices", *names],
        [
            [f"{batch}x{size}x{size}", *(_times(by_place[size, batch, name]["over_root"]) for name in names)]
            for size, batch in dict.fromkeys((r["size"], r["batch"]) for r in records)
        ],
    )


def _accuracy(records: Records, truth: str) -> Table:
    dtypes = list(dict.fromkeys(r["dtype"] for r in records))
    rows = []
    for function, name in dict.fromkeys((r["function"], r["contestant"]) for r in records):
        row = [function, name]
        for dtype in dtypes:
            own = [r for r in records if (r["function"], r["contestant"], r["dtype"]) == (function, name, dtype)]
            mild = [r for r in own if r["condition"] <= _MILD]
            worst = (
                max((r[key] for r in mild if r[key] is not None), default=None)
                for key in ("value_error", "gradient_error")
            )
            total = sum(r["problems"] for r in own)
            row += [_number(error, "{:.0e}") or "none finite" for error in worst]
            row += [f"{sum(r['not_finite'] for r in own)}", f"{100 * sum(r['within'] for r in own) / total:.1f}%"]
        rows.append(row)
    parts = ("value", "gradient", "not finite", "as good as can be")
    return Table(
        f"Spectral functions against {truth}",
        f"{sum(r['problems'] for r in records if r['contestant'] == OURS) // len(FUNCTIONS) // len(dtypes)} matrices "
        f"for each function and dtype, {records[0]['sizes']}, with gaps from 0 to 0.1 "
        f"and condition numbers from 1 to {max(r['condition'] for r in records):.0e}. {_TRUTH_NOTES[truth]} Largest "
        f"relative errors of value and gradient up to condition {_MILD:.0e}; the number of matrices with a result or a "
        "gradient that is not finite; and the share within the promised errors, or 100 times what rounding the entries "
        "in float64 causes, over all matrices.",
        ["function", "package", *(f"{dtype}: {part}" for dtype in dtypes for part in parts)],
        rows,
    )


def _polar(records: Records) -> Table:
    names = list(dict.fromkeys(r["contestant"] for r in records))
    by_place = {(r["rows"], r["columns"], r["contestant"]): r for r in records}
    return Table(
        "Nearest orthogonal matrix, float32",
        "Time relative to `torch.linalg.svd` in float32, and the relative error. Muon's own steps run in bfloat16; "
        "their column is empty where a CPU without bfloat16 would take too long.",
        ["shape", *names],
        [
            [
                f"{rows}x{columns}",
                *(_time_and_error(by_place.get((rows, columns, name))) for name in names),
            ]
            for rows, columns in dict.fromkeys((r["rows"], r["columns"]) for r in records)
        ],
    )


def _geometry(records: Records) -> Table:
    return Table(
        "Nearest rotation, float32",
        "Time relative to `torch.linalg.svd` forward in float32, the relative error of the gradient, and the peak "
        "memory of forward and backward relative to the matrices.",
        ["contestant", "matrices", "forward", "forward and backward", "gradient error", "memory"],
        [
            [
                r["contestant"],
                f"{r['batch']}x{r['size']}x{r['size']}",
                _times(r["forward"]),
                _times(r["total"]),
                _error(r),
                _number(r["peak"], "{:.0f}"),
            ]
            for r in records
        ],
    )


_LAYERS = {
    "norm": "Whitening against batch norm",
    "products": "Whitening by products against whitening by eigh",
    "folded": "Inference, whitening folded into the convolution in front",
    "pool": "Covariance pooling against average pooling",
    "operator": "Convolutions that are orthogonal as a map of images",
    "weight": "Orthogonal weights",
}


_WEIGHT_NOTE = (
    "relative to the weight. In eval mode `orthogonal_weight` returns the last weight while nothing has changed; the "
    "others recompute it."
)


_LAUNCH, _EIGH = 5e-6, 1.8e-3
"""For the estimate: seconds of a kernel launch, and of one decomposition on a GPU."""


def _by_products(records: Records, subject: str) -> Table:
    own = [r for r in records if r["subject"] == subject]
    rows = []
    for r in own:
        estimate = r["launches"] * _LAUNCH + (r["groups"] * _EIGH if r["contestant"] == "eigh" else 0.0)
        rows.append(
            [
                r["contestant"],
                "x".join(map(str, r["shape"])),
                str(r["groups"]),
                _times(r["total"]),
                str(r["products"]),
                str(r["launches"]),
                f"{1e3 * estimate:.1f} ms",
            ]
        )
    return Table(
        _LAYERS[subject],
        "Forward and backward of the layer in training, over the layer with eigh; the number of matrix products and of "
        "operations in it. The last column is an estimate, not measured: 5 microseconds for each operation, as for a "
        "kernel launch, and 1.8 ms for each decomposition, as pytorch issue 174674 reports (914 ms for 500 matrices "
        "of 100x100). The arithmetic itself is left out: matrices this small take less than a launch. Half terms are "
        "for large matrices on GPUs; a CPU multiplies them in float32.",
        ["solver", "shape", "groups", "forward and backward", "products", "operations", "GPU, estimated"],
        rows,
    )


def _layers(records: Records, subject: str) -> Table:
    own = [r for r in records if r["subject"] == subject]
    return Table(
        _LAYERS[subject],
        f"Time relative to {own[0]['reference']} of the same shape, layout and mode; memory kept for the backward pass "
        + ("relative to the input." if subject != "weight" else _WEIGHT_NOTE),
        ["layer", "shape", "layout", "mode", "forward", "forward and backward", "kept"],
        [
            [
                r["contestant"],
                "x".join(map(str, r["shape"])),
                r["layout"],
                r["mode"],
                _times(r["forward"]),
                _times(r["total"]) if r["mode"] == "training" else "",
                _number(r["saved"], "{:.2f}"),
            ]
            for r in own
        ],
    )


def _steps(records: Records) -> Table:
    own = [r for r in records if r["subject"] == "step"]
    return Table(
        f"A training step of {own[0]['network']}, batch {own[0]['batch_size']} (Table 6)",
        "Extra time over svd and over bn in percent, with quartiles over the rounds in brackets; the paper used a GPU.",
        ["method", "forward", "backward", "step over svd", "paper", "step over bn", "paper's over bn"],
        [
            [
                r["method"],
                _percent(r["forward"]["svd"]["ratio"]),
                _percent(r["backward"]["svd"]["ratio"]),
                _percents(r["total"]["svd"]),
                _percent(r["paper"]["svd"]) if "paper" in r else "",
                _percents(r["total"]["bn"]),
                _percent(r["paper"]["bn"]) if "paper" in r else "",
            ]
            for r in own
        ],
    )


def _added(records: Records) -> Table:
    step = step_seconds(records)
    return Table(
        "What is added to the step",
        f"Measured on the stem alone, with and without each part; in percent of a step with svd, {step:.2f} s.",
        ["part", "milliseconds", "percent of the step"],
        [
            [
                r["part"],
                f"{1e3 * r['seconds']:.2f} [{1e3 * r['low']:.2f}, {1e3 * r['high']:.2f}]",
                f"{100 * r['seconds'] / step:+.3f}",
            ]
            for r in records
            if r["subject"] == "added"
        ],
    )


def fastest(records: Records) -> dict[str, Any] | None:
    """Return the fastest of those that are accurate."""
    return min(filter(_is_accurate, records), key=lambda r: float(r["total"]["ratio"]), default=None)


def _is_accurate(record: dict[str, Any]) -> bool:
    return "total" in record and record["gradient_error"] is not None and record["gradient_error"] < ACCURATE


def step_seconds(records: Records) -> float:
    """Return the seconds of a training step with svd."""
    return float(next(r for r in records if r.get("method") == "svd")["total"]["svd"]["seconds"])


def _times(spread: dict[str, float] | None) -> str:
    return "" if spread is None else f"{spread['ratio']:.2f} [{spread['low']:.2f}, {spread['high']:.2f}]"


def _time_and_error(record: dict[str, Any] | None) -> str:
    return (
        ""
        if record is None
        else f"{record['total']['ratio']:.2f}, " + (_number(record["error"], "{:.0e}") or "not finite")
    )


def _percents(spread: dict[str, float]) -> str:
    low, high = (_percent(spread[key]) for key in ("low", "high"))
    return f"{_percent(spread['ratio'])} [{low}, {high}]"


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f}"


def _error(record: dict[str, Any]) -> str:
    if "failed" in record:
        return "failed"
    return _number(record["gradient_error"], "{:.0e}") or "not finite"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
