"""Words in lines, as CoNLL has them: which column has the words, and which the labels.

A column is named by its name, in any case of letters, or by its number.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from raglane._utils.messages import argument, count_of
from raglane.data.columns import LISTS, Columns, option
from raglane.data.roles.rules import Refusal, RoleColumns
from raglane.data.typed.arrays import Integers
from raglane.data.typed.tags import are_entities


class Words(Protocol):
    """The words of sentences: their columns by name, and where the sentences begin."""

    @property
    def offsets(self) -> Integers:
        """Where each sentence begins, and the end of the last."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns."""

    @property
    def has_more(self) -> bool:
        """True if some sentences have further columns."""

    def column(self, name: str) -> list[str]:
        """Return the entries of a column."""


class NamedColumns(NamedTuple):
    """Columns with the names of a file, and notes about guesses."""

    columns: Columns
    notes: tuple[str, ...]


def named_words(words: Words, columns: Columns) -> NamedColumns | Refusal:
    """Return the columns of words and labels by their names."""
    if columns.task == "classify" and columns.wants_labels:
        fix = f"pass {argument('task', 'tag')} for a label per word"
        rule = "data with a label per sequence, for the task classify"
        return Refusal("words with their labels", rule, fix, is_unfit=True)
    named: dict[str, Any] = {
        role: tuple(resolved(name, words.names) or name for name in getattr(columns, role))
        for role in LISTS
        if getattr(columns, role) is not None
    }
    notes: list[str] = []
    label = resolved(columns.label, words.names)
    if label is None and columns.wants_labels:
        choice = _label_of(words)
        if isinstance(choice, Refusal):
            return choice
        label = choice.names[0]
        notes.append(choice.note)
    sequence = resolved(columns.sequence, words.names)
    if sequence is None and not columns.features:
        others = {label, *_counts(words), *_constants(words)}
        free = [name for name in words.names if name not in others]
        sequence = (free or list(words.names))[0]
        notes.append(f"the words are column {sequence} of {len(words.names)}")
    return NamedColumns(replace(columns, sequence=sequence, label=label, **named), tuple(notes))


def resolved(name: str | None, names: Sequence[str]) -> str | None:
    """Return the column of a name in any case of letters, or of a number from 1, or from the end if
    it is negative.
    """
    if name is None or name in names:
        return name
    if re.fullmatch(r"-?\d{1,3}", name) and 0 < abs(int(name)) <= len(names):
        return names[int(name) - (int(name) > 0)]
    return next((other for other in names if other.lower() == name.lower()), name)


def _label_of(words: Words) -> RoleColumns | Refusal:
    """Return the column of labels."""
    counts = _counts(words)
    free = [name for name in words.names if name not in counts]
    entities = [name for name in free if are_entities(words.column(name))]
    usual = "UPOS" if "UPOS" in free else ""
    label = usual or (entities or free or [""])[-1]
    fix = f"add labels, or name another column with {option('label')}"
    if words.has_more and not usual:
        got = "sentences with different numbers of columns"
        return Refusal(got, "a file whose labels are the last column", fix)
    if len(free) < 2:
        got = f"{count_of(len(free), 'column')} of words"
        return Refusal(got, "a file with a column of labels", fix)
    if set(words.column(label)) == {"_"}:
        got = f"the column {label}, which is empty in all lines"
        return Refusal(got, "a file with a label per word", fix)
    last = f", the last of {', '.join(entities)}" if len(entities) > 1 and not usual else ""
    note = f"the labels are column {label}{last} ({option('label')} names another)"
    return RoleColumns((label,), note)


def _counts(words: Words) -> list[str]:
    """Return the columns that count the words of each sentence from 1, or of a document from 0."""
    expected = np.arange(words.offsets[-1]) - np.repeat(words.offsets[:-1], np.diff(words.offsets))
    counts = [list(map(str, (expected + first).tolist())) for first in (1, 0)]
    return [name for name in words.names if words.column(name) in counts]


def _constants(words: Words) -> list[str]:
    """Return the columns that have one entry in all words of a sentence, such as a document."""
    starts = np.repeat(words.offsets[:-1], np.diff(words.offsets)).tolist()
    if starts == list(range(len(starts))):
        return []
    columns = {name: words.column(name) for name in words.names}
    return [
        name
        for name, column in columns.items()
        if all(entry == column[start] for entry, start in zip(column, starts, strict=True))
    ]
