"""The lengths of what comes to batches, and what follows from them: looked at in blocks, not copied out of a file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from raglane._utils.checks import check_lengths, given_lengths
from raglane._utils.memory import is_mapped
from raglane.data.order.limit import Limit, pieces_of
from raglane.errors import ArgumentError, argument, message

__all__ = ["Settled", "settle"]

_Integers = npt.NDArray[np.int64]
_Lengths = npt.NDArray[np.integer]

# So many lengths are looked at together, that they stay in a processor's cache.
_BLOCK = 1 << 18
# The sum of lengths from which on it is counted again with more care.
_MOST = 2**62


@dataclass(frozen=True, eq=False)
class Settled:
    """What is to come in batches.

    Attributes:
        lengths: ``(B,)``: of sequences, or of the pieces in their place.
        dropped: ``(m,)``, the rows that are left out, ascending.
        too_long: how many sequences are longer than a batch may be.
        elements: of the others.
        longest: of the others.
    """

    lengths: _Lengths
    dropped: _Integers
    too_long: int
    elements: int
    longest: int


def settle(lengths: Any, limit: Limit) -> Settled:
    """Read lengths, and do with those that are too long what the limit says.

    Example:
        >>> found = settle([3, 9, 1], Limit(elements=4, too_long="drop"))
        >>> found.dropped.tolist(), found.elements, found.longest
        ([1], 4, 3)
    """
    tensor = given_lengths(lengths)
    given: _Lengths = tensor.numpy()
    elements, longest = _survey(given, tensor)
    most = limit.longest
    if most is None or longest <= most:
        return Settled(_held(given, longest), np.empty(0, np.int64), 0, elements, longest)
    over = np.concatenate([start + np.flatnonzero(block > most) for start, block in _blocks(given)])
    if limit.too_long == "refuse":
        place = int(over[0])
        got = f"{int(given[place]):,} at index {place}" + f", one of {len(over):,} such" * (len(over) > 1)
        fix = f"raise the limit, or choose what becomes of it: {argument('too_long', 'split')}, drop or alone"
        raise ArgumentError(message("lengths", got, f"no sequence longer than a batch, {limit}", fix))
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
