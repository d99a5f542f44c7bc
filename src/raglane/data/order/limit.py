"""The size of a batch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from raglane._utils.checks import check_choice, check_lengths, check_whole, given_lengths
from raglane._utils.memory import is_mapped
from raglane._utils.messages import argument
from raglane.errors import ArgumentError

_Integers = npt.NDArray[np.int64]
_Lengths = npt.NDArray[np.integer]

TOO_LONG = ("raise", "drop", "chunk", "alone")
"""The ways to treat a sequence that is longer than a batch."""

# Lengths are read in blocks of this many, which fit the processor's cache.
_BLOCK = 1 << 18
# A larger sum of lengths may have overflowed, so it is computed again with checks.
_MAX_SUM = 2**62


@dataclass(frozen=True)
class BatchLimit:
    """The maximum size of a batch; if several numbers are set, all of them hold.

    A batch is filled with sequences until the next one would exceed the limit. The last two batches
    of a pool share their sequences evenly, so that none is tiny. If several ranks train together,
    the limit applies to their batches together.

    Attributes:
        sequences: sequences in a batch.
        elements: elements in a batch.
        padded: elements of the batch after padding to its longest sequence.
        too_long: treatment of a sequence that is longer than ``elements`` or ``padded``:
            ``"raise"`` raises an error; ``"drop"`` leaves it out; ``"chunk"`` replaces it by
            pieces, see :meth:`Dataset.chunk <raglane.data.Dataset.chunk>`; ``"alone"`` makes it a batch
            of its own.

    Raises:
        ArgumentTypeError: a number is not an integer.
        ArgumentError: no number is set, a number is below 1, or ``too_long`` is unknown.

    Example:
        >>> print(BatchLimit(sequences=64), BatchLimit(elements=4096), BatchLimit(sequences=64, padded=4096), sep="; ")
        64 sequences; 4,096 elements; 64 sequences and 4,096 padded elements
    """

    sequences: int | None = None
    elements: int | None = None
    padded: int | None = None
    too_long: Literal["raise", "drop", "chunk", "alone"] = "raise"

    def __post_init__(self) -> None:
        for name in ("sequences", "elements", "padded"):
            if (most := getattr(self, name)) is not None:
                object.__setattr__(self, name, check_whole(name, most, 1, most=2**63 - 1))
        check_choice("too_long", self.too_long, TOO_LONG)
        if self.sequences is self.elements is self.padded is None:
            fix = "pass one of sequences, elements and padded"
            raise ArgumentError("limit", "no number", "at least one number", fix)

    def __str__(self) -> str:
        sizes = {
            "sequences": self.sequences,
            "elements": self.elements,
            "padded elements": self.padded,
        }
        return " and ".join(f"{most:,} {name}" for name, most in sizes.items() if most is not None)

    @property
    def longest(self) -> int | None:
        """The length of the longest sequence that fits in a batch, or None without a limit of
        elements.
        """
        return min(
            (most for most in (self.elements, self.padded) if most is not None), default=None
        )

    def usual(self, mean: float) -> int:
        """Return the approximate number of sequences per batch, at least 1, for sequences of a mean
        length.
        """
        most = None if self.longest is None else int(self.longest / max(mean, 1.0))
        return max(1, min(count for count in (self.sequences, most) if count is not None))

    def cut(self, lengths: _Integers, *, descending: bool = False) -> _Integers:
        """Return the start of each batch when sequences are batched in their order."""
        count = len(lengths)
        if self.sequences is not None and self.longest is None:
            return self._evened(np.arange(0, count, self.sequences), lengths)
        ends = np.cumsum(lengths).tolist()
        starts = [0] if count else []
        while starts:
            start = starts[-1]
            end = count if self.sequences is None else min(count, start + self.sequences)
            if self.elements is not None:
                before = ends[start - 1] if start else 0
                end = min(end, bisect_right(ends, before + self.elements, start))
            if self.padded is not None:
                end = min(end, _padded_end(lengths, start, end, self.padded, descending))
            # A sequence that is longer than the limit is a batch of its own.
            end = max(end, start + 1)
            if end >= count:
                break
            starts.append(end)
        return self._evened(np.array(starts, np.int64), lengths)

    def _evened(self, starts: _Integers, lengths: _Integers) -> _Integers:
        """Move sequences from the last batch but one to the last, as long as the last does not
        become the larger.
        """
        if len(starts) < 2:
            return starts
        start = int(starts[-2])
        end = int(starts[-1])
        # Candidates for the start of the last batch.
        borders = np.arange(start + 1, end + 1)
        tail = lengths[start:]
        before = self.usage(tail)[borders - start - 1]
        last = self.usage(tail[::-1])[::-1][borders - start]
        fits = (last <= before) & (len(lengths) - borders <= borders - start)
        if fits.any():
            starts[-1] = borders[fits.argmax()]
        return starts

    def usage(self, lengths: _Integers) -> npt.NDArray[np.float64]:
        """Return the share of the limit that the first 1, 2, ... sequences use, ``(M,)``; above 1
        exceeds it.
        """
        counts = np.arange(1, len(lengths) + 1)
        share = np.zeros(len(lengths)) if self.sequences is None else counts / self.sequences
        if self.elements is not None:
            share = np.maximum(share, np.cumsum(lengths) / self.elements)
        if self.padded is not None:
            share = np.maximum(share, counts * np.maximum.accumulate(lengths) / self.padded)
        return share


def _padded_end(lengths: _Integers, start: int, end: int, most: int, descending: bool) -> int:
    """Return the end, at most ``end``, of the padded batch that begins at ``start``."""
    first = int(lengths[start])
    # The first length is a lower bound of the longest.
    end = min(end, start + most // first) if first else end
    if descending or end <= start:
        return end
    batch = lengths[start:end]
    beyond = np.maximum.accumulate(batch) * np.arange(1, len(batch) + 1) > most
    return start + int(beyond.argmax()) if beyond.any() else end


def pieces_of(lengths: _Integers, longest: int) -> tuple[_Integers, _Integers]:
    """Split sequences into pieces of ``longest`` elements and a rest; return each piece's sequence
    and length.
    """
    counts = np.maximum(-(-lengths // longest), 1)
    sequences = np.repeat(np.arange(len(lengths)), counts)
    pieces = np.full(len(sequences), longest, np.int64)
    pieces[np.cumsum(counts) - 1] = lengths - (counts - 1) * longest
    return sequences, pieces


@dataclass(frozen=True, eq=False)
class Settled:
    """The lengths to batch, after sequences that are too long were treated, and their sums."""

    lengths: _Lengths
    dropped: _Integers
    too_long: int
    elements: int
    longest: int


def settle(lengths: Any, limit: BatchLimit) -> Settled:
    """Check the lengths, and drop, chunk or refuse sequences that are longer than a batch."""
    tensor = given_lengths(lengths)
    array: _Lengths = tensor.numpy()
    elements, longest = _survey(array, tensor)
    most = limit.longest
    if most is None or longest <= most:
        return Settled(_held(array, longest), np.empty(0, np.int64), 0, elements, longest)
    over = np.concatenate([start + np.flatnonzero(block > most) for start, block in _blocks(array)])
    if limit.too_long == "raise":
        index = int(over[0])
        got = f"{int(array[index]):,} at index {index}" + f", and {len(over) - 1:,} more" * (
            len(over) > 1
        )
        fix = f"raise the limit, or choose a treatment: {argument('too_long', 'chunk')}, drop or alone"
        raise ArgumentError("lengths", got, f"at most the size of a batch, {limit}", fix)
    if limit.too_long == "alone":
        return Settled(_held(array, longest), np.empty(0, np.int64), len(over), elements, longest)
    if limit.too_long == "chunk":
        pieces = pieces_of(array.astype(np.int64), most)[1]
        return Settled(_held(pieces, most), np.empty(0, np.int64), len(over), elements, most)
    elements -= int(array[over].sum(dtype=np.int64))
    longest_left = max(int(block[block <= most].max(initial=0)) for _, block in _blocks(array))
    return Settled(_held(array, longest), over, len(over), elements, longest_left)


def _blocks(lengths: _Lengths) -> Iterator[tuple[int, _Lengths]]:
    """Yield blocks of the lengths, each with its start."""
    return ((start, lengths[start : start + _BLOCK]) for start in range(0, len(lengths), _BLOCK))


def _survey(lengths: _Lengths, tensor: torch.Tensor) -> tuple[int, int]:
    """Return the sum of the lengths and the longest; raise an ArgumentError for negative ones or an
    overflow.
    """
    elements = least = longest = 0
    for _, block in _blocks(lengths):
        least = min(least, int(block.min()))
        longest = max(longest, int(block.max()))
        elements += int(block.sum(dtype=np.int64))
    if least < 0 or longest * len(lengths) >= _MAX_SUM:
        check_lengths(tensor)
    return elements, longest


def _held(lengths: _Lengths, longest: int) -> _Lengths:
    """Return lengths in a mapped file unchanged; copy others, since the caller may change them, to
    few bytes.
    """
    if is_mapped(lengths.ctypes.data, lengths.nbytes):
        return lengths
    return lengths.astype(np.uint16 if longest < 2**16 else np.int64)
