"""Batches, compared with batches made sequence by sequence, and their order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from made_datasets import of_tensors
from raglane.data import Dataset
from raglane.data.order import BatchLimit, BatchSampler, EpochOrder
from raglane.ragged import Ragged
from raglane.segments import offsets_from_lengths
from raglane.training.batches import in_order, loader, make_batch, targets_of, training_order
from raglane.training.settings import Settings

_LENGTHS = st.lists(st.integers(0, 6), min_size=1, max_size=12)


def _dataset(lengths: list[int], task: str) -> Dataset:
    offsets = offsets_from_lengths(torch.tensor(lengths, dtype=torch.int64))
    total = sum(lengths)
    targets = {
        "classify": torch.randint(5, (len(lengths),)),
        "tag": torch.randint(5, (total,)),
        "forecast": None,
    }[task]
    return of_tensors(
        torch.randn(total, 2),
        offsets,
        targets,
        per_element=task == "tag",
        forecast=task == "forecast",
    )


@pytest.mark.parametrize("task", ["classify", "tag", "forecast"])
@given(_LENGTHS, st.data())
def test_batch_against_slices(task: str, lengths: list[int], data: st.DataObject) -> None:
    dataset = _dataset(lengths, task)
    rows = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=8))
    batch = make_batch(dataset.__getitems__(rows))
    bounds = dataset.tensors().offsets.tolist()
    sequences = [dataset.tensors().values[bounds[row] : bounds[row + 1]] for row in rows]
    assert batch.index.tolist() == rows
    if task == "forecast":
        expected = [sequence[:-1] for sequence in sequences]
        assert torch.equal(targets_of(batch), torch.cat([sequence[1:] for sequence in sequences]))
    else:
        expected = sequences
        parts = [dataset[row]["target"] for row in rows]
        assert torch.equal(
            targets_of(batch), torch.stack(parts) if task == "classify" else torch.cat(parts)
        )
    reference = Ragged(expected)
    assert torch.equal(batch.inputs.values, reference.values)
    assert torch.equal(batch.inputs.lengths, reference.lengths)


@pytest.mark.parametrize("largest_first", [False, True])
@pytest.mark.parametrize(
    ("settings", "limit", "order"),
    [
        (Settings(batch_size=8, seed=3), BatchLimit(sequences=8), EpochOrder.random()),
        (
            Settings(batch_size=8, seed=3, bucket=True),
            BatchLimit(sequences=8),
            EpochOrder.bucketed(),
        ),
        (Settings(batch_elements=90, seed=3), BatchLimit(elements=90), EpochOrder.random()),
        (
            Settings(batch_elements=40, seed=3, too_long="drop"),
            BatchLimit(elements=40, too_long="drop"),
            EpochOrder.random(),
        ),
    ],
)
def test_the_order_is_that_of_the_settings(
    settings: Settings, limit: BatchLimit, order: EpochOrder, largest_first: bool
) -> None:
    lengths = torch.randint(1, 50, (200,))
    chosen = training_order(lengths, replace(settings, largest_first=largest_first))
    expected = BatchSampler(lengths, limit, order, seed=3, largest_first=largest_first)
    assert list(chosen) == list(expected)
    assert chosen.state_dict() == expected.state_dict()


@pytest.mark.parametrize("workers", [0, 1])
def test_loader_gives_the_batches_of_the_order(workers: int) -> None:
    dataset = _dataset([3, 0, 2, 5, 1], "classify")
    order = [[4, 0], [1, 3], [2]]
    before = torch.get_rng_state()
    batches = list(loader(dataset, order, workers))
    assert [batch.index.tolist() for batch in batches] == order
    assert torch.equal(torch.get_rng_state(), before), (
        "the loader drew from the generator that dropout uses"
    )
    assert torch.equal(
        batches[1].inputs.values, make_batch(dataset.__getitems__([1, 3])).inputs.values
    )


@given(_LENGTHS, st.integers(1, 5))
def test_in_order_is_the_order_of_the_data(lengths: list[int], size: int) -> None:
    dataset = _dataset(lengths, "tag")
    for limit in (BatchLimit(sequences=size), BatchLimit(elements=size)):
        batches = [batch.index.tolist() for batch in in_order(dataset, limit)]
        assert [row for batch in batches for row in batch] == list(range(len(lengths)))
        for batch in batches:
            elements = sum(lengths[row] for row in batch)
            assert (len(batch) if limit.elements is None else elements) <= size or len(batch) == 1
