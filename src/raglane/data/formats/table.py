"""Sequences and labels out of Arrow columns: what Parquet and JSON lines share.

A sequence is an entry of one column: a list of numbers (one channel), a list of lists of numbers (steps of channels), a
list of strings (tokens), or a text, which is split on white space into tokens. A label is a string, an integer or a
boolean (``"true"``, ``"false"``); for tagging, a list of these as long as the sequence. What a column holds is moved
as a whole, without a loop over its elements.

Further columns may be features: of elements, lists as long as the sequence; of sequences, numbers or words. Numbers of
elements beside numbers become channels like these.

Where no column is named, the sequence column is the only list column, or if there is none the only text column; the
label column is the only other column of labels. A column called ``id`` (or ``sequence_id``, ...) holds the ids.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from raglane._utils.messages import quote
from raglane.data.formats.arrow import (
    Reader,
    arrow_types,
    column_kinds,
    is_id,
    is_label,
    is_list,
    is_number,
    is_sequence,
    is_text,
    is_whole,
    label_kind,
    read_labels,
    sequences_of,
    words_of,
)
from raglane.data.formats.base import (
    ROLE_NAMES,
    choose_column,
    columns_argument,
    data_error,
    id_column,
    named_column,
    takes_tokens,
)
from raglane.data.records import Columns, Feature, Records, as_float32


@dataclass(frozen=True)
class Chosen:
    """The columns to read, and how they were found."""

    sequence: str
    label: str | None
    id: str | None
    notes: tuple[str, ...]
    features: tuple[str, ...] = ()
    static: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """Each column once, in no special order."""
        every = (self.sequence, self.label, self.id, *self.features, *self.static)
        return list({name: None for name in every if name is not None})

    def label_kinds(self, schema: Any, task: str) -> tuple[str, ...]:
        """What the labels of a table with this ``pyarrow.Schema`` are; () where none are read."""
        return () if self.label is None else column_kinds(schema.field(self.label).type, task)


def choose(path: Path, schema: Any, columns: Columns) -> Chosen:
    """Settle which columns to read."""
    # pandas stores the index of a table as a column of this name; it is nobody's label.
    fields = [field for field in schema if not field.name.startswith("__index_level_")]
    kinds = {field.name: field.type for field in fields}
    present = list(kinds)
    if len(present) < len(fields):
        counts = Counter(field.name for field in fields)
        twice = next(name for name in present if counts[name] > 1)
        raise data_error(path, f"two columns {quote(twice)}", "a file whose columns have different names", "rename one")
    if columns.time in kinds:
        got = f"the time column {quote(columns.time)}"
        rule = "a file with one sequence per row, whose elements are already in order"
        raise data_error(path, got, rule, f"sort the lists before, and leave {columns_argument('time')} out")
    notes: list[str] = []
    id_name, id_notes = id_column(path, columns, present, [name for name in present if is_id(kinds[name])])
    features, static = beside(path, columns, present)
    if columns.sequence is not None:
        sequence = named_column(path, "sequence", columns.sequence, present)
    elif features:
        sequence = features[0]
    else:
        free = [name for name in present if name not in (id_name, columns.label, *static)]
        candidates = [name for name in free if is_sequence(kinds[name])]
        texts = [name for name in free if is_text(kinds[name])]
        if columns.wants_labels and columns.task != "classify":
            # A list may be the label, and what is called a text is no label.
            called = [name for name in texts if name.lower() in ROLE_NAMES["sequence"]]
            candidates = called or candidates
        candidates = candidates or texts
        kind = "column of lists of numbers, of lists of lists of numbers, of lists of strings, or of texts"
        sequence, note = choose_column(path, "sequence", candidates, kind, present)
        notes.append(note)
    if is_text(kinds[sequence]):
        how = "on white space into tokens" if columns.split in (None, "words") else f"into {columns.split}"
        notes.append(f"the texts of {quote(sequence)} are split {how}")
    if is_list(kinds[sequence]) and is_whole(kinds[sequence].value_type):
        notes.append(takes_tokens(columns, sequence)[1])
    features = tuple(name for name in features if name != sequence)
    label, label_notes = _choose_label(path, kinds, columns, {sequence, id_name, *features, *static})
    return Chosen(sequence, label, id_name, (*notes, *label_notes, *id_notes), features, static)


def _choose_label(
    path: Path, kinds: dict[str, Any], columns: Columns, taken: set[str | None]
) -> tuple[str | None, tuple[str, ...]]:
    if not columns.wants_labels:
        return None, ()
    if columns.label is not None:
        return named_column(path, "label", columns.label, kinds), ()
    fits, kind = label_kind(columns.task)
    candidates = [name for name in kinds if name not in taken and fits(kinds[name])]
    label, note = choose_column(path, "label", candidates, kind, kinds)
    return label, (note,)


def records_of(
    path: Path,
    table: Any,
    chosen: Chosen,
    columns: Columns,
    lines: npt.NDArray[np.int64] | None = None,
    first: int | None = 0,
) -> Records:
    """Turn the chosen columns of a table into records."""
    if table.num_rows == 0:
        raise data_error(path, "no rows", "a file with at least one sequence", "check the file")
    ids = None if chosen.id is None else _ids(Reader(path, None, lines, first), table.column(chosen.id), chosen.id)
    reader = Reader(path, ids, lines, first)
    values, offsets = sequences_of(reader, table.column(chosen.sequence), chosen.sequence, columns)
    split = (columns.split or "words") if is_text(table.column(chosen.sequence).type) else None
    labels, tags, targets, kinds = None, None, None, None
    if chosen.label is not None:
        kinds = column_kinds(table.column(chosen.label).type, columns.task)
        labels, tags, targets = read_labels(reader, table.column(chosen.label), chosen.label, offsets, columns.task)
    width = values.shape[1] if values.ndim == 2 else 0
    channels = tuple(f"x{channel}" for channel in range(width))
    features: tuple[Feature, ...] = ()
    if chosen.features or chosen.static:
        values, channels, features = with_features(reader, table, chosen, columns, values, offsets)
    # A guessed id column is not asked for again: another file may do without ids.
    found = replace(columns, sequence=chosen.sequence, label=chosen.label or columns.label, split=split)
    notes = chosen.notes
    return Records(
        values, offsets, ids, labels, tags, channels, path, notes, found, targets, features, label_kinds=kinds
    )


def _ids(reader: Reader, column: Any, name: str) -> tuple[str | int, ...]:
    reader.refuse_nulls(column, name, "id")
    if arrow_types().is_integer(column.type):
        return tuple(column.to_pylist())
    return tuple(words_of(reader, column, name).tolist())


def beside(path: Path, columns: Columns, present: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The columns that were named as features, of elements and of sequences."""
    names = list(present)
    features = tuple(named_column(path, "features", name, names) for name in columns.features or ())
    static = tuple(named_column(path, "static", name, names) for name in columns.static or ())
    for name in columns.categorical or ():
        named_column(path, "categorical", name, names)
    for name in static:
        others = {"features": columns.features or (), "sequence": (columns.sequence,), "label": (columns.label,)}
        role = next((role for role, taken in others.items() if name in taken), None)
        if role is not None:
            got = f"{quote(name)} as {columns_argument('static')} and as {columns_argument(role)}"
            raise data_error(path, got, "a file whose columns have one role each", "leave one of the two out")
    return features, static


