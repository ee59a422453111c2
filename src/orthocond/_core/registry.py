"""Choices by name: frozen registries whose entries describe themselves and carry what they do.

A choice is written as its name, with its options in parentheses where the defaults don't fit:
``"newton_schulz"`` or ``"newton_schulz(iterations=20)"``. One string goes through every layer, command
line and configuration file unchanged.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeVar

from orthocond.errors import ArgumentError, check_choice

__all__ = ["Entry", "frozen", "resolve"]


@dataclass(frozen=True)
class Entry:
    """What every registered choice tells about itself."""

    name: str
    description: str
    reference: str
    options: Mapping[str, int | float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", MappingProxyType(dict(self.options)))


E = TypeVar("E", bound=Entry)


def frozen(*entries: E) -> Mapping[str, E]:
    """Return a read-only mapping from name to entry, in the order given."""
    return MappingProxyType({entry.name: entry for entry in entries})


def resolve(registry: Mapping[str, E], choice: str, argument: str, caller: str) -> tuple[E, dict[str, int | float]]:
    """Return the entry that ``choice`` names and its options, defaults filled in.

    Raises:
        ArgumentError: ``choice`` names no entry, or an option that the entry hasn't; the message lists those.
    """
    if isinstance(choice, str) and choice in registry:  # the usual case, and called for every root
        return registry[choice], dict(registry[choice].options)
    name, parenthesis, rest = choice.partition("(") if isinstance(choice, str) else (choice, "", "")
    name = name.strip() if parenthesis else name
    check_choice(name, registry, argument, caller)
    entry = registry[name]
    options = dict(entry.options)
    if not parenthesis:
        return entry, options
    known = ", ".join(f"{option}={default}" for option, default in options.items()) or "none"
    if not rest.endswith(")"):
        raise ArgumentError(
            f"{caller} got {argument}={choice!r} without a closing parenthesis; the options are: {known}."
        )
    for item in rest[:-1].split(","):
        key, _, text = (part.strip() for part in item.partition("="))
        if key not in options:
            raise ArgumentError(f"{caller} got {argument}={choice!r}; the options of {name} are: {known}.")
        kind = type(entry.options[key])
        try:
            options[key] = kind(text)
        except ValueError:
            options[key] = 0
        if not 0 < options[key] < math.inf:
            what = "a whole number" if kind is int else "a number"
            raise ArgumentError(f"{caller} got {argument}={choice!r}; {key} takes {what} > 0, e.g. {known}.")
    return entry, options
