"""The recursions of a linear chain: over all paths of tags through a sequence, and along one path.

Loops run over the steps of all sequences, in packed order. Scores are ``(N, C)`` flat. A "weight"
is the logarithm of a sum of ``exp(score)`` over paths; each step subtracts its largest weight, the
"level", so that long sequences are as exact as short ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raglane import segments
from raglane._utils.derivatives import gradients_of, view_of
from raglane._utils.operators import operator
from raglane._utils.tracing import are_transformed, has_tangent
from raglane.packing.layouts import inverse, packed_layout
from raglane.segments.indexing import take_rows

# The dtype of sums over a whole sequence, because the likelihood is a small difference of two large
# sums.
SUMS = torch.float64


class Scores(NamedTuple):
    """The scores of a chain, of one dtype, or their gradients."""

    emissions: Tensor  # ``(N, C)``, in the caller's order or packed
    start: Tensor  # ``(C,)``, of each tag as the first of a sequence
    transitions: Tensor  # ``(C, C)``, of a tag (row) followed by another (column)
    end: Tensor  # ``(C,)``, of each tag as the last


@dataclass(frozen=True, eq=False)
class _PackedSteps:
    """The packed order: step after step, and within a step the longest sequence first."""

    row_of: Tensor  # ``(N,)``: the packed row of each element
    rows: list[int]  # the number of sequences with each step; [0] for a batch without elements
    sequence: Tensor  # ``(M,)``: the sequences with an element, longest first
    last: Tensor  # ``(M,)``: the packed row of their last element


def _packed(*inputs: Tensor) -> tuple[Scores, _PackedSteps]:
    """Return the packed scores and the packed order of an operator's inputs."""
    values, *chain, lengths, offsets = inputs
    element, batch_sizes, order = packed_layout(lengths, offsets)
    row_of = inverse(element)
    rows = batch_sizes.tolist() or [0]
    sequence = order[: rows[0]]
    last = row_of.index_select(0, offsets[1:].index_select(0, sequence) - 1)
    return Scores(take_rows(values, element), *chain), _PackedSteps(row_of, rows, sequence, last)


# -- over all paths
# --------------------------------------------------------------------------------------------------


def _log_sum_exp(weights: Tensor) -> Tensor:
    """Return ``logsumexp`` over the last dimension."""
    if not torch.is_grad_enabled():
        return torch.logsumexp(weights, -1)
    # If all are -inf, torch's derivative is NaN instead of 0.
    nothing = (weights == -torch.inf).all(-1)
    return torch.logsumexp(weights.masked_fill(nothing.unsqueeze(-1), 0.0), -1).masked_fill(
        nothing, -torch.inf
    )


def finite(weights: Tensor) -> Tensor:
    """Return weights with ``-inf`` replaced by the lowest number: -inf - -inf would be NaN."""
    return weights.clamp(min=torch.finfo(weights.dtype).min)


def _reach(scores: Scores, steps: _PackedSteps, best: bool = False) -> tuple[Tensor, Tensor]:
    """Run the forward pass: return the weight of all paths to each tag without its emission, and
    the levels.

    ``best`` keeps only the best path instead of the sum.
    """
    arriving = scores.transitions.t()
    reach = weight = scores.start.expand(steps.rows[0], -1)
    reaches: list[Tensor] = []
    levels: list[Tensor] = []
    for rows, emission in zip(steps.rows, torch.split(scores.emissions, steps.rows), strict=True):
        if reaches:
            ways = weight[:rows].unsqueeze(1) + arriving
            reach = ways.amax(-1) if best else _log_sum_exp(ways)
        weight = reach + emission
        level = finite(weight.detach().amax(-1))
        weight = weight - level.unsqueeze(1)
        reaches.append(reach)
        levels.append(level)
    return torch.cat(reaches), torch.cat(levels)


def weights_of(scores: Scores, reaches: Tensor, levels: Tensor) -> Tensor:
    """Return ``(N, C)``: the weights of all paths to each tag, with its emission and without the
    element's level.
    """
    return reaches + scores.emissions - levels.unsqueeze(1)


