"""Memory-mapped Arrow files (Feather, Arrow IPC as a file or a stream), folders of ``raglane
convert``, and Parquet.

The columns are those of :mod:`raglane.data.roles.lists`. The metadata of the sequence column may
contain the names of its channels: under ``raglane.channels``, a list in JSON.
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

from raglane._utils.messages import require, shorten
from raglane.data.columns import Columns
from raglane.data.sources.files import BYTES, ROWS, check_readable, data_error, open_error
from raglane.data.sources.table import SourceTable, arrow_table, whole_table
from raglane.data.typed.arrays import Integers
from raglane.data.typed.arrow import arrow_types, is_text
from raglane.errors import DataError

CHANNELS = b"raglane.channels"
# The description of a converted folder, which lists its files.
DESCRIPTION = "dataset.json"
# The lengths of the sequences, and the statistics of all.
LENGTHS, STATISTICS = "lengths.npy", "statistics.json"
FORMAT_VERSION = 2

# Bytes per checksum: few, for a fast first row, and so many that the checksums take 1/32768 of the
# data.
_BLOCK = 1 << 18

_SEAL = "checksum"


def is_converted(path: Path) -> bool:
    """Return True for a folder of ``raglane convert``."""
    return (path / DESCRIPTION).is_file()


def described(path: Path) -> dict[str, Any]:
    """Read ``dataset.json`` of a converted folder."""
    try:
        description: dict[str, Any] = json.loads((path / DESCRIPTION).read_bytes())
        version = description["format_version"]
        is_whole = version != FORMAT_VERSION or is_sealed(description)
    except FileNotFoundError as error:
        rule = f"a folder of raglane convert, with {DESCRIPTION}"
        raise data_error(
            path, f"no {DESCRIPTION}", rule, "pass the files, or convert them"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged(path / DESCRIPTION) from error
    if version != FORMAT_VERSION:
        got = f"format {version} of a converted folder"
        rule = f"of format {FORMAT_VERSION}, which this Raglane reads"
        raise data_error(path, got, rule, "convert the data again")
    if not is_whole:
        raise damaged(path / DESCRIPTION, "its checksum differs")
    return description


def shards_of(
    path: Path, columns: Columns
) -> tuple[list[tuple[Path, str | None]], dict[str, Any], Mapping[str, Any]]:
    """Return the Arrow files of a path with their checksums, and the attributes of Columns and the
    description of a converted folder.
    """
    if not path.is_dir():
        return [(path, None)], {}, {}
    description = described(path)
    features = description.get("features", [])
    # A converted folder has other columns than its source: numbers of several columns are channels
    # of one.
    told: dict[str, Any] = {
        role: tuple(name for name, per_sequence, _ in features if per_sequence == of_sequences)
        or None
        for role, of_sequences in (("features", False), ("static", True))
    }
    told["categorical"] = tuple(name for name, _, is_numbers in features if not is_numbers) or None
    told["sequence"] = description["columns"]["sequence"]
    told = unset(columns, description["columns"]) | told
    files = [(path / shard["file"], shard["checksums"]) for shard in description["shards"]]
    return files, told, description


def with_names(columns: Columns, names: Mapping[str, Any]) -> Columns:
    """Fill the unset attributes of columns from stored ones."""
    return replace(columns, **unset(columns, names))


def unset(columns: Columns, names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stored attributes that columns leave unset."""
    missing = {
        role: name for role, name in names.items() if getattr(columns, role) in (None, False)
    }
    # JSON stores tuples as lists.
    tuples = {role: tuple(name) for role, name in missing.items() if isinstance(name, list)}
    return missing | tuples


@contextmanager
def readable(path: Path, kind: str) -> Iterator[None]:
    """Convert errors of Arrow, raised when a damaged file is opened or read, to DataErrors."""
    arrow = require("pyarrow", "data")
    try:
        yield
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        # Arrow's messages may have several lines.
        detail = " ".join(str(error).split()).rstrip(".")
        got = f"no readable {kind} ({shorten(detail, 200)})"
        raise data_error(path, got, f"a whole {kind} file", "write it again") from error


def table_of(path: Path, expected: str | None = None) -> Any:
    """Map an Arrow file, after comparing it with ``expected`` checksums; a compressed file is read
    into memory.

    The sizes of the buffers are validated, but not their content: call ``validate(full=True)``
    before reading rows.
    """
    arrow = require("pyarrow", "data")
    if expected is not None:
        verify_file(path, expected)
    check_readable(path)
    with readable(path, "Arrow"):
        table = opened(arrow.memory_map(str(path))).read_all()
        table.validate()
        return decoded(table)


def decoded(table: Any) -> Any:
    """Return a table without dictionaries of numbers or booleans, such as categories of pandas."""
    for place, field in enumerate(table.schema):
        if arrow_types().is_dictionary(field.type) and not is_text(field.type):
            column = table.column(place)
            column.validate(full=True)
            table = table.set_column(place, field.name, column.cast(field.type.value_type))
    return table


def opened(source: Any) -> Any:
    """Return the reader of an Arrow file or stream; ``source`` is a ``pyarrow.NativeFile``."""
    ipc = require("pyarrow.ipc", "data")
    # Files and streams have the same suffixes; a file begins with these bytes.
    is_file = source.read(6) == b"ARROW1"
    source.seek(0)
    return ipc.open_file(source) if is_file else ipc.open_stream(source)


