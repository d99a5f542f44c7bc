"""Like in, like out: every kind of input as flat values, and the way back for what a layer gives.

A layer takes a Ragged batch, a PackedSequence, a padded tensor with or without lengths, or one sequence without a
batch. Each becomes :class:`Inputs`; what the kernels return is handed back as the kind that came.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from raglane._utils.checks import check_dense, check_storage
from raglane._utils.tracing import index_arithmetic
from raglane.errors import ArgumentTypeError, ShapeError, message
from raglane.kernels.contract import Dense, Packed
from raglane.packing.convert import flatten_packed, flatten_padded
from raglane.ragged import Ragged

__all__ = ["Inputs", "flatten_marks", "read"]

Restore = Callable[[Tensor], Any]


def _as_it_is(output: Tensor) -> Tensor:
    return output


class Inputs:
    """An input as it came, and flat as soon as somebody asks for that.

    Args:
        data: the tensor that came, or that is in what came; its last dimension are the features.
        flatten: makes the flat batch, and what leads from outputs ``(N, size)`` back to the kind of the input.
        layout: how ``data`` lies where that is a layout of torch's own, and has elements; else None.
        restore_layout: from an output that lies as ``data`` to the kind of the input.
        is_dense: whether it is a tensor in which every element is real.
        is_batched: False for one sequence without a batch: its states have no batch dimension either.
        count: the number of sequences in a ``Dense`` layout.
    """

    __slots__ = ("_flat", "_flatten", "count", "data", "is_batched", "is_dense", "layout", "restore_layout")

    def __init__(
        self,
        data: Tensor,
        flatten: Callable[[], tuple[Ragged, Restore]],
        layout: Packed | Dense | None = None,
        restore_layout: Restore = _as_it_is,
        *,
        is_dense: bool = False,
        is_batched: bool = True,
        count: int = 0,
    ) -> None:
        self.data, self.layout, self.restore_layout = data, layout, restore_layout
        self.is_dense, self.is_batched, self.count = is_dense, is_batched, count
        self._flatten = flatten
        self._flat: tuple[Ragged, Restore] | None = None

    @property
    def batch(self) -> Ragged:
        """The sequences, in the caller's order."""
        return self._flattened()[0]

    def restore(self, flat: Tensor) -> Any:
        """From outputs ``(N, size)`` to the kind of the input."""
        return self._flattened()[1](flat)

    def _flattened(self) -> tuple[Ragged, Restore]:
        if self._flat is None:
            self._flat = self._flatten()
        return self._flat


def read(input: Any, lengths: Any, batch_first: bool) -> Inputs:
    """Take up an input of any kind.

    Args:
        input: a Ragged ``(N, D)``, a PackedSequence, a tensor ``(B, T, D)`` or ``(T, B, D)``, or ``(T, D)``.
        lengths: for a padded tensor, ``(B,)`` integers from 0 to T; else None.
        batch_first: whether the batch is the first dimension of a padded tensor.
    """
    if isinstance(input, (Ragged, PackedSequence)):
        if lengths is not None:
            raise ArgumentTypeError(
                message("lengths", "lengths", f"a {type(input).__name__} brings its own", "leave them out")
            )
        return _read_ragged(input) if isinstance(input, Ragged) else _read_packed(input)
    if not isinstance(input, Tensor) or input.is_nested:
        raise ArgumentTypeError(
            message(
                "input",
                "a nested tensor" if isinstance(input, Tensor) else f"a {type(input).__name__}",
                "a Ragged, a PackedSequence, or a tensor",
                "wrap a list of sequences with rl.Ragged(sequences), a nested tensor with rl.Ragged.from_nested"
                if not isinstance(input, torch.fx.Proxy)
                else "have the tracer of torch.fx treat the layer as a leaf, in is_leaf_module",
            )
        )
    check_dense("input", input)
    check_storage("input", input)
    if input.dim() == 2 and lengths is None:
        return _read_one(input, batch_first)
    if input.dim() != 3:
        raise ShapeError(
            message(
                "input",
                f"a tensor of shape {tuple(input.shape)}",
                f"(B, T, D) or (T, B, D){'' if lengths is not None else ', or (T, D) for one sequence'}",
                "add the missing dimension, or pass a Ragged",
            )
        )
    if lengths is None:
        return _read_dense(input, batch_first)
    return Inputs(input, partial(_flatten_padded, input, lengths, batch_first))


def flatten_marks(marks: Any, lengths: Any, batch_first: bool) -> Ragged:
    """Bring one number per element, which comes with an input of the same kind, into the flat layout.

    Args:
        marks: a Ragged ``(N,)``, a PackedSequence, a tensor ``(B, T)`` or ``(T, B)``, or ``(T,)``.
        lengths: as for :func:`read`.
        batch_first: as for :func:`read`.

    Example:
        >>> import torch
        >>> flatten_marks(torch.tensor([[True, False]]), torch.tensor([1]), batch_first=True).values.tolist()
        [True]
    """
    if isinstance(marks, Tensor) and not marks.is_nested:
        return read(marks.unsqueeze(-1), lengths, batch_first).batch.map(lambda values: values.squeeze(-1))
    return read(marks, None, batch_first).batch


def _read_ragged(batch: Ragged) -> Inputs:
    return Inputs(batch.values, lambda: (batch, batch._like))


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

    def flatten() -> tuple[Ragged, Restore]:
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


def _flatten_padded(input: Tensor, lengths: Any, batch_first: bool) -> tuple[Ragged, Restore]:
    """A padded tensor with lengths."""
    flat = flatten_padded(input, lengths, batch_first, argument="input")
    return Ragged._make(flat.values, flat.offsets, flat.lengths), flat.restore


def _flatten_packed(packed: PackedSequence) -> tuple[Ragged, Restore]:
    """A pack, whichever way it broke ties when it was sorted: its own index leads there and back."""
    flat = flatten_packed(packed)
    batch = Ragged._make(flat.values, flat.offsets, flat.lengths)
    return batch, lambda values: packed._replace(data=flat.restore(values))
