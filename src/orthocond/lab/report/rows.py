"""The rows of the tables: statistics over the seeds of each method."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from orthocond.lab.conditions import CONDITIONS, geometric_mean
from orthocond.lab.notes import flags
from orthocond.lab.report.experiments import Experiment
from orthocond.lab.report.folders import is_ranked
from orthocond.lab.report.metrics import Metrics
from orthocond.lab.report.statistics import Difference, holm, paired_difference

__all__ = ["BASELINE", "VERDICTS", "Estimate", "Row", "places", "rows_of", "verdict_of"]

BASELINE = "svd"
"""The method with which the others are compared."""

VERDICTS = {
    "beyond": "beyond",
    "borderline": "borderline",
    "within": "within",
    "unknown": "can't tell",
}
"""The verdicts on a difference, compared with the noise of the seeds."""


@dataclass(frozen=True)
class Estimate:
    """Mean, standard deviation (over ``n - 1``) and range of the finite values of a method's runs; NaN without any."""

    mean: float
    std: float
    min: float
    max: float
    num: int

    @classmethod
    def of(cls, values: Iterable[float]) -> "Estimate":
        """Return the estimate from one value of each run."""
        finite = np.array([value for value in values if math.isfinite(value)])
        if not finite.size:
            return cls(math.nan, math.nan, math.nan, math.nan, 0)
        std = float(finite.std(ddof=1)) if finite.size > 1 else math.nan
        return cls(float(finite.mean()), std, float(finite.min()), float(finite.max()), int(finite.size))


@dataclass(frozen=True)
class Row:
    """A method in an experiment."""

    method: str
    num_runs: int
    num_finished: int
    num_diverged: int
    """Finished runs whose validation error is NaN; the estimates leave them out."""
    num_lost: int
    """Finished runs whose validation error is lost, because their metrics are damaged."""
    errors: Mapping[str, float]
    """The validation error in percent after the last epoch, of each finished run by seed."""
    error: Estimate
    error5: Estimate
    """Statistics of the top-5 error."""
    best: Estimate
    """Statistics of the lowest validation error of any epoch; chosen afterwards, it is biased downwards."""
    best5: Estimate
    difference: Difference | None
    """Difference of the error to `BASELINE`'s; ``None`` for itself and without a baseline."""
    p_corrected: float
    verdict: str
    """One of `VERDICTS`, or empty without a difference."""
    place_mean: int | None
    """1 to 4 if the mean error is among the four lowest of those that are ranked, see `is_ranked`."""
    place_min: int | None
    is_best: bool
    """Whether it has the lowest mean error, or is within the noise of it; False for all if all are alike."""
    conditions: Mapping[str, Estimate]
    """Each condition number at the end: geometric mean over the finished runs; ``std`` is of the decimal logarithm."""
    measure: str
    """The condition number by which the experiment is compared."""
    rank: Estimate
    failures: int
    """Solver failures in all runs and processes, in training and validation."""
    shares: Mapping[str, float]
    """For each flag that a treatment notes the share of all steps in which it was set; NaN for the other methods."""
    seconds: Mapping[str, Estimate]
    """Time of a step, and of its parts ``forward``, ``backward``, ``update``."""
    overhead: float
    """The mean seconds of a step relative to `BASELINE`'s, less 1; NaN where there is none."""

    @property
    def condition(self) -> Estimate:
        """The condition number at the end of training."""
        return self.conditions[self.measure]


