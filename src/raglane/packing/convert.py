"""Conversions of flat values and offsets to and from padded batches and packs, differentiable.

On a CPU the kernels move the rows, unless they are missing or operators are recorded
(:mod:`raglane.packing.flat_values`). Otherwise index arithmetic does. Lengths on a device and a pack's
``sorted_indices`` are copied to the host once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from raglane._utils.tracing import has_tangent, never_traced, records_operators, refuse_jit_trace
from raglane.packing import flat_values
from raglane.packing.flat_values import find_packed, find_padded, flat_to_padded
from raglane.packing.layouts import inverse, packed_layout
from raglane.packing.pack_checks import read_padded, read_padding_side
from raglane.segments import lengths_from_offsets
from raglane.segments.indexing import place_rows, take_rows


@never_traced
def pack_flat(values: Tensor, offsets: Tensor, lengths: Tensor) -> PackedSequence:
    """Return flat values as a pack with ``sorted_indices``; does not wait, because ``lengths`` are
    on the CPU.
    """
    refuse_jit_trace("a conversion to a PackedSequence")
    index, batch_sizes, sorted_indices = packed_layout(lengths, offsets)
    return PackedSequence(
        take_rows(values, index), batch_sizes, sorted_indices, inverse(sorted_indices)
    )


class Flattened(NamedTuple):
    """A flat batch that was converted from another layout."""

    values: Tensor  # (N, *features), in the caller's order
    offsets: Tensor  # (B + 1,) int64 on the device of the values
    lengths: Tensor | None  # (B,) int64 on the CPU; None if the offsets are on the CPU
    restore: Callable[
        [Tensor], Tensor
    ]  # converts values (N, *features) to the original layout, padded with zeros

    def lengths_cpu(self) -> Tensor:
        """Return the lengths, ``(B,)`` int64 on the CPU."""
        return lengths_from_offsets(self.offsets) if self.lengths is None else self.lengths


def flatten_packed(packed: PackedSequence, argument: str = "packed") -> Flattened:
    """Convert a PackedSequence; errors call it ``argument``."""
    refuse_jit_trace("a conversion of a PackedSequence")
    if (
        isinstance(packed, PackedSequence)
        and (moved := flat_values.flatten_packed(packed)) is not None
    ):
        values, layout = moved
        return Flattened(values, layout.offsets, None, layout.from_flat)
    elements = find_packed(packed, argument)
    count = elements.rows.shape[0]
    values = take_rows(elements.rows, elements.index)
    return Flattened(
        values,
        elements.offsets,
        elements.lengths,
        lambda flat: place_rows(flat, elements.index, count),
    )


def flatten_padded(
    padded: Tensor,
    lengths: Any,
    batch_first: bool = False,
    padding_side: str = "right",
    argument: str = "padded",
) -> Flattened:
    """Convert a padded batch; errors call it ``argument``."""
    refuse_jit_trace("a conversion of a padded batch")
    left = read_padding_side(padding_side)
    if not left:
        if records_operators() and not has_tangent([padded]):
            return _flatten_by_operators(padded, lengths, batch_first, argument)
        moved = (
            flat_values.flatten_padded(padded, lengths, batch_first) if _is_padded(padded) else None
        )
        if moved is not None:
            values, layout = moved
            return Flattened(values, layout.offsets, None, layout.from_flat)
    elements = find_padded(padded, lengths, batch_first, left, argument)

    def restore(flat: Tensor) -> Tensor:
        if not padded.is_contiguous():
            return flat_to_padded(
                flat,
                elements.offsets,
                padded.shape[1 if batch_first else 0],
                batch_first,
                left=left,
            )
        return place_rows(flat, elements.index, elements.rows.shape[0]).view(
            *padded.shape[:2], *flat.shape[1:]
        )

    return Flattened(
        take_rows(elements.rows, elements.index), elements.offsets, elements.lengths, restore
    )


def _is_padded(padded: Any) -> bool:
    """Return True if an object can be a padded batch; index arithmetic raises for others."""
    is_dense = isinstance(padded, Tensor) and padded.layout is torch.strided and padded.dim() >= 2
    return is_dense and not (padded.is_nested or padded.is_quantized)


def _flatten_by_operators(
    padded: Tensor, lengths: Any, batch_first: bool, argument: str
) -> Flattened:
    # Imported here, because registering operators is slow.
    from raglane.packing import conversion_operators

    _, steps = read_padded(padded, argument, batch_first)
    values, offsets = conversion_operators.padded_to_flat(
        padded, torch.as_tensor(lengths), batch_first
    )
    return Flattened(
        values,
        offsets,
        None,
        lambda flat: conversion_operators.padded_from_flat(flat, offsets, batch_first, steps),
    )
