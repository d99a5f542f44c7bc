"""Texts and the picture of a plan: table, reason, long tail."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raglane._utils.drawing import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION, YELLOW, frame
from raglane._utils.words import bytes_in_words, seconds_in_words
from raglane.planner.calibration import Calibration
from raglane.planner.model import Profile
from raglane.planner.predicted import LEAST, Row, epoch_of, thin_out
from raglane.plot.picture import SMALL, Box, Picture, label, look, picture_in

COLUMNS = (
    "backend",
    "schedule",
    "train",
    "infer",
    "p90",
    "batches",
    "memory",
    "dtype",
    "threads",
    "elements",
    "waste",
)
"""The columns of the table of a plan."""

ROUGH = "~: its calls are much longer than any that was measured in this way, so the time may be off by a factor"
"""The note on the sign before a time."""

# Quantiles at which a long tail may begin.
_TAILS = (0.999, 0.99, 0.95)
# The least ratio of the longest length to that quantile.
_LONG = 2.0

# The size of the picture, and the box of its axes, in inches.
_SIZE = (8.4, 4.2)
_BOX = Box(0.95, 0.6, 5.0, 3.1)
# A colour and a marker for each pair, which are distinct in greyscale too.
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
# Seconds at the ticks of the axis.
_TICKS = (1e-4, 1e-3, 1e-2, 0.1, 1, 10, 60, 600, 3600, 36000, 360000)


def range_in_words(ends: tuple[float, float]) -> str:
    """Return an interval of times, rounded outwards to two significant digits, in the unit of its
    longer one.
    """
    units = (("h", 3600), ("min", 60), ("s", 1), ("ms", 1e-3))
    unit, size = next((pair for pair in units if ends[1] >= pair[1]), units[-1])
    texts = []
    for end, rounded in zip(ends, (math.floor, math.ceil), strict=True):
        number = max(end, LEAST) / size
        step = 10.0 ** (math.floor(math.log10(number)) - 1)
        # Rounded to 6 digits before, because 1.1 / 0.1 exceeds 11.
        texts.append(f"{round(rounded(round(number / step, 6)) * step, 12):,g}")
    return f"{' to '.join(texts)} {unit}"


def fields(row: Row) -> tuple[str, ...]:
    """Return the entries of a row for ``COLUMNS``."""
    batches = f"{row.limit}, {'bucketed' if row.bucketed else 'random'}"
    waste = f"{row.waste / row.elements:.0%}" if row.elements else "0%"
    about = "~" if row.is_rough else ""
    times = [
        range_in_words(row.train_range),
        range_in_words(row.infer_range),
        seconds_in_words(row.step_p90),
    ]
    times = [about + taken for taken in times]
    size = f"{row.elements:,}"
    memory = bytes_in_words(row.peak_bytes)
    return (
        row.backend,
        row.schedule,
        *times,
        batches,
        memory,
        row.dtype,
        str(row.threads),
        size,
        waste,
    )


def shown(rows: Sequence[Row], best: Row) -> list[Row]:
    """Return the rows of the printed table: the best of each way, and all batch sizes of the
    recommended way.
    """
    first: dict[object, Row] = {}
    for row in rows:
        first.setdefault(row.way, row)
    same = [row for row in rows if row.way == best.way and row.batch_size is not None]
    chosen = {id(row): row for row in (*same, *first.values())}
    return sorted(chosen.values(), key=lambda row: row.rank_seconds)


def why(best: Row, rows: Sequence[Row], ranks: int) -> str:
    """Return the reason for a recommendation, as a sentence."""
    reasons = [f"An epoch of training takes {range_in_words(best.train_range)}"]
    # Among all rows of the table, whichever way their batches are limited, so that sentence and
    # table agree.
    rivals = [row for row in rows if row.backend == "torch"]
    if best.backend != "torch" and rivals:
        reasons.append(_gain(best, min(rivals, key=lambda row: row.rank_seconds)))
    rows = [row for row in rows if (row.batch_size is None) == (best.batch_size is None)]
    for row in rows:
        if (row.way, row.size) == (best.way, best.size) and row is not best:
            change = "bucketing" if row.bucketed else "random batches"
            ratio = row.rank_seconds / best.rank_seconds
            reasons.append(f"{change} would take {ratio:.2f} of that")
    larger = [row.rank_seconds for row in rows if row.way == best.way and row.size > best.size]
    if larger:
        reasons.append(f"larger batches {min(larger) / best.rank_seconds:.2f}")
    if ranks > 1:
        reasons.append(
            f"the slowest of {ranks} processes takes {best.rank_spread:.2f} times the mean"
        )
    return ", ".join(reasons) + "."


def _gain(best: Row, other: Row) -> str:
    """Return how many times as fast as another row the best one is."""
    ratio = other.rank_seconds / best.rank_seconds
    facts = [other.schedule, "bucketed" if other.bucketed else "random", str(other.limit)]
    if other.dtype != best.dtype:
        facts.append(other.dtype)
    return f"{ratio:.1f} times as fast as the fastest of torch ({', '.join(facts)})"


def tail(lengths: Tensor, best: Row, rows: Sequence[Row], calibration: Calibration) -> str | None:
    """Return the cost of the longest sequences, padded and as recommended, or None without a long
    tail.
    """
    sample, factor = thin_out(lengths)
    longest = int(sample.max())
    for share in _TAILS:
        border = int(torch.quantile(sample.float(), share)) + 1
        if longest >= _LONG * border:
            break
    else:
        return None
    padded = [row for row in rows if row.schedule == "padded" and row.backend == "torch"] or [best]
    alike = [
        row for row in padded if (row.batch_size, row.bucketed) == (best.batch_size, best.bucketed)
    ]
    costs = []
    for row in (min(alike or padded, key=lambda row: row.train_seconds), best):
        whole = _seconds(sample, row, calibration)
        without = _seconds(sample[sample <= border], row, calibration)
        costs.append(max(0.0, 1 - without / whole))
    count = round(int((sample > border).sum()) * factor)
    head = f"{count:,} of {lengths.shape[0]:,} sequences are longer than {border} steps"
    return f"{head}: padded they cost {costs[0]:.1%} of the time, as recommended {costs[1]:.1%}."


def _seconds(lengths: Tensor, row: Row, calibration: Calibration) -> float:
    epoch = epoch_of(lengths, row.limit, bucketed=row.bucketed)
    coefficients = calibration.seconds[row.way, "train"]
    times = [
        calibration.features(row.way, Profile.of(row.way, batch)) @ coefficients
        for batch in epoch.batches
    ]
    return float(epoch.weights @ np.maximum(times, LEAST))


def draw(rows: Sequence[Row], best: Row, title: str, axes: Any = None) -> Picture:
    """Draw the seconds of an epoch of training against the batch size, a line per backend and
    schedule.
    """
    picture = picture_in(axes, _SIZE, [_BOX])
    (plot,) = picture.axes
    ink = look().ink
    frame(plot, look())
    shown = [row for row in rows if row.batch_size is not None and row.dtype == best.dtype]
    for pair in _STYLES:
        of_pair = [row for row in shown if (row.backend, row.schedule) == pair]
        if of_pair:
            _lines(plot, pair, of_pair)
    plot.scatter(
        [best.batch_size or 0],
        [best.rank_seconds],
        label="recommended",
        s=150,
        facecolors="none",
        edgecolors=ink,
        linewidths=1.5,
        zorder=5,
    )
    sizes = sorted({row.batch_size or 0 for row in shown})
    plot.set_xscale("log", base=2)
    plot.set_yscale("log")
    plot.set_xlim(sizes[0] / 1.3, sizes[-1] * 1.3)
    plot.set_xticks(sizes, [f"{size:,}" for size in sizes], fontsize=SMALL)
    seconds = [row.rank_seconds for row in shown]
    ticks = [tick for tick in _TICKS if min(seconds) / 2 <= tick <= max(seconds) * 2]
    plot.set_yticks(ticks, [seconds_in_words(tick) for tick in ticks], fontsize=SMALL)
    plot.minorticks_off()
    plot.legend(
        frameon=False, fontsize=SMALL, labelcolor=ink, loc="upper left", bbox_to_anchor=(1, 1)
    )
    label(plot, title, "sequences in a batch", "an epoch of training")
    return picture


def _lines(axes: Any, pair: tuple[str, str], rows: Sequence[Row]) -> None:
    """Draw the rows of a backend and schedule, random and bucketed, with their fastest number of
    threads.
    """
    color, marker = _STYLES[pair]
    threads = min(rows, key=lambda row: row.rank_seconds).threads
    for bucketed in (False, True):
        points = sorted(
            (row.batch_size or 0, row.rank_seconds)
            for row in rows
            if (row.threads, row.bucketed) == (threads, bucketed)
        )
        sizes, seconds = np.transpose(points)
        axes.plot(
            sizes,
            seconds,
            color=color,
            label=" ".join(pair) + (", bucketed" if bucketed else ""),
            marker=marker,
            markersize=5,
            markerfacecolor="none" if bucketed else color,
            linestyle="--" if bucketed else "-",
            linewidth=1.5,
        )
