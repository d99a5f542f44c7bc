"""Rows of a CSV file, one per element, as records: order, features and labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from raglane._utils.messages import argument, quote
from raglane.data.assemble.errors import accepted, refused
from raglane.data.assemble.grouping import (
    SortedRows,
    check_rows,
    grouped,
    refuse_spaces,
)
from raglane.data.assemble.targets import labels_in, split_targets
from raglane.data.columns import Columns, option
from raglane.data.records import TIME_GAP, Feature, Records, RoleNotes, Targets, as_float32
from raglane.data.roles import Facts, Refusal, Roles
from raglane.data.roles.labels import label_of, one_label
from raglane.data.roles.rules import named_features
from raglane.data.sources.files import data_error
from raglane.data.typed import decimals
from raglane.data.typed.arrays import Array, Bools, Entries, Integers, Values
from raglane.data.typed.column import Column
from raglane.data.typed.names import ID_NAMES, MISSING_WORDS, NO_TIME, TIME_NAMES
from raglane.tasks import TASKS


def records_of_rows(
    path: Path,
    entries: Mapping[str, Column],
    columns: Columns,
    roles: Roles,
    rows: Integers | None = None,
    is_tokens: bool | None = None,
) -> Records:
    """Make records of rows, which have the numbers ``rows`` in the file; their ``columns`` include
    the time column.
    """
    count = len(next(iter(entries.values())))
    rows = np.arange(count) if rows is None else rows
    check_rows(path, entries, rows)
    table = grouped(path, entries, columns, roles, rows)
    named = accepted(path, named_features(columns, list(table.columns)))
    static = named.of_sequences
    free = [name for name in table.columns if name not in (table.id, table.time, *static)]
    label = _label(table, columns, roles, static)
    features = list(named.of_elements)
    left_out: tuple[str, ...] = ()
    if not features:
        features, left_out = _free_features(table, columns, free, label.name)
    read = _features(table, features, columns, is_tokens)
    values, channels = read.values, read.channels
    more = (*read.features, *(_static_feature(table, name, columns) for name in static))
    if columns.time_gaps:
        values, channels = _with_gaps(table, values, channels)
    targets = NO_LABELS if label.name is None else _labels(table, columns, label.name)
    used = _used(table, columns, label.name, features, read, more, targets)
    about = (*label.notes, *left_out, *read.notes)
    notes = (*filter(None, [roles.time_note]), *table.notes, *label.noted, *left_out, *read.notes)
    return Records(
        values,
        table.offsets,
        table.ids,
        channels=channels,
        source=path,
        notes=notes,
        columns=used,
        features=more,
        roles=RoleNotes(roles.notes, about),
        times=None if table.time is None else table.times,
        time_name=table.time,
        **targets._asdict(),
    )


class _Label(NamedTuple):
    """The column of labels, and the notes about it: for the roles, and for the user."""

    name: str | None
    notes: tuple[str, ...]
    noted: tuple[str, ...]


def _label(table: SortedRows, columns: Columns, roles: Roles, static: Sequence[str]) -> _Label:
    """Return the label that was decided, or decide it for rows that are read in pieces."""
    if roles.label is not None or not columns.wants_labels:
        is_named = columns.label is not None
        return _Label(roles.label, roles.about, () if is_named else roles.about)
    ids = () if table.id is None else (table.id,)
    facts = Facts(table.columns)
    others = (table.id, table.time, *static)
    choice = accepted(table.path, label_of(facts, columns, ids, others))
    notes = tuple(filter(None, [choice.note]))
    return _Label(",".join(choice.names), notes, notes if columns.label is None else ())


def _used(
    table: SortedRows,
    columns: Columns,
    label: str | None,
    features: list[str],
    read: _Read,
    more: Sequence[Feature],
    labels: Labels,
) -> Columns:
    """Return the columns with which another file is read in the same way."""
    words = tuple(feature.name for feature in more if not feature.is_numbers)
    if len(features) > 1 and read.values.dtype == object:
        words = (features[0], *words)
    is_ordered = labels.targets is not None and labels.targets.ordered
    return replace(
        columns,
        label=label or columns.label,
        id=table.id,
        time=table.time or columns.time,
        features=tuple(features),
        # A row is one token.
        split=None,
        categorical=tuple(dict.fromkeys((*(columns.categorical or ()), *words))) or None,
        label_split=(columns.label_split or "characters") if is_ordered else None,
    )


def _free_features(
    table: SortedRows, columns: Columns, free: list[str], label: str | None
) -> tuple[list[str], tuple[str, ...]]:
    """Return the columns without another role, and notes on what is left out."""
    free, numbered = _without_row_numbers(table, free)
    free, dated = _without_dates(table, columns, free)
    dated = (*numbered, *dated)
    each = (label, columns.label)
    labels = [name for names in each if names is not None for name in table.label_columns(names)]
    features = [name for name in free if name not in labels]
    if columns.wants_labels:
        return features, dated
    features, words = _without_words(table, features)
    return features, (*dated, *words)


def _without_row_numbers(table: SortedRows, free: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """Leave out a column with the usual name of ids that has another number in each row."""
    usual = [name for name in free if name.lower() in ID_NAMES]
    facts = Facts(table.columns)
    numbers = [name for name in usual if facts.is_whole(name) and facts.is_unique(name)]
    if table.id is None or not numbers or len(numbers) == len(free):
        return free, ()
    note = f"left out, because they number the rows: {', '.join(numbers)}"
    return [name for name in free if name not in numbers], (note,)


def _without_dates(
    table: SortedRows, columns: Columns, free: list[str]
) -> tuple[list[str], tuple[str, ...]]:
    """Leave out columns of dates: as categories, each would be one that no other data has."""
    facts = Facts(table.columns)
    categorical = columns.categorical or ()
    usual = TIME_NAMES if columns.time == NO_TIME else ()
    dated = [
        name
        for name in free
        if name not in categorical
        and (name.lower() in usual or facts.are_dates(name) or facts.are_clocks(name))
    ]
    if not dated or len(dated) == len(free):
        return free, ()
    rows = f"{len(table.rows):,} rows"
    note = f"left out, because they are dates: {', '.join(dated)} ({rows}); name one with {option('time')}"
    return [name for name in free if name not in dated], (note,)


def _without_words(table: SortedRows, features: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """Leave out columns of words, which may be unused labels, if there are columns of numbers."""
    words = [name for name in features if table.numbers(name)[1].any()]
    for name in words:
        # Numbers that cannot be read are no words.
        _check_marks(table, name, table.numbers(name)[1])
    if not words or len(words) == len(features):
        return features, ()
    rest = [name for name in features if name not in words]
    return rest, (f"left out, because they are not numbers: {', '.join(words)}",)


class _Read(NamedTuple):
    """Values, ``(N, C)`` float32 or ``(N,)`` tokens, their channels, categories, and notes."""

    values: Array
    channels: tuple[str, ...]
    features: tuple[Feature, ...]
    notes: tuple[str, ...]


def _features(
    table: SortedRows, names: list[str], columns: Columns, is_tokens: bool | None
) -> _Read:
    """Read the columns of features."""
    if not names:
        raise refused(table.path, _no_feature(columns))
    words = [name for name in names if _are_words(table, name, columns, is_tokens, len(names))]
    numbers = [name for name in names if name not in words]
    if numbers:
        values: Array = np.empty((len(table.rows), len(numbers)), dtype=np.float32)
        for at, name in enumerate(numbers):
            values[:, at] = _as_features(table, name)
        others = words
        notes = [f"features: {', '.join(numbers)}"]
    else:
        first, *others = words
        values = table.words(first)
        fix = "fill it, or remove the row"
        table.check(values == "", first, "a token in each row", fix, "the missing token {}")
        notes = [f"the entries of {quote(first)} are taken as tokens"]
    grouped_numbers = [name for name in numbers if table.columns[name].has_groups]
    if grouped_numbers:
        notes.append(f"marks of thousands are left out: {', '.join(grouped_numbers)}")
    if others:
        notes.append(f"features that are categories: {', '.join(others)}")
    features = tuple(Feature(name, table.words(name)) for name in others)
    return _Read(values, tuple(numbers), features, tuple(notes))


def _no_feature(columns: Columns) -> Refusal:
    fix = f"add one, or name it with {option('features')}"
    rule = "a file with at least one feature column"
    if columns.task == "forecast":
        return Refusal("no feature column", rule, fix)
    fix = f"{fix}; without labels, pass {argument('task', 'forecast')}"
    return Refusal("no feature column", rule, fix, {"task": "forecast"})


def _are_words(
    table: SortedRows, name: str, columns: Columns, is_tokens: bool | None, count: int
) -> bool:
    """Return True for a column of categories, or the tokens of one of ``count`` columns."""
    odd = table.numbers(name)[1]
    is_categorical = name in (columns.categorical or ())
    if odd.any() and not is_categorical:
        _check_marks(table, name, odd)
    if count > 1:
        return _has_words(name, odd, columns, is_tokens is None)
    if is_tokens is not None:
        return is_tokens
    return is_categorical or bool(odd.mean() >= 0.5 or columns.tokens)


def _check_marks(table: SortedRows, name: str, odd: Bools) -> None:
    """Raise a DataError for a number with other marks than the file's."""
    rule = "decimal points, or with one decimal mark per column if the separator is no comma"
    fix = "write points in all numbers, without marks of thousands; or commas, and semicolons between entries"
    fix += f"; without signs such as % and $; or name categories with {option('categorical')}"
    table.check(
        odd & decimals.have_other_marks(table.columns[name].entries[odd].tolist()), name, rule, fix
    )


