"""Results as plain text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from raglane.errors import printable, shorten

__all__ = ["confusion_table", "rows_table"]

# Characters of a label.
_WIDEST = 60


def confusion_table(matrix: Sequence[Sequence[int]], labels: Sequence[str]) -> str:
    r"""A confusion matrix with its labels, and of each class the recall, precision and F1 score.

    Args:
        matrix: ``K`` rows of ``K`` counts; row is the true class, column the predicted one.
        labels: the ``K`` names; a long one loses its middle, and what a line cannot show becomes an escape.

    Returns:
        Lines of equal width, the true class to the left; zeros are dots, so that mistakes stand out. A score that
        has nothing to count is a dash.

    Example:
        >>> print(confusion_table([[3, 1], [0, 2]], ["a", "b"]))
        true \ predicted  a  b  recall  precision     F1
        a                 3  1   0.750      1.000  0.857
        b                 .  2   1.000      0.667  0.800
    """
    scores = [_scores(matrix, place) for place in range(len(labels))]
    labels = [shorten(printable(label), _WIDEST) for label in labels]
    header = ["true \\ predicted", *labels, "recall", "precision", "F1"]
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
    """Rows of numbers under their names.

    Args:
        rows: with the same keys; the first value is a name, and to the left. NaN is a dash.

    Example:
        >>> print(rows_table([{"label": "jazz", "F1": 0.5, "count": 4}, {"label": "a", "F1": math.nan, "count": 0}]))
        label     F1  count
        jazz   0.500      4
        a          -      0
    """
    cells = [[name.replace("_", " ") for name in rows[0]], *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return "\n".join(
        "  ".join([first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))])
        for first, *rest in cells
    )


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "-" if math.isnan(value) else f"{value:.3f}"
    return shorten(printable(str(value)), _WIDEST)


def _scores(matrix: Sequence[Sequence[int]], place: int) -> tuple[str, str, str]:
    """Recall, precision and F1 of one class."""
    right = matrix[place][place]
    true = sum(matrix[place])
    predicted = sum(row[place] for row in matrix)
    return _share(right, true), _share(right, predicted), _share(2 * right, true + predicted)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.3f}" if whole else "-"
