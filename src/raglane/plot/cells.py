"""Drawings of sequences as rows of cells: the choice of sequences, the size of the drawing, and its
shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from raglane._utils.drawing import PALETTE
from raglane._utils.messages import printable, quote
from raglane.data.prepare.lengths import round_up
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from raglane.plot.picture import SMALL, TEXT, TITLE, Box, Picture, label, look, picture_in, width_of
from raglane.ragged import Ragged
from raglane.schedules import Table, lengths_of, longest
from raglane.segments import offsets_from_lengths, segment_ids

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_SEQUENCES = 200
"""The most sequences that a picture shows."""

# The most elements of a drawn batch, including padding: its tables take a few hundred megabytes.
_MOST_ELEMENTS = 2**23


@dataclass(frozen=True, eq=False)
class Sample:
    """The sequences that a picture draws, with the texts of their elements."""

    all: Tensor  # (B,), the lengths of the whole batch
    index: Tensor  # (D,), the drawn sequences, ascending
    lengths: Tensor  # (D,), of the drawn sequences
    starts: list[int]  # the index in the values of the first element of each
    labels: list[list[str]] | None = None

    @classmethod
    def read(cls, lengths: Any, labels: Any = None) -> Sample:
        """Choose sequences from lengths of any kind, and check the labels."""
        counts = lengths_of(lengths)
        count = counts.shape[0]
        most = min(count, MOST_SEQUENCES)
        index = (torch.arange(most, device="cpu") * (count - 1)).div(
            max(most - 1, 1), rounding_mode="floor"
        )
        drawn = counts[index]
        elements = most * longest(drawn)
        if elements > _MOST_ELEMENTS:
            rule = f"at most {_MOST_ELEMENTS:,} elements when padded"
            raise ArgumentError(
                "lengths", f"{elements:,}", rule, "draw fewer sequences, or their first steps"
            )
        starts = offsets_from_lengths(counts)[index].tolist()
        texts = None if labels is None else read_labels(labels, counts, index)
        return cls(counts, index, drawn, starts, texts)

    @property
    def steps(self) -> int:
        """The longest drawn length."""
        return longest(self.lengths)

    @property
    def remark(self) -> str:
        """The remark of a picture that omits sequences."""
        count = self.all.shape[0]
        return f"; {MOST_SEQUENCES} of {count:,} sequences drawn" if count > MOST_SEQUENCES else ""

    def text(self, sequence: int, step: int) -> str:
        """Return the text of an element of a drawn sequence."""
        if self.labels is not None:
            return self.labels[sequence][step]
        return str(self.starts[sequence] + step)

    def names(self) -> list[str]:
        """Return the number of each drawn sequence in the caller's order."""
        return [str(number) for number in self.index.tolist()]


def read_labels(labels: Any, lengths: Tensor, index: Tensor) -> list[list[str]]:
    """Return the labels of the drawn sequences as texts of printable characters."""
    if isinstance(labels, Ragged) and labels.feature_shape == ():
        labels = labels.to_list()
    rule = "lists with one label for each element"
    fix = "pass for each sequence a list of its labels"
    if not isinstance(labels, Sequence) or isinstance(labels, str | bytes):
        raise ArgumentTypeError("labels", quote(labels), rule, fix)
    if len(labels) != lengths.shape[0]:
        raise ShapeError(
            "labels", f"{len(labels)} lists", f"{rule}, for {lengths.shape[0]} sequences", fix
        )
    read = []
    for sequence in index.tolist():
        texts = labels[sequence]
        if isinstance(texts, Tensor):
            texts = texts.tolist()
        if not isinstance(texts, Sequence) or isinstance(texts, bytes):
            raise ArgumentTypeError("labels", f"{quote(texts)} for sequence {sequence}", rule, fix)
        if len(texts) != int(lengths[sequence]):
            got = f"{len(texts)} for sequence {sequence}"
            raise ShapeError("labels", got, f"{rule}, here {int(lengths[sequence])}", fix)
        read.append([_as_text(text) for text in texts])
    return read


def _as_text(label: Any) -> str:
    return printable(f"{label:g}" if isinstance(label, float) else str(label))


CELL = 0.26
"""The size of a cell with a short text, in inches."""
ABOVE = 0.36
"""The margin above rows, for a title, in inches."""
BELOW = 0.5
"""The margin below rows, for steps, in inches."""

# The widest text in a cell, in inches.
_WIDEST_TEXT = 0.8
# The largest width and height of a drawing, and its smallest width, in inches.
_WIDTH = 9.0
_HEIGHT = 8.0
_NARROWEST = 1.2


