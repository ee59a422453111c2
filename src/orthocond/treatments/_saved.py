"""States of treatments, as checkpoints hold them, those of version 0.1 included."""

from collections.abc import Mapping
from typing import Any

from orthocond.errors import ArgumentError
from orthocond.treatments._registry import TREATMENTS
from orthocond.treatments._spec import canonical_order

__all__ = ["check_state", "saved_parts", "spelled_state"]


def check_state(state: Any) -> None:
    """Raise `ArgumentError` for what no `Treatment.state_dict` returned."""
    is_own = isinstance(state, Mapping) and {"layer", "spec", "last"} <= state.keys()
    if not is_own or not isinstance(state.get("parts", state.get("options")), Mapping):
        is_other = isinstance(state, Mapping) and bool(state)
        what = f"one with the keys {', '.join(map(str, list(state)[:5]))}" if is_other else repr(state)[:60]
        raise ArgumentError(
            f"load_state_dict expected the state that state_dict() of one treatment returned, got {what}; pass the "
            "entry of the checkpoint in which it was saved."
        )


def saved_parts(state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return name -> ``{"options": ..., "state": ...}`` of a saved treatment."""
    if "parts" in state:
        return dict(state["parts"])
    # Version 0.1 had one set of options for all parts, and a state of gauge alone.
    parts: dict[str, dict[str, Any]] = {}
    for name in (name for name in str(state["spec"]).split("+") if name != "none"):
        options = {key: value for key, value in state["options"].items() if key in TREATMENTS[name].options}
        parts[name] = {"options": options, "state": None}
    if "gauge" in parts:
        parts["gauge"]["state"] = state.get("gauge")
        if "gauge" not in state:  # there was one metric before there was a choice
            parts["gauge"]["options"].setdefault("metric", "weight")
    return parts


def spelled_state(parts: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the specification that saved parts belong to, all options included, for a message."""
    spelled = []
    for name in sorted(parts, key=canonical_order):
        options = ", ".join(f"{key}={value!r}" for key, value in parts[name]["options"].items())
        spelled.append(f"{name}({options})")
    return "+".join(spelled) or "none"
