"""Writing a report once, or repeatedly while runs are in progress."""

import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from orthocond.errors import ArgumentError, check_choice
from orthocond.lab.report.content import Report, read_report
from orthocond.lab.report.data import as_csv, as_json
from orthocond.lab.report.figures import write_figures
from orthocond.lab.report.latex import latex
from orthocond.lab.report.markdown import markdown
from orthocond.lab.report.page import page
from orthocond.lab.report.tables import MARKS

__all__ = ["FORMATS", "watch_report", "write_report", "write_text"]

FORMATS: Mapping[str, tuple[str, Callable[[Report], str]]] = MappingProxyType(
    {
        "html": (".html", page),
        "md": (".md", markdown),
        "latex": (".tex", latex),
        "csv": (".csv", as_csv),
        "json": (".json", as_json),
    }
)
"""The formats by name: the suffix of the file, and the function that makes its text from a report."""


def write_report(
    folders: Iterable[Path | str],
    output: Path | str | None = None,
    *,
    format: str = "html",  # noqa: A002
    figures: Path | str | None = None,
    marks: str = "noise",
) -> Path:
    """Write a report on the runs in and below ``folders`` and return its path.

    Args:
        folders: folders of runs, or folders with runs below them.
        output: the file; ``None`` for ``report`` with the format's suffix in the working directory.
        format: one of `FORMATS`.
        figures: a folder for the charts as PNG and SVG; ``None`` for none.
        marks: which errors the tables mark, one of `orthocond.lab.report.tables.MARKS`.

    Raises:
        ArgumentError: an unknown format or kind of marks, a folder that doesn't exist, no run in any of them, or an
            output that can't be written.

    Example:
        >>> import tempfile
        >>> from orthocond.lab.config import changed
        >>> from orthocond.lab.presets import preset
        >>> from orthocond.lab.train import train
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = train(changed(preset("dbn-digits"), {"steps": 2, "val_images": 50}), f"{folder}/svd/seed-0")
        ...     page = write_report([folder], f"{folder}/report.html").read_text()
        >>> "<html" in page
        True
    """
    check_choice(format, FORMATS, "format", "report")
    check_choice(marks, MARKS, "marks", "report")
    suffix, text_of = FORMATS[format]
    report = read_report(folders, marks)
    path = Path(output or f"report{suffix}")
    write_text(path, text_of(report))
    if figures is not None:
        try:
            write_figures(report, Path(figures))
        except OSError as error:
            raise ArgumentError(f"report can't write figures to {str(figures)!r} ({error.strerror}).") from error
    return path


def watch_report(
    folders: Iterable[Path | str],
    output: Path | str | None = None,
    *,
    every: float = 30.0,
    marks: str = "noise",
    on_written: Callable[[Path], None] | None = None,
) -> Path:
    """Rewrite the HTML report whenever a run has changed, until interrupted; then once more, and return its path.

    The page reloads itself while it is watched, and stops after that. Runs that didn't change aren't read again.

    Args:
        folders: as for `write_report`.
        output: as for `write_report`.
        every: seconds between two checks.
        marks: as for `write_report`.
        on_written: called with the path each time.
    """
    check_choice(marks, MARKS, "marks", "report")
    watched = [Path(folder) for folder in folders]
    path = Path(output or "report.html")
    seen: object = None
    try:
        while True:
            found = _stamps(watched)
            if found != seen:
                write_text(path, page(read_report(watched, marks), refresh=max(5, round(every))))
                seen = found
                if on_written is not None:
                    on_written(path)
            time.sleep(every)
    except KeyboardInterrupt:
        return write_report(watched, path, marks=marks)


def _stamps(folders: list[Path]) -> dict[Path, tuple[int, int]]:
    """Return size and time of every file that a report reads."""
    names = ("config.json", "environment.json", "status.json", "metrics.jsonl", "times.jsonl")
    stamps = {}
    for folder in folders:
        for name in names:
            for path in folder.rglob(name):
                try:
                    stat = path.stat()
                except FileNotFoundError:  # replaced at this moment
                    continue
                stamps[path] = (stat.st_size, stat.st_mtime_ns)
    return stamps


def write_text(path: Path, text: str) -> None:
    """Write a file atomically.

    Raises:
        ArgumentError: it can't be written.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_bytes(text.encode("utf-8", errors="replace"))  # a name may hold half of a surrogate pair
        os.replace(part, path)
    except OSError as error:
        with suppress(OSError):  # the folder may be missing
            part.unlink()
        raise ArgumentError(f"report can't write {str(path)!r} ({error.strerror}); choose another output.") from error
