"""Tables of what can be chosen by name, and of the command line, made from the registries themselves.

In a page, on a line of its own: ``{{ registry orthocond.linalg.SOLVERS }}``, ``{{ command train }}``,
``{{ presets }}``, ``{{ methods }}``, ``{{ settings }}``, ``{{ items }}``; ``{{ readme install }}`` for a section of
README.md.
"""

import dataclasses
import importlib
import re
from pathlib import Path
from typing import Any

import typer.main

from orthocond._core.options import spelled
from orthocond.lab.cli import app
from orthocond.lab.conditions import CONDITIONS
from orthocond.lab.config import Config
from orthocond.lab.methods import ALL, PAPER, method
from orthocond.lab.paper import EXPERIMENTS, ITEMS
from orthocond.lab.presets import PRESETS

__all__ = ["command", "items", "methods", "on_page_markdown", "presets", "readme", "registry", "settings"]

_DIRECTIVE = re.compile(r"^\{\{ (?P<what>\w+)(?: (?P<name>[\w.-]+))? \}\}$", re.MULTILINE)


def table(columns: list[str], rows: list[list[str]]) -> str:
    r"""Return a Markdown table.

    Example:
        >>> print(table(["a", "b"], [["1", "x|y"]]))
        | a | b |
        | --- | --- |
        | 1 | x\|y |
    """
    lines = [columns, ["---"] * len(columns), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def registry(path: str) -> str:
    """Return a table of a registry: name with options, description, reference."""
    module, _, name = path.rpartition(".")
    rows = []
    for entry in getattr(importlib.import_module(module), name).values():
        options = ", ".join(f"{option}={spelled(default)}" for option, default in entry.options.items())
        shown = f"{entry.name}({options})" if options else entry.name
        rows.append([f"`{shown}`", _plain(entry.description), _plain(entry.reference)])
    return table(["name, with its options' defaults", "what it is", "reference"], rows)


def presets() -> str:
    """Return a table of the presets."""
    rows = [
        [
            f"`{name}`",
            _plain(entry.description),
            entry.config.model,
            str(entry.config.epochs),
            str(entry.config.batch_size),
        ]
        for name, entry in PRESETS.items()
    ]
    return table(["preset", "what it is", "model", "epochs", "batch"], rows)


def methods() -> str:
    """Return a table of the methods that sweeps know as ``paper`` and ``all``."""
    rows = [[f"`{name}`", method(name).description, "paper, all" if name in PAPER else "all"] for name in ALL]
    return table(["method", "what it does", "in"], rows)


def items() -> str:
    """Return a table of the paper's tables and figures."""
    rows = []
    for item in ITEMS.values():
        presets = dict.fromkeys(EXPERIMENTS[experiment]["full"].preset for experiment in item.quotes)
        about = " and ".join(dict.fromkeys(CONDITIONS[measure][0] for measure in item.measure.values()))
        number = sum(len(item.methods(experiment)) for experiment in item.quotes)
        cells = [
            f"`orthocond paper {item.name}`",
            f"{item.title}. {item.caption}",
            ", ".join(f"`{p}`" for p in presets),
        ]
        rows.append([*cells, str(number), {"conditions": f"condition number {about}"}.get(item.kind, item.kind)])
    return table(["command", "what it shows", "at full scale", "methods", "compares"], rows)


def settings() -> str:
    """Return a table of the settings of a run."""
    rows = [
        [f"`{field.name}`", _plain(field.metadata["help"]), f"`{field.default}`"]
        for field in dataclasses.fields(Config)
        if field.metadata
    ]
    return table(["setting", "what it is", "default"], rows)


def command(name: str) -> str:
    """Return what a command does, its example, and a table of its arguments and options."""
    commands: Any = typer.main.get_command(app)
    found = commands.commands[name]
    rows = []
    for parameter in found.params:
        if parameter.param_type_name == "option":
            shown = ", ".join(f"`{flag}`" for flag in parameter.opts)
            default = "" if parameter.default in (None, False) else f"`{parameter.default}`"
        else:
            shown, default = f"`{parameter.metavar or str(parameter.name).upper()}`", ""
        rows.append([shown, _plain(parameter.help or ""), default])
    text = f"{found.help}\n\n{table(['argument or option', 'what it is', 'default'], rows) if rows else ''}"
    example = (found.epilog or "").removeprefix("Example: ")
    return f"{text}\n\nExample: `{example}`\n" if example else text


def readme(section: str) -> str:
    """Return a marked section of README.md, with links as they are from the site's first page."""
    text = (Path(__file__).parents[2] / "README.md").read_text()
    start, end = (f"<!-- --8<-- [{edge}:{section}] -->" for edge in ("start", "end"))
    return text.split(start)[1].split(end)[0].strip().replace("](docs/", "](")


def _plain(text: str) -> str:
    """Return text with what Markdown would take for markup escaped."""
    return re.sub(r"([\\*_])", r"\\\1", text).replace("<", "&lt;")


_TABLES = {
    "readme": readme,
    "registry": registry,
    "presets": presets,
    "settings": settings,
    "methods": methods,
    "command": command,
    "items": items,
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the directives of a page by their tables."""

    def made(found: re.Match[str]) -> str:
        return _TABLES[found["what"]](*([found["name"]] if found["name"] else []))

    return _DIRECTIVE.sub(made, markdown)
