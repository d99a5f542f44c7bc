"""Between flat values and the list arrays of Arrow."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raglane._utils.arrays import as_tensor
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError, message, require


def from_arrow(array: Any) -> tuple[Tensor, Tensor]:
    """The flat values and offsets of an Arrow list array.

    Numbers share Arrow's memory, with no copy, as long as the array is one chunk (several chunks are joined
    first) and is not a list of booleans, which Arrow stores as bits. The memory is Arrow's: do not write to it.
    """
    pyarrow = require("pyarrow", "data")
    if isinstance(array, pyarrow.ChunkedArray):
        array = array.combine_chunks()
    if isinstance(array, pyarrow.ChunkedArray):  # several chunks whose joined size is above 32-bit offsets
        array = pyarrow.concat_arrays([chunk.cast(pyarrow.large_list(chunk.type.value_type)) for chunk in array.chunks])
    if not isinstance(array, pyarrow.Array) or not _is_list(array.type):
        kind = array.type if isinstance(array, pyarrow.Array) else type(array).__name__
        raise ArgumentTypeError(
            message("array", str(kind), "an Arrow array of lists", "pass a list column, or Ragged(sequences)")
        )
    _refuse_nulls(array, "array")
    offsets = _list_offsets(array)
    flat = array.flatten()
    if _is_list(flat.type):
        _refuse_nulls(flat, "array's elements")
        sizes = np.unique(np.diff(_list_offsets(flat)))
        if len(sizes) > 1:
            rule = "every element of every sequence has the same number of channels"
            fix = "make the inner lists equally long"
            raise ShapeError(message("array", f"elements of {sizes[0]} to {sizes[-1]} numbers", rule, fix))
        channels = int(sizes[0]) if len(sizes) else int(getattr(flat.type, "list_size", 0))
        return _numbers(flat.flatten()).reshape(len(flat), channels), torch.from_numpy(offsets)
    return _numbers(flat), torch.from_numpy(offsets)


def _is_list(kind: Any) -> bool:
    types = require("pyarrow", "data").types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _list_offsets(array: Any) -> NDArray[np.int64]:
    """Offsets of a list array from 0, whatever slice of a larger one it is."""
    if hasattr(array, "offsets"):
        offsets: NDArray[np.int64] = np.array(array.offsets.to_numpy(), dtype=np.int64)
        return np.asarray(offsets - offsets[0])
    return np.arange(len(array) + 1, dtype=np.int64) * int(array.type.list_size)


def _refuse_nulls(array: Any, name: str) -> None:
    if array.null_count:
        row = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
        rule = "a batch has no nulls: an empty sequence is an empty list"
        fix = "drop or fill them first, for instance with pyarrow.compute.fill_null"
        raise ArgumentError(message(name, f"{array.null_count} null(s), the first at index {row}", rule, fix))


def _numbers(flat: Any) -> Tensor:
    pyarrow = require("pyarrow", "data")
    _refuse_nulls(flat, "array's values")
    kind = flat.type
    if pyarrow.types.is_boolean(kind):
        return torch.from_numpy(flat.to_numpy(zero_copy_only=False))
    if not (pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind)):
        rule = "lists of numbers or booleans, or of lists of numbers"
        fix = "turn tokens into indices with a vocabulary, and timestamps into numbers, first"
        raise ArgumentTypeError(message("array", f"a list of {kind}", rule, fix))
    return as_tensor(flat.to_numpy(zero_copy_only=True))


def to_arrow(values: Tensor, offsets: Tensor) -> Any:
    """A ``pyarrow`` LargeListArray; the numbers share memory where the tensor is contiguous on the CPU.

    Feature dimensions become fixed-size lists, one inside the other. Waits for a device, if the values are on one.
    """
    pyarrow = require("pyarrow", "data")
    if values.dtype is torch.bfloat16 or values.is_complex():
        raise ArgumentTypeError(
            message("values", str(values.dtype), "a dtype that Arrow has", "convert with .to(torch.float32) first")
        )
    if 0 in values.shape[1:]:
        rule = "Arrow has no empty features"
        raise ArgumentTypeError(message("values", f"elements of shape {tuple(values.shape[1:])}", rule, "leave them"))
    flat = pyarrow.array(values.detach().cpu().resolve_neg().contiguous().view(-1).numpy())
    for size in reversed(values.shape[1:]):
        flat = pyarrow.FixedSizeListArray.from_arrays(flat, size)
    return pyarrow.LargeListArray.from_arrays(pyarrow.array(offsets.cpu().numpy()), flat)
