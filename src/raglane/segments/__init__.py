"""Arithmetic on flat values and offsets: the sequences of a batch, without a loop over them.

A ragged batch of ``B`` sequences is ``values`` of shape ``(N, *features)`` and ``offsets`` of shape ``(B + 1,)``,
int64, first 0, last ``N``; sequence ``b`` is ``values[offsets[b]:offsets[b + 1]]``. The functions here know
nothing else, and everything above them (packing, conversions, :class:`~raglane.Ragged`, schedules) is built on
them. Gradients flow through ``values``, twice if asked. A sequence never sees another's values, so a NaN in one
stays there. Nothing here copies from a device to the host: a size that only the lengths know is an argument.

The functions check what they are given: kinds, dtypes and shapes; on a CPU the offsets and lengths themselves, too,
which must describe the values. :mod:`raglane.segments.plain` has the same functions without checks.

Raises, all of them:
    ArgumentTypeError: an argument of the wrong kind or dtype.
    ShapeError: shapes or devices that do not fit together, or offsets that do not describe the values.
    ArgumentError: a number out of range.
"""

from __future__ import annotations

from raglane.segments import plain
from raglane.segments.checks import checked

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

cumsum = checked(plain.cumsum)
element_index = checked(plain.element_index)
first = checked(plain.first)
last = checked(plain.last)
lengths_from_offsets = checked(plain.lengths_from_offsets)
logsumexp = checked(plain.logsumexp)
max = checked(plain.max)
mean = checked(plain.mean)
min = checked(plain.min)
offsets_from_lengths = checked(plain.offsets_from_lengths)
positions = checked(plain.positions)
reverse = checked(plain.reverse)
reverse_index = checked(plain.reverse_index)
segment_ids = checked(plain.segment_ids)
shift = checked(plain.shift)
softmax = checked(plain.softmax)
spread = checked(plain.spread)
sum = checked(plain.sum)