def slices(table: Any) -> Iterator[tuple[int, Any]]:
    """Yield small slices of a table with their first row, without a copy."""
    rows = max(1, min(ROWS, BYTES * table.num_rows // max(table.get_total_buffer_size(), 1)))
    for start in range(0, table.num_rows, rows):
        yield start, table.slice(start, rows)


def parquet_file(path: Path, source: Any, **options: Any) -> Any:
    """Open a Parquet file, and check the rows of its row groups, which have no checksum."""
    file = require("pyarrow.parquet", "data").ParquetFile(
        source, page_checksum_verification=True, **options
    )
    sizes = [
        file.metadata.row_group(number).num_rows for number in range(file.metadata.num_row_groups)
    ]
    if min(sizes, default=0) < 0 or sum(sizes) != file.metadata.num_rows:
        got = f"row groups of {sum(sizes):,} rows in a file of {file.metadata.num_rows:,}"
        raise data_error(path, got, "a Parquet file that is not damaged", "write it again")
    return file


def whole(path: Path) -> Any:
    """Return all columns of an Arrow or Parquet file."""
    if not path.suffix.lower().startswith(".p"):
        return table_of(path)
    check_readable(path)
    with readable(path, "Parquet"), parquet_file(path, path) as file:
        return file.read()


def table(path: Path, columns: Columns) -> SourceTable:
    """Return the columns of an Arrow file, or of a converted folder."""
    arrow = require("pyarrow", "data")
    files, told, description = shards_of(path, columns)
    tables = [table_of(shard, expected) for shard, expected in files]
    with readable(path, "Arrow"):
        content = arrow.concat_tables(tables)
        content.validate(full=True)
    kinds = description.get("label_kinds")
    return whole_table(
        path, content, declared=told, label_kinds=None if kinds is None else tuple(kinds)
    )


def parquet_table(path: Path, file: Any = None) -> SourceTable:
    """Return the columns of a Parquet file, each read when it is first used; ``file`` is open."""
    if file is None:
        # pyarrow raises the same errors for missing and damaged files.
        check_readable(path)
        with readable(path, "Parquet"):
            file = parquet_file(path, path)

    def load(names: list[str]) -> Any:
        with readable(path, "Parquet"):
            return file.read(names)

    return arrow_table(path, file.schema_arrow, file.metadata.num_rows, load)


def damaged(path: Path, detail: str = "") -> DataError:
    """Return the error for a missing or changed file of a converted folder."""
    rule = "the file as raglane convert wrote it"
    if not path.exists():
        return data_error(
            path,
            "no such file",
            rule,
            "restore it, or delete the folder and convert the data again",
        )
    got = "a damaged file" + (f": {detail}" if detail else "")
    return data_error(path, got, rule, "delete the folder, and convert the data again")


def checksums(path: Path) -> str:
    """Return the CRC-32 of each block of a file, 8 hexadecimal digits each."""
    with path.open("rb") as file:
        return "".join(f"{zlib.crc32(block):08x}" for block in iter(lambda: file.read(_BLOCK), b""))


def verify_file(path: Path, expected: str) -> None:
    """Raise a DataError if a file differs from its checksums."""
    try:
        actual = checksums(path)
    except FileNotFoundError as error:
        raise damaged(path) from error
    except OSError as error:
        raise open_error(path, error) from error
    if actual != expected:
        raise damaged(path, "its checksum differs")


def seal(description: Mapping[str, Any]) -> dict[str, Any]:
    """Add a checksum to a description."""
    return {
        **description,
        _SEAL: f"{zlib.crc32(json.dumps(description, sort_keys=True).encode()):08x}",
    }


def is_sealed(description: Mapping[str, Any]) -> bool:
    """Return True if the checksum of :func:`seal` fits a description."""
    return description == seal(
        {name: value for name, value in description.items() if name != _SEAL}
    )


class Blocks:
    """The blocks of a mapped file, each compared with its checksum before the first use."""

    def __init__(self, path: Path, content: memoryview, expected: str) -> None:
        self._path = path
        self._content = content
        count = -(-len(content) // _BLOCK)
        if len(expected) != 8 * count:
            raise damaged(path, f"{len(content):,} bytes")
        try:
            self._expected = np.frombuffer(bytes.fromhex(expected), dtype=">u4")
        except ValueError as error:
            raise damaged(path, "no checksum") from error
        self._pending = np.ones(count, dtype=bool)
        self._left = count

    def verify(self, starts: Integers, ends: Integers) -> None:
        """Verify the blocks that overlap ranges of bytes."""
        if not self._left:
            return
        filled = ends > starts
        firsts = starts[filled] // _BLOCK
        lasts = (ends[filled] - 1) // _BLOCK
        counts = lasts - firsts + 1
        # The blocks of all ranges, range after range.
        blocks = np.repeat(firsts - np.cumsum(counts) + counts, counts) + np.arange(
            int(counts.sum())
        )
        for block in np.unique(blocks[self._pending[blocks]]).tolist():
            begin = block * _BLOCK
            if zlib.crc32(self._content[begin : begin + _BLOCK]) != self._expected[block]:
                raise damaged(self._path, f"the checksum of the bytes from {begin:,} on differs")
            self._pending[block] = False
            self._left -= 1

    def verify_outside(self, start: int, end: int) -> None:
        """Verify the blocks outside of a range of bytes."""
        self.verify(np.array([0, end]), np.array([start, len(self._content)]))
