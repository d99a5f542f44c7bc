"""Batches cut from the flat store, against batches made sequence by sequence."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raglane.data.dataset import SequenceDataset
from raglane.ragged import Ragged
from raglane.segments import offsets_from_lengths
from raglane.training.batches import in_order, loader, make_batch, training_order

_LENGTHS = st.lists(st.integers(0, 6), min_size=1, max_size=12)


def _dataset(lengths: list[int], task: str) -> SequenceDataset:
    offsets = offsets_from_lengths(torch.tensor(lengths, dtype=torch.int64))
    total = sum(lengths)
    targets = {
        "classify": torch.randint(5, (len(lengths),)),
        "tag": torch.randint(5, (total,)),
        "forecast": None,
    }[task]
    return SequenceDataset(
        torch.randn(total, 2), offsets, targets, per_element=task == "tag", forecast=task == "forecast"
    )


@pytest.mark.parametrize("task", ["classify", "tag", "forecast"])
@given(_LENGTHS, st.data())
def test_batch_against_slices(task: str, lengths: list[int], data: st.DataObject) -> None:
    dataset = _dataset(lengths, task)
    rows = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=8))
    batch = make_batch(dataset.__getitems__(rows))
    bounds = dataset.offsets.tolist()
    sequences = [dataset.values[bounds[row] : bounds[row + 1]] for row in rows]
    assert batch.index.tolist() == rows
    assert batch.targets is not None
    if task == "forecast":
        expected = [sequence[:-1] for sequence in sequences]
        assert torch.equal(batch.targets, torch.cat([sequence[1:] for sequence in sequences]))
    else:
        expected = sequences
        parts = [dataset[row]["target"] for row in rows]
        assert torch.equal(batch.targets, torch.stack(parts) if task == "classify" else torch.cat(parts))
    reference = Ragged(expected)
    assert torch.equal(batch.inputs.values, reference.values)
    assert torch.equal(batch.inputs.lengths, reference.lengths)


@pytest.mark.parametrize("bucket", [False, True])
@given(_LENGTHS, st.integers(1, 5), st.integers(0, 3), st.integers(0, 3))
def test_order_is_a_permutation_by_seed_and_epoch(
    bucket: bool, lengths: list[int], size: int, seed: int, epoch: int
) -> None:
    def order(seed: int, epoch: int) -> list[list[int]]:
        return training_order(torch.tensor(lengths), size, bucket=bucket, seed=seed, epoch=epoch)

    batches = order(seed, epoch)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    assert len(batches) == -(-len(lengths) // size)
    assert batches == order(seed, epoch)


@pytest.mark.parametrize("bucket", [False, True])
def test_order_changes_with_the_epoch_and_the_seed(bucket: bool) -> None:
    lengths = torch.randint(1, 50, (200,))
    orders = [training_order(lengths, 8, bucket=bucket, seed=seed, epoch=epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert len({str(order) for order in orders}) == 4


def test_buckets_hold_similar_lengths() -> None:
    lengths = torch.randint(1, 100, (1000,))

    def spread(bucket: bool) -> float:
        batches = training_order(lengths, 10, bucket=bucket, seed=0, epoch=0)
        return sum(int(lengths[batch].max() - lengths[batch].min()) for batch in batches) / len(batches)

    assert spread(True) < spread(False) / 3


@pytest.mark.parametrize("workers", [0, 1])
def test_loader_gives_the_batches_of_the_order(workers: int) -> None:
    dataset = _dataset([3, 0, 2, 5, 1], "classify")
    order = [[4, 0], [1, 3], [2]]
    before = torch.get_rng_state()
    batches = list(loader(dataset, order, workers))
    assert [batch.index.tolist() for batch in batches] == order
    assert torch.equal(torch.get_rng_state(), before), "the loader drew from the generator that dropout uses"
    assert torch.equal(batches[1].inputs.values, make_batch(dataset.__getitems__([1, 3])).inputs.values)


@given(_LENGTHS, st.integers(1, 5))
def test_in_order_is_the_order_of_the_data(lengths: list[int], size: int) -> None:
    dataset = _dataset(lengths, "tag")
    assert [row for batch in in_order(dataset, size) for row in batch.index.tolist()] == list(range(len(lengths)))
