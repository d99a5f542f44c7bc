"""Rows of cells: how large their drawing is, and what stands beside and below it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from raglane.plot.cells import LINE, pitch, spaced
from raglane.plot.picture import SMALL, TEXT, TITLE, Box, Picture, label, place, width_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["ABOVE", "BELOW", "CELL", "grid", "grid_size", "mark_rows", "mark_steps", "room_for_names"]

CELL, ABOVE, BELOW = 0.26, 0.36, 0.5
"""Inches: a cell with a short text; the margins above rows, for a title, and below them, for steps."""

# The longest text in a cell, the largest drawing, and the narrowest.
_WIDEST_TEXT, _WIDTH, _HEIGHT, _NARROWEST = 0.8, 9.0, 8.0, 1.2


def grid_size(columns: int, rows: int, widest: float) -> tuple[float, float, float]:
    """The size of a drawing of cells, in inches, and the columns for which it has room: at least those that there are.

    Example:
        >>> width, height, shown = grid_size(columns=10, rows=2, widest=0.2)
        >>> round(width, 2), round(height, 2), shown
        (2.8, 0.52, 10)
    """
    cell = max(CELL, min(widest, _WIDEST_TEXT) + 0.08)
    width = max(min(columns * cell, _WIDTH), _NARROWEST)
    return width, min(max(rows, 1) * CELL, _HEIGHT), max(columns, width / cell)


def room_for_names(names: Sequence[str]) -> float:
    """The left margin: the names of the rows, and of their axis.

    Example:
        >>> room_for_names(["10"]) > room_for_names(["1"]) > 0.4
        True
    """
    return max(map(width_of, names), default=0.0) + 0.42


def grid(
    axes: Any,
    titles: tuple[str, str, str],
    columns: int,
    rows: int,
    widest: float,
    names: Sequence[str],
    *,
    beside: float = 0.2,
    above: float = 0.0,
    below: float = 0.0,
    lines: int = 1,
) -> Picture:
    """Axes for rows of cells, with their limits and their titles.

    Example:
        >>> grid(None, ("a title", "step", "row"), 10, 2, 0.2, ["0", "1"]).axes[0].get_ylabel()
        'row'
    """
    width, height, shown = grid_size(columns, rows, widest)
    height *= (max(rows, 1) + above + below) / max(rows, 1)
    left, bottom = room_for_names(names), BELOW + 0.12 * (lines - 1)
    whole = left + max(width + beside, width_of(titles[0], TITLE) + 0.2, width_of(titles[1], TEXT) + 0.2)
    picture = place(axes, (whole, bottom + height + ABOVE), [Box(left, bottom, width, height)])
    picture.axes[0].set_xlim(0, max(columns, 1) if picture.is_given else shown)
    picture.axes[0].set_ylim(max(rows, 1) + below, -above)
    label(picture.axes[0], *titles)
    return picture


def mark_rows(axes: Axes, names: Sequence[str], top_of: Callable[[int], float] = float) -> None:
    """Write the names of the rows on the left, as many as there is room for."""
    shown = spaced(len(names), pitch(axes)[1], LINE)
    axes.set_yticks([top_of(row) + 0.5 for row in shown], [names[row] for row in shown], fontsize=SMALL)
    _clean(axes)


def mark_steps(axes: Axes, count: int, names: Sequence[str] | None = None) -> None:
    """Write the numbers of the steps, or other names of them, below, as many as there is room for."""
    named = names or [f"{step:,}" for step in (0, max(count - 1, 0))]
    widest = max(width_of(line) for name in (named[0], named[-1]) for line in name.split("\n"))
    shown = spaced(count, pitch(axes)[0], widest + 0.1)
    texts = [names[step] if names else f"{step:,}" for step in shown]
    axes.set_xticks([step + 0.5 for step in shown], texts, fontsize=SMALL)
    _clean(axes)


def _clean(axes: Axes) -> None:
    """Rows of cells need neither marks at their names nor a frame."""
    axes.tick_params(which="both", length=0)
    for edge in axes.spines.values():
        edge.set_visible(False)
    axes.minorticks_off()
