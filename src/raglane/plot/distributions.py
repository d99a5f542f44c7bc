"""The lengths of a dataset: how they are distributed, and what batches of them waste."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from raglane._utils.checks import check_whole
from raglane._utils.drawing import BLUE, GREEN, ORANGE, VERMILION, frame
from raglane.data.order import Batches, Limit, Order
from raglane.errors import ArgumentError, ArgumentTypeError, count_of, message, quote
from raglane.plot.cells import round_up
from raglane.plot.picture import SMALL, TITLE, Box, Picture, label, look, place, width_of
from raglane.schedules.costs import lengths_of

__all__ = ["batch_waste", "histogram", "waste"]

_WIDTH, _HEIGHT, _BOX = 7.4, 3.95, Box(0.85, 0.6, 5.4, 2.95)
_MOST_BINS = 50
_QUANTILES = (50, 90, 99)


def histogram(lengths: Any, batch_size: int | None = None, *, axes: Any = None) -> Picture:
    """How many sequences have which length, the share that is at most as long, and where buckets end.

    Args:
        lengths: ``(B,)`` integers of at least 0, or what has them, as for :func:`raglane.cost`.
        batch_size: draw the borders between batches of this size, sorted by length, as with
            :meth:`raglane.data.Order.sorted`. None draws no borders.
        axes: where to draw; None makes a figure.

    Returns:
        A picture with two pairs of axes over each other, the counts and the shares.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ArgumentTypeError: lengths or a batch size that are not integers; axes of another kind.
        ShapeError: lengths that are not a flat list, or more than one pair of axes.
        ArgumentError: a length below 0, or a batch size below 1.

    Example:
        >>> import raglane as rl
        >>> rl.plot.histogram([4, 6, 8, 5, 4, 3, 7, 8], batch_size=4).axes[0].get_title(loc="left")
        '8 sequences: half are at most 5 long, 90 % at most 8, 99 % at most 8'
    """
    known = np.sort(lengths_of(lengths).numpy())
    borders = []
    if batch_size is not None:
        borders = _borders(known, check_whole("batch_size", batch_size, 1, "pass the sequences of a batch"))
    count, most = len(known), int(known[-1]) if len(known) else 0
    at = {quantile: int(known[-(-quantile * count // 100) - 1]) for quantile in _QUANTILES} if count else {}
    title = count_of(count, "sequence")
    if count:
        title += f": half are at most {at[50]:,} long, 90 % at most {at[90]:,}, 99 % at most {at[99]:,}"
    picture = _place(axes, title)
    counts = picture.axes[0]
    frame(counts, look(), grid="y")
    width = round_up((most + 1) / _MOST_BINS)
    edges = np.arange(0, most + 1 + width, width) - 0.5
    heights, _ = np.histogram(known, edges)
    counts.bar(edges[:-1], heights, width, align="edge", color=BLUE, edgecolor=look().paper, linewidth=0.6, zorder=2)
    for border in borders:
        counts.axvline(border, color=VERMILION, linestyle="--", linewidth=1, zorder=3)
    shares = counts.twinx()
    frame(shares, look(), hidden=("top", "left"), grid="")
    if count:
        lengths_there, last = np.unique(known, return_counts=True)
        up = np.cumsum(last) / count * 100
        shares.step(
            [0, *lengths_there], [0, *up], where="post", color=look().ink, linewidth=1.4, label="at most as long"
        )
        shares.plot(
            list(at.values()),
            list(at),
            "o",
            color=look().paper,
            markeredgecolor=look().ink,
            markersize=5,
            clip_on=False,
        )
    _limit(counts, shares, float(edges[-1]), int(heights.max(initial=0)))
    what = f"; dashed: borders of batches of {batch_size:,}" if borders else ""
    label(counts, title, f"length{f', {width:,} to a bar' if width > 1 else ''}{what}", "sequences")
    label(shares, "", "", "share that is at most as long (line, %)")
    return Picture(picture.figure, (counts, shares), picture.is_given)


def _place(axes: Any, title: str) -> Picture:
    """Axes of one size, in a figure as wide as the title needs."""
    return place(axes, (max(_WIDTH, _BOX.left + width_of(title, TITLE) + 0.2), _HEIGHT), [_BOX])


def _limit(counts: Any, shares: Any, end: float, highest: int) -> None:
    """Whole numbers on both axes, from 0."""
    counts.set_xlim(-0.5, end)
    counts.set_ylim(0, max(highest, 1) * 1.05)
    shares.set_ylim(0, 105)
    shares.set_yticks(range(0, 101, 25))
    across = max(1, int(_BOX.width / (width_of(f"{int(end):,}") + 0.15)))
    for axis, most, places in ((counts.xaxis, int(end), min(8, across)), (counts.yaxis, max(highest, 1), 6)):
        ticks = range(0, most + 1, round_up((most + 1) / places))
        axis.set_ticks(ticks, [f"{tick:,}" for tick in ticks])


def _borders(known: npt.NDArray[np.int64], batch_size: int) -> list[float]:
    """Between which lengths one sorted batch ends and the next begins; on a length where that is in both."""
    rows, bounds = Batches(known, Limit(sequences=batch_size), Order.sorted()).whole()
    ordered = known[rows]
    return sorted({(int(ordered[border - 1]) + int(ordered[border])) / 2 for border in bounds[1:-1]})


def waste(lengths: Any, batch_sizes: Any = None, *, seed: int = 0, axes: Any = None) -> Picture:
    """What share of padded batches is padding, against their size: random, bucketed and sorted batches.

    All are those of :class:`raglane.data.Batches` in the orders ``random``, ``grouped`` and ``sorted``.

    Args:
        lengths: as for :func:`histogram`.
        batch_sizes: those to try, each at least 1; None for the powers of two up to 512 that the dataset fills.
        seed: of the order, 0 or above.
        axes: where to draw; None makes a figure.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ArgumentTypeError: lengths, sizes or a seed that are not integers; axes of another kind.
        ShapeError: lengths that are not a flat list, or more than one pair of axes.
        ArgumentError: a length below 0, no size or one below 1, or a seed below 0.

    Example:
        >>> import raglane as rl
        >>> axes = rl.plot.waste([4, 6, 8, 5, 4, 3, 7, 8], [2, 8]).axes[0]
        >>> {line.get_label(): f"{line.get_ydata()[-1]:.1f} %" for line in axes.lines}
        {'random': '29.7 %', 'bucketed': '29.7 %', 'sorted': '29.7 %'}
    """
    known = lengths_of(lengths).numpy()
    if batch_sizes is None:
        sizes = [2**power for power in range(10) if power == 0 or 2**power <= len(known)]
    else:
        sizes = _read_sizes(batch_sizes)
    shares = {
        name: [100 * batch_waste(known, Batches(known, Limit(sequences=size), order, seed=seed)) for size in sizes]
        for name, order in _ORDERS.items()
    }
    title = f"{count_of(len(known), 'sequence')}: the share of padded batches that is padding"
    picture = _place(axes, title)
    one = picture.axes[0]
    frame(one, look())
    for (name, share), (color, marker, line) in zip(shares.items(), _STYLES, strict=True):
        one.plot(sizes, share, color=color, marker=marker, linestyle=line, linewidth=1.8, markersize=5, label=name)
    one.set_xscale("log", base=2)
    one.set_xlim(min(sizes) / 1.2, max(sizes) * 1.2)
    shown = sizes[:: -(-len(sizes) // 12)]
    one.set_xticks(shown, [f"{size:,}" for size in shown], fontsize=SMALL)
    one.minorticks_off()
    one.set_ylim(0, max(5.0, 1.1 * max(max(share) for share in shares.values())))
    one.legend(frameon=False, fontsize=SMALL, labelcolor=look().ink, loc="upper left", bbox_to_anchor=(1, 1))
    label(one, title, "sequences in a batch", "waste (%)")
    return picture


_ORDERS = {"random": Order.random(), "bucketed": Order.grouped(), "sorted": Order.sorted()}
_STYLES = ((VERMILION, "o", "-"), (ORANGE, "s", "--"), (GREEN, "^", ":"))


def batch_waste(lengths: npt.NDArray[np.int64], batches: Batches) -> float:
    """The share of padded batches that is padding, over an epoch.

    Example:
        >>> known = np.array([4, 2, 1, 1])
        >>> round(batch_waste(known, Batches(known, Limit(sequences=2), Order.sorted())), 3)
        0.2
    """
    rows, bounds = batches.whole()
    longest = np.maximum.reduceat(lengths[rows], bounds[:-1]) if len(rows) else np.zeros(0, np.int64)
    padded = int((longest * np.diff(bounds)).sum())
    return 1 - int(lengths[rows].sum()) / padded if padded else 0.0


def _read_sizes(given: Any) -> list[int]:
    rule, fix = "a list of at least one batch size", "pass [16, 32, 64], say"
    if isinstance(given, np.ndarray):
        given = given.tolist()
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise ArgumentTypeError(message("batch_sizes", quote(given), rule, fix))
    if len(given) == 0:
        raise ArgumentError(message("batch_sizes", "none", rule, fix))
    return sorted({check_whole(f"batch_sizes[{place}]", size, 1, fix) for place, size in enumerate(given)})
