"""The label of rows that are elements: the rules for its column, and a rule for its entries."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from raglane._utils.messages import quote, quote_all
from raglane.data.columns import Columns, option
from raglane.data.roles.facts import Facts
from raglane.data.roles.rules import (
    Refusal,
    RoleColumns,
    RoleRule,
    absent,
    empty_label,
    first,
    only,
    parts_of,
)
from raglane.data.typed.arrays import Integers
from raglane.data.typed.names import (
    MISSING_WORDS,
    ROLE_NAMES,
)
from raglane.tasks import TASKS


def label_of(
    facts: Facts,
    columns: Columns,
    ids: tuple[str, ...] | None,
    others: Sequence[str | None],
) -> RoleColumns | Refusal:
    """Return the column of the labels of a task, () for a task without.

    ``ids`` is None if each row is a sequence, and () if all rows are one. ``others`` are the
    columns with another role.
    """
    if not columns.wants_labels:
        return RoleColumns(())
    free = [name for name in facts if name not in others]
    choice = first(label_rules(ids, free), facts, columns)
    return RoleColumns(()) if choice is None else choice


def label_rules(ids: tuple[str, ...] | None, free: Sequence[str]) -> tuple[RoleRule, ...]:
    """Return the rules for the label of rows with these id columns, among the free columns."""
    usual = [name for name in free if name.lower() in ROLE_NAMES["label"]]

    def named(facts: Facts, columns: Columns) -> RoleColumns | Refusal | None:
        if columns.label is None:
            return None
        several = TASKS[columns.task].label == "numbers"
        parts = parts_of(columns.label, facts) if several else (columns.label,)
        missing = next((name for name in parts if name not in facts.columns), None)
        if missing is not None:
            return absent("label", missing, facts)
        return RoleColumns((columns.label,), f"label column: {quote(columns.label)} (named)")

    def empty(facts: Facts, columns: Columns) -> Refusal | None:  # noqa: ARG001
        if usual and all(facts.are_empty(name, MISSING_WORDS) for name in usual):
            return empty_label(usual[0])
        return None

    def number(facts: Facts, columns: Columns) -> Refusal | None:
        if TASKS[columns.task].label != "numbers":
            return None
        got = f"no label column named among {quote_all(facts)}"
        rule = "a file with a named label column, because any column of numbers may be the label"
        fix = f"name it with {option('label')}; several, as in 'x,y', are learned together"
        return Refusal(got, rule, fix, is_unfit=True)

    def words(facts: Facts, columns: Columns) -> RoleColumns | Refusal | None:
        """Take the only column of words, which for a class per sequence are constant in each."""
        fitting = _fitting(facts, columns, ids, free)
        words = [name for name in fitting if facts.share_of_words(name) > 0]
        return only("label", words, _kind(columns), facts) if words else None

    def almost(facts: Facts, columns: Columns) -> Refusal | None:
        """Refuse columns of words that are nearly labels: one entry is another by mistake."""
        if columns.task != "classify" or ids is None:
            return None
        has_integers = bool(_integers(facts, _fitting(facts, columns, ids, free)))
        return _almost_constant(facts, usual if has_integers else free, ids)

    def integers(facts: Facts, columns: Columns) -> RoleColumns | Refusal:
        fitting = _fitting(facts, columns, ids, free)
        return only("label", _integers(facts, fitting), _kind(columns), facts)

    return (
        RoleRule("named", named),
        RoleRule("no label in a column with its name", empty),
        RoleRule("numbers to predict are named", number),
        RoleRule("the only column of words", words),
        RoleRule("words that nearly are one per sequence", almost),
        RoleRule("the only column of whole numbers", integers),
    )


def _kind(columns: Columns) -> str:
    kind = "column of words, or of integers"
    if columns.task == "classify":
        kind += ", the same in all rows of a sequence"
    return kind


def _fitting(
    facts: Facts, columns: Columns, ids: tuple[str, ...] | None, candidates: Sequence[str]
) -> list[str]:
    is_any = columns.task != "classify" or ids is None
    features = columns.features or ()
    return [
        name
        for name in candidates
        if name not in features and (is_any or facts.is_constant_in(name, *(ids or ())))
    ]


def _integers(facts: Facts, names: Sequence[str]) -> list[str]:
    return [name for name in names if facts.is_whole(name)]


def _almost_constant(facts: Facts, names: Sequence[str], ids: tuple[str, ...]) -> Refusal | None:
    """Refuse a column of words that has the name of a label, or is constant in most sequences."""
    count = facts.different(*ids) if ids else 1
    owners = facts.numbered(*ids)
    changing = {
        name: len(np.unique(owners[facts.changes(name, *ids)]))
        for name in names
        if facts.share_of_words(name) > 0
    }
    if not changing:
        return None
    name = min(changing, key=lambda name: changing[name])
    if 2 * changing[name] <= count or name.lower() in ROLE_NAMES["label"]:
        return one_label(facts, name, ids)
    return None


def one_label(
    facts: Facts, name: str, ids: tuple[str, ...], rows: Integers | None = None
) -> Refusal | None:
    """Refuse the first row whose label differs from that of its sequence; ``rows`` are the numbers
    of the rows in the file.
    """
    for part in parts_of(name, facts):
        differs = facts.changes(part, *ids)
        if not differs.any():
            continue
        column = facts.columns[part]
        row = int(differs.argmax())
        same = facts.numbered(*ids) == facts.numbered(*ids)[row]
        before = column.text(int(same.argmax()))
        id = "/".join(facts.columns[each].text(row) for each in ids) or "0"
        number = row if rows is None else rows[row]
        name = quote(int(id)) if id.isdigit() and len(id) < 19 else quote(id)
        place = f"data row {number} (id {name}), column {quote(part)}"
        got = f"the label {quote(column.text(row))} in {place}, after {quote(before)}"
        fix = f"correct it, or pass {option('task', 'tag')} for a label per row"
        return Refusal(got, "a file with one label in all rows of a sequence", fix)
    return None
