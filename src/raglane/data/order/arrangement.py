"""The order of one epoch, as a function: which rows any of its pools holds, and where batches start in it."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

from raglane.data.order.limit import Limit
from raglane.data.order.order import Order
from raglane.data.order.permutation import Permutation, key_of, shares_of, shuffle

__all__ = ["Arrangement", "falling"]

_Integers = npt.NDArray[np.int64]

# What random numbers are for: a key of its own each.
_WHOLE, _WITHIN, _BATCHES, _NOISE = range(4)


class Arrangement:
    """The order of one epoch. What it answers follows from its arguments alone, in any pool at once.

    The epoch is made of pools, one after the other. Sequences are arranged within a pool, and no batch holds those of
    two. A pool is arranged when it is asked for: nothing is as large as the epoch, but for the order ``sorted``.

    Args:
        lengths: ``(B,)``, unsigned or signed integers.
        limit: of a batch.
        order: of the sequences.
        key: of the seed and the epoch.
        usual: sequences that a batch usually holds.
        without: ``(m,)``, the rows that are left out, ascending.
    """

    def __init__(
        self,
        lengths: npt.NDArray[np.integer],
        limit: Limit,
        order: Order,
        *,
        key: int,
        usual: int,
        without: _Integers,
    ) -> None:
        self._lengths, self._limit, self._order, self._key = lengths, limit, order, key
        # A row that stays is its place, and the number of those before it that are left out.
        self._gaps = without - np.arange(len(without))
        self.count = len(lengths) - len(without)
        # Pools of equal size, so that none is tiny, and of whole batches where these are of a known size.
        unit = usual if limit.counts_only and order.kind != "windows" else 1
        units = -(-self.count // unit)
        most = {"windows": order.window, "sorted": max(units, 1)}.get(order.kind, order.pool * usual // unit)
        pools = -(-units // most)
        firsts = unit * (np.arange(pools) * units // max(pools, 1))
        self._bounds: _Integers = np.append(firsts, self.count)

    @property
    def pools(self) -> int:
        """The number of pools."""
        return len(self._bounds) - 1

    def sizes(self) -> _Integers:
        """The number of sequences of each pool, ``(pools,)``."""
        return np.diff(self._bounds)

    def batch_counts(self) -> _Integers | None:
        """The number of batches of each pool, where it is known beforehand: ``(pools,)``, or None."""
        sequences = self._limit.sequences
        return -(-self.sizes() // sequences) if sequences is not None and self._limit.counts_only else None

    def pool(self, number: int) -> tuple[_Integers, _Integers]:
        """The rows of a pool, ``(M,)``, and where its batches start in them, ``(b + 1,)``, first 0, last ``M``."""
        rows = self._rows(number)
        lengths = self._lengths[rows]
        by_length = self._order.by_length
        if by_length and self._order.kind != "sorted":
            # With noise no two are equal, and any sort gives the same.
            in_order = np.argsort(self._sizes(rows, lengths), kind=None if self._order.noise else "stable")
            rows, lengths = rows[in_order], lengths[in_order]
        known = lengths.astype(np.int64)
        starts = self._limit.cut(known, descending=by_length and not self._order.noise)
        bounds = np.append(starts, len(rows))
        if by_length and self._order.kind != "sorted":
            return _reordered(rows, bounds, shuffle(key_of(self._key, _BATCHES, number), len(starts)))
        return rows, bounds

    def _rows(self, number: int) -> _Integers:
        """The rows of a pool before they are arranged by length."""
        first, last = int(self._bounds[number]), int(self._bounds[number + 1])
        if self._order.kind == "sorted":
            return self._sorted
        if self._order.kind == "windows":
            return self._row_of(first + shuffle(key_of(self._key, _WITHIN, number), last - first))
        return self._row_of(self._permutation(np.arange(first, last)))

    def _row_of(self, places: _Integers) -> _Integers:
        return places + np.searchsorted(self._gaps, places, side="right") if len(self._gaps) else places

    @cached_property
    def _permutation(self) -> Permutation:
        return Permutation(key_of(self._key, _WHOLE), self.count)

    @cached_property
    def _sorted(self) -> _Integers:
        rows = self._row_of(np.arange(self.count))
        return rows[np.argsort(falling(self._lengths[rows]), kind="stable")]

    def _sizes(self, rows: _Integers, lengths: npt.NDArray[np.integer]) -> npt.NDArray[np.generic]:
        """What the rows of a pool are sorted by, ascending."""
        noise = self._order.noise
        if not noise:
            return falling(lengths)
        # Noise puts empty sequences in an order too.
        found: npt.NDArray[np.float64] = np.maximum(lengths, 0.5) * -(
            1 + noise * (2 * shares_of(key_of(self._key, _NOISE), rows) - 1)
        )
        return found


def falling(lengths: npt.NDArray[np.integer]) -> npt.NDArray[np.integer]:
    """Numbers that ascend as lengths fall, in 16 bits where these do: NumPy sorts them by their digits, which is fast.

    Example:
        >>> falling(np.array([3, 1, 2], np.uint16)).tolist()
        [0, 2, 1]
    """
    longest = lengths.max(initial=0)
    found: npt.NDArray[np.integer] = longest - lengths
    return found.astype(np.uint16, copy=False) if longest < 2**16 else found


def _reordered(rows: _Integers, bounds: _Integers, batches: _Integers) -> tuple[_Integers, _Integers]:
    """The rows batch after batch in another order of batches, and where they start then."""
    sizes = np.diff(bounds)[batches]
    ends = np.cumsum(sizes)
    index = np.arange(len(rows)) + np.repeat(bounds[:-1][batches] - (ends - sizes), sizes)
    return rows[index], np.append(0, ends)
