"""Records, datasets and the split into two parts."""

from __future__ import annotations

import pickle
from collections import Counter
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import raglane as rl
from made_datasets import dataset, of_tensors
from raglane.data import BatchLimit, BatchSampler, Dataset, Preprocessor, read, split
from raglane.data.records import offsets_of
from raglane.errors import ArgumentError, ShapeError
from small_files import refused, same_batch

LENGTHS = [3, 0, 1, 4]


def records_of(lengths: list[int], **others: Any) -> Dataset:
    values = np.arange(2 * sum(lengths), dtype=np.float32).reshape(-1, 2)
    return dataset(values, offsets_of(lengths), channels=("a", "b"), **others)


def dataset_of(per_element: bool = False, targets: bool = True) -> Dataset:
    wanted = torch.arange(8 if per_element else 4) * 10 if targets else None
    offsets = torch.from_numpy(offsets_of(LENGTHS))
    return of_tensors(
        torch.randn(8, 2), offsets, wanted, per_element=per_element, ids=("p", "q", "r", "s")
    )


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.data())
def test_select_against_a_loop(lengths: list[int], data: st.DataObject) -> None:
    index = data.draw(st.lists(st.integers(-len(lengths), len(lengths) - 1), max_size=15))
    tags = np.array([f"t{i}" for i in range(sum(lengths))], dtype=object)
    labels = tuple(f"l{i}" for i in range(len(lengths)))
    records = records_of(
        lengths, labels=labels, ids=tuple(range(100, 100 + len(lengths))), tags=tags
    )
    chosen: Any = records.subset(torch.tensor(index, dtype=torch.int64))
    slices = [
        slice(records.offsets[i % len(lengths)], records.offsets[i % len(lengths) + 1])
        for i in index
    ]
    empty = np.empty((0, 2), np.float32)
    np.testing.assert_array_equal(
        chosen.values, np.concatenate([empty, *(records.values[s] for s in slices)])
    )
    assert chosen.tags.tolist() == [tag for s in slices for tag in tags[s]]
    assert chosen.lengths.tolist() == [lengths[i] for i in index]
    assert chosen.labels == tuple(labels[i] for i in index)
    assert chosen.ids == tuple(100 + i % len(lengths) for i in index)


@pytest.mark.parametrize("per_element", [False, True])
def test_items_are_views(per_element: bool) -> None:
    data = dataset_of(per_element)
    assert data.lengths.tolist() == LENGTHS
    for row, (start, end) in enumerate([(0, 3), (3, 3), (3, 4), (4, 8)]):
        item = data[row]
        assert list(item) == ["inputs", "target", "index"]
        assert torch.equal(item["inputs"], data.tensors().values[start:end])
        assert (
            item["inputs"].untyped_storage().data_ptr()
            == data.tensors().values.untyped_storage().data_ptr()
        )
        assert item["index"].item() == row
        assert item["target"].tolist() == (
            [10 * i for i in range(start, end)] if per_element else 10 * row
        )
    assert torch.equal(data[-1]["inputs"], data[3]["inputs"])
    assert data[-1]["index"].item() == 3
    for row in (4, -5):
        with pytest.raises(IndexError):
            data[row]


@pytest.mark.parametrize("per_element", [False, True])
def test_subset(per_element: bool) -> None:
    data = dataset_of(per_element)
    part = data.subset([3, 1, -4])
    assert part.ids == ("s", "q", "p")
    assert part.lengths.tolist() == [4, 0, 3]
    for row, source in enumerate((3, 1, 0)):
        assert torch.equal(part[row]["inputs"], data[source]["inputs"])
        assert torch.equal(part[row]["target"], data[source]["target"])
    assert dataset_of().subset(np.array([False, True, True, False])).ids == ("q", "r")
    assert len(data.subset([])) == 0
    assert "target" not in dataset_of(targets=False).subset([0])[0]


def test_a_dataset_goes_through_a_loader_and_pickle() -> None:
    data = pickle.loads(pickle.dumps(dataset_of()))
    (batch,) = torch.utils.data.DataLoader(data, batch_size=4, collate_fn=rl.collate)
    assert batch["inputs"].lengths.tolist() == LENGTHS
    assert torch.equal(batch["inputs"].values, data.tensors().values)
    assert batch["target"].tolist() == [0, 10, 20, 30]


@given(
    st.lists(st.sampled_from("abcd"), min_size=2, max_size=60),
    st.floats(0.01, 0.99),
    st.integers(0, 5),
    st.booleans(),
)
def test_split_rules(labels: list[str], fraction: float, seed: int, stratify: bool) -> None:
    records = records_of([1] * len(labels), labels=tuple(labels), ids=tuple(range(len(labels))))
    kept, held_out = split(records, fraction, seed, stratify)
    assert sorted(kept.ids + held_out.ids) == list(range(len(labels)))
    assert list(kept.ids) == sorted(kept.ids)
    assert list(held_out.ids) == sorted(held_out.ids)
    again = split(records, fraction, seed, stratify)
    assert (again[0].ids, again[1].ids) == (kept.ids, held_out.ids)
    size = min(max(round(fraction * len(labels)), 1), len(labels) - 1)
    counts, parts = Counter(labels), Counter(held_out.labels)
    if not stratify or max(counts.values()) == 1:
        assert len(held_out) == size
        return
    room = sum(count - 1 for count in counts.values())
    assert len(held_out) == min(size, room)
    assert set(kept.labels or ()) == set(labels)
    if size <= room and all(count * fraction <= count - 1 for count in counts.values()):
        for label, count in counts.items():
            assert abs(parts[label] - count * fraction) < 1.5


