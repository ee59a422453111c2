"""Choices by name: frozen registries whose entries describe themselves and carry what they do.

A choice is written as its name, with its options in parentheses where the defaults don't fit:
``"newton_schulz"`` or ``"newton_schulz(iterations=20)"``. One string goes through every layer, command
line and configuration file unchanged.
"""

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
    options: Mapping[str, int | float] = field(default_factory=lambda: MappingProxyType({}))


E = TypeVar("E", bound=Entry)


def frozen(*entries: E) -> Mapping[str, E]:
    """Return a read-only mapping from name to entry, in the order given."""
    return MappingProxyType({entry.name: entry for entry in entries})


def resolve(registry: Mapping[str, E], choice: str, argument: str, caller: str) -> tuple[E, dict[str, int | float]]:
    """Return the entry that ``choice`` names and its options, defaults filled in.

    Raises:
        ArgumentError: ``choice`` names no entry, or an option that the entry hasn't; the message lists those.
    """
    name, parenthesis, rest = choice.partition("(") if isinstance(choice, str) else (choice, "", "")
    check_choice(name, registry, argument, caller)
    entry = registry[name]
    options = dict(entry.options)
    if not parenthesis:
        return entry, options
    for item in rest.rstrip(")").split(","):
        key, _, text = (part.strip() for part in item.partition("="))
        known = ", ".join(f"{option}={default}" for option, default in entry.options.items()) or "none"
        if key not in entry.options:
            raise ArgumentError(f"{caller} got {argument}={choice!r}; the options of {name} are: {known}.")
        try:
            value = type(entry.options[key])(text)
        except ValueError:
            value = -1
        if value <= 0:
            raise ArgumentError(f"{caller} got {argument}={choice!r}; {key} takes a number > 0, e.g. {known}.")
        options[key] = value
    return entry, options
