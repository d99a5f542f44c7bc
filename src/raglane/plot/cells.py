"""The drawing of schedules: runs of elements in rows, as cells where there is room, else as bars."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from raglane._utils.drawing import PALETTE
from raglane.plot.picture import SMALL, look, width_of
from raglane.schedules import Table
from raglane.segments import segment_ids

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "LINE",
    "Run",
    "Writing",
    "color_of",
    "draw_bar",
    "draw_runs",
    "fitting",
    "ink_on",
    "pitch",
    "round_up",
    "runs_of",
    "spaced",
]

# Inches. A cell at least as large is drawn as one; a line of the smallest text needs the last.
_CELL, LINE = 0.11, 0.15
_MOST_CELLS = 1_000


class Run(NamedTuple):
    """The elements of one sequence, one after the other in one row.

    Attributes:
        sequence: its number.
        row: the row.
        start: the time of its first element.
        real: how many elements exist.
        computed: how many are computed; what lies past ``real`` is waste.
    """

    sequence: int
    row: int
    start: int
    real: int
    computed: int


@dataclass(frozen=True)
class Writing:
    """What stands in the drawing.

    Attributes:
        cell: the text of an element, from the numbers of its sequence and its step; where there are cells.
        run: the text of a run, from the number of its sequence; where there are bars.
    """

    cell: Callable[[int, int], str]
    run: Callable[[int], str] = lambda sequence: ""  # noqa: ARG005


def runs_of(table: Table, lengths: Tensor) -> list[Run]:
    """The runs of a schedule: NOTE (rows) of :class:`~raglane.schedules.Table` says that there are some.

    Example:
        >>> from raglane.schedules import SCHEDULES
        >>> runs_of(SCHEDULES["padded"].table(torch.tensor([1, 2])), torch.tensor([1, 2]))[0]
        Run(sequence=0, row=0, start=0, real=1, computed=2)
    """
    time = segment_ids(table.time_offsets, table.elements)
    first = (table.step == 0).nonzero().view(-1)
    computed = torch.bincount(table.sequence, minlength=lengths.shape[0])
    sequence = table.sequence[first]
    columns = (sequence, table.row[first], time[first], lengths[sequence], computed[sequence])
    return [Run(*numbers) for numbers in zip(*(column.tolist() for column in columns), strict=True)]


def color_of(sequence: int) -> str:
    """The colour of a sequence: each of seven hues as it is, then lighter, then darker.

    Example:
        >>> color_of(0), color_of(7), color_of(14), color_of(21)
        ('#0072B2', '#99c7e0', '#004a74', '#0072B2')
    """
    from matplotlib.colors import to_hex, to_rgb

    hue, shade = PALETTE[sequence % len(PALETTE)], sequence // len(PALETTE) % 3
    if shade == 0:
        return hue
    red, green, blue = (part + (1 - part) * 0.6 if shade == 1 else part * 0.65 for part in to_rgb(hue))
    return to_hex((red, green, blue))


def ink_on(color: str | tuple[float, float, float, float]) -> str:
    """Black or white: what reads better on a colour (the contrast of WCAG 2).

    Example:
        >>> ink_on("#F0E442"), ink_on("#0072B2")
        ('#000000', '#FFFFFF')
    """
    from matplotlib.colors import to_rgb

    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(color)]
    luminance = sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return "#000000" if (luminance + 0.05) ** 2 > 1.05 * 0.05 else "#FFFFFF"


def pitch(axes: Axes) -> tuple[float, float]:
    """Inches per unit of both axes."""
    box, dpi = axes.bbox, axes.figure.dpi
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    return box.width / dpi / abs(right - left), box.height / dpi / abs(top - bottom)


def spaced(count: int, inches: float, needed: float) -> range:
    """Every n-th of ``count`` places, so few that what is written at each has room; n is 1, 2, 5, 10, 20 ...

    Example:
        >>> list(spaced(7, 0.1, 0.15))
        [0, 2, 4, 6]
    """
    return range(0, count, round_up(min(needed / inches, count)))


def round_up(least: float) -> int:
    """The smallest of 1, 2, 5, 10, 20, 50 ... that is at least so large.

    Example:
        >>> round_up(0.3), round_up(3), round_up(501)
        (1, 5, 1000)
    """
    step = 1
    while step < least:
        step = step * 5 // 2 if str(step)[0] == "2" else step * 2
    return step


def fitting(text: str, inches: float) -> str:
    """A text as it is where it fits, else its beginning and an ellipsis; nothing where not even that fits.

    Example:
        >>> fitting("recurrent", 1.0), fitting("recurrent", 0.4), fitting("recurrent", 0.1)
        ('recurrent', 'recur…', '')
    """
    if width_of(text) <= inches:
        return text
    kept = len(text)
    while kept and width_of(f"{text[:kept]}…") > inches:
        kept -= 1
    return f"{text[:kept]}…" if kept else ""


def draw_runs(
    axes: Axes, runs: Sequence[Run], writing: Writing, top_of: Callable[[int], float] = float, hatch: str = "////"
) -> None:
    """Draw runs into axes whose limits are set: times from left to right, rows from the top."""
    wide, high = pitch(axes)
    are_cells = wide >= _CELL and high >= _CELL and sum(run.computed for run in runs) <= _MOST_CELLS
    for run in runs:
        top, color = top_of(run.row), color_of(run.sequence)
        if are_cells:
            for step in range(run.computed):
                if step < run.real:
                    name = f"element {run.sequence} {step}"
                    text = fitting(writing.cell(run.sequence, step), wide - 0.03) if high >= LINE - 0.02 else ""
                    draw_bar(axes, run.start + step, top, 1, color, name, text)
                else:
                    draw_bar(axes, run.start + step, top, 1, None, f"padding {run.sequence} {step}")
        elif run.real:
            text = writing.run(run.sequence)
            text = text if high >= LINE and width_of(text) + 0.04 <= run.real * wide else ""
            draw_bar(axes, run.start, top, run.real, color, f"elements {run.sequence}", text)
        if run.computed > run.real:
            left, width = run.start + run.real, run.computed - run.real
            if not are_cells:
                draw_bar(axes, left, top, width, None, f"padding {run.sequence}")
            _draw_hatching(axes, left, top, width, hatch)


def draw_bar(axes: Axes, left: float, top: float, width: float, color: str | None, name: str, text: str = "") -> None:
    """One rectangle a row high, with its text in the middle."""
    from matplotlib.patches import Rectangle

    now, (wide, high) = look(), pitch(axes)
    edge = min(0.8, 72 * 0.12 * min(high, wide * width))
    # Not add_patch, which measures the data anew for each of many bars: the limits are set.
    bar = Rectangle(
        (left, top), width, 1, facecolor=color or now.padding, edgecolor=now.paper, linewidth=edge, zorder=2
    )
    bar.set_label(f"_{name}")
    axes.add_artist(bar)
    if text:
        axes.text(
            left + width / 2,
            top + 0.5,
            text,
            ha="center",
            va="center_baseline",
            fontsize=SMALL,
            color=ink_on(color or now.padding),
            parse_math=False,
            zorder=4,
        )


def _draw_hatching(axes: Axes, left: float, top: float, width: float, hatch: str) -> None:
    """A rectangle of its own, since a hatching has the colour of the edge."""
    from matplotlib.patches import Rectangle

    faint = look().faint
    over = Rectangle((left, top), width, 1, fill=False, edgecolor=faint, linewidth=0, hatch=hatch, zorder=3)
    over.set_label("_hatching")
    axes.add_artist(over)
