"""The types of columns that the labels of a task may have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raglane.data.typed.arrow import arrow_types, is_label, is_list, is_number, is_text
from raglane.tasks import TASKS


def _is_label_list(kind: Any) -> bool:
    return is_list(kind) and is_label(kind.value_type)


def is_numeric(kind: Any, depth: int = 2) -> bool:
    """Return True for numbers, lists of them, and lists of such lists."""
    return is_number(kind) or (
        depth > 0 and is_list(kind) and is_numeric(kind.value_type, depth - 1)
    )


def is_label_set(kind: Any) -> bool:
    """Return True for texts, lists of labels, and lists of such lists."""
    return (
        is_text(kind) or _is_label_list(kind) or (is_list(kind) and _is_label_list(kind.value_type))
    )


def is_label_sequence(kind: Any) -> bool:
    """Return True for texts and lists of labels."""
    return is_text(kind) or _is_label_list(kind)


def is_without_entries(kind: Any) -> bool:
    """Return True for the type of lists that are all empty, e.g. in a JSON file."""
    while is_list(kind):
        kind = kind.value_type
    return bool(arrow_types().is_null(kind))


def label_test(task: str) -> tuple[Callable[[Any], bool], str]:
    """Return the test of a type for the labels of a task, and its description."""
    if TASKS[task].label == "numbers":
        return is_numeric, "column of numbers, or of lists of them"
    if TASKS[task].label == "set":
        return is_label_set, "column of lists of labels, of lists of lists of them, or of texts"
    if TASKS[task].label == "sequence":
        return is_label_sequence, "column of texts, or of lists of strings, integers or booleans"
    if TASKS[task].per == "element":
        return _is_label_list, "column of lists of strings, integers or booleans, one per element"
    return is_label, "column of strings, integers or booleans"


def label_kinds(kind: Any, task: str) -> tuple[str, ...]:
    """Return the kinds of labels of a type, as :func:`~raglane.data.records.kinds_of` names
    them.
    """
    while is_list(kind):
        kind = kind.value_type
    if not is_label(kind) or TASKS[task].label == "numbers":
        return ()
    if is_text(kind):
        return ("texts",)
    return ("truth values",) if arrow_types().is_boolean(kind) else ("whole numbers",)


def fits(kind: Any, task: str) -> bool:
    """Return True if a named column may have the labels of a task.

    Numbers may be written in texts, such as the names of folders.
    """
    if label_test(task)[0](kind) or (TASKS[task].label == "numbers" and is_text(kind)):
        return True
    return TASKS[task].label in ("set", "sequence") and is_without_entries(kind)
