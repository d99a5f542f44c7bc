"""Ragged: what it holds, and what it converts to and from."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils import rnn

import raglane as rl
from batches import random_batch, same
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from strategies import lengths, sequences_of

FEATURES = [(), (3,), (2, 3), (0,)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int16, torch.bool]


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("dtype", DTYPES)
@given(lengths=lengths())
def test_holds_the_sequences(
    lengths: list[int], features: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    sequences = sequences_of(lengths, features, dtype, device)
    batch = rl.Ragged(sequences)
    assert same(batch, sequences)
    assert len(batch) == len(lengths)
    assert batch.lengths_cpu.tolist() == lengths
    assert batch.lengths.tolist() == lengths
    assert batch.offsets.tolist() == np.cumsum([0, *lengths]).tolist()
    assert batch.cu_seqlens.dtype is torch.int32
    assert batch.segment_ids.tolist() == [
        i for i, length in enumerate(lengths) for _ in range(length)
    ]
    assert batch.positions.tolist() == [t for length in lengths for t in range(length)]
    longest = max(lengths, default=0)
    assert batch.max_length == longest
    assert batch.mask().tolist() == [[t < length for t in range(longest)] for length in lengths]
    room = longest * len(lengths)
    assert batch.density == (sum(lengths) / room if room else 1.0)
    assert batch.to_list() == [] if not lengths else same(batch, batch.to_list())


def test_tensors_that_no_kernel_reads() -> None:
    with pytest.raises(ShapeError, match=r"values must be at most 2\*\*31 - 1 elements"):
        _ = rl.Ragged.from_flat(
            torch.zeros(1, dtype=torch.uint8).expand(2**31), lengths=[2**31]
        ).cu_seqlens
    for sequences in ([torch.eye(2).to_sparse()], [torch.eye(2), torch.eye(2).to_sparse()]):
        with pytest.raises(ArgumentTypeError, match=r"sequences.* must be a dense tensor"):
            rl.Ragged(sequences)


@pytest.mark.parametrize(
    "array", [np.arange(3)[::-1], np.arange(3).astype(">i4"), np.arange(6)[::2]]
)
def test_any_numpy_array(array: Any) -> None:
    assert rl.Ragged([array]).values.tolist() == array.tolist()
    assert rl.Ragged.from_flat(array, lengths=[1, 2]).values.tolist() == array.tolist()


def test_python_and_numpy_sequences() -> None:
    batch = rl.Ragged([[1, 2], [], [3]])
    assert (batch.values.tolist(), batch.dtype) == ([1, 2, 3], torch.int64)
    assert rl.Ragged(
        iter([np.ones((2, 3), np.float32), np.zeros((0, 3), np.float32)])
    ).values.shape == (2, 3)


def test_indexing_one_sequence_is_a_view() -> None:
    batch = rl.Ragged([torch.randn(4, 2), torch.randn(3, 2)])
    storage = batch.values.untyped_storage().data_ptr()
    assert batch[1].untyped_storage().data_ptr() == storage
    assert batch[-1].tolist() == batch.values[4:].tolist()
    assert all(view.untyped_storage().data_ptr() == storage for view in batch)
    assert batch[:1].values.untyped_storage().data_ptr() == storage
    assert batch[np.int64(1)].shape == (3, 2)
    many = rl.Ragged([[place] for place in range(300)])
    assert many[np.array([-128, 127], np.int8)].values.tolist() == [172, 127]


@given(lengths=lengths(), data=st.data())
def test_selecting(lengths: list[int], data: st.DataObject) -> None:
    sequences = sequences_of(lengths)
    batch = (
        rl.Ragged(sequences) if sequences else rl.Ragged.from_flat(torch.empty(0, 3), lengths=[])
    )
    count = len(lengths)
    bounds = st.one_of(st.none(), st.integers(-count - 2, count + 2))
    chosen = slice(
        data.draw(bounds), data.draw(bounds), data.draw(st.sampled_from([None, 1, 2, -1, -3]))
    )
    assert same(batch[chosen], sequences[chosen])
    if count:
        index = data.draw(st.lists(st.integers(-count, count - 1), max_size=8))
        assert same(batch[torch.tensor(index, dtype=torch.int32)], [sequences[i] for i in index])
        assert same(batch[index], [sequences[i] for i in index])
    mask = torch.tensor(
        data.draw(st.lists(st.booleans(), min_size=count, max_size=count)), dtype=torch.bool
    )
    assert same(batch[mask], [s for s, keep in zip(sequences, mask.tolist(), strict=True) if keep])
    assert batch.order_by_length().tolist() == sorted(range(count), key=lambda i: lengths[i])
    assert batch.order_by_length(descending=True).tolist() == sorted(
        range(count), key=lambda i: -lengths[i]
    )


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("features", FEATURES)
@given(lengths=lengths(), value=st.sampled_from([0.0, -1.5, float("inf")]), extra=st.integers(0, 3))
def test_padded_there_and_back(
    lengths: list[int],
    features: tuple[int, ...],
    batch_first: bool,
    value: float,
    extra: int,
    device: torch.device,
) -> None:
    sequences = sequences_of(lengths, features, device=device)
    batch = rl.Ragged.from_flat(
        torch.cat([torch.empty(0, *features, dtype=torch.float64, device=device), *sequences]),
        lengths=lengths,
    )
    total = max(lengths, default=0) + extra
    padded, told = batch.to_padded(batch_first, value, total)
    expected = torch.full(
        (len(lengths), total, *features), value, dtype=torch.float64, device=device
    )
    for row, sequence in enumerate(sequences):
        expected[row, : len(sequence)] = sequence
    assert torch.equal(padded if batch_first else padded.transpose(0, 1), expected)
    assert told.tolist() == lengths
    assert told.device.type == "cpu"
    for given_lengths in (
        lengths,
        told,
        told.int(),
        told.to(device),
        np.array(lengths, dtype=np.int32),
    ):
        assert same(rl.Ragged.from_padded(padded, given_lengths, batch_first), sequences)


@given(lengths=lengths(), side=st.sampled_from(["left", "right", "holes"]))
def test_from_padded_with_a_mask(lengths: list[int], side: Any, device: torch.device) -> None:
    sequences = sequences_of(lengths, device=device)
    longest = max(lengths, default=0) + 2
    padded = torch.full(
        (len(lengths), longest, 3), float("nan"), dtype=torch.float64, device=device
    )
    mask = torch.zeros(len(lengths), longest, dtype=torch.bool, device=device)
    for row, sequence in enumerate(sequences):
        places = {
            "left": torch.arange(longest - len(sequence), longest),
            "right": torch.arange(len(sequence)),
            "holes": torch.randperm(longest)[: len(sequence)].sort().values,
        }[side].to(device)
        padded[row, places] = sequence
        mask[row, places] = True
    assert same(rl.Ragged.from_padded(padded, mask=mask), sequences)
    if side != "holes":
        assert same(rl.Ragged.from_padded(padded, lengths, padding_side=side), sequences)
    assert same(
        rl.Ragged.from_padded(padded.transpose(0, 1), batch_first=False, mask=mask.T), sequences
    )


def test_nested_shares_memory() -> None:
    batch = rl.Ragged([torch.ones(2, 3), torch.zeros(0, 3)])
    assert rl.Ragged.from_nested(batch.to_nested()).values.data_ptr() == batch.values.data_ptr()


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage")
def test_nested_strided_and_with_holes() -> None:
    strided = torch.nested.nested_tensor(
        [torch.ones(2, 3), torch.zeros(1, 3)], layout=torch.strided
    )
    assert rl.Ragged.from_nested(strided).lengths.tolist() == [2, 1]
    values = torch.arange(6.0)
    lengths = torch.tensor([2, 0, 1])
    holes = torch.nested.nested_tensor_from_jagged(
        values, torch.tensor([0, 3, 5, 6]), lengths=lengths
    )
    assert [part.tolist() for part in rl.Ragged.from_nested(holes)] == [[0, 1], [], [5]]
    with pytest.raises(ArgumentTypeError, match=r"torch\.nested"):
        rl.Ragged.from_nested(torch.ones(2, 3))


def test_numpy_shares_memory() -> None:
    array = np.arange(6, dtype=np.float32)
    array.flags.writeable = False
    values, offsets = rl.Ragged.from_flat(array, offsets=np.array([0, 2, 6])).to_numpy()
    assert values.__array_interface__["data"][0] == array.__array_interface__["data"][0]
    assert offsets.tolist() == [0, 2, 6]


@pytest.mark.parametrize(
    ("count", "place", "number"),
    [(1, 0, 1), (1, 1, 25), (200, 1, 10**9), (200, 1, -(2**63)), (200, -1, 19)],
)
def test_offsets_changed_in_place(count: int, place: int, number: int) -> None:
    batch: Any = rl.Ragged([torch.ones(5), torch.ones(15), *[torch.ones(0)] * count])
    batch.offsets[place] = number
    names = "first last reverse to_list to_padded to_packed to_numpy mask tolist"
    along = (
        "sum mean amax min logsumexp std prod any argmax softmax log_softmax cumsum sort flip diff"
    )
    calls = [
        *(getattr(batch, name) for name in names.split()),
        *(partial(getattr(batch, name), dim=1) for name in along.split() if name != "flip"),
        lambda: batch.flip(1),
        lambda: batch[:, 1:],
        lambda: torch.cat([batch, batch]),
        lambda: batch - torch.ones(len(batch), 1),
        lambda: batch.shift(1),
        lambda: batch.windows(2),
    ]
    calls += [
        lambda: batch.concat(batch),
        lambda: batch[:2],
        lambda: batch[[0]],
        *[lambda: batch[0]] * (place == 1),
    ]
    for call in calls:
        with pytest.raises(
            ArgumentError, match="Build a new batch, because its offsets were changed"
        ):
            call()


_ONES, _MASKED = torch.ones(2, 3), np.ma.array([1.0, 2.0], mask=[False, True])
_four: Any = partial(random_batch, size=4, dtype=torch.float32)
_flat: Any = rl.Ragged.from_flat
_from_padded: Any = rl.Ragged.from_padded


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: rl.Ragged([[1], [2, 3]])[5], IndexError, "2 sequences"),
        (lambda: rl.Ragged([[1], [2, 3]])["a"], ArgumentTypeError, "r\\[:, :5\\]"),
        (
            lambda: rl.Ragged([[1], [2, 3]])[torch.tensor([1, 2], dtype=torch.uint8)],
            ShapeError,
            "got 2",
        ),
        (lambda: _flat(torch.arange(6)), ArgumentTypeError, "neither"),
        (lambda: _flat(torch.arange(6), lengths=[6], offsets=[0, 6]), ArgumentTypeError, "both"),
        (
            lambda: _flat(torch.arange(6), lengths=[2, 2]),
            ShapeError,
            "lengths must be .*6 elements.*, got a sum of 4",
        ),
        (lambda: _flat(torch.arange(6), lengths=[2, -2, 6]), ShapeError, "-2 at index 1"),
        (lambda: _flat(torch.arange(6), lengths=[2.0, 4.0]), ArgumentTypeError, "integers"),
        (lambda: _flat(torch.arange(6), offsets=[1, 6]), ShapeError, "start with 0"),
        (lambda: _flat(torch.arange(6), offsets=[0, 4, 2, 6]), ShapeError, "-2 at index 1"),
        (lambda: rl.Ragged(_ONES), ArgumentTypeError, "from_padded"),
        (lambda: rl.Ragged([_ONES, torch.ones(2, 4)]), ShapeError, r"sequences\[1\].*\(L, 3\)"),
        (
            lambda: rl.Ragged([torch.ones(2), torch.ones(2).int()]),
            ShapeError,
            r"sequences\[1\].*int32",
        ),
        (lambda: rl.Ragged([_MASKED]), ArgumentTypeError, r"sequences\[0\].*\.filled\(numpy.nan\)"),
        (lambda: rl.Ragged([torch.ones(()), torch.ones(2)]), ShapeError, "a number"),
        (lambda: _from_padded(_ONES), ArgumentTypeError, "neither"),
        (
            lambda: _from_padded(_ONES, lengths=[1, 2, 3]),
            ShapeError,
            "3 lengths.*batch_first=False",
        ),
        (lambda: _from_padded(_ONES, lengths=[1, 4]), ShapeError, "3 steps.*length of 4"),
        (
            lambda: _from_padded(torch.ones(2), lengths=[1, 1]),
            ShapeError,
            "dimension of sequences and one of steps",
        ),
        (lambda: _from_padded([[1, 2]], lengths=[2]), ArgumentTypeError, "one padded tensor"),
        (lambda: _from_padded(_ONES, lengths=[1, 1], padding_side="up"), ShapeError, "left"),
        (
            lambda: _from_padded(_ONES, mask=torch.ones(3, 2).bool()),
            ShapeError,
            "first two dimensions",
        ),
        (lambda: rl.Ragged(["ab"]), ArgumentTypeError, r"sequences\[0\].*vocabulary"),
        (
            lambda: rl.Ragged([[1], None]),  # type: ignore[arg-type]
            ArgumentTypeError,
            r"sequences\[1\] must be .*got a NoneType",
        ),
        (lambda: rl.Ragged([[[1], [2, 3]]]), ArgumentTypeError, r"sequences\[0\].*of one shape"),
        (lambda: _flat([1, 2], lengths=[2**64]), ArgumentTypeError, "not an array of numbers"),
        (lambda: rl.Ragged([[1, 2]]).truncate(1.5), ArgumentTypeError, "whole number"),  # type: ignore[arg-type]
        (
            lambda: rl.Ragged([[1, 2]]).shift(1, 0.5),
            ArgumentTypeError,
            "fill_value must be .*got 0.5",
        ),
        (
            lambda: rl.Ragged([[1, 2]]).to_padded(padding_value=0.5),
            ArgumentTypeError,
            "padding_value .*got 0.5",
        ),
        (
            lambda: rl.Ragged([torch.ones(2, 0)]).to_arrow(),
            ArgumentTypeError,
            "features of at least 1",
        ),
        (lambda: rl.Ragged([[1.0]]) @ torch.ones(1), TypeError, "unsqueeze"),
        (lambda: 1 in rl.Ragged([[1]]), TypeError, "Ragged"),
        (
            lambda: bool(rl.Ragged([[1]]) == rl.Ragged([[1]])),
            TypeError,
            r"\(a == b\)\.all\(\)",
        ),
        (
            lambda: rl.Ragged([[1, 2]]).to_padded(total_length=1),
            ArgumentError,
            r"length, 2, got 1.*truncate\(1\)",
        ),
        (lambda: _four([3, 0, 2]) + _four([3, 0, 2])[:1], ShapeError, "the same lengths"),
        (lambda: _four([3, 0, 2]) + _four([3, 2, 0]), ShapeError, "length 2 for sequence 1"),
        (lambda: _four([3, 0, 2]) + torch.ones(5, 4), ShapeError, r"x\[:, None\]"),
        (
            lambda: (four := _four([3, 0, 2])) * four.map(lambda v: v.sum(-1)),
            ShapeError,
            "unsqueeze",
        ),
        (
            lambda: torch.matmul(_four([3, 0, 2]), torch.ones(2, 4, 2)),
            ShapeError,
            "each of 3 sequences",
        ),
        (lambda: _four([3, 0, 2]).map(lambda v: v[1:]), ShapeError, "one row for each of the 5"),
    ],
)
def test_mistakes_in_calls(call: Callable[[], Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        call()


def test_a_pack_is_no_list_of_sequences() -> None:
    for packed in (
        rnn.pack_sequence([torch.ones(3), torch.ones(2)]),
        rnn.pack_sequence([torch.ones(2, 4), torch.ones(3, 4)], enforce_sorted=False),
    ):
        with pytest.raises(
            ArgumentTypeError,
            match=r"sequences must be a list .*got one PackedSequence\..*Ragged\.from_packed\(packed\)",
        ):
            rl.Ragged(packed)  # type: ignore[arg-type]
        assert len(rl.Ragged.from_packed(packed)) == 2


def test_torchs_functions_of_packs_name_the_methods_of_a_batch() -> None:
    batch: Any = rl.Ragged([torch.ones(3), torch.ones(2)])
    assert not hasattr(batch, "batch_sizes")
    assert not hasattr(batch, "nothing")
    calls: dict[str, Callable[[], object]] = {
        r"attribute batch_sizes of a PackedSequence\. Call r\.to_padded\(\)": lambda: (
            rnn.pad_packed_sequence(batch)
        ),
        r"attribute batch_sizes of.*r\.to_list\(\)": lambda: rnn.unpack_sequence(batch),
        r"because a Ragged has no padding.*Call r\.to_packed\(\)": lambda: rnn.pack_padded_sequence(
            batch, [3, 2]
        ),
        r"because a Ragged has no padding.*r\.to_list\(\) for its": lambda: rnn.unpad_sequence(
            batch, torch.tensor([3, 2])
        ),
    }
    for words, call in calls.items():
        with pytest.raises((AttributeError, ArgumentTypeError), match=words):
            call()
