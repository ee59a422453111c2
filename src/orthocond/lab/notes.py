"""What treatments note of a step: the numbers that runs write down and reports show, from the parts' declarations."""

from collections.abc import Mapping
from typing import Any

from orthocond import treatments
from orthocond.treatments import LastStep, Note

__all__ = ["declared", "flags", "noted", "rate_notes"]


def declared() -> dict[str, Note]:
    """Return the notes of all registered parts, by name, without those that are too costly for every step.

    Example:
        >>> declared()["switched"].description
        'eta* was used as the learning rate'
    """
    notes = (note for part in treatments.TREATMENTS.values() for note in part.notes)
    return {note.name: note for note in notes if _is_recorded(note)}


def flags() -> tuple[str, ...]:
    """Return the names of those that are true or false.

    Example:
        >>> flags()
        ('switched', 'gauged')
    """
    return tuple(name for name, note in declared().items() if note.kind == "flag")


def rate_notes() -> frozenset[str]:
    """Return the names of what parts note that act on the learning rate."""
    parts = (part for part in treatments.TREATMENTS.values() if part.acts_on == "learning rate")
    return frozenset(note.name for part in parts for note in part.notes)


def noted(notes: Mapping[str, Note], last: LastStep | None) -> dict[str, Any]:
    """Return what a step's record says of a treatment with these notes; None where it took no step."""
    own = (name for name, note in notes.items() if _is_recorded(note) and name != "learning_rate")
    return {name: None if last is None else last[name] for name in own}


def _is_recorded(note: Note) -> bool:
    return not note.is_costly and note.kind in ("number", "flag")
