"""What a call means: its verdict, the reason, and what to write instead."""

from dataclasses import asdict, dataclass
from typing import Any

import torch

from orthocond.diagnosis._calls import Call
from orthocond.diagnosis._measure import Gradient, Spread

__all__ = ["VERDICTS", "Finding", "finding"]

VERDICTS = ("ill-posed", "non-finite input", "singular", "ties", "ill-conditioned", "healthy")
"""The verdicts, worst first.

Example:
    >>> VERDICTS[0], VERDICTS[-1]
    ('ill-posed', 'healthy')
"""

_LOST = 1e-2
"""A gradient whose relative error is larger than this is wrong."""


@dataclass(frozen=True)
class Finding:
    """One call of a decomposition: its place, its input, its gradient, and what to do.

    A call on a batch is described by the numbers of its worst matrix.

    Example:
        >>> import orthocond
        >>> A = torch.eye(3, requires_grad=True)
        >>> with orthocond.diagnose() as diagnosis:
        ...     l, U = torch.linalg.eigh(A)
        ...     ((U * l.sqrt()) @ U.mT)[0, 1].backward()
        >>> found = diagnosis.findings[0]
        >>> found.verdict, found.gap, found.gradient_finite, found.consistent
        ('ties', 0.0, False, True)
    """

    function: str
    """Full name of the function, e.g. ``torch.linalg.eigh``."""
    module: str
    """Dotted name of the innermost module of the model, or the class of a module where no model was given."""
    source: str
    """``file:line`` of the first line outside torch and orthocond."""
    shape: tuple[int, ...]
    dtype: str
    device: str
    rank: int | None
    """Number of eigenvalues or singular values above rounding; None if unknown, as after a Cholesky factorisation."""
    cond: float | None
    """Largest over smallest eigenvalue, as absolute values."""
    gap: float | None
    """Smallest distance between two eigenvalues over the largest absolute value; None where ``rank`` is."""
    gradient_finite: bool | None
    """Whether the gradient that came back is finite; None if no backward pass was seen."""
    amplification: float | None
    """Norm of the gradient that came back over the norm of its well-posed part: what tied eigenvalues leave out."""
    consistent: bool | None
    """False if the loss depends on the choice of eigenvectors of a repeated eigenvalue; None if that is unknown."""
    verdict: str
    """``"healthy"``, ``"ties"``, ``"singular"``, ``"ill-conditioned"``, ``"ill-posed"`` or ``"non-finite input"``."""
    reason: str
    """Why, in one or two sentences."""
    advice: str
    """What to do, and a line of code to paste."""
    num_matrices: int
    """Number of matrices in the call."""
    num_affected: int
    """Number of matrices with this verdict."""

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as a plain dict."""
        return asdict(self)


def finding(call: Call, *, interrupted: bool) -> Finding:
    """Return the finding of a call; ``interrupted`` if an exception may have come before the backward pass."""
    from orthocond.diagnosis._advice import explain

    levels, gradient = _levels(call, interrupted)
    worst = int(levels.argmin()) if levels.numel() else 0
    verdict = VERDICTS[int(levels[worst])] if levels.numel() else "healthy"
    if not call.finite_input:
        verdict = "non-finite input"
    reason, advice = explain(call, verdict, gradient, worst)
    s = call.spread
    return Finding(
        call.function,
        call.place.module,
        call.place.source,
        call.shape,
        str(call.dtype).removeprefix("torch."),
        str(call.device),
        None if s is None or call.estimated else int(s.rank[worst]),
        None if s is None else float(s.cond[worst]),
        None if s is None or call.estimated else float(s.gap[worst]),
        None if gradient is None else bool(gradient.finite[worst]),
        None if gradient is None else float(gradient.amplification[worst]),
        None if gradient is None or not _at(gradient.finite_in, worst) else bool(gradient.consistent[worst]),
        verdict,
        reason,
        advice,
        max(1, levels.numel()),
        int((levels == levels[worst]).sum()) if levels.numel() else 1,
    )


def _at(flags: torch.Tensor, index: int) -> bool:
    return bool(flags[index] if flags.ndim else flags)


def _levels(call: Call, interrupted: bool) -> tuple[torch.Tensor, Gradient | None]:
    """Return the index of each matrix's verdict in `VERDICTS`, and the gradient that tells most."""
    if call.spread is None:
        level = VERDICTS.index("singular") if call.failure and call.finite_input else len(VERDICTS) - 1
        return torch.tensor([level]), None
    measured = [(_level(call, gradient), gradient) for gradient in call.gradients]
    if not measured:
        return _level_of_matrix(call, interrupted), None
    return min(measured, key=lambda pair: (int(pair[0].min()), bool(pair[1].finite.all())))


