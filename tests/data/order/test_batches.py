"""Batch samplers: every sequence once per epoch, on any rank, from any batch on."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from made_datasets import of_tensors
from raglane.data import BatchLimit, BatchSampler, EpochOrder
from raglane.data.order.order import EpochPools
from raglane.errors import ArgumentError, ArgumentTypeError
from small_files import refused

_LENGTHS = st.lists(st.integers(0, 30), max_size=90)
_LIMITS = st.one_of(
    st.builds(BatchLimit, sequences=st.integers(1, 9)),
    st.builds(
        BatchLimit, elements=st.integers(30, 90), sequences=st.one_of(st.none(), st.integers(2, 9))
    ),
    st.builds(BatchLimit, padded=st.integers(30, 90)),
    st.builds(
        BatchLimit,
        elements=st.integers(8, 29),
        too_long=st.sampled_from(["drop", "chunk", "alone"]),
    ),
)
_ORDERS = st.one_of(
    st.just(EpochOrder.random()),
    st.just(EpochOrder.sorted()),
    st.builds(EpochOrder.bucketed, pool=st.integers(1, 4), noise=st.sampled_from([0.0, 0.3])),
    st.builds(EpochOrder.windows, sequences=st.integers(1, 40), by_length=st.booleans()),
)
_MADE: st.SearchStrategy[dict[str, Any]] = st.builds(
    dict, batch_size=_LIMITS, order=_ORDERS, seed=st.integers(0, 3), largest_first=st.booleans()
)


def _rows(batches: list[list[int]]) -> list[int]:
    return [row for batch in batches for row in batch]


def _items(lengths: list[int], limit: BatchLimit) -> dict[int, int]:
    """The rows of an epoch, and their lengths."""
    longest = limit.longest
    if longest is None or limit.too_long in ("raise", "alone"):
        return dict(enumerate(lengths))
    if limit.too_long == "drop":
        return {row: length for row, length in enumerate(lengths) if length <= longest}
    offsets = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int64)
    return dict(
        enumerate(
            of_tensors(torch.zeros(int(offsets[-1])), offsets).chunk(longest).lengths.tolist()
        )
    )


@given(_LENGTHS, _MADE)
def test_every_sequence_comes_once_in_batches_that_keep_the_limit(
    lengths: list[int], made: dict[str, Any]
) -> None:
    batches, limit = BatchSampler(lengths, **made), made["batch_size"]
    items = _items(lengths, limit)
    longest = limit.longest
    assert batches.too_long == (
        0 if longest is None else sum(length > longest for length in lengths)
    )
    for epoch in (0, 1, 7):
        batches.set_epoch(epoch)
        found = list(batches)
        assert sorted(_rows(found)) == list(items)
        assert all(type(row) is int for row in _rows(found))
        for batch in found:
            shares = limit.usage(np.array([items[row] for row in batch]))
            assert shares[-1] <= 1 or (len(batch) == 1 and limit.too_long == "alone")
        batches.set_epoch(epoch)
        assert len(batches) == len(found)
        assert list(batches) == found
        assert len(batches) == len(found)
        batches.set_epoch(epoch)
        rows, bounds = batches.whole()
        assert [rows[first:end].tolist() for first, end in pairwise(bounds.tolist())] == found


@given(_LENGTHS, _MADE, st.data())
def test_resuming_gives_exactly_the_batches_that_remain(
    lengths: list[int], made: dict[str, Any], data: st.DataObject
) -> None:
    epoch = data.draw(st.sampled_from([0, 3]))
    whole, stopped, resumed = (BatchSampler(lengths, **made) for _ in range(3))
    whole.set_epoch(epoch)
    batches = list(whole)
    done = data.draw(st.integers(0, len(batches)))
    ahead = data.draw(st.integers(0, len(batches) - done))
    stopped.set_epoch(epoch)
    iterator = iter(stopped)
    # Workers have fetched more than was used.
    assert [next(iterator) for _ in range(done + ahead)] == batches[: done + ahead]
    state = json.loads(json.dumps(stopped.state_dict(done)))
    assert all(type(value) is int for value in state.values())
    whole.set_epoch(epoch)
    assert whole.state_dict(done) == state
    if done == len(batches) > 0:
        # A finished epoch is the start of the next.
        epoch, done = epoch + 1, 0
        whole.set_epoch(epoch)
        batches = list(whole)
        whole.set_epoch(epoch)
    assert (state["epoch"], state["done"]) == (epoch, done)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    resumed.set_epoch(epoch)
    assert list(resumed) == batches[done:]
    resumed.set_epoch(epoch)
    resumed.load_state_dict(state)
    assert len(resumed) == len(batches)
    assert list(resumed) == batches[done:]
    assert resumed.state_dict(min(done, 1)) == whole.state_dict(min(done, 1))
    whole.set_epoch(epoch + 1)
    assert list(resumed) == list(whole)


def test_another_number_of_ranks_covers_what_remained() -> None:
    lengths = np.random.default_rng(0).integers(1, 40, 700)
    for limit in (BatchLimit(sequences=48), BatchLimit(elements=1200)):
        for order in (EpochOrder.random(), EpochOrder.bucketed(pool=4)):
            steps = list(BatchSampler(lengths, limit, order))
            first = BatchSampler(lengths, limit, order, num_replicas=4, rank=1)
            iterator = iter(first)
            for _ in range(5):
                next(iterator)
            rest = []
            for rank in range(6):
                other = BatchSampler(lengths, limit, order, num_replicas=6, rank=rank)
                other.load_state_dict(first.state_dict())
                rest += _rows(list(other))
            assert sorted(rest) == sorted(_rows(steps[5:]))


@pytest.mark.parametrize(
    ("lengths", "limit"),
    [
        ([1] * 5, BatchLimit(sequences=4)),
        ([9] * 50, BatchLimit(elements=10)),
        ([0, 3, 9], BatchLimit(padded=9)),
        ([2], BatchLimit(elements=9)),
        ([3, 9, 4, 1] * 100, BatchLimit(sequences=48)),
    ],
)
def test_ranks_without_a_sequence_in_a_step_are_idle(lengths: list[int], limit: BatchLimit) -> None:
    steps = list(BatchSampler(lengths, limit))
    for ranks in (2, 3, 64):
        shares = [
            list(BatchSampler(lengths, limit, num_replicas=ranks, rank=rank))
            for rank in range(ranks)
        ]
        assert {len(share) for share in shares} == {len(steps)}
        for step, whole in enumerate(steps):
            parts = [share[step] for share in shares]
            assert sorted(row for part in parts for row in part) == sorted(whole)
            assert sum(map(bool, parts)) == min(ranks, len(whole))


def test_ranks_have_equal_work() -> None:
    lengths = np.random.default_rng(0).lognormal(3, 0.7, 20_000).astype(np.int64) + 1
    for order in (EpochOrder.random(), EpochOrder.bucketed()):
        for ranks in (2, 8, 64):
            limit = BatchLimit(sequences=32 * ranks)
            step = lengths[next(iter(BatchSampler(lengths, limit, order)))]
            for rank in (0, 1):
                work = lengths[
                    next(iter(BatchSampler(lengths, limit, order, num_replicas=ranks, rank=rank)))
                ].sum()
                assert abs(work / (step.sum() / ranks) - 1) < 0.015 or work == step.max()


def test_the_largest_batch_is_the_first_of_all_epochs() -> None:
    lengths = np.random.default_rng(0).lognormal(3, 0.9, 3000).astype(np.int64) + 1
    for limit in (
        BatchLimit(sequences=16),
        BatchLimit(elements=2000, too_long="drop"),
        BatchLimit(padded=2000),
        BatchLimit(sequences=40, elements=1500),
    ):
        for order in (EpochOrder.random(), EpochOrder.bucketed(), EpochOrder.windows(500)):
            batches = BatchSampler(lengths, limit, order, largest_first=True)
            first, *others = list(batches)
            second = list(batches)
            assert len(first) == len(set(first))
            assert lengths[first].max() >= lengths[_rows(others)].max()
            if limit.padded is None:
                most = max(int(lengths[batch].sum()) for batch in others + second)
                assert lengths[first].sum() >= most - (0 if limit.elements is None else 1)
            else:
                assert (len(first) + 1) * lengths[first].max() > limit.padded
            assert sorted(_rows(second)) == sorted(first + _rows(others))
            assert second[0] != first


def test_epochs_and_seeds_differ_in_company_and_order() -> None:
    lengths = np.random.default_rng(1).integers(1, 100, 640)
    for order in (EpochOrder.random(), EpochOrder.bucketed(pool=10), EpochOrder.windows(160)):
        seen, companies = set(), set()
        for seed in (0, 1):
            batches = BatchSampler(
                torch.from_numpy(lengths), BatchLimit(sequences=8), order, seed=seed
            )
            for epoch in (0, 1):
                batches.set_epoch(epoch)
                found = list(batches)
                seen.add(tuple(map(tuple, found)))
                companies.add(frozenset(map(frozenset, found)))
                means = np.array([lengths[batch].mean() for batch in found])
                # Neither growing nor falling from batch to batch.
                assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.5
        assert len(seen) == len(companies) == 4


def test_orders_are_what_they_say() -> None:
    lengths = np.random.default_rng(5).lognormal(4, 0.7, 3000).astype(np.int64) + 1

    def waste(order: EpochOrder) -> float:
        batches = list(BatchSampler(lengths, BatchLimit(sequences=32), order))
        return float(
            1 - lengths.sum() / sum(len(batch) * lengths[batch].max() for batch in batches)
        )

    assert waste(EpochOrder.random()) > 0.6
    assert waste(EpochOrder.bucketed(pool=1)) > 0.6
    assert 0.2 < waste(EpochOrder.bucketed(pool=8)) < 0.4
    # One pool has them all.
    assert (
        waste(EpochOrder.sorted())
        <= waste(EpochOrder.bucketed())
        < 0.05
        < waste(EpochOrder.bucketed(pool=50))
        < 0.2
    )
    assert waste(EpochOrder.bucketed()) + 0.02 < waste(EpochOrder.bucketed(noise=0.3)) < 0.5
    assert waste(EpochOrder.windows(1600)) < 0.2
    assert waste(EpochOrder.windows(1600, by_length=False)) > 0.6
    batches = BatchSampler(
        [5, 0, 2**16, 2, 8, 0, 2**16], BatchLimit(sequences=2), EpochOrder.sorted()
    )
    assert list(batches) == [[2, 6], [4, 0], [3, 1], [5]]
    for by_length in (False, True):
        batches = BatchSampler(
            lengths, BatchLimit(sequences=32), EpochOrder.windows(100, by_length=by_length)
        )
        rows = np.array(_rows(list(batches)))
        assert np.array_equal(rows // 100, np.arange(3000) // 100)
        assert not np.array_equal(rows, np.arange(3000))


def test_noise_is_other_noise_in_every_epoch_and_for_every_seed() -> None:
    lengths = np.random.default_rng(2).integers(20, 60, 240)
    # One pool, so that nothing but noise gives a sequence other company.
    order = EpochOrder.windows(240, noise=0.4)
    met = []
    for seed, epoch in ((0, 0), (0, 1), (1, 0), (1, 1)):
        batches = BatchSampler(lengths, BatchLimit(sequences=8), order, seed=seed)
        batches.set_epoch(epoch)
        met.append(
            {(one, other) for batch in batches for one in batch for other in batch if one < other}
        )
    for place, pairs in enumerate(met):
        assert all(len(pairs & others) < 0.5 * len(pairs) for others in met[:place])


def test_a_plain_loop_gets_other_batches_in_every_epoch() -> None:
    plain, told = (BatchSampler(list(range(30)), BatchLimit(sequences=4), seed=2) for _ in range(2))
    epochs = [list(plain) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    for epoch, batches in enumerate(epochs):
        told.set_epoch(epoch)
        assert list(told) == batches
    for count, _ in enumerate(plain):  # After a break the same epoch begins again.
        if count == 2:
            break
    begun = list(plain)
    told.set_epoch(3)
    assert begun == list(told)


def test_no_more_is_arranged_than_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    pool = EpochPools.pool

    def noted(self: EpochPools, number: int) -> Any:
        asked.append(number)
        return pool(self, number)

    monkeypatch.setattr(EpochPools, "pool", noted)
    lengths = np.random.default_rng(0).integers(1, 50, 100_000)
    for limit in (BatchLimit(sequences=10), BatchLimit(elements=250), BatchLimit(padded=400)):
        asked.clear()
        stopped = BatchSampler(lengths, limit, EpochOrder.bucketed(pool=50))
        iterator = iter(stopped)
        for _ in range(520):
            next(iterator)
        assert asked == list(range(len(asked)))
        assert len(asked) < 14
        asked.clear()
        state = stopped.state_dict(517)
        resumed = BatchSampler(lengths, limit, EpochOrder.bucketed(pool=50))
        resumed.load_state_dict(state)
        next(iter(resumed))
        assert set(asked) == {state["pool"]}
        assert state["pool"] > 5


@pytest.mark.parametrize(
    ("lengths", "arguments", "error", "words"),
    [
        ([1.5], {}, ArgumentTypeError, "lengths must be .*got torch.float"),
        ([1], {"batch_size": 0}, ArgumentError, "batch_size must be at least 1, got 0"),
        ([1], {"batch_size": None}, ArgumentError, "batch_size must be a whole number, .*got None"),
        ([1], {"max_elements": "9"}, ArgumentTypeError, "max_elements must be .*got '9'"),
        ([1], {"too_long": "split"}, ArgumentError, "too_long must be one of .*got 'split'"),
        ([1], {"seed": 2**63}, ArgumentError, "seed must be at most 9223372036854775807, got"),
        ([1], {"order": "bogus"}, ArgumentError, "order must be one of random.*got 'bogus'"),
        ([1], {"order": 3}, ArgumentTypeError, "order must be .*got 3"),
        ([1], {"order": "sorted", "bucket": True}, ArgumentError, "bucket must be False.*sorted"),
        ([1], {"num_replicas": 2, "rank": 2}, ArgumentError, "rank must be at most 1, got 2"),
    ],
)
def test_bad_arguments(
    lengths: Any, arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        BatchSampler(lengths, **({"batch_size": 2} | arguments))


def test_bad_orders() -> None:
    refused(["kind must be one of ", "got 'bogus'"], EpochOrder, "bogus", error=ArgumentError)
    refused(["pool must be ", "got 0"], EpochOrder.bucketed, pool=0, error=ArgumentError)
    refused(["noise must be ", "got 1.5"], EpochOrder.bucketed, noise=1.5, error=ArgumentError)
    refused(["sequences must be ", "got 0"], EpochOrder.windows, 0, error=ArgumentError)


def test_numbers_of_numpy_are_ints() -> None:
    one: Any = np.int64(1)
    limit, order = BatchLimit(sequences=2 * one), EpochOrder.bucketed(pool=3 * one)
    batches = BatchSampler([3, 1, 2], limit, order, seed=5 * one, num_replicas=2 * one, rank=one)
    assert json.loads(json.dumps(batches.state_dict())) == batches.state_dict()
    assert list(batches) == list(
        BatchSampler([3, 1, 2], BatchLimit(sequences=2), order, seed=5, num_replicas=2, rank=1)
    )


def test_a_state_of_others_is_refused() -> None:
    lengths = list(range(1, 200))
    for limit in (BatchLimit(sequences=2), BatchLimit(elements=300)):
        batches = BatchSampler(lengths, limit)
        state = batches.state_dict(3)
        for other, words in (
            (BatchSampler([*lengths[:-1], 200], limit), "elements = 19901, got elements = 19900"),
            (BatchSampler(lengths, BatchLimit(sequences=1)), "batch_"),
            (BatchSampler(lengths, limit, EpochOrder.bucketed()), "order"),
            (BatchSampler(lengths, limit, seed=1), "seed"),
        ):
            with pytest.raises(ArgumentError, match=words):
                other.load_state_dict(state)
        for wrong, words in (
            ({}, "epoch"),
            (state | {"pool": 99}, "pool = 99"),
            (state | {"before": 4}, "before = 4"),
            (state | {"done": -1}, "done"),
            (state | {"done": 0, "pool": 1, "before": len(batches)}, "done = 0"),
        ):
            with pytest.raises(ArgumentError, match=words):
                batches.load_state_dict(wrong)
        assert batches.state_dict(3) == state
        refused(["done"], batches.state_dict, len(batches) + 1, error=ArgumentError)
        refused(["epoch"], batches.set_epoch, -1, error=ArgumentError)
    batches = BatchSampler(lengths, BatchLimit(sequences=1))
    refused(
        ["done = 200"],
        batches.load_state_dict,
        batches.state_dict() | {"done": 200},
        error=ArgumentError,
    )


def test_arguments_in_place_of_a_limit_and_an_order() -> None:
    lengths = torch.randint(1, 40, (300,))
    for arguments, limit, order in (
        ({"batch_size": 9}, BatchLimit(sequences=9), EpochOrder.random()),
        ({"batch_size": 9, "bucket": True}, BatchLimit(sequences=9), EpochOrder.bucketed()),
        ({"max_elements": 90, "order": "bucketed"}, BatchLimit(elements=90), EpochOrder.bucketed()),
        ({"max_padded": 90, "order": "sorted"}, BatchLimit(padded=90), EpochOrder.sorted()),
        (
            {"max_elements": 30, "too_long": "chunk", "order": "random"},
            BatchLimit(elements=30, too_long="chunk"),
            EpochOrder.random(),
        ),
    ):
        found: Any = BatchSampler(lengths, **arguments)
        assert list(found) == list(BatchSampler(lengths, limit, order))
    assert repr(BatchSampler([3] * 1200, 9, num_replicas=2, rank=1)) == (
        "BatchSampler(1,200 sequences; batches of 9 sequences; random, rank 1 of 2)"
    )


def test_the_process_group_is_read_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = BatchSampler([3, 1, 2], 2, num_replicas="auto")
    assert (alone.num_replicas, alone.rank) == (1, 0)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 2)
    assert BatchSampler([3, 1, 2], 2).num_replicas == 1
    grouped = BatchSampler([3, 1, 2], 2, num_replicas="auto")
    assert (grouped.num_replicas, grouped.rank) == (3, 2)
    with pytest.raises(ArgumentError, match=r"rank must be .*Leave rank out"):
        BatchSampler([3, 1, 2], 2, num_replicas="auto", rank=1)
