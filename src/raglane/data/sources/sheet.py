"""Excel's ``.xlsx``: the cells of the first sheet with entries, read as those of a CSV file."""

from __future__ import annotations

import io
from csv import writer
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from raglane._utils.messages import quote_all, require
from raglane.data.columns import Columns
from raglane.data.sources import csv
from raglane.data.sources.files import data_error, read_bytes
from raglane.data.sources.table import SourceTable
from raglane.errors import DataError


def table(path: Path, columns: Columns) -> SourceTable:
    """Return the cells of a sheet."""
    content, left_out = _content(path)
    cells = csv.table_of(path, columns, content)
    return replace(cells, notes=(*left_out, *cells.notes))


def _content(path: Path) -> tuple[bytes, tuple[str, ...]]:
    """Return the cells of a sheet as CSV, and a note about the other sheets."""
    content = read_bytes(path)
    if not content.startswith(b"PK"):
        raise _unreadable(path, "no zip archive")
    calamine = require("python_calamine", "excel")
    try:
        book = calamine.CalamineWorkbook.from_filelike(io.BytesIO(content))
        sheets = {name: book.get_sheet_by_name(name).to_python() for name in book.sheet_names}
    # Also an error of Rust, which is no Exception of calamine.
    except Exception as error:
        raise _unreadable(path, " ".join(str(error).split()).rstrip(".")) from error
    filled = [name for name, rows in sheets.items() if any(map(any, rows))]
    if not filled:
        raise data_error(path, "no cell with an entry", "a sheet with a table", "check the file")
    text = io.StringIO()
    cells = writer(text, lineterminator="\n")
    cells.writerows([_written(cell) for cell in row] for row in sheets[filled[0]])
    notes = (f"left out: the sheets {quote_all(filled[1:])}",) if filled[1:] else ()
    return text.getvalue().encode(), notes


def _unreadable(path: Path, why: str) -> DataError:
    got = f"no readable spreadsheet ({why})"
    return data_error(path, got, "a whole .xlsx file", "save it again")


def _written(cell: Any) -> str:
    """Return a cell as a text; Excel has no whole numbers."""
    if isinstance(cell, float) and cell.is_integer() and abs(cell) < 2**53:
        return str(int(cell))
    if isinstance(cell, bool):
        return str(cell).lower()
    if isinstance(cell, timedelta):
        return str(cell.total_seconds())
    if isinstance(cell, datetime) and cell.time() == datetime.min.time():
        return cell.date().isoformat()
    return str(cell)
