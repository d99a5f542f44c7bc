"""Beam search over prefixes of CTC in plain Python, and the states in which all searches end.

The Python search calls a scorer once per step with all new pairs of a prefix and a token; other
searches run in C++. Both use the states that ``raglane_find_prefixes`` in ``csrc/abi/raglane.h``
describes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raglane.errors import ArgumentError, ShapeError
from raglane.kernels.cpu.transduction import Beam
from raglane.nn.transduction.hypotheses import Hypotheses
from raglane.ragged import Ragged
from raglane.segments import IntArray

Piece = tuple[int, int, float]
"""A token of an alignment: its first step, the step after its last, the sum of its
probabilities."""

Scorer = Callable[[Ragged, Tensor], Tensor]

_NEVER = -math.inf  # the logarithm of probability 0


def _log_add(a: float, b: float) -> float:
    most = max(a, b)
    least = min(a, b)
    return most if least == _NEVER else most + math.log1p(math.exp(least - most))


@dataclass(slots=True)
class _Prefix:
    """Log-probabilities of all alignments of a prefix, and of the best one, by their end: a blank
    or the last token.
    """

    tokens: tuple[int, ...] = ()
    blank: float = _NEVER
    label: float = _NEVER
    best_blank: float = _NEVER
    best_label: float = _NEVER
    scorer: float = 0.0  # scores and bonuses of the tokens
    path: tuple[Piece, ...] = ()  # of the best alignment that ends in a blank
    run: tuple[Piece, ...] = ()  # of the best alignment that ends in the last token

    @property
    def total(self) -> float:
        return _log_add(self.blank, self.label)

    @property
    def ended(self) -> tuple[Piece, ...]:
        return self.path if self.best_blank >= self.best_label else self.run

    def start(self, parent: _Prefix, log_prob: float, step: int) -> None:
        """Add the alignments in which the last token begins: only after a blank if it repeats the
        one before.
        """
        repeats = parent.tokens[-1:] == self.tokens[-1:]
        self.label = _log_add(self.label, (parent.blank if repeats else parent.total) + log_prob)
        best = (
            parent.best_blank if repeats else max(parent.best_blank, parent.best_label)
        ) + log_prob
        if best > self.best_label:
            piece = (step, step + 1, math.exp(log_prob))
            self.best_label = best
            self.run = (*(parent.path if repeats else parent.ended), piece)


class _Search:
    """The beam of one sequence."""

    def __init__(self, beam: Beam, record: IntArray | None, classes: int) -> None:
        self.settings = beam
        self.steps = 0
        self.prefixes = [_Prefix(blank=0.0, best_blank=0.0)]
        if record is not None:
            self.steps, self.prefixes = _read(record, classes)

    def pairs(self, row: Sequence[float]) -> list[tuple[int, int]]:
        """Return the new prefixes of a step: the place in the beam, and the token."""
        settings = self.settings
        known = {prefix.tokens for prefix in self.prefixes}
        allowed = [
            token for token, value in enumerate(row) if token != settings.blank and value > _NEVER
        ]
        chosen = sorted(allowed, key=lambda token: -row[token])[: settings.tokens_per_step]
        places = enumerate(self.prefixes)
        return [
            (place, token)
            for place, one in places
            for token in chosen
            if (*one.tokens, token) not in known
        ]

    def advance(
        self, row: Sequence[float], pairs: list[tuple[int, int]], scores: Sequence[float]
    ) -> None:
        """Compute one step, with the scores of its pairs."""
        found: list[tuple[float, int, int, _Prefix]] = []
        known = {prefix.tokens: prefix for prefix in self.prefixes}
        for place, one in enumerate(self.prefixes):
            blank = row[self.settings.blank]
            best = max(one.best_blank, one.best_label) + blank
            kept = replace(one, blank=one.total + blank, best_blank=best, path=one.ended)
            if one.tokens:
                log_prob = row[one.tokens[-1]]
                kept.label += log_prob
                kept.best_label += log_prob
                if kept.run:
                    first, _, mass = kept.run[-1]
                    kept.run = (*kept.run[:-1], (first, self.steps + 1, mass + math.exp(log_prob)))
                if one.tokens[:-1] in known:
                    kept.start(known[one.tokens[:-1]], log_prob, self.steps)
            found.append((-(kept.total + kept.scorer), place, -1, kept))
        for (place, token), score in zip(pairs, scores, strict=True):
            parent = self.prefixes[place]
            added = parent.scorer + self.settings.bonus + self.settings.weight * score
            new = _Prefix((*parent.tokens, token), scorer=added)
            new.start(parent, row[token], self.steps)
            found.append((-(new.total + new.scorer), place, token, new))
        possible = sorted((one for one in found if one[0] < math.inf), key=lambda one: one[:3])
        self.prefixes = [one[3] for one in possible[: self.settings.beam]]
        self.steps += 1

    def record(self) -> IntArray:
        """Return the record of the sequence in a state."""
        prefixes = self.prefixes
        tokens = [token for one in prefixes for token in one.tokens]
        fields = ("blank", "label", "best_blank", "best_label", "scorer")
        numbers = np.array(
            [[getattr(one, field) for one in prefixes] for field in fields], dtype=np.float64
        )
        parts = [
            [self.steps, len(prefixes)],
            [len(one.tokens) for one in prefixes],
            numbers.view(np.int64).ravel(),
        ]
        parts.append(tokens)
        for kind in ("path", "run"):
            best = "best_blank" if kind == "path" else "best_label"
            pieces = [
                getattr(one, kind)
                if getattr(one, best) > _NEVER
                else [(0, 0, 0.0)] * len(one.tokens)
                for one in prefixes
            ]
            flat = [piece for listed in pieces for piece in listed]
            parts += [[piece[0] for piece in flat], [piece[1] for piece in flat]]
            parts.append(np.array([piece[2] for piece in flat], dtype=np.float64).view(np.int64))
        return np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])


def search(
    log_probs: Tensor,
    offsets: Tensor,
    state: tuple[Tensor, Tensor] | None,
    beam: Beam,
    scorer: Scorer | None,
) -> tuple[Tensor, Tensor]:
    """Run or continue a search on ``(N, C)``; return the state and the offsets of its records."""
    bounds = offsets.tolist()
    records: list[IntArray | None] = [None] * (len(bounds) - 1)
    if state is not None:
        records = list(np.split(state[0].numpy(), state[1].numpy()[1:-1])) if len(records) else []
    searches = [_Search(beam, record, log_probs.shape[1]) for record in records]
    rows = log_probs.double()
    lengths = offsets.diff().tolist()
    for step in range(max(lengths, default=0)):
        running = [place for place, length in enumerate(lengths) if step < length]
        taken = [rows[bounds[place] + step].tolist() for place in running]
        pairs = [searches[place].pairs(row) for place, row in zip(running, taken, strict=True)]
        scores = [0.0] * sum(map(len, pairs))
        if scorer is not None and scores:
            prefixes = [
                searches[place].prefixes[at].tokens
                for place, of_item in zip(running, pairs, strict=True)
                for at, _ in of_item
            ]
            flat = torch.tensor(
                [token for prefix in prefixes for token in prefix], dtype=torch.int64, device="cpu"
            )
            tokens = torch.tensor(
                [token for of_item in pairs for _, token in of_item], device="cpu"
            )
            scores = _scored(
                scorer, Ragged.from_flat(flat, lengths=[len(prefix) for prefix in prefixes]), tokens
            )
        ends = list(accumulate(map(len, pairs)))
        for place, row, of_item, end in zip(running, taken, pairs, ends, strict=True):
            searches[place].advance(row, of_item, scores[end - len(of_item) : end])
    found = [one.record() for one in searches]
    numbers = np.concatenate(found) if found else np.zeros(0, dtype=np.int64)
    return torch.from_numpy(numbers), torch.from_numpy(
        np.cumsum([0, *map(len, found)], dtype=np.int64)
    )


def _scored(scorer: Scorer, sequences: Ragged, tokens: Tensor) -> list[float]:
    """Return the scores of a step; raise if they are not one number below inf per pair."""
    scores: Any = scorer(sequences, tokens)
    if not isinstance(scores, Tensor) or scores.shape != tokens.shape or scores.is_complex():
        got = (
            f"a result of shape {tuple(scores.shape)}"
            if isinstance(scores, Tensor)
            else type(scores).__name__
        )
        rule = f"a function that returns one real score for each of the {len(tokens)} pairs"
        raise ShapeError("scorer", got, rule, "return a tensor (M,)")
    found: list[float] = scores.double().tolist()
    wrong = [score for score in found if not score < math.inf]
    if wrong:
        fix = "return -inf to forbid a token"
        raise ArgumentError(
            "scorer", f"{wrong[0]}", "a function that returns numbers below inf", fix
        )
    return found


# -- states
# --------------------------------------------------------------------------------------------------


def _no_state() -> ArgumentError:
    fix = "pass the state that an earlier call returned"
    return ArgumentError("state", "other numbers", "that of an earlier search", fix)


@dataclass(frozen=True, slots=True)
class _Record:
    """The fields of a record: E prefixes with n tokens."""

    steps: int
    lengths: IntArray  # ``(E,)``
    numbers: NDArray[np.float64]  # ``(5, E)``: blank, label, best blank, best label, scorer
    tokens: IntArray  # ``(n,)``
    # ``(2, 3, n)``: by the end of the alignment; the first step, that after the last, the bits of a
    # sum.
    spans: IntArray

    @classmethod
    def of(cls, record: IntArray) -> _Record:
        count, size = (int(record[1]), len(record) - 2) if len(record) > 1 else (-1, 0)
        lengths = record[2 : 2 + max(count, 0)]
        if (
            not 0 <= count <= size // 6
            or lengths.min(initial=0) < 0
            or lengths.max(initial=0) > size
        ):
            raise _no_state()
        if size != 6 * count + 7 * int(lengths.sum()):
            raise _no_state()
        rest = record[2 + count :]
        numbers = rest[: 5 * count].view(np.float64).reshape(5, count)
        body = rest[5 * count :]
        total = len(body) // 7
        return cls(
            int(record[0]), lengths, numbers, body[:total], body[total:].reshape(2, 3, total)
        )


def _read(record: IntArray, classes: int) -> tuple[int, list[_Prefix]]:
    """Return the steps and prefixes of a record."""
    fields = _Record.of(record)
    if (
        fields.tokens.min(initial=0) < 0
        or fields.tokens.max(initial=0) >= classes
        or not (fields.numbers < np.inf).all()
    ):
        raise _no_state()
    prefixes = []
    ends = np.cumsum(fields.lengths)
    for number, end in enumerate(ends):
        part = slice(end - fields.lengths[number], end)
        path, run = (
            tuple(
                zip(
                    first[part].tolist(),
                    after[part].tolist(),
                    mass[part].view(np.float64).tolist(),
                    strict=True,
                )
            )
            for first, after, mass in fields.spans
        )
        blank, label, best_blank, best_label, scorer = fields.numbers[:, number].tolist()
        tokens = tuple(fields.tokens[part].tolist())
        prefixes.append(_Prefix(tokens, blank, label, best_blank, best_label, scorer, path, run))
    return fields.steps, prefixes


def hypotheses(state: Ragged, n_best: int, dtype: torch.dtype, device: torch.device) -> Hypotheses:
    """Return the best hypotheses of a state."""
    counts = []
    lengths = []
    tokens = []
    scores = []
    times = []
    confidences = []
    numbers = state.values.numpy()
    bounds = state.offsets.tolist()
    for begin, end in pairwise(bounds):
        fields = _Record.of(numbers[begin:end])
        few = fields.lengths[:n_best]
        total = int(few.sum())
        blank, label, best_blank, best_label, scorer = fields.numbers[:, : len(few)]
        spans = fields.spans[:, :, :total]
        first, after, mass = np.where(np.repeat(best_blank >= best_label, few), spans[0], spans[1])
        counts.append(len(few))
        lengths.append(few)
        tokens.append(fields.tokens[:total])
        scores.append(np.logaddexp(blank, label) + scorer)
        times.append(np.stack([first, after], 1))
        # At least one element in every state that a search made; a changed one must not divide by
        # 0.
        confidences.append(mass.copy().view(np.float64) / np.maximum(after - first, 1))

    def tensor(parts: list[Any], dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.from_numpy(np.concatenate(parts) if parts else np.zeros(shape)).to(
            device, dtype
        )

    sequences = Ragged.from_flat(
        tensor(tokens, torch.int64, 0), lengths=tensor(lengths, torch.int64, 0).cpu()
    )
    offsets = torch.tensor([0, *accumulate(counts)], device=device)
    found = sequences.with_values(tensor(times, torch.int64, 0, 2))
    means = sequences.with_values(tensor(confidences, dtype, 0))
    return Hypotheses(sequences, tensor(scores, dtype, 0), offsets, found, means)
