"""From samples to batches."""

from __future__ import annotations

import warnings
from collections import OrderedDict, UserDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import raglane as rl
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from small_files import refused


class Pair(NamedTuple):
    series: Any
    label: Any


@dataclass(frozen=True, slots=True)
class Event:
    when: Any
    what: Any
    size: Any = field(init=False, default=1)

    def __post_init__(self) -> None:
        if isinstance(self.when, rl.Ragged):
            raise RuntimeError("a check of one sample saw a batch")


@given(st.lists(st.integers(0, 6), min_size=1, max_size=9), st.sampled_from([(), (3,), (2, 2)]))
def test_sequences_become_ragged_in_their_order(
    lengths: list[int], features: tuple[int, ...]
) -> None:
    tensors = [torch.randn(length, *features, dtype=torch.float64) for length in lengths]
    for batch in (rl.collate(tensors), rl.collate(tuple(tensor.numpy() for tensor in tensors))):
        assert isinstance(batch, rl.Ragged)
        torch.testing.assert_close(batch.lengths, torch.tensor(lengths), rtol=0, atol=0)
        torch.testing.assert_close(batch.values, torch.cat(tensors), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([1, 2, 3], torch.tensor([1, 2, 3])),
        ([1.5, 2.0], torch.tensor([1.5, 2.0])),
        ([True, False], torch.tensor([True, False])),
        ([1j, 2 + 1j], torch.tensor([1j, 2 + 1j])),
        ([np.int8(1), np.int8(-1)], torch.tensor([1, -1], dtype=torch.int8)),
        ([np.float64(1.5), np.array(2.5)], torch.tensor([1.5, 2.5], dtype=torch.float64)),
        ([np.bool_(True)], torch.tensor([True])),
        ([torch.tensor(3), torch.tensor(4)], torch.tensor([3, 4])),
    ],
)
def test_numbers_become_one_tensor(samples: list[Any], expected: Tensor) -> None:
    torch.testing.assert_close(rl.collate(samples), expected, rtol=0, atol=0)


def test_strings_and_none() -> None:
    assert rl.collate(["a", "b"]) == ["a", "b"]
    assert rl.collate([np.str_("a"), "b"]) == ["a", "b"]
    assert rl.collate([b"a", b"b"]) == [b"a", b"b"]
    assert rl.collate([None, None]) is None


def nested(length: int, label: int) -> dict[Any, Any]:
    return {
        "pair": Pair(torch.full((length, 2), float(label)), label),
        "event": Event(np.arange(length), (f"n{label}", None)),
        "deep": ({"flag": label > 1, "weight": 0.5 * label},),
        3: (),
    }


def test_structures_are_kept() -> None:
    batch = rl.collate([nested(2, 1), nested(0, 2), nested(4, 3)])
    assert list(batch) == ["pair", "event", "deep", 3]
    assert type(batch["pair"]) is Pair
    assert batch["pair"].series.lengths.tolist() == [2, 0, 4]
    assert batch["pair"].series.values[:, 0].tolist() == [1, 1, 3, 3, 3, 3]
    assert batch["pair"].label.tolist() == [1, 2, 3]
    assert type(batch["event"]) is Event
    assert batch["event"].when.values.tolist() == [0, 1, 0, 1, 2, 3]
    assert batch["event"].what == (["n1", "n2", "n3"], None)
    assert batch["event"].size.tolist() == [1, 1, 1]
    assert batch["deep"][0]["flag"].tolist() == [False, True, True]
    assert batch["deep"][0]["weight"].tolist() == [0.5, 1.0, 1.5]
    assert batch[3] == ()


def test_the_kind_does_not_depend_on_the_batch() -> None:
    for lengths in ([3], [3, 3], [0], [0, 0], [1]):
        batch = rl.collate([(torch.ones(length), 1) for length in lengths])
        assert isinstance(batch[0], rl.Ragged)
        assert isinstance(batch[1], Tensor)
    assert rl.collate([{"a": 1}, OrderedDict(a=2)])["a"].tolist() == [1, 2]


