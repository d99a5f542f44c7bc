"""Epoch orders of Raglane and other libraries: balance of ranks, density, shuffling, and the time to
draw and to resume.

    python benchmarks/epochs.py names=names.txt libri=libri.txt > benchmarks/results/order.md

Each list is a file with one length per line. The measure of shuffling is in ``shuffling.py``. A
step costs the larger of its elements over ``RATE`` and its longest sequence times ``LATENCY``:
those of a small LSTM on one processor. lhotse is skipped if it is not installed.

The methods of transformers and torchtext are implemented here in a few lines: both shuffle and
divide into pools. The first, like ``group_by_length``, sorts pools of 50 batches, divides each into
batches, longest first, and moves the longest of all to the start. The second, like
``BucketIterator``, sorts pools of 100 batches and shuffles the batches of a pool.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from shuffling import shuffling

from raglane.data import BatchLimit, BatchSampler, EpochOrder
from raglane.data.order.batches import assign_ranks
from raglane.native.machine import cpu_name

Integers = npt.NDArray[np.int64]
Epoch = tuple[Integers, Integers]

RATE, LATENCY = 2e6, 4e-6
RANKS, PER_RANK, POOL = (2, 8, 64, 512), 32, 50
# The number of evaluated steps, evenly spaced over an epoch.
STEPS = 400


def cost(lengths: Integers) -> float:
    """Return the seconds of a step on one rank."""
    return max(lengths.sum() / RATE, lengths.max(initial=0) * LATENCY)


def spread_of_step(shares: list[Integers]) -> tuple[float, float]:
    """Return the largest cost over the mean, minus 1: as distributed, and the least for the longest
    sequence.
    """
    costs = [cost(share) for share in shares]
    mean = float(np.mean(costs))
    elements = sum(int(share.sum()) for share in shares)
    least = max(
        elements / len(shares) / RATE, max(int(share.max(initial=0)) for share in shares) * LATENCY
    )
    return max(costs) / mean - 1, max(least / mean - 1, 0.0)


def density_of(shares: list[Integers]) -> tuple[int, int]:
    """Return the numbers of real elements and of all elements of padded batches."""
    return sum(int(one.sum()) for one in shares), sum(
        len(one) * int(one.max(initial=0)) for one in shares
    )


def shared(lengths: Integers, ranks: int) -> list[Integers]:
    """Return the lengths of a step on every rank."""
    owners = assign_ranks(lengths, ranks)
    ends = np.cumsum(np.bincount(owners, minlength=ranks))
    return np.split(lengths[np.argsort(owners, kind="stable")], ends[:-1])


def steps_of(lengths: Integers, order: EpochOrder, ranks: int) -> Iterator[Integers]:
    """Return the lengths of some steps of an epoch."""
    batches = BatchSampler(lengths, BatchLimit(sequences=PER_RANK * ranks), order)
    every = max(1, len(batches) // STEPS)
    for step, rows in enumerate(batches):
        if step % every == 0:
            yield lengths[rows]


def looked_at(steps: Iterator[list[Integers]]) -> list[str]:
    """Return the cells of a table: the spread, the spread caused by the longest sequence, and the
    density.
    """
    values, densities = [], []
    for shares in steps:
        values.append(spread_of_step(shares))
        densities.append(density_of(shares))
    spreads, bounds = np.array(values).T
    real, padded = np.sum(densities, 0)
    return [
        f"{spreads.mean():.2%} ({np.quantile(spreads, 0.99):.2%})",
        f"{bounds.mean():.2%}",
        f"{real / padded:.3f}",
    ]


def spread(lists: dict[str, Integers], count: int) -> None:
    """Print the table of the balance of ranks."""
    print(
        f"\n## Work of ranks\n\n{count:,} lengths drawn from each list, {PER_RANK} sequences per rank and step;"
    )
    print(
        f"some {STEPS} steps of an epoch, evenly over it. The spread of a step is the largest cost of a rank over the"
    )
    print(
        "mean, less 1: its mean over the steps, and in parentheses the 99th percentile. *Bound*: the mean spread if"
    )
    print(
        "nothing but the longest sequence of a step made a difference. *Density*: of a rank's batches, padded."
    )
    print(
        "Grouped by pools of 50 and of 200 batches; random steps shared out; and random batches of each rank's own.\n"
    )
    print(
        "| list | ranks | bucketed, 50: spread | density | bucketed, 200: spread | density | random: spread "
        "| bound | own |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    random = np.random.default_rng(0)
    for name, known in lists.items():
        lengths = random.choice(known, count)
        for ranks in RANKS:
            cells = [name, f"{ranks}"]
            for pool in (POOL, 4 * POOL):
                steps = steps_of(lengths, EpochOrder.bucketed(pool), ranks)
                found = looked_at(shared(step, ranks) for step in steps)
                cells += [found[0], found[2]]
            cells += looked_at(
                shared(step, ranks) for step in steps_of(lengths, EpochOrder.random(), ranks)
            )[:2]
            # The sequences within a step of a random order are in random order too.
            cells += looked_at(
                np.array_split(step, ranks)
                for step in steps_of(lengths, EpochOrder.random(), ranks)
            )[:1]
            print(f"| {' | '.join(cells)} |", flush=True)


class Ours:
    """A batch limit and an epoch order of Raglane."""

    def __init__(self, limit: BatchLimit, order: EpochOrder) -> None:
        self.limit, self.order = limit, order

    def epoch(self, lengths: Integers, number: int) -> list[list[int]]:
        """All batches."""
        batches = BatchSampler(lengths, self.limit, self.order)
        batches.set_epoch(number)
        return list(batches)

    def go_on(self, lengths: Integers) -> Callable[[], object]:
        """Return the batch in the middle of an epoch, as in a new process."""
        stopped = BatchSampler(lengths, self.limit, self.order)
        state = stopped.state_dict(len(stopped) // 2)

        def resume() -> object:
            batches = BatchSampler(lengths, self.limit, self.order)
            batches.load_state_dict(state)
            return next(iter(batches))

        return resume


class Pools:
    """Sorted pools of a random order: the two methods of the module's docstring, and a random
    order.
    """

    def __init__(self, pool: int, *, sort: bool = True, shuffles: bool = True) -> None:
        self.pool, self.sort, self.shuffles = pool, sort, shuffles

    def epoch(self, lengths: Integers, number: int) -> list[list[int]]:
        """Return all batches as Python lists, sorted by Python, like the originals."""
        generator = torch.Generator().manual_seed(number)
        rows = torch.randperm(len(lengths), generator=generator).tolist()
        known = lengths.tolist()
        size = self.pool * PER_RANK
        batches: list[list[int]] = []
        for start in range(0, len(rows), size):
            held = rows[start : start + size]
            if self.sort:
                held = sorted(held, key=known.__getitem__, reverse=True)
            cut = [held[first : first + PER_RANK] for first in range(0, len(held), PER_RANK)]
            if self.sort and self.shuffles:
                cut = [
                    cut[place] for place in torch.randperm(len(cut), generator=generator).tolist()
                ]
            batches += cut
        return batches

    def go_on(self, lengths: Integers) -> Callable[[], object]:
        """Draw the epoch again, and skip half of it."""
        return lambda: self.epoch(lengths, 0)[len(lengths) // PER_RANK // 2]


class Lhotse:
    """lhotse's dynamic bucketing: 30 buckets, a buffer of 20,000."""

    def __init__(self) -> None:
        from lhotse.dataset.sampling import DynamicBucketingSampler

        self.kind: Any = DynamicBucketingSampler
        self.cuts: Any = None

    def _sampler(self, lengths: Integers, **options: Any) -> Any:
        from lhotse import CutSet
        from lhotse.testing.dummies import dummy_cut

        if self.cuts is None or len(self.cuts) != len(lengths):
            self.cuts = CutSet.from_cuts(
                dummy_cut(row, duration=length / 100) for row, length in enumerate(lengths.tolist())
            )
        return self.kind(self.cuts, max_cuts=PER_RANK, num_buckets=30, shuffle=True, **options)

    def epoch(self, lengths: Integers, number: int) -> list[list[int]]:
        """All batches."""
        sampler = self._sampler(lengths, seed=number, world_size=1, rank=0)
        return [[int(cut.id.rpartition("-")[2]) for cut in batch] for batch in sampler]

    def go_on(self, lengths: Integers) -> Callable[[], object]:
        """Load the state, and continue there."""
        stopped = self._sampler(lengths, world_size=1, rank=0)
        iterator = iter(stopped)
        for _ in range(len(lengths) // PER_RANK // 2):
            next(iterator)
        state = stopped.state_dict()

        def resume() -> object:
            sampler = self._sampler(lengths, world_size=1, rank=0)
            sampler.load_state_dict(state)
            return next(iter(sampler))

        return resume

    def steps(self, lengths: Integers, ranks: int) -> list[list[Integers]]:
        """Return the lengths of each rank, step after step."""
        whole = [self._sampler(lengths, world_size=ranks, rank=rank) for rank in range(ranks)]
        held = [
            [[int(cut.id.rpartition("-")[2]) for cut in batch] for batch in sampler]
            for sampler in whole
        ]
        return [[lengths[share] for share in step] for step in zip(*held, strict=False)]


def as_epoch(batches: list[list[int]]) -> Epoch:
    """Return batches as rows and bounds."""
    return np.concatenate(batches).astype(np.int64), np.cumsum([0, *map(len, batches)])


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the processor seconds of a single-threaded call, and its result."""
    begun = time.process_time()
    result = call()
    return time.process_time() - begun, result


def peers(lists: dict[str, Integers], count: int, ranks: int = 8) -> None:
    """Print the table of density, spread, shuffling and time, with other libraries."""
    print(
        f"\n## Beside others\n\n{count:,} lengths drawn from a list, batches of {PER_RANK}. The spread is that of"
    )
    print(
        f"{ranks} ranks: ours share out steps of as many batches, the others give each rank one of successive batches,"
    )
    print(
        "lhotse by its own `world_size`. Steps of as many elements have fewer than 32 long sequences per rank. *Draw*"
    )
    print(
        "is the time of an epoch, *go on* that of a new process to have the batch in the middle of one, both from"
    )
    print("lengths in memory.\n")
    print("| list | order | density | spread | company | trend | travel | draw, s | go on, s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    random = np.random.default_rng(1)
    for name, known in lists.items():
        lengths = random.choice(known, count)
        elements = BatchLimit(elements=round(PER_RANK * float(lengths.mean())))
        ways: dict[str, Any] = {
            "ours, random": Ours(BatchLimit(sequences=PER_RANK), EpochOrder.random()),
            "ours, bucketed": Ours(BatchLimit(sequences=PER_RANK), EpochOrder.bucketed(POOL)),
            "ours, bucketed, pools of 100": Ours(
                BatchLimit(sequences=PER_RANK), EpochOrder.bucketed(2 * POOL)
            ),
            "ours, bucketed, pools of 200": Ours(
                BatchLimit(sequences=PER_RANK), EpochOrder.bucketed(4 * POOL)
            ),
            "ours, bucketed, noise 0.1": Ours(
                BatchLimit(sequences=PER_RANK), EpochOrder.bucketed(POOL, noise=0.1)
            ),
            "ours, bucketed, elements": Ours(elements, EpochOrder.bucketed(POOL)),
            "random": Pools(1, sort=False),
            "as transformers' grouping": Pools(POOL, shuffles=False),
            "as torchtext's iterator": Pools(2 * POOL),
        }
        try:
            ways["lhotse, dynamic bucketing"] = Lhotse()
        except ImportError:
            print("lhotse is not installed.")
        for label, way in ways.items():
            way.epoch(lengths[:1000], 0)
            seconds, first = timed(partial(way.epoch, lengths, 0))
            second = way.epoch(lengths, 1)
            went_on = min(timed(way.go_on(lengths))[0] for _ in range(3))
            values = shuffling(lengths, as_epoch(first), as_epoch(second))
            real, padded = density_of([lengths[batch] for batch in first])
            if isinstance(way, Ours):
                most = way.limit.elements
                wide = (
                    BatchLimit(sequences=PER_RANK * ranks)
                    if most is None
                    else BatchLimit(elements=most * ranks)
                )
                batches = BatchSampler(lengths, wide, way.order)
                steps = [shared(lengths[rows], ranks) for rows in batches]
            elif isinstance(way, Lhotse):
                steps = way.steps(lengths, ranks)
            else:
                known_steps = range(0, len(first) - ranks + 1, ranks)
                steps = [
                    [lengths[rows] for rows in first[step : step + ranks]] for step in known_steps
                ]
            found = float(np.mean([spread_of_step(step)[0] for step in steps]))
            numbers = f"{values.company:.3f} | {values.trend:.2f} | {values.travel:.2f}"
            times = f"{seconds:.3f} | {went_on:.4f}"
            print(
                f"| {name} | {label} | {real / padded:.3f} | {found:.2%} | {numbers} | {times} |",
                flush=True,
            )


def many(known: Integers, count: int) -> None:
    """Print the table of times for many sequences."""
    print(
        f"\n## {count:,} sequences\n\nLengths drawn from the last list, batches of 64 sequences, or of as many elements"
    )
    print(
        "as these have on average. *Make* is what is done once; *first* the first batch of an epoch; *go on* a new"
    )
    print(
        "object (not counting what is done once) with the batch in the middle; *epoch* all batches as lists; *count*"
    )
    print("`len()`.\n")
    print("| limit and order | make, s | first, s | go on, s | epoch, s | count, s |")
    print("| --- | --- | --- | --- | --- | --- |")
    lengths = np.random.default_rng(2).choice(known, count).astype(np.int64)
    most = round(64 * float(lengths.mean()))
    for limit, order in (
        (BatchLimit(sequences=64), EpochOrder.random()),
        (BatchLimit(sequences=64), EpochOrder.bucketed()),
        (BatchLimit(elements=most), EpochOrder.random()),
        (BatchLimit(elements=most), EpochOrder.bucketed()),
        (BatchLimit(elements=most), EpochOrder.bucketed(noise=0.1)),
        (BatchLimit(padded=most), EpochOrder.bucketed()),
        (BatchLimit(sequences=64), EpochOrder.windows(100_000)),
    ):
        made, batches = timed(lambda limit=limit, order=order: BatchSampler(lengths, limit, order))
        first, iterator = timed(lambda batches=batches: (found := iter(batches), next(found))[0])
        drawn, held = timed(lambda iterator=iterator: sum(1 for _ in iterator) + 1)
        batches.set_epoch(1)
        counted, _ = timed(lambda batches=batches: len(batches))
        batches.set_epoch(0)
        state = batches.state_dict(held // 2)
        other = BatchSampler(lengths, limit, order)
        went_on, _ = timed(
            lambda other=other, state=state: (other.load_state_dict(state), next(iter(other)))
        )
        numbers = f"{made:.2f} | {first:.4f} | {went_on:.4f} | {drawn:.1f} | {counted:.2f}"
        print(f"| {limit}; {order} | {numbers} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "lists", nargs="+", metavar="NAME=FILE", help="the last is that of the time of many"
    )
    parser.add_argument(
        "--lengths", type=int, default=10_000_000, help="drawn from each list for the work of ranks"
    )
    parser.add_argument(
        "--peers", type=int, default=100_000, help="lengths for the comparison with others"
    )
    parser.add_argument(
        "--many", type=int, default=50_000_000, help="sequences for the time of many"
    )
    given = parser.parse_args()
    named = (entry.partition("=") for entry in given.lists)
    lists = {name: np.loadtxt(Path(path), dtype=np.int64) for name, _, path in named}
    print(
        f"# The order of an epoch\n\n`python benchmarks/epochs.py`, one process. {cpu_name()}, NumPy {np.__version__}."
    )
    print("Times are those of the processor: others used the machine meanwhile.")
    print(
        f"A step costs the larger of elements / {RATE:,.0f} and longest x {1e6 * LATENCY:g} us, in seconds."
    )
    spread(lists, given.lengths)
    peers({name: lists[name] for name in list(lists)[-2:]}, given.peers)
    many(lists[list(lists)[-1]], given.many)


if __name__ == "__main__":
    main()
