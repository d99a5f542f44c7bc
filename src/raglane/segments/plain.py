"""The functions of :mod:`raglane.segments` without their checks, for values and offsets that are known to fit.

What calls these has made the offsets itself, or has checked them: torch reads and writes beyond its memory where they
do not describe the values.
"""

from __future__ import annotations

from raglane.segments.index import element_index, lengths_from_offsets, offsets_from_lengths, positions, segment_ids
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
