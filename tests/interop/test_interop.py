"""Arrow there and back: what is shared, what is copied, what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

import raglane as rl
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from strategies import lengths, sequences_of

pa = pytest.importorskip("pyarrow", reason="needs the extra 'data'")


@pytest.mark.parametrize("features", [(), (3,), (2, 2)])
@given(lengths=lengths())
def test_there_and_back(lengths: list[int], features: tuple[int, ...]) -> None:
    if not lengths:
        return
    batch = rl.Ragged(sequences_of(lengths, features))
    array = batch.to_arrow()
    assert array.to_pylist() == [sequence.tolist() for sequence in batch]
    if len(features) < 2:
        again = rl.Ragged.from_arrow(array)
        assert torch.equal(again.values, batch.values)
        assert again.host_lengths.tolist() == lengths


@pytest.mark.parametrize("kind", [pa.list_(pa.int32()), pa.large_list(pa.float32()), pa.list_(pa.float64())])
def test_numbers_are_shared(kind: Any) -> None:
    array = pa.array([[1, 2], [], [3]], type=kind)
    batch = rl.Ragged.from_arrow(array)
    assert batch.to_list()[2].tolist() == [3]
    assert batch.values.data_ptr() == array.flatten().buffers()[1].address


def test_slices_chunks_and_fixed_sizes() -> None:
    array = pa.array([[1], [2, 3], [], [4, 5, 6]])
    assert [s.tolist() for s in rl.Ragged.from_arrow(array[1:3])] == [[2, 3], []]
    chunks = pa.chunked_array([array[:2], array[2:]])
    assert rl.Ragged.from_arrow(chunks).values.tolist() == [1, 2, 3, 4, 5, 6]
    fixed = pa.array([[1, 2], [3, 4]], type=pa.list_(pa.int64(), 2))
    assert rl.Ragged.from_arrow(fixed).lengths.tolist() == [2, 2]
    assert rl.Ragged.from_arrow(pa.array([], type=pa.list_(pa.int64()))).lengths.tolist() == []
    assert rl.Ragged.from_arrow(pa.array([[True], [False, True]])).values.tolist() == [True, False, True]


def test_lists_of_lists_become_channels() -> None:
    array = pa.array([[[1.0, 2.0], [3.0, 4.0]], [], [[5.0, 6.0]]])
    batch = rl.Ragged.from_arrow(array)
    assert batch.values.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert batch.values.data_ptr() == array.flatten().flatten().buffers()[1].address
    with pytest.raises(ShapeError, match="elements of 1 to 2 numbers"):
        rl.Ragged.from_arrow(pa.array([[[1.0, 2.0], [3.0]]]))


@pytest.mark.parametrize("rows", [[[1, None]], [[1], None], [[[1.0, None]]], [[[1.0], None]]])
def test_a_null_is_an_error(rows: list[Any]) -> None:
    with pytest.raises(ArgumentError, match=r"1 null.*fill_null"):
        rl.Ragged.from_arrow(pa.array(rows))


def test_refuses() -> None:
    with pytest.raises(ArgumentTypeError, match="vocabulary"):
        rl.Ragged.from_arrow(pa.array([["a", "b"]]))
    with pytest.raises(ArgumentTypeError, match="int64"):
        rl.Ragged.from_arrow(pa.array([1, 2]))
    with pytest.raises(ArgumentTypeError, match="list"):
        rl.Ragged.from_arrow([[1, 2]])
    with pytest.raises(ArgumentTypeError, match="bfloat16"):
        rl.Ragged([torch.ones(2).bfloat16()]).to_arrow()


def test_arrow_memory_outlives_the_array() -> None:
    batch = rl.Ragged.from_arrow(pa.array([np.arange(1000.0)]))
    torch.randn(100_000).sum()  # reuse whatever memory was freed
    assert torch.equal(batch.values, torch.arange(1000.0, dtype=torch.float64))
