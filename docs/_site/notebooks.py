"""Notebooks: jupytext sources in ``docs/notebooks`` are run when the site is built, and shown with their outputs.

In a page, on a line of its own: ``{{ notebook colour }}``. A cell shows what it printed, its figures, and the value of
its last line. The same source is offered as an ``.ipynb`` file. Results are kept in ``build/notebooks`` until a source
or the library changes.
"""

import ast
import base64
import contextlib
import hashlib
import html
import io
import json
import re
import warnings
from pathlib import Path
from typing import Any

import jupytext
import matplotlib

__all__ = ["SOURCES", "as_markdown", "outputs"]

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "notebooks"
SOURCES = sorted(FOLDER.glob("*.py"))

_DIRECTIVE = re.compile(r"^\{\{ notebook (\w+) \}\}$", re.MULTILINE)
_COMPANION = '<p><a href="{name}.ipynb" download>Download this page as a notebook</a></p>'


def outputs(code: str, namespace: dict[str, Any], name: str = "cell") -> list[tuple[str, str]]:
    r"""Run a cell, and return what it shows: kinds (``text``, ``html``, ``picture``) and contents.

    Example:
        >>> outputs("print(1)\n1 + 1", {})
        [('text', '1\n'), ('text', '2')]
    """
    import matplotlib.pyplot as plt

    tree, printed, shown, others = ast.parse(code), io.StringIO(), [], plt.get_fignums()
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, name, "exec"), namespace)
        value = None if last is None else eval(compile(ast.Expression(last.value), name, "eval"), namespace)
    if printed.getvalue():
        shown.append(("text", printed.getvalue()))
    for number in sorted(set(plt.get_fignums()) - set(others)):
        picture = io.BytesIO()
        plt.figure(number).savefig(picture, format="webp", dpi=110)
        plt.close(number)
        shown.append(("picture", base64.b64encode(picture.getvalue()).decode()))
    if hasattr(value, "_repr_html_"):
        shown.append(("html", value._repr_html_()))
    elif value is not None:
        shown.append(("text", repr(value)))
    return shown


def as_markdown(source: Path) -> str:
    """Run a notebook, and return it as Markdown with its outputs."""
    matplotlib.use("Agg")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    parts = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number, cell in enumerate(jupytext.read(source).cells, 1):
            if cell.cell_type == "markdown":
                parts.append(cell.source)
                continue
            parts.append(f"```python\n{cell.source}\n```")
            parts += [_shown(*output) for output in outputs(cell.source, namespace, f"{source.name}, cell {number}")]
    return "\n\n".join(parts)


def _shown(kind: str, content: str) -> str:
    if kind == "picture":
        return f'<img class="output" alt="What the cell above draws" src="data:image/webp;base64,{content}">'
    if kind == "html":
        return f'<div class="output">{content}</div>'
    return f'<pre class="output">{html.escape(content)}</pre>'


def _library() -> str:
    digest = hashlib.sha256()
    for file in sorted([*(ROOT / "src").rglob("*.py"), Path(__file__)]):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _kept(name: str) -> str:
    """Return a notebook as Markdown, from the last time it was run if nothing has changed since."""
    source = FOLDER / f"{name}.py"
    key = hashlib.sha256((_library() + source.read_text()).encode()).hexdigest()
    file = ROOT / "build" / "notebooks" / f"{name}.json"
    with contextlib.suppress(OSError, ValueError, KeyError):
        kept = json.loads(file.read_text())
        if kept["key"] == key:
            return str(kept["markdown"])
    markdown = as_markdown(source)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"key": key, "markdown": markdown}))
    return markdown


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the directives of a page by the notebooks."""
    return _DIRECTIVE.sub(lambda found: f"{_COMPANION.format(name=found[1])}\n\n{_kept(found[1])}", markdown)


def on_post_build(config: Any, **_: Any) -> None:
    """Put the notebooks beside their pages."""
    for source in SOURCES:
        jupytext.write(jupytext.read(source), Path(config["site_dir"]) / "notebooks" / f"{source.stem}.ipynb")


def _main() -> None:
    """Write the pictures of README.md, which are figures of the notebooks."""
    for name, number in {"nan": 0, "colour": 0}.items():
        found = re.findall(r'base64,([^"]+)"', as_markdown(FOLDER / f"{name}.py"))
        (ROOT / "docs" / "front" / f"{name}.webp").write_bytes(base64.b64decode(found[number]))


if __name__ == "__main__":
    _main()
