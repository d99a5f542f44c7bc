"""Records from columns of texts, for CSV files and for Arrow tables without lists.

A row is an element, a sequence with a column per step, or a text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from raglane._utils.messages import argument, quote, quote_all, require
from raglane.data import decimals
from raglane.data.decimals import Entries
from raglane.data.formats.arrow import arrow_types, is_list, is_text
from raglane.data.formats.base import (
    ID_NAMES,
    PERIOD_NAMES,
    ROLE_NAMES,
    TIME_NAMES,
    check_named,
    choose_column,
    columns_argument,
    data_error,
    id_column,
    is_named,
)
from raglane.data.formats.csv_table import check_header_once, numbers_in, records_of_rows
from raglane.data.formats.pieces import Piece
from raglane.data.formats.short_rows import check_ends, note_ends
from raglane.data.formats.table import choose, kinds_of, records_of
from raglane.data.records import Columns, Records
from raglane.errors import UnfitColumnError
from raglane.tasks import TASKS

_ID_NAMES = (*ID_NAMES, "sequence", "series", "case")

# A column that may be a step: a prefix and a number.
NUMBERED = re.compile(r"(.*?)(\d{1,6})")

Load = Callable[[list[str]], Any]  # returns an Arrow table with some of its columns

# Names of a column of texts in a file without ids.
_TEXTS = ("text", "sentence", "document", "question", "review")


def read_table(
    path: Path,
    schema: Any,
    load: Load,
    columns: Columns,
    lines: npt.NDArray[np.int64] | None = None,
) -> Records:
    """Read an Arrow table; ``lines`` numbers its rows, for messages."""
    if (entries := entries_of(path, schema, load, columns)) is not None:
        records = read_entries(path, entries, columns)
        others = ", ".join(name for name in kinds_of(path, schema) if name not in entries)
        return (
            replace(records, notes=(f"left out, nested or unnamed: {others}", *records.notes))
            if others
            else records
        )
    chosen = choose(path, schema, columns)
    return records_of(path, load(chosen.names), chosen, columns, lines)


def read_entries(path: Path, entries: dict[str, Entries], columns: Columns) -> Records:
    """Read columns of texts in long form, from a file or a table."""
    present = list(entries)
    text = text_column(path, columns, present)
    steps = step_columns(path, columns, entries)
    if text is not None:
        return _whole_rows(path, entries, replace(columns, sequence=text))
    if steps or columns.wide:
        return _wide_rows(path, entries, columns, steps)
    name, id_notes = id_column(path, columns, present, present, _ID_NAMES)
    if name is None and columns.task == "forecast":
        # A forecast needs no label, so the rows of a file without ids are one series.
        name = "series"
        id_notes = ("no id column: all rows are one series",)
        entries = {name: np.full(len(next(iter(entries.values()))), "0", dtype=object), **entries}
    name, id_notes = (name, id_notes) if name in entries else id_column_of(path, columns, present)
    records = records_of_rows(path, entries, columns, name)
    # A guessed time column is not required of other files, nor is an id column.
    used = replace(records.columns, time=columns.time, id=name if name in present else None)
    return replace(records, notes=(*id_notes, *records.notes), columns=used)


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
    # A forecast needs no id, and times of JSON are texts.
    times = {
        name
        for name in texts
        if columns.task == "forecast" and name.lower() in (*TIME_NAMES, *PERIOD_NAMES)
    }
    if (
        columns.wide
        or columns.time in kinds
        or set(columns.features or ()) & set(kinds) - texts
        or texts == times
    ):
        return names
    # Texts called "sequence" are sequences, such as those of genes.
    eligible = [name for name in names if name not in texts or name.lower() != "sequence"]
    name, _ = id_column(path, columns, names, eligible, _ID_NAMES)
    ids = None if name is None else _valid(load([name])).column(0)
    if ids is not None:
        ids = ids.cast(getattr(ids.type, "storage_type", ids.type))  # Arrow does not compare UUIDs
    # Several texts may have one id, e.g. the reviews of a user.
    documents = texts.intersection(
        name for name in names if name.lower() in (*ROLE_NAMES["sequence"], *_TEXTS)
    )
    if (
        ids is not None
        and len(ids.unique()) < len(ids)
        and not any(_are_sentences(load([own])) for own in documents)
    ):
        return names
    # Without three numbered columns, the table need not be read, and may have bytes.
    is_step = sum(map(bool, map(NUMBERED.fullmatch, names))) > 2
    with suppress(UnfitColumnError):
        # A step of whole numbers looks like a label.
        label = choose(path, schema, columns).label
        is_step &= (
            label not in (None, columns.label) and NUMBERED.fullmatch(label or "") is not None
        )
    return names if is_step and step_columns(path, columns, _written(path, load(names))) else []


def entries_of(path: Path, schema: Any, load: Load, columns: Columns) -> dict[str, Entries] | None:
    """Return the entries of an Arrow table as texts, or None if a row is a sequence in a list or a
    text.
    """
    names = element_columns(path, schema, load, columns)
    return _written(path, load(names)) if names else None


def _valid(table: Any) -> Any:
    """Return a table after a test of its buffers, because Arrow reads wrong offsets without one."""
    table.validate(full=True)
    return table


def _are_sentences(table: Any) -> bool:
    """Return True if most texts of a column have several words."""
    texts = _valid(table).column(0).drop_null().to_pylist()
    return 2 * sum(" " in text.strip() for text in texts) > len(texts)


def _written(path: Path, table: Any) -> dict[str, Entries]:
    """Return the entries of an Arrow table as texts."""
    if _valid(table).num_rows == 0:
        raise data_error(path, "no rows", "a file with at least one sequence", "check the file")
    entries = {}
    for name in table.column_names:
        if re.match(
            r"(dictionary<values=)?(large_|fixed_size_)?binary(_view)?\b",
            str(table.column(name).type),
        ):
            rule = "a table of texts, numbers and booleans"
            raise data_error(
                path,
                f"bytes in the column {quote(name)}",
                rule,
                "decode them, e.g. with .str.decode()",
            )
        values = [
            "" if value is None or value != value else value
            for value in table.column(name).to_pylist()
        ]
        words = [
            str(value.total_seconds() if isinstance(value, timedelta) else value)
            for value in values
        ]
        entries[str(name)] = np.array(words, dtype=object)
    return entries


def text_column(path: Path, columns: Columns, present: list[str]) -> str | None:
    """Return the column of texts if each row is a whole sequence, or None if there are ids."""
    if columns.sequence is not None:
        return columns.sequence
    texts = [name for name in present if name.lower() in _TEXTS]
    id_name, _ = id_column(path, columns, present, present, _ID_NAMES)
    if (
        id_name is None
        and len(texts) != 1
        and TASKS[columns.task].label == "sequence"
        and columns.features is None
    ):
        others = (columns.label, *(columns.static or ()))
        others = others if columns.label is not None else (*others, *ROLE_NAMES["label"])
        free = [name for name in present if name not in others]
        return choose_column(path, "sequence", free, "column of texts", present)[0]
    return texts[0] if id_name is None and len(texts) == 1 else None


def id_column_of(path: Path, columns: Columns, present: list[str]) -> tuple[str, tuple[str, ...]]:
    """Return the id column and notes; raise a DataError without one."""
    name, notes = id_column(path, columns, present, present, _ID_NAMES)
    if name is None:
        got = f"no id column among {quote_all(present)}"
        rule = f"a file with a column of ids, called {', '.join(_ID_NAMES)}"
        texts = f"if each row is a text, name its column with {columns_argument('sequence')}"
        series = f"if all rows are one series, pass {columns_argument('task', 'forecast')}"
        raise data_error(
            path, got, rule, f"name it with {columns_argument('id')}; {texts}; {series}"
        )
    return name, notes


def step_columns(path: Path, columns: Columns, entries: Mapping[str, Entries]) -> list[str]:
    """Return the columns that are the steps of rows, if each row is a sequence of numbers; else
    [].
    """
    named = list(columns.features or ()) if columns.wide else []
    start = NUMBERED.fullmatch(named[0]) if len(named) == 1 else None
    if named and start is None:
        return named
    id_name, _ = id_column(path, columns, entries, entries, _ID_NAMES)
    roles = {id_name, columns.label, columns.time, *(columns.static or ())}
    free = [
        name for name in entries if name not in roles and name.lower() not in ROLE_NAMES["label"]
    ]
    found = sorted(
        (match[1], int(match[2]), name) for name in free if (match := NUMBERED.fullmatch(name))
    )
    if start is not None:
        later = {number: name for prefix, number, name in found if prefix == start[1]}
        places = range(
            int(start[2]), max(later, default=-1) + 1
        )  # other data may have more steps, or fewer
        return [
            later.get(place, f"{start[1]}{place:0{len(start[2])}}") for place in places
        ] or named
    steps = [name for _, _, name in found]
    numbered = [(found[0][0], found[0][1] + place) for place in range(len(found))]
    is_numbered = len(found) > 2 and numbered == [(prefix, number) for prefix, number, _ in found]
    if not columns.wide:
        is_chosen = columns.features or columns.sequence or columns.time
        has_times = any(name.lower() in TIME_NAMES for name in entries)
        is_wide = (
            columns.task != "forecast"
            if id_name is None
            else len(set(entries[id_name])) == len(entries[id_name])
        )
        if not is_numbered or is_chosen or has_times or not is_wide:
            return []
    # A step with a word by mistake is refused later.
    most = 0.5 if columns.wide and is_numbered else 0.0
    numbers = [
        name
        for name in (steps if is_numbered else free)
        if numbers_in(entries[name])[1].mean() <= most
    ]
    return numbers if columns.wide or numbers == steps else []


def _wide_rows(
    path: Path, entries: dict[str, Entries], columns: Columns, steps: list[str], first: int = 0
) -> Records:
    """Read rows that are a sequence each, with a step per column; empty entries at the end of a row
    are no steps.
    """
    for name in steps:
        check_named(path, "features", name, entries)
    leave = f"leave {argument('wide', value=True, of='Columns')} out"
    if not steps:
        rule = "a file whose columns of numbers are steps"
        raise data_error(path, "no column of numbers", rule, f"check the file, or {leave}")
    short = note_ends(entries)
    entries = {name: decimals.with_ends(entry) for name, entry in entries.items()}
    table = np.stack([entries[name] for name in steps], axis=1)
    count = len(table)
    filled = table != ""
    lengths = np.maximum(np.where(filled.any(1), len(steps) - filled[:, ::-1].argmax(1), 0), 1)
    rows = np.repeat(np.arange(count), lengths)
    id_name, notes = id_column(path, columns, entries, entries, _ID_NAMES)
    if id_name is not None and len(set(entries[id_name])) < count:
        twice = Counter(entries[id_name].tolist()).most_common(1)[0][0]
        fix = f"remove a row, or rename it; if a row is an element, {leave}"
        raise data_error(path, f"the id {quote(twice)} twice", "a file with one row per id", fix)
    numbers = np.array([str(row) for row in range(first, first + count)], dtype=object)
    own = replace(columns, features=tuple(steps[:1]), wide=True)
    is_numbered = (
        len(columns.features or steps[:1]) == 1 and step_columns(path, own, entries) == steps
    )
    span = f"{steps[0]} to {steps[-1]}"
    value, named = (f"steps from {steps[0]}", own.features) if is_numbered else (span, tuple(steps))
    long = {id_name or "id": (numbers if id_name is None else entries[id_name])[rows]}
    long[value] = table[np.arange(len(steps)) < lengths[:, None]]
    long |= {name: entry[rows] for name, entry in entries.items() if name not in (*steps, id_name)}
    records = records_of_rows(
        path, long, replace(columns, features=(value,), time=None), id_name or "id", rows + first
    )
    note = f"each row is a sequence, whose steps are the columns {span}"
    used = replace(records.columns, features=named, time=columns.time, id=columns.id, wide=True)
    return replace(records, notes=(*notes, note, *short, *records.notes[1:]), columns=used)


def _whole_rows(
    path: Path, entries: dict[str, Entries], columns: Columns, first: int = 0
) -> Records:
    """Read rows that are a text each, with a label and static features, as an Arrow table."""
    arrow = require("pyarrow", "data")
    rows = range(first, first + len(next(iter(entries.values()))))
    check_ends(path, entries, rows)
    check_header_once(path, entries, rows)
    table: dict[str, Any] = {
        name: arrow.array(entry.tolist(), "string") for name, entry in entries.items()
    }
    numeric = {columns.label: "a finite number"} if TASKS[columns.task].label == "numbers" else {}
    words = list(columns.categorical or ())
    for name in columns.static or ():
        if name not in words and name in entries and numbers_in(entries[name])[1].mean() > 0.5:
            words.append(name)
        elif name not in words:
            numeric[name] = "a number, or a word in a column of words"
    for column, rule in numeric.items():
        if column is not None and column in entries:
            numbers, odd = numbers_in(entries[column])
            if odd.any():
                row = int(odd.argmax())
                got = f"{quote(entries[column][row])} in data row {first + row}"
                fix = "correct it, or remove the row"
                raise data_error(path, f"{got}, column {quote(column)}", f"a file with {rule}", fix)
            table[column] = arrow.array(numbers)
    columns = replace(columns, categorical=tuple(words) or None)
    texts = arrow.table(table)
    chosen = choose(path, texts.schema, columns)
    records = records_of(path, texts.select(chosen.names), chosen, columns, first=first)
    note = f"each row is a sequence, the text of {quote(chosen.sequence)}"
    return replace(records, notes=(note, *records.notes), label_kinds=None)


def row_piece(path: Path, entries: dict[str, Entries], columns: Columns, steps: list[str]) -> Piece:
    """Return the rows of a file with a sequence per row as one piece."""
    count = len(next(iter(entries.values())))

    def read(low: int, high: int) -> Records:
        rows = {name: entry[low:high] for name, entry in entries.items()}
        is_text = columns.sequence is not None
        return (
            _whole_rows(path, rows, columns, low)
            if is_text
            else _wide_rows(path, rows, columns, steps, low)
        )

    return Piece(count, read, (count,), lambda row: f"data row {row}")
