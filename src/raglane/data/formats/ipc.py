"""Arrow files, memory-mapped: Feather, Arrow IPC as a file or a stream, and folders that ``raglane convert`` wrote.

The columns are those of :mod:`raglane.data.formats.table`. A file may say how the channels of its sequences are
called: in the metadata of the column, under ``raglane.channels``, a list of names in JSON.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from raglane._utils.messages import require, shorten
from raglane.data.formats.base import check_readable, data_error, open_error
from raglane.data.formats.pieces import BYTES, ROWS, Piece, Start
from raglane.data.formats.table import Chosen, choose, records_of
from raglane.data.records import Columns, Records
from raglane.errors import DataError

CHANNELS = b"raglane.channels"
# What stands in a folder that was converted, and says which files hold the sequences.
DESCRIPTION = "dataset.json"
# What stands beside it: the length of each sequence, and what is counted of all.
LENGTHS, STATISTICS = "lengths.npy", "statistics.json"
FORMAT_VERSION = 2

# Bytes of a block: few enough that the first row of a shard is there at once, and so many that the checksums take
# 1/32768 of the data.
_BLOCK = 1 << 18

_SEAL = "checksum"


def is_converted(path: Path) -> bool:
    """Whether a path is a folder that ``raglane convert`` wrote."""
    return (path / DESCRIPTION).is_file()


def described(path: Path) -> dict[str, Any]:
    """What stands in ``dataset.json`` of a folder that was converted."""
    try:
        description: dict[str, Any] = json.loads((path / DESCRIPTION).read_bytes())
        version = description["format_version"]
        is_whole = version != FORMAT_VERSION or is_sealed(description)
    except FileNotFoundError as error:
        rule = f"a folder that raglane convert wrote, with {DESCRIPTION}"
        raise data_error(path, f"no {DESCRIPTION}", rule, "pass the files, or convert them") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged(path / DESCRIPTION) from error
    if version != FORMAT_VERSION:
        got = f"format {version} of a converted folder"
        raise data_error(
            path, got, f"a folder of format {FORMAT_VERSION}, for this version of Raglane", "convert the data again"
        )
    if not is_whole:
        raise damaged(path / DESCRIPTION, "its checksum differs")
    return description


def _files(path: Path, columns: Columns) -> tuple[list[tuple[Path, str | None]], Columns, Mapping[str, Any]]:
    """The Arrow files of a path with their checksums, the columns, and the description of a converted folder."""
    if not path.is_dir():
        return [(path, None)], columns, {}
    description = described(path)
    columns = with_names(columns, description["columns"])
    features = description.get("features", [])
    # The columns of the folder itself: numbers of several columns are channels of one here.
    beside: dict[str, Any] = {
        role: tuple(name for name, per_sequence, _ in features if per_sequence == of_sequences) or None
        for role, of_sequences in (("features", False), ("static", True))
    }
    categorical = tuple(name for name, _, is_numbers in features if not is_numbers) or None
    columns = replace(columns, sequence=description["columns"]["sequence"], categorical=categorical, **beside)
    return [(path / shard["file"], shard["checksums"]) for shard in description["shards"]], columns, description


def with_names(columns: Columns, names: Mapping[str, Any]) -> Columns:
    """Columns with what nobody has said: names by their roles, and how texts and numbers were read."""
    known = {role: name for role, name in names.items() if getattr(columns, role) in (None, False)}
    # What Python calls a tuple is a list in JSON.
    lists = {role: tuple(name) for role, name in known.items() if isinstance(name, list)}
    return replace(columns, **known | lists)


@contextmanager
def readable(path: Path, kind: str) -> Iterator[None]:
    """Say of what is damaged, and shows when it is opened or looked at, that it is no whole file of a kind."""
    arrow = require("pyarrow", "data")
    try:
        yield
    except DataError:
        raise
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        # Arrow may put what it found in several lines.
        detail = " ".join(str(error).split()).rstrip(".")
        got = f"no readable {kind} ({shorten(detail, 200)})"
        raise data_error(path, got, f"a whole {kind} file", "write it again") from error


def table_of(path: Path, expected: str | None = None) -> Any:
    """The content of an Arrow file as a ``pyarrow.Table`` that lies in the file, unless it is compressed.

    Where checksums are ``expected``, the file is compared with them before.

    Its buffers have the sizes that they need, but nobody has looked into them yet: whoever reads rows calls
    ``validate(full=True)`` on them first.
    """
    arrow = require("pyarrow", "data")
    if expected is not None:
        verify_file(path, expected)
    check_readable(path)
    with readable(path, "Arrow"):
        table = opened(arrow.memory_map(str(path))).read_all()
        table.validate()
        return table


def opened(source: Any) -> Any:
    """What reads the batches of an Arrow file or stream; ``source`` is a ``pyarrow.NativeFile``."""
    ipc = require("pyarrow.ipc", "data")
    # Both forms bear the same suffixes; a file begins with these bytes.
    is_file = source.read(6) == b"ARROW1"
    source.seek(0)
    return ipc.open_file(source) if is_file else ipc.open_stream(source)


def slices(table: Any) -> Iterator[tuple[int, Any]]:
    """Runs of rows of a table with the number of the first, none of them large; without a copy."""
    rows = max(1, min(ROWS, BYTES * table.num_rows // max(table.get_total_buffer_size(), 1)))
    for start in range(0, table.num_rows, rows):
        yield start, table.slice(start, rows)


def read(path: Path, columns: Columns) -> Records:
    """Read an Arrow file, or a folder that was converted."""
    arrow = require("pyarrow", "data")
    files, columns, description = _files(path, columns)
    tables = [table_of(shard, expected) for shard, expected in files]
    with readable(path, "Arrow"):
        table = arrow.concat_tables(tables)
        chosen = choose(path, table.schema, columns)
        table.validate(full=True)
        return named(records_of(path, table.select(chosen.names), chosen, columns), table, chosen, description)


def named(records: Records, table: Any, chosen: Chosen, description: Mapping[str, Any] | None = None) -> Records:
    """Records with the channels called as the table's column of sequences says, and labels that are what they were."""
    if description:
        kinds = description.get("label_kinds")
        records = replace(records, label_kinds=None if kinds is None else tuple(kinds))
    metadata = table.schema.field(chosen.sequence).metadata or {}
    if CHANNELS not in metadata or records.is_tokens:
        return records
    names = tuple(json.loads(metadata[CHANNELS]))
    return replace(records, channels=names) if len(names) == len(records.channels) else records


