"""Episodes within a sequence: each reset begins a new sequence, and no kernel need know of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from raglane import segments
from raglane._utils.messages import message
from raglane.errors import ArgumentTypeError, ShapeError
from raglane.ragged import Ragged


@dataclass(slots=True, eq=False)
class Pieces:
    """A batch cut at its resets, ``M`` pieces of ``B`` sequences. An empty sequence is one empty piece."""

    batch: Ragged  # the pieces, over the same values
    first: Tensor  # ``(B,)``, each sequence's first piece
    last: Tensor  # ``(B,)``, each sequence's last
    begins_anew: Tensor  # ``(B, 1)`` bool: a reset at a sequence's first element leaves its initial state unread

    def enter(self, given: Tensor, fresh: Tensor, directions: int) -> Tensor:
        """The initial states of the pieces: a sequence's own for the piece that is read first, else fresh ones.

        ``given`` is ``(L * K, B, size)``, of the sequences; ``fresh`` is ``(L * K, M, size)``, of the pieces.
        """
        # A module's fresh states may be of autocast's dtype, and what was given of the layer's.
        dtype = torch.promote_types(given.dtype, fresh.dtype)
        given, fresh = given.to(dtype), fresh.to(dtype)
        # The reverse direction enters a sequence at its end, where no reset can stand.
        entering = torch.where(self.begins_anew, fresh.index_select(1, self.first), given)
        forward = fresh.index_copy(1, self.first, entering)
        if directions == 1:
            return forward
        reverse = fresh.index_copy(1, self.last, given)
        return torch.stack([forward[0::2], reverse[1::2]], 1).flatten(0, 1)

    def leave(self, final: Tensor, directions: int) -> Tensor:
        """The final states of the sequences: those, of ``(L * K, M, size)``, of the piece that is read last."""
        if directions == 1:
            return final.index_select(1, self.last)
        both = [final[0::2].index_select(1, self.last), final[1::2].index_select(1, self.first)]
        return torch.stack(both, 1).flatten(0, 1)


def check_marks(resets: Any, inputs: Any) -> None:
    """Raise where resets do not fit the input that they came with, as far as their kinds tell."""
    is_flat = isinstance(resets, Ragged | PackedSequence)
    if not is_flat and (not (isinstance(resets, Tensor) and isinstance(inputs, Tensor)) or resets.is_nested):
        rule = f"a {type(inputs).__name__} of bools, like the input"
        got, fix = f"a {type(resets).__name__}", "wrap a list of sequences with rl.Ragged(sequences)"
        raise ArgumentTypeError(message("resets", got, rule, fix))
    dtype = resets.data.dtype if isinstance(resets, PackedSequence) else resets.dtype
    if dtype is not torch.bool:
        rule = "bools, True where an episode starts"
        raise ArgumentTypeError(message("resets", f"values of {dtype}", rule, "pass e.g. resets != 0"))
    if not is_flat and resets.shape != inputs.shape[:-1]:
        rule = f"one bool per element of the input: {tuple(inputs.shape[:-1])}"
        raise ShapeError(message("resets", f"shape {tuple(resets.shape)}", rule, "pass one for each element"))


def split(batch: Ragged, resets: Ragged) -> Pieces:
    """Cut the sequences of a batch before each element that is marked; ``resets`` are bools ``(N,)``.

    How many pieces there are must be known on the host: resets on a GPU are waited for, resets on the CPU are not.
    """
    if resets.features or not torch.equal(resets.host_lengths, batch.host_lengths):
        got = f"elements of shape {tuple(resets.features)} and lengths {resets.host_lengths.tolist()}"
        rule = f"one bool per element of the input, whose lengths are {batch.host_lengths.tolist()}"
        raise ShapeError(message("resets", got, rule, "pass one for each element"))
    lengths = batch.host_lengths
    offsets = segments.offsets_from_lengths(lengths)
    marked = resets.values.cpu().nonzero().flatten()
    starts = offsets[:-1]
    inner = marked[~torch.isin(marked, starts)]
    bounds = torch.cat([starts, inner]).sort(stable=True).values
    first = torch.arange(lengths.shape[0], device="cpu") + torch.searchsorted(inner, starts)
    last = torch.cat([first[1:], torch.tensor([bounds.shape[0]], device="cpu")]) - 1
    # An empty sequence has no first element; the one that stands there is another's.
    anew = torch.isin(starts, marked) & (lengths > 0)
    host_lengths = torch.cat([bounds, offsets[-1:]]).diff()
    first, last, anew = (part.to(batch.device, non_blocking=True) for part in (first, last[: batch._count], anew))
    return Pieces(Ragged._build(batch.values, host_lengths), first, last, anew.unsqueeze(1))
