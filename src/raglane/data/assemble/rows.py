"""Records from typed columns, for CSV files and for Arrow tables without lists.

A row is an element, a sequence with a column per step, or a text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from raglane._utils.messages import argument, quote, require
from raglane.data.assemble.arrow import arrow_types, is_list, is_text
from raglane.data.assemble.elements import records_of_rows
from raglane.data.assemble.grouping import check_header_once
from raglane.data.assemble.lists import choose, kinds_of, records_of
from raglane.data.assemble.padding import note_padding
from raglane.data.assemble.pieces import Piece
from raglane.data.records import Columns, Records
from raglane.data.roles import Facts, Refusal, Roles, Shape, decide
from raglane.data.roles.decide import TEXT_NAMES
from raglane.data.roles.rules import (
    PERIOD_NAMES,
    ROLE_NAMES,
    ROW_ID_NAMES,
    TIME_NAMES,
    option,
    parts_of,
)
from raglane.data.roles.steps import NO_STEPS, NUMBERED, Steps, steps_of
from raglane.data.sources.files import data_error, id_column, is_named, refused
from raglane.data.sources.short_rows import check_ends, note_ends
from raglane.data.typed import decimals
from raglane.data.typed.column import Column, Typed, Written, is_bytes
from raglane.errors import UnfitColumnError
from raglane.tasks import TASKS

Load = Callable[[list[str]], Any]  # returns an Arrow table with some of its columns


def read_table(
    path: Path,
    schema: Any,
    load: Load,
    columns: Columns,
    lines: npt.NDArray[np.int64] | None = None,
) -> Records:
    """Read an Arrow table; ``lines`` numbers its rows, for messages."""
    if (table := columns_of(path, schema, load, columns)) is not None:
        records = read_columns(path, table, columns)
        others = ", ".join(name for name in kinds_of(path, schema) if name not in table)
        return (
            replace(records, notes=(f"left out, nested or unnamed: {others}", *records.notes))
            if others
            else records
        )
    chosen = choose(path, schema, columns)
    return records_of(path, load(chosen.names), chosen, columns, lines)


def read_columns(path: Path, table: Mapping[str, Column], columns: Columns) -> Records:
    """Read typed columns, from a file or a table: decide their roles, and make records."""
    roles = roles_of(path, Facts(table), columns)
    if roles.shape is Shape.TEXTS:
        return _whole_rows(path, table, _with_texts(columns, roles), roles)
    if roles.shape is Shape.STEPS:
        return _wide_rows(path, table, columns, roles)
    records = records_of_rows(path, table, columns, roles)
    # A guessed time column is not required of other files, nor is an id column.
    used = replace(records.columns, time=columns.time, id=",".join(roles.id) or None)
    notes = (*filter(None, [roles.id_note]), *records.notes)
    return replace(records, notes=notes, columns=used)


def roles_of(path: Path, facts: Facts, columns: Columns) -> Roles:
    """Return the roles of the columns of a table; raise a DataError if they cannot be told."""
    decision = decide(facts, columns)
    if isinstance(decision, Refusal):
        raise refused(path, decision)
    return decision


def _with_texts(columns: Columns, roles: Roles) -> Columns:
    return replace(columns, sequence=roles.sequence, label=columns.label or roles.label)


def element_columns(path: Path, schema: Any, load: Load, columns: Columns) -> list[str]:
    """Return the columns of an Arrow table whose rows are elements, or sequences with a column per
    step; else [].
    """
    kinds = kinds_of(path, schema)
    names = [
        name
        for name, kind in kinds.items()
        if not arrow_types().is_nested(kind) and is_named(name, columns)
    ]
    if columns.sequence is not None or any(map(is_list, kinds.values())):
        return []
    texts = {name for name in names if is_text(kinds[name])}
    if _are_rows_named(kinds, columns, texts):
        return names
    # Texts called "sequence" are sequences, such as those of genes.
    eligible = [name for name in names if name not in texts or name.lower() != "sequence"]
    name, _ = id_column(path, columns, names, eligible, ROW_ID_NAMES)
    ids = None if name is None else _valid(load([name])).column(0)
    if ids is not None:
        ids = ids.cast(getattr(ids.type, "storage_type", ids.type))  # Arrow does not compare UUIDs
    # Several texts may have one id, e.g. the reviews of a user.
    documents = texts.intersection(
        name for name in names if name.lower() in (*ROLE_NAMES["sequence"], *TEXT_NAMES)
    )
    if (
        ids is not None
        and len(ids.unique()) < len(ids)
        and not any(_are_sentences(load([own])) for own in documents)
    ):
        return names
    if columns.task == "forecast" and name is None and texts < set(names):
        # Texts with numbers and times may be the ids of series.
        decision = decide(Facts(_typed(path, load(names))), columns)
        is_panel = isinstance(decision, Refusal) and "id" in decision.fixes
        if is_panel or (isinstance(decision, Roles) and decision.shape is Shape.ELEMENTS):
            return names
    # Without three numbered columns, the table need not be read, and may have bytes.
    is_step = sum(map(bool, map(NUMBERED.fullmatch, names))) > 2
    with suppress(UnfitColumnError):
        # A step of whole numbers looks like a label.
        label = choose(path, schema, columns).label
        is_step &= (
            label not in (None, columns.label) and NUMBERED.fullmatch(label or "") is not None
        )
    if not is_step:
        return []
    facts = Facts(_typed(path, load(names)))
    return names if steps_of(facts, columns, () if name is None else (name,)).columns else []


def _are_rows_named(kinds: Mapping[str, Any], columns: Columns, texts: set[str]) -> bool:
    """Return True if options, or the lack of texts, tell that rows are no whole sequences."""
    # A forecast needs no id, and times of JSON are texts.
    usual = (*TIME_NAMES, *PERIOD_NAMES) if columns.task == "forecast" else ()
    times = {name for name in texts if name.lower() in usual}
    ids = parts_of(columns.id, kinds) if columns.id is not None else ()
    has_time = columns.time is not None and set(parts_of(columns.time, kinds)) <= set(kinds)
    has_features = bool(set(columns.features or ()) & set(kinds) - texts)
    return columns.wide or has_time or has_features or texts == times or len(ids) > 1


def columns_of(path: Path, schema: Any, load: Load, columns: Columns) -> dict[str, Column] | None:
    """Return the typed columns of an Arrow table, or None if a row is a sequence in a list or a
    text.
    """
    names = element_columns(path, schema, load, columns)
    return _typed(path, load(names)) if names else None


def _valid(table: Any) -> Any:
    """Return a table after a test of its buffers, because Arrow reads wrong offsets without one."""
    table.validate(full=True)
    return table


def _are_sentences(table: Any) -> bool:
    """Return True if most texts of a column have several words."""
    texts = _valid(table).column(0).drop_null().to_pylist()
    return 2 * sum(" " in text.strip() for text in texts) > len(texts)


def _typed(path: Path, table: Any) -> dict[str, Column]:
    """Return the columns of an Arrow table; raise a DataError for bytes."""
    if _valid(table).num_rows == 0:
        raise data_error(path, "no rows", "a file with at least one sequence", "check the file")
    columns: dict[str, Column] = {}
    for name in table.column_names:
        if is_bytes(table.column(name).type):
            rule = "a table of texts, numbers and booleans"
            got = f"bytes in the column {quote(name)}"
            raise data_error(path, got, rule, "decode them, e.g. with .str.decode()")
        columns[str(name)] = Typed(table.column(name))
    return columns


def _wide_rows(
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
    ids = ids or {"id": Written(numbers)}
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
    leave = f"leave {argument('wide', value=True, of='Columns')} out"
    fix = f"remove a row, or rename it; if a row is an element, {leave}"
    raise data_error(path, f"the id {quote(twice)} twice", "a file with one row per id", fix)


def _values(
    table: Mapping[str, Column], steps: Steps, inside: npt.NDArray[np.bool_]
) -> dict[str, Column]:
    """Return the entries of the steps that are elements, a column per channel."""
    values: dict[str, Column] = {}
    for channel, names in zip(steps.channels, steps.columns, strict=True):
        name = f"steps from {names[0]}" if steps.are_numbered else f"{names[0]} to {names[-1]}"
        entries = np.stack([_entries(table[name]) for name in names], axis=1)
        values[channel or name] = Written(entries[inside])
    return values


def _with_ends(column: Column) -> Column:
    """Return a column without the marks of rows that end early."""
    return Written(decimals.with_ends(column.entries)) if isinstance(column, Written) else column


def _entries(column: Column) -> Any:
    return column.entries if isinstance(column, Written) else column.words()


def _note_words(
    table: Mapping[str, Column], steps: Steps, inside: npt.NDArray[np.bool_]
) -> list[str]:
    """Return the note about ends of rows that are written, as NaN, and no steps."""
    names = zip(*steps.columns, strict=True)
    blank = [np.all([_entries(table[name]) == "" for name in each], axis=0) for each in names]
    written = ~inside & ~np.stack(blank, axis=1)
    if not written.any():
        return []
    return [note_padding(int(written.any(axis=1).sum()), int(written.sum()))]


def _are_filled(
    table: Mapping[str, Column], steps: Steps, columns: Columns
) -> npt.NDArray[np.bool_]:
    """Return ``(rows, steps)``: where a step is not missing in all of its channels."""
    filled = [
        np.any([_is_filled(table[name], columns) for name in names], axis=0)
        for names in zip(*steps.columns, strict=True)
    ]
    return np.stack(filled, axis=1)


def _is_filled(column: Column, columns: Columns) -> npt.NDArray[np.bool_]:
    if columns.keep_trailing:
        return np.asarray(_entries(column) != "", dtype=np.bool_)
    numbers, odd = column.numbers()
    return odd | ~np.isnan(numbers)


def _whole_rows(
    path: Path, entries: Mapping[str, Column], columns: Columns, roles: Roles, first: int = 0
) -> Records:
    """Read rows that are a text each, with a label and static features, as an Arrow table."""
    arrow = require("pyarrow", "data")
    rows = range(first, first + len(next(iter(entries.values()))))
    check_ends(path, entries, rows)
    check_header_once(path, entries, rows)
    table: dict[str, Any] = {
        name: arrow.array(column.words().tolist(), "string") for name, column in entries.items()
    }
    numeric = {columns.label: "a finite number"} if TASKS[columns.task].label == "numbers" else {}
    words = list(columns.categorical or ())
    for name in columns.static or ():
        if name not in words and name in entries and entries[name].numbers()[1].mean() > 0.5:
            words.append(name)
        elif name not in words:
            numeric[name] = "a number, or a word in a column of words"
    for column, rule in numeric.items():
        if column is not None and column in entries:
            numbers, odd = entries[column].numbers()
            if odd.any():
                row = int(odd.argmax())
                got = f"{quote(entries[column].text(row))} in data row {first + row}"
                fix = "correct it, or remove the row"
                raise data_error(path, f"{got}, column {quote(column)}", f"a file with {rule}", fix)
            table[column] = arrow.array(numbers)
    columns = replace(columns, categorical=tuple(words) or None)
    texts = arrow.table(table)
    chosen = choose(path, texts.schema, columns)
    records = records_of(path, texts.select(chosen.names), chosen, columns, first=first)
    note = f"each row is a sequence, the text of {quote(chosen.sequence)}"
    free = [name for name in entries if name != chosen.id]
    unused = _note_unused(free, records.columns, len(records))
    notes = (note, *filter(None, [roles.note]), *records.notes, *unused)
    return replace(records, notes=notes, label_kinds=None)


def row_piece(path: Path, table: Mapping[str, Column], columns: Columns, roles: Roles) -> Piece:
    """Return the rows of a file with a sequence per row as one piece."""
    count = len(next(iter(table.values())))

    def read(low: int, high: int) -> Records:
        rows = {name: column.take(slice(low, high)) for name, column in table.items()}
        if roles.shape is Shape.TEXTS:
            return _whole_rows(path, rows, _with_texts(columns, roles), roles, low)
        return _wide_rows(path, rows, columns, roles, low)

    return Piece(count, read, (count,), lambda row: f"data row {row}")
