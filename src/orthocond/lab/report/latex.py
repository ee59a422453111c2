"""The report's tables as LaTeX, with booktabs and the paper's four colours."""

from orthocond.lab.report.content import Report
from orthocond.lab.report.statistics import TEST
from orthocond.lab.report.tables import Cell, Table, error_table, time_table

__all__ = ["latex"]

_COLOURS = {1: "red", 2: "blue", 3: "green", 4: "cyan"}
_SPECIAL = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "_": r"\_",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "±": r"$\pm$",
    "∞": r"$\infty$",
    "\N{EN DASH}": "--",
    "[": "{[}",
    "]": "{]}",
}


def latex(report: Report) -> str:
    r"""Return the tables as LaTeX to ``\input`` into a document; names are escaped."""
    lines = [r"% needs \usepackage[T1]{fontenc}, \usepackage{booktabs}, \usepackage{xcolor}, \usepackage{graphicx}"]
    for number, section in enumerate(report.sections, start=1):
        title = section.experiment.title
        for table in (error_table(section.experiment, section.rows, report.marks), time_table(section.rows)):
            remark = f" {TEST}" if table.key == "errors" else ""
            lines += _table(table, f"{title}. {table.caption}{remark}", f"tab:{table.key}-{number}")
    return "\n".join(lines) + "\n"


def _table(table: Table, caption: str, label: str) -> list[str]:
    return [
        r"\begin{table}[ht]",
        r"\centering",
        rf"\caption{{{_escaped(caption)}}}",
        rf"\label{{{label}}}",
        r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
        rf"\begin{{tabular}}{{l{'r' * (len(table.header) - 1)}}}",
        r"\toprule",
        _line([Cell(name) for name in table.header]),
        r"\midrule",
        *[_line(row) for row in table.rows],
        r"\bottomrule",
        r"\end{tabular}}",
        r"\end{table}",
        "",
    ]


def _line(cells: list[Cell]) -> str:
    return " & ".join(_cell(cell) for cell in cells) + r" \\"


def _cell(cell: Cell) -> str:
    text = _escaped(cell.text)
    if cell.place:
        return rf"\textbf{{\textcolor{{{_COLOURS[cell.place]}}}{{{text}}}}}"
    return rf"\textbf{{{text}}}" if cell.is_best else text


def _escaped(value: str) -> str:
    """Return text escaped for LaTeX; a character that its fonts may lack is written as its number."""
    return "".join(_SPECIAL.get(character, _known(character)) for character in " ".join(value.split()))


def _known(character: str) -> str:
    return character if " " <= character <= "~" else f"U+{ord(character):04X}"