def _has_words(name: str, odd: Bools, columns: Columns, guess: bool = True) -> bool:
    """Return True if a column is named as categorical, or most of its entries are words."""
    return name in (columns.categorical or ()) or (guess and bool(odd.mean() > 0.5))


def _as_features(table: SortedRows, name: str) -> Values:
    """Convert the numbers of a column; raise a DataError for the first word."""
    numbers, odd = table.numbers(name)
    fix = f"correct it, name the features with {option('features')}"
    fix += f", or those that are categories with {option('categorical')}"
    table.check(odd, name, "a number, or a word in a column of words", fix)
    return as_float32(numbers)


def _static_feature(table: SortedRows, name: str, columns: Columns) -> Feature:
    """Read a column with one value per sequence, which is the same in all its rows."""
    rule = "the same in all rows of a sequence"
    fix = f"correct it, or pass the column as {option('features')}"
    table.check(~table.constant(name), name, rule, fix, after=", after another entry")
    is_words = _has_words(name, table.numbers(name)[1], columns)
    values = table.words(name) if is_words else _as_features(table, name)
    return Feature(name, values[table.offsets[:-1]], per_sequence=True)


def _with_gaps(
    table: SortedRows, values: Array, channels: tuple[str, ...]
) -> tuple[Values, tuple[str, ...]]:
    """Append the time since the previous element as a channel."""
    gaps_option = option("time_gaps", value=True)
    if table.time is None:
        fix = f"name the column with {option('time')}"
        raise data_error(
            table.path, f"no time column for {gaps_option}", "data with a time column", fix
        )
    if values.dtype == object:
        raise data_error(
            table.path,
            f"tokens, and {gaps_option}",
            "a file of numbers, with this option",
            "leave it out",
        )
    gaps = np.diff(table.times, prepend=table.times[:1])
    gaps = (gaps / np.timedelta64(1, "s") if gaps.dtype.kind == "m" else gaps).astype(np.float32)
    gaps[table.offsets[:-1]] = 0
    return np.concatenate([values, gaps[:, None]], axis=1), (*channels, TIME_GAP)


