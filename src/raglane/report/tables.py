"""Results as plain text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from raglane.errors import printable, shorten

# Characters of a label.
_WIDEST = 60
_SCORES = ("recall", "precision", "F1")


def confusion_table(matrix: Sequence[Sequence[int]], labels: Sequence[str]) -> str:
    r"""A confusion matrix with its labels, and of each class the recall, precision and F1 score."""
    scores = [[_score(row[name]) for name in _SCORES] for row in class_rows(matrix, labels)]
    labels = [shorten(printable(label), _WIDEST) for label in labels]
    header = ["true \\ predicted", *labels, *_SCORES]
    rows = [
        [label, *(str(count) if count else "." for count in counts), *score]
        for label, counts, score in zip(labels, matrix, scores, strict=True)
    ]
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = []
    for first, *rest in [header, *rows]:
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]))
    return "\n".join(lines)


def rows_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of numbers under their names."""
    cells = [[name.replace("_", " ") for name in rows[0]], *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return "\n".join(
        "  ".join([first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))])
        for first, *rest in cells
    )


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return _score(value)
    return shorten(printable(str(value)), _WIDEST)


def class_rows(matrix: Sequence[Sequence[int]], labels: Sequence[str]) -> list[dict[str, Any]]:
    """Of each class how good it is told, and how often it is there."""
    predicted = [sum(column) for column in zip(*matrix, strict=True)]
    rows = []
    for place, label in enumerate(labels):
        right, true, told = matrix[place][place], sum(matrix[place]), predicted[place]
        scores = (_share(right, true), _share(right, told), _share(2 * right, true + told))
        rows.append({"label": label, **dict(zip(_SCORES, scores, strict=True)), "count": true})
    return rows


def _share(part: int, whole: int) -> float:
    return part / whole if whole else math.nan


def _score(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.3f}"
