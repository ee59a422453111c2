"""The command ``orthocond report``, for the command line to register."""

from pathlib import Path
from typing import Annotated

import typer

from orthocond.errors import ArgumentError
from orthocond.lab.report.tables import MARKS
from orthocond.lab.report.write import FORMATS, watch_report, write_report

__all__ = ["report"]


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders that train or compare wrote.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Output file; report.html by default.", show_default=False)
    ] = None,
    format: Annotated[str, typer.Option("--format", help=f"One of {', '.join(FORMATS)}.")] = "html",  # noqa: A002
    figures: Annotated[
        Path | None, typer.Option("--figures", help="Folder for the charts as PNG and SVG.", show_default=False)
    ] = None,
    marks: Annotated[
        str, typer.Option("--marks", help="; ".join(f"{name}: mark {what}" for name, what in MARKS.items()) + ".")
    ] = "noise",
    watch: Annotated[
        bool, typer.Option("--watch", help="Rewrite the report while runs are in progress, until Ctrl-C.")
    ] = False,
    every: Annotated[float, typer.Option("--every", help="Seconds between updates with --watch.", min=0.1)] = 30.0,
) -> None:
    """Write a report on runs: tables, curves, and whether differences exceed the noise of the seeds."""
    if watch and (format != "html" or figures is not None):
        raise ArgumentError("report --watch writes the page alone; leave out --format and --figures.")
    if watch:
        path = watch_report(runs, output, every=every, marks=marks, on_written=lambda path: typer.echo(f"Wrote {path}"))
    else:
        path = write_report(runs, output, format=format, figures=figures, marks=marks)
    typer.echo(f"Wrote {path}")
    if figures is not None:
        typer.echo(f"Wrote figures to {figures}")
