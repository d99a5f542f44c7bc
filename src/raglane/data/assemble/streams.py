"""The pieces of each format, from a position on, in constant memory if the format allows it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from raglane._utils.messages import require
from raglane.data.assemble.csv_pieces import column_pieces
from raglane.data.assemble.errors import accepted
from raglane.data.assemble.lists import records_of
from raglane.data.assemble.opened import Declared, Opened, Tabular, Texts, read_as
from raglane.data.assemble.pieces import Piece, line_pieces, sift
from raglane.data.columns import Columns
from raglane.data.records import Records
from raglane.data.roles import Facts, Roles, Shape, decide_rows
from raglane.data.sources import ipc, jsonl, text, ts
from raglane.data.sources.files import BYTES, ROWS, check_readable, data_error, decode
from raglane.data.sources.lines import Line, Start, lines_of
from raglane.data.sources.table import SourceTable, whole_table
from raglane.data.sources.text import Lines

# The number of rows that decide whether a row of JSON is an element.
_FIRST = 10_000


def decided(path: Path, table: SourceTable, columns: Columns) -> Roles:
    """Return the roles of a table, without the label of rows that are elements."""
    facts = Facts(table.columns, table.kinds, table.count)
    return accepted(path, decide_rows(facts, columns))


def opened_pieces(opened: Opened, columns: Columns, start: Start) -> Iterator[Piece]:
    """Yield the pieces of a parsed file; a position is a row."""
    if not isinstance(opened, Tabular):
        return
    yield from table_pieces(opened.table, opened.told(columns), start)


def table_pieces(table: SourceTable, columns: Columns, start: Start) -> Iterator[Piece]:
    """Yield the pieces of a table in memory; a position is a row."""
    roles = decided(table.path, table, columns)
    if roles.shape is not Shape.LISTS:
        facts = Facts(table.columns, table.kinds, table.count)
        cells = {name: table.columns[name] for name in facts.cells(columns)}
        yield from () if start else column_pieces(table.path, cells, columns)
        return
    content = table.load(roles.names)
    for row, rows in ipc.slices(content):
        if not start or row >= start[0]:
            yield table_piece(table.path, rows, roles, columns, row, row + rows.num_rows)


def table_piece(
    path: Path, table: Any, roles: Roles, columns: Columns, row: int, end: int
) -> Piece:
    """Return the piece of a table that begins at a row of its file and ends at position ``end``."""

    def records(first: int, last: int) -> Records:
        rows = table.select(roles.names).slice(first, last - first)
        with ipc.readable(path, "column"):
            result = records_of(path, rows, roles, columns, first=row + first)
        # Later rows and files require the id column, even if it was guessed.
        return replace(result, columns=replace(result.columns, id=",".join(roles.id) or None))

    return Piece(table.num_rows, records, (end,), lambda place: f"row {row + place}")


def arrow_pieces(path: Path, columns: Columns, start: Start = ()) -> Iterator[Piece]:
    """Yield the pieces of an Arrow file or a converted folder; a position is a row."""
    first = 0
    files, told, description = ipc.shards_of(path, columns)
    columns = replace(columns, **told)
    kinds = description.get("label_kinds")
    for shard, expected in files:
        content = ipc.table_of(shard, expected)
        table = whole_table(shard, content)
        with ipc.readable(shard, "Arrow"):
            roles = decided(shard, table, columns)
        if roles.shape is not Shape.LISTS:
            yield from table_pieces(table, columns, start)
            return
        for row, rows in ipc.slices(content):
            end = first + row + rows.num_rows
            if not start or first + row >= start[0]:
                with ipc.readable(shard, "Arrow"):
                    rows.validate(full=True)
                piece = table_piece(shard, rows, roles, columns, row, end)
                yield piece if kinds is None else _with_kinds(piece, tuple(kinds))
        first += content.num_rows


def _with_kinds(piece: Piece, kinds: tuple[str, ...]) -> Piece:
    """Return a piece whose labels have the kinds that a converted folder has stored."""

    def read(first: int, last: int) -> Records:
        return replace(piece.read(first, last), label_kinds=kinds)

    return replace(piece, read=read)


def parquet_pieces(path: Path, columns: Columns, start: Start = ()) -> Iterator[Piece]:
    """Yield pieces of row groups; a position is a row."""
    arrow = require("pyarrow", "data")
    check_readable(path)
    # By default whole columns, of all row groups, are in memory at once.
    small = {"pre_buffer": False, "buffer_size": 1 << 20}
    with ipc.readable(path, "Parquet"), ipc.parquet_file(path, path, **small) as file:
        table = ipc.parquet_table(path, file)
        roles = decided(path, table, columns)
        if roles.shape is not Shape.LISTS:
            yield from table_pieces(table, columns, start)
            return
        row = 0
        for number in range(file.metadata.num_row_groups):
            group = file.metadata.row_group(number)
            if start and row + group.num_rows <= start[0]:
                row += group.num_rows
                continue
            rows = max(1, min(ROWS, BYTES * group.num_rows // max(group.total_byte_size, 1)))
            for batch in file.iter_batches(rows, row_groups=[number], columns=roles.names):
                end = row + batch.num_rows
                if not start or row >= start[0]:
                    content = arrow.Table.from_batches([batch])
                    yield table_piece(path, content, roles, columns, row, end)
                row = end


def jsonl_pieces(path: Path, columns: Columns, start: Start = ()) -> Iterator[Piece]:
    """Yield pieces; a position is a byte and a line. The first lines decide which columns are
    read.
    """
    first: list[Roles] = []

    def records(lines: Sequence[Line]) -> Records:
        texts = [(line.number, decode(path, line.content, line.number)) for line in lines]
        table = jsonl.table_of_lines(path, texts, first[0].names if first else ())
        Tabular(table).check_unread(columns, first[0].names if first else ())
        roles = first[0] if first else decided(path, table, columns)
        content = table.load(roles.names)
        result = records_of(path, content, roles, columns, table.lines, first=None)
        first.append(roles)
        # Later pieces require the id column, even if it was guessed.
        return replace(result, columns=replace(result.columns, id=",".join(roles.id) or None))

    if _begins_with_elements(path, columns):
        rule = "a file whose rows are sequences, in order to be read in pieces"
        raise data_error(path, "a row per element", rule, "write the rows as Parquet or CSV")
    yield from line_pieces(jsonl.rows_of(path, columns, start), records)


def _begins_with_elements(path: Path, columns: Columns) -> bool:
    """Return True if the first rows are elements."""
    texts: list[tuple[int, str]] = []
    for line in islice(jsonl.rows_of(path, columns), _FIRST):
        content = line.content.decode(errors="replace").strip()
        row = jsonl.row_of(path, content, line.number)
        # A bad row is found again.
        if not isinstance(row, dict):
            continue
        if not texts and any(isinstance(value, list) for value in row.values()):
            return False
        texts.append((line.number, content))
    if not texts:
        return False
    table = jsonl.table_of_lines(path, texts)
    roles = decide_rows(Facts(table.columns, table.kinds, table.count), columns)
    return isinstance(roles, Roles) and roles.shape is not Shape.LISTS


def ts_pieces(path: Path, columns: Columns, start: Start = ()) -> Iterator[Piece]:
    """Yield pieces; a position is a byte and a line. The header is always read first."""
    header, begin, first = ts.begin_of(path)

    def records(lines: Sequence[Line]) -> Records:
        return read_as(Declared(ts.parsed(header, ts.texts_of(path, lines))), columns)

    if first is not None:
        # The first sequence sets the numbers of channels and steps if the header does not.
        line = Line(first[0], first[1].encode(errors="surrogateescape"), 0)
        alone = Piece(1, lambda *_: records([line]), (), str)
        deque(sift(alone, []), maxlen=0)
    kept = (
        line
        for line in lines_of(path, start or begin)
        if line.content.lstrip()[:1] not in (b"#", b"%")
    )
    yield from line_pieces(kept, records)


def text_pieces(path: Path, columns: Columns, start: Start = ()) -> Iterator[Piece]:
    """Yield the pieces of a text, or of the texts of a folder; a position is the number of a text,
    a byte and a line.
    """
    is_folder = path.is_dir()
    texts = text.texts_in(path)[0] if is_folder else [path]
    classes = ["class"] if is_folder else None
    accepted(path, Texts(Lines(path, [], classes)).decide(columns))
    number, *within = (start or (0,)) if is_folder else (0, *start)
    for at, each in enumerate(texts[number:], number):
        begin = tuple(within) if at == number else ()
        yield from _pieces_of(path, each, columns, begin, (at,) if is_folder else ())


def _pieces_of(
    path: Path, each: Path, columns: Columns, start: Start, number: Start
) -> Iterator[Piece]:
    """Yield the pieces of a text; ``number`` is its place in the folder ``path``, if it is in
    one.
    """

    def records(lines: Sequence[Line]) -> Records:
        texts = [decode(each, line.content, line.number).strip() for line in lines]
        classes = [each.stem] * len(lines) if number else None
        return read_as(Texts(Lines(path, texts, classes)), columns)

    # Lines of white space beyond ASCII are blank too.
    lines = (
        line for line in lines_of(each, start) if line.content.decode(errors="replace").strip()
    )
    yield from line_pieces(lines, records, number, f"{each.name}, " if number else "")
