"""Resets within sequences: episodes run as sequences, or steps of a cell reset its states."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from raglane import segments
from raglane._utils.tracing import is_exporting
from raglane.cells.regularised import MarkedWeights, Resetting
from raglane.errors import ArgumentTypeError, ShapeError
from raglane.kernels.contract import Request
from raglane.ragged import Ragged


@dataclass(slots=True, eq=False)
class Pieces:
    """``B`` sequences split at resets into ``M`` pieces; an empty sequence is one empty piece."""

    batch: Ragged  # the pieces, with the same values
    first: Tensor  # ``(B,)``, the first piece of each sequence
    last: Tensor  # ``(B,)``, the last piece of each sequence
    is_reset_at_start: (
        Tensor  # ``(B, 1)`` bool: a reset at the first element, so that ``hx`` is not used
    )

    def enter(self, hx: Tensor, fresh: Tensor, directions: int) -> Tensor:
        """Return the initial states of the pieces, ``(L * K, M, size)``.

        They are ``hx`` ``(L * K, B, size)`` for the piece of a sequence that runs first, and
        ``fresh`` for all others.
        """
        # Under autocast a module's fresh states may have another dtype than hx.
        dtype = torch.promote_types(hx.dtype, fresh.dtype)
        hx = hx.to(dtype)
        fresh = fresh.to(dtype)
        # The reverse direction enters a sequence at its end, where no reset is possible.
        entering = torch.where(self.is_reset_at_start, fresh.index_select(1, self.first), hx)
        forward = fresh.index_copy(1, self.first, entering)
        if directions == 1:
            return forward
        return torch.stack([forward[0::2], fresh.index_copy(1, self.last, hx)[1::2]], 1).flatten(
            0, 1
        )

    def leave(self, final: Tensor, directions: int) -> Tensor:
        """Return the final states of the sequences, ``(L * K, B, size)``, from those of pieces."""
        if directions == 1:
            return final.index_select(1, self.last)
        both = [final[0::2].index_select(1, self.last), final[1::2].index_select(1, self.first)]
        return torch.stack(both, 1).flatten(0, 1)


def check_resets(resets: Any, inputs: Any) -> None:
    """Raise if the kind, dtype or shape of resets is wrong; :func:`check_lengths` does the rest."""
    is_flat = isinstance(resets, Ragged | PackedSequence)
    if not is_flat and (
        not (isinstance(resets, Tensor) and isinstance(inputs, Tensor)) or resets.is_nested
    ):
        got = f"a {type(resets).__name__}"
        fix = "wrap a list of sequences with rl.Ragged(sequences)"
        raise ArgumentTypeError(
            "resets", got, f"a {type(inputs).__name__} of bools, like the input", fix
        )
    dtype = resets.data.dtype if isinstance(resets, PackedSequence) else resets.dtype
    if dtype is not torch.bool:
        rule = "bools, True where an episode starts"
        raise ArgumentTypeError("resets", f"values of {dtype}", rule, "pass e.g. resets != 0")
    if not is_flat and resets.shape != inputs.shape[:-1]:
        rule = f"one bool per element of the input: {tuple(inputs.shape[:-1])}"
        raise ShapeError(
            "resets", f"shape {tuple(resets.shape)}", rule, "pass one bool per element"
        )


def check_lengths(batch: Ragged, resets: Ragged) -> None:
    """Raise if resets are not one bool per element; an exported graph cannot compare lengths."""
    if resets.feature_shape or not (
        is_exporting() or torch.equal(resets.lengths_cpu, batch.lengths_cpu)
    ):
        got = f"elements of shape {tuple(resets.feature_shape)} and lengths {resets.lengths_cpu.tolist()}"
        rule = f"one bool per element of the input, whose lengths are {batch.lengths_cpu.tolist()}"
        raise ShapeError("resets", got, rule, "pass one bool per element")


def resetting(request: Request, resets: Tensor) -> Request:
    """Return a request whose steps reset the states to zeros; ``resets`` are bools ``(N,)``.

    The reverse direction enters an episode at its end, before the first element of the next one.
    """
    marks = resets.to(request.values.dtype).unsqueeze(1)
    each = (
        (marks,) if request.directions == 1 else (marks, segments.shift(marks, request.offsets, -1))
    )
    weights = zip(request.weights, each * request.layers, strict=True)
    return replace(
        request,
        cell=Resetting(request.cell),
        weights=tuple(MarkedWeights(*pair) for pair in weights),
    )


def split(batch: Ragged, resets: Ragged) -> Pieces:
    """Split the sequences of a batch before each reset; ``resets`` are bools ``(N,)``.

    The number of pieces is needed on the host: resets on a GPU are waited for.
    """
    lengths = batch.lengths_cpu
    offsets = segments.offsets_from_lengths(lengths)
    marked = resets.values.cpu().nonzero().flatten()
    starts = offsets[:-1]
    inner = marked[~torch.isin(marked, starts)]
    bounds = torch.cat([starts, inner]).sort(stable=True).values
    first = torch.arange(lengths.shape[0], device="cpu") + torch.searchsorted(inner, starts)
    last = torch.cat([first[1:], torch.tensor([bounds.shape[0]], device="cpu")]) - 1
    # The element at the start of an empty sequence belongs to another sequence.
    at_start = torch.isin(starts, marked) & (lengths > 0)
    lengths_cpu = torch.cat([bounds, offsets[-1:]]).diff()
    device = batch.device
    return Pieces(
        Ragged._build(batch.values, lengths_cpu),
        first.to(device, non_blocking=True),
        last[: batch._count].to(device, non_blocking=True),
        at_start.to(device, non_blocking=True).unsqueeze(1),
    )