def grid_size(columns: int, rows: int, widest: float) -> tuple[float, float, float]:
    """Return the size of a drawing of cells in inches, and the number of columns that fit, at least
    ``columns``.
    """
    cell = max(CELL, min(widest, _WIDEST_TEXT) + 0.08)
    width = max(min(columns * cell, _WIDTH), _NARROWEST)
    return width, min(max(rows, 1) * CELL, _HEIGHT), max(columns, width / cell)


def room_for_names(names: Sequence[str]) -> float:
    """Return the left margin for the names of the rows and of their axis, in inches."""
    return max(map(width_of, names), default=0.0) + 0.42


def grid(
    axes: Any,
    titles: tuple[str, str, str],
    columns: int,
    rows: int,
    widest: float,
    names: Sequence[str],
    *,
    right: float = 0.2,
    above: float = 0.0,
    below: float = 0.0,
    lines: int = 1,
) -> Picture:
    """Return axes for rows of cells, with their limits and titles."""
    width, height, shown = grid_size(columns, rows, widest)
    height *= (max(rows, 1) + above + below) / max(rows, 1)
    left = room_for_names(names)
    bottom = BELOW + 0.12 * (lines - 1)
    whole = left + max(
        width + right, width_of(titles[0], TITLE) + 0.2, width_of(titles[1], TEXT) + 0.2
    )
    picture = picture_in(axes, (whole, bottom + height + ABOVE), [Box(left, bottom, width, height)])
    picture.axes[0].set_xlim(0, max(columns, 1) if picture.is_given else shown)
    picture.axes[0].set_ylim(max(rows, 1) + below, -above)
    label(picture.axes[0], *titles)
    return picture


def mark_rows(axes: Axes, names: Sequence[str], top_of: Callable[[int], float] = float) -> None:
    """Write the names of rows on the left, as many as fit."""
    shown = spaced(len(names), pitch(axes)[1], LINE)
    axes.set_yticks(
        [top_of(row) + 0.5 for row in shown], [names[row] for row in shown], fontsize=SMALL
    )
    _clean(axes)


def mark_steps(axes: Axes, count: int, names: Sequence[str] | None = None) -> None:
    """Write the numbers or names of steps below, as many as fit."""
    named = names or [f"{step:,}" for step in (0, max(count - 1, 0))]
    widest = max(width_of(line) for name in (named[0], named[-1]) for line in name.split("\n"))
    shown = spaced(count, pitch(axes)[0], widest + 0.1)
    texts = [names[step] if names else f"{step:,}" for step in shown]
    axes.set_xticks([step + 0.5 for step in shown], texts, fontsize=SMALL)
    _clean(axes)


def _clean(axes: Axes) -> None:
    """Remove the tick marks and the frame."""
    axes.tick_params(which="both", length=0)
    for edge in axes.spines.values():
        edge.set_visible(False)
    axes.minorticks_off()


# The smallest cell that is drawn separately, in inches, and the most of these cells.
_CELL = 0.11
_MOST_CELLS = 1_000
LINE = 0.15
"""The height of a line of the smallest text, in inches."""


class AdjacentElements(NamedTuple):
    """The elements of one sequence, which are adjacent in one row."""

    sequence: int
    row: int
    start: int
    real: int
    computed: int


def runs_of(table: Table, lengths: Tensor) -> list[AdjacentElements]:
    """Return the runs of a schedule; they exist by NOTE (rows) of
    :class:`~raglane.schedules.Table`.
    """
    time = segment_ids(table.time_offsets, table.elements)
    first = (table.step == 0).nonzero().view(-1)
    computed = torch.bincount(table.sequence, minlength=lengths.shape[0])
    sequence = table.sequence[first]
    columns = (sequence, table.row[first], time[first], lengths[sequence], computed[sequence])
    return [
        AdjacentElements(*numbers)
        for numbers in zip(*(column.tolist() for column in columns), strict=True)
    ]


def color_of(sequence: int) -> str:
    """Return the colour of a sequence: one of seven hues, then the same lighter, then darker."""
    from matplotlib.colors import to_hex, to_rgb

    hue = PALETTE[sequence % len(PALETTE)]
    shade = sequence // len(PALETTE) % 3
    if shade == 0:
        return hue
    red, green, blue = (
        level + (1 - level) * 0.6 if shade == 1 else level * 0.65 for level in to_rgb(hue)
    )
    return to_hex((red, green, blue))


def ink_on(color: str | tuple[float, float, float, float]) -> str:
    """Return black or white, whichever has more contrast with a colour (WCAG 2)."""
    from matplotlib.colors import to_rgb

    linear = [
        level / 12.92 if level <= 0.04045 else ((level + 0.055) / 1.055) ** 2.4
        for level in to_rgb(color)
    ]
    luminance = sum(
        weight * level for weight, level in zip((0.2126, 0.7152, 0.0722), linear, strict=True)
    )
    return "#000000" if (luminance + 0.05) ** 2 > 1.05 * 0.05 else "#FFFFFF"


