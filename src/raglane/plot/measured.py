"""Measurements that the caller has: drawn, not made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from raglane._utils.checks import check_kind, check_real
from raglane._utils.drawing import PALETTE, frame
from raglane.errors import ArgumentError, ArgumentTypeError, message, printable, quote, quote_all, shorten
from raglane.plot.picture import SMALL, TEXT, TITLE, Box, Picture, label, look, place, width_of

__all__ = ["roofline", "times"]

_MARKERS, _LINES = "os^DvP*X<>hp", ("-", "--", ":", "-.")
_MOST_NAMES = 40
_PLOT = (5.4, 2.95)


def times(rows: Sequence[Mapping[str, Any]], *, axes: Any = None) -> Picture:
    """The time of an element against the fill of the batch, a line for each method.

    Args:
        rows: one mapping per measurement: ``method``, a name; ``fill``, the share of the padded batch that is real,
            above 0 and at most 1; ``seconds``, the time of one element that exists, above 0. Other keys are ignored.
        axes: where to draw; None makes a figure.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ArgumentTypeError: not a list of mappings, or a name that is no text.
        ArgumentError: no rows, a key that is missing, a number out of range, or more than 40 methods.
        ShapeError: more than one pair of axes.

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
    numbers = {"fill": ("above 0 and at most 1", lambda number: 0 < number <= 1), "seconds": _ABOVE_ZERO}
    methods: dict[str, list[tuple[float, float]]] = {}
    for name, (fill, seconds) in _read("rows", rows, "method", numbers):
        methods.setdefault(name, []).append((100 * fill, seconds))
    _check_count("rows", methods)
    scale, unit = _unit(max(seconds for points in methods.values() for _, seconds in points))
    picture, one = _place(axes, methods)
    for place_in_legend, (name, points) in enumerate(methods.items()):
        fills, seconds_of = zip(*sorted(points), strict=True)
        one.plot(
            fills,
            [seconds / scale for seconds in seconds_of],
            label=name,
            linewidth=1.6,
            markersize=5,
            linestyle=_LINES[place_in_legend % len(_LINES)],
            **_style(place_in_legend),
        )
    one.set_xlim(0, 102)
    one.set_ylim(0, None)
    _legend(one)
    label(one, "The time of an element that exists", "fill of the batch (%)", f"time per element ({unit})")
    return picture


def roofline(kernels: Sequence[Mapping[str, Any]], *, peak: float, bandwidth: float, axes: Any = None) -> Picture:
    """The roofline of a machine, and how close each kernel comes to it.

    The model of Williams, Waterman and Patterson 2009, "Roofline: an insightful visual performance model for multicore
    architectures": a kernel that computes ``intensity`` operations per byte of memory it moves reaches at most
    ``min(peak, intensity * bandwidth)``.

    Args:
        kernels: one mapping per kernel: ``name``; ``intensity`` in operations per byte, above 0; ``rate`` in operations
            per second, above 0. Other keys are ignored.
        peak: operations per second that the machine computes at most, above 0.
        bandwidth: bytes per second that its memory gives at most, above 0.
        axes: where to draw; None makes a figure.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ArgumentTypeError: not a list of mappings, or a name that is no text.
        ArgumentError: no kernels, a key that is missing, a number that is not above 0, or more than 40 kernels.
        ShapeError: more than one pair of axes.

    Example:
        >>> import raglane as rl
        >>> kernels = [{"name": "lstm", "intensity": 8.0, "rate": 60e9}]
        >>> axes = rl.plot.roofline(kernels, peak=100e9, bandwidth=20e9).axes[0]
        >>> [text.get_text() for text in axes.get_legend().get_texts()]
        ['lstm: 60 %']
    """
    rule, holds = _ABOVE_ZERO
    fix = "pass it in operations or bytes per second, 1e11 say"
    top = check_real("peak", peak, rule, holds, fix)
    slope = check_real("bandwidth", bandwidth, rule, holds, fix)
    points = _read("kernels", kernels, "name", {"intensity": _ABOVE_ZERO, "rate": _ABOVE_ZERO})
    _check_count("kernels", points)
    names = [f"{name}: {100 * rate / min(top, intensity * slope):.0f} %" for name, (intensity, rate) in points]
    picture, one = _place(axes, names)
    ridge = top / slope
    low = min([ridge, *(intensity for _, (intensity, _) in points)]) / 4
    high = max([ridge, *(intensity for _, (intensity, _) in points)]) * 4
    one.set_xscale("log")
    one.set_yscale("log")
    one.plot([low, ridge, high], [low * slope, top, top], color=look().ink, linewidth=1.8, zorder=2)
    for place_in_legend, (name, (_, (intensity, rate))) in enumerate(zip(names, points, strict=True)):
        one.plot(
            [intensity],
            [rate],
            label=name,
            linestyle="none",
            markersize=8,
            markeredgecolor=look().ink,
            zorder=3,
            **_style(place_in_legend),
        )
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
    """The name and the numbers of each row, checked."""
    keys = ", ".join((key, *numbers))
    rule, fix = f"a list of mappings with {keys}", "pass a list of dicts"
    if not isinstance(rows, Sequence) or isinstance(rows, str | bytes):
        raise ArgumentTypeError(message(name, quote(rows), rule, fix))
    if not rows:
        raise ArgumentError(message(name, "none", f"{rule}, at least one", fix))
    read = []
    for index, row in enumerate(rows):
        where = f"{name}[{index}]"
        check_kind(where, row, Mapping, f"a mapping with {keys}", "pass a dict")
        missing = [one for one in (key, *numbers) if one not in row]
        if missing:
            got = f"the keys {quote_all(row)}"
            raise ArgumentError(message(where, got, f"a mapping with {keys}", f"add {missing[0]}"))
        check_kind(f"{where}[{key!r}]", row[key], str, "a text", "pass a name")
        found = [
            check_real(f"{where}[{one!r}]", row[one], needed, holds, "check the measurement")
            for one, (needed, holds) in numbers.items()
        ]
        read.append((shorten(printable(row[key]), 40), tuple(found)))
    return read


