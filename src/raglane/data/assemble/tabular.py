"""Records from typed columns, for CSV files and for Arrow tables without lists.

A row is an element, a sequence with a column per step, or a text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from raglane._utils.messages import quote, require
from raglane.data.assemble.elements import records_of_rows
from raglane.data.assemble.grouping import check_rows
from raglane.data.assemble.lists import records_of
from raglane.data.assemble.padding import note_padding
from raglane.data.assemble.pieces import Piece
from raglane.data.columns import Columns, option
from raglane.data.records import Records
from raglane.data.roles import Facts, Roles, Shape
from raglane.data.roles.decide import is_word
from raglane.data.roles.rules import parts_of
from raglane.data.roles.steps import NO_STEPS, StepColumns
from raglane.data.sources.files import data_error
from raglane.data.sources.short_rows import note_ends
from raglane.data.typed import decimals
from raglane.data.typed.arrays import Bools, Floats
from raglane.data.typed.column import Column, TextColumn
from raglane.tasks import TASKS


def wide_rows(
    path: Path, table: Mapping[str, Column], columns: Columns, roles: Roles, first: int = 0
) -> Records:
    """Read rows that are a sequence each, with a step per column; missing entries at the end of a
    row are no steps.
    """
    steps = roles.steps
    notes = note_ends(table)
    table = {name: _with_ends(column) for name, column in table.items()}
    _check_row_ids(path, table, roles)
    filled = _are_filled(table, steps, columns)
    count, width = filled.shape
    lengths = np.maximum(np.where(filled.any(1), width - filled[:, ::-1].argmax(1), 0), 1)
    rows = np.repeat(np.arange(count), lengths)
    inside = np.arange(width) < lengths[:, None]
    notes += _note_words(table, steps, inside)
    numbers = np.array([str(row) for row in range(first, first + count)], dtype=object)
    ids: dict[str, Column] = {name: table[name] for name in roles.id}
    ids = ids or {"id": TextColumn(numbers)}
    values = _values(table, steps, inside)
    used_names = (*steps.names, *roles.id)
    others = {name: column for name, column in table.items() if name not in used_names}
    long = {name: column.take(rows) for name, column in ids.items()} | values
    long |= {name: column.take(rows) for name, column in others.items()}
    inner = replace(roles, shape=Shape.ELEMENTS, id=tuple(ids), steps=NO_STEPS)
    asked = replace(columns, features=tuple(values), time=None)
    records = records_of_rows(path, long, asked, inner, rows + first)
    starts = tuple(names[0] for names in steps.columns)
    features = starts if steps.are_numbered else steps.names
    used = replace(records.columns, features=features, time=columns.time, id=columns.id, wide=True)
    notes += _note_unused(others, records.columns, count)
    notes = [*filter(None, [roles.id_note]), roles.note, *notes, *records.notes]
    about = records.roles._replace(rows=roles.notes)
    return replace(records, notes=tuple(notes), columns=used, roles=about)


def _note_unused(names: Iterable[str], columns: Columns, count: int) -> list[str]:
    """Return the note about columns of rows that are sequences which have no role."""
    labels = parts_of(columns.label, names) if columns.label is not None else ()
    roles = (*labels, *(columns.static or ()), columns.sequence)
    unused = [name for name in names if name not in roles]
    if not unused:
        return []
    more = option("static")
    return [f"left out, since no role fits: {', '.join(unused)} ({count:,} rows; {more} names one)"]


def _check_row_ids(path: Path, table: Mapping[str, Column], roles: Roles) -> None:
    """Raise a DataError if two rows have one id."""
    if not roles.id or Facts(table).is_unique(*roles.id):
        return
    names = [" ".join(row) for row in zip(*(table[id].words() for id in roles.id), strict=True)]
    twice = Counter(names).most_common(1)[0][0]
    leave = f"leave {option('wide', value=True)} out"
    fix = f"remove a row, or rename it; if a row is an element, {leave}"
    raise data_error(path, f"the id {quote(twice)} twice", "a file with one row per id", fix)


def _values(table: Mapping[str, Column], steps: StepColumns, inside: Bools) -> dict[str, Column]:
    """Return the entries of the steps that are elements, a column per channel."""
    values: dict[str, Column] = {}
    for channel, names in zip(steps.channels, steps.columns, strict=True):
        name = f"steps from {names[0]}" if steps.are_numbered else f"{names[0]} to {names[-1]}"
        entries = np.stack([table[name].entries for name in names], axis=1)
        values[channel or name] = TextColumn(entries[inside])
    return values


def _with_ends(column: Column) -> Column:
    """Return a column without the marks of rows that end early."""
    return (
        TextColumn(decimals.with_ends(column.entries)) if isinstance(column, TextColumn) else column
    )


def _note_words(table: Mapping[str, Column], steps: StepColumns, inside: Bools) -> list[str]:
    """Return the note about ends of rows that are written, as NaN, and no steps."""
    names = zip(*steps.columns, strict=True)
    blank = [np.all([table[name].entries == "" for name in each], axis=0) for each in names]
    written = ~inside & ~np.stack(blank, axis=1)
    if not written.any():
        return []
    return [note_padding(int(written.any(axis=1).sum()), int(written.sum()))]


def _are_filled(table: Mapping[str, Column], steps: StepColumns, columns: Columns) -> Bools:
    """Return ``(rows, steps)``: where a step is not missing in all of its channels."""
    filled = [
        np.any([_is_filled(table[name], columns) for name in names], axis=0)
        for names in zip(*steps.columns, strict=True)
    ]
    return np.stack(filled, axis=1)


def _is_filled(column: Column, columns: Columns) -> Bools:
    if columns.keep_trailing:
        return np.asarray(column.entries != "", dtype=np.bool_)
    numbers, odd = column.numbers()
    return odd | ~np.isnan(numbers)


def whole_rows(
    path: Path, entries: Mapping[str, Column], columns: Columns, roles: Roles, first: int = 0
) -> Records:
    """Read rows that are a text each, with a label and static features, as an Arrow table."""
    arrow = require("pyarrow", "data")
    rows = range(first, first + len(next(iter(entries.values()))))
    check_rows(path, entries, rows)
    table: dict[str, Any] = {name: entries[name].texts() for name in roles.names}
    static = [name for name in roles.static if name not in (columns.categorical or ())]
    words = [name for name in static if is_word(Facts(entries), name, columns)]
    numeric = {
        name: "a number, or a word in a column of words" for name in static if name not in words
    }
    if TASKS[columns.task].label == "numbers" and roles.label is not None:
        numeric[roles.label] = "a finite number"
    for column, rule in numeric.items():
        table[column] = arrow.array(_numbers_only(path, entries[column], column, rule, first))
    categorical = tuple(dict.fromkeys((*(columns.categorical or ()), *words))) or None
    asked = replace(columns, categorical=categorical)
    records = records_of(path, arrow.table(table), roles, asked, first=first)
    note = f"each row is a sequence, the text of {quote(roles.sequence)}"
    free = [name for name in entries if name not in roles.id]
    unused = _note_unused(free, records.columns, len(records))
    notes = (note, *filter(None, [roles.note]), *records.notes, *unused)
    return replace(records, notes=notes, label_kinds=None)


def _numbers_only(path: Path, column: Column, name: str, rule: str, first: int) -> Floats:
    """Return a column of numbers; raise a DataError for the first word."""
    numbers, odd = column.numbers()
    if odd.any():
        row = int(odd.argmax())
        got = f"{quote(column.text(row))} in data row {first + row}, column {quote(name)}"
        raise data_error(path, got, f"a file with {rule}", "correct it, or remove the row")
    return numbers


def row_piece(path: Path, table: Mapping[str, Column], columns: Columns, roles: Roles) -> Piece:
    """Return the rows of a file with a sequence per row as one piece."""
    count = len(next(iter(table.values())))

    def read(low: int, high: int) -> Records:
        rows = {name: column.take(slice(low, high)) for name, column in table.items()}
        if roles.shape is Shape.TEXTS:
            return whole_rows(path, rows, columns, roles, low)
        return wide_rows(path, rows, columns, roles, low)

    return Piece(count, read, (count,), lambda row: f"data row {row}")
