"""The functions of :mod:`torch.nn.utils.rnn`: the same names, arguments and results, implemented
independently.

A padded batch is ``(T, B, *features)``, or ``(B, T, *features)`` with ``batch_first``; a pack is
torch's :class:`~torch.nn.utils.rnn.PackedSequence`. Differences from torch:

- Lengths may be of any integer dtype, on any device, in a list, a tuple, an array or a tensor.
- Sequences of length 0 are supported. Then ``sorted_indices`` lists all B sequences and
  ``batch_sizes[0]`` counts those with an element; if none has one, ``batch_sizes`` is empty.
  torch's own layers raise for such a pack.
- Equal lengths keep the caller's order.
- :func:`unpad_sequence` does not modify its argument.

All functions are differentiable twice. Padding is never read, and its gradient is 0. Wrong
arguments raise the error types of torch, with a message that contains the fix.

``functions.py`` has the functions and ``pack_checks.py`` the rules of their arguments. ``convert.py``
converts flat values from and to the other layouts: ``flat_values.py`` by the kernels, ``layouts.py``
by index arithmetic, ``conversion_operators.py`` in the graphs of a compiler.
"""

from __future__ import annotations

from torch.nn.utils.rnn import PackedSequence

from raglane.packing.functions import (
    invert_permutation,
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
    pad_sequence,
    unpack_sequence,
    unpad_sequence,
)

__all__ = [
    "PackedSequence",
    "invert_permutation",
    "pack_padded_sequence",
    "pack_sequence",
    "pad_packed_sequence",
    "pad_sequence",
    "unpack_sequence",
    "unpad_sequence",
]