def _check_count(name: str, found: Any) -> None:
    if len(found) > _MOST_NAMES:
        rule = f"at most {_MOST_NAMES} names, which a legend can hold"
        raise ArgumentError(message(name, f"{len(found)} names", rule, "draw a part of them"))


def _style(number: int) -> dict[str, Any]:
    """Colour and marker of a method: both differ among the first few, and no two of 40 have the same pair."""
    return {"color": PALETTE[number % len(PALETTE)], "marker": _MARKERS[number % len(_MARKERS)]}


def _place(axes: Any, names: Any) -> tuple[Picture, Any]:
    """Axes with room for a legend of names on the right."""
    width, height = _PLOT
    height = max(height, 0.17 * len(names) + 0.3)
    beside = max(map(width_of, names), default=0.0) + 0.8
    whole = max(0.95 + width + beside, 0.95 + width_of("0" * 60, TITLE))
    picture = place(axes, (whole, height + 1.0), [Box(0.95, 0.6, width, height)])
    one = picture.axes[0]
    frame(one, look())
    return picture, one


def _legend(axes: Any, title: str = "") -> None:
    """A legend on the right, whose dollar signs are no formulas."""
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
    """Ticks at powers of ten, or at every second, third ... of them, so that they stay apart."""
    from matplotlib.ticker import FixedLocator, FuncFormatter

    for axis, (low, high), most in ((axes.xaxis, axes.get_xlim(), 8), (axes.yaxis, axes.get_ylim(), 8)):
        first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
        step = -(-(last - first + 1) // most)
        axis.set_major_locator(FixedLocator([10.0**power for power in range(first, last + 1, max(step, 1))]))
        axis.set_major_formatter(FuncFormatter(lambda value, _: _engineering(value).strip()))
    axes.minorticks_off()


def _engineering(number: float) -> str:
    """A number with the letter of its thousands: ``2.5 G``.

    Example:
        >>> _engineering(2.5e9), _engineering(100), _engineering(0.01)
        ('2.5 G', '100 ', '0.01 ')
    """
    for power, letter in ((15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if number >= 10**power:
            return f"{number / 10**power:.3g} {letter}"
    return f"{number:.3g} "


def _unit(seconds: float) -> tuple[float, str]:
    """A unit in which a time is a number of few digits."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= scale:
            return scale, unit
    return 1e-9, "ns"
