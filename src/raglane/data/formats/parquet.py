"""Parquet files with a column of lists, or of texts, and a column of labels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from raglane.data.formats.base import check_readable
from raglane.data.formats.ipc import readable, table_piece
from raglane.data.formats.pieces import BYTES, ROWS, Piece, Start
from raglane.data.formats.table import choose, records_of
from raglane.data.records import Columns, Records
from raglane.errors import require

__all__ = ["pieces", "read"]


def read(path: Path, columns: Columns) -> Records:
    """Read a Parquet file; only the columns that are used are read."""
    parquet = require("pyarrow.parquet", "data")
    # Opened once before, because pyarrow's errors do not tell a file that is not there from one that is damaged.
    check_readable(path)
    with readable(path, "Parquet"), parquet.ParquetFile(path, page_checksum_verification=True) as file:
        chosen = choose(path, file.schema_arrow, columns)
        return records_of(path, file.read(columns=chosen.names), chosen, columns)


def pieces(path: Path, columns: Columns, start: Start = ()) -> Iterator[Piece]:
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
