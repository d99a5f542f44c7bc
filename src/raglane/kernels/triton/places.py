"""The sequences of a batch as kernels read them, and the chunks into which long ones are cut; all
on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from raglane import segments

LONG = 1024
"""Longer sequences are cut into chunks of a quarter of it, where a kernel can run them side by
side."""


@dataclass(eq=False)
class Places:
    """The sequences of a batch of ``count`` elements."""

    offsets: Tensor
    count: int
    # On the CPU, for offsets on a device; without them no sequence is cut.
    lengths: Tensor | None = None
    long: int = LONG

    @cached_property
    def order(self) -> Tensor:
        """The indices of the sequences, longest first."""
        return self.offsets.diff().argsort(descending=True, stable=True)

    @cached_property
    def chunks(self) -> Chunks | None:
        """The chunks of the sequences; None if no sequence is long."""
        on_host = self.offsets.diff() if self.lengths is None else self.lengths
        if not on_host.is_cpu or self.count <= self.long:
            return None
        if not len(on_host) or int(on_host.max()) <= self.long:
            return None
        # Offsets that were changed on the device lead to no chunk that does not exist.
        lengths = self.offsets.diff().clamp_(0, self.count)
        size = max(1, self.long // 4)
        # At least as many as there are chunks, whose number is on the device.
        slots = len(lengths) + self.count // size
        counts = torch.where(lengths > self.long, (lengths + size - 1) // size, 1)
        bounds = segments.offsets_from_lengths(counts).clamp_(max=slots)
        slot = torch.arange(slots, device=lengths.device)
        # Of chunks beyond the last, the end of the offsets.
        owner = torch.searchsorted(bounds[1:], slot, right=True)
        starts = self.offsets[owner] + (slot - bounds[owner]) * size
        offsets = torch.cat([starts.minimum(self.offsets[-1]), self.offsets[-1:]])
        sequences = Places(bounds, slots, long=slots)  # which are not cut again
        return Chunks(Places(offsets, self.count), sequences, owner.clamp_(max=len(lengths) - 1))


class Chunks(NamedTuple):
    """The chunks of a batch ``(M,)``, sequence after sequence; the last ones may be unused, and are
    then empty.
    """

    places: Places
    sequences: Places  # whose elements are chunks
    owner: Tensor  # the sequence of each chunk

    def begin(self, states: Tensor, ascending: bool) -> Tensor:
        """Return initial states of chunks ``(M, width)``: those of the sequences ``(B, width)``,
        zeros within one.
        """
        rows = states.new_zeros(self.owner.shape[0], states.shape[1])
        return rows.index_copy_(0, self.firsts if ascending else self.lasts, states)

    def end(self, finals: Tensor, ascending: bool) -> Tensor:
        """Return the final states of the sequences ``(B, width)`` from those of chunks ``(M,
        width)``.
        """
        return finals.index_select(0, self.lasts if ascending else self.firsts)

    @property
    def firsts(self) -> Tensor:
        """The first chunk of each sequence."""
        return self.sequences.offsets[:-1].clamp(max=self.owner.shape[0] - 1)

    @property
    def lasts(self) -> Tensor:
        """The last chunk of each sequence."""
        return self.sequences.offsets[1:] - 1
