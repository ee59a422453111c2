"""The report in a few sentences: the lowest error, whether it is beyond the noise, the lowest condition number."""

import math

from orthocond.lab.conditions import CONDITIONS
from orthocond.lab.report import text
from orthocond.lab.report.experiments import Experiment
from orthocond.lab.report.rows import BASELINE, Row

__all__ = ["message_of"]


def message_of(experiment: Experiment, rows: list[Row]) -> list[str]:
    """Return the sentences above an experiment's table; if no method differs, the first one says so."""
    about_errors = [_error(rows), _noise(rows)]
    if not any(row.verdict == "beyond" for row in rows):
        about_errors.reverse()
    sentences = [*about_errors, _condition(rows), _progress(experiment, rows)]
    return [sentence for sentence in sentences if sentence]


def _error(rows: list[Row]) -> str:
    whole = [row for row in rows if math.isfinite(row.error.mean) and not row.num_diverged]
    known = [row for row in whole if row.error.mean == min(other.error.mean for other in whole)]
    if not known:
        return ""
    best = _listed([row.method for row in known])
    row = known[0]
    have = "have" if len(known) > 1 else "has"
    runs = f"{row.error.num} seeds" if row.error.num > 1 else "one seed"
    sentence = f"{best} {have} the lowest validation error, {text.mean_std(row.error)} % over {runs}"
    difference = row.difference
    if len(known) > 1 or difference is None or not math.isfinite(difference.mean) or difference.mean >= 0:
        return sentence + "."
    sentence += f", {-difference.mean:.2f} points below {BASELINE}"
    if row.verdict == "unknown":
        return sentence + "; whether that is more than noise, so few seeds can't tell."
    interval = f"95% interval {-difference.high:.2f} to {-difference.low:.2f}"
    return (
        sentence
        + {
            "beyond": f" ({interval}): beyond the noise of the seeds.",
            "borderline": f" ({interval}): borderline, for it is one of several comparisons.",
            "within": f" ({interval}): within the noise of the seeds.",
        }[row.verdict]
    )


def _noise(rows: list[Row]) -> str:
    compared = [row for row in rows if row.difference is not None]
    if not any(row.method == BASELINE for row in rows):
        return f"There are no runs of {BASELINE} to compare with."
    known = [row for row in compared if row.verdict not in ("", "unknown")]
    if not known:
        return ""
    beyond = {
        row.method: row.difference.mean for row in known if row.difference is not None and row.verdict == "beyond"
    }
    if not beyond:
        many = f"Corrected for {len(known)} comparisons, no" if len(known) > 1 else "No"
        return f"{many} method differs from {BASELINE} by more than the noise of the seeds."
    groups = {
        f"better than {BASELINE}": [method for method, mean in beyond.items() if mean < 0],
        f"worse than {BASELINE}": [method for method, mean in beyond.items() if mean >= 0],
    }
    told = [
        f"{_listed(methods)} {'is' if len(methods) == 1 else 'are'} {what}"
        for what, methods in groups.items()
        if methods
    ]
    others = len(known) - len(beyond)
    rest = (
        f" The other {others} can't be distinguished from it."
        if others > 1
        else " The other one can't be distinguished from it."
        if others
        else ""
    )
    return f"Beyond the noise of the seeds, {' and '.join(told)}.{rest}"


def _listed(names: list[str]) -> str:
    """Return names as a list in a sentence.

    Example:
        >>> _listed(["a", "b", "c"])
        'a, b and c'
    """
    return " and ".join([*([", ".join(names[:-1])] if len(names) > 1 else []), names[-1]])


def _condition(rows: list[Row]) -> str:
    known = [row for row in rows if math.isfinite(row.condition.mean)]
    if not known:
        return ""
    best = min(known, key=lambda row: row.condition.mean)
    sentence = (
        f"The lowest condition number at the end of training is {best.method}'s, "
        f"{text.condition(best.condition.mean)} {CONDITIONS[best.measure][0]}"
    )
    base = next((row for row in known if row.method == BASELINE and row is not best), None)
    return sentence + (f" ({BASELINE}: {text.condition(base.condition.mean)})." if base else ".")


def _progress(experiment: Experiment, rows: list[Row]) -> str:
    runs = list(experiment.runs.values())
    counts = {
        "diverged": sum(row.num_diverged for row in rows),
        "lost": sum(row.num_lost for row in rows),
        "not finished": sum(not run.is_finished for run in runs),
        "missing": len(experiment.methods) * len(experiment.seeds) - len(runs),
    }
    told = [f"{count} {what}" for what, count in counts.items() if count]
    return f"Of {len(runs) + counts['missing']} runs: {', '.join(told)}." if told else ""
