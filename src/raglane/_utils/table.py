"""Tables of results as text, Markdown and CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raglane._utils.files import no_formula
from raglane._utils.messages import metric_words, printable, shorten

# Most characters of a cell.
_WIDEST = 60


@dataclass(frozen=True)
class PrintedTable:
    """Rows and the names of their columns. None and NaN are dashes; other floats have three
    decimals.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    words: int = 1  # left columns that are text; the others are numbers
    best: int | None = None  # a row that a page marks
    bars: int | None = None  # a column of percentages that a page draws
    is_folded: bool = False  # a page shows it on request, under its caption

    @classmethod
    def of(cls, caption: str, rows: Iterable[Mapping[str, Any]], words: int = 1) -> PrintedTable:
        """Build a table from rows with the same keys."""
        listed = list(rows)
        columns = [metric_words(name) for name in (listed[0] if listed else ())]
        return cls(caption, columns, [tuple(row.values()) for row in listed], words)

    @property
    def cells(self) -> list[list[str]]:
        """The rows as text, with thousands separators."""
        return [
            [
                f"{value:,}"
                if isinstance(value, int) and not isinstance(value, bool)
                else _cell(value)
                for value in row
            ]
            for row in self.rows
        ]

    def text(self) -> str:
        """Return aligned lines."""
        rows = [[shorten(printable(_cell(value)), _WIDEST) for value in row] for row in self.rows]
        return "\n".join(aligned([self.columns, *rows], self.words))

    def markdown(self) -> str:
        """Return the caption and the table in Markdown."""
        marks = [":--" if column < self.words else "--:" for column in range(len(self.columns))]
        names, *rows = [
            "| " + " | ".join(map(escaped, row)) + " |" for row in [self.columns, *self.cells]
        ]
        return "\n".join(
            [f"{escaped(self.caption)}:", "", names, f"| {' | '.join(marks)} |", *rows]
        )


def aligned(rows: Sequence[Sequence[str]], words: int = 1) -> list[str]:
    """Align rows: text to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index < words else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def as_text(tables: Iterable[PrintedTable]) -> str:
    """Return tables with captions for a terminal."""
    return "\n\n".join(f"{printable(table.caption)}\n{table.text()}" for table in tables)


def as_markdown(tables: Iterable[PrintedTable]) -> str:
    """Return tables in Markdown."""
    return "\n\n".join(table.markdown() for table in tables) + "\n"


def as_csv(tables: Sequence[PrintedTable]) -> bytes:
    """Return one CSV table, with the captions in the column ``data``, and unrounded numbers."""
    columns = list(dict.fromkeys(name for table in tables for name in table.columns))
    text = io.StringIO()
    writer = csv.DictWriter(text, ["data", *columns], lineterminator="\n")
    writer.writeheader()
    for table in tables:
        for row in table.rows:
            entries = zip(table.columns, map(no_formula, row), strict=True)
            writer.writerow({"data": no_formula(table.caption), **dict(entries)})
    return text.getvalue().encode(errors="backslashreplace")


def escaped(text: str) -> str:
    """Escape text for Markdown."""
    return "".join(f"\\{sign}" if sign in "\\`*_[]<>|#!" else sign for sign in printable(text))


def _cell(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
