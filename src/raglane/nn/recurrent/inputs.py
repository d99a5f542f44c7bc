"""Like in, like out: every kind of input as flat values, and the way back for what a layer gives.

A layer takes a Ragged batch, a PackedSequence, a padded tensor with or without lengths, or one sequence without a
batch. Each becomes :class:`Inputs`; what the kernels return is handed back as the kind that came.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from raglane._utils.checks import check_dense, check_storage
from raglane._utils.messages import message
from raglane._utils.tracing import index_arithmetic
from raglane.errors import ArgumentTypeError, ShapeError
from raglane.kernels.contract import Dense, Packed
from raglane.packing.convert import flatten_packed, flatten_padded
from raglane.ragged import Ragged

Restore = Callable[[Tensor], Any]
Flat = tuple[Ragged, Restore]


def _as_it_is(output: Tensor) -> Tensor:
    return output


@dataclass(slots=True, eq=False)
class Inputs:
    """An input as it came, and flat as soon as somebody asks for that."""

    data: Tensor  # the tensor that came, or that is in what came; its last dimension are the features
    # Makes the flat batch, in the caller's order, and the way from outputs ``(N, size)`` back to the input's kind.
    flatten: Callable[[], Flat]
    layout: Packed | Dense | None = None  # of ``data``, where it is one of torch's own, and there are elements
    restore_layout: Restore = _as_it_is  # from an output that lies as ``data`` to the kind of the input
    is_dense: bool = False  # it is a tensor in which every element is real
    is_batched: bool = True  # False for one sequence without a batch: its states have no batch dimension either
    count: int = 0  # of sequences in a ``Dense`` layout
    flat: Flat | None = None  # what ``flatten`` has made

    def flattened(self) -> Flat:
        """The flat batch and the way back; made once."""
        if self.flat is None:
            self.flat = self.flatten()
        return self.flat


def read(input: Any, lengths: Any, batch_first: bool) -> Inputs:
    """Accept an input of any kind that ``forward`` of a layer takes."""
    if isinstance(input, (Ragged, PackedSequence)):
        if lengths is not None:
            rule = f"None for a {type(input).__name__}, which has lengths"
            raise ArgumentTypeError(message("lengths", "lengths", rule, "leave them out"))
        if isinstance(input, Ragged):
            flat = input, input._like
            return Inputs(input._values, lambda: flat, flat=flat)
        return _read_packed(input)
    if not isinstance(input, Tensor) or input.is_nested:
        got = "a nested tensor" if isinstance(input, Tensor) else f"a {type(input).__name__}"
        fix = "wrap a list of sequences with rl.Ragged(sequences), a nested tensor with rl.Ragged.from_nested"
        if isinstance(input, torch.fx.Proxy):
            fix = "have the tracer of torch.fx treat the layer as a leaf, in is_leaf_module"
        raise ArgumentTypeError(message("input", got, "a Ragged, a PackedSequence, or a tensor", fix))
    check_dense("input", input)
    check_storage("input", input)
    if input.dim() == 2 and lengths is None:
        return _read_one(input, batch_first)
    if input.dim() != 3:
        rule = f"a tensor (B, T, D) or (T, B, D){'' if lengths is not None else ', or (T, D) for one sequence'}"
        fix = "add the missing dimension, or pass a Ragged"
        raise ShapeError(message("input", f"a tensor of shape {tuple(input.shape)}", rule, fix))
    if lengths is None:
        return _read_dense(input, batch_first)
    return Inputs(input, partial(_flatten_padded, input, lengths, batch_first))


def flatten_marks(marks: Any, lengths: Any, batch_first: bool) -> Ragged:
    """Bring one number per element, which comes with an input of the same kind, into the flat layout."""
    if isinstance(marks, Tensor) and not marks.is_nested:
        return read(marks.unsqueeze(-1), lengths, batch_first).flattened()[0].map(lambda values: values.squeeze(-1))
    return read(marks, None, batch_first).flattened()[0]


def _read_one(sequence: Tensor, batch_first: bool) -> Inputs:
    """One sequence without a batch."""
    steps, batch_dim = sequence.shape[0], 0 if batch_first else 1
    layout = Dense(batch_first) if sequence.numel() else None
    return Inputs(
        sequence if layout is None else sequence.unsqueeze(batch_dim),
        lambda: (_even(sequence, 1, steps), _as_it_is),
        layout,
        lambda output: output.squeeze(batch_dim),
        is_dense=True,
        is_batched=False,
        count=1,
    )


def _read_dense(input: Tensor, batch_first: bool) -> Inputs:
    """A tensor in which every element is real."""
    count, steps = input.shape[:2] if batch_first else input.shape[:2][::-1]

    def flatten() -> Flat:
        # Of one step or one sequence, both orders are the same.
        batch_major = input if batch_first or count == 1 or steps == 1 else input.transpose(0, 1)
        return _even(batch_major.reshape(count * steps, input.shape[2]), count, steps), restore

    def restore(flat: Tensor) -> Tensor:
        if count == 1 or steps == 1:
            return flat.view(*input.shape[:2], flat.shape[1])
        padded = flat.view(count, steps, flat.shape[1])
        # Step after step in memory, as torch's layers give it: their callers take views of it.
        return padded if batch_first else padded.transpose(0, 1).contiguous()

    layout = Dense(batch_first) if input.numel() else None
    return Inputs(input, flatten, layout, is_dense=True, count=count)


def _read_packed(packed: PackedSequence) -> Inputs:
    data, sizes, there, back = packed
    layout = Packed(sizes, there, back) if data.dim() == 2 and data.numel() else None
    return Inputs(data, partial(_flatten_packed, packed), layout, lambda output: packed._replace(data=output))


def _even(values: Tensor, count: int, steps: int) -> Ragged:
    """A batch of ``count`` sequences of one length."""
    lengths = None if values.is_cpu else torch.full((count,), steps, dtype=torch.int64, device="cpu")
    return Ragged._make(values, _even_offsets(count, steps, values.device), lengths)


@index_arithmetic
def _even_offsets(count: int, steps: int, device: torch.device) -> Tensor:
    if not torch.compiler.is_compiling() and steps:
        return torch.arange(0, count * steps + 1, steps, device=device)  # one operation in place of two
    return torch.arange(count + 1, device=device) * steps


def _flatten_padded(input: Tensor, lengths: Any, batch_first: bool) -> Flat:
    """A padded tensor with lengths."""
    flat = flatten_padded(input, lengths, batch_first, argument="input")
    return Ragged._make(flat.values, flat.offsets, flat.lengths), flat.restore


def _flatten_packed(packed: PackedSequence) -> Flat:
    """A pack, whichever way it broke ties when it was sorted: its own index leads there and back."""
    flat = flatten_packed(packed)
    batch = Ragged._make(flat.values, flat.offsets, flat.lengths)
    return batch, lambda values: packed._replace(data=flat.restore(values))
