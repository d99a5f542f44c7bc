"""Checks of the packing functions' arguments.

Each function returns an argument in the form that the arithmetic requires, or raises. Checks that
loop over Python objects run only after an operation has failed.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from numbers import Number
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from raglane._utils.checks import as_tensor, check_dense, check_flag, check_storage
from raglane._utils.messages import quote
from raglane._utils.tracing import index_arithmetic
from raglane.errors import DimensionError, KindError, ShapeError
from raglane.packing.layouts import inverse
from raglane.segments import IntArray

_UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
_INTEGERS = frozenset((torch.int8, torch.int16, torch.int32, torch.int64, *_UNSIGNED))
_MAKE_A_PACK = "make one with pack_sequence or pack_padded_sequence"
# Of a Ragged, whose class is of a higher layer.
_OF_RAGGED = "call its method to_padded, to_packed or to_list"


# -- padded batches and their lengths
# ---------------------------------------------------------------------------------


def read_padded(padded: Any, argument: str, batch_first: bool) -> tuple[int, int]:
    """Return the numbers of sequences and steps of a padded batch."""
    if not isinstance(padded, Tensor):
        fix = "call pack_sequence or pad_sequence on a list of sequences, pad_packed_sequence on a pack"
        fix = _OF_RAGGED if hasattr(padded, "to_packed") else fix
        raise KindError(argument, f"type {type(padded).__name__}", "one padded tensor", fix)
    check_dense(argument, padded, KindError)
    if padded.dim() < 2:
        rule = "a tensor with one dimension of sequences and one of steps"
        fix = f"add the missing one, e.g. {argument}.unsqueeze(0) for one sequence with batch_first=True"
        raise DimensionError(argument, f"shape {tuple(padded.shape)}", rule, fix)
    check_storage(argument, padded)
    first, second = padded.shape[:2]
    return (first, second) if batch_first else (second, first)


@index_arithmetic
def read_padded_lengths(lengths: Any, count: int, batch_first: bool) -> IntArray | Tensor:
    """Return lengths ``(count,)`` as int64, a tensor if they are on a device, else an array; values
    are unchecked.
    """
    tensor = lengths if isinstance(lengths, Tensor) else _tensor_from(lengths)
    if tensor.dtype not in _INTEGERS:
        fix = "pass the number of steps of each sequence, not a mask"
        raise ShapeError("lengths", f"dtype {tensor.dtype}", "integers", fix)
    if tensor.dim() != 1:
        fix = "pass one number per sequence"
        raise DimensionError(
            "lengths", f"shape {tuple(tensor.shape)}", "of one dimension, (B,)", fix
        )
    if tensor.shape[0] != count:
        axis = "first" if batch_first else "second"
        rule = f"one length per sequence, {count} as in the {axis} dimension of the padded batch"
        fix = f"pass {count} of them, or batch_first={not batch_first} if the sequences are the other dimension"
        raise DimensionError("lengths", f"{tensor.shape[0]} lengths", rule, fix)
    if not tensor.is_cpu:
        return tensor.long()
    check_storage("lengths", tensor)
    return tensor.resolve_neg().numpy().astype(np.int64, copy=False)


def _tensor_from(lengths: Any) -> Tensor:
    try:
        if isinstance(lengths, Sequence) and lengths and isinstance(lengths[0], Tensor):
            # Stacked, tensors of one number stay on their device.
            return torch.stack([torch.as_tensor(length) for length in lengths])
        tensor = as_tensor(lengths, "cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        kind = ShapeError if isinstance(error, ValueError) else KindError
        rule = "one integer per sequence, in a list, a tuple or a tensor"
        raise kind("lengths", quote(lengths), rule, "pass e.g. [9, 8, 6]") from error
    return tensor.long() if tensor.numel() == 0 else tensor  # an empty list becomes float32


@index_arithmetic
def read_padded_lengths_on_host(
    lengths: Any, count: int, steps: int, batch_first: bool
) -> IntArray:
    """Return lengths with checked values; waits once if they are on a device."""
    read = read_padded_lengths(lengths, count, batch_first)
    host: IntArray = read.cpu().numpy() if isinstance(read, Tensor) else read
    if count:
        check_range(int(host.min()), int(host.max()), steps)
    return host


def check_range(low: int, high: int, steps: int) -> None:
    """Check the smallest and the largest length of a padded batch of ``steps`` steps."""
    fix = "pass the number of steps of each sequence without padding, and check batch_first"
    if low < 0:
        raise ShapeError("lengths", f"a length of {low}", "at least 0", fix)
    if high > steps:
        raise ShapeError(
            "lengths", f"a length of {high}", f"at most the {steps} steps of the padded batch", fix
        )


def raise_unsorted(lengths: IntArray | Tensor) -> NoReturn:
    """Raise because lengths increase."""
    fix = "pass enforce_sorted=False, or sort the sequences by decreasing length"
    raise ShapeError(
        "lengths",
        quote(lengths.tolist()),
        "in decreasing order, because enforce_sorted is True",
        fix,
    )


# -- packs
# --------------------------------------------------------------------------------------------------


def read_packed(packed: Any, argument: str) -> tuple[IntArray, Tensor | None, int]:
    """Return batch sizes, order and number of sequences of a pack, without waiting."""
    if not isinstance(packed, PackedSequence):
        fix = _OF_RAGGED if hasattr(packed, "to_packed") else _MAKE_A_PACK
        raise KindError(argument, f"type {type(packed).__name__}", "a PackedSequence", fix)
    data, sizes, order, ranks = packed
    check_dense(f"{argument}.data", data, KindError)
    if sizes.dtype is not torch.int64 or sizes.dim() != 1:
        got = f"{sizes.dtype} of shape {tuple(sizes.shape)}"
        raise ShapeError(f"{argument}.batch_sizes", got, "int64 of shape (T,)", _MAKE_A_PACK)
    check_storage(f"{argument}.data", data)
    check_storage(f"{argument}.batch_sizes", sizes)
    if order is not None:
        check_storage(f"{argument}.sorted_indices", order)
    elif ranks is not None:
        check_storage(f"{argument}.unsorted_indices", ranks)
        order = inverse(ranks)
    order, array = _read_numbers(order, sizes)
    running = int(array[0]) if array.shape[0] else 0
    count = running if order is None else order.shape[0]
    fits = data.dim() > 0 and running <= count and int(array.sum()) == data.shape[0]
    if not fits or (array.shape[0] and (array[-1] < 1 or np.count_nonzero(array[1:] > array[:-1]))):
        got = f"{quote(array.tolist())} for data of shape {tuple(data.shape)}"
        rule = f"above 0, in decreasing order, at most {count}, with the number of elements as their sum"
        raise ShapeError(f"{argument}.batch_sizes", got, rule, _MAKE_A_PACK)
    return array, order, count


@index_arithmetic
def _read_numbers(order: Tensor | None, sizes: Tensor) -> tuple[Tensor | None, IntArray]:
    """Return a pack's order, and a copy of its batch sizes, which another thread may change."""
    return None if order is None else order.resolve_neg(), sizes.resolve_neg().numpy().copy()