def test_lists_of_numbers_are_sequences() -> None:
    for samples, dtype in (
        ([[5, 17, 3], [], [9]], torch.int64),
        ([[5, 17, 3], [0.5]], torch.float32),
        ([[True], [False, True]], torch.bool),
        ([[], []], torch.int64),
    ):
        batch = rl.collate(samples)
        assert isinstance(batch, rl.Ragged)
        assert batch.dtype == dtype
        assert [sequence.tolist() for sequence in batch] == samples
    batch = rl.collate([[[1.0, 2], [3, 4]], [], [[5, 6]]])
    assert batch.values.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert batch.lengths.tolist() == [2, 0, 1]


def test_samples_of_tokenizers_and_datasets() -> None:
    ids = [[101, 7, 102], [101, 102]]
    columns: dict[str, Any] = {"input_ids": ids, "text": ["ab", ""], "labels": [1, 0]}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    # A tokenizer gives a UserDict, and a dataset in torch's format tensors.
    as_tensors = columns | {
        "labels": torch.tensor([1, 0]),
        "input_ids": list(map(torch.tensor, ids)),
    }
    for batch in (
        rl.collate(rows),
        rl.collate(columns),
        rl.collate(UserDict(columns)),
        rl.collate(as_tensors),
    ):
        assert list(batch) == list(columns)
        assert [sequence.tolist() for sequence in batch["input_ids"]] == ids
        assert batch["input_ids"].dtype == torch.int64
        assert batch["text"] == ["ab", ""]
        assert batch["labels"].tolist() == [1, 0]
    assert rl.collate({"input_ids": torch.tensor([[1, 2], [3, 4]])})[
        "input_ids"
    ].lengths.tolist() == [2, 2]


def test_gradients_flow_to_the_samples() -> None:
    first, second = torch.randn(3, 2, requires_grad=True), torch.randn(1, 2, requires_grad=True)
    (rl.collate([first, second]).values ** 2).sum().backward()
    assert torch.equal(first.grad, 2 * first)  # type: ignore[arg-type]
    assert torch.equal(second.grad, 2 * second)  # type: ignore[arg-type]


