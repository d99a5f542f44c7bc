"""Conversions from and to Arrow: values, shared memory and errors."""

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
@given(lengths=lengths().filter(len))
def test_there_and_back(lengths: list[int], features: tuple[int, ...]) -> None:
    batch = rl.Ragged(sequences_of(lengths, features))
    array = batch.to_arrow()
    assert array.to_pylist() == [sequence.tolist() for sequence in batch]
    if len(features) < 2:
        again = rl.Ragged.from_arrow(array)
        assert torch.equal(again.values, batch.values)
        assert again.lengths_cpu.tolist() == lengths


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.int32()), pa.large_list(pa.float32()), pa.list_(pa.float64())]
)
def test_numbers_are_shared(kind: Any) -> None:
    array = pa.array([[1, 2], [], [3]], type=kind)
    assert rl.Ragged.from_arrow(array).to_list()[2].tolist() == [3]
    for column in (array, pa.chunked_array([array])):
        assert (
            rl.Ragged.from_arrow(column).values.data_ptr() == array.flatten().buffers()[1].address
        )
        assert rl.Ragged.from_arrow(column[1:]).to_list()[1].tolist() == [3]


def test_slices_chunks_and_fixed_sizes() -> None:
    array = pa.array([[1], [2, 3], [], [4, 5, 6]])
    assert [s.tolist() for s in rl.Ragged.from_arrow(array[1:3])] == [[2, 3], []]
    assert rl.Ragged.from_arrow(pa.chunked_array([array[:2], array[2:]])).values.tolist() == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]
    fixed = pa.array([[1, 2], [3, 4]], type=pa.list_(pa.int64(), 2))
    assert rl.Ragged.from_arrow(fixed).lengths.tolist() == [2, 2]
    assert rl.Ragged.from_arrow(pa.array([], type=pa.list_(pa.int64()))).lengths.tolist() == []
    assert rl.Ragged.from_arrow(pa.array([[True], [False, True]])).values.tolist() == [
        True,
        False,
        True,
    ]


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


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: rl.Ragged.from_arrow(pa.array([["a", "b"]])), "vocabulary"),
        (lambda: rl.Ragged.from_arrow(pa.array([1, 2])), "int64"),
        (lambda: rl.Ragged.from_arrow([[1, 2]]), "list"),
        (lambda: rl.Ragged([torch.ones(2).bfloat16()]).to_arrow(), "bfloat16"),
    ],
)
def test_refuses(call: Any, says: str) -> None:
    with pytest.raises(ArgumentTypeError, match=says):
        call()


def test_arrow_memory_outlives_the_array() -> None:
    batch = rl.Ragged.from_arrow(pa.array([np.arange(1000.0)]))
    torch.randn(100_000).sum()  # reuse whatever memory was freed
    assert torch.equal(batch.values, torch.arange(1000.0, dtype=torch.float64))


def test_series_of_other_libraries() -> None:
    polars, pandas = (
        pytest.importorskip("polars", reason="not installed"),
        pytest.importorskip("pandas"),
    )
    rows = [[1.5, 2.0], [], [3.0]]
    arrow = pa.array(rows, pa.large_list(pa.float64()))
    both = polars.Series(rows), pandas.Series(arrow, dtype=pandas.ArrowDtype(arrow.type))
    for series in both if hasattr(both[1], "__arrow_c_stream__") else both[:1]:  # pandas 2 lacks it
        batch = rl.Ragged.from_arrow(series)
        assert [row.tolist() for row in batch.to_list()] == rows
    series = polars.from_arrow(batch.to_arrow())
    assert rl.Ragged.from_arrow(series).values.data_ptr() == batch.values.data_ptr()
    batch = rl.Ragged.from_flat(
        pandas.DataFrame({"x": [1.0, 2.0], "y": [3.0, 4.0]}), lengths=pandas.Series([0, 2])
    )
    assert batch.values.tolist() == [[1.0, 3.0], [2.0, 4.0]]
    assert batch.lengths.tolist() == [0, 2]


def test_padding_free() -> None:
    tokens = rl.Ragged([[4, 5], [], [6]]).to_transformers()
    assert {
        name: value.tolist() if isinstance(value, torch.Tensor) else value
        for name, value in tokens.items()
    } == {
        "input_ids": [[4, 5, 6]],
        "position_ids": [[0, 1, 0]],
        "seq_idx": [[0, 0, 2]],
        "cu_seq_lens_q": [0, 2, 2, 3],
        "cu_seq_lens_k": [0, 2, 2, 3],
        "max_length_q": 2,
        "max_length_k": 2,
    }
    assert [tokens[name].dtype for name in ("seq_idx", "cu_seq_lens_q")] == [
        torch.int32,
        torch.int32,
    ]
    batch = rl.Ragged([torch.randn(2, 3), torch.randn(1, 3)])
    embedded = batch.to_transformers()["inputs_embeds"]
    assert embedded.shape == (1, 3, 3)
    assert embedded.data_ptr() == batch.values.data_ptr()
