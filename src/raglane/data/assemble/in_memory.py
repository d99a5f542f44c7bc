"""Objects of a program as sequences: arrays, lists, Ragged, datasets and tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from raglane._utils.checks import check_tensor
from raglane._utils.messages import argument, quote, quote_all, require
from raglane.data.assemble.errors import accepted, unused_notes
from raglane.data.assemble.opened import Tabular, read_as
from raglane.data.assemble.padding import without_padding
from raglane.data.assemble.reader import Reader
from raglane.data.assemble.targets import label_split_of, read_labels
from raglane.data.columns import NAMED, Columns, option
from raglane.data.dataset import Dataset
from raglane.data.records import NO_ROLES, Records
from raglane.data.roles import Refusal, Roles, Shape
from raglane.data.roles.guess import unequal_row
from raglane.data.roles.label_types import fits, label_kinds, label_test
from raglane.data.sources.frames import table_from
from raglane.data.sources.objects import (
    DATA,
    WHOLE,
    array_records,
    flat,
    is_frame,
    is_pandas,
    is_panel,
    is_text,
    number_records,
    panel_records,
    whole_numbers,
)
from raglane.data.sources.table import whole_table
from raglane.data.typed.arrow import explode, is_list
from raglane.errors import ArgumentTypeError, DataError, ShapeError
from raglane.ragged import Ragged
from raglane.ragged.interop import conversion_of

# The name of labels in messages.
_LABELS = Path("labels")

_FORMS = (
    "a path, a list or a generator of sequences, an array (sequences, steps) or (sequences, steps, channels), "
    "a Ragged, a Dataset, or a table of pandas, polars, Arrow or datasets"
)


def listed(data: Any) -> Any:
    """Return a generator or another iterator as a list, because data is read more than once.

    A file, or a reader of its parts, is no list of sequences.
    """
    return list(data) if isinstance(data, Iterator) and not hasattr(data, "read") else data


def noted(dataset: Dataset, columns: Columns) -> Dataset:
    """Return a dataset with a note about options that differ from those it was read with."""
    unused = [
        field.name
        for field in fields(Columns)
        if field.name not in ("task", "need_labels")
        and getattr(columns, field.name) not in (None, False, getattr(dataset.columns, field.name))
    ]
    if not unused:
        return dataset
    names = ", ".join(map(option, unused))
    copied = copy(dataset)
    copied.notes = (*dataset.notes, f"not used, since a Dataset is read already: {names}")
    return copied


class InMemory:
    """An object of a program, with labels or without; its columns are decided like those of a
    file.
    """

    path = DATA

    def __init__(self, data: Any, labels: Any = None) -> None:
        self._data = data
        self._labels = labels

    @cached_property
    def _table(self) -> Tabular | None:
        """The table of an object with columns."""
        table = None if is_panel(self._data) else _table(self._data)
        return None if table is None else Tabular(whole_table(DATA, table))

    @cached_property
    def _label_column(self) -> Any:
        kinds = "labels of one kind: texts, whole numbers, booleans, or lists"
        return _arrow(list(self._labels), "labels", kinds)

    def roles(self, columns: Columns) -> Roles:
        """Return the roles of the columns for a task; raise a DataError if they are refused."""
        return accepted(self.path, self.decide(columns))

    def decide(self, columns: Columns, *, is_guess: bool = False) -> Roles | Refusal:
        """Return the roles of the columns for a task; a guess also looks at the labels."""
        if self._labels is not None and is_guess and columns.wants_labels:
            refusal = self._unfit(columns)
            if refusal is not None:
                return refusal
        # A column of labels is optional if labels are passed.
        columns = columns if self._labels is None else replace(columns, need_labels=False)
        if self._table is None or self._table.table.count == 0:
            return Roles(Shape.LISTS)
        return self._table.decide(columns, is_guess=is_guess)

    def _unfit(self, columns: Columns) -> Refusal | None:
        """Refuse a guessed task if the labels are those of another one."""
        _check_list(self._labels)
        column = self._label_column
        if not fits(column.type, columns.task):
            kind = label_test(columns.task)[1]
            return Refusal(f"labels of {column.type}", f"a {kind}", "convert them", is_unfit=True)
        if not is_list(column.type) or column.null_count:
            return None
        lengths = self._plain.lengths
        row = unequal_row(columns.task, explode(column)[0], lengths)
        if row is None or len(column) != len(lengths):
            return None
        got = f"labels of other lengths than sequences, the first in row {row}"
        return Refusal(got, "equally many labels and elements", "correct them")

    @cached_property
    def _plain(self) -> Records:
        """The sequences without labels, to compare their lengths."""
        asked = Columns(need_labels=False)
        return self._sequences(asked, self.roles(asked))

    def _sequences(self, columns: Columns, roles: Roles) -> Records:
        if self._table is None:
            return _read(self._data, columns)
        if self._table.table.count == 0:
            return flat(np.zeros((0, 1)), [0])
        return self._table.records(columns, roles)

    def records(self, columns: Columns, roles: Roles) -> Records:
        """Return the records of the decided roles, with the labels that were passed."""
        asked = columns
        data = self._data
        has_labels = self._labels is not None
        columns = replace(asked, need_labels=False) if has_labels else asked
        records = self._sequences(columns, roles)
        needs_labels = asked.need_labels or has_labels
        used = replace(records.columns, task=asked.task, need_labels=needs_labels)
        records = replace(records, columns=used)
        if len(records) == 0:
            raise DataError("data", "no sequences", "at least one sequence", "pass some")
        if has_labels:
            records = self._with_labels(records, asked.label_split)
        elif columns.wants_labels and not records.has_targets:
            rule = f"a list with one entry per sequence, for the task {columns.task}"
            fix = f"pass {argument('labels')}"
            fix = f"{fix}, or {WHOLE}" if is_frame(data) else fix
            raise DataError("labels", "none", rule, fix)
        if isinstance(data, Dataset):
            return replace(records, notes=noted(data, asked).notes)
        if self._table is None and not _has_own_steps(data):
            kept = replace(records.columns, keep_trailing=asked.keep_trailing)
            records = without_padding(replace(records, columns=kept))
        return replace(records, notes=(*records.notes, *self._notes(asked, records)))

    def _notes(self, asked: Columns, records: Records) -> list[str]:
        table = self._table
        notes = unused_notes(asked, () if table is None else NAMED, "data in memory", records)
        if self._labels is None or asked.label is None or table is None:
            return notes
        # A column of this name is left out of the features.
        names = {asked.label, *(name.strip() for name in asked.label.split(","))}
        if names.isdisjoint(table.table.columns):
            notes.append(f"not used, since labels are passed: {option('label')}")
        return notes

    def _with_labels(self, records: Records, label_split: str | None) -> Records:
        """Return records with labels, which are read like a column of a file."""
        labels = self._labels
        _check_list(labels)
        if len(labels) != len(records):
            got = f"{len(labels)} for {len(records)} sequences"
            raise ShapeError("labels", got, _RULE, "pass one label per sequence")
        check_order("labels", labels, records.ids)
        column = self._label_column
        columns = replace(records.columns, label_split=label_split)
        reader = Reader(_LABELS, records.ids, None)
        words, tags, targets = read_labels(reader, column, "labels", records.offsets, columns)
        columns = replace(columns, label_split=label_split_of(column, columns))
        kinds = label_kinds(column.type, columns.task)
        return replace(
            records, labels=words, tags=tags, targets=targets, label_kinds=kinds, columns=columns
        )


_RULE = "a list with one entry per sequence"


def _check_list(labels: Any) -> None:
    """Raise unless labels are a list, or one column of a table."""
    has_length = hasattr(labels, "__len__") and getattr(labels, "ndim", 1) > 0
    is_list = has_length and not hasattr(labels, "columns")
    if not is_list or isinstance(labels, (str, bytes, dict, set, frozenset)):
        fix = "pass a list, or one column of a table"
        raise ArgumentTypeError("labels", _kind(labels), _RULE, fix)


def _has_own_steps(data: Any) -> bool:
    """Return True if each element is there by itself: of a Ragged, or a row of a table."""
    return isinstance(data, Ragged) or is_panel(data)


def _read(data: Any, columns: Columns) -> Records:
    if isinstance(data, Dataset):
        return data.records
    if _is_grouped(data):
        raise ArgumentTypeError("data", "groups of a table", _FORMS, WHOLE)
    if isinstance(data, PackedSequence):
        raise ArgumentTypeError("data", "a PackedSequence", _FORMS, conversion_of(data))
    if columns.tokens or (columns.tokens is None and columns.task == "language"):
        sequences = whole_numbers(data)
        if sequences is not None:
            return _tokens(sequences, replace(columns, tokens=True))
    if isinstance(data, Ragged):
        return flat(data.values, data.offsets.cpu().numpy())
    if isinstance(data, torch.Tensor):
        return array_records(check_tensor("data", data))
    if isinstance(data, np.ndarray) and data.dtype.kind != "O":
        return array_records(data)
    return panel_records(data) if is_panel(data) else _listed_records(data, columns)


def _listed_records(data: Any, columns: Columns) -> Records:
    """Return the records of a list of sequences, or of a column or an array of them."""
    if hasattr(data, "to_list") or isinstance(data, np.ndarray):
        # A column of pandas or polars, or an array of objects.
        data = list(data)
    if isinstance(data, (str, bytes, dict)) or not isinstance(data, Sequence):
        raise ArgumentTypeError("data", _kind(data), _FORMS, "pass one of these")
    if not data:
        return flat(np.zeros((0, 1)), [0])
    return _tokens(data, columns) if is_text(data) else number_records(data)


def _is_grouped(data: Any) -> bool:
    """Return True for a table that is grouped, or for its groups as pairs of a key and a table."""
    if "GroupBy" in type(data).__name__:
        return True
    first = data[0] if isinstance(data, list) and data else None
    return isinstance(first, tuple) and len(first) == 2 and is_frame([first[1]])


def _kind(data: Any) -> str:
    return (
        quote(data)
        if isinstance(data, (str, bytes, int, float, type(None)))
        else f"a {type(data).__name__}"
    )


def _arrow(values: Any, name: str, rule: str) -> Any:
    arrow = require("pyarrow", "data")
    plain = [value.tolist() if hasattr(value, "tolist") else value for value in values]
    try:
        # Among texts and whole numbers, NaN and NA are missing entries.
        is_mixed = not all(isinstance(value, (float, list)) for value in plain)
        return arrow.chunked_array([arrow.array(plain, from_pandas=is_mixed)])
    except (arrow.ArrowException, OverflowError, TypeError, UnicodeEncodeError) as error:
        got = f"values of several kinds ({' '.join(str(error).split()).rstrip('.')})"
        raise ArgumentTypeError(name, got, rule, "pass values of one kind") from error


def _tokens(sequences: Sequence[Any], columns: Columns) -> Records:
    """Return the records of texts, which are tokenized as ``columns.split`` names it, or of lists
    of texts or whole numbers.
    """
    column = _arrow(
        sequences, "data", "sequences that are all texts, or all lists of texts, or all of numbers"
    )
    table = require("pyarrow", "data").table({"data": column})
    asked = Columns(need_labels=False, sequence="data", split=columns.split, tokens=columns.tokens)
    # The column is one of this function, and has no role that a user could change.
    records = read_as(Tabular(whole_table(DATA, table)), asked)
    return replace(records, roles=NO_ROLES)


def check_order(name: str, labels: Any, ids: Sequence[str | int] | None) -> None:
    """Raise a DataError if labels of pandas have the ids of the sequences as their index, in
    another order.
    """
    has_index = is_pandas(labels, "Series") or is_pandas(labels, "DataFrame")
    index = list(map(str, labels.index.tolist() if has_index else ()))
    names = list(map(str, ids or ()))
    # pandas numbers the rows of labels without an index.
    if index not in (names, [str(row) for row in range(len(names))]) and set(index) == set(names):
        rule = f"in the order of the sequences, {quote_all(names)}"
        got = f"an index in another order, {quote_all(index)}"
        fix = f"pass {name}.loc[ids] with the ids in their order, or {name}.to_numpy() if it has their order already"
        raise DataError(name, got, rule, fix)


def _table(data: Any) -> Any:
    """Return an object with columns as a ``pyarrow.Table``; None for other objects."""
    has_names = hasattr(data, "columns") or hasattr(data, "column_names")
    is_table = has_names and (hasattr(data, "__arrow_c_stream__") or hasattr(data, "with_format"))
    return table_from(data, "data") if is_table else None
