"""The index arithmetic between the layouts: on arrays and on tensors, against loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from raglane.packing import layouts
from raglane.packing.flat import flat_to_padded, flatten_packed, pack_flat, padded_to_flat
from raglane.packing.layouts import conjugate, inverse, packed_layout, rows_of
from raglane.segments import offsets_from_lengths
from strategies import lengths as any_lengths
from strategies import sequences_of


def flat(lengths: list[int], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    counts = torch.tensor(lengths, dtype=torch.int64)
    values = torch.arange(sum(lengths) * 2, dtype=torch.float64, device=device).view(-1, 2)
    return values, offsets_from_lengths(counts).to(device), counts


def elements(lengths: list[int]) -> list[tuple[int, int]]:
    """Every (sequence, step) in packed order: longest first, ties in order."""
    order = sorted(range(len(lengths)), key=lambda sequence: -lengths[sequence])
    longest = max(lengths, default=0)
    return [(sequence, step) for step in range(longest) for sequence in order if step < lengths[sequence]]


@given(any_lengths())
def test_packed_layout(device: torch.device, lengths: list[int]) -> None:
    values, offsets, counts = flat(lengths, device)
    index, batch_sizes, sorted_indices = packed_layout(counts, offsets)
    starts = offsets.tolist()
    assert index.tolist() == [starts[sequence] + step for sequence, step in elements(lengths)]
    assert index.device == sorted_indices.device == values.device
    assert batch_sizes.is_cpu
    assert batch_sizes.tolist() == [sum(n > step for n in lengths) for step in range(max(lengths, default=0))]
    assert sorted_indices.tolist() == sorted(range(len(lengths)), key=lambda sequence: -lengths[sequence])


@given(any_lengths())
def test_packed_and_back(device: torch.device, lengths: list[int]) -> None:
    values, offsets, counts = flat(lengths, device)
    packed = pack_flat(values, offsets, counts)
    assert packed.sorted_indices is not None
    assert packed.unsorted_indices is not None
    assert packed.unsorted_indices[packed.sorted_indices].tolist() == list(range(len(lengths)))
    back, back_lengths = flatten_packed(packed)
    assert torch.equal(back, values)
    assert torch.equal(back_lengths, counts)


def test_a_pack_that_torch_broke_ties_for(device: torch.device) -> None:
    lengths = [2, 3, 2, 3, 3, 2, 2, 3, 1, 1]
    sequences = sequences_of(lengths, device=device)
    packed = torch.nn.utils.rnn.pack_sequence(sequences, enforce_sorted=False)
    values, counts = flatten_packed(packed)
    assert torch.equal(values, torch.cat(sequences))
    assert counts.tolist() == lengths


def test_a_pack_that_has_the_inverse_order_alone(device: torch.device) -> None:
    packed = pack_flat(*flat([1, 3, 2], device))
    values, lengths = flatten_packed(packed._replace(sorted_indices=None))
    assert values[:, 0].tolist() == [0, 2, 4, 6, 8, 10]
    assert lengths.tolist() == [1, 3, 2]


@given(any_lengths(), st.integers(0, 2), st.booleans(), st.booleans())
def test_padded_and_back(device: torch.device, lengths: list[int], extra: int, batch_first: bool, left: bool) -> None:
    values, offsets, counts = flat(lengths, device)
    count, steps = len(lengths), max(lengths, default=0) + extra
    side = "left" if left else "right"
    padded = flat_to_padded(values, offsets, steps, batch_first, -1.0, side)
    assert padded.is_contiguous()
    expected = torch.full((count, steps, 2), -1.0, dtype=torch.float64, device=device)
    for sequence, length in enumerate(lengths):
        first = steps - length if left else 0
        expected[sequence, first : first + length] = values[offsets[sequence] : offsets[sequence + 1]]
    assert torch.equal(padded, expected if batch_first else expected.transpose(0, 1))
    back, back_lengths, back_offsets = padded_to_flat(padded, lengths, batch_first, side)
    assert torch.equal(back, values)
    assert torch.equal(back_lengths, counts)
    assert torch.equal(back_offsets, offsets)
    assert back_offsets.device == values.device


def test_the_lengths_given_are_not_kept(device: torch.device) -> None:
    given_lengths = torch.tensor([2, 1])
    _, lengths, offsets = padded_to_flat(torch.zeros(2, 2, device=device), given_lengths)
    given_lengths.zero_()
    assert lengths.tolist() == [2, 1]
    assert offsets.tolist() == [0, 2, 3]


@given(any_lengths(), st.integers(0, 2), st.booleans())
def test_tensors_give_what_arrays_give(lengths: list[int], extra: int, left: bool) -> None:
    kit = layouts._kit(torch.device("cpu"))
    host = np.array(lengths, dtype=np.int64)
    there = torch.from_numpy(host)
    total, steps = sum(lengths), max(lengths, default=0) + extra
    for strides in ((1, max(len(lengths), 1)), (max(steps, 1), 1)):
        on_host = layouts._padded(layouts._HOST, host, total, *strides, steps if left else None)
        assert layouts._padded(kit, there, total, *strides, steps if left else None).tolist() == on_host.tolist()
        sizes = conjugate(host, max(lengths, default=0))
        before = sizes.cumsum() - sizes
        starts = (-host).argsort(kind="stable") * strides[0]
        for given_starts in (None, starts):
            on_host = layouts._packed(layouts._HOST, given_starts, sizes, before, total, *strides)
            as_tensor = None if given_starts is None else torch.from_numpy(given_starts)
            arguments = as_tensor, torch.from_numpy(sizes), torch.from_numpy(before), total
            assert layouts._packed(kit, *arguments, *strides).tolist() == on_host.tolist()
    ranks = (-host).argsort(kind="stable").argsort()
    on_host = layouts._unpacked(layouts._HOST, ranks, host, sizes, total)
    on_device = layouts._unpacked(kit, torch.from_numpy(ranks), there, torch.from_numpy(sizes), total)
    assert on_device.tolist() == on_host.tolist()


@given(any_lengths())
def test_conjugate_goes_both_ways(lengths: list[int]) -> None:
    sizes = conjugate(np.array(lengths, dtype=np.int64), max(lengths, default=0))
    assert conjugate(sizes, len(lengths)).tolist() == sorted(lengths, reverse=True)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_inverse(dtype: torch.dtype, device: torch.device) -> None:
    permutation = torch.randperm(9, device=device).to(dtype)
    assert inverse(permutation).dtype is dtype
    assert inverse(permutation)[permutation.long()].tolist() == list(range(9))


@pytest.mark.parametrize("batch_first", [False, True])
def test_rows_are_a_view_where_memory_allows(batch_first: bool, device: torch.device) -> None:
    whole = torch.randn(3, 4, 5, device=device)
    for padded in (whole, whole.transpose(0, 1), whole[:, :, :2], whole[:2], whole.transpose(0, 1)[:, :2]):
        rows, (sequence_stride, step_stride) = rows_of(padded, batch_first)
        assert rows.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        by_step = padded.transpose(0, 1) if batch_first else padded
        for step in range(by_step.shape[0]):
            for sequence in range(by_step.shape[1]):
                row = rows[sequence * sequence_stride + step * step_stride]
                assert torch.equal(row, by_step[step, sequence])


def test_compiled_whole_and_for_every_batch() -> None:
    def there_and_back(values: Tensor, offsets: Tensor) -> Tensor:
        return flat_to_padded(values, offsets, 5, batch_first=True).sum(1)

    compiled = torch.compile(there_and_back, backend="eager", fullgraph=True)
    for lengths in ([2, 5, 1], [4, 3, 1]):
        values, offsets, _ = flat(lengths, torch.device("cpu"))
        assert torch.equal(compiled(values, offsets), there_and_back(values, offsets))
