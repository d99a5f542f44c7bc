""":mod:`raglane.nn.crf.recursions` as loops in an exported graph, with the same order of sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from raglane import segments
from raglane.kernels.graph import MaskedStep, StepLayout, run_steps, table_of
from raglane.nn.crf.recursions import SUMS, Scores, finite, weights_of


class _StepParameters(NamedTuple):
    """The parameters of a step."""

    arriving: Tensor  # ``(C, C)``, the score of a tag (row) after another (column)
    edge: Tensor  # ``(C,)``, the score of each tag at the element where the loop begins


@dataclass(frozen=True)
class _Reach:
    """One step of :func:`raglane.nn.crf.recursions._reach`: the reach of each tag, and the level of
    the element.
    """

    best: bool
    states: ClassVar[tuple[str, ...]] = ("weight",)

    def step(
        self, weights: _StepParameters, prepared: Tensor, state: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        emission = prepared[:, :-1]
        begins = prepared[:, -1:] > 0
        ways = state[0].unsqueeze(1) + weights.arriving
        reach = torch.where(
            begins, weights.edge, ways.amax(-1) if self.best else _log_sum_exp(ways)
        )
        weight = reach + emission
        level = finite(weight.amax(-1, keepdim=True))
        return torch.cat([reach, level], 1), (weight - level,)


@dataclass(frozen=True)
class _Back:
    """One step of Viterbi's backtracking; the state is the tag of the next element."""

    states: ClassVar[tuple[str, ...]] = ("tag",)

    def step(
        self, weights: _StepParameters, prepared: Tensor, state: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        weight = prepared[:, :-1]
        begins = prepared[:, -1:] > 0
        leaving = weights.arriving.index_select(0, state[0].squeeze(1).to(torch.int64))
        tag = (
            (weight + torch.where(begins, weights.edge, leaving))
            .argmax(-1, keepdim=True)
            .to(weight.dtype)
        )
        return tag, (tag,)


def _log_sum_exp(ways: Tensor) -> Tensor:
    """Return ``logsumexp`` over the last dimension, -inf if all are: runtimes differ in torch's
    own.
    """
    largest = finite(ways.amax(-1))
    return (ways - largest.unsqueeze(-1)).exp().sum(-1).log() + largest


def _walk(
    table: StepLayout,
    step: _Reach | _Back,
    chain: _StepParameters,
    rows: Tensor,
    offsets: Tensor,
    sizes: tuple[int, int],
    *,
    reverse: bool = False,
) -> Tensor:
    """Run a step over the elements of each sequence, and return its outputs ``(N, sizes[1])``."""
    before = segments.shift(torch.ones_like(rows[:, :1]), offsets, -1 if reverse else 1, fill=0)
    state = rows.new_zeros(offsets.shape[0] - 1, sizes[0])
    marked = torch.cat([rows, 1 - before], 1)
    _, (outputs,) = run_steps(
        table, MaskedStep(step, chain), marked, (state,), [sizes[1]], reverse=reverse
    )
    return outputs


def _reach(
    table: StepLayout, scores: Scores, offsets: Tensor, *, best: bool = False, reverse: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the reaches ``(N, C)`` and levels ``(N,)``; ``reverse`` begins at the end of the
    sequences.
    """
    count = scores.end.shape[0]
    arriving, edge = (
        (scores.transitions, scores.end) if reverse else (scores.transitions.t(), scores.start)
    )
    sizes = (count, count + 1)
    outputs = _walk(
        table,
        _Reach(best),
        _StepParameters(arriving, edge),
        scores.emissions,
        offsets,
        sizes,
        reverse=reverse,
    )
    return outputs[:, :-1], outputs[:, -1]


def best_tags(scores: Scores, lengths: Tensor, offsets: Tensor) -> Tensor:  # noqa: ARG001
    """See :func:`raglane.nn.crf.recursions.best_tags`."""
    table = table_of(offsets, scores.emissions.shape[0])
    weight = weights_of(scores, *_reach(table, scores, offsets, best=True))
    chain = _StepParameters(scores.transitions.t(), scores.end)
    return (
        _walk(table, _Back(), chain, weight, offsets, (1, 1), reverse=True)
        .squeeze(1)
        .to(torch.int64)
    )


def log_partition(scores: Scores, lengths: Tensor, offsets: Tensor) -> Tensor:  # noqa: ARG001
    """See :func:`raglane.nn.crf.recursions.log_partition`."""
    reaches, levels = _reach(table_of(offsets, scores.emissions.shape[0]), scores, offsets)
    final = _log_sum_exp(segments.last(weights_of(scores, reaches, levels), offsets) + scores.end)
    ending = torch.where(offsets.diff() > 0, final, torch.zeros_like(final))
    return segments.sum(levels.to(SUMS), offsets) + ending


def marginals(scores: Scores, lengths: Tensor, offsets: Tensor) -> Tensor:  # noqa: ARG001
    """See :func:`raglane.nn.crf.recursions.marginals`."""
    table = table_of(offsets, scores.emissions.shape[0])
    weight = (
        weights_of(scores, *_reach(table, scores, offsets))
        + _reach(table, scores, offsets, reverse=True)[0]
    )
    # ONNX Runtime supports softmax without elements, but not max.
    return torch.where(weight == -torch.inf, 0.0, finite(weight).softmax(1))