@index_arithmetic
def read_permutation(permutation: Any) -> Tensor:
    """Return a permutation; its values are checked on a CPU, but not on a device: that waits."""
    name = "permutation"
    fix = "pass the indices that torch.argsort returns"
    if not isinstance(permutation, Tensor):
        raise KindError(name, f"type {type(permutation).__name__}", "a tensor or None", fix)
    if permutation.is_nested or permutation.layout is not torch.strided:
        raise KindError(name, f"a tensor of {permutation.layout}", "a dense tensor or None", fix)
    if permutation.dim() != 1:
        raise DimensionError(
            name, f"shape {tuple(permutation.shape)}", "of one dimension, (B,)", fix
        )
    if permutation.dtype not in _INTEGERS:
        raise ShapeError(name, f"dtype {permutation.dtype}", "integers", fix)
    check_storage(name, permutation)
    resolved: Tensor = permutation.resolve_neg()
    if resolved.is_cpu:
        check_permutation(resolved.numpy().astype(np.int64, copy=False), name, fix)
    return resolved


def check_permutation(array: IntArray, argument: str, fix: str) -> None:
    """Check that an array contains each of ``0 ... B - 1`` once."""
    count = array.shape[0]
    if count == 0:
        return
    # Of count numbers from 0 to count - 1, each occurs once if none is missing.
    counts = np.bincount(array) if array.min() >= 0 and array.max() < count else array[:0]
    if counts.shape[0] != count or np.count_nonzero(counts) != count:
        raise ShapeError(argument, quote(array.tolist()), f"a permutation of 0 to {count - 1}", fix)


# -- lists of sequences
# -----------------------------------------------------------------------------------------------


def read_sequences(sequences: Any) -> tuple[tuple[Tensor, ...], IntArray]:
    """Return sequences and their lengths; trailing shapes are checked only if torch.cat fails."""
    sequences = _tuple_of(sequences)
    try:
        lengths = np.array([sequence.shape[0] for sequence in sequences], dtype=np.int64)
        dtypes = {sequence.dtype for sequence in sequences}
    except (AttributeError, TypeError, IndexError):
        raise_unfit(sequences)
        raise
    if len(dtypes) > 1 and all(torch.can_cast(dtype, sequences[0].dtype) for dtype in dtypes):
        # As in torch, the result has the dtype of the first sequence, unless the conversion would
        # lose information.
        sequences = tuple(sequence.to(sequences[0].dtype) for sequence in sequences)
        dtypes = {sequences[0].dtype}
    # torch.cat ignores tensors of shape (0,), whatever the other shapes are.
    has_empty = np.count_nonzero(lengths) != lengths.shape[0]
    if len(dtypes) != 1 or not _is_strided(sequences[0]) or has_empty:
        raise_unfit(sequences)
    return sequences, lengths