def pieces(path: Path, columns: Columns, start: Start = ()) -> Iterator[Piece]:
    """The same piece by piece; a piece begins at a row."""
    first = 0
    files, columns, description = _files(path, columns)
    for shard, expected in files:
        table = table_of(shard, expected)
        chosen = choose(shard, table.schema, columns)
        for row, part in slices(table):
            if not start or first + row >= start[0]:
                with readable(shard, "Arrow"):
                    part.validate(full=True)
                yield table_piece(shard, part, chosen, columns, row, first + row + part.num_rows, description)
        first += table.num_rows


def table_piece(
    path: Path,
    table: Any,
    chosen: Chosen,
    columns: Columns,
    row: int,
    end: int,
    description: Mapping[str, Any] | None = None,
) -> Piece:
    """A piece of a table."""

    def records(first: int, last: int) -> Records:
        part = table.select(chosen.names).slice(first, last - first)
        with readable(path, "column"):
            found = named(records_of(path, part, chosen, columns, first=row + first), table, chosen, description)
        # Asked for again, so that the rows that follow, of this file and of others, are read in the same way.
        return replace(found, columns=replace(found.columns, id=chosen.id))

    return Piece(table.num_rows, records, (end,), lambda place: f"row {row + place}")


def read_parquet(path: Path, columns: Columns) -> Records:
    """Read a Parquet file; only the columns that are used are read."""
    parquet = require("pyarrow.parquet", "data")
    # Opened once before, because pyarrow's errors do not tell a file that is not there from one that is damaged.
    check_readable(path)
    with readable(path, "Parquet"), parquet.ParquetFile(path, page_checksum_verification=True) as file:
        chosen = choose(path, file.schema_arrow, columns)
        return records_of(path, file.read(columns=chosen.names), chosen, columns)


