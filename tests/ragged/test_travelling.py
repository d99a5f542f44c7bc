"""A Ragged on its way: pickles, copies and devices; how it shows itself; what may not reach into it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import raglane as rl
from batches import same
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from raglane.packing.rows import find_padded
from strategies import sequences_of


@pytest.mark.parametrize("travel", [copy.copy, copy.deepcopy, lambda batch: pickle.loads(pickle.dumps(batch))])
def test_copies_and_pickles(travel: Any) -> None:
    batch = rl.Ragged([torch.randn(2, 3), torch.randn(0, 3)])
    arrived = travel(batch)
    assert same(arrived, batch.to_list())
    assert arrived.host_lengths.tolist() == [2, 0]


def test_pytree() -> None:
    batch = rl.Ragged([torch.randn(2, 3), torch.randn(1, 3)])
    leaves, spec = pytree.tree_flatten({"inputs": batch})
    assert all(isinstance(leaf, Tensor) for leaf in leaves)
    assert same(pytree.tree_unflatten(leaves, spec)["inputs"], batch.to_list())
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(batch)[0]]
    assert paths == [".values", ".offsets"]


def test_to_keeps_lengths() -> None:
    batch = rl.Ragged([[1, 2], [3]]).to(torch.float16)
    assert batch.dtype is torch.float16
    assert batch.offsets.dtype is torch.int64
    assert batch.to("meta").device.type == "meta"
    assert batch.detach().requires_grad is False


def test_is_immutable() -> None:
    batch = rl.Ragged([[1, 2]])
    with pytest.raises(AttributeError):
        batch.values = torch.ones(2)  # type: ignore[misc]
    with pytest.raises(AttributeError):
        batch.note = "?"  # type: ignore[attr-defined]


def test_has_no_truth() -> None:
    batch = rl.Ragged([[1, 2]])
    with pytest.raises(TypeError, match=r"\(a == b\)\.values\.all\(\)"):
        assert batch == batch


# -- how it shows itself ----------------------------------------------------------------------------------------------


def test_repr() -> None:
    batch = rl.Ragged([torch.ones(4, 12), torch.ones(2, 12), torch.ones(8, 12)])
    assert repr(batch) == ("Ragged(shape=(3, *, 12), dtype=torch.float32, device=cpu, lengths=[4, 2, 8], fill=0.583)")
    assert repr(rl.Ragged([torch.ones(1)] * 11)).count("1, ") == 11
    assert "..." in repr(rl.Ragged([torch.ones(1)] * 11))
    assert repr(rl.Ragged([])) == "Ragged(shape=(0, *), dtype=torch.float32, device=cpu, lengths=[], fill=1)"


def test_picture_in_a_notebook() -> None:
    page = rl.Ragged([torch.ones(4)] * 30)._repr_html_()
    assert page.count("<rect") == 2 * 24
    assert "and 6 more" in page
    assert "<svg" in rl.Ragged([])._repr_html_()


# -- nothing reaches in from outside ----------------------------------------------------------------------------------


def test_the_callers_tensors_are_not_the_batchs() -> None:
    """Writing into lengths or offsets that were given, or into those handed out, changes no batch."""
    lengths, offsets, array = torch.tensor([3, 2]), torch.tensor([0, 3, 5]), np.array([3, 2])
    batches = [
        rl.Ragged.from_flat(torch.arange(5), lengths=lengths),
        rl.Ragged.from_flat(torch.arange(5), offsets=offsets),
        rl.Ragged.from_flat(torch.arange(5), lengths=array),
    ]
    lengths += 100
    offsets += 100
    array += 100
    for batch in batches:
        batch.to_padded()[1].zero_()
        batch.lengths.zero_()
        assert batch.host_lengths.tolist() == [3, 2]
        assert batch.offsets.tolist() == [0, 3, 5]


def test_lengths_whose_sum_wraps() -> None:
    with pytest.raises(ShapeError, match="4611686018427387904 at index 0"):
        rl.Ragged.from_flat(torch.arange(3), lengths=[2**62] * 4 + [3])
    with pytest.raises(ArgumentError, match="64-bit"):
        rl.cost([2**62] * 4)


@pytest.mark.parametrize("array", [np.arange(3)[::-1], np.arange(3).astype(">i4"), np.arange(6)[::2]])
def test_any_numpy_array(array: Any) -> None:
    assert rl.Ragged([array]).values.tolist() == array.tolist()
    assert rl.Ragged.from_flat(array, lengths=[1, 2]).values.tolist() == array.tolist()


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: rl.Ragged(["ab"]), ArgumentTypeError, r"sequences\[0\].*vocabulary"),
        (lambda: rl.Ragged([[1], None]), ArgumentTypeError, r"sequences\[1\] must be .*got a NoneType"),  # type: ignore[arg-type]
        (lambda: rl.Ragged([[[1], [2, 3]]]), ArgumentTypeError, r"sequences\[0\].*of one shape"),
        (lambda: rl.Ragged.from_flat([1, 2], lengths=iter([2])), ArgumentTypeError, "not an array of numbers"),
        (lambda: rl.Ragged.from_flat([1, 2], lengths=[2**64]), ArgumentTypeError, "not an array of numbers"),
        (lambda: rl.Ragged([[1, 2]]).truncate(1.5), ArgumentTypeError, "whole number"),  # type: ignore[arg-type]
        (lambda: rl.Ragged([[1, 2]]).shift(0.5), ArgumentTypeError, "whole number"),  # type: ignore[arg-type]
        (lambda: rl.Ragged([[1, 2]]).shift(1, 0.5), ArgumentTypeError, "fill must be .*got 0.5"),
        (lambda: rl.Ragged([[1, 2]]).max(empty=float("nan")), ArgumentTypeError, "empty must be .*got nan"),
        (
            lambda: rl.Ragged([[1, 2]]).to_padded(padding_value=0.5),
            ArgumentTypeError,
            "padding_value must be .*got 0.5",
        ),
        (lambda: rl.Ragged([torch.ones(2, 0)]).to_arrow(), ArgumentTypeError, "features of at least 1"),
        (lambda: rl.Ragged([[1.0]]) @ torch.ones(1), TypeError, r"torch\.nn\.functional\.linear"),
        (lambda: 1 in rl.Ragged([[1]]), TypeError, "Ragged"),  # type: ignore[operator]
        (lambda: rl.Ragged([[1]]) + "a", TypeError, "unsupported operand"),
    ],
)
def test_absurd_calls_say_what_is_wrong(call: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        call()


def test_numpy_and_none_beside_a_batch() -> None:
    batch = rl.Ragged([torch.ones(2, 2), torch.ones(1, 2)])
    total: Any = np.ones(2, np.float32) + batch
    assert total.values.tolist() == [[2, 2]] * 3
    assert (batch * np.float32(3)).values.tolist() == [[3, 3]] * 3
    nothing: Any = None
    assert not isinstance(batch == nothing, rl.Ragged)


def test_the_default_device_is_not_where_the_host_computes() -> None:
    """Whoever makes a GPU torch's default still has lengths and schedules on the host; meta tensors hold nothing."""
    batch, gru = rl.Ragged([torch.ones(2, 3), torch.ones(4, 3)]), rl.nn.GRU(3, 2)
    expected = gru(batch)[0]
    padded, packed = batch.to_padded()[0], batch.to_packed()
    with torch.device("meta"):
        assert rl.Ragged(list(batch)).host_lengths.tolist() == [2, 4]
        assert rl.Ragged.from_flat(batch.values, lengths=[2, 4]).host_lengths.tolist() == [2, 4]
        assert rl.Ragged.from_padded(padded, [2, 4]).lengths.tolist() == [2, 4]
        assert rl.Ragged.from_packed(packed).lengths.tolist() == [2, 4]
        assert batch[::-1].lengths.tolist() == [4, 2]
        assert batch.windows(3).lengths.tolist() == [2, 3, 1]
        assert batch.last(empty=1.0).shape == (2, 3)
        assert batch.shift(1).values.sum().item() == 3 * 4
        assert rl.cost([2, 4])["packed"].elements == 6
        for schedule in ("each", "padded", "masked", "packed", "lanes"):
            with rl.use_backend(schedule=schedule, backend="reference"):
                torch.testing.assert_close(gru(batch, torch.zeros(1, 2, 2, device="cpu"))[0].values, expected.values)


