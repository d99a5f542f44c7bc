"""Reads a layer's input of any kind as flat values, and converts outputs back to that kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from raglane._utils.checks import check_dense, check_storage
from raglane._utils.tracing import index_arithmetic
from raglane.errors import ArgumentTypeError, ShapeError
from raglane.kernels.contract import Dense, InputKind, Packed
from raglane.packing.convert import flatten_packed, flatten_padded
from raglane.packing.flat_values import RowTable, table_of_packed, table_of_padded
from raglane.ragged import Ragged

Restore = Callable[[Tensor], Any]
Flat = tuple[Ragged, Restore]


def _unchanged(output: Tensor) -> Tensor:
    return output


@dataclass(slots=True, eq=False)
class Inputs:
    """A layer's input in its own layout, and flat when that is needed."""

    data: Tensor  # the input's values; the features are its last dimension
    # Returns the flat batch in the caller's order, and a function from outputs ``(N, size)`` to the
    # input's kind.
    flatten: Callable[[], Flat]
    layout: Packed | Dense | None = (
        None  # of ``data``, if torch's kernels accept it; None without elements
    )
    restore_layout: Restore = (
        _unchanged  # from an output in the layout of ``data`` to the input's kind
    )
    find_table: Callable[[], RowTable | None] | None = None  # returns the rows of ``data`` for C++
    kind: InputKind = "flat"
    is_batched: bool = (
        True  # False for one sequence without a batch dimension; its states have none either
    )
    count: int = 0  # of sequences in a ``Dense`` layout
    flat: Flat | None = None  # the cached result of ``flatten``

    def flattened(self) -> Flat:
        """Return the result of ``flatten``, which is called once."""
        if self.flat is None:
            self.flat = self.flatten()
        return self.flat


def read(input: Any, lengths: Any, batch_first: bool) -> Inputs:
    """Read the input and lengths of ``RecurrentLayer.forward``."""
    if isinstance(input, (Ragged, PackedSequence)):
        if lengths is not None:
            rule = f"None, because a {type(input).__name__} contains its lengths"
            raise ArgumentTypeError("lengths", "lengths", rule, "leave them out")
        if isinstance(input, Ragged):
            flat = input, input._like
            return Inputs(input._values, lambda: flat, flat=flat)
        return _read_packed(input)
    if not isinstance(input, Tensor) or input.is_nested:
        got = "a nested tensor" if isinstance(input, Tensor) else f"a {type(input).__name__}"
        fix = "wrap a list of sequences with rl.Ragged(sequences), a nested tensor with rl.Ragged.from_nested"
        if isinstance(input, torch.fx.Proxy):
            fix = "make the layer a leaf of the torch.fx tracer, in is_leaf_module"
        raise ArgumentTypeError("input", got, "a Ragged, a PackedSequence, or a tensor", fix)
    if input.dim() == 2 and lengths is None:
        return _read_one(input, batch_first)
    if input.dim() != 3:
        rule = f"a tensor (B, T, D) or (T, B, D){'' if lengths is not None else ', or (T, D) for one sequence'}"
        check_input(input)
        fix = "add the missing dimension, or pass a Ragged"
        raise ShapeError("input", f"a tensor of shape {tuple(input.shape)}", rule, fix)
    if lengths is None:
        return _read_dense(input, batch_first)
    rows = input, lengths, batch_first
    return Inputs(
        input, partial(_flatten_padded, *rows), find_table=partial(table_of_padded, *rows)
    )


def check_input(input: Tensor) -> None:
    """Raise if the input is sparse, nested or quantized, or has lost its memory.

    Called just before Python or torch reads it; C checks for itself.
    """
    check_dense("input", input)
    check_storage("input", input)


def flatten_resets(resets: Any, lengths: Any, batch_first: bool) -> Ragged:
    """Convert resets, which are of the input's kind without features, to flat values ``(N,)``."""
    if isinstance(resets, Tensor) and not resets.is_nested:
        return (
            read(resets.unsqueeze(-1), lengths, batch_first)
            .flattened()[0]
            .map(lambda values: values.squeeze(-1))
        )
    return read(resets, None, batch_first).flattened()[0]


