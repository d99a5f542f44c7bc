"""Between flat values with offsets and what other libraries hold: lists, nested tensors, NumPy, Arrow.

Everything here takes or gives ``(values, lengths)`` or ``(values, offsets)`` of a ragged batch as plain tensors
and copies only what it must; the docstrings say when.
"""

from __future__ import annotations

from raglane.arrays import as_tensor
from raglane.interop.arrow import from_arrow, to_arrow
from raglane.interop.numbers import given_lengths, read_integers, read_lengths, read_values
from raglane.interop.sequences import from_list, from_nested, to_nested

__all__ = [
    "as_tensor",
    "from_arrow",
    "from_list",
    "from_nested",
    "given_lengths",
    "read_integers",
    "read_lengths",
    "read_values",
    "to_arrow",
    "to_nested",
]