@pytest.mark.parametrize("lengths", [[2, 3, 2, 3, 0, 2, 0], [1] * 9, [0, 4, 0, 4]])
def test_sequences_of_one_length_keep_their_order_in_a_pack(lengths: list[int]) -> None:
    packed = rl.Ragged(sequences_of(lengths)).to_packed()
    assert packed.sorted_indices is not None
    assert packed.unsorted_indices is not None
    order = sorted(range(len(lengths)), key=lambda b: -lengths[b])
    assert packed.sorted_indices.tolist() == order
    assert packed.unsorted_indices.tolist() == sorted(range(len(order)), key=lambda place: order[place])


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
    batches.append(rl.Ragged.from_nested(torch.nested.nested_tensor_from_jagged(torch.cat(sequences), jagged_offsets)))
    lengths[:], offsets[:], jagged_offsets[:] = 1, 0, 0
    for batch in batches:
        assert batch.host_lengths.tolist() == batch.lengths.tolist() == [2, 4, 1]
        assert same(batch, sequences)
    assert found.lengths.tolist() == [2, 4, 1]
    assert found.offsets.tolist() == [0, 2, 6, 7]


_ODD_LENGTHS = [
    np.array([2, 9, 4, 9, 1])[::2],
    np.array([1, 4, 2])[::-1],
    np.array([2, 4, 1], dtype=">i8"),
    np.array([2, 4, 1], dtype=">i2"),
    np.array([[2, 0], [4, 0], [1, 0]])[:, 0],
    torch.tensor([2, 9, 4, 9, 1])[::2],
    torch.tensor([[2, 0], [4, 0], [1, 0]], dtype=torch.int32)[:, 0],
    torch.tensor([5, 2, 4, 1])[1:],
    (2, 4, 1),
    [np.int64(2), np.int8(4), 1],
    [torch.tensor(2), torch.tensor(4), torch.tensor(1)],
]


