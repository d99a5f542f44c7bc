"""Weka's ``.arff``: attributes with their types, and a row per line.

The series of the UCR and UEA archives are numeric attributes in order, or one relational attribute
with a line per channel. Both become a column of lists; the label is the last attribute. Other
tables are read as CSV.
"""

from __future__ import annotations

import csv
import re
from pathlib import Path

import numpy as np

from raglane._utils.messages import quote, require
from raglane.data.sources.files import data_error, decode, read_bytes
from raglane.data.sources.table import SourceTable, whole_table
from raglane.data.typed.column import TextColumn, numbers_in

_ATTRIBUTE = re.compile(
    r"""@attribute\s+('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\S+)\s+(.+)""", re.IGNORECASE
)
# The name of the lists of a relational attribute.
_SERIES = "series"


def table(path: Path) -> SourceTable:
    """Return the attributes of a file as columns, a relational one as a column of lists."""
    names, is_relational, first, lines = _header(path)
    rows = []
    for number, line in enumerate(lines, first):
        text = line.strip()
        if not text or text.startswith("%"):
            continue
        if text.startswith("{"):
            fix = "write all values of a row, or convert the file with Weka"
            raise data_error(path, "a sparse row", "a file of full rows", fix, number)
        row = _split(text)
        if len(row) != len(names):
            got = f"{len(row)} values for {len(names)} attributes"
            raise data_error(path, got, "a value per attribute", "correct the line", number)
        rows.append(row)
    if not rows:
        raise data_error(path, "no row after @data", "a file with rows", "check the file")
    entries = {
        name: np.array(["" if row[at] == "?" else row[at] for row in rows], dtype=object)
        for at, name in enumerate(names)
    }
    if is_relational is None:
        return SourceTable(path, {name: TextColumn(words) for name, words in entries.items()})
    arrow = require("pyarrow", "data")
    series = [_channels(path, word) for word in entries.pop(is_relational)]
    words = {name: list(column) for name, column in entries.items()}
    return whole_table(path, arrow.table({_SERIES: series} | words), usual={"sequence": _SERIES})


def _header(path: Path) -> tuple[list[str], str | None, int, list[str]]:
    """Return the attributes, the relational one, and the lines after @data with the first number."""
    names: list[str] = []
    relational: str | None = None
    is_inside = False
    lines = decode(path, read_bytes(path)).split("\n")
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if text.lower().startswith("@data"):
            return names, relational, number + 1, lines[number:]
        if text.lower().startswith("@end"):
            is_inside = False
        match = _ATTRIBUTE.fullmatch(text)
        if match is None or is_inside:
            continue
        name = match[1].strip("'\"")
        names.append(name)
        if match[2].strip().lower() == "relational":
            if relational is not None:
                got = f"two relational attributes, {quote(relational)} and {quote(name)}"
                raise data_error(path, got, "a file with one of them", "leave one out", number)
            relational = name
            is_inside = True
    raise data_error(path, "no line @data", "a file with attributes and rows", "check the file")


def _split(line: str) -> list[str]:
    """Split a row at commas that are not in quotes of either kind."""
    if "'" not in line and '"' not in line:
        return [entry.strip() for entry in line.split(",")]
    first = next(sign for sign in line if sign in "'\"")
    reader = csv.reader([line], quotechar=first, skipinitialspace=True)
    return [entry.strip() for entry in next(reader)]


def _channels(path: Path, word: str) -> list[list[float]]:
    """Return the steps of a series whose channels are lines."""
    lines = [line.split(",") for line in word.replace("\\n", "\n").split("\n") if line.strip()]
    if len({len(line) for line in lines}) != 1:
        got = f"channels of {' and '.join(str(len(line)) for line in lines)} steps"
        raise data_error(path, got, "channels of one length", "correct the row")
    words = np.array(
        [["" if w.strip() == "?" else w for w in line] for line in lines], dtype=object
    )
    numbers, odd = numbers_in(words.ravel())
    if odd.any():
        got = f"{quote(words.ravel()[int(odd.argmax())])} in a series"
        raise data_error(path, got, "a file of numbers", "correct the row")
    return [[float(number) for number in step] for step in numbers.reshape(words.shape).T]
