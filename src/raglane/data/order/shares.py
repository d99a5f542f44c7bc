"""Work shared out evenly: the longest first, each to the part that has least to do."""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

_Integers = npt.NDArray[np.int64]

# For fewer parts a heap takes less time than NumPy's calls, of which there is a round for about as many sizes as parts.
_FEW = 24


def owners_of(lengths: npt.NDArray[np.integer], ranks: int) -> _Integers:
    """Which rank has each sequence of a step, so that all have about as many elements.

    A step costs a rank the larger of its elements over its rate and its longest sequence times the latency of a step.
    The longest sequence is on some rank however they are shared out; so what can be evened out is the elements.
    """
    # An empty sequence is some work too.
    work = np.maximum(lengths.astype(np.int64), 1)
    in_turn = np.argsort(-work, kind="stable")
    owners = np.empty_like(work)
    owners[in_turn], _ = share_out(work[in_turn], ranks)
    return owners


def share_out(sizes: _Integers, parts: int) -> tuple[_Integers, _Integers]:
    """Give each size to the part whose sum is the smallest, in the order given (Graham, 1969).

    From the largest on, no sum is more than 4/3 of the best possible; among parts of the same sum the first gets it.
    """
    # More parts than sizes stay empty, however many they are.
    parts = min(parts, max(len(sizes), 1))
    return _by_heap(sizes, parts) if parts < _FEW else _by_rounds(sizes, parts)


def _by_heap(sizes: _Integers, parts: int) -> tuple[_Integers, _Integers]:
    sums = [(0, part) for part in range(parts)]
    chosen, before = [], []
    for size in sizes.tolist():
        known, part = sums[0]
        heapq.heapreplace(sums, (known + size, part))
        chosen.append(part)
        before.append(known)
    return np.array(chosen, np.int64), np.array(before, np.int64)


def _by_rounds(sizes: _Integers, parts: int) -> tuple[_Integers, _Integers]:
    """The same, many at a time: one each to the parts in the order of their sums, until one would be next again."""
    sums = np.zeros(parts, np.int64)
    chosen, before = np.empty_like(sizes), np.empty_like(sizes)
    done = 0
    while done < len(sizes):
        given = sizes[done : done + parts]
        in_turn = np.argsort(sums, kind="stable")[: len(given)]
        had = sums[in_turn]
        has = had + given
        again = had[1:] >= np.minimum.accumulate(has)[:-1]
        count = int(again.argmax()) + 1 if again.any() else len(given)
        chosen[done : done + count], before[done : done + count] = in_turn[:count], had[:count]
        sums[in_turn[:count]] = has[:count]
        done += count
    return chosen, before
