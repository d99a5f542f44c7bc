"""A plan in words: its table, its reason, the long tail, the layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from raglane.nn.recurrent.layer import RecurrentLayer
from raglane.planner.batches import epoch_of, thin_out
from raglane.planner.calibration import Calibration
from raglane.planner.model import Profile
from raglane.planner.rows import LEAST, Row

__all__ = [
    "COLUMNS",
    "ROUGH",
    "bytes_in_words",
    "describe",
    "fields",
    "seconds_in_words",
    "shown",
    "tail",
    "why",
]

COLUMNS = ("backend", "schedule", "batches", "dtype", "threads", "elements", "waste", "train", "infer", "p90", "memory")
"""The columns of the table of a plan."""

ROUGH = "~: its calls are much longer than any that was measured in this way, so the time may be off by a factor"
"""What the sign before a time says."""

# Shares of the sequences that may make a long tail, and how much longer the longest must be.
_TAILS, _LONG = (0.999, 0.99, 0.95), 2.0


def seconds_in_words(seconds: float) -> str:
    """A time with two or three digits and its unit.

    Example:
        >>> [seconds_in_words(seconds) for seconds in (0.00012, 0.0345, 6.78, 345.0, 8000.0)]
        ['0.12 ms', '34.5 ms', '6.78 s', '5.8 min', '2.2 h']
    """
    for unit, size, digits in (("h", 3600, 1), ("min", 60, 1), ("s", 1, 2)):
        if seconds >= size:
            return f"{seconds / size:.{digits}f} {unit}"
    milliseconds = 1000 * seconds
    return f"{milliseconds:.1f} ms" if milliseconds >= 10 else f"{milliseconds:.2f} ms"


def bytes_in_words(count: float) -> str:
    """A number of bytes with its unit.

    Example:
        >>> [bytes_in_words(count) for count in (512, 2_500_000, 3 * 2**30)]
        ['1 KB', '2.4 MB', '3.0 GB']
    """
    for unit, size in (("GB", 2**30), ("MB", 2**20)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{max(1, round(count / 2**10))} KB"


def describe(layer: RecurrentLayer) -> str:
    """A layer as it was built, in one line.

    Example:
        >>> from raglane import nn
        >>> describe(nn.GRU(3, 4, bidirectional=True))
        'GRU(3, 4, bidirectional=True)'
    """
    return " ".join(repr(layer).split())


def fields(row: Row) -> tuple[str, ...]:
    """A row as the words of ``COLUMNS``."""
    batches = f"{row.limit}, {'grouped' if row.grouped else 'random'}"
    waste = f"{row.waste / row.elements:.0%}" if row.elements else "0%"
    about = "~" if row.is_rough else ""
    train, infer, p90 = (
        f"{about}{seconds_in_words(seconds)}" for seconds in (row.train_seconds, row.infer_seconds, row.step_p90)
    )
    return (
        row.backend,
        row.schedule,
        batches,
        row.dtype,
        f"{row.threads}",
        f"{row.elements:,}",
        waste,
        train,
        infer,
        p90,
        bytes_in_words(row.peak_bytes),
    )


def shown(rows: Sequence[Row], best: Row) -> list[Row]:
    """The rows that a table shows: the best of each way, and each batch size of the recommended one."""
    first: dict[object, Row] = {}
    for row in rows:
        first.setdefault(row.way, row)
    same = [row for row in rows if row.way == best.way and row.batch_size is not None]
    kept = {id(row): row for row in (best, *same, *first.values())}
    return sorted(kept.values(), key=lambda row: row.rank_seconds)


def why(best: Row, rows: Sequence[Row], ranks: int) -> str:
    """The reason for a recommendation, in a sentence."""
    parts = [f"An epoch of training takes {seconds_in_words(best.train_seconds)}"]
    # Of all that the table shows, however its batches are limited: else the sentence claims more than the table does.
    rivals = [row for row in rows if row.backend == "torch"]
    if best.backend != "torch" and rivals:
        other = min(rivals, key=lambda row: row.rank_seconds)
        ratio = other.rank_seconds / best.rank_seconds
        order = "grouped" if other.grouped else "random"
        which = f"{other.schedule}, {order}, {other.limit}" + (f", {other.dtype}" if other.dtype != best.dtype else "")
        parts.append(f"{ratio:.1f} times as fast as the fastest of torch ({which})")
    rows = [row for row in rows if (row.batch_size is None) == (best.batch_size is None)]
    same = [row for row in rows if (row.way, row.size) == (best.way, best.size) and row is not best]
    for row in same:
        gain = row.rank_seconds / best.rank_seconds
        what = "grouping by length would take" if row.grouped else "random batches would take"
        parts.append(f"{what} {gain:.2f} of that")
    larger = [row for row in rows if row.way == best.way and row.size > best.size]
    if larger:
        least = min(row.rank_seconds for row in larger) / best.rank_seconds
        parts.append(f"larger batches {least:.2f}")
    if ranks > 1:
        parts.append(f"the slowest of {ranks} processes takes {best.rank_spread:.2f} times the mean")
    return ", ".join(parts) + "."


def tail(lengths: Tensor, best: Row, rows: Sequence[Row], calibration: Calibration) -> str | None:
    """What the longest sequences cost, padded and as recommended; None where none is much longer than the others."""
    part, factor = thin_out(lengths)
    longest = int(part.max())
    for share in _TAILS:
        border = int(torch.quantile(part.float(), share)) + 1
        if longest >= _LONG * border:
            break
    else:
        return None
    padded = [row for row in rows if row.schedule == "padded" and row.backend == "torch"] or [best]
    alike = [row for row in padded if (row.batch_size, row.grouped) == (best.batch_size, best.grouped)]
    costs = []
    for row in (min(alike or padded, key=lambda row: row.train_seconds), best):
        with_them, without = (_seconds(some, row, calibration) for some in (part, part[part <= border]))
        costs.append(max(0.0, 1 - without / with_them))
    count = round(int((part > border).sum()) * factor)
    head = f"{count:,} of {lengths.shape[0]:,} sequences are longer than {border} steps"
    return f"{head}: padded they cost {costs[0]:.1%} of the time, as recommended {costs[1]:.1%}."


def _seconds(lengths: Tensor, row: Row, calibration: Calibration) -> float:
    epoch = epoch_of(lengths, row.limit, grouped=row.grouped)
    coefficients = calibration.seconds[row.way, "train"]
    times = [calibration.features(row.way, Profile.of(row.way, batch)) @ coefficients for batch in epoch.batches]
    return float(epoch.weights @ np.maximum(times, LEAST))
