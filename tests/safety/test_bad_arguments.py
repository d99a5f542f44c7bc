"""Wrong arguments raise the library's errors, each with the argument, its value, the rule and the fix.

Public functions are called with one argument replaced by objects of many kinds. An object may be accepted (``None`` is
often a default), but no other error may be raised.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import raglane as rl
from raglane import Ragged, segments
from raglane.data import BatchLimit, BatchSampler, Records, SequenceDataset, TBPTTSampler
from raglane.data.records import offsets_of
from raglane.errors import ArgumentError, ArgumentTypeError, RaglaneError, ShapeError
from raglane.nn import losses
from right_calls import (
    LENGTHS,
    OFFSETS,
    VALUES,
    Call,
    batch_of,
    calls_of_data,
    calls_of_nn,
    calls_of_packing,
    calls_of_plot,
    calls_of_ragged,
    things,
)

pa = pytest.importorskip("pyarrow")


def _faults(function: Callable[..., Any], right: dict[str, Any]) -> Iterator[str]:
    """Yield the errors that are neither the library's nor an IndexError with a fix."""
    for name in right:
        for thing in things():
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of other libraries, about the objects
                    function(**{**right, name: thing})
            except RaglaneError as error:
                message = str(error)
                if not re.fullmatch(r".+ must be .+, got .+\. .+\.", message):
                    yield f"{name}: a message that does not teach: {message}"
            except IndexError as error:
                if " must be " not in str(error):
                    yield f"{name}: an IndexError that does not teach: {error}"
            except Exception as error:
                kind = type(thing).__name__
                yield f"{name}: a {kind} gives {type(error).__name__}: {str(error)[:100]}"


@pytest.mark.parametrize("calls", [calls_of_ragged, calls_of_packing, calls_of_data, calls_of_nn, calls_of_plot])
def test_whatever_is_given_is_refused_in_the_librarys_own_words(calls: Callable[[], dict[str, Call]]) -> None:
    table = calls()
    for name, (function, right) in table.items():
        if name != "read":
            function(**right)  # the original arguments are valid
        faults = list(_faults(function, right))
        assert not faults, (name, faults[:5])


def test_offsets_that_do_not_describe_the_values_never_reach_torch() -> None:
    """Torch writes beyond its memory if repeats do not add up to the given size."""
    for wrong in (
        [0, 2, 2, 4],  # beyond the values
        [0, 2, 2, 2],  # short of them
        [1, 2, 2, 3],
        [-1, 2, 2, 3],
        [0, 3, 2, 3],  # falling
        [0, 5, -2, 3],
        [0, 2**62, 2**62, 3],
        [0, 2**63 - 1, -(2**63), 3],
        [0],
        [],
    ):
        with pytest.raises(ShapeError, match=r"offsets must be .*, got .*"):
            Ragged.from_flat(VALUES, offsets=torch.tensor(wrong, dtype=torch.int64))
    for dtype in (torch.float32, torch.bool):
        with pytest.raises(ArgumentTypeError, match=r"offsets must be .*got torch"):
            Ragged.from_flat(VALUES, offsets=OFFSETS.to(dtype))
    with pytest.raises(ShapeError, match=r"offsets must be .*got shape \(1, 4\)"):
        Ragged.from_flat(VALUES, offsets=OFFSETS[None])
    with pytest.raises(ShapeError, match=r"offsets must be .*got a tensor without data, on meta"):
        Ragged.from_flat(VALUES, offsets=OFFSETS.to("meta"))


def test_lengths_that_nobody_can_count() -> None:
    for lengths in ([-1, 4], [2**62, 1], [2**62, 2**62], [2**63 - 1, 2**63 - 1, 2]):
        given = torch.tensor(lengths)
        for function in (
            offsets_of,
            lambda wrong: Ragged.from_flat(torch.ones(3), lengths=wrong),
            lambda wrong: BatchSampler(wrong, BatchLimit(sequences=1)),
            lambda wrong: Ragged.from_padded(torch.ones(len(wrong), 3), wrong),
            lambda wrong: rl.packing.pack_padded_sequence(torch.ones(len(wrong), 3), wrong, True, False),
        ):
            with pytest.raises(ArgumentError, match="length"):
                function(given)


def test_numbers_that_a_dtype_cannot_hold() -> None:
    """They would be truncated or wrap around."""
    whole, yes = Ragged([[1], []]).to(torch.int8), Ragged([[True], []])
    numbers: list[Any] = [0.5, 128, -129, math.nan, math.inf, 2**70, 1j]
    for wrong in numbers:
        for function in (
            whole.first,
            whole.max,
            lambda fill: whole.shift(1, fill),
            lambda fill: whole.to_padded(True, fill),
        ):
            with pytest.raises(ArgumentTypeError, match=r"the rule: a value of torch\.int8"):
                function(wrong)
    with pytest.raises(ArgumentTypeError, match=r"empty must be a value of torch\.bool.*, got 2"):
        yes.last(2)
    with pytest.raises(ArgumentTypeError, match=r"empty must be a value of torch\.float32.*, got 1j"):
        batch_of().first(1j)  # type: ignore[arg-type]
    assert whole.first(-128).tolist() == [1, -128]
    assert yes.last(True).tolist() == [True, True]


