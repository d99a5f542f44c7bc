"""CSV files and other tables in pieces of whole sequences, in constant memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from raglane._utils.messages import quote, require
from raglane.data.assemble.elements import records_of_rows
from raglane.data.assemble.errors import accepted
from raglane.data.assemble.grouping import is_plain
from raglane.data.assemble.pieces import Piece, sift
from raglane.data.assemble.tabular import row_piece
from raglane.data.assemble.times import joined_ids
from raglane.data.columns import Columns
from raglane.data.records import Records
from raglane.data.roles import Facts, Roles, Shape, decide_rows
from raglane.data.roles.rules import with_parts
from raglane.data.sources.csv import (
    check_bytes,
    chunks,
    header_of,
    named_columns,
    plain_tables,
    table_of,
)
from raglane.data.sources.files import data_error
from raglane.data.sources.lines import Start
from raglane.data.typed.arrays import Entries, Integers
from raglane.data.typed.column import Column, TextColumn, concatenated

_Columns = dict[str, Column]


def csv_pieces(path: Path, columns: Columns, start: Start = ()) -> Iterator[Piece]:
    """Yield pieces of whole sequences; a position is a data row.

    A first pass checks whether the rows of each sequence are consecutive. If not, the file is read
    whole, because its last row may belong to its first sequence.
    """
    check_bytes(path)
    rows = next(chunks(path, columns), np.empty((0, 0), dtype=object))
    header = header_of(path, rows, columns)
    columns = with_parts(columns, header)
    # The first rows decide about a row per element; about steps and texts, all rows.
    roles = accepted(path, decide_rows(Facts(named_columns(header, rows[1:])), columns))
    if roles.shape is Shape.ELEMENTS and roles.id:
        tables = partial(plain_tables, path, header, columns)
        survey = _survey(plain_tables(path, header, columns, roles.id), roles.id)
        if survey is None:
            tables = partial(_tables, path, header, columns)
            survey = _survey(tables(), roles.id)
        if survey is not None and survey.are_consecutive:
            file = _PiecewiseFile(path, columns, roles, survey.are_numbers, tables)
            if start:
                # The first rows decide how the others are read.
                for piece in islice(file.pieces(0), 1):
                    deque(sift(piece, []), maxlen=0)
            yield from file.pieces(start[0] if start else 0)
            return
    if not start:
        yield from column_pieces(path, table_of(path, columns).columns, columns)


def _tables(path: Path, header: list[str], columns: Columns) -> Iterator[_Columns | None]:
    """Yield the columns of a file in chunks."""
    for count, rows in enumerate(chunks(path, columns)):
        # The header is a row of the first chunk.
        body = rows[int(count == 0) :]
        if len(body):
            yield named_columns(header, body)


def column_pieces(path: Path, table: Mapping[str, Column], columns: Columns) -> Iterator[Piece]:
    """Yield the sequences of typed columns as one piece."""
    roles = accepted(path, decide_rows(Facts(table), columns))
    if roles.shape is not Shape.ELEMENTS:
        yield row_piece(path, table, columns, roles)
        return
    if not roles.id:
        count = len(next(iter(table.values())))
        yield _series_piece(path, table, columns, roles, np.arange(count))
        return
    if not _count(table):
        raise data_error(path, "no rows", "a file with at least one sequence", "check the file")
    ids = joined_ids([table[name].words() for name in roles.id])
    codes, different = TextColumn(ids).codes()
    order = np.argsort(codes, kind="stable")
    file = _PiecewiseFile(path, columns, roles, all(map(is_plain, different)))
    ordered = {name: column.take(order) for name, column in table.items()}
    yield file.piece(ordered, order, len(order))


def _series_piece(
    path: Path,
    table: Mapping[str, Column],
    columns: Columns,
    roles: Roles,
    rows: Integers,
) -> Piece:
    """Return one series as a piece; its rows can be left out one by one."""
    facts = Facts(table)
    words = [name for name in table if name not in roles.time and facts.share_of_words(name) > 0.5]
    numbers = [name for name in table if name not in (*roles.time, *words)]
    # A row by itself does not tell whether a column has numbers.
    settled = replace(
        columns, categorical=tuple(dict.fromkeys((*(columns.categorical or ()), *words)))
    )

    def read_rows(low: int, high: int) -> Records:
        some = {name: column.take(slice(low, high)) for name, column in table.items()}
        one_by_one = replace(settled, duplicate_times="keep")
        return records_of_rows(path, some, one_by_one, roles, rows[low:high], not numbers)

    def read(low: int, high: int) -> Records:  # noqa: ARG001
        return records_of_rows(path, table, columns, roles, rows)

    def without(bad: list[int]) -> Piece:
        kept = np.delete(np.arange(len(rows)), bad)
        some = {name: column.take(kept) for name, column in table.items()}
        return _series_piece(path, some, columns, roles, rows[kept])

    end = (len(rows),)
    elements = Piece(len(rows), read_rows, end, lambda row: f"data row {rows[row]}")
    return Piece(1, read, end, lambda _: "the series", elements, without)


@dataclass(frozen=True)
class _PiecewiseFile:
    """A file that is read in pieces: the roles of its columns, and whether all ids are numbers."""

    path: Path
    columns: Columns
    roles: Roles
    has_numbers: bool
    tables: Callable[[], Iterator[_Columns | None]] = lambda: iter(())
    # The columns of the first rows, and whether they contain tokens; later rows are read in the
    # same way.
    settled: list[tuple[Columns, bool]] = field(default_factory=list)

    def pieces(self, start: int) -> Iterator[Piece]:
        """Yield pieces from a data row on."""
        for first, table in _whole_sequences(self.tables(), self.roles.id, start):
            numbers = np.arange(first, first + _count(table))
            yield self.piece(table, numbers, first + len(numbers))

    def piece(self, table: Mapping[str, Column], numbers: Integers, end: int) -> Piece:
        """Return a piece of whole sequences; ``numbers`` are those of the rows in the file."""
        starts = _run_starts(table, self.roles.id)
        bounds = np.append(starts, len(numbers))
        ids = _ids_at(table, self.roles.id, starts)

        def place(row: int) -> str:
            return f"data row {numbers[starts[row]]} (id {quote(ids[row])})"

        def read(low: int, high: int) -> Records:
            here = slice(int(bounds[low]), int(bounds[high]))
            rows = {name: column.take(here) for name, column in table.items()}
            columns, is_tokens = self.settled[0] if self.settled else (self.columns, None)
            records = records_of_rows(
                self.path, rows, columns, self.roles, numbers[here], is_tokens
            )
            if not self.settled:
                self.settled.append((records.columns, records.is_tokens))
            return (
                records
                if self.has_numbers
                else replace(records, ids=tuple(map(str, records.ids or ())))
            )

        return Piece(len(starts), read, (end,), place)


def _whole_sequences(
    tables: Iterator[_Columns | None], ids: tuple[str, ...], start: int
) -> Iterator[tuple[int, _Columns]]:
    """Yield data rows from ``start`` on, in runs of whole sequences, each with the number of its
    first row.
    """
    number = 0
    first = start
    held: _Columns | None = None
    for table in tables:
        if held is not None:
            # The last sequence may continue in this table.
            cut = int(_run_starts(held, ids)[-1])
            if cut:
                yield first, _rows(held, 0, cut)
                held = _rows(held, cut, _count(held))
                first = first + cut
        if table is None:
            break
        before = number
        number = number + _count(table)
        if number <= start:
            continue
        rows = _rows(table, max(start - before, 0), _count(table))
        held = rows if held is None else _both(held, rows)
    if held is not None:
        yield first, held


def _count(table: Mapping[str, Column]) -> int:
    return len(next(iter(table.values())))


def _rows(table: _Columns, low: int, high: int) -> _Columns:
    return {name: column.take(slice(low, high)) for name, column in table.items()}


def _both(first: _Columns, second: _Columns) -> _Columns:
    return {name: concatenated([column, second[name]]) for name, column in first.items()}


def _run_starts(table: Mapping[str, Column], ids: tuple[str, ...]) -> Integers:
    """Return 0 and the rows whose id differs from the previous one."""
    codes = Facts({name: table[name] for name in ids}).numbered(*ids)
    return np.concatenate([[0], np.flatnonzero(codes[1:] != codes[:-1]) + 1])


def _ids_at(table: Mapping[str, Column], ids: tuple[str, ...], rows: Integers) -> Entries:
    return joined_ids([table[name].take(rows).words() for name in ids])


class _OrderBySequence(NamedTuple):
    """The order of the rows by sequence: consecutive or not; and ids that are all whole numbers."""

    are_consecutive: bool
    are_numbers: bool


def _survey(tables: Iterator[_Columns | None], ids: tuple[str, ...]) -> _OrderBySequence | None:
    """Look at the ids of all rows; return None for a file that is read in another way."""
    pandas = require("pandas", "data")
    hashes = []
    has_numbers = True
    last = None
    for table in tables:
        if table is None:
            return None
        different = _ids_at(table, ids, _run_starts(table, ids))
        following = different[int(different[0] == last) :]
        last = different[-1]
        has_numbers = has_numbers and all(map(is_plain, following))
        hashes.append(pandas.util.hash_array(following, categorize=False))
    # Eight bytes per sequence. If two ids have the same hash, the file is read whole.
    every = np.sort(np.concatenate(hashes)) if hashes else np.zeros(0, dtype=np.uint64)
    return _OrderBySequence(not bool((every[1:] == every[:-1]).any()), has_numbers)
