"""The picture of a plan: the time of an epoch against the batch size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raglane._utils.drawing import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION, YELLOW, frame
from raglane.planner.rows import Row
from raglane.planner.words import seconds_in_words
from raglane.plot.picture import SMALL, Box, Picture, label, look, place

__all__ = ["draw"]

_SIZE, _BOX = (8.4, 4.2), Box(0.95, 0.6, 5.0, 3.1)
# A colour and a marker for each pair, so that grey tells them apart too.
_STYLES = {
    ("cpu", "lanes"): (BLUE, "o"),
    ("program", "lanes"): ("#333333", "P"),
    ("torch", "packed"): (VERMILION, "s"),
    ("torch", "padded"): (ORANGE, "D"),
    ("reference", "packed"): (GREEN, "^"),
    ("reference", "lanes"): (PURPLE, "v"),
    ("reference", "padded"): (SKY, "<"),
    ("reference", "masked"): (YELLOW, ">"),
    ("reference", "each"): ("#888888", "x"),
}
# Times that are worth a tick.
_TICKS = (1e-4, 1e-3, 1e-2, 0.1, 1, 10, 60, 600, 3600, 36000, 360000)


def draw(rows: Sequence[Row], best: Row, title: str, axes: Any = None) -> Picture:
    """Seconds of an epoch of training against the batch size, a line per backend and schedule."""
    picture = place(axes, _SIZE, [_BOX])
    one = picture.axes[0]
    frame(one, look())
    shown = [row for row in rows if row.batch_size is not None and row.dtype == best.dtype]
    pairs = [pair for pair in _STYLES if any((row.backend, row.schedule) == pair for row in shown)]
    for pair in pairs:
        _lines(one, pair, [row for row in shown if (row.backend, row.schedule) == pair])
    ring: dict[str, Any] = {"s": 150, "facecolors": "none", "edgecolors": look().ink, "linewidths": 1.5, "zorder": 5}
    one.scatter([best.batch_size or 0], [best.rank_seconds], label="recommended", **ring)
    sizes = sorted({row.batch_size or 0 for row in shown})
    one.set_xscale("log", base=2)
    one.set_yscale("log")
    one.set_xlim(sizes[0] / 1.3, sizes[-1] * 1.3)
    one.set_xticks(sizes, [f"{size:,}" for size in sizes], fontsize=SMALL)
    low, high = (limit(row.rank_seconds for row in shown) for limit in (min, max))
    ticks = [tick for tick in _TICKS if low / 2 <= tick <= high * 2]
    one.set_yticks(ticks, [seconds_in_words(tick) for tick in ticks], fontsize=SMALL)
    one.minorticks_off()
    one.legend(frameon=False, fontsize=SMALL, labelcolor=look().ink, loc="upper left", bbox_to_anchor=(1, 1))
    label(one, title, "sequences in a batch", "an epoch of training")
    return picture


def _lines(axes: Any, pair: tuple[str, str], rows: Sequence[Row]) -> None:
    """The rows of a backend and schedule, random and grouped, with the number of threads that is fastest."""
    color, marker = _STYLES[pair]
    threads = min(rows, key=lambda row: row.rank_seconds).threads
    for grouped in (False, True):
        kept = [row for row in rows if (row.threads, row.grouped) == (threads, grouped)]
        points = sorted((row.batch_size or 0, row.rank_seconds) for row in kept)
        axes.plot(
            [size for size, _ in points],
            [seconds for _, seconds in points],
            color=color,
            marker=marker,
            markersize=5,
            markerfacecolor="none" if grouped else color,
            linestyle="--" if grouped else "-",
            linewidth=1.5,
            label=" ".join(pair) + (", grouped" if grouped else ""),
        )
