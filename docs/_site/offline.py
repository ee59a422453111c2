"""The site is read without a network, also from disk.

A page that would fetch something from elsewhere is a warning, and so an error in a strict build. The search index is
written as a script too, because a browser doesn't let a page from disk request a file; ``docs/assets/search.js`` loads
it.
"""

import json
import logging
import re
from pathlib import Path
from typing import Any

_FETCHED = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(?:https?:)?//[^"'\s>]+|"""
    r"""<link\b(?=[^>]*\brel=["']?(?:stylesheet|preconnect|preload|icon))[^>]*\bhref=["']?(?:https?:)?//[^"'\s>]+"""
)


def fetched(page: str) -> list[str]:
    """Return what a page would fetch.

    Example:
        >>> fetched('<a href="https://a.org">a</a> <img src="b.png"> <script src="https://c.org/d.js">')
        ['<script src="https://c.org/d.js']
    """
    return _FETCHED.findall(page)


def on_post_page(output: str, page: Any, **_: Any) -> None:
    """Look at a page that is ready."""
    for found in fetched(output):
        logging.getLogger("mkdocs.plugins").warning("%s needs a network to be read: %s", page.file.src_path, found)


def on_post_build(config: Any, **_: Any) -> None:
    """Write the search index as a script."""
    folder = Path(config["site_dir"]) / "search"
    pages = json.loads((folder / "search_index.json").read_text(encoding="utf-8"))["docs"]
    (folder / "pages.js").write_text(f"window.searchPages = {json.dumps(pages)};\n", encoding="utf-8")
