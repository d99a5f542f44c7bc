"""Functions and modules of torch that accept a Ragged; pickles, copies, devices and repr of a
Ragged.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

import raglane as rl
from batches import same
from raglane.errors import RaglaneError
from raglane.packing.flat_values import find_padded
from raglane.schedules import SCHEDULES
from strategies import sequences_of


def a_batch(*features: int) -> rl.Ragged:
    return rl.Ragged([torch.randn(length, *features) for length in (3, 0, 2)])


FIRST, LAST = [dict[str, Any](axis=axis) for axis in (0, -1)]  # torch's stubs lack this name of dim

ELEMENTWISE: list[Callable[[Any], Any]] = [
    torch.relu,
    lambda x: F.leaky_relu(x, 0.2),
    lambda x: x * 2,
    lambda x: 1 / x,
    lambda x: x + x,
    lambda x: abs(x),
    lambda x: (x > 0) & (x < 1) == (x > 0.5),
    lambda x: torch.where(x > 0, x, 0.0),
    lambda x: x.clamp(-0.1, max=0.1),
    lambda x: torch.maximum(x, torch.zeros(4)),
    lambda x: torch.arange(4.0) * x,
    lambda x: x // 2,
    lambda x: torch.zeros_like(x),
]

FEATURES: list[Callable[[Any], Any]] = [
    nn.Linear(4, 5),
    nn.LayerNorm(4),
    nn.Softmax(dim=-1),
    lambda x: torch.mean(x, -1, keepdim=True),
    lambda x: torch.cat([x, x * 2], dim=-1),
    lambda x: F.normalize(x, dim=-1),
    lambda x: torch.argmax(x, dim=-1),
    lambda x: torch.flip(x, (-1,)),
    lambda x: x @ torch.arange(8.0).view(4, 2),
    lambda x: torch.stack([x, x * 2], dim=-1),
    lambda x: torch.unsqueeze(x, -2),
    lambda x: torch.cat([x, x], **LAST),
    nn.GLU(),
    nn.Dropout(0.5).eval(),
    nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)),
]


@pytest.mark.parametrize("function", [*ELEMENTWISE, *FEATURES])
def test_acts_on_the_values(function: Callable[[Any], Any]) -> None:
    batch = a_batch(4)
    result = function(batch)
    assert isinstance(result, rl.Ragged)
    torch.testing.assert_close(result.values, function(batch.values), equal_nan=True)
    assert result.offsets is batch.offsets


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.chunk(x, 3, dim=-1),
        lambda x: torch.split(x, [1, 3], dim=-1),
        lambda x: torch.unbind(x, -1),
        lambda x: torch.topk(x, 2),
        lambda x: torch.sort(x, **LAST),
        lambda x: torch.max(x, dim=-1),
        lambda x: torch.var_mean(x, dim=-1),
    ],
)
def test_several_results(function: Callable[[Any], Any]) -> None:
    batch = a_batch(4)
    results, expected = function(batch), function(batch.values)
    assert type(results) is type(expected)
    for result, values in zip(results, expected, strict=True):
        assert torch.equal(result.values, values)
        assert result.offsets is batch.offsets


def test_embedding_and_a_whole_model() -> None:
    embedding = nn.Embedding(10, 6)
    result = nn.Sequential(embedding, nn.Dropout(0.1), nn.Linear(6, 3))(
        rl.Ragged([[1, 2], [3]])
    ).values
    assert result.shape == (3, 3)
    (gradient,) = torch.autograd.grad(result.sum(), embedding.weight)
    assert gradient.any(1).tolist() == [index in (1, 2, 3) for index in range(10)]


def test_inplace_modules_leave_the_batch_alone() -> None:
    batch = a_batch(4)
    before = batch.values.clone()
    result = nn.ReLU(inplace=True)(batch)
    assert torch.equal(batch.values, before)
    assert torch.equal(result.values, before.relu())


def test_equal_lengths_of_other_origin() -> None:
    left, right = a_batch(4), a_batch(4)
    assert torch.equal((left + right).values, left.values + right.values)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda r: torch.sum(r, 0), r"Pass dim=1 for the steps"),
        (lambda r: torch.sort(r, **FIRST), "Pass dim=1 for the steps"),
        (lambda r: r.softmax(), "Pass dim=1 for the steps"),
        (lambda r: r.argmax(), "Pass dim=1 for the steps"),
        (lambda r: torch.flip(r, (0,)), r"r\[::-1\]"),
        (lambda r: torch.cat([r, torch.ones(5, 2)], -1), r"r\.broadcast\(x\)"),
        (lambda r: torch.stack([r, r]), r"torch\.cat\(\[a, b\]\)"),
        (lambda r: torch.matmul(torch.ones(5, 5), r), r"r @ matrix"),
        (lambda r: torch.unsqueeze(r, 1), "stay the first two"),
        (lambda r: r.view(-1), r"r\.flatten\(2\)"),
        (lambda r: F.cross_entropy(r, torch.zeros(3).long()), r"r\.last\(\).*r\.broadcast"),
        (lambda r: F.conv1d(r, torch.ones(1, 1, 1)), r"rl\.nn\.Conv1d"),
        (lambda r: nn.BatchNorm1d(4)(r), r"r\.map\(f\)"),
        (lambda r: nn.MultiheadAttention(4, 2, batch_first=True)(r, r, r), r"rl\.nn\.Attention"),
        (lambda r: torch.add(r, 1, out=torch.empty(5, 4)), "immutable"),
        (lambda r: r.relu_(), "immutable"),
        (lambda r: r.__setitem__((slice(None), 0), 0), "immutable"),
        (lambda r: F.layer_norm(r, (5, 4)), "2 feature dimension"),
        (lambda r: nn.LSTM(4, 2)(r), r"rl\.nn"),
        (lambda r: nn.LSTM(4, 2, batch_first=True)(r), r"rl\.nn"),
        (lambda r: nn.Linear(1, 2)(r[..., 0]), "unsqueeze"),
        (lambda r: r.size(1), r"r\.lengths"),
        (lambda r: r.numpy(), r"r\.to_numpy\(\)"),
        (lambda r: r[:, -1], r"r\.lengths > 0"),
        (lambda r: r.max(1), r"r\.lengths > 0"),
        (lambda r: r.mean(2, empty=0.0), "dim=1"),
        (lambda r: r[:, ::-1], r"r\.flip\(1\)"),
    ],
)
def test_refuses_with_advice(call: Callable[[rl.Ragged], Any], says: str) -> None:
    with pytest.raises((RaglaneError, AttributeError), match=says):
        call(a_batch(4))


@pytest.mark.parametrize(
    "travel", [copy.copy, copy.deepcopy, lambda batch: pickle.loads(pickle.dumps(batch))]
)
def test_copies_and_pickles(travel: Any) -> None:
    batch = rl.Ragged([torch.randn(2, 3), torch.randn(0, 3)])
    arrived = travel(batch)
    assert same(arrived, batch.to_list())
    assert arrived.lengths_cpu.tolist() == [2, 0]


def test_pytree() -> None:
    batch = rl.Ragged([torch.randn(2, 3), torch.randn(1, 3)])
    leaves, spec = pytree.tree_flatten({"inputs": batch})
    assert same(pytree.tree_unflatten(leaves, spec)["inputs"], batch.to_list())
    assert [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(batch)[0]] == [
        ".values",
        ".offsets",
    ]


def test_to_keeps_lengths() -> None:
    batch = rl.Ragged([[1, 2], [3]]).to(torch.float16)
    assert (batch.dtype, batch.offsets.dtype) == (torch.float16, torch.int64)
    assert batch.to("meta").device.type == "meta"


def test_is_immutable() -> None:
    batch = rl.Ragged([[1, 2]])
    for name in ("values", "note"):
        with pytest.raises(AttributeError):
            setattr(batch, name, torch.ones(2))


def test_repr() -> None:
    batch = rl.Ragged([torch.ones(4, 12), torch.ones(2, 12), torch.ones(8, 12)])
    assert repr(batch) == (
        "Ragged(shape=(3, *, 12), dtype=torch.float32, device=cpu, lengths=[4, 2, 8], density=0.583)"
    )
    assert repr(rl.Ragged([torch.ones(1)] * 11)).count("1, ") == 11
    assert (
        repr(rl.Ragged([]))
        == "Ragged(shape=(0, *), dtype=torch.float32, device=cpu, lengths=[], density=1)"
    )


def test_picture_in_a_notebook() -> None:
    page = rl.Ragged([torch.ones(4)] * 30)._repr_html_()
    assert page.count("<rect") == 2 * 24
    assert "and 6 more" in page
    assert "<svg" in rl.Ragged([])._repr_html_()


def test_operators_with_numpy() -> None:
    batch = rl.Ragged([torch.ones(2, 2), torch.ones(1, 2)])
    total: Any = np.ones(2, np.float32) + batch
    assert total.values.tolist() == [[2, 2]] * 3
    assert (batch * np.float32(3)).values.tolist() == [[3, 3]] * 3  # type: ignore[operator]


def test_lengths_and_schedules_ignore_the_default_device() -> None:
    """Tensors of the device meta would hold no numbers."""
    batch, gru = rl.Ragged([torch.ones(2, 3), torch.ones(4, 3)]), rl.nn.GRU(3, 2)
    expected = gru(batch)[0]
    padded, packed = batch.to_padded()[0], batch.to_packed()
    with torch.device("meta"):
        assert rl.Ragged(list(batch)).lengths_cpu.tolist() == [2, 4]
        assert rl.Ragged.from_padded(padded, [2, 4]).lengths.tolist() == [2, 4]
        assert rl.Ragged.from_packed(packed).lengths.tolist() == [2, 4]
        assert batch[::-1].lengths.tolist() == [4, 2]
        assert batch.windows(3).lengths.tolist() == [2, 3, 1]
        assert batch.shift(1).values.sum().item() == 3 * 4
        assert rl.cost([2, 4])["packed"].elements == 6
        for schedule in SCHEDULES:
            with rl.use_backend(schedule=schedule, backend="reference"):
                torch.testing.assert_close(
                    gru(batch, torch.zeros(1, 2, 2, device="cpu"))[0].values, expected.values
                )


@pytest.mark.parametrize("lengths", [[2, 3, 2, 3, 0, 2, 0], [1, 2] * 50, [0, 4, 0, 4]])
def test_sequences_of_one_length_keep_their_order_in_a_pack(lengths: list[int]) -> None:
    packed: Any = rl.Ragged(sequences_of(lengths)).to_packed()
    other: Any = rl.packing.pack_sequence(sequences_of(lengths), False)
    order = sorted(range(len(lengths)), key=lambda b: -lengths[b])
    assert packed.sorted_indices.tolist() == other.sorted_indices.tolist() == order
    assert packed.unsorted_indices.tolist() == sorted(
        range(len(order)), key=lambda place: order[place]
    )


@pytest.mark.parametrize("kind", [torch.tensor, np.array], ids=["tensor", "array"])
def test_lengths_that_their_owner_changes_are_not_the_batchs(kind: Any) -> None:
    sequences = sequences_of([2, 4, 1])
    padded = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    lengths = kind([2, 4, 1])
    batches = [
        rl.Ragged.from_padded(padded, lengths),
        rl.Ragged.from_flat(torch.cat(sequences), lengths=lengths),
        rl.Ragged.from_flat(torch.cat(sequences), offsets=(offsets := kind([0, 2, 6, 7]))),
    ]
    found = find_padded(padded, lengths, batch_first=True)
    jagged_offsets = torch.tensor([0, 2, 6, 7])
    batches.append(
        rl.Ragged.from_nested(
            torch.nested.nested_tensor_from_jagged(torch.cat(sequences), jagged_offsets)
        )
    )
    lengths[:], offsets[:], jagged_offsets[:] = 1, 0, 0
    for batch in batches:
        batch.to_padded()[1].zero_()
        batch.lengths.zero_()
        assert batch.lengths_cpu.tolist() == batch.lengths.tolist() == [2, 4, 1]
        assert same(batch, sequences)
    assert found.lengths.tolist() == [2, 4, 1]
    assert found.offsets.tolist() == [0, 2, 6, 7]


_ODD_LENGTHS = [
    np.array([2, 9, 4, 9, 1])[::2],
    np.array([1, 4, 2])[::-1],
    np.frombuffer(np.array([2, 4, 1]).tobytes(), np.int64),  # read-only
    np.array([2, 4, 1], dtype=">i8"),
    np.array([[2, 0], [4, 0], [1, 0]])[:, 0],
    torch.tensor([2, 9, 4, 9, 1])[::2],
    torch.tensor([[2, 0], [4, 0], [1, 0]], dtype=torch.int32)[:, 0],
    (2, 4, 1),
    [np.int64(2), np.int8(4), 1],
    [torch.tensor(2), torch.tensor(4), torch.tensor(1)],
]


@pytest.mark.parametrize("lengths", _ODD_LENGTHS)
def test_lengths_of_any_layout_in_memory(lengths: Any) -> None:
    """With gaps, reversed, and in the other byte order."""
    sequences = sequences_of([2, 4, 1], (3,), torch.float32)
    padded = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    assert same(rl.Ragged.from_padded(padded, lengths), sequences)
    assert rl.packing.pack_padded_sequence(padded, lengths, True, False).batch_sizes.tolist() == [
        3,
        2,
        1,
        1,
    ]
    assert [len(part) for part in rl.packing.unpad_sequence(padded, lengths, True)] == [2, 4, 1]
    layer = rl.nn.GRU(3, 4, batch_first=True)
    assert torch.equal(layer(padded, lengths=lengths)[1], layer(rl.Ragged(sequences))[1])
    if not isinstance(lengths, list):
        assert same(rl.Ragged.from_flat(torch.cat(sequences), lengths=lengths), sequences)
    assert same(rl.Ragged(sequences)[np.array([0, 2])[::-1]], [sequences[2], sequences[0]])
