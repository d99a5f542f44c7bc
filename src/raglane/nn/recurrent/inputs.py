"""Like in, like out: every kind of input as flat values, and the way back for what a layer gives.

A layer takes a Ragged batch, a PackedSequence, a padded tensor with or without lengths, or one sequence without a
batch. Each becomes :class:`FlatInput`; what the kernels return is handed back as the kind that came.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from raglane.checks import check_dense, check_storage
from raglane.errors import ArgumentTypeError, ShapeError, message
from raglane.indexing import place_rows, take_rows
from raglane.native import rows
from raglane.packing.flat import find_packed, find_padded, flat_to_padded
from raglane.ragged import Ragged
from raglane.tracing import index_arithmetic, records_operators

__all__ = ["FlatInput", "flatten", "flatten_marks"]


@dataclass(slots=True, eq=False)
class FlatInput:
    """A batch as kernels take it.

    Attributes:
        batch: the sequences, in the caller's order.
        restore: from outputs ``(N, size)`` to the kind of the input.
        batched: False for one sequence without a batch: its states have no batch dimension either.
    """

    batch: Ragged
    restore: Callable[[Tensor], Any]
    batched: bool = True


def flatten(inputs: Any, lengths: Any, batch_first: bool) -> FlatInput:
    """Bring an input of any kind into the flat layout.

    Args:
        inputs: a Ragged ``(N, D)``, a PackedSequence, a tensor ``(B, T, D)`` or ``(T, B, D)``, or ``(T, D)``.
        lengths: for a padded tensor, ``(B,)`` integers from 0 to T; else None.
        batch_first: whether the batch is the first dimension of a padded tensor.

    Raises:
        ArgumentTypeError: another kind of input, or lengths with an input that has its own.
        ShapeError: a tensor of other dimensions, or a sparse one.
    """
    if isinstance(inputs, Ragged | PackedSequence):
        if lengths is not None:
            raise ArgumentTypeError(
                message("lengths", "lengths", f"a {type(inputs).__name__} brings its own", "leave them out")
            )
        if isinstance(inputs, Ragged):
            return FlatInput(inputs, inputs._like)
        return _flatten_packed(inputs)
    if not isinstance(inputs, Tensor) or inputs.is_nested:
        raise ArgumentTypeError(
            message(
                "input",
                "a nested tensor" if isinstance(inputs, Tensor) else f"a {type(inputs).__name__}",
                "a Ragged, a PackedSequence, or a tensor",
                "wrap a list of sequences with rl.Ragged(sequences), a nested tensor with rl.Ragged.from_nested"
                if not isinstance(inputs, torch.fx.Proxy)
                else "let the tracer of torch.fx say in is_leaf_module that the layer is one",
            )
        )
    check_dense("input", inputs)
    check_storage("input", inputs)
    if inputs.dim() == 2 and lengths is None:
        return FlatInput(_even(inputs, 1, inputs.shape[0]), lambda flat: flat, batched=False)
    if inputs.dim() != 3:
        raise ShapeError(
            message(
                "input",
                f"a tensor of shape {tuple(inputs.shape)}",
                f"(B, T, D) or (T, B, D){'' if lengths is not None else ', or (T, D) for one sequence'}",
                "add the missing dimension, or pass a Ragged",
            )
        )
    steps = inputs.shape[1] if batch_first else inputs.shape[0]
    if lengths is None:
        return _flatten_dense(inputs, batch_first)
    return _flatten_padded(inputs, lengths, batch_first, steps)


def flatten_marks(marks: Any, lengths: Any, batch_first: bool) -> Ragged:
    """Bring one number an element, which comes with an input of the same kind, into the flat layout.

    Args:
        marks: a Ragged ``(N,)``, a PackedSequence, a tensor ``(B, T)`` or ``(T, B)``, or ``(T,)``.
        lengths: as for :func:`flatten`.
        batch_first: as for :func:`flatten`.

    Raises:
        ArgumentTypeError: as for :func:`flatten`.
        ShapeError: as for :func:`flatten`.

    Example:
        >>> import torch
        >>> flatten_marks(torch.tensor([[True, False]]), torch.tensor([1]), batch_first=True).values.tolist()
        [True]
    """
    if isinstance(marks, Tensor) and not marks.is_nested:
        return flatten(marks.unsqueeze(-1), lengths, batch_first).batch.map(lambda values: values.squeeze(-1))
    return flatten(marks, None, batch_first).batch


def _even(values: Tensor, count: int, steps: int) -> Ragged:
    """A batch of so many sequences of one length."""
    lengths = None if values.is_cpu else torch.full((count,), steps, dtype=torch.int64, device="cpu")
    return Ragged._make(values, _even_offsets(count, steps, values.device), lengths)


@index_arithmetic
def _even_offsets(count: int, steps: int, device: torch.device) -> Tensor:
    return torch.arange(count + 1, device=device) * steps


def _flatten_dense(inputs: Tensor, batch_first: bool) -> FlatInput:
    """A tensor in which every element is real."""
    batch_major = inputs if batch_first else inputs.transpose(0, 1)
    count, steps, size = batch_major.shape
    batch = _even(batch_major.reshape(count * steps, size), count, steps)

    def restore(flat: Tensor) -> Tensor:
        padded = flat.view(count, steps, flat.shape[1])
        return padded if batch_first else padded.transpose(0, 1)

    return FlatInput(batch, restore)


def _flatten_padded(inputs: Tensor, lengths: Any, batch_first: bool, steps: int) -> FlatInput:
    """A padded tensor with lengths; its own index leads back where the tensor lies in memory as its shape says."""
    if records_operators():
        from raglane.packing import operators

        values, offsets = operators.padded_to_flat(inputs, torch.as_tensor(lengths), batch_first)
        batch = Ragged._make(values, offsets, None)
        return FlatInput(batch, lambda flat: operators.padded_from_flat(flat, offsets, batch_first, steps))
    moved = rows.flatten_padded(inputs, lengths, batch_first)
    if moved is not None:
        values, layout = moved
        return FlatInput(Ragged._make(values, layout.offsets, None), layout.from_flat)
    found = find_padded(inputs, lengths, batch_first)

    def restore(flat: Tensor) -> Tensor:
        if not inputs.is_contiguous():
            return flat_to_padded(flat, found.offsets, steps, batch_first)
        return place_rows(flat, found.index, found.rows.shape[0]).view(*inputs.shape[:2], flat.shape[1])

    return FlatInput(Ragged._make(take_rows(found.rows, found.index), found.offsets, found.lengths), restore)


def _flatten_packed(packed: PackedSequence) -> FlatInput:
    """A pack, whichever way it broke ties when it was sorted: its own index leads there and back."""
    moved = rows.flatten_packed(packed)
    if moved is not None:
        values, layout = moved
        batch = Ragged._make(values, layout.offsets, None)
        return FlatInput(batch, lambda flat: packed._replace(data=layout.from_flat(flat)))
    check_storage("packed.data", packed.data)
    found = find_packed(packed)
    batch = Ragged._make(take_rows(found.rows, found.index), found.offsets, found.lengths)
    return FlatInput(batch, lambda flat: packed._replace(data=place_rows(flat, found.index, found.rows.shape[0])))
