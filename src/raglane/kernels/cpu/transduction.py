"""Calls of the kernels for transducers, CTC, soft-DTW and edit distances: ``csrc/transduction``.

Tensors are flat values and offsets on a CPU. Each function validates all tensors whose addresses C
gets.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from raglane.native.library import ABI, DTYPES, call, found_state, library, packer
from raglane.native.memory import readable


class Grams(NamedTuple):
    """An n-gram model as an automaton: the last fields of ``raglane_search`` in ``raglane.h``."""

    order: int
    begin: int  # the context of the first token of a sequence
    first: Tensor  # ``(S + 1,)``, the first gram of each context
    shorter: Tensor  # ``(S,)``, the context for tokens without a gram
    backoff: Tensor  # ``(S,)`` float64, the log-probability of these
    tokens: Tensor  # ``(G,)``, rising within a context
    next: Tensor  # ``(G,)``, the context after the token
    log_probs: Tensor  # ``(G,)`` float64


class Beam(NamedTuple):
    """The settings of a beam search."""

    blank: int
    beam: int
    tokens_per_step: int
    weight: float  # of the scores of tokens
    bonus: float  # added for each token


def align(
    emissions: Tensor, frames: Tensor, labels: Tensor, one_per_frame: bool, need_shares: bool
) -> tuple[Tensor, Tensor]:
    """Return losses ``(B,)`` and, if needed, shares ``(M, 2)`` of a transducer's emissions."""
    count = frames.shape[0]
    rows = emissions.shape[0]
    addresses, _owners = readable(
        ("frames", frames, (count,), torch.int64),
        ("labels", labels, (count,), torch.int64),
        ("emissions", emissions, (rows, 2), emissions.dtype),
    )
    losses = emissions.new_empty(count)
    shares = emissions.new_empty((rows, 2) if need_shares else 0)
    out = losses.data_ptr(), shares.data_ptr() if need_shares else 0
    head = ABI, library().threads(), DTYPES[emissions.dtype], count, rows, one_per_frame
    call("raglane_align", packer("raglane_lattices")(*head, *addresses, *out))
    return losses, shares


def find_prefixes(
    log_probs: Tensor,
    offsets: Tensor,
    state: tuple[Tensor, Tensor] | None,
    beam: Beam,
    grams: Grams | None,
) -> tuple[Tensor, Tensor]:
    """Run or continue a beam search on ``(N, C)``; return the state and the offsets of records."""
    count = offsets.shape[0] - 1
    total, classes = log_probs.shape
    addresses, _owners = readable(
        ("offsets", offsets, (count + 1,), torch.int64),
        ("log_probs", log_probs, (total, classes), log_probs.dtype),
    )
    previous = [0, 0, 0]
    model = [0] * 10
    if state is not None:
        records, record_offsets = state
        size = records.shape[0]
        (begin, begin_offsets), _state = readable(
            ("state", records, (size,), torch.int64),
            ("state", record_offsets, (count + 1,), torch.int64),
        )
        # A pointer to no integers may be null, which means a new search.
        previous = [begin or begin_offsets, begin_offsets, size]
    if grams is not None:
        contexts = grams.shorter.shape[0]
        size = grams.tokens.shape[0]
        shapes = (contexts + 1,), (contexts,), (contexts,), (size,), (size,), (size,)
        dtypes = [torch.int64, torch.int64, torch.float64] * 2
        arrays, _model = readable(*zip(["scorer"] * 6, grams[2:], shapes, dtypes, strict=True))
        model = [grams.order, contexts, grams.begin, size, *arrays]
    head = ABI, DTYPES[log_probs.dtype], library().threads(), count, total, classes
    return found_state(
        packer("raglane_search")(
            *head, *beam[:3], -math.inf, *beam[3:], *addresses, *previous, *model
        ),
        count,
    )


def best_alignment(
    log_probs: Tensor, offsets: Tensor, targets: Tensor, label_offsets: Tensor, blank: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return times ``(M, 2)``, confidences ``(M,)`` and scores ``(B,)`` of CTC's best alignments."""
    count = offsets.shape[0] - 1
    labels = targets.shape[0]
    total, classes = log_probs.shape
    addresses, _owners = readable(
        ("offsets", offsets, (count + 1,), torch.int64),
        ("targets", label_offsets, (count + 1,), torch.int64),
        ("log_probs", log_probs, (total, classes), log_probs.dtype),
        ("targets", targets, (labels,), torch.int64),
    )
    times = torch.empty(labels, 2, dtype=torch.int64, device="cpu")
    confidences = torch.empty(labels, dtype=torch.float64, device="cpu")
    scores = torch.empty(count, dtype=torch.float64, device="cpu")
    out = times.data_ptr(), confidences.data_ptr(), scores.data_ptr()
    head = ABI, DTYPES[log_probs.dtype], library().threads(), count, total, classes, blank, labels
    call("raglane_best_alignment", packer("raglane_alignment")(*head, *addresses, *out))
    return times, confidences, scores


def soft_dtw(
    costs: Tensor, left: Tensor, right: Tensor, gamma: float, reach: Tensor | None = None
) -> Tensor:
    """Return the soft minimum over paths to each pair, ``(P,)`` float64.

    With ``reach``, that result, return the derivatives of each sequence's last one.
    """
    results = [] if reach is None else [("reach", reach, tuple(costs.shape), torch.float64)]
    addresses, _owners = readable(
        ("offsets", left, (left.shape[0],), torch.int64),
        ("offsets", right, (left.shape[0],), torch.int64),
        ("costs", costs, (costs.shape[0],), torch.float64),
        *results,
    )
    sizes = int(left[-1]), int(right[-1])
    result = torch.empty(costs.shape[0], dtype=torch.float64, device="cpu")
    out = (result.data_ptr(), 0) if reach is None else (addresses[3], result.data_ptr())
    head = ABI, library().threads(), left.shape[0] - 1, *sizes, costs.shape[0], gamma
    fields = packer("raglane_pairs")(*head, *addresses[:3], *out, 0, 0, 0)
    call("raglane_soft_dtw" if reach is None else "raglane_soft_dtw_shares", fields)
    return result


def edits(left: Tensor, left_offsets: Tensor, right: Tensor, right_offsets: Tensor) -> Tensor:
    """Return the insertions, deletions and substitutions ``(B, 3)`` between sequences of int64."""
    count = left_offsets.shape[0] - 1
    addresses, _owners = readable(
        ("offsets", left_offsets, (count + 1,), torch.int64),
        ("offsets", right_offsets, (count + 1,), torch.int64),
        ("tokens", left, (left.shape[0],), torch.int64),
        ("tokens", right, (right.shape[0],), torch.int64),
    )
    counts = torch.empty(count, 3, dtype=torch.int64, device="cpu")
    head = ABI, library().threads(), count, left.shape[0], right.shape[0], 0, math.nan
    call(
        "raglane_edits",
        packer("raglane_pairs")(*head, *addresses[:2], 0, 0, 0, *addresses[2:], counts.data_ptr()),
    )
    return counts
