"""The loss of a transducer on ragged batches, without a tensor of all frames, labels and classes.

The alignments are those of :mod:`raglane.nn.transduction.lattice`. They need two numbers per frame
and label, the log-probabilities of the blank and of the next label. The logits from which these
come are computed in tiles of some frames, and again in the backward pass. For a linear joint on a
CPU see :mod:`raglane.nn.transduction.fused`; any other joint runs here in plain torch, on any
device.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from itertools import filterfalse, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import checkpoint

from raglane import segments
from raglane._utils.checks import check_device, check_flag, check_kind, check_number, check_whole
from raglane._utils.memory import check_pairs
from raglane._utils.messages import quote
from raglane._utils.tracing import has_tangent, never_recorded
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from raglane.nn.losses.comparison import (
    LabelReduction,
    check_label_reduction,
    check_predictions,
    check_untransformed,
    label_scales,
    reduce_per_label,
    sequence_weights,
    wide,
)
from raglane.nn.losses.ctc import check_classes, check_labels
from raglane.nn.transduction import fused
from raglane.nn.transduction.lattice import Alignments, align
from raglane.ragged import Ragged

# The rows of a tile, at least those of one frame: enough for a product at full speed, and few
# enough for the caches.
_TILE = 2048


@never_recorded
def rnnt_loss(
    encoder: Ragged,
    predictor: Ragged | None,
    targets: Ragged,
    joint: Callable[[Tensor, Tensor], Tensor] | None = None,
    *,
    blank: int = 0,
    reduction: LabelReduction = "mean",
    fastemit: float = 0.0,
    one_symbol_per_frame: bool = False,
    sample_weight: Tensor | None = None,
) -> Tensor:
    """Return minus the log-probability of each target, over all its alignments with its sequence,
    by a transducer.

    A transducer emits a blank or a label, given a frame t and the u labels before it (Graves 2012,
    "Sequence transduction with recurrent neural networks"). A blank leads to the next frame, a
    label to the next label, and the last frame ends with a blank. The log-softmax over the classes
    is a part of the loss. Memory does not grow with the frames times labels times classes of the
    batch, but with its frames times labels, except if logits are passed. The host needs the
    lengths. The loss can be differentiated once, and :func:`torch.compile` breaks the graph here.

    Args:
        encoder: a sequence of T frames, values ``(N, H)`` of a floating-point dtype, per sequence.
            Without ``predictor``, the logits: ``T * (U + 1)`` rows per sequence, values ``(M, C)``,
            row ``t * (U + 1) + u``.
        predictor: a sequence of ``U + 1`` states, values ``(P, H)``, per sequence: before the first
            label, and after each. None if ``encoder`` has the logits.
        targets: one sequence of U labels per sequence, of an integer dtype, from 0 to C - 1 without
            the blank. Their lengths may be 0.
        joint: computes logits ``(rows, C)``. A :class:`torch.nn.Linear`, ``joint(tanh(frame +
            state))``, fastest on a CPU; or any function or module that is called with rows of
            ``encoder`` and of ``predictor``, and computes each row from these rows only. Backward
            calls it again, so tensors that a function reads must not change before; for the
            parameters of a module this is checked.
        blank: the class that means "no label".
        reduction: as of :func:`~raglane.transduction.ctc_loss`: ``"mean"``, the mean over sequences of their
            losses per label; ``"sum"``; ``"none"``, the loss of each sequence, times its weight.
        fastemit: lambda of at least 0. Gradients that come through labels are multiplied by 1 +
            lambda, and those that come through blanks are not, so that labels are emitted earlier
            (Yu et al. 2021, "FastEmit: low-latency streaming ASR with sequence-level emission
            regularization"). The value of the loss does not change.
        one_symbol_per_frame: True if a label leads to the next frame too, so that a frame emits one
            blank or label (Tripathi et al. 2019, "Monotonic recurrent neural network transducer and
            decoding strategies").
        sample_weight: ``(B,)``, one number of at least 0 per sequence. With 0, even a NaN in the sequence
            has no effect.

    Returns:
        A 0-d tensor of the dtype of ``encoder``, or ``(B,)`` for the reduction ``"none"``. A
        sequence without an alignment has an infinite loss without a gradient: one with labels, but
        without frames or, with ``one_symbol_per_frame``, with fewer frames than labels. Without
        frames and labels the loss is 0. With a linear joint on a CPU, the loss of a sequence has
        the same bits in any batch.

    Raises:
        ArgumentTypeError: an argument is of the wrong kind or dtype.
        ShapeError: shapes, numbers of sequences, lengths or devices do not match.
        ArgumentError: the blank does not exist, the reduction is unknown, or ``fastemit`` is
            negative; on a CPU, a label does not exist, or a weight is negative or not finite.

    Example:
        >>> frames, states = Ragged([torch.zeros(2, 8)]), Ragged([torch.zeros(2, 8)])  # T = 2, U = 1
        >>> joint = torch.nn.Linear(8, 4, bias=False)
        >>> loss = rnnt_loss(frames, states, Ragged([[3]]), joint)  # 2 paths of 3 emissions, each of probability 1/4
        >>> round(loss.exp().item())
        32
    """
    check_label_reduction(reduction)
    flag = check_flag("one_symbol_per_frame", one_symbol_per_frame)
    fastemit = check_number(
        "fastemit", fastemit, "a finite number of at least 0", lambda value: 0 <= value < 1e9
    )
    blank = check_whole("blank", blank)
    frames = _check(encoder, predictor, targets, joint, blank)
    if encoder.values.is_cpu:  # emissions, shares and the variables of the recursion
        check_pairs(frames, targets.lengths_cpu + 1, 24)
    alignments = Alignments(
        frames, targets.lengths_cpu, _following(targets, blank), blank, flag, fastemit
    )
    dtype = wide(encoder.dtype)
    batches = [encoder] if predictor is None else [encoder, predictor]
    values = [batch.values for batch in batches]
    check_untransformed("rnnt_loss", "encoder", values)
    shares = values[0].new_ones(len(targets), dtype=dtype)
    if sample_weight is not None:
        shares = sequence_weights(sample_weight, targets).to(dtype)
        values = [_without_ignored(batch, shares == 0) for batch in batches]
    labels = targets.lengths
    if not isinstance(joint, torch.nn.Linear) or not fused.supports(values, joint):
        emissions = _emissions(values, joint, alignments, targets)
        check_untransformed("rnnt_loss", "encoder", [emissions])
        need_shares = torch.is_grad_enabled() and emissions.requires_grad
        losses, _ = align(emissions, *alignments.arguments(), need_shares)
        return reduce_per_label(losses, shares, labels, reduction).to(encoder.dtype)
    if reduction == "none" or shares.requires_grad or has_tangent([shares]):
        losses = fused.losses(values, joint, alignments)
        return reduce_per_label(losses, shares, labels, reduction).to(encoder.dtype)
    scales = label_scales(shares, labels, reduction)
    return fused.losses(values, joint, alignments, scales).sum().to(encoder.dtype)


def _without_ignored(batch: Ragged, is_ignored: Tensor) -> Tensor:
    """Return values that are 0 in ignored sequences."""
    values = batch.values
    rows = segments.spread(is_ignored, batch.offsets, values.shape[0])
    return values.masked_fill(rows.unsqueeze(1), 0)


def _check(encoder: Any, predictor: Any, targets: Any, joint: Any, blank: int) -> Tensor:
    """Raise if arguments do not match; return the numbers of frames, ``(B,)`` on the host."""
    check_predictions("encoder", encoder)
    check_labels(targets, encoder, "encoder")
    batches = {"encoder": encoder}
    if predictor is not None:
        batches["predictor"] = predictor
    for name, batch in batches.items():
        check_predictions(name, batch)
        check_device(name, batch.values, encoder.device)
        if batch.values.dim() != 2:
            got = f"elements of shape {tuple(batch.feature_shape)}"
            fix = "make the features the only dimension of an element"
            raise ShapeError(name, got, "values (N, H)", fix)
    if (predictor is None) != (joint is None):
        got = f"predictor {'None' if predictor is None else 'a Ragged'}, joint {quote(joint)}"
        fix = "pass both, or neither and the logits as encoder"
        raise ArgumentTypeError("predictor, joint", got, "both None or both given", fix)
    frames = encoder.lengths_cpu
    states = targets.lengths_cpu + 1
    if predictor is None:
        rule = "logits with a multiple of U + 1 = {} rows for sequence {}, one per frame and number of labels before it"
        _check_rows("encoder", frames, states, frames % states != 0, rule)
        _check_classes(targets, encoder.values.shape[1], blank)
        return frames // states
    rule = "a torch.nn.Linear, or a function of two tensors"
    check_kind("joint", joint, Callable, rule, "pass a module")
    if len(predictor) != len(encoder):
        got = f"{len(predictor)} sequences"
        rule = f"one sequence for each of the {len(encoder)} sequences of encoder"
        raise ShapeError("predictor", got, rule, "pass U + 1 states for each")
    rows = predictor.lengths_cpu
    rule = "states before the first and after each label, U + 1 = {} for sequence {}"
    _check_rows("predictor", rows, states, rows != states, rule)
    if isinstance(joint, torch.nn.Linear):
        _check_classes(targets, joint.out_features, blank)
        check_device("joint", joint.weight, encoder.device)
        for name, batch in batches.items():
            features = batch.values.shape[1]
            if features != joint.in_features:
                rule = f"of {joint.in_features} features, the in_features of joint"
                raise ShapeError(name, f"{features} features", rule, "project it to that size")
    return frames


def _check_rows(name: str, rows: Tensor, states: Tensor, is_wrong: Tensor, rule: str) -> None:
    if bool(is_wrong.any()):
        item = int(is_wrong.nonzero()[0])
        rule = rule.format(int(states[item]), item)
        fix = "compute the predictor on a start symbol followed by the labels"
        raise ShapeError(name, f"{int(rows[item])} rows", rule, fix)


def _check_classes(targets: Ragged, classes: int, blank: int) -> None:
    if not 0 <= blank < classes:
        fix = "pass the class of the joint that means no label"
        raise ArgumentError(
            "blank", quote(blank), f"from 0 to {classes - 1}, one of the classes", fix
        )
    check_classes(targets, classes, blank)


def _following(targets: Ragged, blank: int) -> Tensor:
    """Return the label after each state, ``(P,)``, and the blank after the last."""
    count = targets.values.shape[0]
    index = torch.arange(count, device=targets.device) + targets.segment_ids
    following = targets.values.new_full((count + len(targets),), blank, dtype=torch.int64)
    return following.index_copy(0, index, targets.values.long())


def _emissions(values: list[Tensor], joint: Any, alignments: Alignments, targets: Ragged) -> Tensor:
    """Return log-probabilities ``(M, 2)``: the blank and the next label of each frame and state."""
    frames = alignments.frames
    states = alignments.labels + 1
    device = values[0].device
    dtype = wide(values[0].dtype)
    rows = torch.repeat_interleave(states, frames)  # of each frame
    first = torch.repeat_interleave(segments.offsets_from_lengths(states)[:-1], frames)
    starts = [0, *rows.cumsum(0).tolist()]
    bounds = [0]
    while bounds[-1] < len(rows):
        bounds.append(max(bisect_right(starts, starts[bounds[-1]] + _TILE) - 1, bounds[-1] + 1))
    rows = rows.to(device, non_blocking=True)
    first = first.to(device, non_blocking=True)
    totals = [starts[end] - starts[begin] for begin, end in pairwise(bounds)]
    sizes = totals if joint is None else [end - begin for begin, end in pairwise(bounds)]
    pieces = values[0].split(sizes)

    def pick(piece: Tensor, begin: int, end: int, total: int, *_: Tensor) -> Tensor:
        state = segments.element_index(first[begin:end], rows[begin:end], total)
        logits = piece
        if joint is not None:
            frame = segments.repeated(
                torch.arange(end - begin, device=device), rows[begin:end], total
            )
            logits = _joined(joint, piece.index_select(0, frame), values[1].index_select(0, state))
            _check_classes(targets, logits.shape[1], alignments.blank)
        scores = logits.log_softmax(-1, dtype=dtype)
        following = alignments.following.index_select(0, state).unsqueeze(1)
        label = scores.gather(1, following).squeeze(1)
        return torch.stack([scores[:, alignments.blank], label], 1)

    tiles = zip(pieces, bounds, bounds[1:], totals, strict=False)
    # The sum of nothing keeps batches without frames differentiable.
    empty = values[0][:0].sum() * values[0].new_empty(0, 2, dtype=dtype)
    # A checkpoint raises if an argument was changed in place before it runs again; the first call
    # fills lazy ones.
    owner = getattr(joint, "__self__", joint)
    parameters = owner.parameters() if isinstance(owner, torch.nn.Module) else ()
    read = [*values[1:], *filterfalse(is_lazy, parameters)]
    run: Any = checkpoint if torch.is_grad_enabled() else lambda _, *tile, **__: pick(*tile)
    return torch.cat([empty, *(run(pick, *tile, *read, use_reentrant=False) for tile in tiles)])


def _joined(joint: Any, frames: Tensor, states: Tensor) -> Tensor:
    """Return the logits of rows, ``(rows, C)``."""
    if isinstance(joint, torch.nn.Linear):
        return joint((frames + states).tanh().to(joint.weight.dtype))
    logits = joint(frames, states)
    if not isinstance(logits, Tensor) or logits.dim() != 2 or logits.shape[0] != frames.shape[0]:
        got = (
            f"{tuple(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
        )
        rule = f"a function that returns logits (rows, C), here ({frames.shape[0]}, C)"
        raise ShapeError("joint", got, rule, "compute one row of logits per pair of rows")
    return logits
