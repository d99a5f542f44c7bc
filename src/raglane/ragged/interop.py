"""Conversions between flat values and lists of sequences, :mod:`torch.nested` tensors and Arrow
list arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from raglane._utils.checks import as_tensor, check_offsets, check_tensor, check_unmasked
from raglane._utils.messages import quote, require
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from raglane.ragged.base import FlatBatch
from raglane.segments import element_index, lengths_of, offsets_from_lengths

# -- arguments of other kinds
# --------------------------------------------------------------------------------------------------


def conversion_of(given: Any) -> str:
    """Return how to make a Ragged of an object, for messages."""
    if isinstance(given, PackedSequence):
        return "convert it with rl.Ragged.from_packed(packed)"
    if not isinstance(given, Tensor):
        return "wrap it with rl.Ragged(sequences)"
    if given.is_nested:
        return "convert it with rl.Ragged.from_nested(nested)"
    if given.dim() > 1:
        return "convert it with rl.Ragged.from_padded(padded, lengths)"
    return "convert it with rl.Ragged.from_flat(values, lengths=lengths)"


def check_ragged(name: str, given: Any, rule: str = "a Ragged") -> None:
    """Raise if an argument is not a ragged batch."""
    if isinstance(given, FlatBatch):
        return
    is_shown = not isinstance(given, Tensor | PackedSequence)
    got = quote(given) if is_shown else f"a {type(given).__name__}"
    raise ArgumentTypeError(name, got, rule, conversion_of(given))


# -- lists
# --------------------------------------------------------------------------------------------------


def from_list(sequences: Iterable[Any]) -> tuple[Tensor, Tensor]:
    """Concatenate sequences; return values and lengths."""
    is_other = isinstance(sequences, Tensor | np.ndarray | str | bytes | dict | PackedSequence)
    if is_other or not isinstance(sequences, Iterable | FlatBatch):
        raise _no_list(sequences)
    items = list(sequences)
    tensors = [_read_sequence(item, index) for index, item in enumerate(items)]
    if not tensors:
        return torch.empty(0), torch.empty(0, dtype=torch.int64, device="cpu")
    # An empty Python list takes features and dtype of the other sequences.
    bare = [isinstance(item, list | tuple) and len(item) == 0 for item in items]
    typical = next(
        (tensor for tensor, is_bare in zip(tensors, bare, strict=True) if not is_bare), tensors[0]
    )
    if any(bare):
        nothing = typical.new_empty((0, *typical.shape[1:]))
        tensors = [
            nothing if is_bare else tensor for tensor, is_bare in zip(tensors, bare, strict=True)
        ]
    _check_alike(tensors, typical)
    return torch.cat(tensors), lengths_of(tensors)


def _no_list(sequences: Any) -> ArgumentTypeError:
    """Return the error for an object that is not a list of sequences."""
    rule = "a list with one tensor (L_i, *features) for each sequence"
    got = f"one {type(sequences).__name__}"
    if isinstance(sequences, PackedSequence):
        return ArgumentTypeError("sequences", got, rule, conversion_of(sequences))
    # A nested tensor has no shape.
    is_nested = isinstance(sequences, Tensor) and sequences.is_nested
    if isinstance(sequences, Tensor | np.ndarray) and not is_nested:
        got = f"{got} of shape {tuple(sequences.shape)}"
    fix = "pass a list, or call Ragged.from_padded for a padded tensor and Ragged.from_flat for flat values"
    return ArgumentTypeError("sequences", got, rule, fix)


def _read_sequence(item: Any, index: int) -> Tensor:
    """Convert one sequence to a tensor."""
    check_unmasked(f"sequences[{index}]", item)
    try:
        tensor = as_tensor(item)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        got = f"a {type(item).__name__} that is not an array of numbers"
        rule = "a tensor (L, *features), or lists of numbers of one shape"
        fix = "map texts to indices with a vocabulary first"
        raise ArgumentTypeError(f"sequences[{index}]", got, rule, fix) from error
    if tensor.is_nested:
        fix = "call Ragged.from_nested on the nested tensor itself"
        raise ArgumentTypeError(
            f"sequences[{index}]", "a nested tensor", "a tensor (L, *features)", fix
        )
    return tensor


def _check_alike(tensors: Sequence[Tensor], typical: Tensor) -> None:
    """Raise if a sequence differs from the others in features, dtype or device."""
    if typical.dim() == 0:
        rule = "sequences with at least one dimension, the steps"
        fix = "wrap the numbers of a sequence in a list or a 1-D tensor"
        raise ShapeError("sequences", "a number in place of a sequence", rule, fix)
    check_tensor("sequences", typical)
    wanted = (typical.shape[1:], typical.dtype, typical.device)
    for index, tensor in enumerate(tensors):
        if tensor.layout is not torch.strided:
            check_tensor(f"sequences[{index}]", tensor)
        if tensor.dim() == 0 or (tensor.shape[1:], tensor.dtype, tensor.device) != wanted:
            got = f"shape {tuple(tensor.shape)}, {tensor.dtype}, {tensor.device}"
            rule = (
                f"(L, {', '.join(map(str, typical.shape[1:]))}), {typical.dtype} on "
                f"{typical.device}, like the other sequences"
            )
            raise ShapeError(
                f"sequences[{index}]", got, rule, "convert it with .to(...) or .reshape(...) first"
            )


# -- nested tensors
# --------------------------------------------------------------------------------------------------


def from_nested(nested: Tensor) -> tuple[Tensor, Tensor]:
    """Return values and offsets; a jagged tensor without holes shares its memory."""
    if not (isinstance(nested, Tensor) and nested.is_nested):
        fix = (
            "pass torch.nested.nested_tensor(sequences, layout=torch.jagged), or Ragged(sequences)"
        )
        raise ArgumentTypeError("nested", type(nested).__name__, "a tensor of torch.nested", fix)
    if nested.layout is not torch.jagged:
        values, lengths = from_list(list(nested.unbind()))
        return values, offsets_from_lengths(lengths).to(values.device)
    if (dimension := getattr(nested, "_ragged_idx", 1)) != 1:
        rule, fix = "ragged only in dimension 1, the steps", "transpose it before the conversion"
        raise ShapeError("nested", f"dimension {dimension} ragged", rule, fix)
    jagged: Any = nested  # methods that Tensor's stubs lack
    # Copied, because the owner of the nested tensor may change its offsets.
    values, offsets = jagged.values(), jagged.offsets().to(torch.int64, copy=True)
    holes = jagged.lengths()
    if holes is None:
        if offsets.is_cpu:
            check_offsets(offsets, values.shape[0], "nested")
        return values, offsets
    lengths = holes.to(torch.int64)
    if lengths.is_cpu and bool(
        ((lengths < 0) | (offsets[:-1] < 0) | (offsets[:-1] + lengths > len(values))).any()
    ):
        got, rule = (
            "offsets and lengths beyond its values",
            "a nested tensor whose sequences are within its values",
        )
        raise ShapeError("nested", got, rule, "create the nested tensor again")
    total = int(lengths.sum())
    index = element_index(offsets[:-1], lengths, total)
    return values.index_select(0, index), offsets_from_lengths(lengths)


def to_nested(values: Tensor, offsets: Tensor, longest: int) -> Tensor:
    """Return a jagged :mod:`torch.nested` tensor that shares the memory."""
    nested: Tensor = torch.nested.nested_tensor_from_jagged(values, offsets, max_seqlen=longest)
    return nested


# -- Arrow
# --------------------------------------------------------------------------------------------------


def from_arrow(array: Any) -> tuple[Tensor, Tensor]:
    """Return values and offsets of an Arrow list array; one chunk of numbers shares its memory."""
    pyarrow = require("pyarrow", "data")
    if not isinstance(array, pyarrow.Array | pyarrow.ChunkedArray) and hasattr(
        array, "__arrow_c_stream__"
    ):
        array = pyarrow.chunked_array(array)
    if isinstance(array, pyarrow.ChunkedArray):
        # combine_chunks copies a single chunk.
        array = array.chunk(0) if array.num_chunks == 1 else array.combine_chunks()
    if isinstance(array, pyarrow.ChunkedArray):  # chunks too large for 32-bit offsets
        array = pyarrow.concat_arrays(
            [chunk.cast(pyarrow.large_list(chunk.type.value_type)) for chunk in array.chunks]
        )
    if not isinstance(array, pyarrow.Array) or not _is_list(array.type):
        kind = array.type if isinstance(array, pyarrow.Array) else type(array).__name__
        fix = "pass a list column, or Ragged(sequences)"
        raise ArgumentTypeError("array", str(kind), "an Arrow array of lists", fix)
    _refuse_nulls(array, "array")
    offsets = _list_offsets(array)
    flat = array.flatten()
    if _is_list(flat.type):
        _refuse_nulls(flat, "array's elements")
        sizes = np.unique(np.diff(_list_offsets(flat)))
        if len(sizes) > 1:
            rule = "an array whose elements all have the same number of channels"
            fix = "pad or cut the inner lists to one length"
            raise ShapeError("array", f"elements of {sizes[0]} to {sizes[-1]} numbers", rule, fix)
        channels = int(sizes[0]) if len(sizes) else int(getattr(flat.type, "list_size", 0))
        return _numbers(flat.flatten()).reshape(len(flat), channels), torch.from_numpy(offsets)
    return _numbers(flat), torch.from_numpy(offsets)


def _is_list(kind: Any) -> bool:
    types = require("pyarrow", "data").types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _list_offsets(array: Any) -> NDArray[np.int64]:
    """Return the offsets of a list array, which may be a slice, from 0."""
    if hasattr(array, "offsets"):
        offsets: NDArray[np.int64] = np.array(array.offsets.to_numpy(), dtype=np.int64)
        return np.asarray(offsets - offsets[0])
    return np.arange(len(array) + 1, dtype=np.int64) * int(array.type.list_size)


def _refuse_nulls(array: Any, name: str) -> None:
    if array.null_count:
        row = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
        rule = "without nulls; an empty sequence is an empty list"
        fix = "drop or fill them first, e.g. with pyarrow.compute.fill_null"
        raise ArgumentError(
            name, f"{array.null_count} null(s), the first at index {row}", rule, fix
        )


def _numbers(flat: Any) -> Tensor:
    pyarrow = require("pyarrow", "data")
    _refuse_nulls(flat, "array's values")
    kind = flat.type
    if pyarrow.types.is_boolean(kind):
        return torch.from_numpy(flat.to_numpy(zero_copy_only=False))
    if not (pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind)):
        rule = "an array of lists of numbers or booleans, or of lists of numbers"
        fix = "first map tokens to indices with a vocabulary, and timestamps to numbers"
        raise ArgumentTypeError("array", f"a list of {kind}", rule, fix)
    return as_tensor(flat.to_numpy(zero_copy_only=True))


def to_arrow(values: Tensor, offsets: Tensor) -> Any:
    """Return a ``pyarrow`` LargeListArray, which shares memory with a contiguous CPU tensor."""
    pyarrow = require("pyarrow", "data")
    if values.dtype is torch.bfloat16 or values.is_complex():
        fix = "convert with .to(torch.float32) first"
        raise ArgumentTypeError("values", str(values.dtype), "of a dtype that Arrow has", fix)
    if 0 in values.shape[1:]:
        got = f"elements of shape {tuple(values.shape[1:])}"
        raise ArgumentTypeError(
            "values", got, "elements with features of at least 1", "keep such batches out of Arrow"
        )
    flat = pyarrow.array(values.detach().cpu().resolve_neg().contiguous().view(-1).numpy())
    for size in reversed(values.shape[1:]):
        flat = pyarrow.FixedSizeListArray.from_arrays(flat, size)
    return pyarrow.LargeListArray.from_arrays(pyarrow.array(offsets.cpu().numpy()), flat)
