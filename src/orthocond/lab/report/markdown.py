"""The report as Markdown."""

import re

from orthocond.lab.report.content import Report
from orthocond.lab.report.statistics import TEST
from orthocond.lab.report.tables import Cell, Table, config_table, environment_table, error_table, time_table

__all__ = ["markdown"]

_PLACES = {1: "**{}** ¹", 2: "**{}** ²", 3: "**{}** ³", 4: "**{}** ⁴"}


def markdown(report: Report) -> str:
    """Return the report as Markdown; names are escaped."""
    lines = ["# Report", ""]
    for section in report.sections:
        lines += [f"## {_escaped(section.experiment.title)}", "", _escaped(" ".join(section.message)), ""]
        for table in (error_table(section.experiment, section.rows, report.marks), time_table(section.rows)):
            lines += [*_table(table), "", f"*{table.caption}*", ""]
        lines += [TEST, ""]
        lines += [f"- {_escaped(note)}" for note in section.experiment.notes]
        for table in (config_table(section.experiment), environment_table(section.experiment)):
            lines += ["", f"### {table.caption}", "", *_table(table)]
        lines.append("")
    if report.problems:
        lines += ["## Folders that can't be read", "", *[f"- {_escaped(problem)}" for problem in report.problems], ""]
    return "\n".join([*lines, f"Written {report.written}.", ""])


def _table(table: Table) -> list[str]:
    marks = ["---", *["---:" for _ in table.header[1:]]]
    rows = [table.header, marks, *[[_cell(cell) for cell in row] for row in table.rows]]
    return [f"| {' | '.join(row)} |" for row in rows]


def _cell(cell: Cell) -> str:
    text = _escaped(cell.text)
    if cell.place:
        return _PLACES[cell.place].format(text)
    return f"**{text}**" if cell.is_best else text


def _escaped(value: str) -> str:
    """Return text escaped for Markdown."""
    one_line = " ".join(value.split())
    return re.sub(r"([\\`*_{}\[\]<>#|~$!&])", r"\\\1", one_line)