def pitch(axes: Axes) -> tuple[float, float]:
    """Return the inches per unit of both axes."""
    box = axes.bbox
    dpi = axes.figure.dpi
    left, right = axes.get_xlim()
    bottom, top = axes.get_ylim()
    return box.width / dpi / abs(right - left), box.height / dpi / abs(top - bottom)


def spaced(count: int, inches: float, needed: float) -> range:
    """Return every n-th of ``count`` indexes so that a text fits at each; n is 1, 2, 5, 10, 20
    ...
    """
    return range(0, count, round_up(min(needed / inches, count)))


def fitting(text: str, inches: float) -> str:
    """Return a text unchanged if it fits, else its beginning with an ellipsis, or an empty text."""
    if width_of(text) <= inches:
        return text
    length = len(text)
    while length and width_of(f"{text[:length]}…") > inches:
        length -= 1
    return f"{text[:length]}…" if length else ""


def draw_runs(
    axes: Axes,
    runs: Sequence[AdjacentElements],
    cell: Callable[[int, int], str],
    whole: Callable[[int], str] = lambda _: "",
    *,
    top_of: Callable[[int], float] = float,
    hatch: str = "////",
) -> None:
    """Draw runs into axes whose limits are set; ``cell`` and ``whole`` give the text of an element
    and of a run.
    """
    wide, high = pitch(axes)
    are_cells = wide >= _CELL and high >= _CELL and sum(run.computed for run in runs) <= _MOST_CELLS
    for run in runs:
        top = top_of(run.row)
        if are_cells:
            _draw_cells(axes, run, top, cell if high >= LINE - 0.02 else None)
        elif run.real:
            text = whole(run.sequence)
            if high < LINE or width_of(text) + 0.04 > run.real * wide:
                text = ""
            color = color_of(run.sequence)
            draw_bar(axes, run.start, top, run.real, color, f"elements {run.sequence}", text)
        if run.computed > run.real:
            left = run.start + run.real
            width = run.computed - run.real
            if not are_cells:
                draw_bar(axes, left, top, width, None, f"padding {run.sequence}")
            _draw_hatching(axes, left, top, width, hatch)


def _draw_cells(
    axes: Axes, run: AdjacentElements, top: float, cell: Callable[[int, int], str] | None
) -> None:
    """Draw each element of a run separately, with its text if ``cell`` gives one."""
    color = color_of(run.sequence)
    widest = pitch(axes)[0] - 0.03
    for step in range(run.computed):
        if step < run.real:
            text = "" if cell is None else fitting(cell(run.sequence, step), widest)
            name = f"element {run.sequence} {step}"
            draw_bar(axes, run.start + step, top, 1, color, name, text)
        else:
            draw_bar(axes, run.start + step, top, 1, None, f"padding {run.sequence} {step}")


def draw_bar(
    axes: Axes, left: float, top: float, width: float, color: str | None, name: str, text: str = ""
) -> None:
    """Draw a rectangle of the height of a row, with a text in the middle."""
    from matplotlib.patches import Rectangle

    colors = look()
    wide, high = pitch(axes)
    edge = min(0.8, 72 * 0.12 * min(high, wide * width))
    # add_patch would update the limits of the data for each of many bars; they are already set.
    bar = Rectangle(
        (left, top),
        width,
        1,
        facecolor=color or colors.padding,
        edgecolor=colors.paper,
        linewidth=edge,
        zorder=2,
    )
    bar.set_label(f"_{name}")
    axes.add_artist(bar)
    if text:
        write_on(axes, left + width / 2, top + 0.5, text, color or colors.padding)


def write_on(axes: Axes, x: float, y: float, text: str, color: Any) -> None:
    """Write a text centred at a point with a background of this colour."""
    middle: dict[str, Any] = {"ha": "center", "va": "center_baseline"}
    axes.text(x, y, text, fontsize=SMALL, color=ink_on(color), parse_math=False, zorder=4, **middle)


def _draw_hatching(axes: Axes, left: float, top: float, width: float, hatch: str) -> None:
    """Draw hatching as a separate rectangle, because it has the colour of the edge."""
    from matplotlib.patches import Rectangle

    over = Rectangle(
        (left, top),
        width,
        1,
        fill=False,
        edgecolor=look().faint,
        linewidth=0,
        hatch=hatch,
        zorder=3,
    )
    over.set_label("_hatching")
    axes.add_artist(over)
