"""Reading what the caller of a packing function gave, and saying what is wrong with it.

Each reader takes one argument, checks it and gives it in the one form that the arithmetic works on. Checks that
cost a pass over Python objects run only once something has failed.
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

from raglane._utils.arrays import as_tensor
from raglane._utils.checks import check_flag
from raglane._utils.tracing import index_arithmetic
from raglane.errors import DimensionError, KindError, ShapeError, message, quote
from raglane.segments.layouts import IntArray, inverse

__all__ = [
    "INTEGERS",
    "check_range",
    "raise_unsorted",
    "read_flag",
    "read_packed",
    "read_padded",
    "read_padded_lengths",
    "read_padded_lengths_on_host",
    "read_padding_side",
    "read_padding_value",
    "read_total_length",
]

_UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
INTEGERS = frozenset((torch.int8, torch.int16, torch.int32, torch.int64, *_UNSIGNED))
_MAKE_A_PACK = "make one with pack_sequence or pack_padded_sequence"


# ---------------------------------------------------------------------------------------------------------------
# Padded batches and their lengths
# ---------------------------------------------------------------------------------------------------------------


def read_padded(padded: Tensor, argument: str, batch_first: bool) -> tuple[int, int]:
    """Check a padded batch."""
    if not isinstance(padded, Tensor):
        raise KindError(
            message(
                argument,
                f"type {type(padded).__name__}",
                "one padded tensor",
                "call pack_sequence or pad_sequence on a list of sequences, pad_packed_sequence on a pack",
            )
        )
    if padded.layout is not torch.strided or padded.is_nested or padded.is_quantized:
        fix = "convert it first, for instance with .to_dense()"
        raise KindError(message(argument, f"a tensor of {padded.layout} and {padded.dtype}", "a dense tensor", fix))
    if padded.dim() < 2:
        raise DimensionError(
            message(
                argument,
                f"shape {tuple(padded.shape)}",
                "one dimension of sequences and one of steps",
                f"add the missing one, for instance {argument}.unsqueeze(0) for one sequence with batch_first=True",
            )
        )
    first, second = padded.shape[:2]
    return (first, second) if batch_first else (second, first)


@index_arithmetic
def read_padded_lengths(lengths: Any, count: int, batch_first: bool) -> IntArray | Tensor:
    """Check everything about lengths but their values, without waiting for a device."""
    tensor = lengths if isinstance(lengths, Tensor) else _tensor_from(lengths)
    if tensor.dtype not in INTEGERS:
        raise ShapeError(
            message("lengths", f"dtype {tensor.dtype}", "integers", "count the steps of each sequence; no mask")
        )
    if tensor.dim() != 1:
        raise DimensionError(
            message("lengths", f"shape {tuple(tensor.shape)}", "one dimension, (B,)", "pass one number per sequence")
        )
    if tensor.shape[0] != count:
        axis = "first" if batch_first else "second"
        raise DimensionError(
            message(
                "lengths",
                f"{tensor.shape[0]} lengths",
                f"one length per sequence, and the {axis} dimension of the padded batch holds {count}",
                f"pass {count} of them, or batch_first={not batch_first} if the sequences are the other dimension",
            )
        )
    if not tensor.is_cpu:
        return tensor.long()
    array: IntArray = tensor.resolve_neg().numpy().astype(np.int64, copy=False)
    return array


def _tensor_from(lengths: Any) -> Tensor:
    try:
        if isinstance(lengths, Sequence) and lengths and isinstance(lengths[0], Tensor):
            # Tensors of one number each: stacked, they stay on their device.
            return torch.stack([torch.as_tensor(length) for length in lengths])
        tensor = as_tensor(lengths, "cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        kind = ShapeError if isinstance(error, ValueError) else KindError
        rule = "one integer per sequence, in a list, a tuple or a tensor"
        raise kind(message("lengths", quote(lengths), rule, "pass for instance [9, 8, 6]")) from error
    return tensor.long() if tensor.numel() == 0 else tensor  # an empty list says no dtype


def check_range(low: int, high: int, steps: int) -> None:
    """Check the smallest and the largest length of a padded batch of ``steps`` steps."""
    if low < 0:
        raise ShapeError(message("lengths", f"a length of {low}", "at least 0", "count the steps of each sequence"))
    if high > steps:
        raise ShapeError(
            message(
                "lengths",
                f"a length of {high}",
                f"at most the {steps} steps of the padded batch",
                "pass the number of real steps of each sequence, and check batch_first",
            )
        )


def read_padded_lengths_on_host(lengths: Any, count: int, steps: int, batch_first: bool) -> IntArray:
    """Check lengths wholly, and give them on the host; waits once if they are on a device."""
    read = read_padded_lengths(lengths, count, batch_first)
    host: IntArray = read.cpu().numpy() if isinstance(read, Tensor) else read
    if count:
        check_range(int(host.min()), int(host.max()), steps)
    return host


def raise_unsorted(lengths: IntArray | Tensor) -> NoReturn:
    """Say that lengths must fall."""
    raise ShapeError(
        message(
            "lengths",
            quote(lengths.tolist()),
            "none longer than the one before it, since enforce_sorted is True",
            "pass enforce_sorted=False, or sort the sequences by decreasing length",
        )
    )


# ---------------------------------------------------------------------------------------------------------------
# Packs and padding
# ---------------------------------------------------------------------------------------------------------------


def read_packed(packed: PackedSequence, argument: str) -> tuple[IntArray, Tensor | None, int]:
    """Check a PackedSequence, without waiting for a device."""
    if not isinstance(packed, PackedSequence):
        raise KindError(message(argument, f"type {type(packed).__name__}", "a PackedSequence", _MAKE_A_PACK))
    data, sizes, order, places = packed
    if sizes.dtype is not torch.int64 or sizes.dim() != 1:
        got = f"{sizes.dtype} of shape {tuple(sizes.shape)}"
        raise ShapeError(message(f"{argument}.batch_sizes", got, "int64 of shape (T,)", _MAKE_A_PACK))
    if order is None and places is not None:
        order = inverse(places)
    order, array = _read_numbers(order, sizes)
    running = int(array[0]) if array.shape[0] else 0
    count = running if order is None else order.shape[0]
    fits = data.dim() > 0 and running <= count and int(array.sum()) == data.shape[0]
    if not fits or (array.shape[0] and (array[-1] < 1 or np.count_nonzero(array[1:] > array[:-1]))):
        got = f"{quote(array.tolist())} for data of shape {tuple(data.shape)}"
        rule = f"above 0, none above the one before it, the first at most {count}, their sum the number of elements"
        raise ShapeError(message(f"{argument}.batch_sizes", got, rule, _MAKE_A_PACK))
    return array, order, count


@index_arithmetic
def _read_numbers(order: Tensor | None, sizes: Tensor) -> tuple[Tensor | None, IntArray]:
    """A pack's order, and a copy of its batch sizes: what is checked must be what is used, whoever writes meanwhile."""
    return None if order is None else order.resolve_neg(), sizes.resolve_neg().numpy().copy()