def _tuple_of(sequences: Any) -> tuple[Any, ...]:
    """Return the sequences of an iterable or a nested tensor; raise for other types."""
    if isinstance(sequences, PackedSequence):
        _raise_no_list(sequences)
    try:
        if isinstance(sequences, Tensor) and sequences.is_nested:
            return sequences.unbind()
        return tuple(sequences)
    except TypeError:
        _raise_no_list(sequences)


def _is_strided(sequence: Any) -> bool:
    """Return True for a plain tensor; NumPy arrays have a shape and a dtype too."""
    return (
        isinstance(sequence, Tensor)
        and sequence.layout is torch.strided
        and not sequence.is_quantized
    )


def _raise_no_list(sequences: Any) -> NoReturn:
    fix = "pass e.g. [torch.ones(3), torch.ones(2)], or call pad_packed_sequence on a pack"
    raise KindError(
        "sequences", f"type {type(sequences).__name__}", "a list of tensors, one per sequence", fix
    )


def raise_unfit(sequences: tuple[Any, ...]) -> None:
    """Raise if sequences cannot be concatenated."""
    if not sequences:
        fix = "skip an empty batch, or pass a padded tensor of shape (0, 0, *features) to pack_padded_sequence"
        raise ShapeError(
            "sequences",
            "none",
            "at least one, because the features and the dtype are read from it",
            fix,
        )
    first = sequences[0]
    for number, sequence in enumerate(sequences):
        argument = f"sequences[{number}]"
        if not isinstance(sequence, Tensor):
            raise KindError(
                argument,
                f"type {type(sequence).__name__}",
                "a tensor",
                "wrap it with torch.as_tensor",
            )
        check_dense(argument, sequence, KindError)
        if sequence.dim() == 0:
            rule = "a tensor whose first dimension counts steps"
            fix = "pass sequences of shape (L, *features)"
            raise DimensionError(argument, "a tensor without dimensions", rule, fix)
        for fact, value, expected in (
            ("trailing shape", tuple(sequence.shape[1:]), tuple(first.shape[1:])),
            ("dtype", sequence.dtype, first.dtype),
            ("device", sequence.device, first.device),
        ):
            if value != expected:
                fix = f"convert it with .to({expected})"
                if fact == "trailing shape":
                    fix = "pass sequences of shape (L, *features) that differ only in L"
                raise ShapeError(
                    argument, f"{fact} {value}", f"of {fact} {expected}, as in sequences[0]", fix
                )


# -- flags and numbers
# ------------------------------------------------------------------------------------------------


def read_flag(argument: str, flag: Any) -> bool:
    """Return a bool; like torch, accept 0 and 1."""
    return (
        bool(flag)
        if isinstance(flag, int) and flag in (0, 1)
        else check_flag(argument, flag, KindError)
    )


def read_padding_value(value: Any) -> float:
    """Return a padding value; raise for an integer that torch would wrap around in 64 bits."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, Number):
        raise KindError(
            "padding_value", f"type {type(value).__name__}", "one number", "pass e.g. 0.0"
        )
    number: float = value  # type: ignore[assignment]  # Number is the base of int, float, complex and NumPy's numbers
    if isinstance(number, int) and not -(2**63) <= number < 2**63:
        raise KindError(
            "padding_value", quote(number), "a number of 64 bits", "pass a float, such as 1e30"
        )
    return number


def read_padding_side(side: Any) -> bool:
    """Return True for padding on the left."""
    if not isinstance(side, str) or side not in ("left", "right"):
        kind = ShapeError if isinstance(side, str) else KindError
        raise kind("padding_side", quote(side), '"left" or "right"', 'pass padding_side="right"')
    return side == "left"


def read_total_length(total_length: Any, steps: int, count: int = 1) -> int:
    """Return the steps of a padded batch of ``count`` sequences of at most ``steps`` elements."""
    if total_length is None:
        return steps
    try:
        total = operator.index(total_length)
    except TypeError as error:
        got = f"type {type(total_length).__name__}"
        raise KindError(
            "total_length", got, "an integer or None", f"pass {steps} or more"
        ) from error
    if total < steps:
        rule = f"at least the longest length, {steps}"
        raise ShapeError("total_length", quote(total), rule, f"pass {steps} or more, or None")
    if total * max(count, 1) >= 2**62:
        rule = "small enough for fewer than 2**62 elements"
        raise ShapeError("total_length", quote(total), rule, f"pass {steps}, or None")
    return total
