"""Random permutations that can be evaluated at any place, and random numbers that follow from a key and a number."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

_Integers = npt.NDArray[np.int64]
_Bits = npt.NDArray[np.uint64]

_MASK = 2**64 - 1
_HALF = np.uint64(32)
# Up to so many places a table is made; a Feistel network of a small domain is not yet uniform.
_SMALL = 1 << 16
# From four rounds on a Feistel network is a strong pseudorandom permutation (Luby and Rackoff, 1988).
_ROUNDS = 6


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
