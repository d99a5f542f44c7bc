"""The order of the sequences in an epoch, from permutations that are evaluated at any position."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from raglane._utils.checks import check_choice, check_flag, check_real, check_whole
from raglane.data.order.limit import BatchLimit

KINDS = ("random", "sorted", "bucketed", "windows")

_Integers = npt.NDArray[np.int64]
_Bits = npt.NDArray[np.uint64]

# Parts of the keys of the random numbers, one for each use.
_WHOLE = 0
_WITHIN = 1
_BATCHES = 2
_NOISE = 3

_MASK = 2**64 - 1
_HALF = np.uint64(32)
# Smaller permutations are tables, because a Feistel network on a small domain is not uniform.
_SMALL = 1 << 16
# From four rounds on a Feistel network is a strong pseudorandom permutation (Luby and Rackoff,
# 1988).
_ROUNDS = 6


@dataclass(frozen=True)
class EpochOrder:
    """The order of the sequences in an epoch: :meth:`random`, :meth:`sorted`, :meth:`bucketed` or
    :meth:`windows`.

    Attributes:
        kind: the name of the method.
        pool: batches per pool, for ``bucketed``.
        window: sequences per window, for ``windows``.
        by_length: True if a batch has similar lengths.
        noise: the largest relative change of a length before sorting.

    Example:
        >>> print(EpochOrder.random(), EpochOrder.bucketed(noise=0.1), EpochOrder.windows(1000), sep="; ")
        random; bucketed, pools of 200 batches, noise 0.1; windows of 1,000 sequences, bucketed
    """

    kind: str
    pool: int = 200
    window: int = 0
    by_length: bool = False
    noise: float = 0.0

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, KINDS)

    @staticmethod
    def random() -> EpochOrder:
        """A uniformly random permutation, cut into batches.

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
    def bucketed(pool: int = 200, noise: float = 0.0) -> EpochOrder:
        """Bucketing: batches of similar lengths, which differ from epoch to epoch.

        A random permutation of the sequences is cut into pools of several batches. Each pool is
        sorted by length and cut into batches, which are shuffled.

        Args:
            pool: batches per pool, at least 1. Larger pools give more similar lengths and less
                randomness.
            noise: the largest relative change of a length before sorting, from 0 to 1. Noise varies
                which sequences share a batch, and adds padding.

        Raises:
            ArgumentTypeError: an argument is not a number.
            ArgumentError: a number is out of range.

        Example:
            >>> print(EpochOrder.bucketed(pool=100))
            bucketed, pools of 100 batches
        """
        return EpochOrder(
            "bucketed", pool=check_whole("pool", pool, 1), by_length=True, noise=_check_noise(noise)
        )

    @staticmethod
    def windows(sequences: int, *, by_length: bool = True, noise: float = 0.0) -> EpochOrder:
        """The order of the data, shuffled within windows: for data that is read as a stream.

        Each window of consecutive sequences is shuffled, and no batch has sequences of two windows.
        So only one window must be in memory at a time.

        Args:
            sequences: the maximum per window, at least 1 and preferably many batches. Windows have
                equal sizes.
            by_length: make batches of similar lengths within the window, and shuffle the batches.
            noise: as in :meth:`bucketed`.

        Raises:
            ArgumentTypeError: an argument is not a number, or ``by_length`` not a bool.
            ArgumentError: a number is out of range.

        Example:
            >>> print(EpochOrder.windows(512, by_length=False))
            windows of 512 sequences
        """
        window = check_whole("sequences", sequences, 1)
        by_length = check_flag("by_length", by_length)
        return EpochOrder("windows", window=window, by_length=by_length, noise=_check_noise(noise))

    def __str__(self) -> str:
        parts = [self.kind]
        if self.kind == "bucketed":
            parts.append(f"pools of {self.pool:,} batches")
        if self.kind == "windows":
            parts = [f"windows of {self.window:,} sequences", *["bucketed"] * self.by_length]
        if self.noise:
            parts.append(f"noise {self.noise:g}")
        return ", ".join(parts)


