"""Choices by name: frozen registries whose entries describe themselves and carry what they do.

How a choice is written as text is in `orthocond._core.options`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

from orthocond._core.options import Kind, parsed_choice, parsed_value, spelled
from orthocond.errors import ArgumentError, check_choice

__all__ = ["Entry", "Option", "frozen", "resolve"]

Option = int | float | bool | str


@dataclass(frozen=True)
class Entry:
    """What every registered choice tells about itself."""

    name: str
    description: str
    reference: str
    options: Mapping[str, Option] = field(default_factory=dict)
    signed_options: bool = False
    """Whether its options may be zero or negative."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", MappingProxyType(dict(self.options)))


E = TypeVar("E", bound=Entry)


def frozen(*entries: E) -> Mapping[str, E]:
    """Return a read-only mapping from name to entry, in the order given."""
    return MappingProxyType({entry.name: entry for entry in entries})


def resolve(registry: Mapping[str, E], choice: str, argument: str, caller: str) -> tuple[E, dict[str, Any]]:
    """Return the entry that ``choice`` names and its options, defaults filled in.

    Raises:
        ArgumentError: ``choice`` names no entry, or an option that the entry doesn't have; the message lists the valid
            ones.
    """
    if isinstance(choice, str) and choice in registry:  # the usual case, and called for every root
        return registry[choice], dict(registry[choice].options)
    name, problem = choice, ""
    texts: dict[str, str] = {}  # torch.compile reads this too
    if isinstance(choice, str):
        try:
            name, texts = parsed_choice(choice)
        except ValueError as error:
            name, problem = choice.partition("(")[0].strip(), str(error)
    check_choice(name, registry, argument, caller)
    entry = registry[name]
    options: dict[str, Any] = dict(entry.options)
    if problem:
        raise ArgumentError(f"{caller} got {argument}={choice!r} {problem}; the options are: {_known(entry)}.")
    for key, text in texts.items():
        if key not in options:
            raise ArgumentError(f"{caller} got {argument}={choice!r}; the options of {name} are: {_known(entry)}.")
        kind = Kind(type(entry.options[key]))
        is_number = kind.type in (int, float)
        try:
            options[key] = parsed_value(text, kind)
            if is_number and not (entry.signed_options or options[key] > 0):
                raise ValueError
            if is_number and not math.isfinite(options[key]):
                raise ValueError
        except (ValueError, OverflowError):
            what = f"{kind} > 0" if is_number and not entry.signed_options else str(kind)
            raise ArgumentError(
                f"{caller} got {argument}={choice!r}; {key} takes {what}, e.g. {_known(entry)}."
            ) from None
    return entry, options


def _known(entry: Entry) -> str:
    """Return the options of an entry as text, for messages alone: torch.compile can't trace it for every option."""
    return ", ".join(f"{option}={spelled(default)}" for option, default in entry.options.items()) or "none"