class Labels(NamedTuple):
    """Classes per sequence, classes per element, or targets; the others are None."""

    labels: tuple[str, ...] | None = None
    tags: Entries | None = None
    targets: Targets | None = None


NO_LABELS = Labels()


def _labels(table: SortedRows, columns: Columns, label: str) -> Labels:
    """Read the labels of a task."""
    if TASKS[columns.task].label != "class":
        return Labels(targets=_targets(table, columns, label))
    entries = table.words(label)
    fix = "fill it, or remove the row"
    is_missing = np.isin(entries, MISSING_WORDS)
    table.check(is_missing, label, "a label in each row", fix, "the missing label {}")
    refuse_spaces(table.path, set(entries.tolist()), label)
    if columns.task == "tag":
        return Labels(tags=entries)
    _check_one_label(table, label)
    return Labels(tuple(entries[table.offsets[:-1]].tolist()))


def _check_one_label(table: SortedRows, label: str) -> None:
    """Raise a DataError for the first row whose label differs from that of its sequence."""
    ids = () if table.id is None else (table.id,)
    refusal = one_label(Facts(table.columns), label, ids, table.rows)
    if refusal is not None:
        raise refused(table.path, refusal)


def _targets(table: SortedRows, columns: Columns, label: str) -> Targets:
    """Return a sequence of labels; or numbers or sets of labels, per sequence if constant in each,
    else per element.
    """
    if TASKS[columns.task].label == "sequence":
        _check_one_label(table, label)
        return split_targets(
            table.words(label)[table.offsets[:-1]].tolist(), columns.label_split or "characters"
        )
    names = table.label_columns(label)
    per_element = not all(table.constant(name).all() for name in names)
    rows = np.arange(int(table.offsets[-1])) if per_element else table.offsets[:-1]
    if TASKS[columns.task].label == "set":
        return Targets(labels_in(table.words(label)[rows].tolist()), per_element=per_element)
    values = np.empty((len(rows), len(names)), dtype=np.float64)
    for place, name in enumerate(names):
        numbers, odd = table.numbers(name)
        table.check(
            odd | ~np.isfinite(numbers), name, "a finite number", "correct it, or remove the row"
        )
        values[:, place] = numbers[rows]
    return Targets(values, per_element=per_element, names=tuple(names))
