"""The task of a table, guessed from its labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from raglane._utils.messages import argument, quote
from raglane.data.columns import Columns
from raglane.data.roles.decide import decide
from raglane.data.roles.facts import Facts
from raglane.data.roles.labels import one_label
from raglane.data.roles.roles import Roles, Shape
from raglane.data.roles.rules import Refusal, parts_of
from raglane.data.typed.arrays import Integers
from raglane.data.typed.arrow import is_list
from raglane.tasks import TASKS

# The share of sequences whose labels do not fit a task, above which it is another one, rather than
# a task with mistakes in its data.
_MOST_UNFIT = 0.2


class Guess(NamedTuple):
    """A task, and the roles of the columns for it."""

    task: str
    roles: Roles


def guess_task(facts: Facts, columns: Columns, tasks: Sequence[str]) -> Guess | Refusal:
    """Return the first task that the labels of a table allow, or why none does.

    Example:
        >>> from raglane.data.typed.column import written
        >>> facts = Facts({"id": written(["a", "a", "b"]), "x": written(["1", "2", "3"]),
        ...     "y": written(["0.5", "0.5", "2"])})
        >>> guess_task(facts, Columns(label="y"), ["classify", "regress"]).task
        'regress'
    """

    def decided(task: str) -> Roles | Refusal:
        asked = replace(columns, task=task)
        roles = decide(facts, asked)
        return roles if isinstance(roles, Refusal) else unfit(facts, asked, roles) or roles

    return first_task(decided, tasks)


def first_task(decide: Callable[[str], Roles | Refusal], tasks: Sequence[str]) -> Guess | Refusal:
    """Return the first task that is decided, or the most helpful refusal."""
    refusals: list[Refusal] = []
    # Candidates for the label of earlier tasks, of which none is the only one.
    taken: set[str | None] = set()
    for task in tasks:
        roles = decide(task)
        if isinstance(roles, Refusal):
            refusals.append(roles)
            taken.update(roles.candidates)
        elif not taken or (roles.label is not None and not taken & {roles.label, roles.sequence}):
            return Guess(task, roles)
    # The refusal of a column with the type that a task needs, or of several, is more helpful than
    # one of other types.
    helpful = [refusal for refusal in refusals if not refusal.is_unfit or refusal.candidates]
    return (helpful or refusals)[0]


def unfit(facts: Facts, columns: Columns, roles: Roles) -> Refusal | None:
    """Refuse a guessed task if the entries of the label are those of another one."""
    if roles.label is None:
        return None
    if roles.shape is Shape.LISTS:
        return _unequal(facts, columns, roles, roles.label)
    if TASKS[columns.task].label == "numbers":
        return _no_numbers(facts, roles.label)
    if columns.task != "classify" or roles.label not in facts.columns:
        return None
    if facts.are_fractions(roles.label):
        fix = f"pass {argument('task', 'regress')} for numbers to predict, or {argument('task', 'classify')}"
        return Refusal("numbers with a fraction", "classes", fix)
    if roles.shape is not Shape.ELEMENTS:
        return None
    changing = facts.changes(roles.label, *roles.id)
    count = len(np.unique(facts.numbered(*roles.id)[changing]))
    if count <= _MOST_UNFIT * facts.different(*roles.id):
        return None
    return one_label(facts, roles.label, roles.id)


def _no_numbers(facts: Facts, label: str) -> Refusal | None:
    """Refuse words as numbers to predict."""
    for name in parts_of(label, facts):
        if facts.share_of_words(name) > _MOST_UNFIT:
            rule = "a file with numbers as labels"
            return Refusal(f"words in column {quote(name)}", rule, "correct it", is_unfit=True)
    return None


def _unequal(facts: Facts, columns: Columns, roles: Roles, label: str) -> Refusal | None:
    """Refuse lists of labels that are not as long as the sequences."""
    if not is_list(facts.kinds[label]):
        return None
    lengths = facts.lengths(label)
    elements = facts.lengths(str(roles.sequence), columns.split)
    if lengths is None or elements is None:
        return None
    if TASKS[columns.task].label == "numbers" and not facts.are_equally_wide(label):
        got = f"lists of several lengths in column {quote(label)}"
        rule = "data with the same number of numbers per element"
        return Refusal(got, rule, "correct the rows", is_unfit=True)
    row = unequal_row(columns.task, lengths, elements)
    if row is None:
        return None
    got = f"{lengths[row]} labels for {elements[row]} elements in row {row}, column {quote(label)}"
    fix = (
        f"correct the row, or remove it; for sets of labels, pass {argument('task', 'multilabel')}"
    )
    return Refusal(got, "data with equally many labels and elements", fix)


def unequal_row(task: str, lengths: Integers, elements: Integers) -> int | None:
    """Return the first row whose list of labels is not as long as its sequence, if there are too
    many for mistakes; None for tasks whose labels may be of any number.
    """
    facts = TASKS[task]
    per_element = (facts.label, facts.per) == ("class", "element")
    if not (per_element or facts.label == "numbers") or len(lengths) != len(elements):
        return None
    differs = lengths != elements
    # Lists of numbers of several lengths are sets, of whatever share.
    most = _MOST_UNFIT * len(lengths) if per_element else 0
    is_same = not per_element and len(set(lengths.tolist())) == 1
    if differs.sum() <= most or is_same:
        return None
    return int(differs.argmax())
