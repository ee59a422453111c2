"""A diagnosis as text and as HTML."""

import html
import textwrap
from collections.abc import Sequence

from orthocond.diagnosis._findings import VERDICTS, Finding

__all__ = ["as_html", "as_text", "grouped"]

_WIDTH = 100
_SINGULAR = ("svd", "svdvals", "pinv", "pinverse")
_CELL = "text-align:left;vertical-align:top"


def grouped(findings: Sequence[Finding]) -> list[tuple[Finding, int]]:
    """Return the worst finding of each place and the number of calls there, worst places first."""
    places: dict[tuple[str, str, str], list[Finding]] = {}
    for found in findings:
        places.setdefault((found.function, found.module, found.source), []).append(found)
    worst = [(min(group, key=_severity), len(group)) for group in places.values()]
    return sorted(worst, key=lambda pair: _severity(pair[0]))


def _severity(found: Finding) -> tuple[int, bool, float]:
    return VERDICTS.index(found.verdict), found.gradient_finite is not False, -(found.amplification or 0.0)


def _headline(groups: list[tuple[Finding, int]]) -> str:
    if not groups:
        return "No decomposition was seen."
    calls = sum(count for _, count in groups)
    bad = sum(found.verdict != "healthy" for found, _ in groups)
    places = f"{calls} decomposition{'s' * (calls > 1)} in {len(groups)} place{'s' * (len(groups) > 1)} of the code"
    return f"{places}, {f'{bad} with a problem' if bad else 'all healthy'}."


def _numbers(found: Finding) -> str:
    sides = min(found.shape[-2:])
    is_singular = found.function.endswith(_SINGULAR)
    values, vectors = ("singular values", "singular vectors") if is_singular else ("eigenvalues", "eigenvectors")
    parts = []
    if found.rank is not None and not found.function.startswith("torch.linalg.chol"):
        parts.append(f"rank {found.rank} of {sides}")
    if found.cond is not None:
        parts.append(f"condition number {found.cond:.2g}")
    if found.gap is not None and "cholesky" not in found.function:
        parts.append(f"smallest relative gap between {values} {found.gap:.2g}")
    if found.gradient_finite is not None:
        parts.append("gradient finite" if found.gradient_finite else "gradient NaN or infinite")
    if found.amplification is not None and found.gradient_finite and found.amplification > 10:
        parts.append(f"amplified {found.amplification:.1e} times")
    if found.consistent is not None and found.verdict != "healthy":
        parts.append("loss well posed" if found.consistent else f"loss depends on the choice of {vectors}")
    return ", ".join(parts)


def _matrices(found: Finding, count: int) -> str:
    size = "x".join(map(str, found.shape[-2:]))
    text = f"{size} {found.dtype} on {found.device}"
    if found.num_matrices > 1:
        text += f", {found.num_affected} of {found.num_matrices} matrices"
    return text + (f", worst of {count} calls" if count > 1 else "")


def as_text(findings: Sequence[Finding], notes: Sequence[str]) -> str:
    """Return the findings for a terminal, one paragraph for each place, worst first."""
    groups = grouped(findings)
    lines = [_headline(groups)]
    for found, count in groups:
        where = f" in module {found.module}" if found.module else ""
        lines += ["", f"{found.verdict.upper()}: {found.function}{where} ({found.source or 'unknown line'})"]
        body = [": ".join(filter(None, (_matrices(found, count), _numbers(found)))), found.reason]
        if found.advice:
            body += found.advice.split("\n")
        for line in body:
            is_code = line.startswith("    ")
            lines += (
                [f"  {line}"] if is_code else textwrap.wrap(line, _WIDTH, initial_indent="  ", subsequent_indent="  ")
            )
    for note in notes:
        lines += ["", *textwrap.wrap(f"Note: {note}", _WIDTH)]
    return "\n".join(lines)


def as_html(findings: Sequence[Finding], notes: Sequence[str]) -> str:
    """Return the findings as a table for a notebook."""
    groups = grouped(findings)
    rows = ["".join(f"<th style='{_CELL}'>{name}</th>" for name in ("verdict", "call", "matrices", "what to do"))]
    for found, count in groups:
        verdict = f"<b style='color:{'inherit' if found.verdict == 'healthy' else '#b3261e'}'>{found.verdict}</b>"
        call = "<br>".join(html.escape(part) for part in (found.function, found.module, found.source) if part)
        numbers = f"{html.escape(_matrices(found, count))}<br>{html.escape(_numbers(found))}"
        advice = f"{html.escape(found.reason)}<pre style='white-space:pre-wrap'>{html.escape(found.advice)}</pre>"
        rows.append("".join(f"<td style='{_CELL}'>{cell}</td>" for cell in (verdict, call, numbers, advice)))
    table = "".join(f"<tr>{row}</tr>" for row in rows)
    remarks = "".join(f"<p>Note: {html.escape(note)}</p>" for note in notes)
    return f"<p>{html.escape(_headline(groups))}</p><table>{table}</table>{remarks}"
