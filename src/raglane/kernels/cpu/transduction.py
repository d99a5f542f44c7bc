"""Sums over the alignments of frames and labels, for the loss of a transducer."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from raglane._utils.messages import message
from raglane.errors import ShapeError
from raglane.native.library import ABI, DTYPES, call, library
from raglane.native.memory import contiguous, place

# The struct raglane_lattices.
_pack = struct.Struct("=11q").pack


def align(
    emissions: Tensor, frames: Tensor, labels: Tensor, one_per_frame: bool, need_shares: bool
) -> tuple[Tensor, Tensor]:
    """Return losses ``(B,)`` and shares ``(M, 2)``, or an empty tensor, of emissions ``(M, 2)``; see ``raglane.h``.

    ``emissions`` are float32 or float64, and ``frames`` and ``labels`` the lengths, ``(B,)`` int64, all on the CPU.
    """
    count, rows = frames.shape[0], emissions.shape[0]
    losses = emissions.new_empty(count)
    shares = emissions.new_empty((rows, 2) if need_shares else 0)
    given = contiguous("frames", frames), contiguous("labels", labels), contiguous("emissions", emissions)
    shapes, dtypes = ((count,), (count,), (rows, 2)), (torch.int64, torch.int64, emissions.dtype)
    places = list(map(place, given, shapes, dtypes))
    if None in places or not emissions.is_cpu:
        got = f"frames {tuple(frames.shape)}, labels {tuple(labels.shape)}, emissions {tuple(emissions.shape)}"
        rule = "lengths (B,) of int64 and emissions (M, 2), on the CPU"
        raise ShapeError(message("frames, labels, emissions", got, rule, "pass tensors of these shapes"))
    pointers = [found[0] for found in places if found is not None] + [losses.data_ptr()]
    sizes = ABI, library().threads(), DTYPES[emissions.dtype], count, rows, one_per_frame
    call("raglane_align", _pack(*sizes, *pointers, shares.data_ptr() if need_shares else 0))
    return losses, shares
