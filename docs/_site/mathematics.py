r"""Formulas become MathML when the site is built, so a browser needs neither a script nor a network to show them.

In a page a formula stands between dollars, ``$\sqrt{P}$``, and one on a line of its own between two, ``$$``.
"""

import html
import re
from typing import Any

from latex2mathml.converter import convert

_FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\(?P<open>[(\[])(?P<latex>.*?)\\[)\]]</(?P=tag)>', re.DOTALL
)
_SLASH, _CLOSE_SLASH = "<mo>&#x0002F;</mo>", '<mo lspace="0.1em" rspace="0.1em">&#x0002F;</mo>'


def mathml(latex: str, *, block: bool) -> str:
    r"""Return a formula as MathML.

    Example:
        >>> "<msqrt>" in mathml(r"\sqrt{P}", block=False)
        True
    """
    # A slash between numbers stands close, as in print.
    return str(convert(latex, display="block" if block else "inline")).replace(_SLASH, _CLOSE_SLASH)


def on_page_content(content: str, **_: Any) -> str:
    """Replace the formulas that Markdown has marked."""
    return _FORMULA.sub(
        lambda found: mathml(html.unescape(found["latex"]).strip(), block=found["open"] == "["), content
    )
