"""Loops over steps, pieces of sequences, and batches of batches."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import raglane as rl
from raglane.errors import ArgumentTypeError, ShapeError
from raglane.ragged import Nested
from strategies import lengths


@settings(max_examples=30)
@given(lengths=lengths())
def test_steps_and_back(lengths: list[int]) -> None:
    values = torch.randn(sum(lengths), 2, dtype=torch.float64, requires_grad=True)
    batch = rl.Ragged.from_flat(values, lengths=lengths)
    steps = list(batch.steps())
    assert len(steps) == max(lengths, default=0)
    for step, (rows, x_t) in enumerate(steps):
        assert rows.tolist() == [row for row, length in enumerate(lengths) if length > step]
        assert x_t.tolist() == [batch[row][step].tolist() for row in rows.tolist()]
    if not steps:
        return
    again = rl.Ragged.from_steps([x_t for _, x_t in steps], lengths)
    assert torch.equal(again.values, batch.values)
    assert again.lengths.tolist() == lengths
    weights = torch.randn_like(values)
    (gradient,) = torch.autograd.grad((again.values * weights).sum(), values)
    assert torch.equal(gradient, weights)


def test_steps_of_equal_lengths() -> None:
    steps = [torch.randn(2, 3) for _ in range(4)]
    batch = rl.Ragged.from_steps(steps)
    assert batch.lengths.tolist() == [4, 4]
    assert torch.equal(batch[1], torch.stack(steps)[:, 1])


@pytest.mark.parametrize(
    ("steps", "lengths", "error", "says"),
    [
        ([], None, ArgumentTypeError, "and at least one"),
        (torch.ones(3, 2), None, ArgumentTypeError, "a list with one tensor"),
        ([torch.ones(2), torch.ones(1)], None, ShapeError, r"\[2, 2\], got \[2, 1\] rows"),
        ([torch.ones(2)], [2, 1], ShapeError, r"\[2\], got \[2\] rows"),
        ([torch.ones(2, 3), torch.ones(1, 4)], [2, 1], ShapeError, "the same features"),
    ],
)
def test_wrong_steps(steps: Any, lengths: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        rl.Ragged.from_steps(steps, lengths)


@settings(max_examples=30)
@given(lengths=lengths(), seed=st.integers(0, 2**31))
def test_pieces_of_sequences(lengths: list[int], seed: int) -> None:
    chance = np.random.default_rng(seed)
    batch = rl.Ragged.from_flat(torch.arange(sum(lengths)), lengths=lengths)
    starts = batch.with_values(torch.from_numpy(chance.random(sum(lengths)) < 0.3))
    pieces: list[list[int]] = []
    for sequence, marks in zip(batch.tolist(), starts.tolist(), strict=True):
        for step, (number, mark) in enumerate(zip(sequence, marks, strict=True)):
            if mark or step == 0:
                pieces.append([])
            pieces[-1].append(number)
    cut = batch.split_at(starts)
    assert cut.tolist() == pieces
    assert cut.values is batch.values


def test_wrong_starts() -> None:
    batch = rl.Ragged([[1.0, 2.0], [3.0]])
    with pytest.raises(ArgumentTypeError, match="True where a piece begins, got a Ragged of"):
        batch.split_at(batch)
    with pytest.raises(ShapeError, match="begins must be a batch"):
        batch.split_at(rl.Ragged([[True], [False, True]]))


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("kind", ["lists", "tensors", "batches"])
def test_a_batch_of_batches(kind: str, same: bool) -> None:
    """Its levels depend on the kinds of samples, never on the lengths."""
    documents = [[[1, 2], [3, 4]], [[5, 6]]] if same else [[[5, 2, 3], [4]], [[7, 8], [], [9]]]
    samples: list[Any] = documents
    if kind == "tensors":
        samples = [[torch.tensor(one, dtype=torch.int64) for one in item] for item in documents]
    if kind == "batches":
        samples = [rl.Ragged([torch.tensor(one).long() for one in item]) for item in documents]
    docs, labels = rl.collate([(sample, number) for number, sample in enumerate(samples)])
    assert isinstance(docs, Nested)
    assert docs.tolist() == documents
    assert len(docs) == len(labels) == 2
    assert docs[1].tolist() == documents[1]
    rows = torch.randn(len(docs.inner), 3, dtype=torch.float64, requires_grad=True)
    grouped = docs.regroup(rows)
    assert grouped.lengths.tolist() == [len(item) for item in documents]
    assert torch.equal(grouped.values, rows)
    moved = pickle.loads(pickle.dumps(docs.to(torch.float64)))
    assert moved.inner.dtype is torch.float64
    assert moved.regroup(rows.detach()).lengths.equal(grouped.lengths)


def test_channels_stay_channels() -> None:
    assert rl.collate([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0]]]).shape == (2, None, 2)
    assert rl.collate([[[True, False]]]).shape == (1, None, 2)


def test_wrong_groups() -> None:
    docs = rl.collate([[[5, 2, 3], [4]], [[7, 8]]])
    with pytest.raises(ShapeError, match="one row for each of the 3 elements"):
        docs.regroup(torch.randn(2, 4))
    with pytest.raises(ArgumentTypeError, match="inner must be a Ragged"):
        Nested(torch.zeros(3), [1, 2])  # type: ignore[arg-type]


def test_integers_are_shifted_with_a_value() -> None:
    tags = rl.Ragged([[3, 1, 2], [5]])
    with pytest.raises(ArgumentTypeError, match="fill_value=-100 for targets"):
        tags.shift(-1)
    assert tags.shift(-1, fill_value=-100).tolist() == [[1, 2, -100], [-100]]
    assert (tags > 1).shift(1).tolist() == [[False, True, False], [False]]
    assert (tags * 1.0).shift(1).tolist() == [[0, 3, 1], [0]]


def test_lengths_are_named() -> None:
    with pytest.raises(TypeError, match="positional"):
        rl.Ragged.from_flat(torch.arange(3), [1, 2])  # type: ignore[call-arg]


def test_means_of_means_are_means() -> None:
    loss = rl.Ragged([[1.0, 2.0, 6.0], [5.0]])
    assert loss.mean().mean().item() == loss.mean().item() == 3.5


@pytest.mark.parametrize("rows", [2, 4])
def test_dense_rows_are_not_joined(rows: int) -> None:
    batch = rl.Ragged([torch.ones(3, 2), torch.ones(1, 2)])
    with pytest.raises(ArgumentTypeError, match=r"x\[:, None\]\.expand_as\(r\)"):
        torch.cat([batch, torch.ones(rows, 2)], -1)