def test_read_only_strided_and_foreign_arrays() -> None:
    array = np.arange(6.0).reshape(2, 3)
    array.flags.writeable = False
    batch = rl.collate([array.T, array.T[::-1]])
    assert batch.values.tolist() == [*array.T.tolist(), *array.T[::-1].tolist()]
    foreign = np.arange(3, dtype=">i4")
    assert rl.collate([foreign, foreign]).values.tolist() == [0, 1, 2, 0, 1, 2]
    assert rl.collate([foreign]).dtype == torch.int32
    # The batch has its own memory.
    own = np.zeros(2)
    batch = rl.collate([own])
    own[0] = 1
    assert batch.values.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("samples", "error", "words"),
    [
        ([], ArgumentError, ["samples must be", "got an empty list"]),
        (torch.ones(3), ArgumentTypeError, ["got Tensor", "a list"]),
        (
            [torch.ones(2, 3), torch.ones(2, 4)],
            ShapeError,
            ["samples[1]", "features (4,)", "features (3,)"],
        ),
        ([torch.ones(2), torch.tensor(2.0)], ShapeError, ["samples[1]", "dimensions: 0"]),
        (
            [torch.ones(2), torch.ones(2).double()],
            ShapeError,
            ["samples[1]", "torch.float64", "torch.float32"],
        ),
        ([torch.ones(2), torch.ones(2, device="meta")], ShapeError, ["samples[1]", "device meta"]),
        ([np.ones(2), np.ones(2, np.float32)], ShapeError, ["samples[1]", "dtype float32"]),
        ([np.array(["a"]), np.array(["bc"])], ArgumentTypeError, ["samples[0]", "dtype <U1"]),
        ([torch.ones(2), np.ones(2)], ArgumentTypeError, ["samples[1]", "a ndarray", "a Tensor"]),
        (
            [np.ones(2), np.ma.masked_equal([1.0, 2.0], 2)],
            ArgumentTypeError,
            ["samples[1]", "masked elements"],
        ),
        ([1, 2.5], ArgumentTypeError, ["samples[1]", "a float", "an int"]),
        (
            [{"x": 1}, {"x": None}],
            ArgumentTypeError,
            ["samples[1]['x']", "None", "samples[0]['x']"],
        ),
        ([{"x": 1}, {"y": 1}], ArgumentError, ["samples[1]", "'x', 'y'", "keys of samples[0]"]),
        ([(1, 2), (1, 2), (1,)], ArgumentError, ["samples[2]", "a tuple of 1", "a tuple of 2"]),
        ([Pair(1, 2), (1, 2)], ArgumentTypeError, ["samples[1]", "a tuple", "a Pair"]),
        (
            [[1], ["a"]],
            ArgumentTypeError,
            ["samples[1][0]", "a str", "a vocabulary or a tokenizer"],
        ),
        (
            [{"x": [[1.5], [1, "a"]]}],
            ShapeError,
            ["samples[0]['x'][1]", "a list of 2", "a list of 1"],
        ),
        ([[True], [2]], ArgumentTypeError, ["samples[1][0]", "an int", "a boolean, or a number"]),
        ([[1], [2**63]], ArgumentError, ["samples[1][0]", "64 bits"]),
        ([{"x": [torch.tensor(2.0)]}], ArgumentTypeError, ["samples[0]['x'][0]", "a Tensor"]),
        ([[1], 2], ArgumentTypeError, ["samples[1]", "an int", "a list"]),
        ({}, ArgumentError, ["samples", "no entries"]),
        (
            {"x": torch.ones(4, 12), "y": 1},
            ArgumentTypeError,
            ["samples['y']", "an int", "one entry per sample"],
        ),
        ({"x": [1, 2], "y": [1]}, ArgumentError, ["samples['y']", "1 entries", "2"]),
        ([{"a": {1}}], ArgumentTypeError, ["samples[0]['a']", "a set"]),
        (
            [
                Pair(torch.ones(1), (0, Event(torch.ones(2), 1))),
                Pair(torch.ones(1), (0, Event(torch.ones(2, 2), 1))),
            ],
            ShapeError,
            ["samples[1].label[1].when", "dimensions: 2"],
        ),
    ],
)
def test_samples_that_do_not_fit(samples: Any, error: type[Exception], words: list[str]) -> None:
    refused(words, rl.collate, samples, error=error)


class Series(Dataset[Any]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "x": torch.full((index, 2), float(index)),
            "pair": Pair(np.arange(index), index),
            "name": f"n{index}",
        }


@pytest.mark.parametrize("workers", [0, 2])
def test_in_a_loader(workers: int) -> None:
    batches = list(DataLoader(Series(), batch_size=4, num_workers=workers, collate_fn=rl.collate))
    assert [batch["x"].lengths.tolist() for batch in batches] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
    ]
    assert [batch["pair"].label.tolist() for batch in batches] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
    ]
    assert batches[2]["name"] == ["n8", "n9"]
    assert torch.equal(batches[1]["x"][2], torch.full((6, 2), 6.0))
    assert torch.equal(batches[1]["pair"].series[3], torch.arange(7))


def test_pinned_in_a_loader(device: torch.device) -> None:
    with warnings.catch_warnings():
        # Without an accelerator a DataLoader says that it pins nothing.
        warnings.filterwarnings("ignore", message=".*pin_memory.*")
        batches = list(DataLoader(Series(), batch_size=5, pin_memory=True, collate_fn=rl.collate))
    assert [batch["x"].lengths.tolist() for batch in batches] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert all(type(batch["pair"]) is Pair for batch in batches)
    if device.type == "cuda":
        assert all(
            batch["x"].values.is_pinned() and batch["pair"].label.is_pinned() for batch in batches
        )
        assert all(
            torch.equal(batch["x"].to(device).values.cpu(), batch["x"].values) for batch in batches
        )