def with_features(
    reader: Reader, table: Any, chosen: Any, columns: Columns, values: npt.NDArray[Any], offsets: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[Any], tuple[str, ...], tuple[Feature, ...]]:
    """Sequences with the columns that stand beside them."""
    features: list[Feature] = []
    blocks, channels = [values], _names(chosen.sequence, values)
    for name in chosen.features:
        # Whether the whole numbers of the sequence column are tokens says nothing of another column.
        asked = replace(columns, tokens=name in (columns.categorical or ()), task="tag")
        column = table.column(name)
        if not is_list(column.type):
            rule = "a file whose features of elements are lists as long as the sequence"
            fix = f"declare a feature of whole sequences with {columns_argument('static')}"
            raise reader.wrong_type(column, name, rule, fix)
        found, ends = sequences_of(reader, column, name, asked)
        if not np.array_equal(ends, offsets):
            row = int((np.diff(ends) != np.diff(offsets)).argmax())
            lengths = f"{ends[row + 1] - ends[row]} elements in {reader.row(row)}, column {quote(name)}"
            got = f"{lengths}, and {offsets[row + 1] - offsets[row]} in {quote(chosen.sequence)}"
            raise reader.error(got, "a file whose rows have lists of one length", "correct the row, or remove it")
        if found.ndim == 2 and found.shape[1] == 0:
            # No row has an element, so nobody knows how many channels there would be.
            found = np.zeros((0, 1), dtype=np.float32)
        if found.ndim == 2 and values.ndim == 2:
            blocks.append(found)
            channels += _names(name, found)
        elif found.ndim == 2:
            pairs = zip(_names(name, found), found.T, strict=True)
            features += [Feature(part, np.ascontiguousarray(column)) for part, column in pairs]
        else:
            features.append(Feature(name, found))
    features += [static_of(reader, table.column(name), name, columns) for name in chosen.static]
    if len(blocks) > 1:
        return np.concatenate(blocks, axis=1), channels, tuple(features)
    # A sequence column by itself has channels without names.
    own = tuple(f"x{place}" for place in range(len(channels)))
    return values, own, tuple(features)


def _names(name: str, values: npt.NDArray[Any]) -> tuple[str, ...]:
    """What the channels of a column are called: as the column, with a number where there are several."""
    if values.ndim == 1:
        return ()
    return (name,) if values.shape[1] == 1 else tuple(f"{name}{place}" for place in range(values.shape[1]))


def static_of(reader: Reader, column: Any, name: str, columns: Columns) -> Feature:
    """A column with an entry per sequence; null is missing."""
    is_words = is_text(column.type) or name in (columns.categorical or ())
    if is_words and is_label(column.type):
        return Feature(name, words_of(reader, column.cast("large_string").fill_null(""), name), per_sequence=True)
    if is_words or not is_number(column.type):
        rule = "a file whose features of sequences are numbers or words"
        raise reader.wrong_type(column, name, rule, "convert the column, or leave it out")
    return Feature(name, as_float32(column.cast("double").to_numpy()), per_sequence=True)