def test_dtypes_in_which_an_operation_means_nothing() -> None:
    whole, many = torch.tensor([1, 2, 3]), torch.ones(3, dtype=torch.complex64)
    for name, values in (
        *((name, whole) for name in ("mean", "softmax", "logsumexp")),
        *((name, many) for name in ("max", "min", "softmax", "logsumexp")),
    ):
        with pytest.raises(ArgumentTypeError, match=f"{name} must be .*, got {values.dtype}"):
            getattr(Ragged.from_flat(values, offsets=OFFSETS), name)()


def test_an_index_chooses_among_the_sequences() -> None:
    batch = batch_of()
    records = Records(np.zeros((3, 1), np.float32), offsets_of([2, 0, 1]), channels=("x0",))
    dataset = SequenceDataset(VALUES, OFFSETS)
    functions: list[Callable[[Any], Any]] = [batch.select, records.select, dataset.subset]
    for choose in functions:
        for right in ([2, -3], np.array([2, 0]), torch.tensor([-1, 0], dtype=torch.int8), [True, False, True]):
            assert sorted(choose(right).lengths.tolist()) == [1, 2]
        for wrong in ([3], [-4], torch.tensor([9]), np.array([2**64 - 1], np.uint64), np.array([2**63], np.uint64)):
            with pytest.raises(
                IndexError, match=r"index must be .*from -3 to 2, since there are 3 sequences.*, got "
            ) as caught:
                choose(wrong)
            assert isinstance(caught.value, ShapeError)
        for kind in ([1.5], [math.nan], ["a"], [None], np.array([1.5]), torch.tensor([0.0])):
            with pytest.raises(ArgumentTypeError, match=r"index must be .*integer or bool.*, got "):
                choose(kind)
        for shape in ([[0]], [True], np.array([True, False]), torch.tensor(0)):
            with pytest.raises(ShapeError, match="one dimension, and for a mask one entry for each of the 3"):
                choose(shape)
    with pytest.raises(IndexError, match=r"index must be the batch has 3 sequences, got 3. "):
        batch[3]
    with pytest.raises(IndexError, match=r"index must be there are 3 sequences, got 3. "):
        dataset[3]


def test_a_nested_tensor_whose_offsets_were_changed() -> None:
    for wrong in ([1, 2, 3], [0, 3, 2], [0, 2, 4], [0, -1, 3], [0, 2, 2]):
        nested: Any = torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged)
        nested.offsets().copy_(torch.tensor(wrong))
        with pytest.raises(ShapeError, match=r"nested must be .* elements of values.*, got .*"):
            Ragged.from_nested(nested)
    for starts, lengths in (([0, 2], [2, 2]), ([0, -1], [1, 1]), ([0, 2], [-1, 1])):
        values = torch.ones(3)
        nested = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 2, 3]), torch.tensor([1, 1]))
        nested.offsets()[:2] = torch.tensor(starts)
        nested.lengths().copy_(torch.tensor(lengths))
        with pytest.raises(ShapeError, match=r"nested must be .*got offsets and lengths that reach beyond its values"):
            Ragged.from_nested(nested)


def test_a_nested_tensor_that_is_changed_later_changes_no_batch() -> None:
    nested: Any = torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged)
    batch = Ragged.from_nested(nested)
    nested.offsets().copy_(torch.tensor([0, 9, 9]))
    assert batch.lengths.tolist() == [2, 1]


def test_nothing_on_a_device_is_read_to_check_it() -> None:
    """A tensor on meta has no data, so reading it fails."""
    values, offsets = torch.ones(3, device="meta"), torch.tensor([0, 2, 2, 3]).to("meta")
    assert segments.sum(values, offsets).shape == (3,)
    assert segments.last(values, offsets).shape == (3,)
    assert segments.cumsum(values, offsets, 2).shape == (3,)
    assert segments.spread(torch.ones(3, device="meta"), offsets, 3).shape == (3,)
    assert Ragged.from_flat(values, offsets=offsets).sum().shape == (3,)
    batch = Ragged.from_flat(torch.ones(3, 4, device="meta"), offsets=offsets)
    classes = Ragged.from_flat(torch.ones(3, dtype=torch.int64, device="meta"), offsets=offsets)
    assert losses.cross_entropy(batch, classes).shape == ()


def test_a_huge_number_of_streams_takes_no_room_before_the_first_chunk() -> None:
    assert len(TBPTTSampler(batch_of(), 2**31 - 1, 1)) == 2
    with pytest.raises(ArgumentError, match=r"batch_size must be .*at most 2147483647.*, got "):
        TBPTTSampler(batch_of(), 2**31, 1)


def test_a_pack_whose_order_was_changed_is_not_padded() -> None:
    packed = rl.packing.pack_sequence([torch.ones(1), torch.ones(2)], enforce_sorted=False)
    assert packed.sorted_indices is not None
    for wrong in ([0, 0], [1, 2], [-1, 0]):
        packed.sorted_indices.copy_(torch.tensor(wrong))
        for function in (rl.packing.pad_packed_sequence, rl.packing.unpack_sequence, Ragged.from_packed):
            with pytest.raises(ShapeError, match="each of 0 to 1 once"):
                function(packed)


def test_batches_of_another_dtype_are_not_joined() -> None:
    with pytest.raises(ShapeError, match=r"others must be as here: torch\.float32 on cpu.*, got torch\.int64 on cpu"):
        batch_of().concat(Ragged.from_flat(torch.tensor([1, 2, 3]), lengths=LENGTHS))
