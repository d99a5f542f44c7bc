"""In which order sequences come to batches, by permutations that can be evaluated at any place."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from raglane._utils.checks import check_flag, check_real
from raglane.data.epochs import check_least
from raglane.data.order.limit import BatchLimit

KINDS = ("random", "sorted", "grouped", "windows")

_Integers = npt.NDArray[np.int64]
# What random numbers are for: a key of its own each.
_WHOLE, _WITHIN, _BATCHES, _NOISE = range(4)
_Bits = npt.NDArray[np.uint64]

_MASK = 2**64 - 1
_HALF = np.uint64(32)
# Up to so many places a table is made; a Feistel network of a small domain is not yet uniform.
_SMALL = 1 << 16
# From four rounds on a Feistel network is a strong pseudorandom permutation (Luby and Rackoff, 1988).
_ROUNDS = 6


@dataclass(frozen=True)
class EpochOrder:
    """In which order sequences come to batches: :meth:`random`, :meth:`sorted`, :meth:`grouped` or :meth:`windows`.

    Attributes:
        kind: the name of the method.
        pool: batches whose sequences are arranged together.
        window: sequences that are arranged together, for windows.
        by_length: whether batches are made of similar lengths.
        noise: how far a length may be off where sequences are arranged by it, as a share of it.

    Example:
        >>> print(EpochOrder.random(), EpochOrder.grouped(noise=0.1), EpochOrder.windows(1000), sep="; ")
        random; grouped, pools of 200 batches, noise 0.1; windows of 1,000 sequences, grouped
    """

    kind: str
    pool: int = 200
    window: int = 0
    by_length: bool = False
    noise: float = 0.0

    @staticmethod
    def random() -> EpochOrder:
        """Every order of the sequences is as likely as any other, and batches are cut from it.

        Example:
            >>> print(EpochOrder.random())
            random
        """
        return EpochOrder("random")

    @staticmethod
    def sorted() -> EpochOrder:
        """From the longest sequence to the shortest, the same in every epoch.

        Example:
            >>> print(EpochOrder.sorted())
            sorted
        """
        return EpochOrder("sorted", by_length=True)

    @staticmethod
    def grouped(pool: int = 200, noise: float = 0.0) -> EpochOrder:
        """Batches of similar lengths, and yet other batches in every epoch.

        The sequences come in a random order, in pools of some batches. A pool is sorted by length and cut into batches,
        and its batches are shuffled.

        Args:
            pool: batches in a pool, at least 1. Larger pools give more similar lengths and less chance.
            noise: lengths are taken for up to so much longer or shorter where they are sorted, from 0 to 1, as a
                share. It gives a sequence more others to meet, and batches more padding.

        Raises:
            ArgumentTypeError: something else than numbers.
            ArgumentError: a number out of its range.

        Example:
            >>> print(EpochOrder.grouped(pool=100))
            grouped, pools of 100 batches
        """
        check_least("pool", pool, 1)
        return EpochOrder("grouped", pool=pool, by_length=True, noise=_check_noise(noise))

    @staticmethod
    def windows(sequences: int, *, by_length: bool = True, noise: float = 0.0) -> EpochOrder:
        """The order of the data, but for what lies near: for data that is read as a stream.

        Each window of successive sequences is shuffled, and no batch holds sequences of two windows. So no more than a
        window has to be held at a time.

        Args:
            sequences: in a window at most, at least 1; better many times those of a batch. Windows are of equal size.
            by_length: make batches of similar lengths within the window, and shuffle them.
            noise: as for :meth:`grouped`.

        Raises:
            ArgumentTypeError: something else than numbers, or than a bool for ``by_length``.
            ArgumentError: a number out of its range.

        Example:
            >>> print(EpochOrder.windows(512, by_length=False))
            windows of 512 sequences
        """
        check_least("sequences", sequences, 1)
        grouped = check_flag("by_length", by_length)
        return EpochOrder("windows", window=sequences, by_length=grouped, noise=_check_noise(noise))

    def __str__(self) -> str:
        parts = [self.kind]
        if self.kind == "grouped":
            parts.append(f"pools of {self.pool:,} batches")
        if self.kind == "windows":
            parts = [f"windows of {self.window:,} sequences", *["grouped"] * self.by_length]
        if self.noise:
            parts.append(f"noise {self.noise:g}")
        return ", ".join(parts)


def _check_noise(noise: float) -> float:
    return check_real("noise", noise, "from 0 to 1", lambda share: 0 <= share <= 1, "pass e.g. 0.1")


class EpochPools:
    """The order of one epoch. What it answers follows from its arguments alone, in any pool at once.

    The epoch is made of pools, one after the other. Sequences are arranged within a pool, and no batch holds those of
    two. A pool is arranged when it is asked for: nothing is as large as the epoch, but for the order ``sorted``.
    """

    def __init__(
        self,
        lengths: npt.NDArray[np.integer],
        limit: BatchLimit,
        order: EpochOrder,
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
        return rows[np.argsort(descending_keys(self._lengths[rows]), kind="stable")]

    def _sizes(self, rows: _Integers, lengths: npt.NDArray[np.integer]) -> npt.NDArray[np.generic]:
        noise = self._order.noise
        if not noise:
            return descending_keys(lengths)
        # Noise puts empty sequences in an order too.
        found: npt.NDArray[np.float64] = np.maximum(lengths, 0.5) * -(
            1 + noise * (2 * shares_of(key_of(self._key, _NOISE), rows) - 1)
        )
        return found


def descending_keys(lengths: npt.NDArray[np.integer]) -> npt.NDArray[np.integer]:
    """Numbers that ascend as lengths fall, in 16 bits where these do: NumPy sorts those by radix."""
    longest = lengths.max(initial=0)
    found: npt.NDArray[np.integer] = longest - lengths
    return found.astype(np.uint16, copy=False) if longest < 2**16 else found


def _reordered(rows: _Integers, bounds: _Integers, batches: _Integers) -> tuple[_Integers, _Integers]:
    """The rows batch after batch in another order of batches, and where they start then."""
    sizes = np.diff(bounds)[batches]
    ends = np.cumsum(sizes)
    index = np.arange(len(rows)) + np.repeat(bounds[:-1][batches] - (ends - sizes), sizes)
    return rows[index], np.append(0, ends)


def key_of(*numbers: int) -> int:
    """A key of 64 bits that depends on every number and on their order."""
    key = 0
    for number in numbers:
        key = _mixed((key ^ number) + 1)
    return key


def _mixed(number: int) -> int:
    """SplitMix64 (Steele, Lea and Flood, 2014) of one number."""
    number = (number * 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


def _bits(key: int, numbers: npt.NDArray[np.integer]) -> _Bits:
    """64 random bits for each number: SplitMix64's stream that starts at the key, at these places."""
    found: _Bits = numbers.astype(np.uint64)
    found += np.uint64(1)
    found *= np.uint64(0x9E3779B97F4A7C15)
    found += np.uint64(key)
    found ^= found >> np.uint64(30)
    found *= np.uint64(0xBF58476D1CE4E5B9)
    found ^= found >> np.uint64(27)
    found *= np.uint64(0x94D049BB133111EB)
    found ^= found >> np.uint64(31)
    return found


