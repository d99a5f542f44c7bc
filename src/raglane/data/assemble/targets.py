"""The labels and targets of a task from an Arrow column.

Numeric targets are one number per row, a list as long as the sequence (one per element), a list of
any other length that all rows share (several per sequence), or a list of lists (several per
element). Sets of labels are a text with ``;`` between the labels, a list of labels, or a list of
such lists as long as the sequence (one set per element).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import numpy as np

from raglane._utils.messages import count_of, require
from raglane.data.assemble.reader import Reader, first_null, words_of
from raglane.data.columns import Columns, option
from raglane.data.records import Targets, as_objects, offsets_of, place_of
from raglane.data.roles.label_types import (
    is_label_sequence,
    is_label_set,
    is_numeric,
    is_without_entries,
)
from raglane.data.splitting import split_texts
from raglane.data.typed.arrays import Entries, Integers
from raglane.data.typed.arrow import as_texts, explode, is_list, is_text
from raglane.data.typed.column import Typed
from raglane.errors import DataError
from raglane.tasks import TASKS

_Labels = tuple[tuple[str, ...] | None, Entries | None, Targets | None]


def labels_in(texts: list[str]) -> Entries:
    """Return the set of labels of each text, ``(M,)`` object; they are separated by semicolons."""
    parts = ((part.strip() for part in text.split(";")) for text in texts)
    return as_objects([tuple(dict.fromkeys(filter(None, labels))) for labels in parts])


def read_labels(
    reader: Reader, column: Any, name: str, offsets: Integers, columns: Columns
) -> _Labels:
    """Read the labels of a task: classes per sequence, classes per element, or targets; the others
    are None.
    """
    task = columns.task
    if TASKS[task].label == "sequence":
        return None, None, _target_sequences(reader, column, name, columns)
    if TASKS[task].label == "numbers":
        return None, None, _numbers(reader, column, name, offsets)
    if TASKS[task].label == "set":
        return None, None, _sets(reader, column, name, offsets)
    if TASKS[task].per == "element":
        reader.check_nulls(column, name, "list of labels")
        if not is_list(column.type):
            raise _label_type_error(reader, column, name, "a list of labels, one per element")
        lengths, tags = explode(column)
        _check_lengths(reader, lengths, offsets, name, "labels")
        reader.check_inner_nulls(tags, offsets, name)
        return None, _classes(reader, tags, name, offsets), None
    reader.check_nulls(column, name, "label")
    return tuple(_classes(reader, column, name).tolist()), None, None


def _classes(reader: Reader, column: Any, name: str, offsets: Integers | None = None) -> Entries:
    """Convert labels as :func:`words_of` does; raise a DataError for the first empty one."""
    words = words_of(reader, column, name, offsets)
    if (blank := words == "").any():
        row = int(blank.argmax())
        rule = "a label in each place"
        raise reader.entry_error("an empty label", row, name, rule, "fill it", offsets)
    return words


def _label_type_error(reader: Reader, column: Any, name: str, rule: str) -> DataError:
    return reader.type_error(column, name, rule, f"name another with {option('label')}")


def _numbers(reader: Reader, column: Any, name: str, offsets: Integers) -> Targets:
    """Read one or several numbers per sequence or per element."""
    reader.check_nulls(column, name, "number to learn")
    if is_text(column.type):
        values, odd = Typed(as_texts(column)).numbers()
        if odd.any():
            raise _label_type_error(reader, column, name, "numbers, or lists of numbers")
        column = require("pyarrow", "data").chunked_array([values])
    if not is_numeric(column.type):
        raise _label_type_error(reader, column, name, "numbers, or lists of numbers")
    rows = np.arange(len(column))
    if not is_list(column.type):
        return _matrix(reader, column, name, 1, rows, False)
    lengths, entries = explode(column)
    per_element = bool((lengths == np.diff(offsets)).all())
    if is_list(entries.type):
        _check_lengths(reader, lengths, offsets, name, "lists of numbers")
        reader.check_inner_nulls(entries, offsets, name)
        lengths, entries = explode(entries)
        rows = np.repeat(rows, np.diff(offsets))
        per_element = True
    elif per_element:
        return _matrix(reader, entries, name, 1, np.repeat(rows, lengths), True)
    odd = lengths != (lengths[0] if len(lengths) else 0)
    if odd.any() or (len(lengths) and lengths[0] == 0):
        row = int(odd.argmax())
        rule = "one number per element, or the same number of them in each row"
        fix = "correct the row, or remove it"
        raise reader.entry_error(
            count_of(int(lengths[row]), "number"), int(rows[row]), name, rule, fix
        )
    width = int(lengths[0]) if len(lengths) else 1
    return _matrix(reader, entries, name, width, np.repeat(rows, lengths), per_element)


def _matrix(
    reader: Reader, entries: Any, name: str, width: int, rows: Integers, per_element: bool
) -> Targets:
    """Return targets of ``width`` finite numbers; ``rows`` are the rows of the entries, for
    messages.
    """
    values = (
        entries.cast("double", safe=False).to_numpy()
        if entries.null_count == 0
        else entries.to_numpy()
    )
    values = np.asarray(values, dtype=np.float64)
    wrong = ~np.isfinite(values)
    if wrong.any():
        first = int(wrong.argmax())
        got = "a null" if entries.null_count else f"{values[first]}"
        fix = "fill it, or remove the row"
        raise reader.entry_error(got, int(rows[first]), name, "a finite number", fix)
    names = (name,) if width == 1 else tuple(f"{name}_{place}" for place in range(width))
    return Targets(values.reshape(-1, width), per_element=per_element, names=names)


def label_split_of(column: Any, columns: Columns) -> str | None:
    """Return the tokenization of target texts; None for other labels, and for lists, whose entries
    are the tokens.
    """
    is_split = TASKS[columns.task].label == "sequence" and is_text(column.type)
    return columns.label_split or "characters" if is_split else None


def _target_sequences(reader: Reader, column: Any, name: str, columns: Columns) -> Targets:
    """Read a sequence of labels per sequence: a list, or a text that is split."""
    reader.check_nulls(column, name, "target, empty for none,")
    if not (is_label_sequence(column.type) or is_without_entries(column.type)):
        raise _label_type_error(
            reader, column, name, "texts, or lists of strings, integers or booleans"
        )
    split = label_split_of(column, columns)
    if split is not None:
        return split_targets(words_of(reader, column, name).tolist(), split)
    lengths, entries = explode(column)
    offsets = offsets_of(lengths)
    reader.check_inner_nulls(entries, offsets, name)
    return Targets(_cut(words_of(reader, entries, name, offsets), offsets, tuple), ordered=True)


def split_targets(texts: list[str], split: str) -> Targets:
    """Return texts as sequences of labels."""
    words, lengths = split_texts(texts, split)
    return Targets(_cut(words, offsets_of(lengths), tuple), ordered=True)


def _sets(reader: Reader, column: Any, name: str, offsets: Integers) -> Targets:
    """Read a set of labels per sequence or per element."""
    reader.check_nulls(column, name, "list of labels, [] for none,")
    if is_text(column.type):
        return Targets(labels_in(words_of(reader, column, name).tolist()))
    if not (is_label_set(column.type) or is_without_entries(column.type)):
        raise _label_type_error(
            reader, column, name, "a text with ; between labels, a list, or a list of lists"
        )
    lengths, entries = explode(column)
    starts = offsets_of(lengths)
    if not is_list(entries.type):
        reader.check_inner_nulls(entries, starts, name)
        return Targets(_cut(words_of(reader, entries, name, starts), starts, dict.fromkeys))
    _check_lengths(reader, lengths, offsets, name, "lists of labels")
    reader.check_inner_nulls(entries, offsets, name)
    lengths, entries = explode(entries)
    inner = offsets_of(lengths)
    if entries.null_count:
        row, _ = place_of(offsets, place_of(inner, first_null(entries))[0])
        raise reader.entry_error("a null", row, name, "labels that are not null", "remove it")
    return Targets(_cut(words_of(reader, entries, name), inner, dict.fromkeys), per_element=True)


def _cut(
    words: Entries,
    offsets: Integers,
    collect: Callable[[list[str]], Iterable[str]],
) -> Entries:
    """Return the labels between offsets as tuples; ``collect`` keeps all of them, or each once."""
    labels = words.tolist()
    return as_objects(
        [tuple(collect(labels[start:end])) for start, end in pairwise(offsets.tolist())]
    )


def _check_lengths(
    reader: Reader, lengths: Integers, offsets: Integers, name: str, nouns: str
) -> None:
    """Raise a DataError for the first row whose list is not as long as its sequence."""
    differs = lengths != np.diff(offsets)
    if differs.any():
        row = int(differs.argmax())
        got = f"{lengths[row]} {nouns} for {np.diff(offsets)[row]} elements"
        raise reader.entry_error(
            got, row, name, f"equally many {nouns} and elements", "correct the row, or remove it"
        )
