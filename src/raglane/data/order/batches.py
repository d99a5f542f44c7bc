"""Batches of an epoch for a DataLoader, on one rank of several, from any place on."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.utils.data import Sampler

from raglane._utils.checks import check_flag, check_kind
from raglane._utils.messages import message
from raglane.data.epochs import Epochs, check_least
from raglane.data.order.limit import TOO_LONG, BatchLimit, settle
from raglane.data.order.order import KINDS, EpochOrder, EpochPools, descending_keys, key_of
from raglane.errors import ArgumentError

_Integers = npt.NDArray[np.int64]

_RANDOM = EpochOrder.random()
_NONE = np.empty(0, np.int64)
# For fewer parts a heap takes less time than NumPy's calls, of which there is a round for about as many sizes as parts.
_FEW = 24


@dataclass
class _Known:
    """What is known of one epoch."""

    epoch: int
    largest: _Integers
    arrangement: EpochPools
    begin: int
    firsts: list[int]

    @property
    def frontier(self) -> int:
        """The pool before which the batches are counted, and which was not arranged yet."""
        return self.begin + len(self.firsts) - 1

    def count(self, pool: int, batches: int) -> None:
        """Note how many batches a pool has."""
        if pool == self.frontier:
            self.firsts.append(self.firsts[-1] + batches)

    def find(self, done: int) -> int | None:
        """The pool in which the batch numbered ``done`` is, or the end, where this is known."""
        place = bisect_right(self.firsts, done) - 1
        if place < 0 or (place == len(self.firsts) - 1 and done > self.firsts[-1]):
            return None
        return self.begin + place


class BatchSampler(Epochs[list[int]], Sampler[list[int]]):
    """Which sequences come together, and when: for a DataLoader's ``batch_sampler``.

    How large a batch is and in which order sequences come are two choices, ``limit`` and ``order``. Every sequence
    comes exactly once per epoch. Which comes when follows from the lengths, ``limit``, ``order``, ``seed`` and the
    number of the epoch alone: a state is a few integers, and any batch is found without those before it.

    The limit is that of a step: of one batch on one rank, or of the batches of all ``ranks`` together. The sequences of
    a step are shared out, the longest first, each to the rank that has the fewest elements. So all ranks have equally
    many steps of about the same work, and a run that goes on with another number of ranks covers what remained. Where
    a step has fewer sequences than ranks, the other ranks have none in it: their batch is an empty list.

    Each time that an epoch was iterated to its end, the next iteration is the next epoch; :meth:`set_epoch` chooses
    another (Lightning calls it).

    Args:
        lengths: ``(B,)`` integers, each at least 0: list, NumPy array or tensor. They are copied, unless they lie in a
            file that is mapped.
        limit: how large a batch is.
        order: in which order sequences come.
        seed: 0 or above.
        ranks: processes that train together, at least 1.
        rank: which of them this is, from 0.
        largest_first: let the first epoch begin with the longest sequences, as many as a batch holds. No other batch
            needs more memory, by more than a sequence: so memory runs out at the first step or never.

    Attributes:
        too_long: how many sequences are longer than a batch may be; ``limit.too_long`` says what became of them.

    Raises:
        ArgumentTypeError: lengths or another argument of the wrong kind.
        ShapeError: lengths that are not a flat list.
        ArgumentError: a length or a number is too small, or a sequence does not fit into a batch.

    Example:
        >>> batches = BatchSampler([5, 1, 9, 2, 8, 1], BatchLimit(sequences=2), EpochOrder.sorted())
        >>> list(batches), len(batches)
        ([[2, 4], [0, 3], [1, 5]], 3)
        >>> limit = BatchLimit(sequences=4)
        >>> for rank in (0, 1):
        ...     print(list(BatchSampler([5, 1, 9, 2, 8, 1], limit, EpochOrder.sorted(), ranks=2, rank=rank)))
        [[2], [3]]
        [[4, 0], [1, 5]]
    """

    _numbers = ("epoch", "done", "pool", "before")

    def __init__(
        self,
        lengths: Sequence[int] | npt.NDArray[Any] | Tensor,
        limit: BatchLimit,
        order: EpochOrder = _RANDOM,
        *,
        seed: int = 0,
        ranks: int = 1,
        rank: int = 0,
        largest_first: bool = False,
    ) -> None:
        super().__init__()
        check_kind("limit", limit, BatchLimit, "a BatchLimit", "pass e.g. rl.data.BatchLimit(sequences=32)")
        check_kind("order", order, EpochOrder, "an EpochOrder", "pass e.g. rl.data.EpochOrder.grouped()")
        check_least("seed", seed, 0)
        check_least("ranks", ranks, 1)
        check_least("rank", rank, 0, ranks - 1)
        self.limit, self.order, self.seed = limit, order, seed
        self.ranks, self.rank = ranks, rank
        self.largest_first = check_flag("largest_first", largest_first)
        self._settled = settled = settle(lengths, limit)
        self._lengths, self._dropped, self.too_long = settled.lengths, settled.dropped, settled.too_long
        self._usual = limit.usual(settled.elements / max(len(settled.lengths) - len(settled.dropped), 1))
        self._known: _Known | None = None

    def __len__(self) -> int:
        """The number of batches in this epoch, the same on every rank.

        Where a limit counts elements, epochs may have a few more or fewer, and all of this one is drawn to count them.
        """
        return self._count_to(None)[1]

    def whole(self) -> tuple[_Integers, _Integers]:
        """The whole epoch, of all ranks together.

        Returns:
            The rows batch after batch, ``(M,)``, and where batches start in them, ``(b + 1,)``, first 0, last ``M``.

        Example:
            >>> BatchSampler([5, 1, 9, 2, 8, 1], BatchLimit(sequences=4), EpochOrder.sorted()).whole()
            (array([2, 4, 0, 3, 1, 5]), array([0, 3, 6]))
        """
        epoch = self._epoch()
        rows, ends = [epoch.largest], [np.array([0, len(epoch.largest)][: 1 + bool(len(epoch.largest))])]
        for number in range(epoch.arrangement.pools):
            found, bounds = epoch.arrangement.pool(number)
            rows.append(found)
            ends.append(ends[-1][-1] + bounds[1:])
        return np.concatenate(rows), np.concatenate(ends)

    def _items(self, start: int) -> Iterator[list[int]]:
        epoch = self._epoch()
        if start == 0 and len(epoch.largest):
            yield self._share(epoch.largest)
        first, before = self._count_to(start)
        skipped = max(start, before) - before
        for number in range(first, epoch.arrangement.pools):
            rows, bounds = epoch.arrangement.pool(number)
            epoch.count(number, len(bounds) - 1)
            edges = bounds[skipped:].tolist()
            skipped = 0
            for begin, end in pairwise(edges):
                yield self._share(rows[begin:end])

    def _share(self, rows: _Integers) -> list[int]:
        if self.ranks == 1:
            found: list[int] = rows.tolist()
            return found
        own: list[int] = rows[assign_ranks(self._lengths[rows], self.ranks) == self.rank].tolist()
        return own

    def _epoch(self) -> _Known:
        if self._known is None or self._known.epoch != self.epoch:
            self._known = self._begin(self.epoch)
        return self._known

    def _begin(self, epoch: int) -> _Known:
        largest = self._largest if self.largest_first and epoch == 0 else _NONE
        arrangement = EpochPools(
            self._lengths,
            self.limit,
            self.order,
            key=key_of(self.seed, epoch),
            usual=self._usual,
            without=np.union1d(self._dropped, largest),
        )
        counts = arrangement.batch_counts()
        firsts = [min(len(largest), 1)]
        if counts is not None:
            firsts += (firsts[0] + np.cumsum(counts)).tolist()
        return _Known(epoch, largest, arrangement, 0, firsts)

    def _count_to(self, done: int | None) -> tuple[int, int]:
        """The pool of the batch numbered ``done``, or the end, and the number of batches before that pool.

        A pool that is not known is arranged, and so are those before it.
        """
        epoch = self._epoch()
        if done is not None and done < epoch.firsts[0]:
            if epoch.begin:
                epoch = self._known = self._begin(self.epoch)
            done = max(done, epoch.firsts[0])
        last = epoch.arrangement.pools
        while epoch.frontier < last and (done is None or epoch.find(done) is None):
            epoch.count(epoch.frontier, len(epoch.arrangement.pool(epoch.frontier)[1]) - 1)
        found = last if done is None else epoch.find(done)
        pool = last if found is None else found
        return pool, epoch.firsts[pool - epoch.begin]

    def _place(self, done: int) -> dict[str, int]:
        self._check_done("done", done)
        pool, before = self._count_to(done)
        return {"pool": pool, "before": before}

    def _check_done(self, name: str, done: int) -> None:
        if done > self._epoch().firsts[-1]:
            super()._check_done(name, done)

    def _take_up(self, state: Mapping[str, int]) -> None:
        epoch = self._begin(state["epoch"])
        pool, before, done = state["pool"], state["before"], state["done"]
        counted = epoch.firsts[pool] if pool < len(epoch.firsts) else before
        fits = pool <= epoch.arrangement.pools and counted == before and (done >= before or pool == 0)
        if len(epoch.firsts) > 1 or epoch.arrangement.pools == 0:
            fits = fits and done <= epoch.firsts[-1]
        if not fits:
            got, rule = f"done = {done}, pool = {pool}, before = {before}", f"a place in epoch {state['epoch']}"
            raise ArgumentError(message("state", got, rule, "pass the result of state_dict()"))
        if len(epoch.firsts) == 1:
            epoch.begin, epoch.firsts = pool, [before]
        self._known = epoch

    def _identity(self) -> dict[str, int]:
        limit, order = self.limit, self.order
        return {
            "sequences": len(self._lengths),
            "elements": self._settled.elements,
            "batch_sequences": limit.sequences or 0,
            "batch_elements": limit.elements or 0,
            "batch_padded": limit.padded or 0,
            "too_long": TOO_LONG.index(limit.too_long),
            "order": KINDS.index(order.kind),
            "order_pool": order.pool,
            "order_window": order.window,
            "order_by_length": int(order.by_length),
            "order_noise": round(order.noise * 1e9),
            "seed": self.seed,
            "largest_first": int(self.largest_first),
        }

    @cached_property
    def _largest(self) -> _Integers:
        """The rows of the largest batch, ascending: from the longest on, and then what still fits."""
        limit = self.limit
        # Those that are dropped are the longest.
        in_turn = np.argsort(descending_keys(self._lengths), kind="stable")[len(self._dropped) :]
        sizes = self._lengths[in_turn].astype(np.int64)
        most = len(sizes) if limit.sequences is None else min(limit.sequences, len(sizes))
        count = min(max(int(np.searchsorted(limit.shares(sizes[:most]), 1, side="right")), 1), len(sizes))
        chosen = list(range(count))
        while limit.elements is not None and len(chosen) < most:
            place = max(int(np.searchsorted(-sizes, int(sizes[chosen].sum()) - limit.elements)), chosen[-1] + 1)
            if place >= len(sizes) or limit.shares(sizes[[*chosen, place]])[-1] > 1:
                break
            chosen.append(place)
        return np.sort(in_turn[chosen])


def assign_ranks(lengths: npt.NDArray[np.integer], ranks: int) -> _Integers:
    """Which rank has each sequence of a step, so that all have about as many elements.

    A step costs a rank the larger of its elements over its rate and its longest sequence times the latency of a step.
    The longest sequence is on some rank however they are shared out; so what can be evened out is the elements.
    """
    # An empty sequence is some work too.
    work = np.maximum(lengths.astype(np.int64), 1)
    in_turn = np.argsort(-work, kind="stable")
    owners = np.empty_like(work)
    owners[in_turn], _ = balance(work[in_turn], ranks)
    return owners


def balance(sizes: _Integers, parts: int) -> tuple[_Integers, _Integers]:
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
