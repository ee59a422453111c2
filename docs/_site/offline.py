"""A page that would fetch something from elsewhere when it is read is a warning, and so an error in a strict build."""

import logging
import re
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