@pytest.mark.parametrize("lengths", _ODD_LENGTHS)
def test_lengths_wherever_they_lie(lengths: Any) -> None:
    """With gaps, backwards, in the other byte order: what counts is which numbers they are."""
    sequences = sequences_of([2, 4, 1], (3,), torch.float32)
    padded = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    assert same(rl.Ragged.from_padded(padded, lengths), sequences)
    assert rl.packing.pack_padded_sequence(padded, lengths, True, False).batch_sizes.tolist() == [3, 2, 1, 1]
    assert [len(part) for part in rl.packing.unpad_sequence(padded, lengths, True)] == [2, 4, 1]
    layer = rl.nn.GRU(3, 4, batch_first=True)
    assert torch.equal(layer(padded, lengths=lengths)[1], layer(rl.Ragged(sequences))[1])
    if not isinstance(lengths, list):
        assert same(rl.Ragged.from_flat(torch.cat(sequences), lengths=lengths), sequences)
    assert same(rl.Ragged(sequences)[np.array([0, 2])[::-1]], [sequences[2], sequences[0]])


def test_lengths_that_are_read_only() -> None:
    lengths = np.array([2, 1])
    lengths.flags.writeable = False
    assert rl.Ragged.from_flat(torch.ones(3), lengths=lengths).lengths.tolist() == [2, 1]
    assert rl.Ragged.from_padded(torch.ones(2, 2), lengths).lengths.tolist() == [2, 1]
