"""Beam search for any model that predicts one token after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from raglane._utils.checks import (
    check_count,
    check_device,
    check_real,
    check_tensor,
    check_whole,
    read_integers,
)
from raglane._utils.messages import quote
from raglane._utils.tracing import never_recorded
from raglane.errors import ArgumentError, ShapeError
from raglane.nn.recurrent.stack import State, one_or_tuple
from raglane.nn.transduction.hypotheses import Hypotheses
from raglane.nn.transduction.lanes import Rules, SearchLanes, check_rows
from raglane.ragged import Ragged


@never_recorded
def beam_search(
    step: Callable[[Tensor, Any], tuple[Tensor, Any]],
    starts: Tensor,
    state: Any,
    *,
    beam_size: int,
    max_length: int | Tensor,
    end: int | None = None,
    silent: int | None = None,
    frames: Tensor | None = None,
    length_penalty: float = 0.0,
    penalty: Callable[[Any], Tensor] | None = None,
    constraint: Callable[[Ragged, Tensor, Tensor], Tensor] | None = None,
    n_best: int = 1,
    max_rows: int | None = None,
) -> Hypotheses:
    """Search the best token sequences of each item, with any model that predicts one token after
    another.

    A step extends each hypothesis of an item by every token. Extensions by ``end`` are finished if
    they are among the ``beam_size`` best; the ``beam_size`` best others continue. So ``beam_size=1`` is the greedy
    search. The hypotheses of all items are the rows of one batch. An item leaves it when no
    continuation can be better than its ``n_best`` finished hypotheses, and the next item takes its
    place. The results do not depend on ``max_rows`` or on the other items, apart from the rounding of
    ``step``. Equal scores: the better prefix, then the lowest token.

    The score of a hypothesis of L tokens is ``log_probability / lp(L)``, with the length penalty of
    Wu et al. 2016 (arXiv:1609.08144, equation 14), ``lp(L) = ((5 + L) / 6) ** length_penalty``,
    plus ``penalty``. The end of an item is exact for scores of tokens and penalties of at most 0.

    With ``silent`` it searches for transducers: one token, e.g. their blank, is not part of the
    output, and a hypothesis is finished after ``frames`` of them. Hypotheses with the same output
    are merged, and their probabilities added: alignment-length synchronous decoding (Saon et al.
    2020, ICASSP, "Alignment-length synchronous decoding for RNN transducer").

    Args:
        step: ``step(tokens, state)`` returns log-probabilities ``(R, V)`` of the next token of R
            hypotheses, and the new state. ``tokens`` ``(R,)`` int64 are their last tokens, silent
            ones included. Rows must not depend on each other.
        starts: ``(B,)`` integers, the token that the first step of each item reads; it is not part
            of the output.
        state: a tensor, or a tuple, list or dict of them, with B rows, also nested. The search
            selects rows, so a tensor of item numbers lets ``step`` find the data of an item.
        beam_size: the number of hypotheses of an item that run at once.
        max_length: the most tokens of an output: a number, or ``(B,)`` integers. A hypothesis of
            that length is finished without ``end``. With ``silent``, only silent tokens can follow.
        end: the token that finishes a hypothesis; it is not part of the output, but of the score.
        silent: the token that is not part of the output; not together with ``end``.
        frames: with ``silent``, ``(B,)`` integers, the number of silent tokens that finish a
            hypothesis.
        length_penalty: the exponent above; more favours longer outputs.
        penalty: ``penalty(state)`` returns ``(R,)``, a number of at most 0 per row, e.g. the
            coverage penalty of attention. It is called with the state that ``step`` returned with
            the last token's probabilities.
        constraint: ``constraint(prefixes, items, log_probs)`` returns log-probabilities ``(R, V)``,
            with ``-inf`` for tokens that may not follow. ``prefixes`` is a Ragged of the R outputs
            so far, ``items`` ``(R,)`` are the numbers of their items.
        n_best: the most hypotheses per item in the result, at most ``beam_size``.
        max_rows: the largest number of rows that run at once, at least ``beam_size``. None for all items at once.

    Returns:
        The hypotheses, with scores of the dtype of the log-probabilities. With ``silent``,
        ``times`` are the frames of the tokens in the most probable of the merged alignments.

    Raises:
        ArgumentError: an argument is out of its range, or ``step`` returns NaN.
        ArgumentTypeError: an argument is of the wrong kind.
        ShapeError: ``state``, ``starts``, or a result of ``step`` or a callback does not have a row
            per hypothesis.

    Example:
        >>> chances = torch.tensor([[0.0, 0.6, 0.4], [0.7, 0.1, 0.2], [0.2, 0.8, 0.0]]).log()
        >>> def step(tokens, state):
        ...     return chances[tokens], state
        >>> best = beam_search(step, torch.tensor([0]), (), beam_size=3, max_length=5, end=0, n_best=2)
        >>> [tokens.tolist() for tokens in best.tokens], best.scores.exp()
        ([[1], [2, 1]], tensor([0.4200, 0.2240]))
    """
    check_tensor("starts", starts, 1)
    count = starts.shape[0]
    tokens = _integers("starts", starts, count, starts.device)
    check_rows("state", state, count, "one row per item, as starts has")
    beam = check_count("beam_size", beam_size)
    if check_count("n_best", n_best) > beam:
        raise ArgumentError(
            "n_best", quote(n_best), f"at most beam_size, {beam}", "pass a larger one"
        )
    if max_rows is not None and check_count("max_rows", max_rows) < beam:
        rule = f"at least beam_size, {beam}, the rows of one item"
        fix = "pass more, or None for no limit"
        raise ArgumentError("max_rows", quote(max_rows), rule, fix)
    if end is not None and silent is not None:
        rule = "None with silent, because frames end the hypotheses then"
        fix = "leave out one of both"
        raise ArgumentError("end", quote(end), rule, fix)
    if (frames is None) != (silent is None):
        got = "None" if frames is None else "a tensor"
        rule = "a tensor with silent, and None without it"
        raise ArgumentError("frames", got, rule, "pass both or none")
    rule = "a finite number"
    alpha = check_real(
        "length_penalty",
        length_penalty,
        rule,
        lambda number: abs(number) < float("inf"),
        "pass e.g. 1",
    )
    if isinstance(max_length, Tensor):
        most = _integers("max_length", max_length, count, starts.device)
    else:
        most = torch.full((count,), check_whole("max_length", max_length, 0), device=starts.device)
    token = -1
    for name, number in (("end", end), ("silent", silent)):
        token = token if number is None else check_whole(name, number, 0)
    bounds = None if frames is None else _integers("frames", frames, count, starts.device)
    rules = Rules(step, penalty, constraint, beam, int(n_best), alpha, most, token, bounds)
    lanes = SearchLanes(rules, tokens, state, count if max_rows is None else int(max_rows) // beam)
    with torch.no_grad():
        while lanes.admit():
            lanes.advance()
        return lanes.hypotheses()


def rows_first(hx: State) -> tuple[Tensor, ...]:
    """Return a recurrent layer's state as the state of a search, ``(rows, layers, size)`` each."""
    return tuple([state.transpose(0, 1) for state in (hx if isinstance(hx, tuple) else (hx,))])


def layers_first(states: tuple[Tensor, ...]) -> Any:
    """Return the state of a recurrent layer, the inverse of :func:`rows_first`."""
    return one_or_tuple(tuple([state.transpose(0, 1).contiguous() for state in states]))


def _integers(name: str, tensor: Any, count: int, device: torch.device) -> Tensor:
    """Return one integer of at least 0 per item as int64."""
    integers: Tensor = read_integers(check_tensor(name, tensor), name)
    if integers.shape != (count,):
        rule = f"one number per item, ({count},)"
        fix = "pass a tensor of this shape"
        raise ShapeError(name, f"shape {tuple(tensor.shape)}", rule, fix)
    check_device(name, integers, device)
    if integers.is_cpu and count and int(integers.min()) < 0:
        raise ArgumentError(name, f"{int(integers.min())}", "at least 0", "check the numbers")
    return integers
