"""Lists of sequences: checking them, and laying them one after the other."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from raglane.errors import DimensionError, KindError, ShapeError, message
from raglane.segments.indexing import place_joined_rows
from raglane.segments.layouts import IntArray, padded_rows

__all__ = ["join", "read_sequences", "stack"]

# Narrower rows, and fewer numbers, are sooner placed row by row than cut out and joined as blocks of a sequence.
_WIDE = 8
_MANY = 65536


def read_sequences(sequences: Any) -> tuple[tuple[Tensor, ...], IntArray]:
    """Check a list of sequences, all but their trailing shapes, which :func:`join` checks."""
    if isinstance(sequences, PackedSequence):
        _raise_no_list(sequences)
    try:
        is_nested = isinstance(sequences, Tensor) and sequences.is_nested
        sequences = sequences.unbind() if is_nested else tuple(sequences)
    except TypeError:
        _raise_no_list(sequences)
    try:
        lengths = np.array([sequence.shape[0] for sequence in sequences], dtype=np.int64)
        dtypes = {sequence.dtype for sequence in sequences}
    except (AttributeError, TypeError, IndexError):
        _raise_unfit(sequences)
        raise
    if len(dtypes) > 1 and all(torch.can_cast(dtype, sequences[0].dtype) for dtype in dtypes):
        # As in torch, the first says which dtype comes out; but not where numbers would be cut off to fit it.
        sequences = tuple(sequence.to(sequences[0].dtype) for sequence in sequences)
        dtypes = {sequences[0].dtype}
    # NumPy's arrays have a shape and a dtype too; torch.cat passes over a (0,) among tensors of any shape.
    is_odd = not sequences or not isinstance(sequences[0], Tensor) or sequences[0].layout is not torch.strided
    if len(dtypes) != 1 or is_odd or np.count_nonzero(lengths) != lengths.shape[0]:
        _raise_unfit(sequences)
    return sequences, lengths


def _raise_no_list(sequences: Any) -> NoReturn:
    rule = "a list of tensors, one per sequence"
    fix = "pass for instance [torch.ones(3), torch.ones(2)]; pad_packed_sequence takes a pack"
    raise KindError(message("sequences", f"type {type(sequences).__name__}", rule, fix))


def join(sequences: tuple[Tensor, ...]) -> Tensor:
    """Lay sequences one after the other."""
    try:
        return torch.cat(sequences)
    except (RuntimeError, TypeError):
        _raise_unfit(sequences)
        raise  # nothing wrong with the sequences: out of memory, for instance


def stack(sequences: tuple[Tensor, ...], lengths: IntArray, fill: float, batch_first: bool, left: bool) -> Tensor:
    """Lay sequences side by side, padded to the longest."""
    count, steps = len(sequences), int(lengths[lengths.argmax()])
    features = sequences[0].shape[1:]
    try:
        width = math.prod(features)
        if batch_first and width >= _WIDE and width * count * steps >= _MANY:
            return torch.cat(_with_padding(sequences, steps - lengths, fill, left)).view(count, steps, *features)
        shape, strides = ((count, steps), (steps, 1)) if batch_first else ((steps, count), (1, count))
        index = padded_rows(lengths, int(lengths.sum()), strides, steps if left else None, sequences[0].device)
        return place_joined_rows(sequences, index, count * steps, fill).view(*shape, *features)
    except (RuntimeError, TypeError):
        _raise_unfit(sequences)
        raise


def _with_padding(sequences: tuple[Tensor, ...], missing: IntArray, fill: float, left: bool) -> list[Tensor]:
    """Sequences and what they miss in turn: one after the other they are the padded batch, in a single pass."""
    # Expanded: views of one number, however much padding there is.
    padding = sequences[0].new_full((), fill).expand(int(missing.sum()), *sequences[0].shape[1:])
    pieces = [padding] * (2 * len(sequences))
    pieces[left::2] = sequences
    pieces[not left :: 2] = padding.split_with_sizes(missing.tolist())
    return pieces


def _raise_unfit(sequences: tuple[Any, ...]) -> None:
    """Find what keeps sequences from lying one after the other, and say it."""
    if not sequences:
        rule = "at least one, since the features and the dtype are read from them"
        fix = "skip an empty batch, or pass a padded tensor of shape (0, 0, *features) to pack_padded_sequence"
        raise ShapeError(message("sequences", "none", rule, fix))
    for number, sequence in enumerate(sequences):
        argument = f"sequences[{number}]"
        if not isinstance(sequence, Tensor):
            fix = "wrap it with torch.as_tensor"
            raise KindError(message(argument, f"type {type(sequence).__name__}", "each sequence is a tensor", fix))
        if sequence.layout is not torch.strided or sequence.is_nested:
            got = f"a tensor of {sequence.layout}"
            raise KindError(message(argument, got, "dense tensors", "call .to_dense() on it"))
        if sequence.dim() == 0:
            fix = "pass sequences of shape (L, *features)"
            raise DimensionError(message(argument, "a tensor without dimensions", "the first counts steps", fix))
        first = sequences[0]
        for what, mine, its in (
            ("trailing shape", tuple(sequence.shape[1:]), tuple(first.shape[1:])),
            ("dtype", sequence.dtype, first.dtype),
            ("device", sequence.device, first.device),
        ):
            if mine != its:
                rule = f"sequences share it, and sequences[0] has {its}"
                fix = (
                    f"make them agree, for instance with sequence.to({its})"
                    if what != "trailing shape"
                    else ("pass sequences of shape (L, *features) that differ in L alone")
                )
                raise ShapeError(message(argument, f"{what} {mine}", rule, fix))
