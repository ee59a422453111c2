"""Choices as text: a name, with its options in parentheses where the defaults don't fit.

``"newton_schulz"``, ``"newton_schulz(iterations=20)"``, ``"ow(kind=operator, normalize=false)"``. An option's value may
be such a choice itself. One string goes through every layer, command line and configuration file unchanged.
"""

import types
import typing
from typing import Any

from orthocond.errors import ArgumentError

__all__ = ["Kind", "check_kind", "parsed_choice", "parsed_value", "spelled", "split_outside"]


class Kind(typing.NamedTuple):
    """What values an option takes."""

    type: type
    """``str``, ``bool``, ``int`` or ``float``."""
    is_optional: bool = False
    """Whether it may be None as well."""

    def __str__(self) -> str:
        name = {bool: "true or false", int: "a whole number", float: "a number"}.get(self.type, "text")
        return f"{name} or none" if self.is_optional else name

    @classmethod
    def of(cls, annotation: Any) -> "Kind | None":
        """Return the kind that a type annotation stands for; None where text can't give such a value.

        Example:
            >>> str(Kind.of(float | None)), Kind.of(list)
            ('a number or none', None)
        """
        arguments = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
        plain = [argument for argument in arguments if argument is not types.NoneType]
        if len(plain) == 1 and plain[0] in (str, bool, int, float):
            return cls(plain[0], len(plain) < len(arguments))
        return None


def split_outside(text: str, separator: str) -> list[str]:
    """Return the pieces of a text between separators that stand in no parentheses, without surrounding space.

    Raises:
        ValueError: the parentheses don't match.

    Example:
        >>> split_outside("ow + nog(solver=a(b=1, c=+2))", "+")
        ['ow', 'nog(solver=a(b=1, c=+2))']
    """
    pieces, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if depth < 0:
            break
        if character == separator and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += character
    if depth:
        raise ValueError("without a closing parenthesis" if depth > 0 else "with a closing parenthesis too many")
    return [piece.strip() for piece in pieces]


def parsed_choice(text: str) -> tuple[str, dict[str, str]]:
    """Return the name and the options of one choice, their values as text.

    Raises:
        ValueError: what is wrong with it, to follow "got ...".

    Example:
        >>> parsed_choice("newton_schulz( iterations = 20 )")
        ('newton_schulz', {'iterations': '20'})
    """
    split_outside(text, ",")  # for its check
    name, parenthesis, rest = text.strip().partition("(")
    if not parenthesis:
        return name, {}
    if not rest.endswith(")"):
        raise ValueError("with something behind the closing parenthesis")
    options: dict[str, str] = {}
    for item in split_outside(rest[:-1], ","):
        if item:
            key, equals, value = (part.strip() for part in item.partition("="))
            if not equals:
                raise ValueError(f"with {key!r} instead of an option and its value")
            options[key] = value
    return name.strip(), options


def parsed_value(text: str, kind: Kind) -> Any:
    """Return a value from text.

    Raises:
        ValueError: it isn't of that kind.

    Example:
        >>> parsed_value("False", Kind(bool)), parsed_value("none", Kind(float, True)), parsed_value("1e3", Kind(int))
        (False, None, 1000)
    """
    if kind.is_optional and text.lower() == "none":
        return None
    if kind.type is bool:
        try:
            return {"true": True, "false": False}[text.lower()]
        except KeyError:
            raise ValueError(text) from None
    if kind.type is int:
        number = float(text)
        if number != int(number):
            raise ValueError(text)
        return int(number)
    return kind.type(text)


def spelled(value: Any) -> str:
    """Return the text that a value is written as.

    Example:
        >>> spelled(True), spelled(None), spelled(0.5), spelled("svd")
        ('true', 'none', '0.5', 'svd')
    """
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def check_kind(value: Any, kind: Kind, name: str, caller: str) -> None:
    """Raise unless a value is of a kind; a whole number is a number."""
    if value is None and kind.is_optional:
        return
    accepted = (int, float) if kind.type is float else (kind.type,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind.type is not bool):
        raise ArgumentError(f"{caller} got {name}={value!r}; {name} takes {kind}.")
