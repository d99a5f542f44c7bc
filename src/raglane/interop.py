"""Between flat values with offsets and what other libraries hold: lists, nested tensors, NumPy, Arrow.

Everything here takes or gives ``(values, lengths)`` or ``(values, offsets)`` of a ragged batch as plain tensors
and copies only what it must; the docstrings say when.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError, explain, require
from raglane.segments import element_index, offsets_from_lengths
from raglane.tracing import index_arithmetic

__all__ = [
    "as_tensor",
    "from_arrow",
    "from_list",
    "from_nested",
    "read_integers",
    "read_lengths",
    "to_arrow",
    "to_nested",
]


def as_tensor(data: Any) -> Tensor:
    """A tensor that shares memory with a tensor or NumPy array where it can, and copies anything else.

    A read-only NumPy array is shared too: nothing in Raglane writes into the values of a batch.

    Example:
        >>> as_tensor(np.arange(3)).tolist()
        [0, 1, 2]
    """
    if isinstance(data, Tensor):
        return data
    if isinstance(data, np.ndarray) and (not data.dtype.isnative or min(data.strides, default=0) < 0):
        # torch has neither the other byte order nor strides that run backwards.
        data = np.ascontiguousarray(data, dtype=data.dtype.newbyteorder("="))
    if isinstance(data, np.ndarray) and not data.flags.writeable:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*not writable.*", category=UserWarning)
            return torch.as_tensor(data)
    return torch.as_tensor(data)


@index_arithmetic
def read_integers(data: Any, name: str) -> Tensor:
    """What a caller gives as lengths or offsets, as integers in one dimension; on the device where they are.

    Args:
        data: a list, an array or a tensor.
        name: what errors call it.

    Returns:
        ``(M,)`` int64.

    Raises:
        ArgumentTypeError: not an array of integers.
        ShapeError: not one-dimensional.

    Example:
        >>> read_integers([3, 1], "lengths")
        tensor([3, 1])
    """
    try:
        # Numbers that the caller wrote down stay on the host, whatever torch's default device is.
        tensor = data if isinstance(data, Tensor) else torch.as_tensor(data, device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ArgumentTypeError(
            explain(
                name,
                f"a {type(data).__name__} that is no array of numbers",
                "integers",
                "pass a list of them, or wrap sequences with rl.Ragged",
            )
        ) from error
    if tensor.dim() != 1:
        raise ShapeError(
            explain(name, f"shape {tuple(tensor.shape)}", "integers in one dimension", "pass them in a flat list")
        )
    if tensor.shape[0] == 0:  # an empty list has no dtype of its own
        return tensor.new_empty(0, dtype=torch.int64)
    if tensor.dtype is torch.bool or tensor.is_floating_point() or tensor.is_complex():
        raise ArgumentTypeError(explain(name, f"{tensor.dtype}", "integers", "convert with .to(torch.int64)"))
    return tensor.detach().resolve_neg().to(torch.int64)


@index_arithmetic
def read_lengths(data: Any) -> Tensor:
    """What a caller gives as lengths, on the CPU, each at least 0; lengths on a device are waited for.

    Returns:
        ``(B,)`` int64.

    Raises:
        ArgumentTypeError: not an array of integers.
        ShapeError: not one-dimensional.
        ArgumentError: a length below 0.

    Example:
        >>> read_lengths(np.array([3, 1], dtype=np.int16))
        tensor([3, 1])
    """
    lengths = read_integers(data, "lengths").cpu()
    if float(lengths.sum(dtype=torch.float64)) >= 2.0**62:
        raise ArgumentError(
            explain("lengths", "a sum beyond 64-bit integers", "the elements can be counted", "check the data")
        )
    below = lengths < 0
    if bool(below.any()):
        index = int(below.nonzero()[0, 0])
        raise ArgumentError(
            explain(
                "lengths",
                f"{int(lengths[index])} at index {index}",
                "a length is at least 0",
                "check the data; an empty sequence has length 0",
            )
        )
    return lengths


def from_list(sequences: Iterable[Any]) -> tuple[Tensor, Tensor]:
    """Lay sequences one after the other.

    Args:
        sequences: tensors or arrays ``(L_i, *features)`` of one dtype and device, or nested lists of numbers.

    Returns:
        Values ``(N, *features)`` and lengths ``(B,)``, int64 on the CPU. The values are one copy of the sequences.

    Raises:
        ArgumentTypeError: a single tensor, a string or something that is no list of sequences.
        ShapeError: sequences whose features, dtypes or devices differ.

    Example:
        >>> values, lengths = from_list([[1, 2], [], [3]])
        >>> values.tolist(), lengths.tolist()
        ([1, 2, 3], [2, 0, 1])
    """
    if isinstance(sequences, Tensor | np.ndarray | str | bytes | dict) or not isinstance(sequences, Iterable):
        shape = f" of shape {tuple(sequences.shape)}" if isinstance(sequences, Tensor | np.ndarray) else ""
        raise ArgumentTypeError(
            explain(
                "sequences",
                f"one {type(sequences).__name__}{shape}",
                "a list with one tensor (L_i, *features) for each sequence",
                "pass a list, or call Ragged.from_padded for a padded tensor and Ragged.from_flat for flat values",
            )
        )
    items = list(sequences)
    tensors = [_read_sequence(item, index) for index, item in enumerate(items)]
    if not tensors:
        return torch.empty(0), torch.empty(0, dtype=torch.int64, device="cpu")
    # An empty Python list has neither features nor a dtype of its own: it takes those of the others.
    bare = [isinstance(item, list | tuple) and len(item) == 0 for item in items]
    typical = next((tensor for tensor, is_bare in zip(tensors, bare, strict=True) if not is_bare), tensors[0])
    if any(bare):
        nothing = typical.new_empty((0, *typical.shape[1:]))
        tensors = [nothing if is_bare else tensor for tensor, is_bare in zip(tensors, bare, strict=True)]
    _check_alike(tensors, typical)
    lengths = torch.tensor([tensor.shape[0] for tensor in tensors], dtype=torch.int64, device="cpu")
    return torch.cat(tensors), lengths


def _read_sequence(item: Any, index: int) -> Tensor:
    """One sequence as a tensor, or an error that says which one is none."""
    try:
        tensor = as_tensor(item)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ArgumentTypeError(
            explain(
                f"sequences[{index}]",
                f"a {type(item).__name__} that is no array of numbers",
                "a sequence is a tensor (L, *features), or lists of numbers of one shape",
                "turn texts into indices with a vocabulary first",
            )
        ) from error
    if tensor.is_nested:
        raise ArgumentTypeError(
            explain(
                f"sequences[{index}]",
                "a nested tensor",
                "a sequence is a tensor (L, *features)",
                "call Ragged.from_nested on the nested tensor itself",
            )
        )
    return tensor


def _check_alike(tensors: Sequence[Tensor], typical: Tensor) -> None:
    """Raise a ShapeError that names the first sequence that does not go with the others."""
    if typical.dim() == 0:
        raise ShapeError(
            explain(
                "sequences",
                "a number where a sequence belongs",
                "each sequence has at least one dimension, its steps",
                "wrap the numbers of a sequence in a list or a 1-D tensor",
            )
        )
    wanted = (typical.shape[1:], typical.dtype, typical.device)
    for index, tensor in enumerate(tensors):
        if tensor.dim() == 0 or (tensor.shape[1:], tensor.dtype, tensor.device) != wanted:
            raise ShapeError(
                explain(
                    f"sequences[{index}]",
                    f"shape {tuple(tensor.shape)}, {tensor.dtype}, {tensor.device}",
                    f"every sequence is (L, {', '.join(map(str, typical.shape[1:]))}), {typical.dtype} on "
                    f"{typical.device}, as the others are",
                    "convert it with .to(...) or .reshape(...) first",
                )
            )


def from_nested(nested: Tensor) -> tuple[Tensor, Tensor]:
    """The flat values and offsets of a :mod:`torch.nested` tensor.

    A jagged one without holes gives its own memory, with no copy; one with holes (``nt.lengths()`` is given) is
    gathered, which waits for a device; one of the strided layout is taken apart and laid flat.

    Args:
        nested: a nested tensor whose only ragged dimension is the first after the batch.

    Returns:
        Values ``(N, *features)`` and offsets ``(B + 1,)`` int64 on the device of the values.

    Raises:
        ArgumentTypeError: not a nested tensor.
        ShapeError: ragged in another dimension.

    Example:
        >>> nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged)
        >>> values, offsets = from_nested(nested)
        >>> values.tolist(), offsets.tolist()
        ([1.0, 1.0, 1.0], [0, 2, 3])
    """
    if not (isinstance(nested, Tensor) and nested.is_nested):
        raise ArgumentTypeError(
            explain(
                "nested",
                type(nested).__name__,
                "a tensor of torch.nested",
                "pass torch.nested.nested_tensor(sequences, layout=torch.jagged), or Ragged(sequences)",
            )
        )
    if nested.layout is not torch.jagged:
        values, lengths = from_list(list(nested.unbind()))
        return values, offsets_from_lengths(lengths).to(values.device)
    if getattr(nested, "_ragged_idx", 1) != 1:
        raise ShapeError(
            explain(
                "nested",
                f"dimension {getattr(nested, '_ragged_idx', 1)} ragged",
                "only dimension 1, the steps, may be ragged",
                "transpose it back before you convert it",
            )
        )
    jagged: Any = nested  # its methods are none of Tensor's
    values, offsets = jagged.values(), jagged.offsets().to(torch.int64)
    holes = jagged.lengths()
    if holes is None:
        return values, offsets
    total = int(holes.sum())
    index = element_index(offsets[:-1], holes.to(torch.int64), total)
    return values.index_select(0, index), offsets_from_lengths(holes)


def to_nested(values: Tensor, offsets: Tensor, longest: int) -> Tensor:
    """A jagged :mod:`torch.nested` tensor over the same memory.

    Args:
        values: ``(N, *features)``.
        offsets: ``(B + 1,)`` int64.
        longest: the largest length.

    Example:
        >>> to_nested(torch.arange(3.), torch.tensor([0, 2, 3]), 2).size(0)
        2
    """
    nested: Tensor = torch.nested.nested_tensor_from_jagged(values, offsets, max_seqlen=longest)
    return nested


def from_arrow(array: Any) -> tuple[Tensor, Tensor]:
    """The flat values and offsets of an Arrow list array.

    Numbers share Arrow's memory, with no copy, as long as the array is one chunk (several chunks are joined
    first) and is no list of booleans, which Arrow stores as bits. The memory is Arrow's: do not write to it.

    Args:
        array: a ``pyarrow`` ListArray, LargeListArray, FixedSizeListArray or a chunked array of those, of
            numbers or booleans, or of lists of numbers that are all of one length (the channels).

    Returns:
        Values ``(N,)`` or ``(N, C)`` on the CPU and offsets ``(B + 1,)`` int64.

    Raises:
        ArgumentTypeError: not an Arrow array of lists of numbers.
        ArgumentError: a null, anywhere in it.
        ShapeError: inner lists of different lengths.

    Example:
        >>> import pyarrow
        >>> values, offsets = from_arrow(pyarrow.array([[1, 2], [], [3]]))
        >>> values.tolist(), offsets.tolist()
        ([1, 2, 3], [0, 2, 2, 3])
    """
    pyarrow = require("pyarrow", "data")
    if isinstance(array, pyarrow.ChunkedArray):
        array = array.combine_chunks()
    if isinstance(array, pyarrow.ChunkedArray):  # several chunks whose joined size is above 32-bit offsets
        array = pyarrow.concat_arrays([chunk.cast(pyarrow.large_list(chunk.type.value_type)) for chunk in array.chunks])
    if not isinstance(array, pyarrow.Array) or not _is_list(array.type):
        kind = array.type if isinstance(array, pyarrow.Array) else type(array).__name__
        raise ArgumentTypeError(
            explain("array", str(kind), "an Arrow array of lists", "pass a list column, or Ragged(sequences)")
        )
    _refuse_nulls(array, "array")
    offsets = _list_offsets(array)
    flat = array.flatten()
    if _is_list(flat.type):
        _refuse_nulls(flat, "array's elements")
        sizes = np.unique(np.diff(_list_offsets(flat)))
        if len(sizes) > 1:
            raise ShapeError(
                explain(
                    "array",
                    f"elements of {sizes[0]} to {sizes[-1]} numbers",
                    "every element of every sequence has the same number of channels",
                    "make the inner lists equally long",
                )
            )
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
        raise ArgumentError(
            explain(
                name,
                f"{array.null_count} null(s), the first at index {row}",
                "a batch has no nulls: an empty sequence is an empty list",
                "drop or fill them first, for instance with pyarrow.compute.fill_null",
            )
        )


def _numbers(flat: Any) -> Tensor:
    pyarrow = require("pyarrow", "data")
    _refuse_nulls(flat, "array's values")
    kind = flat.type
    if pyarrow.types.is_boolean(kind):
        return torch.from_numpy(flat.to_numpy(zero_copy_only=False))
    if not (pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind)):
        raise ArgumentTypeError(
            explain(
                "array",
                f"a list of {kind}",
                "lists of numbers or booleans, or of lists of numbers",
                "turn tokens into indices with a vocabulary, and timestamps into numbers, first",
            )
        )
    return as_tensor(flat.to_numpy(zero_copy_only=True))


def to_arrow(values: Tensor, offsets: Tensor) -> Any:
    """A ``pyarrow`` LargeListArray; the numbers share memory where the tensor is contiguous on the CPU.

    Feature dimensions become fixed-size lists, one inside the other. Waits for a device, if the values are on one.

    Args:
        values: ``(N, *features)`` of a dtype that NumPy has (bfloat16 is not one).
        offsets: ``(B + 1,)`` int64.

    Raises:
        ArgumentTypeError: a dtype that Arrow does not have.

    Example:
        >>> to_arrow(torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3])).to_pylist()
        [[1, 2], [3]]
    """
    pyarrow = require("pyarrow", "data")
    if values.dtype is torch.bfloat16 or values.is_complex():
        raise ArgumentTypeError(
            explain("values", str(values.dtype), "a dtype that Arrow has", "convert with .to(torch.float32) first")
        )
    if 0 in values.shape[1:]:
        raise ArgumentTypeError(
            explain(
                "values", f"elements of shape {tuple(values.shape[1:])}", "Arrow has no empty features", "leave them"
            )
        )
    flat = pyarrow.array(values.detach().cpu().resolve_neg().contiguous().view(-1).numpy())
    for size in reversed(values.shape[1:]):
        flat = pyarrow.FixedSizeListArray.from_arrays(flat, size)
    return pyarrow.LargeListArray.from_arrays(pyarrow.array(offsets.cpu().numpy()), flat)
