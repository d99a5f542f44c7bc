"""Calls of the kernels for beam search and alignment by CTC, soft-DTW and edit distances: ``csrc/transduction``.

Tensors are flat values and offsets on a CPU. Each function validates all tensors whose addresses C gets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raglane._utils.checks import check_like
from raglane._utils.messages import message
from raglane.errors import ShapeError
from raglane.native.library import ABI, DTYPES, call, found_state, library
from raglane.native.memory import contiguous, place


class Grams(NamedTuple):
    """An n-gram model as an automaton: the last fields of ``raglane_search`` in ``csrc/abi/raglane.h``."""

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
    least: float  # log-probability of a token that extends a prefix
    weight: float  # of the scores of tokens
    bonus: float  # added for each token


@cache
def _packer(struct: str) -> Any:
    """Return a function that packs all fields of a struct."""
    layout = library().structs[struct]
    return layout.packer(*layout.formats)


def _readable(*parts: tuple[str, Tensor, tuple[int, ...], torch.dtype]) -> tuple[list[int], list[Any]]:
    """Return the addresses of tensors that C can read, each a name, a tensor, its shape and dtype; and their owners."""
    addresses, owners = [], []
    for name, part, shape, dtype in parts:
        placed = place(part, shape, dtype)
        if placed is None:
            check_like(name, part, shape, torch.empty(0, dtype=dtype, device="cpu"))
            part = contiguous(name, part)
            placed = place(part, shape, dtype)
            if placed is None:
                rule, fix = "unchanged during a call", "do not change it in another thread"
                raise ShapeError(message(name, "a tensor that changed", rule, fix))
        addresses.append(placed[0])
        owners.append((part, placed[1]))
    return addresses, owners


def _steps(log_probs: Tensor, offsets: Tensor) -> Sequence[tuple[str, Tensor, tuple[int, ...], torch.dtype]]:
    return (
        ("offsets", offsets, (offsets.shape[0],), torch.int64),
        ("log_probs", log_probs, tuple(log_probs.shape), log_probs.dtype),
    )


def find_prefixes(
    log_probs: Tensor, offsets: Tensor, state: tuple[Tensor, Tensor] | None, beam: Beam, grams: Grams | None
) -> tuple[Tensor, Tensor]:
    """Run or continue a beam search on ``(N, C)`` float32 or float64; return the state and the offsets of records."""
    count, (total, classes) = offsets.shape[0] - 1, log_probs.shape
    addresses, _owners = _readable(*_steps(log_probs, offsets))
    kept: list[int] = [0, 0, 0]
    if state is not None:
        numbers = state[0].shape[0]
        given, _state = _readable(
            ("state", state[0], (numbers,), torch.int64), ("state", state[1], (count + 1,), torch.int64)
        )
        # A pointer to no integers may be null, which means a new search.
        kept = [given[0] or given[1], given[1], numbers]
    model: list[int] = [0] * 10
    if grams is not None:
        contexts, size = grams.shorter.shape[0], grams.tokens.shape[0]
        shapes = (contexts + 1,), (contexts,), (contexts,), (size,), (size,), (size,)
        integers, reals = torch.int64, torch.float64
        dtypes = integers, integers, reals, integers, integers, reals
        parts = zip(["scorer"] * 6, grams[2:], shapes, dtypes, strict=True)
        given, _model = _readable(*parts)
        model = [grams.order, contexts, grams.begin, size, *given]
    head = ABI, DTYPES[log_probs.dtype], library().threads(), count, total, classes
    return found_state(_packer("raglane_search")(*head, *beam, *addresses, *kept, *model), count)


def align(
    log_probs: Tensor, offsets: Tensor, targets: Tensor, label_offsets: Tensor, blank: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the times ``(M, 2)``, confidences ``(M,)`` and scores ``(B,)``, float64, of the best alignments."""
    count, labels, (total, classes) = offsets.shape[0] - 1, targets.shape[0], log_probs.shape
    (steps, numbers, starts, given), _owners = _readable(
        *_steps(log_probs, offsets),
        ("targets", label_offsets, (count + 1,), torch.int64),
        ("targets", targets, (labels,), torch.int64),
    )
    times = torch.empty(labels, 2, dtype=torch.int64, device="cpu")
    confidences = torch.empty(labels, dtype=torch.float64, device="cpu")
    scores = torch.empty(count, dtype=torch.float64, device="cpu")
    out = (part.data_ptr() for part in (times, confidences, scores))
    head = ABI, DTYPES[log_probs.dtype], library().threads(), count, total, classes, blank, labels
    call("raglane_best_alignment", _packer("raglane_alignment")(*head, steps, starts, numbers, given, *out))
    return times, confidences, scores


def soft_dtw(
    costs: Tensor, left: Tensor, right: Tensor, sizes: tuple[int, int], gamma: float, reach: Tensor | None = None
) -> Tensor:
    """Return the soft minimum over paths to each pair, ``(P,)`` float64; with it, the derivatives of the last ones."""
    given = [] if reach is None else [("reach", reach, tuple(costs.shape), torch.float64)]
    bounds = [("offsets", part, (left.shape[0],), torch.int64) for part in (left, right)]
    addresses, _owners = _readable(*bounds, ("costs", costs, (costs.shape[0],), torch.float64), *given)
    result = torch.empty(costs.shape[0], dtype=torch.float64, device="cpu")
    out = (result.data_ptr(), 0) if reach is None else (addresses[3], result.data_ptr())
    head = ABI, library().threads(), left.shape[0] - 1, *sizes, costs.shape[0], gamma
    fields = _packer("raglane_pairs")(*head, *addresses[:3], *out, 0, 0, 0)
    call("raglane_soft_dtw" if reach is None else "raglane_soft_dtw_shares", fields)
    return result


def edits(left: Tensor, left_offsets: Tensor, right: Tensor, right_offsets: Tensor) -> Tensor:
    """Return the insertions, deletions and substitutions ``(B, 3)`` between sequences of int64."""
    count = left_offsets.shape[0] - 1
    parts = [("offsets", part, (count + 1,), torch.int64) for part in (left_offsets, right_offsets)]
    parts += [("tokens", part, (part.shape[0],), torch.int64) for part in (left, right)]
    addresses, _owners = _readable(*parts)
    counts = torch.empty(count, 3, dtype=torch.int64, device="cpu")
    head = ABI, library().threads(), count, left.shape[0], right.shape[0], 0, math.nan
    call("raglane_edits", _packer("raglane_pairs")(*head, *addresses[:2], 0, 0, 0, *addresses[2:], counts.data_ptr()))
    return counts