def test_splits_of_other_seeds_differ() -> None:
    records = records_of([1] * 100)
    parts = {split(records, 0.2, seed)[1].values.tobytes() for seed in range(5)}
    assert len(parts) == 5
    assert all(len(part) == 20 * 8 for part in parts)


@pytest.mark.parametrize(
    ("count", "fraction", "words"),
    [(2, 0.0, "fraction"), (2, 1.0, "fraction"), (2, np.nan, "fraction"), (1, 0.5, "at least 2")],
)
def test_splits_that_are_refused(count: int, fraction: float, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        split(records_of([1] * count), fraction)


@pytest.mark.parametrize("kind", ["classify", "tag", "forecast", "nothing"])
@given(rows=st.lists(st.integers(-4, 3), min_size=1, max_size=9))
def test_a_batch_in_one_go_is_that_of_its_items(kind: str, rows: list[int]) -> None:
    if kind == "forecast":
        data = of_tensors(torch.randn(8, 2), torch.from_numpy(offsets_of(LENGTHS)), forecast=True)
    else:
        data = dataset_of(per_element=kind == "tag", targets=kind != "nothing")
    items = data.__getitems__(rows)
    assert [item["index"] for item in items] == [row % 4 for row in rows]
    same_batch(rl.collate(items), rl.collate(list(items)))


def pairs_of(data: Dataset) -> list[tuple[list[int], list[int]]]:
    """Inputs and targets of four items."""
    return [(data[row]["inputs"].tolist(), data[row]["target"].tolist()) for row in range(4)]


def test_the_target_of_a_forecast_is_the_next_element() -> None:
    data = of_tensors(torch.arange(8), torch.from_numpy(offsets_of(LENGTHS)), forecast=True)
    assert data.lengths.tolist() == [2, 0, 0, 3]
    assert pairs_of(data) == [([0, 1], [1, 2]), ([], []), ([], []), ([4, 5, 6], [5, 6, 7])]
    assert data.subset([3])[0]["target"].tolist() == [5, 6, 7]


@pytest.mark.parametrize("kind", ["classify", "tag", "nothing"])
@given(longest=st.integers(1, 7))
def test_pieces_are_those_of_a_limit_that_splits(kind: str, longest: int) -> None:
    data = dataset_of(per_element=kind == "tag", targets=kind != "nothing")
    pieces = data.chunk(longest)
    batches = BatchSampler(data.lengths, BatchLimit(elements=longest, too_long="chunk"))
    assert sorted(row for batch in batches for row in batch) == list(range(len(pieces)))
    place = 0
    for row in range(len(data)):
        whole = data[row]["inputs"]
        for start in range(0, max(len(whole), 1), longest):
            item = pieces[place]
            assert torch.equal(item["inputs"], whole[start : start + longest])
            assert pieces.ids[place] == data.ids[row]
            if kind == "tag":
                assert torch.equal(item["target"], data[row]["target"][start : start + longest])
            if kind == "classify":
                assert torch.equal(item["target"], data[row]["target"])
            place += 1
    assert place == len(pieces)


def test_a_preprocessor_is_fitted_and_applied_before_sequences_are_cut() -> None:
    data = read([[1.0, 5.0], [2.0]], labels=["a", "b"])
    fitted = Preprocessor.fit(data, task="classify")
    for use in (fitted.apply, partial(Preprocessor.fit, task="classify"), attrgetter("offsets")):
        words = ["data must be whole sequences", "then cut; rl.fit cuts with too_long='chunk'"]
        refused(words, use, data.chunk(1).subset([2, 0]), error=ArgumentError)


def test_pieces_of_a_forecast_predict_within_themselves() -> None:
    pieces = of_tensors(
        torch.arange(8), torch.from_numpy(offsets_of([3, 1, 4])), forecast=True
    ).chunk(2)
    assert pairs_of(pieces) == [([0, 1], [1, 2]), ([], []), ([4, 5], [5, 6]), ([], [])]
    assert max(pieces.lengths) == 2


@pytest.mark.parametrize("rows", [[4], [0, -5], [0.5], ["a"], [[0]]])
def test_rows_that_are_not_there(rows: list[Any]) -> None:
    with pytest.raises((IndexError, TypeError, ShapeError), match="index must be "):
        dataset_of().__getitems__(rows)


def test_items_taken_out_of_a_batch_are_those_of_the_dataset() -> None:
    data = dataset_of()
    items = data.__getitems__([2, 0, 3])
    assert len(items) == 3
    assert torch.equal(items[-1]["inputs"], data[3]["inputs"])
    assert [int(item["index"]) for item in items[1:]] == [0, 3]
    with pytest.raises(IndexError):
        items[3]
    nothing, some = rl.collate(data.__getitems__([])), rl.collate(data.__getitems__([2]))
    assert len(nothing["inputs"]) == len(nothing["index"]) == 0
    assert nothing["inputs"].values.shape[1:] == some["inputs"].values.shape[1:]
    assert {name: part.dtype for name, part in nothing.items()} == {
        name: part.dtype for name, part in some.items()
    }