def read_padding_value(value: Any) -> float:
    """Check a padding value."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, Number):
        raise KindError(message("padding_value", f"type {type(value).__name__}", "one number", "pass for instance 0.0"))
    number: float = value  # type: ignore[assignment]  # Number is what int, float, complex and NumPy's share
    if isinstance(number, int) and not -(2**63) <= number < 2**63:
        raise KindError(message("padding_value", quote(number), "a number of 64 bits", "pass a float, such as 1e30"))
    return number


def read_flag(argument: str, flag: Any) -> bool:
    """Check a yes or no."""
    # torch takes 0 and 1 for them, too.
    return bool(flag) if isinstance(flag, int) and flag in (0, 1) else check_flag(argument, flag, KindError)


def read_padding_side(side: Any) -> bool:
    """Check a padding side."""
    if not isinstance(side, str) or side not in ("left", "right"):
        kind = ShapeError if isinstance(side, str) else KindError
        raise kind(message("padding_side", quote(side), '"left" or "right"', 'pass padding_side="right"'))
    return bool(side == "left")


def read_total_length(total_length: Any, steps: int, count: int = 1) -> int:
    """Check the number of steps that a padded batch is to have."""
    if total_length is None:
        return steps
    try:
        wanted = operator.index(total_length)
    except TypeError as error:
        got = f"type {type(total_length).__name__}"
        raise KindError(message("total_length", got, "an integer or None", f"pass {steps} or more")) from error
    if wanted < steps:
        rule = f"at least the longest length, {steps}"
        raise ShapeError(message("total_length", quote(wanted), rule, f"pass {steps} or more, or None"))
    if wanted * max(count, 1) >= 2**62:
        rule = "the elements of the padded batch can be counted"
        raise ShapeError(message("total_length", quote(wanted), rule, f"pass {steps}, or None"))
    return wanted
