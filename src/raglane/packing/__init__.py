"""The functions of :mod:`torch.nn.utils.rnn`: same names, arguments and results, own code.

A padded batch is ``(T, B, *features)``, or ``(B, T, *features)`` with ``batch_first``; a pack is torch's own
:class:`~torch.nn.utils.rnn.PackedSequence`. Beyond torch's:

- lengths may be of any integer dtype, on any device, in a list, a tuple, an array or a tensor;
- sequences of length 0 are legal. Then ``sorted_indices`` lists all B sequences and ``batch_sizes[0]`` counts those
  with an element; if none has one, ``batch_sizes`` is empty. torch's own layers refuse such a pack;
- equal lengths keep the caller's order;
- :func:`unpad_sequence` leaves its argument as it was.

Gradients flow through everything that holds numbers, twice if asked. What lies past a length is never read, and its
gradient is 0. Wrong arguments raise what torch raises, with a message that says what to pass instead.
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