def _level_of_matrix(call: Call, interrupted: bool) -> torch.Tensor:
    """Return the verdicts where no backward pass was seen: of a call that failed, or was meant to be differentiated."""
    s = call.spread
    assert s is not None
    n = s.null.shape[-1]
    levels = torch.full_like(s.rank, VERDICTS.index("healthy"))
    raised = not call.function.endswith("cholesky_ex") or call.options.get("check_errors")
    if call.failure and raised:  # without an exception, the caller may have looked at info and dropped the factor
        return torch.where(_failed(s), VERDICTS.index("singular"), levels)
    if call.requires_grad and interrupted and call.kind in ("eigh", "svd"):
        levels = torch.where(s.tied, VERDICTS.index("ties"), levels)
        levels = torch.where((s.rank < n) | (s.negative & (call.kind == "eigh")), VERDICTS.index("singular"), levels)
    return levels


def _failed(s: Spread) -> torch.Tensor:
    """Return which matrices made a call fail: all of them if their eigenvalues don't tell."""
    failed = (s.rank < s.null.shape[-1]) | s.negative
    return failed | ~failed.any()


def _level(call: Call, g: Gradient) -> torch.Tensor:
    s = call.spread
    assert s is not None
    n = s.null.shape[-1]
    lost = ~g.finite | (call.unit * g.amplification > _LOST) | (g.noise > _LOST)
    deficient = _failed(s) if call.failure else (s.rank < n) | (s.negative & ~g.finite_in)
    inverted = g.focus | ~g.finite_in | ~g.finite
    ill = s.small.any(-1)
    levels = torch.full_like(s.rank, VERDICTS.index("healthy"))
    rules = {  # later ones win
        "non-finite input": ~g.finite_in,
        "ill-conditioned": (ill & (g.focus | lost)) | (~g.finite & g.finite_in),
        "ties": g.tied & lost & g.finite_in,
        "singular": deficient & (inverted | lost),
        "ill-posed": ~g.consistent & g.finite_in,
    }
    if call.kind in ("ours", "pinv"):  # zero eigenvalues are dropped, and equal ones have an exact gradient
        rules["ill-conditioned"] = _inverts_noise(call) | (~g.finite & g.finite_in)
        rules["singular"] = torch.zeros_like(ill)
    for verdict, applies in rules.items():
        levels = torch.where(applies, VERDICTS.index(verdict), levels)
    return levels


def _inverts_noise(call: Call) -> torch.Tensor:
    """Return which matrices have something inverted that is noise: near the cut of a pseudo-inverse, or above eps."""
    s, values = call.spread, call.values
    assert s is not None
    assert values is not None
    noise = call.unit / _LOST * values.abs().amax(-1)
    if call.kind == "pinv":
        kept = values > torch.maximum(call.options["atol"], call.options["rtol"] * values[:, :1])
        return (kept & (values < noise.unsqueeze(-1))).any(-1)
    eps, functions = float(call.options.get("eps", 0.0)), str(call.options["functions"])
    inverts = any(sign in functions for sign in ("inv", "log", "-"))  # inv_sqrt, log, and negative powers
    if not inverts or eps == 0 or call.options.get("rtol"):
        return torch.zeros_like(s.negative)
    return (s.rank < values.shape[-1]) & (eps < noise)