def _posterior(
    scores: Scores, steps: _PackedSteps, reaches: Tensor, levels: Tensor, upstream: Tensor
) -> Scores:
    """Run the backward pass: return the probabilities of tags and pairs of tags, the gradients of
    log Z.

    The probability of the previous tag, given a tag, is ``exp(weight + transition - reach)``.
    """
    arriving = scores.transitions.t()
    levelled = weights_of(scores, reaches, levels)
    final = take_rows(levelled, steps.last) + scores.end
    share = upstream.index_select(0, steps.sequence).unsqueeze(1)
    ending = (final - finite(_log_sum_exp(final)).unsqueeze(1)).exp() * share
    weights = torch.split(levelled, steps.rows)
    floors = torch.split(finite(reaches), steps.rows)
    tags = ending[:0]
    pairs = torch.zeros_like(arriving)
    marginals_of_steps = []
    for step in reversed(range(len(steps.rows))):
        rows = steps.rows[step]
        tags = torch.cat((tags, ending[tags.shape[0] : rows]))
        marginals_of_steps.append(tags)
        if step:
            previous = (
                weights[step - 1][:rows].unsqueeze(1) + arriving - floors[step].unsqueeze(2)
            ).exp()
            both = previous * tags.unsqueeze(2)
            pairs = pairs + both.sum(0)
            tags = both.sum(1)
    emissions = take_rows(torch.cat(marginals_of_steps[::-1]), steps.row_of)
    return Scores(emissions, tags.sum(0), pairs.t().contiguous(), ending.sum(0))


_INPUTS = (
    "Tensor emissions, Tensor start, Tensor transitions, Tensor end, Tensor lengths, Tensor offsets"
)


