"""States of treatments, as checkpoints hold them, those of version 0.1 included."""

from collections.abc import Mapping
from typing import Any

from orthocond.treatments._registry import TREATMENTS
from orthocond.treatments._spec import canonical_order

__all__ = ["saved_parts", "spelled_state"]


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
