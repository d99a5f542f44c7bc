"""Labels and numbers to learn out of Arrow columns: classes, tags, numbers, sets of labels.

Numbers are one per row, a list of them as long as the sequence (one per element), a list of any other length that all
rows share (several per sequence), or a list of lists (several per element). Sets of labels are a text with ``;``
between the labels, a list of labels, or a list of these as long as the sequence (one set per element).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from raglane.data.formats.arrow import (
    Reader,
    arrow_types,
    explode,
    is_label,
    is_label_list,
    is_list,
    is_number,
    is_text,
    words_of,
)
from raglane.data.formats.base import columns_argument
from raglane.data.records import TASKS, Targets, offsets_of, place_of
from raglane.errors import count_of, quote

_Found = tuple[tuple[str, ...] | None, npt.NDArray[np.object_] | None, Targets | None]


def labels_in(text: str) -> tuple[str, ...]:
    """The labels that a text names, between semicolons, each once."""
    return tuple(dict.fromkeys(label for part in text.split(";") if (label := part.strip())))


def names_of(column: str, count: int) -> tuple[str, ...]:
    """The names of the numbers of a column."""
    return (column,) if count == 1 else tuple(f"{column}_{place}" for place in range(count))


def label_kind(task: str) -> tuple[Callable[[Any], bool], str]:
    """What a column must be to be guessed as the label of a task: a test of its type, and words for it."""
    if TASKS[task].label == "numbers":
        return _is_numbers, "column of numbers, or of lists of them"
    if TASKS[task].label == "set":
        return _is_sets, "column of lists of labels, of lists of lists of them, or of texts"
    if TASKS[task].per == "element":
        return is_label_list, "column of lists of strings, integers or booleans, one per element"
    return is_label, "column of strings, integers or booleans"


def column_kinds(kind: Any, task: str) -> tuple[str, ...]:
    """What the labels of a column are, by its type, in the words of :func:`~raglane.data.records.kinds_of`."""
    while is_list(kind):
        kind = kind.value_type
    if not is_label(kind) or TASKS[task].label == "numbers":
        return ()
    return ("texts",) if is_text(kind) else ("truth values",) if arrow_types().is_boolean(kind) else ("whole numbers",)


def _is_numbers(kind: Any, depth: int = 2) -> bool:
    return is_number(kind) or (depth > 0 and is_list(kind) and _is_numbers(kind.value_type, depth - 1))


def _is_sets(kind: Any) -> bool:
    return is_text(kind) or is_label_list(kind) or (is_list(kind) and is_label_list(kind.value_type))


def read_labels(reader: Reader, column: Any, name: str, offsets: npt.NDArray[np.int64], task: str) -> _Found:
    """What a column holds for a task."""
    if TASKS[task].label == "numbers":
        return None, None, _numbers(reader, column, name, offsets)
    if TASKS[task].label == "set":
        return None, None, _sets(reader, column, name, offsets)
    if TASKS[task].per == "element":
        return None, _tags(reader, column, name, offsets), None
    reader.refuse_nulls(column, name, "label")
    return tuple(words_of(reader, column, name).tolist()), None, None


def _tags(reader: Reader, column: Any, name: str, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.object_]:
    """The labels of the elements, ``(N,)`` str."""
    reader.refuse_nulls(column, name, "list of labels")
    if not is_list(column.type):
        raise _other_type(reader, column, name, "tagging needs a list of labels, one per element")
    lengths, tags = explode(column)
    _check_lengths(reader, lengths, offsets, name, "labels")
    reader.refuse_inner_nulls(tags, offsets, name)
    return words_of(reader, tags, name, offsets)


def _numbers(reader: Reader, column: Any, name: str, offsets: npt.NDArray[np.int64]) -> Targets:
    """One or several numbers per sequence or per element."""
    reader.refuse_nulls(column, name, "number to learn")
    if not _is_numbers(column.type):
        rule = "a number, or lists of numbers, are to be learned"
        raise _other_type(reader, column, name, rule)
    rows = np.arange(len(column))
    if not is_list(column.type):
        return _matrix(reader, column, name, 1, rows, None)
    lengths, entries = explode(column)
    per_element = bool((lengths == np.diff(offsets)).all())
    if is_list(entries.type):
        _check_lengths(reader, lengths, offsets, name, "lists of numbers")
        reader.refuse_inner_nulls(entries, offsets, name)
        lengths, entries = explode(entries)
        rows, per_element = np.repeat(rows, np.diff(offsets)), True
    elif per_element:
        return _matrix(reader, entries, name, 1, np.repeat(rows, lengths), offsets)
    odd = lengths != (lengths[0] if len(lengths) else 0)
    if odd.any() or (len(lengths) and lengths[0] == 0):
        row = int(odd.argmax())
        got = f"{count_of(int(lengths[row]), 'number')} in {reader.row(int(rows[row]))}, column {quote(name)}"
        rule = "one number per element, or as many in each row, at least one"
        raise reader.error(got, rule, "correct the row, or remove it")
    width = int(lengths[0]) if len(lengths) else 1
    return _matrix(reader, entries, name, width, np.repeat(rows, lengths), offsets if per_element else None)


def _matrix(
    reader: Reader,
    entries: Any,
    name: str,
    width: int,
    rows: npt.NDArray[np.int64],
    offsets: npt.NDArray[np.int64] | None,
) -> Targets:
    """Finite numbers, ``width`` to a row; ``rows`` says of which sequence each is, for messages."""
    values = entries.cast("double", safe=False).to_numpy() if entries.null_count == 0 else entries.to_numpy()
    values = np.asarray(values, dtype=np.float64)
    wrong = ~np.isfinite(values)
    if wrong.any():
        first = int(wrong.argmax())
        what = "a null" if entries.null_count else f"{values[first]}"
        got = f"{what} in {reader.row(int(rows[first]))}, column {quote(name)}"
        raise reader.error(got, "a number to learn is finite", "fill it, or remove the row")
    return Targets(values.reshape(-1, width), per_element=offsets is not None, names=names_of(name, width))


def _sets(reader: Reader, column: Any, name: str, offsets: npt.NDArray[np.int64]) -> Targets:
    """A tuple of labels per sequence or per element."""
    reader.refuse_nulls(column, name, "list of labels; write [] for none")
    if is_text(column.type):
        texts = words_of(reader, column, name)
        return Targets(_objects([labels_in(text) for text in texts.tolist()]))
    if not _is_sets(column.type):
        raise _other_type(reader, column, name, "labels are a text with ; between them, a list, or a list of lists")
    lengths, entries = explode(column)
    starts = offsets_of(lengths)
    if not is_list(entries.type):
        reader.refuse_inner_nulls(entries, starts, name)
        return Targets(_cut(words_of(reader, entries, name, starts), starts))
    _check_lengths(reader, lengths, offsets, name, "lists of labels")
    reader.refuse_inner_nulls(entries, offsets, name)
    lengths, entries = explode(entries)
    inner = offsets_of(lengths)
    if entries.null_count:
        row, _ = place_of(offsets, place_of(inner, int(entries.is_null().to_numpy().argmax()))[0])
        raise reader.error(f"a null in {reader.row(row)}, column {quote(name)}", "labels are not null", "remove it")
    return Targets(_cut(words_of(reader, entries, name), inner), per_element=True)


def _cut(words: npt.NDArray[np.object_], offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.object_]:
    """The labels between offsets as tuples, each label once."""
    everything = words.tolist()
    return _objects([tuple(dict.fromkeys(everything[start:end])) for start, end in pairwise(offsets.tolist())])


def _objects(sets: list[tuple[str, ...]]) -> npt.NDArray[np.object_]:
    """``(M,)`` object: NumPy would make a matrix of tuples of one length."""
    result = np.empty(len(sets), dtype=object)
    result[:] = sets
    return result


def _check_lengths(
    reader: Reader, lengths: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64], name: str, what: str
) -> None:
    """Raise unless there is one entry per element."""
    differs = lengths != np.diff(offsets)
    if differs.any():
        row = int(differs.argmax())
        got = f"{lengths[row]} {what} for {np.diff(offsets)[row]} elements in {reader.row(row)}, column {quote(name)}"
        rule = f"one {'label' if what == 'labels' else 'list'} per element"
        raise reader.error(got, rule, "correct the row, or remove it")


def _other_type(reader: Reader, column: Any, name: str, rule: str) -> Exception:
    got = f"{column.type} in column {quote(name)}"
    return reader.error(got, rule, f"name another with {columns_argument('label')}")
