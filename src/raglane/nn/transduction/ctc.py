"""Decoding of connectionist temporal classification (CTC): beam search over prefixes, and the best alignment."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from raglane import segments
from raglane._utils.checks import check_count, check_kind, check_number, check_whole
from raglane._utils.messages import message, quote
from raglane._utils.tracing import never_traced
from raglane.errors import ArgumentError, ShapeError
from raglane.kernels.cpu import prefixes as kernels
from raglane.native import missing_kernels
from raglane.nn.losses.comparison import check_predictions, wide
from raglane.nn.losses.ctc import check_blank, check_targets, lattice_of
from raglane.nn.transduction import prefixes
from raglane.nn.transduction.hypotheses import Hypotheses
from raglane.nn.transduction.ngram import NGram
from raglane.ragged import Ragged


class CTCBeamSearch(torch.nn.Module):
    """Beam search for the likeliest token sequences of a CTC model.

    The score of a sequence is its log-probability, summed over all alignments, plus ``scorer_weight`` times the scores
    of its tokens by ``scorer``, plus ``token_bonus`` per token (Graves, "Supervised sequence labelling with recurrent
    neural networks", 2012, section 7.5.3; Hannun et al., "First-pass large vocabulary continuous speech recognition
    using bi-directional recurrent DNNs", 2014). At each step the ``beam`` best prefixes are kept, each as it is or with
    one more token. If no prefix is dropped, the scores are exact. Among equal scores the order is that of the prefixes
    of the step before, then a prefix without a new token, then the lowest token.

    The search runs in C++ on the CPU, a sequence per thread, or in Python if the kernels are not built or the scorer is
    a function. Log-probabilities on a device are copied to the host. Scores are summed in float64, and the results of a
    sequence have the same bits in any batch and in any pieces.

    Args:
        beam: the number of prefixes that are kept, at least 1.
        blank: the class that means "no token".
        n_best: the maximum number of hypotheses per item, at most ``beam``.
        tokens_per_step: the maximum number of different tokens that extend prefixes in one step, the likeliest; None
            for all.
        min_log_prob: the minimum log-probability of a token that extends a prefix; None for any.
        scorer: an :class:`NGram` of C tokens; or a function ``scorer(prefixes, tokens)``, called once per step with a
            Ragged of M prefixes and the ``(M,)`` tokens that extend them, which returns ``(M,)`` scores, e.g.
            log-probabilities. A score depends only on its prefix and token.
        scorer_weight: the factor of the scores, at least 0.
        token_bonus: a number that is added for each token.

    Raises:
        ArgumentTypeError: an argument is of the wrong kind.
        ArgumentError: a number is out of range.

    Example:
        >>> search = CTCBeamSearch(beam=4, n_best=2)
        >>> log_probs = Ragged([torch.tensor([[0.6, 0.4], [0.6, 0.4]]).log()])
        >>> found, state = search(log_probs)
        >>> [tokens.tolist() for tokens in found.tokens], found.scores.exp().tolist()  # 0.4 + 0.6 * 0.4, and 0.6 * 0.6
        ([[1], []], [0.6..., 0.36...])
        >>> found, state = search(log_probs, state)  # the next two steps
        >>> [tokens.tolist() for tokens in found.tokens]
        [[1], [1, 1]]
    """

    def __init__(
        self,
        beam: int = 16,
        *,
        blank: int = 0,
        n_best: int = 1,
        tokens_per_step: int | None = None,
        min_log_prob: float | None = None,
        scorer: NGram | prefixes.Scorer | None = None,
        scorer_weight: float = 1.0,
        token_bonus: float = 0.0,
    ) -> None:
        super().__init__()
        self.beam, self.n_best = check_count("beam", beam), check_count("n_best", n_best)
        if self.n_best > self.beam:
            raise ArgumentError(message("n_best", quote(n_best), f"at most beam={beam}", "pass a larger beam"))
        self.blank = check_whole("blank", blank, 0, most=2**31 - 1)
        if tokens_per_step is not None:
            check_count("tokens_per_step", tokens_per_step)
        self.tokens_per_step = tokens_per_step
        self.min_log_prob = -math.inf
        if min_log_prob is not None:
            self.min_log_prob = check_number("min_log_prob", min_log_prob, "below inf", lambda least: least < math.inf)
        if scorer is not None:
            rule = "an NGram, or a function of prefixes and tokens"
            check_kind("scorer", scorer, Callable, rule, "pass such a function, or None")
        self.scorer = scorer
        self.scorer_weight = check_number(
            "scorer_weight", scorer_weight, "finite and at least 0", lambda weight: 0 <= weight < math.inf
        )
        self.token_bonus = check_number("token_bonus", token_bonus, "finite", math.isfinite)

    def extra_repr(self) -> str:
        """Return the settings for ``print``."""
        return f"beam={self.beam}, blank={self.blank}, n_best={self.n_best}"

    @never_traced
    def forward(self, log_probs: Ragged, state: Ragged | None = None) -> tuple[Hypotheses, Ragged]:
        """Return the best hypotheses, and the state after the last step.

        Args:
            log_probs: ``(N, C)``, floating-point: log-probabilities, e.g. ``torch.log_softmax(logits, dim=-1)``.
            state: the state of an earlier call, to continue its sequences; None to begin. Its numbers are private, but
                as a Ragged with one sequence per item it can be selected, joined, stored and moved.

        Returns:
            The hypotheses of all steps so far, and the state. An item without steps has the empty hypothesis with the
            score 0. The confidence of a token is the mean of its probability over its steps in the best alignment.

        Raises:
            ArgumentTypeError: an argument is of the wrong kind or dtype.
            ShapeError: the state is not one of that many sequences.
            ArgumentError: the blank is not a class, a log-probability is NaN or inf, the scorer has other tokens, or
                the state is not that of a search.
        """
        check_predictions("log_probs", log_probs)
        check_blank(log_probs, self.blank)
        dtype, device = wide(log_probs.dtype), log_probs.device
        values, bounds = log_probs.values.detach().to("cpu", dtype), log_probs._host_offsets()
        if not bool((values < math.inf).all()):
            wrong = values[~(values < math.inf)][0]
            fix = "check the model for NaN, or drop the sequence"
            raise ArgumentError(message("log_probs", f"{float(wrong)}", "numbers below inf", fix))
        kept = None if state is None else _check_state(state, len(log_probs))
        limit = self.tokens_per_step or values.shape[1]
        settings = kernels.Beam(self.blank, self.beam, limit, self.min_log_prob, self.scorer_weight, self.token_bonus)
        scorer, grams = self.scorer, None
        if isinstance(scorer, NGram):
            if scorer.num_tokens != values.shape[1]:
                rule, fix = f"an NGram of {values.shape[1]} tokens, the classes of log_probs", "count the blank too"
                raise ArgumentError(message("scorer", f"one of {scorer.num_tokens}", rule, fix))
            grams = scorer._grams
        with torch.no_grad():
            if missing_kernels() is None and (scorer is None or grams is not None):
                found = kernels.find_prefixes(values, bounds, kept, settings, grams)
            else:
                found = prefixes.search(values, bounds, kept, settings, scorer)
        state = Ragged._make(*found, None)
        return prefixes.hypotheses(state, self.n_best, dtype, device), state


def ctc_align(log_probs: Ragged, targets: Ragged, blank: int = 0) -> Hypotheses:
    """Return the best alignment of each target with its sequence, by Viterbi's algorithm (forced alignment).

    Among equal alignments, the best one remains longest in its last states. The result has no gradient.

    Args:
        log_probs: ``(N, C)``, floating-point: log-probabilities, e.g. ``torch.log_softmax(logits, dim=-1)``.
        targets: one sequence of labels per sequence, of an integer dtype, from 0 to C - 1 without the blank. Their
            lengths may be 0.
        blank: the label that means "no label".

    Returns:
        One hypothesis per item. ``tokens`` are the targets; ``times`` the first step of each label and the step after
        its last; ``confidences`` the mean of its probability over these steps; ``scores`` ``(B,)`` the log-probability
        of the alignment. If all alignments have the probability 0, the score is ``-inf``, and times and confidences
        are 0.

    Raises:
        ArgumentTypeError: an argument is of the wrong kind or dtype.
        ShapeError: numbers of sequences or devices do not match.
        ArgumentError: the blank does not exist; on a CPU, a label does not exist, a target requires more steps than its
            sequence has (one per label, and one between equal labels), or a log-probability is NaN or inf.

    Example:
        >>> log_probs = Ragged([torch.tensor([[0.1, 0.8, 0.1], [0.8, 0.1, 0.1], [0.1, 0.1, 0.8]]).log()])
        >>> found = ctc_align(log_probs, Ragged([[1, 2]]))
        >>> found.times[0].tolist(), found.confidences[0].tolist()
        ([[0, 1], [2, 3]], [0.8..., 0.8...])
    """
    check_predictions("log_probs", log_probs)
    blank = check_whole("blank", blank)
    check_targets(log_probs, targets, blank)
    labels = targets.values.long()
    if labels.is_cpu and not torch.compiler.is_compiling():
        _check_fits(log_probs, targets)
    dtype = wide(log_probs.dtype)
    values = log_probs.values.detach().to(dtype)
    counts = log_probs.host_lengths, targets.host_lengths
    times, confidences, scores = _best_path(values, log_probs.offsets, labels, targets.offsets, *counts, blank)
    if scores.is_cpu and not torch.compiler.is_compiling() and bool(scores.isnan().any()):
        got, fix = f"NaN or inf in sequence {int(scores.isnan().nonzero()[0])}", "check the model for NaN"
        raise ArgumentError(message("log_probs", got, "numbers below inf", fix))
    offsets = torch.arange(len(targets) + 1, device=labels.device)
    tokens = targets.with_values(labels)
    spans, means = targets.with_values(times), targets.with_values(confidences.to(dtype))
    return Hypotheses(tokens, scores.to(dtype), offsets, spans, means)


def _check_state(state: Any, count: int) -> tuple[Tensor, Tensor]:
    """Return the numbers and offsets of a state on the CPU."""
    rule = "None, or the state that an earlier call returned"
    check_kind("state", state, Ragged, rule, "pass that state, or state[items] for some of its items")
    if len(state) != count or state.dtype is not torch.int64 or state.values.dim() != 1:
        got = f"{len(state)} sequences of {state.dtype}"
        rule = f"a state of {count} sequences, as log_probs has"
        raise ShapeError(message("state", got, rule, "pass log_probs of the same items, empty for those that ended"))
    numbers, bounds = state.values.detach().cpu().contiguous(), state._host_offsets()
    return numbers, bounds


def _check_fits(log_probs: Ragged, targets: Ragged) -> None:
    """Raise if a target requires more steps than its sequence has."""
    same = segments.shift(targets.values, targets.offsets, 1, fill=-1) == targets.values
    needed = targets.lengths + segments.sum(same, targets.offsets)
    wrong = (needed > log_probs.lengths).nonzero().view(-1)
    if wrong.shape[0]:
        item = int(wrong[0])
        steps, required = int(log_probs.lengths[item]), int(needed[item])
        got = f"{steps} steps for a target that requires {required} in sequence {item}, and {len(wrong) - 1} more such"
        rule = "at least as long as each target, plus one step between equal labels"
        raise ArgumentError(message("log_probs", got, rule, "drop these sequences, or make steps shorter"))


@torch.library.custom_op("raglane::ctc_best_path", mutates_args=())
def _best_path(
    log_probs: Tensor,
    offsets: Tensor,
    targets: Tensor,
    target_offsets: Tensor,
    steps: Tensor,
    labels: Tensor,
    blank: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the times ``(M, 2)``, confidences ``(M,)`` and scores ``(B,)``, NaN for numbers that are not below inf."""
    if log_probs.is_cpu and missing_kernels() is None:
        return kernels.align(log_probs, offsets, targets, target_offsets, blank)
    return _by_steps(log_probs.double(), offsets, targets, target_offsets, steps, labels, blank)


@_best_path.register_fake
def _(log_probs: Tensor, offsets: Tensor, targets: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ARG001
    real = log_probs.new_empty(0, dtype=torch.float64)
    return targets.new_empty(targets.shape[0], 2), real.new_empty(targets.shape), real.new_empty(offsets.shape[0] - 1)


def _by_steps(
    log_probs: Tensor,
    offsets: Tensor,
    targets: Tensor,
    target_offsets: Tensor,
    steps: Tensor,
    labels: Tensor,
    blank: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute :func:`_best_path` in torch, a step of all sequences at a time; see NOTE [lattice] in losses/ctc.py."""
    classes, flat = log_probs.shape[1], log_probs.reshape(-1)
    lattice = lattice_of(classes, offsets, steps, targets, target_offsets, labels, blank)
    padded = flat.new_full((lattice.owner.shape[0] + 2,), -math.inf)
    two_before, before, alpha = padded[:-2], padded[1:-1], padded[2:]
    alpha.index_fill_(0, lattice.offsets[:-1], 0)
    moves: list[Tensor] = []
    for step, alive in enumerate(lattice.alive):
        stay, enter = alpha[:alive], before[:alive].masked_fill(lattice.is_first[:alive], -math.inf)
        skip = two_before[:alive].masked_fill(lattice.bars_skips[:alive], -math.inf)
        moves.append(torch.where(torch.maximum(enter, skip) > stay, torch.where(skip > enter, 2, 1), 0))
        best = torch.maximum(torch.maximum(stay, enter), skip)
        alpha[:alive] = best + flat.index_select(0, lattice.emission[:alive] + step * classes)

    last = lattice.offsets[1:] - 1
    label = alpha[(last - 1).clamp(min=0)].masked_fill(lattice.offsets.diff() == 1, -math.inf)
    state = last - (label > alpha[last]).long()
    ends = torch.where(label.isnan(), label, alpha[state])
    scores = torch.empty_like(ends).index_copy_(0, lattice.order, ends.masked_fill(~(ends < math.inf), math.nan))
    visited, emitted = [], []
    running = torch.bincount(steps).flip(0).cumsum(0).flip(0)[1:].tolist() if steps.shape[0] else []
    for step in reversed(range(len(moves))):
        here = state[: running[step]]
        visited.append(here)
        emitted.append(flat.index_select(0, lattice.emission[here] + step * classes))
        state = torch.cat([here - moves[step][here], state[running[step] :]])
    # For each element of the sequences, last step first, its state and step.
    states, numbers = torch.cat([state[:0], *visited]), torch.cat([flat[:0], *emitted])
    counts = torch.tensor(running[::-1], dtype=torch.int64)
    taken = torch.arange(len(running) - 1, -1, -1).repeat_interleave(counts).to(states.device)
    owner = lattice.owner[states]
    position = states - lattice.offsets[torch.searchsorted(lattice.offsets, states, right=True) - 1]
    is_label = (position % 2 == 1) & scores.isfinite()[owner]
    place, taken = (target_offsets[owner] + position // 2)[is_label], taken[is_label]
    total = targets.shape[0]
    first = targets.new_zeros(total).scatter_reduce(0, place, taken, "amin", include_self=False)
    after = targets.new_zeros(total).scatter_reduce(0, place, taken + 1, "amax", include_self=False)
    mass = flat.new_zeros(total).index_add(0, place, numbers[is_label].exp())
    return torch.stack([first, after], 1), mass / (after - first).clamp(min=1), scores
