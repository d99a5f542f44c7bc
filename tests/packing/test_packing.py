"""The packing functions against torch's, and against loops for cases that torch does not
support.
"""

from __future__ import annotations

import inspect
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.utils import rnn

from raglane import packing
from raglane.packing import PackedSequence, conversion_operators
from raglane.packing.convert import flatten_padded
from raglane.packing.flat_values import flatten_packed
from raglane.packing.functions import _rank_on_device, _rank_on_host
from strategies import lengths as any_lengths
from strategies import sequences_of

FEATURES = st.sampled_from([(), (1,), (3,), (2, 5)])
DTYPES = st.sampled_from(
    [
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.uint8,
        torch.bool,
        torch.complex64,
    ]
)
PADDING = st.sampled_from([0.0, 1.0, -0.0, 7.0])
FULL_LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=7)


def stable_order(lengths: list[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda sequence: -lengths[sequence])


def slow_pack(sequences: list[Tensor], order: list[int]) -> tuple[list[Tensor], list[int]]:
    """Step by step and sequence by sequence: the elements in packed order, and the batch sizes."""
    steps = range(max((len(sequence) for sequence in sequences), default=0))
    running = [[sequences[b][step] for b in order if step < len(sequences[b])] for step in steps]
    return [element for part in running for element in part], [len(part) for part in running]


def slow_pad(
    sequences: list[Tensor], steps: int, value: float, batch_first: bool, left: bool = False
) -> Tensor:
    """Row by row; at least one sequence."""
    rows = []
    for sequence in sequences:
        padding = sequence.new_full((steps - len(sequence), *sequence.shape[1:]), value)
        rows.append(torch.cat([padding, sequence] if left else [sequence, padding]))
    return torch.stack(rows, 0 if batch_first else 1)


def assert_pack(
    packed: PackedSequence, sequences: list[Tensor], order: list[int], listed: bool
) -> None:
    elements, sizes = slow_pack(sequences, order)
    assert type(packed) is PackedSequence
    assert_same(packed.batch_sizes, torch.tensor(sizes, dtype=torch.int64, device="cpu"))
    assert_same(packed.data, torch.stack(elements) if elements else sequences[0][:0])
    assert (packed.sorted_indices is not None) == (packed.unsorted_indices is not None) == listed
    if packed.sorted_indices is not None and packed.unsorted_indices is not None:
        index = torch.tensor(order, device=packed.data.device)
        assert_same(packed.sorted_indices, index)
        assert_same(packed.unsorted_indices, index.argsort())


def assert_same(ours: Any, theirs: Any) -> None:
    if theirs is None or isinstance(theirs, (list, tuple)):
        assert type(ours) is type(theirs)
        for mine, other in zip(ours or (), theirs or (), strict=True):
            assert_same(mine, other)
        return
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("name", [name for name in packing.__all__ if name != "PackedSequence"])
def test_signature_is_torchs(name: str) -> None:
    ours = inspect.signature(getattr(packing, name)).parameters.values()
    theirs = inspect.signature(getattr(rnn, name)).parameters.values()
    assert [(p.name, p.default, p.kind) for p in ours] == [
        (p.name, p.default, p.kind) for p in theirs
    ]


@given(FULL_LENGTHS, FEATURES, DTYPES, st.booleans(), PADDING, st.integers(0, 3), st.data())
def test_equal_to_torch(
    device: torch.device,
    lengths: list[int],
    features: tuple[int, ...],
    dtype: torch.dtype,
    batch_first: bool,
    padding: float,
    extra: int,
    data: st.DataObject,
) -> None:
    sequences = sequences_of(lengths, features, dtype, device)
    for side in ("left", "right"):
        arguments: Any = (sequences, batch_first, padding, side)
        assert_same(packing.pad_sequence(*arguments), rnn.pad_sequence(*arguments))
    padded = rnn.pad_sequence(sequences, batch_first)
    assert_same(packing.unpad_sequence(padded, torch.tensor(lengths), batch_first), sequences)
    falling = sorted(lengths, reverse=True)
    ours = packing.pack_padded_sequence(padded, falling, batch_first)
    assert_same(ours, rnn.pack_padded_sequence(padded, falling, batch_first))
    total = max(lengths) + extra if data.draw(st.booleans()) else None
    unsorted = rnn.pack_sequence(sequences, enforce_sorted=False)
    negative = [
        torch._neg_view(-x) for x in (unsorted.batch_sizes, cast(Tensor, unsorted.sorted_indices))
    ]
    view = unsorted._replace(batch_sizes=negative[0], sorted_indices=negative[1])
    assert_same(packing.unpack_sequence(view), sequences)
    for pack in (ours, unsorted, unsorted._replace(sorted_indices=None)):
        arguments_back = (pack, batch_first, padding, total)
        assert_same(
            packing.pad_packed_sequence(*arguments_back), rnn.pad_packed_sequence(*arguments_back)
        )
        assert_same(packing.unpack_sequence(pack), rnn.unpack_sequence(pack))
    order = stable_order(lengths)
    assert_pack(
        packing.pack_sequence(sequences, enforce_sorted=False), sequences, order, listed=True
    )
    in_order = [sequences[sequence] for sequence in order]
    assert_same(packing.pack_sequence(in_order), rnn.pack_sequence(in_order))


@given(st.permutations(range(7)))
def test_invert_permutation(device: torch.device, permutation: list[int]) -> None:
    index = torch.tensor(permutation, device=device)
    assert_same(*[module.invert_permutation(torch._neg_view(-index)) for module in (packing, rnn)])
    assert_same(packing.invert_permutation(index.to(torch.uint8)), index.argsort().to(torch.uint8))
    assert packing.invert_permutation(None) is None
    assert_same(packing.invert_permutation(index[:0]), index[:0])


@pytest.mark.parametrize("batch_first", [False, True])
def test_differentiable_twice(batch_first: bool, device: torch.device) -> None:
    lengths = [2, 0, 3, 1]
    first, second, third, fourth = sequences_of(lengths, (2,), device=device, requires_grad=True)
    padded = torch.randn(4, 3, 2, dtype=torch.float64, device=device)
    padded = (padded if batch_first else padded.transpose(0, 1)).clone().requires_grad_()
    pack = packing.pack_sequence(sequences_of(lengths, (2,), device=device), enforce_sorted=False)
    values = pack.data.clone().requires_grad_()

    def squares(x: Tensor) -> Tensor:
        return x**2

    if moved := flatten_packed(pack):  # by the kernels of a CPU
        assert torch.func.vmap(moved[1].from_flat)(moved[0][None])[0].equal(pack.data)
    wide = [x.detach().repeat(1, 5).requires_grad_() for x in (first, second, third)]
    bounds, known = (
        torch.tensor([0, 2, 2, 5, 6], device=device),
        torch.tensor(lengths, dtype=torch.int32),
    )
    to_flat, from_flat = conversion_operators.padded_to_flat, conversion_operators.padded_from_flat
    calls: Any = [
        (to_flat, (padded, known, batch_first)),
        (from_flat, (values, bounds, batch_first, 5)),
    ]
    for operator, inputs in (
        *calls,
        (conversion_operators._elements, (padded, bounds, batch_first, 6)),
    ):
        torch.library.opcheck(
            operator, inputs, test_utils=("test_faketensor", "test_autograd_registration")
        )
    cases: list[tuple[Any, tuple[Tensor, ...]]] = [
        (lambda x: squares(to_flat(x, known, batch_first)[0]), (padded,)),
        (lambda x: squares(from_flat(x, bounds, batch_first, 5)), (values,)),
        (
            lambda *x: squares(packing.pad_sequence(x, batch_first, 2.0, "left")),
            (first, second, third, fourth),
        ),
        (lambda *x: squares(packing.pad_sequence(x, batch_first, 2.0)), tuple(wide)),
        (lambda *x: squares(packing.pack_sequence(x, False).data), (first, second, third, fourth)),
        (
            lambda x: squares(packing.pack_padded_sequence(x, lengths, batch_first, False).data),
            (padded,),
        ),
        (lambda x: tuple(map(squares, packing.unpad_sequence(x, lengths, batch_first))), (padded,)),
        (
            lambda x: squares(packing.pad_packed_sequence(pack._replace(data=x), batch_first)[0]),
            (values,),
        ),
        (lambda x: tuple(map(squares, packing.unpack_sequence(pack._replace(data=x)))), (values,)),
    ]
    for function, inputs in cases:
        assert gradcheck(function, inputs)
        assert gradgradcheck(function, inputs)


@given(any_lengths(), FEATURES | st.just((0,)), st.booleans(), st.booleans(), st.integers(0, 2))
def test_empty_sequences_round_trip(
    device: torch.device,
    lengths: list[int],
    features: tuple[int, ...],
    batch_first: bool,
    falling: bool,
    extra: int,
) -> None:
    lengths = sorted(lengths, reverse=True) if falling else lengths
    count, longest = len(lengths), max(lengths, default=0)
    sequences = sequences_of(lengths, features, device=device)
    shape = (count, longest + extra) if batch_first else (longest + extra, count)
    padded = torch.full((*shape, *features), torch.nan, dtype=torch.float64, device=device)
    if count:
        padded = slow_pad(sequences, longest + extra, torch.nan, batch_first)
    order = stable_order(lengths)
    packs = [packing.pack_padded_sequence(padded, lengths, batch_first, enforce_sorted=falling)]
    if count:
        assert_same(
            packing.pad_sequence(sequences, batch_first, 3.0),
            slow_pad(sequences, longest, 3.0, batch_first),
        )
        packs.append(packing.pack_sequence(sequences, enforce_sorted=falling))
    for packed in packs:
        if count:
            assert_pack(packed, sequences, order, listed=not falling or 0 in lengths)
        back, counts = packing.pad_packed_sequence(packed, batch_first, torch.nan, longest + extra)
        torch.testing.assert_close(back, padded, rtol=0, atol=0, equal_nan=True)
        assert_same(counts, torch.tensor(lengths, dtype=torch.int64, device="cpu"))
        assert_same(packing.unpack_sequence(packed), sequences)
    assert_same(packing.unpad_sequence(padded, lengths, batch_first), sequences)


def test_no_sequence_and_no_element(device: torch.device) -> None:
    nothing = packing.pack_padded_sequence(torch.zeros(3, 0, 2, device=device), [])
    assert (nothing.data.shape, nothing.batch_sizes.tolist(), nothing.sorted_indices) == (
        (0, 2),
        [],
        None,
    )
    all_empty: Any = packing.pack_padded_sequence(torch.zeros(0, 3, 2, device=device), [0, 0, 0])
    assert all_empty.batch_sizes.tolist() == []
    assert all_empty.sorted_indices.tolist() == [0, 1, 2]
    padded, lengths = packing.pad_packed_sequence(all_empty, total_length=2)
    assert (padded.shape, lengths.tolist()) == ((2, 3, 2), [0, 0, 0])
    assert packing.unpack_sequence(nothing) == []


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize(
    "lengths",
    [
        (1, 3, 0, 3),
        np.array([1, 3, 0, 3], dtype=np.int32),
        [1, torch.tensor(3), np.int64(0), 3],
        torch._neg_view(torch.tensor([-1, -3, 0, -3])),
        *(
            torch.tensor([1, 3, 0, 3]).to(dtype)
            for dtype in (torch.int64, torch.int8, torch.uint8, torch.uint64)
        ),
    ],
)
def test_lengths_of_every_kind(lengths: Any, where: str, device: torch.device) -> None:
    if where == "device" and isinstance(lengths, Tensor):
        lengths = lengths.to(device)
    padded = torch.arange(12, device=device).view(3, 4)
    packed: Any = packing.pack_padded_sequence(padded, lengths, enforce_sorted=False)
    assert packed.data.tolist() == [1, 3, 0, 5, 7, 9, 11]
    assert packed.batch_sizes.tolist() == [3, 2, 2]
    assert packed.sorted_indices.tolist() == [1, 3, 0, 2]
    assert [x.tolist() for x in packing.unpad_sequence(padded, lengths)] == [
        [0],
        [1, 5, 9],
        [],
        [3, 7, 11],
    ]


@given(any_lengths(), st.integers(0, 2), st.booleans())
def test_ranks_on_a_device_are_those_on_the_host(
    device: torch.device, lengths: list[int], extra: int, falling: bool
) -> None:
    lengths = sorted(lengths, reverse=True) if falling else lengths
    steps = max(lengths, default=0) + extra
    host_sizes, host_order = _rank_on_host(np.array(lengths, dtype=np.int64), steps, falling)
    sizes, order = _rank_on_device(
        torch.tensor(lengths, dtype=torch.int64, device=device), steps, falling
    )
    assert sizes.tolist() == host_sizes.tolist()
    assert (None if order is None else order.tolist()) == (
        None if host_order is None else host_order.tolist()
    )


@pytest.mark.parametrize(
    ("lengths", "enforce_sorted", "words"),
    [
        ([1, 4], False, "length of 4"),
        ([2, -1], True, "length of -1"),
        ([1, 2], True, r"enforce_sorted=False"),
    ],
)
def test_wrong_lengths_on_a_device(
    lengths: list[int], enforce_sorted: bool, words: str, device: torch.device
) -> None:
    with pytest.raises(RuntimeError, match=words):
        _rank_on_device(torch.tensor(lengths, device=device), 3, enforce_sorted)


@pytest.mark.parametrize("batch_first", [False, True])
def test_any_memory_layout(batch_first: bool, device: torch.device) -> None:
    lengths = [2, 4, 1]
    shape = (3, 4) if batch_first else (4, 3)
    # The input is left alone, and results are free.
    numbers = torch.arange(12.0, device=device).view(shape).requires_grad_()
    for sequence in packing.unpad_sequence(numbers, lengths, batch_first):
        sequence.add_(100)
    assert torch.equal(numbers, torch.arange(12.0, device=device).view(shape))
    whole = torch.randn(4, 6, 4, 10, device=device)
    layouts = [
        whole[: shape[0], : shape[1], 0, :5],
        whole[: shape[1], : shape[0], 0, :5].transpose(0, 1),
        whole[: shape[1], : shape[0]].contiguous().transpose(0, 1),
        whole[0, 0, 0].expand(*shape, 10),
        whole[: shape[0], : shape[1]].transpose(2, 3),
    ]
    layouts.append(torch.complex(whole, whole + 1)[: shape[0], : shape[1], 0, :5].conj())
    for padded in (*layouts, *map(torch._neg_view, layouts[:-1])):
        plain = padded.resolve_neg().resolve_conj().contiguous()
        pairs = [(x, torch.tensor(lengths), batch_first) for x in (padded, plain)]
        assert_same(*[packing.pack_padded_sequence(*pair, False).data for pair in pairs])
        assert_same(*[packing.unpad_sequence(*pair) for pair in pairs])
        flat, expected = (flatten_padded(x, lengths, batch_first) for x in (padded, plain))
        assert_same(flat.restore(flat.values), expected.restore(expected.values))


def test_nothing_waits_for_a_device(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("a CPU is never waited for")
    sequences = sequences_of([2, 0, 5], (3,), torch.float32, device)
    padded = torch.randn(5, 3, 2, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        packing.pack_sequence(sequences, enforce_sorted=False)
        packing.pad_sequence(sequences)
        packing.pack_padded_sequence(padded, [5, 3, 1])
        packing.unpad_sequence(padded, [5, 3, 1])
        packing.pad_packed_sequence(packing.pack_padded_sequence(padded, [5, 3, 1]))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.uint8, -1),
        (torch.int64, float("nan")),
        (torch.float16, 1e9),
        (torch.uint16, -1),
        (torch.uint32, 1e30),
    ],
)
def test_a_padding_value_outside_the_dtype(
    dtype: torch.dtype, value: float, device: torch.device
) -> None:
    sequences = [torch.ones(2, device=device).to(dtype), torch.ones(1, device=device).to(dtype)]
    for module in (rnn, packing):
        with pytest.raises(RuntimeError, match="overflow"):
            module.pad_sequence(sequences, padding_value=value)


@pytest.mark.parametrize(
    "sequences",
    [[torch.ones(2), torch.tensor([1, 2, 3])], [torch.rand(9, 8000), torch.rand(2, 8000)]],
)
def test_sequences_of_several_dtypes_take_the_first_where_nothing_is_lost(
    sequences: list[Tensor],
) -> None:
    """And batches of many numbers, which are concatenated."""
    for arguments in ((True, 2.0, "left"), (True, 2.0, "right")):
        assert_same(*[module.pad_sequence(sequences, *arguments) for module in (packing, rnn)])
    value: Any = torch.tensor(2j)
    assert (
        packing.pad_sequence(
            [x.to(torch.cfloat) for x in sequences], padding_value=value
        ).imag.sum()
        > 0
    )
