"""The ends of epochs: a finished epoch is saved, and loaded, as the start of the next."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import raglane as rl
from batches import numbered
from raglane.data import BatchLimit, BatchSampler, EpochOrder, TBPTTSampler
from raglane.data.order.epochs import Epochs
from raglane.errors import ArgumentError

_LENGTHS = np.random.default_rng(0).integers(0, 30, 60).tolist()


def _batches(limit: BatchLimit, order: EpochOrder, **others: Any) -> Callable[[], BatchSampler]:
    return lambda: BatchSampler(_LENGTHS, limit, order, **others)


def _chunks(**others: Any) -> Callable[[], TBPTTSampler]:
    return lambda: TBPTTSampler(numbered(_LENGTHS), 5, 20, **others)


_SAMPLERS: dict[str, Callable[[], Epochs[Any]]] = {
    "random": _batches(BatchLimit(sequences=9), EpochOrder.random()),
    "bucketed": _batches(BatchLimit(elements=120), EpochOrder.bucketed(pool=2)),
    "padded": _batches(BatchLimit(padded=150), EpochOrder.bucketed(pool=2, noise=0.3)),
    "sorted": _batches(BatchLimit(elements=120), EpochOrder.sorted()),
    "windows": _batches(BatchLimit(sequences=7), EpochOrder.windows(20)),
    "dropped": _batches(BatchLimit(elements=25, too_long="drop"), EpochOrder.random()),
    "largest first": _batches(
        BatchLimit(elements=120), EpochOrder.bucketed(pool=2), largest_first=True
    ),
    "one batch": _batches(BatchLimit(sequences=60), EpochOrder.random(), largest_first=True),
    "a rank": _batches(BatchLimit(elements=120), EpochOrder.random(), num_replicas=3, rank=2),
    "chunks": _chunks(),
    "chunks in order": _chunks(shuffle=False),
    "chunks of a rank": _chunks(num_replicas=2, rank=1),
}
_each_sampler = pytest.mark.parametrize("name", _SAMPLERS)


def _plain(item: Any) -> Any:
    if isinstance(item, list):
        return item
    return [piece.tolist() for piece in item.inputs], item.begins.tolist(), item.sequences.tolist()


def _epochs(sampler: Epochs[Any], count: int) -> list[list[Any]]:
    return [list(map(_plain, sampler)) for _ in range(count)]


def _stored(state: dict[str, int]) -> dict[str, int]:
    content: dict[str, int] = json.loads(json.dumps(state))
    return content


@_each_sampler
def test_a_finished_epoch_is_the_start_of_the_next(name: str) -> None:
    make = _SAMPLERS[name]
    expected = _epochs(make(), 4)
    first = make()
    assert _epochs(first, 2) == expected[:2]
    state = _stored(first.state_dict())
    assert (state["epoch"], state["done"]) == (2, 0)
    fresh = make()
    fresh.set_epoch(2)
    assert state == fresh.state_dict()
    # In this process, in another one, and with the number of used batches.
    resumed = make()
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert _epochs(resumed, 2) == expected[2:]
    assert first.state_dict(len(expected[1])) == state
    assert _epochs(first, 2) == expected[2:]


@_each_sampler
@pytest.mark.parametrize("steps", [1, 2, 3, 7])
def test_an_iteration_that_is_saved_and_resumed_every_few_batches(name: str, steps: int) -> None:
    make = _SAMPLERS[name]
    expected = list(chain.from_iterable(_epochs(make(), 3)))
    sampler, seen = make(), []
    for _ in expected:
        # Ends before the sampler reports the end of its epoch.
        seen += list(map(_plain, islice(sampler, steps)))
        state = _stored(sampler.state_dict())
        sampler = make()
        sampler.load_state_dict(state)
    assert seen[: len(expected)] == expected


@_each_sampler
def test_all_batches_are_a_finished_epoch_without_another_call(name: str) -> None:
    """An iteration by number never gets the end of the iterator."""
    make = _SAMPLERS[name]
    expected = _epochs(make(), 3)
    sampler = make()
    seen = [list(map(_plain, islice(sampler, len(epoch)))) for epoch in expected]
    assert seen == expected


@_each_sampler
def test_a_selected_epoch_begins_at_its_first_batch(name: str) -> None:
    make = _SAMPLERS[name]
    expected = _epochs(make(), 3)
    sampler = make()
    list(sampler)
    sampler.set_epoch(0)
    state = _stored(sampler.state_dict())
    assert (state["epoch"], state["done"]) == (0, 0)
    assert _epochs(sampler, 1) == expected[:1]
    sampler.set_epoch(1)
    assert _epochs(sampler, 2) == expected[1:]
    # A state at the end, then the epoch that it names.
    resumed = make()
    list(resumed)
    resumed.load_state_dict(_stored(resumed.state_dict()))
    resumed.set_epoch(1)
    assert _epochs(resumed, 2) == expected[1:]
    # A state within an epoch, then that epoch.
    if len(expected[1]) > 1:
        middle = make()
        middle.set_epoch(1)
        state = _stored(middle.state_dict(1))
        resumed.load_state_dict(state)
        resumed.set_epoch(1)
        assert list(map(_plain, resumed)) == expected[1][1:]


@_each_sampler
def test_a_state_of_an_earlier_version_at_the_end_of_an_epoch(name: str) -> None:
    make = _SAMPLERS[name]
    expected = _epochs(make(), 2)
    sampler = make()
    count = len(expected[0])
    state = sampler.state_dict() | {"done": count}
    if isinstance(sampler, BatchSampler):
        pools = len(sampler._epoch().pools)
        state |= {"pool": pools, "before": count}
    sampler.load_state_dict(_stored(state))
    assert sampler.epoch == 1
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["done"]) == (1, 0)
    assert _epochs(sampler, 1) == expected[1:]
    with pytest.raises(ArgumentError, match="done"):
        make().load_state_dict(state | {"done": count + 1})


def test_a_state_beyond_its_pool_is_refused() -> None:
    """It would continue at another batch, or at none."""
    make = _SAMPLERS["bucketed"]
    whole = make()
    state = whole.state_dict(3)
    assert state["pool"] > 0
    ends = [whole.state_dict(done)["pool"] for done in range(len(whole))]
    last = len(ends) - 1 - ends[::-1].index(state["pool"])
    make().load_state_dict(state | {"done": last})
    for done in (last + 2, 999):
        with pytest.raises(ArgumentError, match=f"a place in epoch 0, got done = {done}"):
            make().load_state_dict(state | {"done": done})


@pytest.mark.parametrize("workers", [0, 2])
def test_the_end_of_an_epoch_with_the_workers_of_a_loader(workers: int) -> None:
    data = [torch.full((length, 1), float(place)) for place, length in enumerate(_LENGTHS)]
    make = _batches(BatchLimit(sequences=9), EpochOrder.bucketed(pool=2))
    expected = [[sorted(batch) for batch in epoch] for epoch in _epochs(make(), 3)]

    def loaded(sampler: BatchSampler) -> Iterator[list[int]]:
        pairs: Any = list(enumerate(data))
        for batch in DataLoader(
            pairs, batch_sampler=sampler, collate_fn=lambda items: items, num_workers=workers
        ):
            yield sorted(place for place, _ in batch)

    sampler, seen = make(), list[list[int]]()
    # Saved after 3 batches and after all 7.
    for _ in range(3):
        done = 0
        for steps in (3, 4):
            seen += islice(loaded(sampler), steps)
            done += steps
            state = _stored(sampler.state_dict(done))
            sampler = make()
            sampler.load_state_dict(state)
        assert (state["epoch"], state["done"]) == (len(seen) // 7, 0)
    assert seen == list(chain.from_iterable(expected))


def test_ranks_end_their_epochs_together() -> None:
    limit, order = BatchLimit(elements=200), EpochOrder.bucketed(pool=2)
    first = [BatchSampler(_LENGTHS, limit, order, num_replicas=2, rank=rank) for rank in (0, 1)]
    states = []
    for sampler in first:
        list(sampler)
        states.append(_stored(sampler.state_dict()))
    assert states[0] == states[1]
    rows: list[int] = []
    for rank in range(3):
        sampler = BatchSampler(_LENGTHS, limit, order, num_replicas=3, rank=rank)
        sampler.load_state_dict(states[0])
        rows += chain.from_iterable(sampler)
    assert sorted(rows) == list(range(len(_LENGTHS)))


def test_an_epoch_without_batches() -> None:
    for sampler in (
        BatchSampler([], BatchLimit(sequences=2)),
        BatchSampler([9], BatchLimit(elements=2, too_long="drop")),
        TBPTTSampler(rl.Ragged.from_flat(torch.zeros(0), lengths=[]), 2, 3),
    ):
        assert sampler.state_dict()["epoch"] == 0
        assert list(sampler) == []
        state = sampler.state_dict()
        assert (state["epoch"], state["done"]) == (1, 0)
        sampler.load_state_dict(state)
        assert list(sampler) == []
        assert sampler.state_dict()["epoch"] == 2
