"""The padded batches that an epoch would have: how full they are, and three of them to look at."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from raglane.data.order import Batches, Limit, Order
from raglane.data.lengths import batch_fill


ORDERS = {"random": Order.random(), "grouped": Order.grouped(), "sorted": Order.sorted()}
"""In which order sequences come to batches: by chance, as ``--bucket`` does, by length."""

_SIZES = (8, 16, 32, 64, 128, 256, 512)

_Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Fill:
    """How full padded batches are."""

    batch_size: int
    order: str
    fill: float


@dataclass(frozen=True)
class Example:
    """A batch to look at."""

    name: str
    fill: float
    lengths: tuple[int, ...]


def batch_sizes(count: int) -> list[int]:
    """The sizes that are compared: powers of two that the sequences fill."""
    return [size for size in _SIZES if size <= count] or [count]


def fills(lengths: _Integers) -> tuple[Fill, ...]:
    """How full padded batches are, by their size and order."""
    return tuple(
        Fill(size, name, batch_fill(lengths, *Batches(lengths, Limit(sequences=size), order).whole()))
        for size in batch_sizes(len(lengths))
        for name, order in ORDERS.items()
    )


def examples(lengths: _Integers, batch_size: int, *, grouped: bool) -> tuple[Example, ...]:
    """The worst, the median and the best padded batch of an epoch, by their fill."""
    order = ORDERS["grouped" if grouped else "random"]
    batches = [lengths[batch] for batch in Batches(lengths, Limit(sequences=batch_size), order)]
    full = [batch for batch in batches if len(batch) == batch_size and batch.any()]
    full = full or [batch for batch in batches if batch.any()]
    ranked = sorted(full, key=_fill)
    last = len(ranked) - 1
    places = {"median": 0} if last == 0 else {"worst": 0, "median": len(ranked) // 2, "best": last}
    return tuple(
        Example(name, _fill(ranked[place]), tuple(sorted(ranked[place].tolist(), reverse=True)))
        for name, place in places.items()
    )


def _fill(lengths: _Integers) -> float:
    return float(lengths.sum() / (len(lengths) * lengths.max()))