def _read_one(sequence: Tensor, batch_first: bool) -> Inputs:
    """Read one sequence without a batch dimension."""
    check_input(sequence)
    steps = sequence.shape[0]
    batch_dim = 0 if batch_first else 1
    layout = Dense(batch_first) if sequence.numel() else None
    data = sequence if layout is None else sequence.unsqueeze(batch_dim)
    return Inputs(
        data,
        lambda: (_even(sequence, 1, steps), _unchanged),
        layout,
        lambda output: output.squeeze(batch_dim),
        kind="dense",
        is_batched=False,
        count=1,
    )


def _read_dense(input: Tensor, batch_first: bool) -> Inputs:
    """Read a tensor without padding."""
    count, steps = input.shape[:2] if batch_first else input.shape[:2][::-1]

    def flatten() -> Flat:
        check_input(input)
        # With one step or one sequence, both orders are the same.
        batch_major = input if batch_first or count == 1 or steps == 1 else input.transpose(0, 1)
        return _even(batch_major.reshape(count * steps, input.shape[2]), count, steps), restore

    def restore(flat: Tensor) -> Tensor:
        if count == 1 or steps == 1:
            return flat.view(*input.shape[:2], flat.shape[1])
        padded = flat.view(count, steps, flat.shape[1])
        # Contiguous with time first, like the output of torch's layers, because callers take views
        # of it.
        return padded if batch_first else padded.transpose(0, 1).contiguous()

    layout = Dense(batch_first) if input.numel() else None
    is_flat = batch_first or count == 1 or steps == 1
    find_table = None if is_flat else partial(_dense_table, input)
    return Inputs(input, flatten, layout, find_table=find_table, kind="dense", count=count)


def _dense_table(input: Tensor) -> RowTable | None:
    return table_of_padded(input, even_lengths(*input.shape[:2]), batch_first=False)


@lru_cache(maxsize=64)
def even_lengths(steps: int, count: int) -> Tensor:
    """Return the lengths of ``count`` sequences of ``steps`` elements, kept: not to be changed."""
    return torch.full((count,), steps, dtype=torch.int64, device="cpu")


def _read_packed(packed: PackedSequence) -> Inputs:
    data, batch_sizes, sorted_indices, unsorted_indices = packed
    layout = (
        Packed(batch_sizes, sorted_indices, unsorted_indices)
        if data.dim() == 2 and data.numel()
        else None
    )
    flatten = partial(_flatten_packed, packed)
    find_table = partial(table_of_packed, packed)
    make: Any = packed._make
    return Inputs(
        data,
        flatten,
        layout,
        lambda output: make((output, *packed[1:])),
        find_table,
        "packed",
    )


def _even(values: Tensor, count: int, steps: int) -> Ragged:
    """Return a batch of ``count`` sequences of ``steps`` elements each."""
    lengths = (
        None if values.is_cpu else torch.full((count,), steps, dtype=torch.int64, device="cpu")
    )
    return Ragged._make(values, _even_offsets(count, steps, values.device), lengths)


@index_arithmetic
def _even_offsets(count: int, steps: int, device: torch.device) -> Tensor:
    if not torch.compiler.is_compiling() and steps:
        return torch.arange(
            0, count * steps + 1, steps, device=device
        )  # one operation instead of two
    return torch.arange(count + 1, device=device) * steps


def _flatten_padded(input: Tensor, lengths: Any, batch_first: bool) -> Flat:
    check_input(input)
    flat = flatten_padded(input, lengths, batch_first, argument="input")
    return Ragged._make(flat.values, flat.offsets, flat.lengths), flat.restore


def _flatten_packed(packed: PackedSequence) -> Flat:
    flat = flatten_packed(packed)
    batch = Ragged._make(flat.values, flat.offsets, flat.lengths)
    return batch, lambda values: packed._replace(data=flat.restore(values))
