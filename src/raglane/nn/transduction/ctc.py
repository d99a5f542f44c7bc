"""Decoding of connectionist temporal classification (CTC): searches, and alignment."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from raglane import segments
from raglane._utils.checks import check_count, check_kind, check_number, check_whole
from raglane._utils.messages import quote
from raglane._utils.tracing import never_recorded
from raglane.errors import ArgumentError, ShapeError
from raglane.kernels.cpu import transduction as kernels
from raglane.native import missing_kernels
from raglane.nn.losses.comparison import check_predictions, wide
from raglane.nn.losses.ctc import (
    LARGEST_SUM,
    check_blank,
    check_classes,
    check_labels,
    check_sums,
    sums_of,
)
from raglane.nn.transduction import prefixes
from raglane.nn.transduction.hypotheses import Hypotheses
from raglane.nn.transduction.ngram import NGram
from raglane.ragged import Ragged


class CTCBeamSearch(torch.nn.Module):
    """Beam search for the likeliest token sequences of a CTC model.

    The score of a sequence is its log-probability, summed over all alignments, plus
    ``scorer_weight`` times the scores of its tokens by ``scorer``, plus ``token_bonus`` per token
    (Graves, "Supervised sequence labelling with recurrent neural networks", 2012, section 7.5.3;
    Hannun et al., "First-pass large vocabulary continuous speech recognition using bi-directional
    recurrent DNNs", 2014). At each step the ``beam_size`` best prefixes are kept, each as it is or with
    one more token. If no prefix is dropped, the scores are exact. Among equal scores the order is
    that of the prefixes of the step before, then a prefix without a new token, then the lowest
    token.

    The search runs in C++ on the CPU, a sequence per thread, or in Python if the kernels are not
    built or the scorer is a function. Log-probabilities on a device are copied to the host. Scores
    are summed in float64, and the results of a sequence have the same bits in any batch and in any
    pieces.

    Args:
        beam_size: the number of prefixes that are kept, at least 1.
        blank: the class that means "no token".
        n_best: the maximum number of hypotheses per item, at most ``beam_size``.
        tokens_per_step: the maximum number of different tokens that extend prefixes in one step,
            the likeliest; None for all.
        scorer: an :class:`NGram` of C tokens; or a function ``scorer(prefixes, tokens)``, called
            once per step with a Ragged of M prefixes and the ``(M,)`` tokens that extend them,
            which returns ``(M,)`` scores, e.g. log-probabilities. A score depends only on its
            prefix and token.
        scorer_weight: the factor of the scores, at least 0.
        token_bonus: a number that is added for each token.

    Raises:
        ArgumentTypeError: an argument is of the wrong kind.
        ArgumentError: a number is out of range.

    Example:
        >>> search = CTCBeamSearch(beam_size=4, n_best=2)
        >>> log_probs = Ragged([torch.tensor([[0.6, 0.4], [0.6, 0.4]]).log()])
        >>> best = search(log_probs)
        >>> [tokens.tolist() for tokens in best.tokens], best.scores.exp().tolist()  # 0.4 + 0.6 * 0.4, and 0.6 * 0.6
        ([[1], []], [0.6..., 0.36...])
        >>> best = search(log_probs, best.state)  # the next two steps
        >>> [tokens.tolist() for tokens in best.tokens]
        [[1], [1, 1]]
    """

    def __init__(
        self,
        beam_size: int = 16,
        *,
        blank: int = 0,
        n_best: int = 1,
        tokens_per_step: int | None = None,
        scorer: NGram | prefixes.Scorer | None = None,
        scorer_weight: float = 1.0,
        token_bonus: float = 0.0,
    ) -> None:
        super().__init__()
        self.beam_size = check_count("beam_size", beam_size)
        self.n_best = check_count("n_best", n_best)
        if self.n_best > self.beam_size:
            raise ArgumentError(
                "n_best", quote(n_best), f"at most beam_size={beam_size}", "pass a larger one"
            )
        self.blank = check_whole("blank", blank, 0, most=2**31 - 1)
        self.tokens_per_step = (
            None if tokens_per_step is None else check_count("tokens_per_step", tokens_per_step)
        )
        if scorer is not None:
            rule = "an NGram, or a function of prefixes and tokens"
            check_kind("scorer", scorer, Callable, rule, "pass such a function, or None")
        self.scorer = scorer
        rule = "finite and at least 0"
        self.scorer_weight = check_number(
            "scorer_weight", scorer_weight, rule, lambda weight: 0 <= weight < math.inf
        )
        self.token_bonus = check_number("token_bonus", token_bonus, "finite", math.isfinite)

    def extra_repr(self) -> str:
        """Return the settings for ``print``."""
        return f"beam_size={self.beam_size}, blank={self.blank}, n_best={self.n_best}"

    @never_recorded
    def forward(self, log_probs: Ragged, state: Ragged | None = None) -> Hypotheses:
        """Return the best hypotheses.

        Args:
            log_probs: ``(N, C)``, floating-point: log-probabilities, e.g.
                ``torch.log_softmax(logits, dim=-1)``.
            state: ``found.state`` of an earlier call, to continue its sequences; None to begin. Its
                numbers are private, but as a Ragged with one sequence per item it can be selected,
                joined, stored and moved.

        Returns:
            The hypotheses of all steps so far, with ``state``. An item without steps has the empty
            hypothesis with the score 0. The confidence of a token is the mean of its probability
            over its steps in the best alignment.

        Raises:
            ArgumentTypeError: an argument is of the wrong kind or dtype.
            ShapeError: the state is not one of that many sequences.
            ArgumentError: the blank is not a class, a log-probability is NaN or inf, the
                probabilities of an element sum to more than 1.05, the scorer has other tokens, or
                the state is not that of a search.
        """
        check_predictions("log_probs", log_probs)
        check_blank(log_probs, self.blank)
        values = _on_host(log_probs)
        bounds = log_probs._host_offsets()
        before = None if state is None else _check_state(state, len(log_probs))
        limit = self.tokens_per_step or values.shape[1]
        settings = kernels.Beam(
            self.blank, self.beam_size, limit, self.scorer_weight, self.token_bonus
        )
        scorer = self.scorer
        grams = None
        if isinstance(scorer, NGram):
            if scorer.num_tokens != values.shape[1]:
                rule = f"an NGram of {values.shape[1]} tokens, the classes of log_probs"
                fix = "count the blank too"
                raise ArgumentError("scorer", f"one of {scorer.num_tokens}", rule, fix)
            grams = scorer._grams
        with torch.no_grad():
            if missing_kernels() is None and (scorer is None or grams is not None):
                records = kernels.find_prefixes(values, bounds, before, settings, grams)
            else:
                records = prefixes.search(values, bounds, before, settings, scorer)
        state = Ragged._make(*records, None)
        found = prefixes.hypotheses(state, self.n_best, values.dtype, log_probs.device)
        return replace(found, state=state)

    if TYPE_CHECKING:

        def __call__(self, log_probs: Ragged, state: Ragged | None = None) -> Hypotheses: ...  # noqa: D102


@never_recorded
def ctc_greedy_search(log_probs: Ragged, blank: int = 0) -> Hypotheses:
    """Return the tokens of the likeliest path of each sequence, without repetitions and blanks.

    The path takes the likeliest class of each step. A :class:`CTCBeamSearch` of one prefix differs:
    it adds up the paths of a token sequence. The result has no gradient.

    Args:
        log_probs: ``(N, C)``, floating-point: log-probabilities, or logits, whose likeliest path is
            the same.
        blank: the class that means "no token".

    Returns:
        One hypothesis per item. ``scores`` ``(B,)`` are the sums of the path, its log-probability,
        and ``times`` the first step of each token and the step after its last.

    Raises:
        ArgumentTypeError: an argument is of the wrong kind or dtype.
        ArgumentError: the blank is not a class.

    Example:
        >>> log_probs = Ragged([torch.tensor([[0.1, 0.9], [0.2, 0.8], [0.9, 0.1], [0.4, 0.6]]).log()])
        >>> best = ctc_greedy_search(log_probs)
        >>> best.tokens.tolist(), best.times.tolist()
        ([[1, 1]], [[[0, 2], [3, 4]]])
    """
    check_predictions("log_probs", log_probs)
    blank = check_whole("blank", blank)
    check_blank(log_probs, blank)
    best, labels = log_probs.values.detach().max(-1)
    begins = torch.ones_like(labels, dtype=torch.bool)
    begins[1:] = labels[1:] != labels[:-1]
    # The first element of a sequence begins a run; an empty last sequence has no element.
    firsts = log_probs.offsets[:-1]
    begins[firsts[firsts < len(labels)]] = True
    first = begins.nonzero().squeeze(1)
    after = torch.cat([first[1:], first.new_full((min(len(first), 1),), len(labels))])
    is_token = labels[first] != blank
    first = first[is_token]
    after = after[is_token]
    owners = log_probs.segment_ids[first]
    lengths = torch.bincount(owners, minlength=len(log_probs))
    tokens = Ragged.from_flat(labels[first], offsets=segments.offsets_from_lengths(lengths))
    times = torch.stack([first, after], 1) - firsts[owners].unsqueeze(1)
    scores = segments.sum(best, log_probs.offsets)
    offsets = torch.arange(len(log_probs) + 1, device=log_probs.device)
    return Hypotheses(tokens, scores, offsets, tokens.with_values(times))


@never_recorded
def ctc_align(log_probs: Ragged, targets: Ragged, blank: int = 0) -> Hypotheses:
    """Return the best alignment of each target with its sequence, by Viterbi's algorithm (forced
    alignment).

    Among equal alignments, the best one remains longest in its last states. The result has no
    gradient. Tensors on a device are copied to the host, and the result back.

    Args:
        log_probs: ``(N, C)``, floating-point: log-probabilities, e.g. ``torch.log_softmax(logits,
            dim=-1)``.
        targets: one sequence of labels per sequence, of an integer dtype, from 0 to C - 1 without
            the blank. Their lengths may be 0.
        blank: the label that means "no label".

    Returns:
        One hypothesis per item. ``tokens`` are the targets; ``times`` the first step of each label
        and the step after its last; ``confidences`` the mean of its probability over these steps;
        ``scores`` ``(B,)`` the log-probability of the alignment. If all alignments have the
        probability 0, the score is ``-inf``, and times and confidences are 0.

    Raises:
        ArgumentTypeError: an argument is of the wrong kind or dtype.
        ShapeError: numbers of sequences or devices do not match.
        ArgumentError: the blank or a label does not exist, a target requires more steps than its
            sequence has (one per label, and one between equal labels), or a log-probability is NaN
            or inf, or the probabilities of an element sum to more than 1.05.

    Example:
        >>> log_probs = Ragged([torch.tensor([[0.1, 0.8, 0.1], [0.8, 0.1, 0.1], [0.1, 0.1, 0.8]]).log()])
        >>> best = ctc_align(log_probs, Ragged([[1, 2]]))
        >>> best.times[0].tolist(), best.confidences[0].tolist()
        ([[0, 1], [2, 3]], [0.8..., 0.8...])
    """
    check_predictions("log_probs", log_probs)
    blank = check_whole("blank", blank)
    check_labels(targets, log_probs, "log_probs")
    check_blank(log_probs, blank)
    labels = targets.map(lambda values: values.detach().long())
    on_host = labels.to("cpu")
    check_classes(on_host, log_probs.values.shape[1], blank)
    _check_fits(log_probs.lengths_cpu, on_host)
    values = _on_host(log_probs)
    bounds = log_probs._host_offsets()
    owner = on_host._host_offsets()
    if missing_kernels() is None:
        times, confidences, scores = kernels.best_alignment(
            values, bounds, on_host.values, owner, blank
        )
    else:
        rows_of = values.double().split(log_probs.lengths_cpu.tolist())
        items = zip(rows_of, on_host.to_list(), strict=True)
        paths = [_best_path(rows, item_labels, blank) for rows, item_labels in items]
        none = values.new_zeros(0).double()
        empty = (on_host.values.new_zeros(0, 2), none, none)
        times, confidences, scores = map(torch.cat, zip(empty, *paths, strict=True))
    device = log_probs.device
    dtype = values.dtype
    offsets = torch.arange(len(targets) + 1, device=device)
    spans = labels.with_values(times.to(device))
    means = labels.with_values(confidences.to(device, dtype))
    return Hypotheses(labels, scores.to(device, dtype), offsets, spans, means)


def _on_host(log_probs: Ragged) -> Tensor:
    """Return log-probabilities on the CPU; raise for NaN, inf, and sums of an element above 1."""
    values = log_probs.values.detach().to("cpu", wide(log_probs.dtype))
    sums = sums_of(values)
    if bool((sums <= LARGEST_SUM).all()):
        return values
    below = values < math.inf
    if not bool(below.all()):
        fix = "check the model for NaN, or drop the sequence"
        raise ArgumentError("log_probs", f"{float(values[~below][0])}", "numbers below inf", fix)
    check_sums(log_probs, sums)
    return values


def _check_state(state: Any, count: int) -> tuple[Tensor, Tensor]:
    """Return the numbers and offsets of a state on the CPU."""
    rule = "None, or found.state of an earlier call"
    check_kind(
        "state", state, Ragged, rule, "pass that state, or state[items] for some of its items"
    )
    if len(state) != count or state.dtype is not torch.int64 or state.values.dim() != 1:
        got = f"{len(state)} sequences of {state.dtype}"
        rule = f"a state of {count} sequences, as log_probs has"
        raise ShapeError(
            "state", got, rule, "pass log_probs of the same items, empty for those that ended"
        )
    numbers = state.values.detach().cpu().contiguous()
    bounds = state._host_offsets()
    return numbers, bounds


def _check_fits(steps: Tensor, targets: Ragged) -> None:
    """Raise if a target requires more steps than its sequence has."""
    same = segments.shift(targets.values, targets.offsets, 1, fill=-1) == targets.values
    needed = targets.lengths + segments.sum(same, targets.offsets)
    wrong = (needed > steps).nonzero().view(-1)
    if wrong.shape[0]:
        item = int(wrong[0])
        got = f"{int(steps[item])} steps for a target that requires {int(needed[item])} in sequence {item}"
        rule = "at least as long as each target, plus one step between equal labels"
        fix = "drop these sequences, or make steps shorter"
        raise ArgumentError("log_probs", f"{got}, and {len(wrong) - 1} more such", rule, fix)


def _best_path(rows: Tensor, labels: Tensor, blank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return times ``(L, 2)``, confidences ``(L,)`` and score ``(1,)`` of a sequence, in torch."""
    size = 2 * len(labels) + 1  # a blank before and after each label
    states = torch.arange(1, size, 2, device="cpu")  # of the labels
    tokens = labels.new_full((size,), blank).index_copy(0, states, labels)
    bars_skips = torch.ones(size, dtype=torch.bool, device="cpu")
    bars_skips[3::2] = labels[1:] == labels[:-1]
    # With two more numbers in front, for the predecessors of the first state, in which all paths
    # begin.
    alpha = rows.new_full((size + 2,), -math.inf)
    moves = []
    alpha[2] = 0
    for row in rows:
        # Of equal ones, max returns the first.
        best, move = torch.stack(
            [alpha[2:], alpha[1:-1], alpha[:-2].masked_fill(bars_skips, -math.inf)]
        ).max(0)
        alpha[2:] = best + row[tokens]
        moves.append(move.tolist())
    state = size - 1 - int(alpha[-2] > alpha[-1])
    score = alpha[state + 2 :][:1]
    path = []
    for move in reversed(moves):
        path.append(state)
        state -= move[state]
    visits = labels.new_tensor(path[::-1]).unsqueeze(1) == states
    visits &= score.isfinite()
    counts = visits.sum(0)
    first = (visits.cumsum(0) == 0).sum(0).masked_fill(counts == 0, 0)
    means = (rows[:, labels].exp() * visits).sum(0) / counts.clamp(min=1)
    return torch.stack([first, first + counts], 1), means, score
