"""Charts of the lengths of a dataset, and of the waste of its batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from raglane._utils.checks import check_whole
from raglane._utils.drawing import BLUE, GREEN, ORANGE, VERMILION, frame
from raglane._utils.messages import count_of, quote
from raglane.data.order import BatchLimit, BatchSampler, EpochOrder
from raglane.data.prepare.lengths import batch_density, round_up
from raglane.errors import ArgumentError, ArgumentTypeError
from raglane.plot.picture import SMALL, TITLE, Box, Picture, label, look, picture_in, width_of
from raglane.schedules import lengths_of

# The least size of a figure, which a phone can show, and the box of its axes, in inches.
_WIDTH = 6.5
_HEIGHT = 3.95
_BOX = Box(0.85, 0.6, 4.6, 2.95)
# The most bars.
_MOST_BINS = 50
# The most borders that are lines over the whole height.
_MOST_BORDERS = 12
_QUANTILES = (50, 90, 99)


def histogram(lengths: Any, batch_size: int | None = None, *, axes: Any = None) -> Picture:
    """Draw a histogram of lengths, their cumulative share, and the borders of buckets.

    Args:
        lengths: ``(B,)`` integers of at least 0, or an object with lengths, as for
            :func:`raglane.cost`.
        batch_size: the size of batches sorted by length, as with
            :meth:`raglane.data.EpochOrder.sorted`, whose borders are drawn; None draws no borders.
        axes: matplotlib axes to draw into; None makes a figure.

    Returns:
        A picture with two overlaid pairs of axes, the counts and the shares.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ArgumentTypeError: ``lengths`` or ``batch_size`` are not integers, or ``axes`` have the
            wrong type.
        ShapeError: ``lengths`` are not a flat list, or there are several pairs of axes.
        ArgumentError: a length is below 0, or ``batch_size`` is below 1.

    Example:
        >>> import raglane as rl
        >>> rl.plot.histogram([4, 6, 8, 5, 4, 3, 7, 8], batch_size=4).axes[0].get_title(loc="left")
        '8 sequences: half are at most 5 long, 90 % at most 8, 99 % at most 8'
    """
    ordered = np.sort(lengths_of(lengths).numpy())
    borders = []
    if batch_size is not None:
        check_whole("batch_size", batch_size, 1, "pass the sequences of a batch")
        borders = _borders(ordered, batch_size)
    count = len(ordered)
    most = int(ordered[-1]) if count else 0
    quantiles: dict[int, int] = {}
    title = count_of(count, "sequence")
    if count:
        quantiles = {share: int(ordered[-(-share * count // 100) - 1]) for share in _QUANTILES}
        half, nine_tenths, nearly_all = quantiles.values()
        title += f": half are at most {half:,} long, 90 % at most {nine_tenths:,}"
        title += f", 99 % at most {nearly_all:,}"
    picture = _picture(axes, title)
    counts = picture.axes[0]
    frame(counts, look(), grid="y")
    width = round_up((most + 1) / _MOST_BINS)
    edges = np.arange(0, most + 1 + width, width) - 0.5
    heights, _ = np.histogram(ordered, edges)
    counts.bar(
        edges[:-1],
        heights,
        width,
        align="edge",
        color=BLUE,
        edgecolor=look().paper,
        linewidth=0.6,
        zorder=2,
    )
    below = f"length, {width:,} to a bar" if width > 1 else "length"
    if borders:
        below += f"; {_draw_borders(counts, borders)}: borders of batches of {batch_size:,}"
    shares = counts.twinx()
    frame(shares, look(), hidden=("top", "left"), grid="")
    if count:
        _draw_shares(shares, ordered, quantiles)
    _limit(counts, shares, float(edges[-1]), int(heights.max(initial=0)))
    label(counts, title, below, "sequences")
    label(shares, "", "", "share that is at most as long (line, %)")
    return Picture(picture.figure, (counts, shares), picture.is_given)


def _draw_borders(axes: Any, borders: Sequence[float]) -> str:
    """Draw borders between batches; return their name in the legend."""
    are_few = len(borders) <= _MOST_BORDERS
    # Many lines would hide the bars, which end below the ticks.
    style: dict[str, Any] = {"linestyle": "--"} if are_few else {"ymin": 0.96}
    for border in borders:
        axes.axvline(border, color=VERMILION, linewidth=1, zorder=3, **style)
    return "dashed" if are_few else "ticks at the top"


def _draw_shares(axes: Any, ordered: npt.NDArray[np.int64], quantiles: dict[int, int]) -> None:
    """Draw the cumulative share of the lengths, with a ring at each quantile."""
    lengths, counts = np.unique(ordered, return_counts=True)
    up = np.cumsum(counts) / len(ordered) * 100
    axes.step(
        [0, *lengths],
        [0, *up],
        where="post",
        color=look().ink,
        linewidth=1.4,
        label="at most as long",
    )
    axes.plot(
        list(quantiles.values()),
        list(quantiles),
        "o",
        color=look().paper,
        markeredgecolor=look().ink,
        markersize=5,
        clip_on=False,
    )


def _picture(axes: Any, title: str) -> Picture:
    """Return axes of one size, in a figure that is wide enough for the title."""
    width = max(_WIDTH, _BOX.left + width_of(title, TITLE) + 0.2)
    return picture_in(axes, (width, _HEIGHT), [_BOX])


def _limit(counts: Any, shares: Any, end: float, highest: int) -> None:
    """Set limits and ticks of both axes: integers from 0."""
    counts.set_xlim(-0.5, end)
    counts.set_ylim(0, max(highest, 1) * 1.05)
    shares.set_ylim(0, 105)
    shares.set_yticks(range(0, 101, 25))
    across = max(1, int(_BOX.width / (width_of(f"{int(end):,}") + 0.15)))
    for axis, most, texts in (
        (counts.xaxis, int(end), min(8, across)),
        (counts.yaxis, max(highest, 1), 6),
    ):
        ticks = range(0, most + 1, round_up((most + 1) / texts))
        axis.set_ticks(ticks, [f"{tick:,}" for tick in ticks])


def _borders(lengths: npt.NDArray[np.int64], batch_size: int) -> list[float]:
    """Return the borders between sorted batches, halfway between the last and the next first
    length.
    """
    sampler = BatchSampler(lengths, BatchLimit(sequences=batch_size), EpochOrder.sorted())
    rows, bounds = sampler.whole()
    ordered = lengths[rows]
    return sorted(
        {(int(ordered[border - 1]) + int(ordered[border])) / 2 for border in bounds[1:-1]}
    )


def waste(lengths: Any, batch_sizes: Any = None, *, seed: int = 0, axes: Any = None) -> Picture:
    """Draw the share of padding in padded batches against their size, for random, bucketed and
    sorted batches.

    The batches are those of :class:`raglane.data.BatchSampler` in the orders ``random``,
    ``bucketed`` and ``sorted``.

    Args:
        lengths: as for :func:`histogram`.
        batch_sizes: sizes of at least 1; None for the powers of two up to 512 that the dataset
            fills.
        seed: the seed of the random orders, 0 or above.
        axes: as for :func:`histogram`.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ArgumentTypeError: ``lengths``, ``batch_sizes`` or ``seed`` are not integers, or ``axes``
            have the wrong type.
        ShapeError: ``lengths`` are not a flat list, or there are several pairs of axes.
        ArgumentError: a length is below 0, there is no size or one below 1, or ``seed`` is below 0.

    Example:
        >>> import raglane as rl
        >>> axes = rl.plot.waste([4, 6, 8, 5, 4, 3, 7, 8], [2, 8]).axes[0]
        >>> {line.get_label(): f"{line.get_ydata()[-1]:.1f} %" for line in axes.lines}
        {'random': '29.7 %', 'bucketed': '29.7 %', 'sorted': '29.7 %'}
    """
    counts = lengths_of(lengths).numpy()
    if batch_sizes is None:
        sizes = [2**power for power in range(10) if power == 0 or 2**power <= len(counts)]
    else:
        sizes = _read_sizes(batch_sizes)

    def share(size: int, order: EpochOrder) -> float:
        sampler = BatchSampler(counts, BatchLimit(sequences=size), order, seed=seed)
        return 100 * (1 - batch_density(counts, *sampler.whole()))

    shares = {name: [share(size, order) for size in sizes] for name, order in _ORDERS.items()}
    title = f"{count_of(len(counts), 'sequence')}: the share of padded batches that is padding"
    picture = _picture(axes, title)
    (plot,) = picture.axes
    frame(plot, look())
    for (name, line), (color, marker, style) in zip(shares.items(), _STYLES, strict=True):
        plot.plot(
            sizes,
            line,
            color=color,
            marker=marker,
            linestyle=style,
            linewidth=1.8,
            markersize=5,
            label=name,
        )
    plot.set_xscale("log", base=2)
    plot.set_xlim(min(sizes) / 1.2, max(sizes) * 1.2)
    shown = sizes[:: -(-len(sizes) // 12)]
    plot.set_xticks(shown, [f"{size:,}" for size in shown], fontsize=SMALL)
    plot.minorticks_off()
    plot.set_ylim(0, max(5.0, 1.1 * max(max(line) for line in shares.values())))
    plot.legend(
        frameon=False,
        fontsize=SMALL,
        labelcolor=look().ink,
        loc="upper left",
        bbox_to_anchor=(1, 1),
    )
    label(plot, title, "sequences in a batch", "waste (%)")
    return picture


_ORDERS = {
    "random": EpochOrder.random(),
    "bucketed": EpochOrder.bucketed(),
    "sorted": EpochOrder.sorted(),
}
_STYLES = ((VERMILION, "o", "-"), (ORANGE, "s", "--"), (GREEN, "^", ":"))


def _read_sizes(sizes: Any) -> list[int]:
    rule = "a list of at least one batch size"
    fix = "pass e.g. [16, 32, 64]"
    if isinstance(sizes, np.ndarray):
        sizes = sizes.tolist()
    if not isinstance(sizes, Sequence) or isinstance(sizes, str | bytes):
        raise ArgumentTypeError("batch_sizes", quote(sizes), rule, fix)
    if len(sizes) == 0:
        raise ArgumentError("batch_sizes", "none", rule, fix)
    return sorted(
        {check_whole(f"batch_sizes[{index}]", size, 1, fix) for index, size in enumerate(sizes)}
    )
