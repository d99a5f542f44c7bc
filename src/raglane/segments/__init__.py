"""Arithmetic on flat values and offsets: the sequences of a batch, without a loop over them.

A ragged batch of ``B`` sequences is ``values`` of shape ``(N, *features)`` and ``offsets`` of shape ``(B + 1,)``,
int64, first 0, last ``N``; sequence ``b`` is ``values[offsets[b]:offsets[b + 1]]``. The functions here know
nothing else, and everything above them (packing, conversions, :class:`~raglane.Ragged`, schedules) is built on
them. Gradients flow through ``values``, twice if asked. A sequence never sees another's values, so a NaN in one
stays there. Nothing here copies from a device to the host: a size that only the lengths know is an argument.
"""

from __future__ import annotations

from raglane.segments.index import (
    element_index,
    lengths_from_offsets,
    offsets_from_lengths,
    positions,
    segment_ids,
)
from raglane.segments.order import cumsum, reverse, reverse_index, shift
from raglane.segments.reductions import first, last, logsumexp, max, mean, min, softmax, spread, sum

__all__ = [
    "cumsum",
    "element_index",
    "first",
    "last",
    "lengths_from_offsets",
    "logsumexp",
    "max",
    "mean",
    "min",
    "offsets_from_lengths",
    "positions",
    "reverse",
    "reverse_index",
    "segment_ids",
    "shift",
    "softmax",
    "spread",
    "sum",
]
