"""Pictures of the layouts of a batch, and of the schedules that compute it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raglane._utils.checks import check_whole
from raglane._utils.messages import count_of
from raglane.plot import cells
from raglane.plot.picture import SMALL, TEXT, Box, Picture, label, look, picture_in, width_of
from raglane.schedules import DEFAULT_LANES, SCHEDULES, Cost, cost

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_MOST_IN_STRIP = 60
# The width of a text of the strip in inches: two digits.
_STRIP_TEXT = 0.143


def padded(lengths: Any, *, labels: Any = None, axes: Any = None) -> Picture:
    """Draw the padded batch: a row per sequence, a cell per element, padding hatched; its costs are
    on the right.

    The costs are those of the product with one column of weights, as counted by
    :func:`raglane.cost`.

    Args:
        lengths: ``(B,)`` integers of at least 0, or an object with lengths, as for
            :func:`raglane.cost`.
        labels: the texts of the elements: a list per sequence, or a Ragged of one number per
            element. None writes the index of each element in the values.
        axes: matplotlib axes to draw into; None makes a figure.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ArgumentTypeError: ``lengths`` are not integers, or ``labels`` or ``axes`` have the wrong
            type.
        ShapeError: the number of labels differs from the number of elements, or there are several
            pairs of axes.
        ArgumentError: a length is below 0, or the batch has too many elements for a picture.

    Example:
        >>> import raglane as rl
        >>> picture = rl.plot.padded([9, 8, 6, 4, 3, 2])
        >>> print(picture.axes[0].texts[-1].get_text())
        One column of weights:
        padded: 54 multiplications, 48 additions
        packed: 32 multiplications, 26 additions
        saved: 22 and 22
    """
    sample = cells.Sample.read(lengths, labels)
    costs = cost(lengths)
    whole = costs["padded"]
    least = costs["packed"]
    side = _product(whole, least)
    counts = f"{count_of(whole.elements, 'element')}, {whole.waste:,} of them padding"
    titles = _title(sample, "padded", counts), f"step{sample.remark}", "sequence"
    rows = len(sample.lengths)
    right = max(width_of(line, TEXT) for line in side.split("\n")) + 0.3
    picture = cells.grid(
        axes, titles, sample.steps, rows, _widest(sample), sample.names(), right=right
    )
    plot = picture.axes[0]
    cells.draw_runs(
        plot, cells.runs_of(SCHEDULES["padded"].table(sample.lengths), sample.lengths), sample.text
    )
    cells.mark_rows(plot, sample.names())
    cells.mark_steps(plot, sample.steps)
    units: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points"}
    plot.annotate(
        side, (1, 1), (12, 0), va="top", fontsize=TEXT, color=look().ink, linespacing=1.4, **units
    )
    return picture


def _product(whole: Cost, least: Cost) -> str:
    """Return the costs of the product with one column of weights as text."""
    lines = [
        f"{layout.schedule}: {layout.multiplications:,} multiplications, {layout.additions:,} additions"
        for layout in (whole, least)
    ]
    saved = f"{whole.multiplications - least.multiplications:,} and {whole.additions - least.additions:,}"
    return "\n".join(("One column of weights:", *lines, f"saved: {saved}"))


def packed(lengths: Any, *, labels: Any = None, axes: Any = None) -> Picture:
    """Draw the packed layout: the sequences that have an element at each step, longest first, and
    their number below.

    For a small batch, the data of the pack are shown on top in the order of memory, step after
    step.

    Args:
        lengths: as for :func:`padded`.
        labels: as for :func:`padded`.
        axes: as for :func:`padded`.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ArgumentTypeError, ShapeError, ArgumentError: as for :func:`padded`.

    Example:
        >>> import raglane as rl
        >>> axes = rl.plot.packed([9, 8, 6, 4, 3, 2]).axes[0]
        >>> [tick.get_text().split()[0] for tick in axes.get_xticklabels()]
        ['6', '6', '5', '4', '3', '3', '2', '2', '1']
    """
    sample = cells.Sample.read(lengths, labels)
    count = cost(lengths)["packed"]
    table = SCHEDULES["packed"].table(sample.lengths)
    runs = cells.runs_of(table, sample.lengths)
    names = sample.names()
    ordered = [names[run.sequence] for run in sorted(runs, key=lambda run: run.row)]
    has_strip = 0 < table.elements <= _MOST_IN_STRIP
    title = _title(sample, "packed", f"{_summary(count)}, no padding")
    titles = title, sample.remark.removeprefix("; "), "sequence"
    above = 1.5 if has_strip else 0.0
    widest = _widest(sample)
    if has_strip:
        widest = max(widest, _STRIP_TEXT * table.elements / table.steps)
    picture = cells.grid(
        axes,
        titles,
        table.steps,
        len(ordered),
        widest,
        [*names, _ROWS_BELOW[0]],
        above=above,
        below=0.15,
        lines=2,
    )
    plot = picture.axes[0]
    cells.draw_runs(plot, runs, sample.text)
    cells.mark_rows(plot, ordered)
    if has_strip:
        order = list(zip(table.sequence.tolist(), table.step.tolist(), strict=True))
        _draw_strip(plot, order, table.time_offsets.tolist(), table.steps, sample)
        plot.set_yticks(
            [-1, *plot.get_yticks()],
            ["data", *(tick.get_text() for tick in plot.get_yticklabels())],
        )
    sizes = [f"{size:,}\n{step:,}" for step, size in enumerate(table.rows_per_step.tolist())]
    cells.mark_steps(plot, table.steps, sizes)
    if table.steps:
        _name_rows_below(plot, [*names, "data"] if has_strip else names)
    return picture


# The rows of numbers below a pack.
_ROWS_BELOW = ("batch size", "step")


def _name_rows_below(axes: Any, names: Sequence[str]) -> None:
    """Write on the left what the rows of numbers below are; the name of the vertical axis, which is
    left of the names of rows, moves left of these too.
    """
    right = axes.yaxis.get_major_ticks()[0].get_pad()
    down = axes.xaxis.get_major_ticks()[0].get_pad()
    axes.annotate(
        "\n".join(_ROWS_BELOW),
        (0, 0),
        (-right, -down),
        xycoords="axes fraction",
        textcoords="offset points",
        ha="right",
        va="top",
        fontsize=SMALL,
        color=look().ink,
    )
    missing = width_of(_ROWS_BELOW[0]) - max(map(width_of, names), default=0.0)
    axes.yaxis.labelpad += 72 * max(missing, 0.0)


def lanes(lengths: Any, lanes: int | None = None, *, threads: int = 1, axes: Any = None) -> Picture:
    """Draw the schedule ``lanes`` over time: when a sequence ends, the next begins; idle lanes at
    the end are grey.

    Each element shows the number of its sequence.

    Args:
        lengths: as for :func:`padded`.
        lanes: the number of lanes, at least 1; None for the default of :func:`raglane.cost`.
        threads: the number of threads that share the lanes, at least 1; each takes adjacent ones.
        axes: as for :func:`padded`.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ArgumentTypeError: ``lengths``, ``lanes`` or ``threads`` are not integers, or ``axes`` have
            the wrong type.
        ShapeError: ``lengths`` are not a flat list, or there are several pairs of axes.
        ArgumentError: a length is below 0, ``lanes`` or ``threads`` is below 1, or the batch has
            too many elements for a picture.

    Example:
        >>> import raglane as rl
        >>> rl.plot.lanes([4, 6, 8, 5, 4, 3, 7, 8], lanes=4, threads=2).axes[0].get_title(loc="left")
        '8 sequences, in 4 lanes: 45 elements, 12 steps'
    """
    sample = cells.Sample.read(lengths)
    count = cost(lengths, lanes=lanes)["lanes"]
    check_whole("threads", threads, 1, "pass the number of threads")
    table = SCHEDULES["lanes"].table(sample.lengths, lanes)
    rows = int(table.row.max()) + 1 if table.elements else 0
    thread = [row * min(threads, rows) // rows for row in range(rows)]
    gap = 0.5

    def top_of(row: int) -> float:
        return row + gap * thread[row]

    names = [f"thread {thread[row]}, {row}" if threads > 1 else str(row) for row in range(rows)]
    most = min(DEFAULT_LANES if lanes is None else int(lanes), int(sample.all.count_nonzero()))
    title = _title(sample, f"in {count_of(most, 'lane')}", _summary(count))
    titles = title, f"step (grey: idle){sample.remark}", "lane"
    extra = gap * thread[-1] if rows else 0.0
    numbers = sample.names()
    widest = max(map(width_of, numbers), default=0)
    picture = cells.grid(axes, titles, table.steps, rows, widest, names, below=extra)
    plot = picture.axes[0]
    _draw_lanes(plot, cells.runs_of(table, sample.lengths), table.steps, rows, numbers, top_of)
    cells.mark_rows(plot, names, top_of)
    cells.mark_steps(plot, table.steps)
    return picture


def schedules(lengths: Any, lanes: int | None = None, *, axes: Any = None) -> Picture:
    r"""Draw all schedules with the same scale, and their numbers of elements, waste and steps.

    Each element shows the number of its sequence. Padding is hatched, steps at which a row keeps
    its state are lined, and idle lanes are grey. Only ``each``, which has one row and a step per
    element, has a scale of its own.

    Args:
        lengths: as for :func:`padded`.
        lanes: the number of lanes, at least 1; None for the default of :func:`raglane.cost`.
        axes: five, for each, padded, masked, packed and lanes; None makes a figure.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ArgumentTypeError: ``lengths`` or ``lanes`` are not integers, or ``axes`` have the wrong
            type.
        ShapeError: ``lengths`` are not a flat list, or there are not five axes.
        ArgumentError: a length is below 0, ``lanes`` is below 1, or the batch has too many elements
            for a picture.

    Example:
        >>> import raglane as rl
        >>> picture = rl.plot.schedules([4, 6, 8, 5, 4, 3, 7, 8], lanes=4)
        >>> print(*(axes.get_title(loc="left") for axes in picture.axes), sep="\n")
        each: 45 elements, 45 steps
        padded: 64 elements, 8 steps
        19 elements wasted
        masked: 64 elements, 8 steps
        19 elements wasted
        packed: 45 elements, 8 steps
        lanes: 45 elements, 12 steps
    """
    sample = cells.Sample.read(lengths)
    costs = cost(lengths, lanes=lanes)
    tables = {name: schedule.table(sample.lengths, lanes) for name, schedule in SCHEDULES.items()}
    rows = {
        name: int(table.row.max()) + 1 if table.elements else 1 for name, table in tables.items()
    }
    numbers = sample.names()
    steps = max([1, *(table.steps for name, table in tables.items() if name != "each")])
    picture = picture_in(axes, *_boxes(rows, steps, cells.room_for_names(numbers)))
    for (name, table), plot in zip(tables.items(), picture.axes, strict=True):
        plot.set_xlim(0, max(table.steps, 1) if name == "each" else steps)
        plot.set_ylim(rows[name], 0)
        runs = cells.runs_of(table, sample.lengths)
        what, side = _MEANINGS.get(name, ("", "sequence"))
        names = [numbers[run.sequence] for run in sorted(runs, key=lambda run: run.row)]
        if name == "lanes":
            _draw_lanes(plot, runs, table.steps, rows[name], numbers)
            names = [str(row) for row in range(rows[name] if runs else 0)]
        else:
            hatch = "---" if SCHEDULES[name].holds_state else "////"
            cells.draw_runs(
                plot, runs, lambda sequence, _: numbers[sequence], numbers.__getitem__, hatch=hatch
            )
        cells.mark_rows(plot, names if side else [])
        cells.mark_steps(plot, table.steps)
        count = costs[name]
        title = f"{name}: {count_of(count.elements, 'element')}, {count_of(count.steps, 'step')}"
        title += f"\n{count_of(count.waste, 'element')} wasted" if count.waste else ""
        label(plot, title, f"step{what}{sample.remark}", side)
    return picture


# The suffix of the name of the steps, and the name of the rows.
_MEANINGS = {
    "each": ("", ""),
    "padded": (" (hatched: padding)", "sequence"),
    "masked": (" (lined: the state is held)", "sequence"),
    "lanes": (" (grey: idle)", "lane"),
}


def _boxes(
    rows: Mapping[str, int], steps: int, left: float
) -> tuple[tuple[float, float], list[Box]]:
    """Return the size of the figure of all schedules, and the box of each: one on top, then rows of
    two. A phone can show the figure of few steps.
    """
    width = min(max(2.4, 0.2 * steps), 4.6)
    between = left + 0.3
    highest = max(rows.values())
    height = min(max(highest, 2) * cells.CELL, 4.0)
    # A title may have two lines.
    above = cells.ABOVE + 0.16
    room = above + height + cells.BELOW
    total = cells.ABOVE + cells.CELL + cells.BELOW + 2 * room
    boxes = [Box(left, total - cells.ABOVE - cells.CELL, 2 * width + between, cells.CELL)]
    for index, name in enumerate(list(rows)[1:]):
        high = height * rows[name] / max(highest, 2)
        top = total - cells.ABOVE - cells.CELL - cells.BELOW - (index // 2) * room - above
        boxes.append(Box(left + (width + between) * (index % 2), top - high, width, high))
    return (left + 2 * width + between + 0.25, total), boxes


def _summary(count: Cost) -> str:
    waste = f" {count.waste:,} of them waste," if count.waste else ""
    return f"{count_of(count.elements, 'element')},{waste} {count_of(count.steps, 'step')}"


def _title(sample: cells.Sample, how: str, what: str) -> str:
    return f"{count_of(len(sample.all), 'sequence')}, {how}: {what}"


def _widest(sample: cells.Sample) -> float:
    """Return the width of the widest text of an element in inches; of many, only the longest are
    measured.
    """
    if int(sample.lengths.sum()) > 1_000:
        return 0.0
    lengths = enumerate(sample.lengths.tolist())
    texts = [sample.text(sequence, step) for sequence, length in lengths for step in range(length)]
    return max(map(width_of, sorted(texts, key=len)[-20:]), default=0.0)


def _draw_lanes(
    axes: Axes,
    runs: Sequence[cells.AdjacentElements],
    steps: int,
    rows: int,
    numbers: Sequence[str],
    top_of: Callable[[int], float] = float,
) -> None:
    """Draw the runs of lanes, and the idle ends of the lanes."""
    cells.draw_runs(
        axes, runs, lambda sequence, _: numbers[sequence], numbers.__getitem__, top_of=top_of
    )
    ends = [0] * rows
    for run in runs:
        ends[run.row] = max(ends[run.row], run.start + run.computed)
    for row, end in enumerate(ends):
        if end < steps:
            cells.draw_bar(axes, end, top_of(row), steps - end, None, f"idle {row}")


def _draw_strip(
    axes: Axes,
    order: Sequence[tuple[int, int]],
    bounds: Sequence[int],
    steps: int,
    sample: cells.Sample,
) -> None:
    """Draw the data of a pack above its rows, as wide as all its steps; a line marks the start of
    each step.
    """
    scale = steps / len(order)
    wide = cells.pitch(axes)[0] * scale
    for index, (sequence, step) in enumerate(order):
        text = cells.fitting(sample.text(sequence, step), wide - 0.02)
        name = f"data {sequence} {step}"
        cells.draw_bar(axes, index * scale, -1.5, scale, cells.color_of(sequence), name, text)
    for bound in bounds:
        axes.plot(
            [bound * scale] * 2,
            [-1.62, -0.38],
            color=look().ink,
            linewidth=1.2,
            zorder=5,
            clip_on=False,
        )
