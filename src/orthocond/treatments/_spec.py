"""Specifications: which parts a treatment has, and with which options."""

from collections.abc import Iterable, Mapping
from typing import Any

from orthocond._core.options import parsed_choice, parsed_value, spelled, split_outside
from orthocond.errors import ArgumentError, check_choice
from orthocond.treatments._part import Part, unknown_option
from orthocond.treatments._registry import TREATMENTS

__all__ = ["Specification", "canonical", "canonical_order", "check_flat_options", "parse"]

Specification = str | Part | Iterable[str | Part]
"""A specification as text, one part, or a list that mixes names, specifications and parts."""


def parse(spec: Specification, defaults: str = "none") -> tuple[Part, ...]:
    """Return the parts of a specification, in the order in which it is spelled.

    Args:
        spec: names of `TREATMENTS` joined by ``+``, in any order, each with its options in parentheses; ``none`` or the
            empty string for no part; or a list of such texts and of `Part` instances.
        defaults: a specification whose options are the defaults, for parts that the text names without them.

    Raises:
        ArgumentError: an unknown name or option, a value of the wrong kind, or parts that can't be combined.

    Example:
        >>> parse("olr(rule=exact, steps=2000) + nog")
        (nog, olr(rule=exact, steps=2000))
        >>> parse("nog+ow", defaults="ow(kind=operator)")
        (nog, ow(kind=operator))
    """
    parts = _parts(spec, defaults)
    names = {part.name for part in parts}
    for part in parts:
        for other, reason in part.excludes.items():
            if other in names:
                raise ArgumentError(f"treat can't combine {part.name} with {other}: {reason}")
    return parts


def canonical(spec: Specification, defaults: str = "none") -> str:
    """Return the one spelling of a specification: parts in the registry's order, options that differ from defaults.

    Args:
        spec: as `parse` takes it.
        defaults: a specification whose options are the defaults.

    Example:
        >>> canonical("OW(normalize = True, kind=operator)+nog"), canonical([])
        ('nog+ow(kind=operator)', 'none')
        >>> canonical("ow(kind=kernel)+nog", defaults="ow(kind=operator)")
        'nog+ow(kind=kernel)'
    """
    others = {part.name: part.options for part in _parts(defaults)}
    texts = (part.spelled(others.get(part.name, type(part).options)) for part in _parts(spec, defaults))
    return "+".join(texts) or "none"


def canonical_order(name: str) -> tuple[int, str]:
    """Return the key that sorts names of parts: the registry's order, then a user's own by name.

    Example:
        >>> sorted(["olr", "mine", "ow", "nog"], key=canonical_order)
        ['nog', 'ow', 'olr', 'mine']
    """
    names = list(TREATMENTS)
    return (names.index(name) if name in names else len(names), name)


def check_flat_options(parts: tuple[Part, ...], options: Mapping[str, Any]) -> None:
    """Raise for options beside a specification; the message says how they are spelled in it."""
    names = {part.name for part in parts}
    every = {option: name for name, part in TREATMENTS.items() for option in part.options}
    for option in options:
        check_choice(option, every, "option", "treat")
    owners = {option: [part.name for part in parts if option in part.options] or [every[option]] for option in options}
    asked = dict.fromkeys([*(part.name for part in parts), *(name for found in owners.values() for name in found)])
    spelling = []
    for name in sorted(asked, key=canonical_order):
        items = [f"{option}={spelled(options[option])}" for option, found in owners.items() if name in found]
        spelling.append(f"{name}({', '.join(items)})" if items else name)
    missing = [name for name in asked if name not in names]
    note = f" ({' and '.join(missing)} is not in the specification)" if missing else ""
    raise ArgumentError(
        f"treat takes options in the specification, not as arguments; write treat(model, layer, "
        f'"{"+".join(spelling)}"){note}.'
    )


def _parts(spec: Specification, defaults: str = "none") -> tuple[Part, ...]:
    """Return the parts of a specification, whether or not they can be combined."""
    others = {part.name: part.options for part in _parts(defaults)} if defaults != "none" else {}
    pieces = [spec] if isinstance(spec, str | Part) else _listed(spec)
    parts: dict[str, Part] = {}
    for piece in pieces:
        for part in [piece] if isinstance(piece, Part) else _from_text(piece, others):
            other = parts.get(part.name, part)
            is_same = type(other) is type(part) and repr(other) == repr(part) and not isinstance(piece, Part)
            if other is not part and not is_same:
                raise ArgumentError(
                    f"treat got {part.name} twice, as {parts[part.name]!r} and as {part!r}; give it once, with all of "
                    "its options."
                )
            parts.setdefault(part.name, part)
    return tuple(sorted(parts.values(), key=lambda part: canonical_order(part.name)))


def _listed(spec: Any) -> list[str | Part]:
    pieces = list(spec) if isinstance(spec, Iterable) else [spec]
    for piece in pieces:
        if not isinstance(piece, str | Part):
            what = f"the class {piece.__name__}" if isinstance(piece, type) else repr(piece)
            raise ArgumentError(
                f'treat expected names and instances of Part, got {what}; pass e.g. "nog+ow" or ["ow", MyPart()].'
            )
    return pieces


def _from_text(text: str, defaults: Mapping[str, Mapping[str, Any]]) -> list[Part]:
    try:
        pieces = [piece for piece in split_outside(text, "+") if piece]
        choices = [parsed_choice(piece) for piece in pieces]
    except ValueError as error:
        raise ArgumentError(
            f"treat got the specification {text!r} {error}; write e.g. 'nog(solver=svd)+ow(kind=operator)'."
        ) from None
    if [name.lower() for name, _ in choices] == ["none"]:
        return []
    return [_made(name.lower(), texts, defaults.get(name.lower(), {})) for name, texts in choices]


def _made(name: str, texts: dict[str, str], defaults: Mapping[str, Any]) -> Part:
    check_choice(name, TREATMENTS, "treatment", "treat")
    part, options = TREATMENTS[name], dict(defaults)
    for option, text in texts.items():
        if option not in part._kinds:
            raise unknown_option(part, option)
        try:
            options[option] = parsed_value(text, part._kinds[option])
        except (ValueError, OverflowError):
            raise ArgumentError(
                f"treat got {name}({option}={text}); {option} takes {part._kinds[option]}, e.g. "
                f"{name}({option}={spelled(part.options[option])})."
            ) from None
    return part(**options)