def shares_of(key: int, numbers: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
    """A random number from 0 to below 1 for each number."""
    return (_bits(key, numbers) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def shuffle(key: int, count: int) -> _Integers:
    """All numbers below ``count`` in a random order, every one as likely as any other."""
    return np.argsort(_bits(key, np.arange(count)), kind="stable")


class Permutation:
    """A random permutation of the numbers below ``count`` that needs neither time nor memory before it is asked.

    Up to 65,536 numbers it is :func:`shuffle`, made at once. Above, it is a Feistel network over pairs of numbers below
    ``a`` and ``b``, where ``a * b`` is hardly more than ``count``; what comes to lie beyond ``count`` goes through it
    again (Black and Rogaway, Ciphers with arbitrary finite domains, 2002). Its rounds add multiplicative hashes.
    """

    def __init__(self, key: int, count: int) -> None:
        self._count = np.uint64(count)
        self._table = shuffle(key, count) if count <= _SMALL else None
        left = math.isqrt(max(count - 1, 0)) + 1
        self._sizes = np.uint64(left), np.uint64(-(-count // left))
        self._keys = [np.uint64(key_of(key, number)) for number in range(_ROUNDS)]

    def __call__(self, places: _Integers) -> _Integers:
        """The numbers at some places."""
        if self._table is not None:
            return self._table[places]
        found = self._through(places.astype(np.uint64))
        beyond = np.flatnonzero(found >= self._count)
        while len(beyond):
            found[beyond] = self._through(found[beyond])
            beyond = beyond[found[beyond] >= self._count]
        return found.view(np.int64)

    def _through(self, numbers: _Bits) -> _Bits:
        """The numbers after all rounds, in the domain of ``a * b`` numbers."""
        high, low = np.divmod(numbers, self._sizes[1])
        for number, key in enumerate(self._keys):
            size = self._sizes[number % 2]
            # A number below ``size`` out of the upper half of a hash of the other part.
            moved = low ^ key
            moved *= np.uint64(0x9E3779B97F4A7C15)
            moved ^= moved >> _HALF
            moved *= np.uint64(0xD6E8FEB86659FD93)
            moved >>= _HALF
            moved *= size
            moved >>= _HALF
            moved += high
            np.subtract(moved, size, out=moved, where=moved >= size)
            high, low = low, moved
        high *= self._sizes[1]
        high += low
        return high