def rows_of(experiment: Experiment) -> list[Row]:
    """Return the experiment's rows in the order of its methods."""
    methods = experiment.methods
    errors = {method: _last(experiment.finished(method), "val_error") for method in methods}
    control = errors.get(BASELINE)
    differences = [
        None if control is None or method == BASELINE else paired_difference(errors[method], control)
        for method in methods
    ]
    corrected = holm([math.nan if difference is None else difference.p for difference in differences])
    estimates = {method: Estimate.of(errors[method].values()) for method in methods}
    whole = [method for method in methods if all(map(math.isfinite, errors[method].values()))]
    ranked = [method for method in whole if is_ranked(method)]
    place_mean = places({method: estimates[method].mean for method in ranked})
    place_min = places({method: estimates[method].min for method in ranked})
    best = _best({method: errors[method] for method in whole})
    base = _seconds(experiment.of(BASELINE))["step"].mean
    rows = []
    for method, difference, p in zip(methods, differences, corrected, strict=True):
        runs, finished = experiment.of(method), experiment.finished(method)
        seconds = _seconds(runs)
        rows.append(
            Row(
                method=method,
                num_runs=len(runs),
                num_finished=len(errors[method]),
                num_diverged=len(errors[method]) - estimates[method].num,
                num_lost=sum(experiment.is_lost(method, seed) for seed in runs),
                errors=errors[method],
                error=estimates[method],
                error5=Estimate.of(_last(finished, "val_error5").values()),
                best=Estimate.of(run.best("val_error") for run in finished.values()),
                best5=Estimate.of(run.best("val_error5") for run in finished.values()),
                difference=difference,
                p_corrected=p,
                verdict=verdict_of(difference, p),
                place_mean=place_mean.get(method),
                place_min=place_min.get(method),
                is_best=method in best,
                conditions={name: _geometric(run.at_end[name] for run in finished.values()) for name in CONDITIONS},
                measure=experiment.measure,
                rank=Estimate.of(run.at_end["rank"] for run in finished.values()),
                failures=sum(run.failures for run in runs.values()),
                shares={name: _share(runs, name) for name in flags()},
                seconds=seconds,
                overhead=seconds["step"].mean / base - 1 if base > 0 else math.nan,
            )
        )
    return rows


def _share(runs: Mapping[str, Metrics], flag: str) -> float:
    noted = [run for run in runs.values() if flag in run.counts]
    return sum(run.counts[flag] for run in noted) / max(1, sum(run.num_steps for run in noted)) if noted else math.nan


def _last(runs: Mapping[str, Metrics], name: str) -> dict[str, float]:
    return {seed: run.last(name) for seed, run in runs.items()}


def verdict_of(difference: Difference | None, p_corrected: float) -> str:
    """Return one of `VERDICTS`, or nothing without a difference."""
    if difference is None:
        return ""
    if math.isnan(difference.p):
        return "unknown"
    if p_corrected < 0.05:
        return "beyond"
    return "borderline" if difference.p < 0.05 else "within"


def places(values: Mapping[str, float]) -> dict[str, int]:
    """Return 1 to 4 for the four lowest; equal values have equal places."""
    finite = {method: value for method, value in values.items() if math.isfinite(value)}
    places = {method: 1 + sum(other < value for other in finite.values()) for method, value in finite.items()}
    return {method: place for method, place in places.items() if place <= 4}


def _best(errors: Mapping[str, Mapping[str, float]]) -> set[str]:
    """Return the method with the lowest mean error, and those next to it that the seeds can't distinguish.

    The first method that is higher beyond the noise ends them; where there is none, nothing is the best.
    """
    means = {method: Estimate.of(values.values()).mean for method, values in errors.items()}
    ordered = sorted((method for method in means if math.isfinite(means[method])), key=lambda method: means[method])
    differences = [paired_difference(errors[method], errors[ordered[0]]) for method in ordered[1:]]
    corrected = holm([difference.p for difference in differences])
    verdicts = [verdict_of(difference, p) for difference, p in zip(differences, corrected, strict=True)]
    return set(ordered[: 1 + verdicts.index("beyond")]) if "beyond" in verdicts else set()


def _geometric(values: Iterable[float]) -> Estimate:
    """Return the geometric mean, and the deviation of the decimal logarithm."""
    known = [value for value in values if value > 0]
    std = math.nan if math.inf in known else Estimate.of(math.log10(value) for value in known).std
    nan = math.nan
    return Estimate(geometric_mean(known), std, min(known, default=nan), max(known, default=nan), len(known))


def _seconds(runs: Mapping[str, Metrics]) -> dict[str, Estimate]:
    names = ("step", "forward", "backward", "update")
    return {name: Estimate.of(run.seconds.get(name, math.nan) for run in runs.values()) for name in names}
