"""What is left to the planner: settings that are ``"auto"``, until the data is known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raglane.errors import ArgumentError, argument, message

PLANNED = ("batch_size", "batch_elements")
"""The settings that may be ``"auto"``."""

# Until it is planned: what goes with a limit by elements, goes with this one.
_ANY = 2**31 - 1


def left_to_plan(chosen: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Choices without what is to be planned, and which one of ``PLANNED`` that is; None of none."""
    names = [name for name in PLANNED if chosen.get(name) == "auto"]
    if not names:
        return dict(chosen), None
    if len(names) > 1:
        got, rule = f"'auto', with {argument('batch_size', 'auto')}", "one of them limits a batch"
        raise ArgumentError(message("batch_elements", got, rule, "leave one of them out"))
    rest = {name: value for name, value in chosen.items() if name != names[0]}
    return rest | ({"batch_elements": _ANY} if names == ["batch_elements"] else {}), names[0]