def _check_noise(noise: float) -> float:
    return check_real("noise", noise, "from 0 to 1", lambda share: 0 <= share <= 1, "pass e.g. 0.1")


class EpochPools:
    """The pools of one epoch, each a function of the arguments and its number.

    Sequences are ordered within a pool, and no batch has sequences of two pools. A pool is computed
    on request, so no array is as large as the epoch, except for the order ``sorted``.
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
        self._lengths = lengths
        self._limit = limit
        self._order = order
        self._key = key
        # The row at a position is the position plus the number of omitted rows before it.
        self._gaps = without - np.arange(len(without))
        self.count = len(lengths) - len(without)
        # Pools have equal sizes, so that none is tiny, and whole batches if a batch has a fixed
        # number of sequences.
        unit = usual if limit.longest is None and order.kind != "windows" else 1
        units = -(-self.count // unit)
        most = {"windows": order.window, "sorted": max(units, 1)}.get(
            order.kind, order.pool * usual // unit
        )
        pools = -(-units // most)
        firsts = unit * (np.arange(pools) * units // max(pools, 1))
        self._bounds: _Integers = np.append(firsts, self.count)

    def __len__(self) -> int:
        """The number of pools."""
        return len(self._bounds) - 1

    def batch_counts(self) -> _Integers | None:
        """Return the number of batches of each pool, ``(pools,)``, or None if it depends on the
        lengths.
        """
        if self._limit.sequences is None or self._limit.longest is not None:
            return None
        return -(-np.diff(self._bounds) // self._limit.sequences)

    def pool(self, number: int) -> tuple[_Integers, _Integers]:
        """Return the rows of a pool, ``(M,)``, and the offsets of its batches, ``(b + 1,)``."""
        rows = self._rows(number)
        lengths = self._lengths[rows]
        by_length = self._order.by_length
        if by_length and self._order.kind != "sorted":
            # Lengths with noise are distinct, so the sort need not be stable.
            in_order = np.argsort(
                self._sort_keys(rows, lengths), kind=None if self._order.noise else "stable"
            )
            rows = rows[in_order]
            lengths = lengths[in_order]
        starts = self._limit.cut(
            lengths.astype(np.int64), descending=by_length and not self._order.noise
        )
        bounds = np.append(starts, len(rows))
        if by_length and self._order.kind != "sorted":
            return _reordered(
                rows, bounds, shuffle(key_of(self._key, _BATCHES, number), len(starts))
            )
        return rows, bounds

    def _rows(self, number: int) -> _Integers:
        """Return the rows of a pool before they are sorted by length."""
        first = int(self._bounds[number])
        last = int(self._bounds[number + 1])
        if self._order.kind == "sorted":
            return self._sorted
        if self._order.kind == "windows":
            return self._row_of(first + shuffle(key_of(self._key, _WITHIN, number), last - first))
        return self._row_of(self._permutation(np.arange(first, last)))

    def _row_of(self, positions: _Integers) -> _Integers:
        if not len(self._gaps):
            return positions
        return positions + np.searchsorted(self._gaps, positions, side="right")

    @cached_property
    def _permutation(self) -> Permutation:
        return Permutation(key_of(self._key, _WHOLE), self.count)

    @cached_property
    def _sorted(self) -> _Integers:
        rows = self._row_of(np.arange(self.count))
        return rows[np.argsort(descending_keys(self._lengths[rows]), kind="stable")]

    def _sort_keys(
        self, rows: _Integers, lengths: npt.NDArray[np.integer]
    ) -> npt.NDArray[np.generic]:
        """Return keys that sort rows by descending length, with the noise of the order."""
        noise = self._order.noise
        if not noise:
            return descending_keys(lengths)
        change = noise * (2 * uniform(key_of(self._key, _NOISE), rows) - 1)
        # Length 0 counts as 0.5, so that noise orders empty sequences too.
        return np.maximum(lengths, 0.5) * -(1 + change)


def descending_keys(lengths: npt.NDArray[np.integer]) -> npt.NDArray[np.integer]:
    """Return keys that sort by descending length, in 16 bits if they fit, which NumPy sorts by
    radix.
    """
    longest = lengths.max(initial=0)
    keys: npt.NDArray[np.integer] = longest - lengths
    return keys.astype(np.uint16, copy=False) if longest < 2**16 else keys


def _reordered(
    rows: _Integers, bounds: _Integers, batches: _Integers
) -> tuple[_Integers, _Integers]:
    """Permute the batches; return the rows and the new offsets."""
    sizes = np.diff(bounds)[batches]
    ends = np.cumsum(sizes)
    index = np.arange(len(rows)) + np.repeat(bounds[:-1][batches] - (ends - sizes), sizes)
    return rows[index], np.append(0, ends)


def key_of(*numbers: int) -> int:
    """Return a key of 64 bits that depends on every number and on their order."""
    key = 0
    for number in numbers:
        key = _mixed((key ^ number) + 1)
    return key


def _mixed(number: int) -> int:
    """Apply SplitMix64 (Steele, Lea and Flood, 2014) to a number."""
    number = (number * 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


def _bits(key: int, numbers: npt.NDArray[np.integer]) -> _Bits:
    """Return 64 random bits per number: the entries at these positions of SplitMix64's stream of the
    key.
    """
    bits: _Bits = numbers.astype(np.uint64)
    bits += np.uint64(1)
    bits *= np.uint64(0x9E3779B97F4A7C15)
    bits += np.uint64(key)
    bits ^= bits >> np.uint64(30)
    bits *= np.uint64(0xBF58476D1CE4E5B9)
    bits ^= bits >> np.uint64(27)
    bits *= np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    return bits


def uniform(key: int, numbers: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
    """Return a random number in [0, 1) for each number."""
    return (_bits(key, numbers) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def shuffle(key: int, count: int) -> _Integers:
    """Return a uniformly random permutation of the numbers below ``count``."""
    return np.argsort(_bits(key, np.arange(count)), kind="stable")


class Permutation:
    """A random permutation of the numbers below ``count`` that is evaluated at single positions.

    Up to 65,536 numbers it is a table made by :func:`shuffle`. Above, it is a Feistel network over
    pairs of numbers below ``a`` and ``b``, where ``a * b`` slightly exceeds ``count``; results from
    ``count`` on pass the network again (Black and Rogaway, Ciphers with arbitrary finite domains,
    2002). Its rounds add multiplicative hashes.
    """

    def __init__(self, key: int, count: int) -> None:
        self._count = np.uint64(count)
        self._table = shuffle(key, count) if count <= _SMALL else None
        left = math.isqrt(max(count - 1, 0)) + 1
        self._sizes = np.uint64(left), np.uint64(-(-count // left))
        self._keys = [np.uint64(key_of(key, number)) for number in range(_ROUNDS)]

    def __call__(self, positions: _Integers) -> _Integers:
        """Return the numbers at some positions."""
        if self._table is not None:
            return self._table[positions]
        numbers = self._through(positions.astype(np.uint64))
        beyond = np.flatnonzero(numbers >= self._count)
        while len(beyond):
            numbers[beyond] = self._through(numbers[beyond])
            beyond = beyond[numbers[beyond] >= self._count]
        return numbers.view(np.int64)

    def _through(self, numbers: _Bits) -> _Bits:
        """Apply all rounds of the network."""
        high, low = np.divmod(numbers, self._sizes[1])
        for number, key in enumerate(self._keys):
            size = self._sizes[number % 2]
            # The upper half of a hash of ``low``, scaled to a number below ``size``.
            moved = low ^ key
            moved *= np.uint64(0x9E3779B97F4A7C15)
            moved ^= moved >> _HALF
            moved *= np.uint64(0xD6E8FEB86659FD93)
            moved >>= _HALF
            moved *= size
            moved >>= _HALF
            moved += high
            np.subtract(moved, size, out=moved, where=moved >= size)
            high = low
            low = moved
        high *= self._sizes[1]
        high += low
        return high