def parquet_pieces(path: Path, columns: Columns, start: Start = ()) -> Iterator[Piece]:
    """The same piece by piece; a piece begins at a row, and holds rows of one row group."""
    arrow, parquet = require("pyarrow", "data"), require("pyarrow.parquet", "data")
    check_readable(path)
    # Read in small pieces: otherwise whole columns, of all row groups, are in memory at once.
    small = {"pre_buffer": False, "buffer_size": 1 << 20}
    with readable(path, "Parquet"), parquet.ParquetFile(path, page_checksum_verification=True, **small) as file:
        chosen = choose(path, file.schema_arrow, columns)
        row = 0
        for number in range(file.metadata.num_row_groups):
            group = file.metadata.row_group(number)
            if start and row + group.num_rows <= start[0]:
                row += group.num_rows
                continue
            rows = max(1, min(ROWS, BYTES * group.num_rows // max(group.total_byte_size, 1)))
            for batch in file.iter_batches(rows, row_groups=[number], columns=chosen.names):
                end = row + batch.num_rows
                if not start or row >= start[0]:
                    yield table_piece(path, arrow.Table.from_batches([batch]), chosen, columns, row, end)
                row = end


def damaged(path: Path, detail: str = "") -> DataError:
    """The error for a file of a converted folder that is not as it was written, or not there."""
    rule = "a file that raglane convert wrote, unchanged"
    if not path.exists():
        fix = "restore it, or delete the folder and convert the data again"
        return data_error(path, "no such file", rule, fix)
    got = "a damaged file" + (f": {detail}" if detail else "")
    return data_error(path, got, rule, "delete the folder, and convert the data again")


def checksums(path: Path) -> str:
    """The CRC-32 of each block of a file, 8 hexadecimal digits each."""
    with path.open("rb") as file:
        return "".join(f"{zlib.crc32(block):08x}" for block in iter(lambda: file.read(_BLOCK), b""))


def verify_file(path: Path, expected: str) -> None:
    """Refuse a file that is not as it was written."""
    try:
        found = checksums(path)
    except FileNotFoundError as error:
        raise damaged(path) from error
    except OSError as error:
        raise open_error(path, error) from error
    if found != expected:
        raise damaged(path, "its checksum differs")


def seal(description: Mapping[str, Any]) -> dict[str, Any]:
    """A description with a checksum of its content."""
    return {**description, _SEAL: f"{zlib.crc32(json.dumps(description, sort_keys=True).encode()):08x}"}


def is_sealed(description: Mapping[str, Any]) -> bool:
    """Whether a description is as :func:`seal` made it."""
    return description == seal({name: value for name, value in description.items() if name != _SEAL})


class Blocks:
    """The blocks of a file that is mapped into memory, each verified before its first use."""

    def __init__(self, path: Path, content: memoryview, expected: str) -> None:
        self._path, self._content = path, content
        count = -(-len(content) // _BLOCK)
        if len(expected) != 8 * count:
            raise damaged(path, f"{len(content):,} bytes")
        try:
            self._expected = np.frombuffer(bytes.fromhex(expected), dtype=">u4")
        except ValueError as error:
            raise damaged(path, "no checksum") from error
        self._pending = np.ones(count, dtype=bool)
        self._left = count

    def verify(self, starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> None:
        """Verify the blocks that hold some ranges of bytes."""
        if not self._left:
            return
        holds = ends > starts
        firsts, lasts = starts[holds] // _BLOCK, (ends[holds] - 1) // _BLOCK
        counts = lasts - firsts + 1
        # The blocks of all ranges, one after the other.
        blocks = np.repeat(firsts - np.cumsum(counts) + counts, counts) + np.arange(int(counts.sum()))
        for block in np.unique(blocks[self._pending[blocks]]).tolist():
            begin = block * _BLOCK
            if zlib.crc32(self._content[begin : begin + _BLOCK]) != self._expected[block]:
                raise damaged(self._path, f"the checksum of the bytes from {begin:,} on differs")
            self._pending[block] = False
            self._left -= 1

    def verify_outside(self, start: int, end: int) -> None:
        """Verify all but a range of bytes, which is verified as it is read."""
        self.verify(np.array([0, end]), np.array([start, len(self._content)]))
