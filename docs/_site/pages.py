"""The pages as Markdown: their blocks of code and their links, for the tests and for a look at the outside world.

``python docs/_site/pages.py`` asks every external address on the pages whether it answers; that needs a network.
"""

import re
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["ROOT", "Block", "blocks", "is_external", "links", "pages"]

ROOT = Path(__file__).resolve().parents[2]

_FENCE = re.compile(
    r"^(?P<indent> *)(?P<fence>`{3,}|~{3,}) *(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=indent)(?P=fence) *$",
    re.MULTILINE | re.DOTALL,
)
_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
_LINK = re.compile(r"\]\((?P<target>[^()\s]+(?:\([^()\s]*\)[^()\s]*)*)(?:\s+\"[^\"]*\")?\)")
_BARE = re.compile(r"<(https?://[^>\s]+)>")


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    text: str
    line: int
    """Of its first line in the page, from 1."""


def pages() -> list[Path]:
    """Return README, changelog, the page for contributors and all pages of the site."""
    return [
        *(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING")),
        *sorted((ROOT / "docs").rglob("*.md")),
    ]


def blocks(text: str) -> Iterator[Block]:
    r"""Yield the fenced blocks of a page.

    Example:
        >>> list(blocks("Look:\n\n```sh title=x\nls\n```\n"))
        [Block(language='sh', text='ls\n', line=4)]
    """
    for found in _FENCE.finditer(text):
        language = (found["info"].split() or [""])[0]
        body = "".join(line.removeprefix(found["indent"]) for line in found["text"].splitlines(keepends=True))
        yield Block(language, body, text.count("\n", 0, found.start("text")) + 1)


def links(text: str) -> Iterator[str]:
    """Yield the targets of links and images of a page, those in code left out.

    Example:
        >>> list(links("[a](b.md#c), ![d](e.png), `[f](g)`, <https://h.org>"))
        ['b.md#c', 'e.png', 'https://h.org']
    """
    text = _FENCE.sub("", text)
    in_code = [found.span() for found in _CODE.finditer(text)]
    for pattern in (_LINK, _BARE):
        for found in pattern.finditer(text):
            # A link may have code for a text; one that is code as a whole is none.
            if not any(start < found.start() and found.end() < end for start, end in in_code):
                yield found[1]


def is_external(target: str) -> bool:
    """Return whether a link leaves the project."""
    return "://" in target or target.startswith("mailto:")


def _problem(address: str) -> str | None:
    request = urllib.request.Request(address, headers={"User-Agent": "Mozilla/5.0 (orthocond's documentation)"})
    try:
        with urllib.request.urlopen(request, timeout=20):
            return None
    except (urllib.error.URLError, OSError, ValueError) as error:
        return str(error)


def _main() -> None:
    found: dict[str, Path] = {}
    for page in pages():
        for target in links(page.read_text()):
            if is_external(target):
                found.setdefault(target, page)
    problems = {target: problem for target in found if (problem := _problem(target)) is not None}
    for target, problem in problems.items():
        print(f"{found[target].relative_to(ROOT)}: {target}: {problem}", file=sys.stderr)
    print(f"{len(found)} addresses, {len(problems)} of them don't answer")
    sys.exit(bool(problems))


if __name__ == "__main__":
    _main()
