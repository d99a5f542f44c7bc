"""A batch sampler for a DataLoader: any epoch, from any batch on, on one of several ranks."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from torch import Tensor, distributed
from torch.utils.data import Sampler

from raglane._utils.checks import check_choice, check_flag, check_kind, check_whole
from raglane.data.order.epochs import Epochs
from raglane.data.order.limit import TOO_LONG, BatchLimit, settle
from raglane.data.order.order import KINDS, EpochOrder, EpochPools, descending_keys, key_of
from raglane.errors import ArgumentError

_Integers = npt.NDArray[np.int64]

_NONE = np.empty(0, np.int64)
# With fewer bins a heap is faster than rounds of NumPy calls, each of which assigns about one size
# per bin.
_FEW = 24


@dataclass
class _Epoch:
    """One epoch: its pools, and the number of batches before each pool that was counted."""

    number: int
    largest: _Integers
    pools: EpochPools
    # The first counted pool. ``firsts[i]`` batches precede pool ``begin + i``.
    begin: int
    firsts: list[int]

    @property
    def frontier(self) -> int:
        """The first pool whose batches were not counted."""
        return self.begin + len(self.firsts) - 1

    def count(self, pool: int, batches: int) -> None:
        """Record the number of batches of a pool."""
        if pool == self.frontier:
            self.firsts.append(self.firsts[-1] + batches)

    def find(self, done: int) -> int | None:
        """Return the pool of batch ``done``, or the frontier at its start; None if not counted so
        far.
        """
        index = bisect_right(self.firsts, done) - 1
        if index < 0 or (index == len(self.firsts) - 1 and done > self.firsts[-1]):
            return None
        return self.begin + index


class BatchSampler(Epochs[list[int]], Sampler[list[int]]):
    """A batch sampler for sequences of different lengths, for a DataLoader's ``batch_sampler``.

    Every sequence comes exactly once per epoch. Batches are a function of the lengths, the limits
    of a batch, the order, ``seed`` and the number of the epoch. So a state is a few integers, and
    any batch is found without computing those before it.

    With several ranks the limits apply to a step: the batches of all ranks together. The sequences
    of a step are distributed longest first, each to the rank with the fewest elements. So all ranks
    have equally many steps of about the same work, and a run that resumes with another number of
    ranks covers the remaining sequences. If a step has fewer sequences than ranks, the batches of
    the other ranks are empty lists.

    After all batches of an epoch were returned, the next iteration is the next epoch, and a state
    is that of its start; :meth:`set_epoch` selects one (Lightning calls it).

    Args:
        lengths: ``(B,)`` integers, each at least 0: list, NumPy array or tensor. They are copied,
            unless they are in a mapped file.
        batch_size: the number of sequences in a batch; None without this limit. Or the
            ``memory_limit`` of a :func:`plan <raglane.plan>`, which contains all limits.
        order: the order of the sequences, for others than ``bucket`` selects: ``"random"``,
            ``"bucketed"``, ``"sorted"``, or an :class:`~raglane.data.EpochOrder`.
        bucket: True for batches of similar lengths (bucketing), False for random ones.
        max_elements: the largest number of elements in a batch.
        max_padded: the largest number of elements after padding to the longest sequence.
        too_long: treatment of a sequence that exceeds ``max_elements`` or ``max_padded``:
            ``"raise"``; ``"drop"`` leaves it out; ``"chunk"`` replaces it by pieces, see
            :meth:`Dataset.chunk <raglane.data.Dataset.chunk>`; ``"alone"`` makes it a batch.
        seed: 0 or above.
        num_replicas: the number of processes that train together, as for torch's
            DistributedSampler; ``"auto"`` takes the size of the process group of
            ``torch.distributed``, or 1 without one. Leave it out under Hugging Face accelerate,
            which distributes the batches itself.
        rank: the number of this process, from 0; read with ``num_replicas="auto"``.
        largest_first: begin the first epoch with the longest sequences, as many as fit in a batch.
            Any other batch requires at most the memory of one more sequence, so memory runs out in
            the first step or never.

    Attributes:
        too_long: the number of sequences that are longer than a batch.

    Raises:
        ArgumentTypeError: an argument has the wrong type.
        ShapeError: lengths are not a flat list.
        ArgumentError: a length or a number is too small, or a sequence does not fit in a batch.

    Example:
        >>> batches = BatchSampler([5, 1, 9, 2, 8, 1], batch_size=2, order="sorted")
        >>> list(batches), len(batches)
        ([[2, 4], [0, 3], [1, 5]], 3)
        >>> for rank in (0, 1):
        ...     print(list(BatchSampler([5, 1, 9, 2, 8, 1], 4, "sorted", num_replicas=2, rank=rank)))
        [[2], [3]]
        [[4, 0], [1, 5]]
    """

    _state_names = ("epoch", "done", "pool", "before")

    def __init__(
        self,
        lengths: Sequence[int] | npt.NDArray[Any] | Tensor,
        batch_size: int | BatchLimit | None = None,
        order: EpochOrder | Literal["random", "bucketed", "sorted"] | None = None,
        *,
        bucket: bool = False,
        max_elements: int | None = None,
        max_padded: int | None = None,
        too_long: Literal["raise", "drop", "chunk", "alone"] = "raise",
        seed: int = 0,
        num_replicas: int | Literal["auto"] = 1,
        rank: int = 0,
        largest_first: bool = False,
    ) -> None:
        super().__init__()
        limit = _limit_of(batch_size, max_elements, max_padded, too_long)
        self.limit = limit
        self.order = _order_of(order, check_flag("bucket", bucket))
        self.seed = check_whole("seed", seed, 0, most=2**63 - 1)
        self.num_replicas, self.rank = replicas(num_replicas, rank)
        self.largest_first = check_flag("largest_first", largest_first)
        self._settled = settled = settle(lengths, limit)
        self._lengths = settled.lengths
        self._dropped = settled.dropped
        self.too_long = settled.too_long
        self._usual = limit.usual(
            settled.elements / max(len(settled.lengths) - len(settled.dropped), 1)
        )
        self._current: _Epoch | None = None

    def __repr__(self) -> str:
        ranks = f", rank {self.rank} of {self.num_replicas}" if self.num_replicas > 1 else ""
        count = len(self._lengths)
        return f"BatchSampler({count:,} sequences; batches of {self.limit}; {self.order}{ranks})"

    def __len__(self) -> int:
        """The number of batches in this epoch, the same on every rank.

        If the limit counts elements, epochs differ by a few batches, and the whole epoch is
        computed to count them.
        """
        return self._count_to(None)[1]

    def whole(self) -> tuple[_Integers, _Integers]:
        """The whole epoch, of all ranks together.

        Returns:
            The rows batch after batch, ``(M,)``, and the offsets of the batches, ``(b + 1,)``,
            first 0, last ``M``.

        Example:
            >>> BatchSampler([5, 1, 9, 2, 8, 1], batch_size=4, order="sorted").whole()
            (array([2, 4, 0, 3, 1, 5]), array([0, 3, 6]))
        """
        epoch = self._epoch()
        rows = [epoch.largest]
        ends = [np.array([0, len(epoch.largest)][: 1 + bool(len(epoch.largest))])]
        for number in range(len(epoch.pools)):
            pool, bounds = epoch.pools.pool(number)
            rows.append(pool)
            ends.append(ends[-1][-1] + bounds[1:])
        return np.concatenate(rows), np.concatenate(ends)

    def _items(self, start: int) -> Iterator[list[int]]:
        epoch = self._epoch()
        if start == 0 and len(epoch.largest):
            yield self._on_this_rank(epoch.largest)
        first, before = self._count_to(start)
        skipped = max(start, before) - before
        for number in range(first, len(epoch.pools)):
            rows, bounds = epoch.pools.pool(number)
            epoch.count(number, len(bounds) - 1)
            edges = bounds[skipped:].tolist()
            skipped = 0
            for begin, end in pairwise(edges):
                yield self._on_this_rank(rows[begin:end])

    def _on_this_rank(self, rows: _Integers) -> list[int]:
        """Return the rows of a step that belong to this rank."""
        batches = (
            rows
            if self.num_replicas == 1
            else rows[assign_ranks(self._lengths[rows], self.num_replicas) == self.rank]
        )
        return batches.tolist()

    def _epoch(self) -> _Epoch:
        if self._current is None or self._current.number != self.epoch:
            self._current = self._begin(self.epoch)
        return self._current

    def _begin(self, epoch: int) -> _Epoch:
        largest = self._largest if self.largest_first and epoch == 0 else _NONE
        key = key_of(self.seed, epoch)
        without = np.union1d(self._dropped, largest)
        pools = EpochPools(
            self._lengths, self.limit, self.order, key=key, usual=self._usual, without=without
        )
        counts = pools.batch_counts()
        firsts = [min(len(largest), 1)]
        if counts is not None:
            firsts += (firsts[0] + np.cumsum(counts)).tolist()
        return _Epoch(epoch, largest, pools, 0, firsts)

    def _count_to(self, done: int | None) -> tuple[int, int]:
        """Return the pool of batch ``done``, or the end for None, and the number of batches before
        that pool.

        Pools that were not counted are computed.
        """
        epoch = self._epoch()
        if done is not None and done < epoch.firsts[0]:
            if epoch.begin:
                epoch = self._current = self._begin(self.epoch)
            done = max(done, epoch.firsts[0])
        last = len(epoch.pools)
        while epoch.frontier < last and (done is None or epoch.find(done) is None):
            epoch.count(epoch.frontier, len(epoch.pools.pool(epoch.frontier)[1]) - 1)
        pool = last if done is None else epoch.find(done)
        pool = last if pool is None else pool
        return pool, epoch.firsts[pool - epoch.begin]

    def _position(self, done: int) -> dict[str, int]:
        self._check_done("done", done)
        pool, before = self._count_to(done)
        return {"pool": pool, "before": before}

    def _is_end(self, done: int) -> bool:
        # The number of batches is counted only up to ``done``.
        return done > 0 and self._count_to(done) == (len(self._epoch().pools), done)

    def _check_done(self, name: str, done: int) -> None:
        if done > self._epoch().firsts[-1]:
            super()._check_done(name, done)

    def _restore(self, state: Mapping[str, int]) -> None:
        epoch = self._begin(state["epoch"])
        pool = state["pool"]
        before = state["before"]
        done = state["done"]
        counted = epoch.firsts[pool] if pool < len(epoch.firsts) else before
        fits = pool <= len(epoch.pools) and counted == before and (done >= before or pool == 0)
        if fits and len(epoch.firsts) == 1:
            epoch.begin = pool
            epoch.firsts = [before]
            if before < done and pool < len(epoch.pools):
                epoch.count(pool, len(epoch.pools.pool(pool)[1]) - 1)
        if not fits or done > epoch.firsts[-1]:
            got = f"done = {done}, pool = {pool}, before = {before}"
            rule = f"a place in epoch {state['epoch']}"
            raise ArgumentError("state", got, rule, "pass the result of state_dict()")
        self._current = epoch

    def _identity(self) -> dict[str, int]:
        limit = self.limit
        order = self.order
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
        """The rows of the largest batch, ascending: the longest sequences, then shorter ones that
        still fit.
        """
        limit = self.limit
        # The dropped sequences are the longest.
        in_order = np.argsort(descending_keys(self._lengths), kind="stable")[len(self._dropped) :]
        sizes = self._lengths[in_order].astype(np.int64)
        most = len(sizes) if limit.sequences is None else min(limit.sequences, len(sizes))
        count = min(
            max(int(np.searchsorted(limit.usage(sizes[:most]), 1, side="right")), 1), len(sizes)
        )
        chosen = list(range(count))
        while limit.elements is not None and len(chosen) < most:
            index = max(
                int(np.searchsorted(-sizes, int(sizes[chosen].sum()) - limit.elements)),
                chosen[-1] + 1,
            )
            if index >= len(sizes) or limit.usage(sizes[[*chosen, index]])[-1] > 1:
                break
            chosen.append(index)
        return np.sort(in_order[chosen])


def _limit_of(batch_size: Any, elements: Any, padded: Any, too_long: Any) -> BatchLimit:
    """Return the limit of a batch from the arguments of a sampler."""
    if isinstance(batch_size, BatchLimit):
        return batch_size
    sizes = {"batch_size": batch_size, "max_elements": elements, "max_padded": padded}
    chosen = {
        name: check_whole(name, size, 1, most=2**63 - 1)
        for name, size in sizes.items()
        if size is not None
    }
    if not chosen:
        rule = "a whole number, without max_elements and max_padded"
        raise ArgumentError("batch_size", "None", rule, "pass e.g. batch_size=32")
    treatment: Any = check_choice("too_long", too_long, TOO_LONG)
    return BatchLimit(
        chosen.get("batch_size"), chosen.get("max_elements"), chosen.get("max_padded"), treatment
    )


def _order_of(order: Any, bucket: bool) -> EpochOrder:
    """Return the order of a sampler from its arguments."""
    if order is None:
        return EpochOrder.bucketed() if bucket else EpochOrder.random()
    names = ("random", "bucketed", "sorted")
    if isinstance(order, str):
        order = EpochOrder(check_choice("order", order, names), by_length=order != "random")
    rule = f"one of {', '.join(names)}, or an EpochOrder"
    check_kind("order", order, EpochOrder, rule, "pass e.g. order='sorted'")
    if bucket and order.kind != "bucketed":
        fix = "leave one of bucket and order out"
        raise ArgumentError("bucket", "True", f"False with the order {order}", fix)
    return order


def replicas(num_replicas: Any, rank: Any) -> tuple[int, int]:
    """Return the number of processes and the number of this one, by request those of torch."""
    if isinstance(num_replicas, str) and num_replicas == "auto":
        check_whole("rank", rank, 0, "leave rank out with num_replicas='auto'", most=0)
        if not (distributed.is_available() and distributed.is_initialized()):
            return 1, 0
        return distributed.get_world_size(), distributed.get_rank()
    count = check_whole("num_replicas", num_replicas, 1, "pass a number of processes, or 'auto'")
    return count, check_whole("rank", rank, 0, most=count - 1)


def assign_ranks(lengths: npt.NDArray[np.integer], ranks: int) -> _Integers:
    """Return the rank of each sequence of a step, so that all ranks have about equally many
    elements.

    The time of a step is the larger of its elements over the rate of a rank, which can be balanced,
    and its longest sequence times the latency of one time step, which is the same in any
    assignment.
    """
    # An empty sequence has a small cost too.
    work = np.maximum(lengths.astype(np.int64), 1)
    in_order = np.argsort(-work, kind="stable")
    owners = np.empty_like(work)
    owners[in_order], _ = balance(work[in_order], ranks)
    return owners


def balance(sizes: _Integers, bins: int) -> tuple[_Integers, _Integers]:
    """Assign each size, in the given order, to the bin with the smallest sum (Graham, 1969).

    Returns the bin of each size, and the sum of that bin before it. Of equal sums the first bin is
    chosen. For descending sizes the largest sum is at most 4/3 of the optimum.
    """
    # The surplus bins stay empty.
    bins = min(bins, max(len(sizes), 1))
    return _by_heap(sizes, bins) if bins < _FEW else _by_rounds(sizes, bins)


def _by_heap(sizes: _Integers, bins: int) -> tuple[_Integers, _Integers]:
    sums = [(0, number) for number in range(bins)]
    chosen = []
    before = []
    for size in sizes.tolist():
        total, number = sums[0]
        heapq.heapreplace(sums, (total + size, number))
        chosen.append(number)
        before.append(total)
    return np.array(chosen, np.int64), np.array(before, np.int64)


def _by_rounds(sizes: _Integers, bins: int) -> tuple[_Integers, _Integers]:
    """Assign one size to each bin per round, in the order of their sums, up to the first bin that
    would be reused.
    """
    sums = np.zeros(bins, np.int64)
    chosen = np.empty_like(sizes)
    before = np.empty_like(sizes)
    done = 0
    while done < len(sizes):
        batch = sizes[done : done + bins]
        in_order = np.argsort(sums, kind="stable")[: len(batch)]
        had = sums[in_order]
        has = had + batch
        again = had[1:] >= np.minimum.accumulate(has)[:-1]
        count = int(again.argmax()) + 1 if again.any() else len(batch)
        chosen[done : done + count] = in_order[:count]
        before[done : done + count] = had[:count]
        sums[in_order[:count]] = has[:count]
        done += count
    return chosen, before
