"""Charts of the lengths of a dataset, of the waste of its batches, and of measurements of the
caller.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from raglane._utils.checks import check_kind, check_real, check_whole
from raglane._utils.drawing import BLUE, GREEN, ORANGE, PALETTE, VERMILION, frame
from raglane._utils.messages import count_of, printable, quote, quote_all, shorten
from raglane.data.lengths import batch_fill, round_up
from raglane.data.order import BatchLimit, BatchSampler, EpochOrder
from raglane.errors import ArgumentError, ArgumentTypeError
from raglane.plot.picture import SMALL, TEXT, TITLE, Box, Picture, label, look, picture_in, width_of
from raglane.schedules import lengths_of

_WIDTH = 7.4
_HEIGHT = 3.95
_BOX = Box(0.85, 0.6, 5.4, 2.95)
# The most bars, and the most borders that are lines over the whole height.
_MOST_BINS = 50
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
    known = np.sort(lengths_of(lengths).numpy())
    borders = []
    if batch_size is not None:
        borders = _borders(
            known, check_whole("batch_size", batch_size, 1, "pass the sequences of a batch")
        )
    count = len(known)
    most = int(known[-1]) if len(known) else 0
    at = (
        {quantile: int(known[-(-quantile * count // 100) - 1]) for quantile in _QUANTILES}
        if count
        else {}
    )
    title = count_of(count, "sequence")
    if count:
        title += (
            f": half are at most {at[50]:,} long, 90 % at most {at[90]:,}, 99 % at most {at[99]:,}"
        )
    picture = _place(axes, title)
    counts = picture.axes[0]
    frame(counts, look(), grid="y")
    width = round_up((most + 1) / _MOST_BINS)
    edges = np.arange(0, most + 1 + width, width) - 0.5
    heights, _ = np.histogram(known, edges)
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
    are_few = len(borders) <= _MOST_BORDERS
    # Many lines would hide the bars, which end below the ticks.
    style = {"linestyle": "--"} if are_few else {"ymin": 0.96}
    for border in borders:
        counts.axvline(border, color=VERMILION, linewidth=1, zorder=3, **style)
    shares = counts.twinx()
    frame(shares, look(), hidden=("top", "left"), grid="")
    if count:
        lengths_there, last = np.unique(known, return_counts=True)
        up = np.cumsum(last) / count * 100
        shares.step(
            [0, *lengths_there],
            [0, *up],
            where="post",
            color=look().ink,
            linewidth=1.4,
            label="at most as long",
        )
        ring: dict[str, Any] = {
            "color": look().paper,
            "markeredgecolor": look().ink,
            "markersize": 5,
            "clip_on": False,
        }
        shares.plot(list(at.values()), list(at), "o", **ring)
    _limit(counts, shares, float(edges[-1]), int(heights.max(initial=0)))
    what = (
        f"; {'dashed' if are_few else 'ticks at the top'}: borders of batches of {batch_size:,}"
        if borders
        else ""
    )
    label(counts, title, f"length{f', {width:,} to a bar' if width > 1 else ''}{what}", "sequences")
    label(shares, "", "", "share that is at most as long (line, %)")
    return Picture(picture.figure, (counts, shares), picture.is_given)


def _place(axes: Any, title: str) -> Picture:
    """Return axes of one size, in a figure that is wide enough for the title."""
    return picture_in(
        axes, (max(_WIDTH, _BOX.left + width_of(title, TITLE) + 0.2), _HEIGHT), [_BOX]
    )


def _limit(counts: Any, shares: Any, end: float, highest: int) -> None:
    """Set limits and ticks of both axes: integers from 0."""
    counts.set_xlim(-0.5, end)
    counts.set_ylim(0, max(highest, 1) * 1.05)
    shares.set_ylim(0, 105)
    shares.set_yticks(range(0, 101, 25))
    across = max(1, int(_BOX.width / (width_of(f"{int(end):,}") + 0.15)))
    for axis, most, places in (
        (counts.xaxis, int(end), min(8, across)),
        (counts.yaxis, max(highest, 1), 6),
    ):
        ticks = range(0, most + 1, round_up((most + 1) / places))
        axis.set_ticks(ticks, [f"{tick:,}" for tick in ticks])


def _borders(known: npt.NDArray[np.int64], batch_size: int) -> list[float]:
    """Return the borders between sorted batches, halfway between the last and the next first
    length.
    """
    rows, bounds = BatchSampler(
        known, BatchLimit(sequences=batch_size), EpochOrder.sorted()
    ).whole()
    ordered = known[rows]
    return sorted(
        {(int(ordered[border - 1]) + int(ordered[border])) / 2 for border in bounds[1:-1]}
    )


def waste(lengths: Any, batch_sizes: Any = None, *, seed: int = 0, axes: Any = None) -> Picture:
    """Draw the share of padding in padded batches against their size, for random, bucketed and
    sorted batches.

    The batches are those of :class:`raglane.data.BatchSampler` in the orders ``random``,
    ``grouped`` and ``sorted``.

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
    known = lengths_of(lengths).numpy()
    if batch_sizes is None:
        sizes = [2**power for power in range(10) if power == 0 or 2**power <= len(known)]
    else:
        sizes = _read_sizes(batch_sizes)
    shares = {
        name: [
            100
            * (
                1
                - batch_fill(
                    known,
                    *BatchSampler(known, BatchLimit(sequences=size), order, seed=seed).whole(),
                )
            )
            for size in sizes
        ]
        for name, order in _ORDERS.items()
    }
    title = f"{count_of(len(known), 'sequence')}: the share of padded batches that is padding"
    picture = _place(axes, title)
    one = picture.axes[0]
    frame(one, look())
    for (name, share), (color, marker, line) in zip(shares.items(), _STYLES, strict=True):
        one.plot(
            sizes,
            share,
            color=color,
            marker=marker,
            linestyle=line,
            linewidth=1.8,
            markersize=5,
            label=name,
        )
    one.set_xscale("log", base=2)
    one.set_xlim(min(sizes) / 1.2, max(sizes) * 1.2)
    shown = sizes[:: -(-len(sizes) // 12)]
    one.set_xticks(shown, [f"{size:,}" for size in shown], fontsize=SMALL)
    one.minorticks_off()
    one.set_ylim(0, max(5.0, 1.1 * max(max(share) for share in shares.values())))
    one.legend(
        frameon=False,
        fontsize=SMALL,
        labelcolor=look().ink,
        loc="upper left",
        bbox_to_anchor=(1, 1),
    )
    label(one, title, "sequences in a batch", "waste (%)")
    return picture


_ORDERS = {
    "random": EpochOrder.random(),
    "bucketed": EpochOrder.grouped(),
    "sorted": EpochOrder.sorted(),
}
_STYLES = ((VERMILION, "o", "-"), (ORANGE, "s", "--"), (GREEN, "^", ":"))


def _read_sizes(given: Any) -> list[int]:
    rule = "a list of at least one batch size"
    fix = "pass e.g. [16, 32, 64]"
    if isinstance(given, np.ndarray):
        given = given.tolist()
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise ArgumentTypeError("batch_sizes", quote(given), rule, fix)
    if len(given) == 0:
        raise ArgumentError("batch_sizes", "none", rule, fix)
    return sorted(
        {check_whole(f"batch_sizes[{place}]", size, 1, fix) for place, size in enumerate(given)}
    )


_MARKERS = "os^DvP*X<>hp"
_LINES = ("-", "--", ":", "-.")
_MOST_NAMES = 40
_PLOT = (5.4, 2.95)


def times(rows: Sequence[Mapping[str, Any]], *, axes: Any = None) -> Picture:
    """Draw the time per element against the fill of the batch, a line per method.

    Args:
        rows: one mapping per measurement: ``method``, a name; ``fill``, the share of the padded
            batch that is real, above 0 and at most 1; ``seconds``, the time per existing element,
            above 0. Other keys are ignored.
        axes: as for :func:`histogram`.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ArgumentTypeError: ``rows`` is not a list of mappings, or a name is not a string.
        ArgumentError: ``rows`` is empty, a key is missing, a number is out of range, or there are
            more than 40 methods.
        ShapeError: there are several pairs of axes.

    Example:
        >>> import raglane as rl
        >>> rows = [
        ...     {"method": "padded", "fill": 0.5, "seconds": 4e-7},
        ...     {"method": "padded", "fill": 1.0, "seconds": 2e-7},
        ...     {"method": "lanes", "fill": 0.5, "seconds": 1e-7},
        ... ]
        >>> [line.get_label() for line in rl.plot.times(rows).axes[0].lines]
        ['padded', 'lanes']
    """
    numbers = {
        "fill": ("above 0 and at most 1", lambda number: 0 < number <= 1),
        "seconds": _ABOVE_ZERO,
    }
    methods: dict[str, list[tuple[float, float]]] = {}
    for name, (fill, seconds) in _read("rows", rows, "method", numbers):
        methods.setdefault(name, []).append((100 * fill, seconds))
    _check_count("rows", methods)
    scale, unit = _unit(max(seconds for points in methods.values() for _, seconds in points))
    picture, one = _with_legend(axes, methods)
    for number, (name, points) in enumerate(methods.items()):
        fills, seconds = np.transpose(sorted(points))
        line = _LINES[number % len(_LINES)]
        one.plot(
            fills,
            seconds / scale,
            label=name,
            linewidth=1.6,
            markersize=5,
            linestyle=line,
            **_style(number),
        )
    one.set_xlim(0, 102)
    one.set_ylim(0, None)
    _legend(one)
    label(
        one,
        "The time of an element that exists",
        "fill of the batch (%)",
        f"time per element ({unit})",
    )
    return picture


def roofline(
    kernels: Sequence[Mapping[str, Any]], *, peak: float, bandwidth: float, axes: Any = None
) -> Picture:
    """Draw the roofline of a machine, and the share of it that each kernel reaches.

    A kernel that computes ``intensity`` operations per byte of memory that it moves reaches at most
    ``min(peak, intensity * bandwidth)`` (Williams, Waterman and Patterson 2009, "Roofline: an
    insightful visual performance model for multicore architectures").

    Args:
        kernels: one mapping per kernel: ``name``; ``intensity`` in operations per byte, above 0;
            ``rate`` in operations per second, above 0. Other keys are ignored.
        peak: the machine's peak rate in operations per second, above 0.
        bandwidth: the bandwidth of its memory in bytes per second, above 0.
        axes: as for :func:`histogram`.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ArgumentTypeError: ``kernels`` is not a list of mappings, or a name is not a string.
        ArgumentError: ``kernels`` is empty, a key is missing, a number is not above 0, or there are
            more than 40 kernels.
        ShapeError: there are several pairs of axes.

    Example:
        >>> import raglane as rl
        >>> kernels = [{"name": "lstm", "intensity": 8.0, "rate": 60e9}]
        >>> axes = rl.plot.roofline(kernels, peak=100e9, bandwidth=20e9).axes[0]
        >>> [text.get_text() for text in axes.get_legend().get_texts()]
        ['lstm: 60 %']
    """
    rule, holds = _ABOVE_ZERO
    fix = "pass it in operations or bytes per second, e.g. 1e11"
    top = check_real("peak", peak, rule, holds, fix)
    slope = check_real("bandwidth", bandwidth, rule, holds, fix)
    points = _read("kernels", kernels, "name", {"intensity": _ABOVE_ZERO, "rate": _ABOVE_ZERO})
    _check_count("kernels", points)
    names = [
        f"{name}: {100 * rate / min(top, intensity * slope):.0f} %"
        for name, (intensity, rate) in points
    ]
    picture, one = _with_legend(axes, names)
    ridge = top / slope
    low = min([ridge, *(intensity for _, (intensity, _) in points)]) / 4
    high = max([ridge, *(intensity for _, (intensity, _) in points)]) * 4
    one.set_xscale("log")
    one.set_yscale("log")
    one.plot([low, ridge, high], [low * slope, top, top], color=look().ink, linewidth=1.8, zorder=2)
    for number, (name, (_, (intensity, rate))) in enumerate(zip(names, points, strict=True)):
        style = {
            "linestyle": "none",
            "markersize": 8,
            "markeredgecolor": look().ink,
            **_style(number),
        }
        one.plot([intensity], [rate], label=name, zorder=3, **style)
    one.set_xlim(low, high)
    rates = [rate for _, (_, rate) in points]
    one.set_ylim(min([low * slope, *rates]) / 2, max([top, *rates]) * 3)
    _mark_decades(one)
    _legend(one, "share of the roof")
    title = f"Roofline: {_engineering(top)}op/s at most, {_engineering(slope)}B/s of memory"
    label(one, title, "intensity (operations per byte)", "rate (operations per second)")
    return picture


_ABOVE_ZERO = ("a number above 0", lambda number: 0 < number < math.inf)


def _read(
    name: str, rows: Any, key: str, numbers: Mapping[str, tuple[str, Any]]
) -> list[tuple[str, tuple[float, ...]]]:
    """Return the checked name and numbers of each row."""
    keys = ", ".join((key, *numbers))
    rule = f"a list of mappings with {keys}"
    fix = "pass a list of dicts"
    if not isinstance(rows, Sequence) or isinstance(rows, str | bytes):
        raise ArgumentTypeError(name, quote(rows), rule, fix)
    if not rows:
        raise ArgumentError(name, "none", f"{rule}, with at least one", fix)
    read = []
    for index, row in enumerate(rows):
        where = f"{name}[{index}]"
        check_kind(where, row, Mapping, f"a mapping with {keys}", "pass a dict")
        missing = [one for one in (key, *numbers) if one not in row]
        if missing:
            raise ArgumentError(
                where, f"the keys {quote_all(row)}", f"a mapping with {keys}", f"add {missing[0]}"
            )
        check_kind(f"{where}[{key!r}]", row[key], str, "a text", "pass a name")
        found = [
            check_real(f"{where}[{one!r}]", row[one], needed, holds, "check the measurement")
            for one, (needed, holds) in numbers.items()
        ]
        read.append((shorten(printable(row[key]), 40), tuple(found)))
    return read


def _check_count(name: str, found: Any) -> None:
    if len(found) > _MOST_NAMES:
        rule = f"at most {_MOST_NAMES} names, the most that fit a legend"
        raise ArgumentError(name, f"{len(found)} names", rule, "draw fewer of them")


def _style(number: int) -> dict[str, Any]:
    """Return the colour and marker of a method; no two of 40 have the same pair."""
    return {"color": PALETTE[number % len(PALETTE)], "marker": _MARKERS[number % len(_MARKERS)]}


def _with_legend(axes: Any, names: Any) -> tuple[Picture, Any]:
    """Return axes with space for a legend of names on the right."""
    width, height = _PLOT
    height = max(height, 0.17 * len(names) + 0.3)
    right = max(map(width_of, names), default=0.0) + 0.8
    whole = max(0.95 + width + right, 0.95 + width_of("0" * 60, TITLE))
    picture = picture_in(axes, (whole, height + 1.0), [Box(0.95, 0.6, width, height)])
    one = picture.axes[0]
    frame(one, look())
    return picture, one


def _legend(axes: Any, title: str = "") -> None:
    """Draw the legend on the right; its dollar signs are not formulas."""
    legend = axes.legend(
        frameon=False,
        fontsize=SMALL,
        labelcolor=look().ink,
        loc="upper left",
        bbox_to_anchor=(1.01, 1.02),
        labelspacing=0.3,
        title=title or None,
        title_fontsize=TEXT,
        alignment="left",
    )
    for text in (*legend.get_texts(), legend.get_title()):
        text.set_parse_math(False)
        text.set_color(look().ink)


def _mark_decades(axes: Any) -> None:
    """Set ticks at every n-th power of ten, so that they do not overlap."""
    from matplotlib.ticker import FixedLocator, FuncFormatter

    for axis, (low, high), most in (
        (axes.xaxis, axes.get_xlim(), 8),
        (axes.yaxis, axes.get_ylim(), 8),
    ):
        first = math.ceil(math.log10(low))
        last = math.floor(math.log10(high))
        step = -(-(last - first + 1) // most)
        axis.set_major_locator(
            FixedLocator([10.0**power for power in range(first, last + 1, max(step, 1))])
        )
        axis.set_major_formatter(FuncFormatter(lambda value, _: _engineering(value).strip()))
    axes.minorticks_off()


def _engineering(number: float) -> str:
    """Return a number with its unit prefix: ``2.5 G``."""
    prefixes = (15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")
    power, letter = next((prefix for prefix in prefixes if number >= 10 ** prefix[0]), (0, ""))
    return f"{number / 10**power:.3g} {letter}"


def _unit(seconds: float) -> tuple[float, str]:
    """Return the scale and name of a unit in which a time has few digits."""
    units = (1.0, "s"), (1e-3, "ms"), (1e-6, "µs")
    return next((unit for unit in units if seconds >= unit[0]), (1e-9, "ns"))
