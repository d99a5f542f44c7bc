"""Samplers: which sequences come together, and in which order."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import raglane as rl
from raglane.data import BucketBatchSampler, SequenceDataset
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError

lengths_of_any_kind = st.lists(st.integers(0, 50), max_size=60)


@given(lengths_of_any_kind, st.integers(1, 9), st.booleans(), st.booleans(), st.integers(0, 3), st.integers(1, 4))
def test_every_sequence_comes_once_an_epoch(
    lengths: list[int], batch_size: int, shuffle: bool, drop_last: bool, seed: int, bucket_batches: int
) -> None:
    sampler = BucketBatchSampler(
        lengths, batch_size, shuffle=shuffle, drop_last=drop_last, seed=seed, bucket_batches=bucket_batches
    )
    for epoch in (0, 1, 7):
        sampler.set_epoch(epoch)
        batches = list(sampler)
        assert len(batches) == len(sampler)
        flat = [index for batch in batches for index in batch]
        assert all(type(index) is int for index in flat)
        assert len(flat) == len(set(flat))
        left_out = set(range(len(lengths))) - set(flat)
        assert len(left_out) == (len(lengths) % batch_size if drop_last else 0)
        short = [batch for batch in batches if len(batch) != batch_size]
        assert len(short) == (0 if drop_last else int(len(lengths) % batch_size > 0))
        sampler.set_epoch(epoch)
        assert list(sampler) == batches


@given(lengths_of_any_kind, st.integers(1, 9), st.booleans(), st.booleans(), st.data())
def test_resuming_gives_exactly_the_batches_that_remain(
    lengths: list[int], batch_size: int, shuffle: bool, drop_last: bool, data: st.DataObject
) -> None:
    def make() -> BucketBatchSampler:
        return BucketBatchSampler(lengths, batch_size, shuffle=shuffle, drop_last=drop_last, bucket_batches=2)

    whole = make()
    whole.set_epoch(3)
    batches = list(whole)
    done = data.draw(st.integers(0, len(batches)))
    stopped = make()
    stopped.set_epoch(3)
    iterator = iter(stopped)
    assert [next(iterator) for _ in range(done)] == batches[:done]
    state = json.loads(json.dumps(stopped.state_dict()))
    assert whole.state_dict(done) == state
    resumed = make()
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    # A trainer says again which epoch it is in.
    resumed.set_epoch(3)
    assert list(resumed) == batches[done:]
    assert list(resumed) == list(whole)  # the next epoch, of its own accord
    resumed.set_epoch(3)
    assert list(resumed) == batches


def waste(lengths: Any, batches: list[list[int]]) -> float:
    """The share of padded batches that is padding."""
    padded = sum(len(batch) * int(lengths[batch].max()) for batch in batches)
    return 1 - float(lengths.sum()) / padded


def test_batches_waste_less_than_random_ones() -> None:
    random = np.random.default_rng(5)
    lengths = random.lognormal(4, 0.7, 3000).astype(np.int64) + 1
    shuffled = random.permutation(3000)
    at_random = waste(lengths, [shuffled[start : start + 32].tolist() for start in range(0, 3000, 32)])
    by_pool = {size: waste(lengths, list(BucketBatchSampler(lengths, 32, bucket_batches=size))) for size in (1, 8, 50)}
    sorted_all = waste(lengths, list(BucketBatchSampler(lengths, 32, shuffle=False)))
    assert at_random > 0.6
    assert by_pool[1] > 0.6
    assert by_pool[8] < 0.4
    assert by_pool[50] < 0.2
    assert sorted_all < 0.05
    assert sorted_all < by_pool[50] < by_pool[8] < by_pool[1]


def test_epochs_and_seeds_differ_in_company_and_order() -> None:
    lengths = np.random.default_rng(1).integers(1, 100, 640)
    seen = set()
    for seed in (0, 1):
        sampler = BucketBatchSampler(torch.from_numpy(lengths), 8, seed=seed, bucket_batches=10)
        for epoch in (0, 1):
            sampler.set_epoch(epoch)
            batches = list(sampler)
            seen.add(tuple(map(tuple, batches)))
            means = np.array([lengths[batch].mean() for batch in batches])
            # Neither growing nor falling from batch to batch.
            assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.5
    assert len(seen) == 4
    companies = {frozenset(map(frozenset, order)) for order in seen}
    assert len(companies) == 4


def test_without_shuffle_the_longest_come_first() -> None:
    lengths = torch.tensor([5, 1, 9, 2, 8, 1, 9])
    assert list(BucketBatchSampler(lengths, 2, shuffle=False)) == [[2, 6], [4, 0], [3, 1], [5]]
    assert list(BucketBatchSampler(lengths, 2, shuffle=False, drop_last=True)) == [[2, 6], [4, 0], [3, 1]]


def test_drop_last_does_not_favour_a_length() -> None:
    lengths = list(range(1, 12))
    dropped = set()
    for seed in range(60):
        batches = list(BucketBatchSampler(lengths, 4, drop_last=True, seed=seed))
        dropped |= set(range(11)) - {index for batch in batches for index in batch}
    assert dropped == set(range(11))


def test_a_plain_loop_gets_other_batches_in_every_epoch() -> None:
    plain, told = (BucketBatchSampler(list(range(30)), 4, seed=2) for _ in range(2))
    epochs = [list(plain) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    for epoch, batches in enumerate(epochs):
        told.set_epoch(epoch)
        assert list(told) == batches
    for count, _ in enumerate(plain):  # left in the middle: the same epoch begins anew
        if count == 2:
            break
    begun = list(plain)
    told.set_epoch(3)
    assert begun == list(told)


@pytest.mark.parametrize("workers", [0, 2])
def test_in_a_loader(workers: int) -> None:
    lengths = torch.tensor([3, 0, 1, 4, 2])
    data = SequenceDataset(torch.arange(10), torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]))
    sampler = BucketBatchSampler(data.lengths, 2)
    loader = torch.utils.data.DataLoader(
        data, batch_sampler=sampler, collate_fn=rl.collate, num_workers=workers, multiprocessing_context=None
    )
    assert len(loader) == 3
    batches = list(loader)
    assert [batch["index"].tolist() for batch in batches] == list(BucketBatchSampler(data.lengths, 2))
    assert all(torch.equal(batch["inputs"].lengths, lengths[batch["index"]]) for batch in batches)


@pytest.mark.parametrize(
    ("lengths", "arguments", "error", "words"),
    [
        ([1, -2], {}, ArgumentError, "lengths: got -2 at index 1"),
        ([1.5], {}, ArgumentTypeError, "lengths: got torch.float"),
        ([[1, 2]], {}, ShapeError, r"lengths: got shape \(1, 2\)"),
        ([1], {"batch_size": 0}, ArgumentError, "batch_size: got 0"),
        ([1], {"batch_size": 2.0}, ArgumentTypeError, "batch_size: got 2.0"),
        ([1], {"seed": -1}, ArgumentError, "seed: got -1"),
        ([1], {"bucket_batches": 0}, ArgumentError, "bucket_batches: got 0"),
    ],
)
def test_bad_arguments(lengths: Any, arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        BucketBatchSampler(lengths, **({"batch_size": 2} | arguments))


def test_a_state_of_another_sampler() -> None:
    sampler = BucketBatchSampler([1, 2, 3], 2)
    state = sampler.state_dict()
    for other, words in (
        (BucketBatchSampler([1, 2, 4], 2), "elements = 6; .*elements = 7"),
        (BucketBatchSampler([1, 2, 3], 1), "batch_size"),
        (BucketBatchSampler([1, 2, 3], 2, seed=1), "seed"),
    ):
        with pytest.raises(ArgumentError, match=words):
            other.load_state_dict(state)
    with pytest.raises(ArgumentError, match="epoch"):
        sampler.load_state_dict({})
    with pytest.raises(ArgumentError, match="done"):
        sampler.state_dict(3)
    with pytest.raises(ArgumentError, match="epoch"):
        sampler.set_epoch(-1)
