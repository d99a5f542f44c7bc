"""Rows that are elements, sorted: by sequence, and in each by time."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from raglane._utils.messages import count_of, quote, require
from raglane.data.assemble.errors import refused
from raglane.data.assemble.times import UnreadTime, in_words, joined_ids, times_of
from raglane.data.columns import Columns, option
from raglane.data.records import offsets_of, place_of
from raglane.data.roles import Facts, Refusal, Roles
from raglane.data.roles.rules import MOST_REPEATED, series_columns, taken
from raglane.data.sources.files import data_error
from raglane.data.sources.short_rows import check_ends
from raglane.data.typed.arrays import Array, Bools, Entries, Floats, Integers
from raglane.data.typed.column import Column, TextColumn, Typed, numbers_in
from raglane.data.typed.dates import gaps_in
from raglane.data.typed.names import (
    MISSING_WORDS,
    TIME_NAMES,
)

# A soft hyphen, a space without width, a word joiner, and a byte order mark.
_INVISIBLE = "\u00ad\u200b\u2060\ufeff"
_is_invisible = re.compile(f"[{_INVISIBLE}]")
_has_space = re.compile(rf"[\s{_INVISIBLE}]").search

# The name of the id column of rows that are one series.
SERIES = "series"


@dataclass(frozen=True)
class SortedRows:
    """The rows of a file, sorted by sequence."""

    path: Path
    columns: dict[str, Column]
    # The number of each row in the file, from 0.
    rows: Integers
    offsets: Integers
    ids: tuple[str | int, ...]
    # The column of ids; None for rows that are one series.
    id: str | None
    # The column that orders the rows of a sequence, and its numbers or dates.
    time: str | None
    times: Array
    notes: tuple[str, ...] = ()

    def place(self, row: int) -> str:
        """Return the description of a row."""
        return f"data row {self.rows[row]} (id {quote(self.ids[place_of(self.offsets, row)[0]])})"

    def check(
        self, wrong: Bools, name: str, rule: str, fix: str, got: str = "{}", after: str = ""
    ) -> None:
        """Raise a DataError for the first wrong entry of a column; ``got`` is a format for it."""
        if wrong.any():
            row = int(wrong.argmax())
            entry = got.format(quote(self.columns[name].text(row)))
            got = f"{entry} in {self.place(row)}, column {quote(name)}{after}"
            raise data_error(self.path, got, f"a file with {rule}", fix)

    def constant(self, name: str) -> Bools:
        """Return for each row whether its entry equals that of the first row of its sequence."""
        return self.columns[name].same_as(np.repeat(self.offsets[:-1], np.diff(self.offsets)))

    def words(self, name: str) -> Entries:
        """Return a column as texts."""
        return self.columns[name].words()

    def numbers(self, name: str) -> tuple[Floats, Bools]:
        """Return a column as numbers, and which entries are words."""
        return self.columns[name].numbers()

    def label_columns(self, label: str) -> list[str]:
        """Return the columns of a label: the column of this name, or else its parts between
        commas.
        """
        return [label] if label in self.columns else [name.strip() for name in label.split(",")]


def joined_columns(
    table: Mapping[str, Column], roles: Roles
) -> tuple[dict[str, Column], str | None, str | None]:
    """Return a table with one column of ids and one of times, and the names of these columns."""
    columns = dict(table)
    names: list[str | None] = []
    for parts, is_id in ((roles.id, True), (roles.time, False)):
        name = ",".join(parts) or None
        if len(parts) > 1:
            words = [columns.pop(name).words() for name in parts]
            text = (
                joined_ids(words)
                if is_id
                else np.array([" ".join(row) for row in zip(*words, strict=True)], dtype=object)
            )
            columns = {str(name): TextColumn(text), **columns}
        names.append(name)
    return columns, names[0], names[1]


def grouped(
    path: Path,
    table: Mapping[str, Column],
    columns: Columns,
    roles: Roles,
    rows: Integers,
) -> SortedRows:
    """Sort rows by sequence, in the order of first appearance, and by time if there is a time
    column.
    """
    joined, id_name, time = joined_columns(table, roles)
    codes = np.zeros(len(rows), dtype=np.int64)
    ids = np.array(["0"], dtype=object)
    if id_name is not None:
        codes, ids = joined[id_name].codes()
        _check_joined(path, table, roles, len(ids))
        _check_ids(path, joined[id_name], ids, codes, id_name, rows)
    times = (
        np.arange(len(rows)) if time is None else _times(path, joined[time], time, rows, columns)
    )
    words = [str(word) for word in ids]
    names: tuple[str | int, ...] = (
        tuple(map(int, words)) if all(map(is_plain, words)) else tuple(words)
    )
    offsets = offsets_of(np.bincount(codes, minlength=len(ids)))
    if not _are_sorted(codes, times):
        order = np.lexsort((times, codes))
        joined = _taken(joined, order)
        rows = rows[order]
        times = times[order]
    result = SortedRows(path, joined, rows, offsets, names, id_name, time, times)
    if time is None:
        return replace(result, notes=_unused(columns))
    result = _without_repeats(result, columns, Facts(table), roles)
    if columns.time is None:
        _check_other_times(result, columns)
    return replace(result, notes=(*result.notes, *_gap_notes(result, columns)))


def _are_sorted(codes: Integers, times: Array) -> bool:
    """Return True for rows that are sorted by sequence, and in each by time."""
    before = codes[:-1]
    after = codes[1:]
    if (after < before).any():
        return False
    return not ((times[1:] < times[:-1]) & (after == before)).any()


def _unused(columns: Columns) -> tuple[str, ...]:
    """Return the note about options of times, for rows without a time."""
    names = [name for name in ("time_format", "duplicate_times") if getattr(columns, name)]
    if not names:
        return ()
    return (f"not used, since there is no time column: {', '.join(map(option, names))}",)


def _taken(table: Mapping[str, Column], rows: Integers) -> dict[str, Column]:
    return {name: column.take(rows) for name, column in table.items()}


def _check_joined(path: Path, table: Mapping[str, Column], roles: Roles, count: int) -> None:
    """Raise a DataError if different ids of several columns are one when they are joined."""
    if len(roles.id) > 1 and Facts(table).different(*roles.id) != count:
        got = f"ids of {', '.join(map(quote, roles.id))} that are alike with / between them"
        raise data_error(path, got, "a file whose ids differ", "make one column of them")


def _check_ids(
    path: Path, column: Column, ids: Entries, codes: Integers, name: str, rows: Integers
) -> None:
    blank = np.isin(ids, MISSING_WORDS)
    if blank.any():
        row = int((codes == int(blank.argmax())).argmax())
        got = f"the missing id {quote(column.text(row))} in data row {rows[row]}, column {quote(name)}"
        raise data_error(path, got, "a file with an id in each row", "fill it, or remove the row")
    refuse_spaces(path, set(map(str, ids)), name)


def _times(path: Path, column: Column, name: str, rows: Integers, columns: Columns) -> Array:
    """Return the times of the rows, or raise for one that cannot be read."""
    times = times_of(column, name, columns.time_format)
    if not isinstance(times, UnreadTime):
        return times
    if times.row is None:
        raise refused(path, times.refusal)
    refusal = times.refusal
    raise refused(path, replace(refusal, got=refusal.got.format(row=rows[times.row])))


def _without_repeats(table: SortedRows, columns: Columns, facts: Facts, roles: Roles) -> SortedRows:
    """Keep, merge or refuse rows with the id and the time of the row before."""
    sequence = np.repeat(np.arange(len(table.ids)), np.diff(table.offsets))
    again = (table.times[1:] == table.times[:-1]) & (np.diff(sequence) == 0)
    count = int(again.sum())
    if count == 0:
        return table
    way = columns.duplicate_times
    if way is None and count > MOST_REPEATED * len(table.rows):
        raise refused(table.path, _refused_repeats(table, again, columns, facts, roles))
    share = f"{count:,} of {len(table.rows):,} rows repeat the time of another"
    ways = option("duplicate_times", "mean")
    if way in (None, "keep"):
        note = f"{share} and keep the order of the file ({ways} merges them)"
        return replace(table, notes=(note,))
    starts = np.append(0, np.flatnonzero(~again) + 1)
    merged = {
        name: _mean(column, starts)
        if way == "mean" and name != columns.label
        else column.take(starts)
        for name, column in table.columns.items()
    }
    how = "are merged to the mean" if way == "mean" else "are left out, except the first"
    return SortedRows(
        table.path,
        merged,
        table.rows[starts],
        offsets_of(np.bincount(sequence[starts], minlength=len(table.ids))),
        table.ids,
        table.id,
        table.time,
        table.times[starts],
        (f"{share} and {how}",),
    )


def _mean(column: Column, starts: Integers) -> Column:
    """Return the means of runs of rows of a column of numbers; of another the first entries."""
    numbers, odd = column.numbers()
    if odd.any():
        return column.take(starts)
    present = np.isfinite(numbers)
    sums = np.add.reduceat(np.where(present, numbers, 0), starts)
    counts = np.add.reduceat(present.astype(np.int64), starts)
    with np.errstate(invalid="ignore"):
        means = sums / counts
    arrow = require("pyarrow", "data")
    return Typed(arrow.chunked_array([arrow.array(means)]))


def _refused_repeats(
    table: SortedRows, again: Bools, columns: Columns, facts: Facts, roles: Roles
) -> Refusal:
    row = int(again.argmax()) + 1
    time = str(table.time)
    first = f"the time {quote(table.columns[time].text(row))} again in {table.place(row)}"
    got = f"{first}, as {int(again.sum()):,} of {len(table.rows):,} rows repeat one"
    rule = "a file with one row per time in a sequence"
    keep = f"{option('duplicate_times', 'keep')} keeps them, mean or first merges them"
    keys = series_columns(facts, columns, *roles.time, named=roles.id)
    if keys:
        ids = ",".join(keys[0])
        fix = f"name the ids of the series with {option('id', ids)}, with which no time repeats"
        return Refusal(got, rule, f"{fix}; {keep}", {"id": ids})
    feature = f"if {quote(time)} is a feature, name it with {option('features')}"
    fix = f"remove one of the rows, or correct {quote(time)}; {keep}; {feature}"
    return Refusal(got, rule, fix, {"duplicate_times": "keep"})


def _check_other_times(table: SortedRows, columns: Columns) -> None:
    """Raise a DataError if another column with the name of a time orders the rows differently."""
    same = np.ones(max(len(table.rows) - 1, 0), dtype=np.bool_)
    same[table.offsets[1:-1] - 1] = False
    for name, column in table.columns.items():
        is_usual = name.lower() in TIME_NAMES and name not in taken(columns)
        if name == table.time or not is_usual:
            continue
        times = times_of(column, name, columns.time_format)
        # An unread one is a feature or a label, which is checked later. Of a table of
        # dates, numbers are measured, such as a temperature T.
        if isinstance(times, UnreadTime) or times.dtype.kind != table.times.dtype.kind == "M":
            continue
        if ((times[1:] < times[:-1]) & same).any():
            got = f"the columns {quote(table.time)} and {quote(name)}, which order the rows differently"
            fix = f"name the right one with {option('time')}"
            raise data_error(table.path, got, "a file with one order of the rows", fix)


def _gap_notes(table: SortedRows, columns: Columns) -> tuple[str, ...]:
    gaps = None if columns.time_gaps else gaps_in(table.times, table.offsets)
    if gaps is None:
        return ()
    count, row, step = gaps
    gap_option = option("time_gaps", value=True)
    where = f"the first before {table.place(row)}"
    gaps_text = f"{count_of(count, 'gap')} in steps of {in_words(step)}, {where}"
    return (f"{gaps_text}; {gap_option} makes the time between rows a feature",)


def refuse_spaces(path: Path, words: set[str], name: str) -> None:
    """Raise a DataError for two words of a column that differ only by white space or invisible
    characters.
    """
    first = dict[str, str]()
    for word in sorted(filter(_has_space, words)):
        plain = " ".join(_is_invisible.sub("", word).split())
        other = plain if plain in words else first.setdefault(plain, word)
        if other != word:
            got = f"{quote(word)} and {quote(other)} in column {quote(name)}"
            rule = "a file whose ids and labels differ not only by white space"
            raise data_error(path, got, rule, "write them in one way")


def is_plain(word: str) -> bool:
    """Return True for the canonical decimal form of a whole number of at most 18 digits."""
    return word.isascii() and word.isdigit() and (word == "0" or word[0] != "0") and len(word) < 19


def check_rows(path: Path, table: Mapping[str, Column], rows: Sequence[int] | Integers) -> None:
    """Raise a DataError for a row that lacks its last entries, or repeats the header; ``rows`` are
    the numbers of the rows in the file.
    """
    check_ends(path, table, rows)
    check_header_once(path, table, rows)


def check_header_once(
    path: Path, table: Mapping[str, Column], rows: Sequence[int] | Integers
) -> None:
    """Raise a DataError for a row that repeats the header, which happens if files were
    concatenated.
    """
    is_word = numbers_in(np.array(list(table), dtype=object))[1]
    if not is_word.any():
        return
    name = list(table)[int(is_word.argmax())]
    for row in np.flatnonzero(_equals(table[name], name)).tolist():
        if all(column.text(row) == header for header, column in table.items()):
            got = f"the header again in data row {rows[row]}"
            raise data_error(path, got, "a file with one header", "remove the row")


def _equals(column: Column, text: str) -> Bools:
    """Return which entries are a text, which is no number."""
    if isinstance(column, TextColumn):
        return np.asarray(column.entries == text, dtype=np.bool_)
    odd = column.numbers()[1]
    if not odd.any():
        return odd
    codes, different = column.codes()
    return np.asarray(different == text, dtype=np.bool_)[codes]
