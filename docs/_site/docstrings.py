r"""What the docstrings say, as Markdown.

They are written for a reader in a terminal: formulas as ``.. math::`` and ``:math:``, names of the library in single
backticks. Here the formulas get dollars and the names links. A docstring that is put together when the module is
imported, which can't be read from the source, is taken from the module itself.
"""

import importlib
import inspect
import re
from functools import cache
from typing import Any

import griffe

__all__ = ["PUBLIC_MODULES", "Markdown", "public_names", "runtime_docstring"]

PUBLIC_MODULES = (
    "orthocond",
    "orthocond.linalg",
    "orthocond.nn",
    "orthocond.optim",
    "orthocond.treatments",
    "orthocond.monitor",
    "orthocond.diagnosis",
    "orthocond.errors",
    "orthocond.integrations.lightning",
    "orthocond.integrations.transformers",
)

_BLOCK = re.compile(r"^( *)\.\. math:: *(\S.*)$", re.MULTILINE)
_INLINE = re.compile(r":math:`([^`]+)`", re.DOTALL)
_EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)
_REFERENCE = re.compile(r"^Reference:\n((?: +\S.*\n?)+)", re.MULTILINE)
_NAME = re.compile(r"(?<![`\w\[])`([A-Za-z_][\w.]*)`(?![`\w])")


@cache
def public_names() -> dict[str, str]:
    """Return where each public name is documented, by the name alone and by its path."""
    found: dict[str, str] = {}
    for module in PUBLIC_MODULES:
        for name in importlib.import_module(module).__all__:
            path = f"{module}.{name}"
            if name == "__version__" or path in PUBLIC_MODULES:
                continue
            # `orthocond.treat` is the name to use, and `orthocond.treatments.treat` the same.
            found[path] = found.setdefault(name, path)
    return found


def as_markdown(text: str, own: str = "") -> str:
    r"""Return a docstring with formulas between dollars and names of the library as links.

    Example:
        >>> print(as_markdown(".. math:: Q = A^{1/2}"))
        <BLANKLINE>
        $$Q = A^{1/2}$$
        <BLANKLINE>
        >>> as_markdown(r"as :math:`U\Sigma` in `matrix_sqrth`")
        'as $U\\Sigma$ in [`matrix_sqrth`][orthocond.linalg.matrix_sqrth]'
    """

    def link(found: re.Match[str]) -> str:
        path = public_names().get(found[1])
        return found[0] if path is None or path == own else f"[`{found[1]}`][{path}]"

    text = _EXAMPLE.sub("Examples:", text)  # what Griffe knows it by
    text = _REFERENCE.sub(lambda found: f"*Reference:* {' '.join(found[1].split())}\n", text)
    text = _BLOCK.sub(r"\n\1$$\2$$\n", text)
    text = _INLINE.sub(lambda found: f"${' '.join(found[1].split())}$", text)
    return "\n".join(
        line if line.lstrip().startswith((">>>", "...")) else _NAME.sub(link, line) for line in text.split("\n")
    )


def runtime_docstring(path: str) -> str | None:
    """Return the docstring that an object has when it is imported, if it is a class that has one of its own."""
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        return None
    return inspect.cleandoc(found.__doc__) if isinstance(found, type) and found.__dict__.get("__doc__") else None


class Markdown(griffe.Extension):
    """Griffe's hook: every docstring goes through `as_markdown`."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of an object as it is loaded."""
        if obj.docstring is None and obj.is_class and (text := runtime_docstring(obj.path)):
            obj.docstring = griffe.Docstring(text, parent=obj)
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value, public_names().get(obj.name, ""))