def _shapes_of_partition(emissions: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    total, count = emissions.shape
    return (
        emissions.new_empty(rest[-1].shape[0] - 1, dtype=SUMS),
        emissions.new_empty(total, count),
        emissions.new_empty(total),
    )


# torch.compile does not look into an operator; it would unroll the loops and compile them again for
# every batch. Gradients are registered below, so the operators' bodies run without autograd.
@operator(
    "raglane::chain_partition", _shapes_of_partition, f"({_INPUTS}) -> (Tensor, Tensor, Tensor)"
)
@torch.no_grad()
def _partition_op(*inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Call :func:`_partition`."""
    return _partition(*inputs)


def _partition(*inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log Z, ``(B,)`` float64, and the results of :func:`_reach`."""
    scores, steps = _packed(*inputs)
    reaches, levels = _reach(scores, steps)
    final = take_rows(weights_of(scores, reaches, levels), steps.last) + scores.end
    taken = segments.sum(levels.index_select(0, steps.row_of).to(SUMS), inputs[5])
    return taken.index_add(0, steps.sequence, _log_sum_exp(final).to(SUMS)), reaches, levels


def _shapes_of_posterior(*inputs: Tensor) -> tuple[Tensor, ...]:
    return tuple(scores.new_empty(scores.shape) for scores in inputs[:4])


@operator(
    "raglane::chain_posterior",
    _shapes_of_posterior,
    f"({_INPUTS}, Tensor reaches, Tensor levels, Tensor upstream) -> (Tensor, Tensor, Tensor, Tensor)",
)
@torch.no_grad()
def _posterior_op(*inputs: Tensor) -> tuple[Tensor, ...]:
    """Call :func:`_posterior`."""
    return tuple(_posterior(*_packed(*inputs[:6]), *inputs[6:]))


def _save_partition(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    # The backward pass needs N * C numbers; autograd through the loop would save N * C * C.
    ctx.save_for_backward(*inputs, *output[1:])


def _partition_backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    return *_posterior_op(*saved, grad.to(saved[0].dtype)), None, None


def _save_posterior(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs[:6], inputs[8])


def _posterior_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    """Compute second derivatives by autograd through the loops."""
    *scores, lengths, offsets, upstream = ctx.saved_tensors
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        inputs: list[Any] = [view_of(tensor) for tensor in (*scores, upstream)]
        packed, steps = _packed(*inputs[:4], lengths, offsets)
        result = _posterior(packed, steps, *_reach(packed, steps), inputs[4])
    gradients = gradients_of(result, inputs, grads, again)
    return *gradients[:4], None, None, None, None, gradients[4]


_partition_op.register_autograd(_partition_backward, setup_context=_save_partition)
_posterior_op.register_autograd(_posterior_backward, setup_context=_save_posterior)


def log_partition(scores: Scores, lengths: Tensor, offsets: Tensor) -> Tensor:
    """Return the log-sum of ``exp(score)`` over all paths, ``(B,)``; 0 for an empty sequence."""
    run = _partition if _needs_loops(scores) else _partition_op
    return run(*scores, lengths, offsets)[0]


def marginals(scores: Scores, lengths: Tensor, offsets: Tensor) -> Tensor:
    """Return the probability of each tag at each element, ``(N, C)``; not differentiable when
    compiled.
    """
    inputs = (*scores, lengths, offsets)
    ones = scores.end.new_ones(offsets.shape[0] - 1)
    if _needs_loops(scores):
        packed, steps = _packed(*inputs)
        return _posterior(packed, steps, *_reach(packed, steps), ones)[0]
    _, reaches, levels = _partition_op(*inputs)
    return _posterior_op(*inputs, reaches, levels, ones)[0]


def _needs_loops(scores: Scores) -> bool:
    """Return True for transformations, which operators do not support: they would drop tangents."""
    return has_tangent(scores) or are_transformed(scores)


# -- one path
# --------------------------------------------------------------------------------------------------


def path_score(scores: Scores, tags: Tensor, offsets: Tensor) -> Tensor:
    """Return the score of one path of each sequence, ``(B,)``; 0 for an empty one."""
    count = scores.end.shape[0]
    # The start scores are one more row of the transitions, for the first tag of a sequence.
    table = torch.cat((scores.transitions, scores.start.unsqueeze(0))).view(-1)
    arriving = table.index_select(0, segments.shift(tags, offsets, 1, fill=count) * count + tags)
    emitted = scores.emissions.gather(1, tags.unsqueeze(1)).squeeze(1)
    leaving = scores.end.index_select(0, segments.last(tags, offsets))
    leaving = torch.where(offsets.diff() > 0, leaving, torch.zeros_like(leaving))
    return segments.sum((emitted + arriving).to(SUMS), offsets) + leaving


def _shape_of_tags(emissions: Tensor, *_: Tensor) -> Tensor:
    return emissions.new_empty(emissions.shape[0], dtype=torch.int64)


@operator("raglane::chain_best_tags", _shape_of_tags, f"({_INPUTS}) -> Tensor")
@torch.no_grad()
def _best_tags_op(*inputs: Tensor) -> Tensor:
    """See :func:`best_tags`."""
    scores, steps = _packed(*inputs)
    levelled = weights_of(scores, *_reach(scores, steps, best=True))
    arriving = scores.transitions.t()
    # Backtracking recomputes each best predecessor instead of storing a table of them, which needs
    # less memory.
    ending = (take_rows(levelled, steps.last) + scores.end).argmax(1)
    tags = ending[:0]
    tags_of_steps = []
    for rows, weight in zip(steps.rows[::-1], torch.split(levelled, steps.rows)[::-1], strict=True):
        longer = tags.shape[0]
        previous = (weight[:longer] + arriving.index_select(0, tags)).argmax(1)
        tags = torch.cat((previous, ending[longer:rows]))
        tags_of_steps.append(tags)
    return take_rows(torch.cat(tags_of_steps[::-1]), steps.row_of)


def best_tags(scores: Scores, lengths: Tensor, offsets: Tensor) -> Tensor:
    """Return the tags of the best path of each sequence, ``(N,)``, by Viterbi's algorithm."""
    return _best_tags_op(*map(Tensor.detach, scores), lengths, offsets)
