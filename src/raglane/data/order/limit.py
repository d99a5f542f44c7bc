"""How large a batch is."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from raglane._utils.checks import check_choice, check_lengths, given_lengths
from raglane._utils.memory import is_mapped
from raglane._utils.messages import argument, message
from raglane.data.epochs import check_least
from raglane.errors import ArgumentError

_Integers = npt.NDArray[np.int64]

TOO_LONG = ("refuse", "drop", "split", "alone")
"""What becomes of a sequence that is longer than a whole batch may be."""

_Lengths = npt.NDArray[np.integer]
# So many lengths are looked at together, that they stay in a processor's cache.
_BLOCK = 1 << 18

# The sum of lengths from which on it is counted again with more care.
_MOST = 2**62


@dataclass(frozen=True)
class BatchLimit:
    """How large a batch is at most; where several numbers are given, all hold.

    A batch takes one sequence after the other until the next would be too much. So that none is tiny, the last two
    batches of a pool share their sequences evenly. Where several ranks train together, the limit is that of their
    batches together.

    Attributes:
        sequences: in a batch.
        elements: in a batch.
        padded: elements of a batch that is padded to its longest sequence.
        too_long: what becomes of a sequence that is longer than ``elements`` or ``padded``: ``"refuse"`` raises an
            error; ``"drop"`` leaves it out; ``"split"`` has pieces in its place, see
            :meth:`SequenceDataset.cut <raglane.data.SequenceDataset.cut>`; ``"alone"`` makes it a batch of its own.

    Raises:
        ArgumentTypeError: a number that is not an int.
        ArgumentError: no number, one below 1, or another word for ``too_long``.

    Example:
        >>> print(BatchLimit(sequences=64), BatchLimit(elements=4096), BatchLimit(sequences=64, padded=4096), sep="; ")
        64 sequences; 4,096 elements; 64 sequences and 4,096 padded elements
    """

    sequences: int | None = None
    elements: int | None = None
    padded: int | None = None
    too_long: str = "refuse"

    def __post_init__(self) -> None:
        for name in ("sequences", "elements", "padded"):
            if getattr(self, name) is not None:
                check_least(name, getattr(self, name), 1)
        check_choice("too_long", self.too_long, TOO_LONG)
        if self.sequences is self.elements is self.padded is None:
            fix = "pass one of sequences, elements and padded"
            raise ArgumentError(message("limit", "no number", "at least one number that limits a batch", fix))

    def __str__(self) -> str:
        parts = {"sequences": self.sequences, "elements": self.elements, "padded elements": self.padded}
        return " and ".join(f"{most:,} {name}" for name, most in parts.items() if most is not None)

    @property
    def longest(self) -> int | None:
        """The longest sequence that fits into a batch; None where any does."""
        return min((most for most in (self.elements, self.padded) if most is not None), default=None)

    @property
    def counts_only(self) -> bool:
        """Whether it says how many batches there are, whatever the lengths."""
        return self.longest is None

    def usual(self, mean: float) -> int:
        """About how many sequences of a mean length a batch holds, at least 1."""
        most = None if self.longest is None else int(self.longest / max(mean, 1.0))
        return max(1, min(count for count in (self.sequences, most) if count is not None))

    def cut(self, lengths: _Integers, *, descending: bool = False) -> _Integers:
        """Where batches start that are made of sequences in their order."""
        count = len(lengths)
        if self.sequences is not None and self.counts_only:
            return self._evened(np.arange(0, count, self.sequences), lengths)
        ends = np.cumsum(lengths).tolist()
        starts = [0] if count else []
        while starts:
            start = starts[-1]
            following = count if self.sequences is None else min(count, start + self.sequences)
            if self.elements is not None:
                before = ends[start - 1] if start else 0
                following = min(following, bisect_right(ends, before + self.elements, start))
            if self.padded is not None:
                following = min(following, _padded_end(lengths, start, following, self.padded, descending))
            # One that is longer than the limit is alone.
            following = max(following, start + 1)
            if following >= count:
                break
            starts.append(following)
        return self._evened(np.array(starts, np.int64), lengths)

    def _evened(self, starts: _Integers, lengths: _Integers) -> _Integers:
        """The last batch with as much of the one before as leaves it no larger than that."""
        if len(starts) < 2:
            return starts
        start, end = int(starts[-2]), int(starts[-1])
        # From the first that may stay to the first that must go.
        borders = np.arange(start + 1, end + 1)
        part = lengths[start:]
        kept = self.shares(part)[borders - start - 1]
        moved = self.shares(part[::-1])[::-1][borders - start]
        fewer = len(lengths) - borders <= borders - start
        fits = (moved <= kept) & fewer
        if fits.any():
            starts[-1] = borders[fits.argmax()]
        return starts

    def shares(self, lengths: _Integers) -> npt.NDArray[np.float64]:
        """Which share of a batch the first 1, 2, ... sequences are, ``(M,)``; above 1 where they do not fit."""
        counts = np.arange(1, len(lengths) + 1)
        share = np.zeros(len(lengths))
        if self.sequences is not None:
            share = counts / self.sequences
        if self.elements is not None:
            share = np.maximum(share, np.cumsum(lengths) / self.elements)
        if self.padded is not None:
            share = np.maximum(share, counts * np.maximum.accumulate(lengths) / self.padded)
        return share


def _padded_end(lengths: _Integers, start: int, end: int, most: int, descending: bool) -> int:
    """How far a padded batch goes that starts here and ends there at the latest."""
    first = int(lengths[start])
    # The longest is at least as long as the first.
    end = min(end, start + most // first) if first else end
    if descending or end <= start:
        return end
    part = lengths[start:end]
    beyond = np.maximum.accumulate(part) * np.arange(1, len(part) + 1) > most
    return start + int(beyond.argmax()) if beyond.any() else end


def pieces_of(lengths: _Integers, longest: int) -> tuple[_Integers, _Integers]:
    """Sequences in pieces of at most some length, each but the last of its sequence as long as that."""
    counts = np.maximum(-(-lengths // longest), 1)
    owners = np.repeat(np.arange(len(lengths)), counts)
    found = np.full(len(owners), longest, np.int64)
    last = np.cumsum(counts) - 1
    found[last] = lengths - (counts - 1) * longest
    return owners, found


@dataclass(frozen=True, eq=False)
class Settled:
    """What is to come in batches."""

    lengths: _Lengths
    dropped: _Integers
    too_long: int
    elements: int
    longest: int


def settle(lengths: Any, limit: BatchLimit) -> Settled:
    """Read lengths, and do with those that are too long what the limit says."""
    tensor = given_lengths(lengths)
    given: _Lengths = tensor.numpy()
    elements, longest = _survey(given, tensor)
    most = limit.longest
    if most is None or longest <= most:
        return Settled(_held(given, longest), np.empty(0, np.int64), 0, elements, longest)
    over = np.concatenate([start + np.flatnonzero(block > most) for start, block in _blocks(given)])
    if limit.too_long == "refuse":
        place = int(over[0])
        got = f"{int(given[place]):,} at index {place}" + f", and {len(over) - 1:,} more" * (len(over) > 1)
        fix = f"raise the limit, or pass {argument('too_long', 'split')}, drop or alone"
        raise ArgumentError(message("lengths", got, f"at most the limit of a batch, {limit}", fix))
    if limit.too_long == "alone":
        return Settled(_held(given, longest), np.empty(0, np.int64), len(over), elements, longest)
    if limit.too_long == "split":
        pieces = pieces_of(given.astype(np.int64), most)[1]
        return Settled(_held(pieces, most), np.empty(0, np.int64), len(over), elements, most)
    elements -= int(given[over].sum(dtype=np.int64))
    left = max(int(block[block <= most].max(initial=0)) for _, block in _blocks(given))
    return Settled(_held(given, longest), over, len(over), elements, left)


def _blocks(lengths: _Lengths) -> Iterator[tuple[int, _Lengths]]:
    """The lengths in blocks, each with the place of its first."""
    return ((start, lengths[start : start + _BLOCK]) for start in range(0, len(lengths), _BLOCK))


def _survey(lengths: _Lengths, tensor: torch.Tensor) -> tuple[int, int]:
    """The sum of lengths and the longest, each at least 0."""
    elements = least = longest = 0
    for _, block in _blocks(lengths):
        least, longest = min(least, int(block.min())), max(longest, int(block.max()))
        elements += int(block.sum(dtype=np.int64))
    if least < 0 or longest * len(lengths) >= _MOST:
        check_lengths(tensor)
    return elements, longest


def _held(lengths: _Lengths, longest: int) -> _Lengths:
    """The lengths where they lie, if that is a file; else a copy, which no caller changes, in as few bytes as do."""
    if is_mapped(lengths.ctypes.data, lengths.nbytes):
        return lengths
    return lengths.astype(np.uint16 if longest < 2**16 else np.int64)
