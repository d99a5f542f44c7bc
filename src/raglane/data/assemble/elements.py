"""Rows of a CSV file, one per element, as records: order, features and labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from raglane._utils.messages import argument, quote, quote_all
from raglane.data.assemble.arrow import labels_in, split_targets
from raglane.data.assemble.grouping import (
    MISSING_WORDS,
    SortedRows,
    check_header_once,
    grouped,
    refuse_spaces,
)
from raglane.data.assemble.lists import feature_columns
from raglane.data.records import (
    TIME_GAP,
    Columns,
    Feature,
    Records,
    RoleNotes,
    Targets,
    as_float32,
    place_of,
)
from raglane.data.roles import Facts, Refusal, Roles
from raglane.data.roles.rules import NO_TIME, ROLE_NAMES, TIME_NAMES, option
from raglane.data.sources.files import (
    check_named,
    choose_column,
    columns_argument,
    data_error,
    empty_label,
    refused,
)
from raglane.data.sources.short_rows import check_ends
from raglane.data.typed import decimals
from raglane.data.typed.column import Bools, Column, Integers, Written
from raglane.data.typed.decimals import Entries
from raglane.errors import UnfitColumnError
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
    check_ends(path, entries, rows)
    check_header_once(path, entries, rows)
    table = grouped(path, entries, columns, roles, rows)
    id_name = ",".join(roles.id) or None
    named, static = feature_columns(path, columns, table.columns)
    free = [name for name in table.columns if name not in (id_name, table.time, *static)]
    label, notes = _choose_label(table, columns, free)
    features = list(named)
    if not features:
        features, left_out = _free_features(table, columns, free, label)
        notes = (*notes, *left_out)
    values, channels, more, feature_notes = _features(table, features, columns, is_tokens)
    more = (*more, *(_static_feature(table, name, columns) for name in static))
    if columns.time_gaps:
        values, channels = _with_gaps(table, values, channels)
    classes, tags, targets = (None, None, None) if label is None else _labels(table, columns, label)
    words = tuple(feature.name for feature in more if not feature.is_numbers)
    if len(features) > 1 and values.dtype == object:
        words = (features[0], *words)
    used = replace(
        columns,
        label=label or columns.label,
        id=id_name,
        time=table.time or columns.time,
        features=tuple(features),
        # A row is one token.
        split=None,
        categorical=tuple(dict.fromkeys((*(columns.categorical or ()), *words))) or None,
        label_split=None
        if targets is None or not targets.ordered
        else columns.label_split or "characters",
    )
    about = (*notes, *feature_notes)
    if columns.wants_labels and columns.label is not None:
        about = (f"label column: {quote(columns.label)} (named)", *about)
    notes = (*filter(None, [roles.time_note]), *table.notes, *notes, *feature_notes)
    records = Records(
        values, table.offsets, table.ids, classes, tags, channels, path, notes, used, targets, more
    )
    return replace(records, roles=RoleNotes(roles.notes, about))


def _choose_label(
    table: SortedRows, columns: Columns, free: list[str]
) -> tuple[str | None, tuple[str, ...]]:
    """Return the label column (None if the task has no label) and notes for the user."""
    path = table.path
    if not columns.wants_labels:
        return None, ()
    if columns.label is not None:
        for name in table.label_columns(columns.label):
            check_named(path, "label", name, table.columns)
        return columns.label, ()
    _refuse_empty_label(table, free)
    free = [name for name in free if name not in (columns.features or ())]
    if TASKS[columns.task].label == "numbers":
        fix = (
            f"name it with {columns_argument('label')}; several, as in 'x,y', are learned together"
        )
        rule = "a file with a named label column, because any column of numbers may be the label"
        raise UnfitColumnError(
            f"{path}", f"no label column named among {quote_all(table.columns)}", rule, fix
        )
    kind = "column of words, or of integers"
    candidates = free
    if columns.task == "classify":
        kind += ", the same in all rows of a sequence"
        candidates = [name for name in free if table.constant(name).all()]
    numbers = {name: table.numbers(name) for name in candidates}
    words = [name for name in candidates if numbers[name][1].any()]
    finite = [name for name in candidates if np.isfinite(numbers[name][0]).all()]
    integers = [name for name in finite if (np.rint(numbers[name][0]) == numbers[name][0]).all()]
    if columns.task == "classify" and not words:
        # Integers may be something else than the label, if a column with the name of one is nearly
        # a label.
        _check_almost_constant(
            table, [name for name in free if not integers or name.lower() in ROLE_NAMES["label"]]
        )
    label, note = choose_column(path, "label", words or integers, kind, table.columns)
    return label, (note,)


def _refuse_empty_label(table: SortedRows, names: list[str]) -> None:
    """Raise a DataError if all columns with the name of a label are empty, so that another column
    would be taken.
    """
    labels = [name for name in names if name.lower() in ROLE_NAMES["label"]]
    if labels and all(np.isin(table.words(name), MISSING_WORDS).all() for name in labels):
        raise empty_label(table.path, labels[0])


def _check_almost_constant(table: SortedRows, names: list[str]) -> None:
    """Raise a DataError for a column of words that has the name of a label, or is constant in most
    sequences.
    """
    count = len(table.ids)
    sequence = np.repeat(np.arange(count), np.diff(table.offsets))
    changing = {
        name: len(np.unique(sequence[~table.constant(name)]))
        for name in names
        if table.numbers(name)[1].any()
    }
    for name in sorted(changing, key=lambda name: changing[name])[:1]:
        if 2 * changing[name] <= count or name.lower() in ROLE_NAMES["label"]:
            _check_one_label(table, name)


def _check_one_label(table: SortedRows, name: str) -> None:
    """Raise a DataError for the first row whose label differs from that of its sequence."""
    differs = ~table.constant(name)
    if differs.any():
        row = int(differs.argmax())
        first = table.columns[name].text(int(table.offsets[place_of(table.offsets, row)[0]]))
        fix = f"correct it, or pass {columns_argument('task', 'tag')} for a label per row"
        rule = "one label in all rows of a sequence"
        after = f", after {quote(first)}"
        table.check(differs, name, rule, fix, "the label {}", after)


def _free_features(
    table: SortedRows, columns: Columns, free: list[str], label: str | None
) -> tuple[list[str], tuple[str, ...]]:
    """Return the columns without another role, and notes on what is left out."""
    free, dated = _without_dates(table, columns, free)
    each = (label, columns.label)
    labels = [name for names in each if names is not None for name in table.label_columns(names)]
    features = [name for name in free if name not in labels]
    if columns.wants_labels:
        return features, dated
    features, words = _without_words(table, features)
    return features, (*dated, *words)


def _marked(column: Column, odd: Bools) -> list[str]:
    """Return the entries that are no numbers, with the decimal marks of a CSV file."""
    entries = column.entries if isinstance(column, Written) else column.words()
    return list(entries[odd].tolist())


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
    if not words or len(words) == len(features):
        return features, ()
    rest = [name for name in features if name not in words]
    return rest, (f"left out, because they are not numbers: {', '.join(words)}",)


def _features(
    table: SortedRows, names: list[str], columns: Columns, is_tokens: bool | None
) -> tuple[npt.NDArray[Any], tuple[str, ...], tuple[Feature, ...], tuple[str, ...]]:
    """Return values, ``(N, C)`` float32 or ``(N,)`` tokens, their channels, features of categories,
    and notes.
    """
    if not names:
        fix = f"add one, or name it with {columns_argument('features')}"
        rule = "a file with at least one feature column"
        fixes = {}
        if columns.task != "forecast":
            fix = f"{fix}; without labels, pass {argument('task', 'forecast')}"
            fixes = {"task": "forecast"}
        raise refused(table.path, Refusal("no feature column", rule, fix, fixes))
    numbers: dict[str, npt.NDArray[np.float32]] = {}
    words: list[str] = []
    for name in names:
        column, odd = table.numbers(name)
        if odd.any() and name not in (columns.categorical or ()):
            rule = (
                "decimal points, or with one decimal mark per column if the separator is no comma"
            )
            fix = "write points in all numbers, without marks of thousands; or commas, and semicolons between entries"
            fix += f"; without signs such as % and $; or name categories with {columns_argument('categorical')}"
            table.check(
                odd & decimals.have_other_marks(_marked(table.columns[name], odd)), name, rule, fix
            )
        has_words = _has_words(name, odd, columns, is_tokens is None)
        if len(names) == 1:
            has_words = (
                has_words or bool(odd.mean() >= 0.5 or columns.tokens)
                if is_tokens is None
                else is_tokens
            )
        if has_words:
            words.append(name)
        else:
            numbers[name] = _as_features(table, name, column, odd)
    if not numbers:
        first, *others = words
        values = table.words(first)
        channels = tuple[str, ...]()
        table.check(
            values == "",
            first,
            "a token in each row",
            "fill it, or remove the row",
            "the missing token {}",
        )
        notes = [f"the entries of {quote(first)} are taken as tokens"]
    else:
        values = np.stack(list(numbers.values()), axis=1)
        channels = tuple(numbers)
        others = words
        notes = [f"features: {', '.join(numbers)}"]
    if others:
        notes.append(f"features that are categories: {', '.join(others)}")
    return (
        values,
        channels,
        tuple(Feature(name, table.words(name)) for name in others),
        tuple(notes),
    )


def _has_words(name: str, odd: Bools, columns: Columns, guess: bool = True) -> bool:
    """Return True if a column is named as categorical, or most of its entries are words."""
    return name in (columns.categorical or ()) or (guess and bool(odd.mean() > 0.5))


def _as_features(
    table: SortedRows, name: str, numbers: npt.NDArray[np.float64], odd: Bools
) -> npt.NDArray[np.float32]:
    """Convert the numbers of a column; raise a DataError for the first word."""
    fix = f"correct it, name the features with {columns_argument('features')}"
    fix += f", or those that are categories with {columns_argument('categorical')}"
    table.check(odd, name, "a number, or a word in a column of words", fix)
    return as_float32(numbers)


def _static_feature(table: SortedRows, name: str, columns: Columns) -> Feature:
    """Read a column with one value per sequence, which is the same in all its rows."""
    rule = "the same in all rows of a sequence"
    fix = f"correct it, or pass the column as {columns_argument('features')}"
    table.check(~table.constant(name), name, rule, fix, after=", after another entry")
    numbers, odd = table.numbers(name)
    values = (
        table.words(name)
        if _has_words(name, odd, columns)
        else _as_features(table, name, numbers, odd)
    )
    return Feature(name, values[table.offsets[:-1]], per_sequence=True)


def _with_gaps(
    table: SortedRows, values: npt.NDArray[Any], channels: tuple[str, ...]
) -> tuple[npt.NDArray[np.float32], tuple[str, ...]]:
    """Append the time since the previous element as a channel."""
    option = argument("time_gaps", value=True, of="Columns")
    if table.time is None:
        fix = f"name the column with {columns_argument('time')}"
        raise data_error(table.path, f"no time column for {option}", "data with a time column", fix)
    if values.dtype == object:
        raise data_error(
            table.path,
            f"tokens, and {option}",
            "a file of numbers, with this option",
            "leave it out",
        )
    gaps = np.diff(table.times, prepend=table.times[:1])
    gaps = (gaps / np.timedelta64(1, "s") if gaps.dtype.kind == "m" else gaps).astype(np.float32)
    gaps[table.offsets[:-1]] = 0
    return np.concatenate([values, gaps[:, None]], axis=1), (*channels, TIME_GAP)


def _labels(
    table: SortedRows, columns: Columns, label: str
) -> tuple[tuple[str, ...] | None, Entries | None, Targets | None]:
    """Return classes per sequence, classes per element, or targets; the others are None."""
    if TASKS[columns.task].label != "class":
        return None, None, _targets(table, columns, label)
    entries = table.words(label)
    fix = "fill it, or remove the row"
    table.check(
        np.isin(entries, MISSING_WORDS), label, "a label in each row", fix, "the missing label {}"
    )
    refuse_spaces(table.path, set(entries.tolist()), label)
    if columns.task == "tag":
        return None, entries, None
    _check_one_label(table, label)
    return tuple(entries[table.offsets[:-1]].tolist()), None, None


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
