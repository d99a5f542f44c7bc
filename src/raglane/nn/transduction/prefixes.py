"""Beam search over prefixes of CTC in plain Python, and the states in which all searches end.

The Python search calls a scorer once per step with all new pairs of a prefix and a token; other
searches run in C++. Both use the states that ``raglane_find_prefixes`` in ``csrc/abi/raglane.h``
describes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice, pairwise
from typing import Any, NamedTuple

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
    """Log-probabilities of a prefix's alignments, all and the best, by end: blank or last token."""

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

    @property
    def nats(self) -> float:
        return -(self.total + self.scorer)

    def start(self, parent: _Prefix, log_prob: float, step: int) -> None:
        """Add the alignments in which the last token begins; a repeated one follows a blank."""
        repeats = parent.tokens[-1:] == self.tokens[-1:]
        before = parent.blank if repeats else parent.total
        self.label = _log_add(self.label, before + log_prob)
        best_before = parent.best_blank
        if not repeats:
            best_before = max(best_before, parent.best_label)
        best = best_before + log_prob
        if best > self.best_label:
            self.best_label = best
            pieces = parent.path if repeats else parent.ended
            self.run = (*pieces, (step, step + 1, math.exp(log_prob)))


class _Candidate(NamedTuple):
    """A prefix of the next beam, by negative log-probability; of equal ones, the lower numbers."""

    nats: float
    parent: int  # the index of the prefix that it extends
    token: int  # -1 for none
    prefix: _Prefix


class _PrefixBeam:
    """The beam of one sequence."""

    def __init__(self, beam: Beam, record: IntArray | None, classes: int) -> None:
        self.settings = beam
        self.steps = 0
        self.prefixes = [_Prefix(blank=0.0, best_blank=0.0)]
        if record is not None:
            self.steps, self.prefixes = _read(record, classes)

    def pairs(self, row: Sequence[float]) -> list[tuple[int, int]]:
        """Return the new prefixes of a step: the index of their parent, and the token."""
        settings = self.settings
        in_beam = {prefix.tokens for prefix in self.prefixes}
        allowed = [
            token for token, value in enumerate(row) if token != settings.blank and value > _NEVER
        ]
        chosen = sorted(allowed, key=lambda token: -row[token])[: settings.tokens_per_step]
        return [
            (index, token)
            for index, prefix in enumerate(self.prefixes)
            for token in chosen
            if (*prefix.tokens, token) not in in_beam
        ]

    def advance(
        self, row: Sequence[float], pairs: list[tuple[int, int]], scores: Sequence[float]
    ) -> None:
        """Compute one step, with the scores of its pairs."""
        parents = {prefix.tokens: prefix for prefix in self.prefixes}
        candidates = []
        for index, prefix in enumerate(self.prefixes):
            parent = parents.get(prefix.tokens[:-1]) if prefix.tokens else None
            unchanged = self._unchanged(prefix, parent, row)
            candidates.append(_Candidate(unchanged.nats, index, -1, unchanged))
        for (index, token), score in zip(pairs, scores, strict=True):
            parent = self.prefixes[index]
            added = parent.scorer + self.settings.bonus + self.settings.weight * score
            longer = _Prefix((*parent.tokens, token), scorer=added)
            longer.start(parent, row[token], self.steps)
            candidates.append(_Candidate(longer.nats, index, token, longer))
        possible = [candidate for candidate in candidates if candidate.nats < math.inf]
        possible.sort(key=lambda candidate: candidate[:3])
        self.prefixes = [candidate.prefix for candidate in possible[: self.settings.beam]]
        self.steps += 1

    def _unchanged(self, prefix: _Prefix, parent: _Prefix | None, row: Sequence[float]) -> _Prefix:
        """Return a prefix after a step that adds no token, or its last one from its parent."""
        blank = row[self.settings.blank]
        best = max(prefix.best_blank, prefix.best_label) + blank
        after = replace(prefix, blank=prefix.total + blank, best_blank=best, path=prefix.ended)
        if not prefix.tokens:
            return after
        log_prob = row[prefix.tokens[-1]]
        after.label += log_prob
        after.best_label += log_prob
        if after.run:
            first, _, mass = after.run[-1]
            after.run = (*after.run[:-1], (first, self.steps + 1, mass + math.exp(log_prob)))
        if parent is not None:
            after.start(parent, log_prob, self.steps)
        return after

    def record(self) -> IntArray:
        """Return the record of the sequence in a state."""
        prefixes = self.prefixes
        fields = ("blank", "label", "best_blank", "best_label", "scorer")
        numbers = np.array(
            [[getattr(prefix, field) for prefix in prefixes] for field in fields], dtype=np.float64
        )
        columns = [
            [self.steps, len(prefixes)],
            [len(prefix.tokens) for prefix in prefixes],
            numbers.view(np.int64).ravel(),
            [token for prefix in prefixes for token in prefix.tokens],
        ]
        for field, best in (("path", "best_blank"), ("run", "best_label")):
            pieces: list[Piece] = []
            for prefix in prefixes:
                is_possible = getattr(prefix, best) > _NEVER
                none = [(0, 0, 0.0)] * len(prefix.tokens)
                pieces += getattr(prefix, field) if is_possible else none
            columns += [[first for first, _, _ in pieces], [after for _, after, _ in pieces]]
            masses = [mass for _, _, mass in pieces]
            columns.append(np.array(masses, dtype=np.float64).view(np.int64))
        return np.concatenate([np.asarray(column, dtype=np.int64) for column in columns])


def search(
    log_probs: Tensor,
    offsets: Tensor,
    state: tuple[Tensor, Tensor] | None,
    beam: Beam,
    scorer: Scorer | None,
) -> tuple[Tensor, Tensor]:
    """Run or continue a search on ``(N, C)``; return the state and the offsets of its records."""
    bounds = offsets.tolist()
    lengths = offsets.diff().tolist()
    records: list[IntArray | None] = [None] * len(lengths)
    if state is not None and lengths:
        records = list(np.split(state[0].numpy(), state[1].numpy()[1:-1]))
    searches = [_PrefixBeam(beam, record, log_probs.shape[1]) for record in records]
    rows = log_probs.double()
    for step in range(max(lengths, default=0)):
        running = [index for index, length in enumerate(lengths) if step < length]
        _advance(
            [searches[index] for index in running],
            [rows[bounds[index] + step].tolist() for index in running],
            scorer,
        )
    results = [search.record() for search in searches]
    numbers = np.concatenate(results) if results else np.zeros(0, dtype=np.int64)
    ends = np.cumsum([0, *map(len, results)], dtype=np.int64)
    return torch.from_numpy(numbers), torch.from_numpy(ends)


def _advance(searches: list[_PrefixBeam], rows: list[list[float]], scorer: Scorer | None) -> None:
    """Compute one step of all sequences, with one call of the scorer."""
    pairs = [search.pairs(row) for search, row in zip(searches, rows, strict=True)]
    prefixes = [
        search.prefixes[index].tokens
        for search, extensions in zip(searches, pairs, strict=True)
        for index, _ in extensions
    ]
    scores = [0.0] * len(prefixes)
    if scorer is not None and scores:
        flat = torch.tensor(list(chain(*prefixes)), dtype=torch.int64, device="cpu")
        tokens = torch.tensor([token for _, token in chain(*pairs)], device="cpu")
        sequences = Ragged.from_flat(flat, lengths=list(map(len, prefixes)))
        scores = _scored(scorer, sequences, tokens)
    rest = iter(scores)
    for search, row, extensions in zip(searches, rows, pairs, strict=True):
        search.advance(row, extensions, list(islice(rest, len(extensions))))


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
    numbers: list[float] = scores.double().tolist()
    wrong = [score for score in numbers if not score < math.inf]
    if wrong:
        fix = "return -inf to forbid a token"
        raise ArgumentError(
            "scorer", f"{wrong[0]}", "a function that returns numbers below inf", fix
        )
    return numbers


# -- states
# --------------------------------------------------------------------------------------------------


def _no_state() -> ArgumentError:
    fix = "pass the state that an earlier call returned"
    return ArgumentError("state", "other numbers", "that of an earlier search", fix)


@dataclass(frozen=True, slots=True)
class _PrefixRecord:
    """The fields of a record: E prefixes with n tokens."""

    steps: int
    lengths: IntArray  # ``(E,)``
    numbers: NDArray[np.float64]  # ``(5, E)``: blank, label, best blank, best label, scorer
    tokens: IntArray  # ``(n,)``
    # ``(2, 3, n)``: by the end of the alignment; the first step, that after the last, the bits of a
    # sum.
    spans: IntArray

    @classmethod
    def of(cls, record: IntArray) -> _PrefixRecord:
        if len(record) < 2:
            raise _no_state()
        count = int(record[1])
        size = len(record) - 2
        if not 0 <= count <= size // 6:
            raise _no_state()
        lengths = record[2 : 2 + count]
        if lengths.min(initial=0) < 0 or lengths.max(initial=0) > size:
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
    fields = _PrefixRecord.of(record)
    if (
        fields.tokens.min(initial=0) < 0
        or fields.tokens.max(initial=0) >= classes
        or not (fields.numbers < np.inf).all()
    ):
        raise _no_state()
    prefixes = []
    ends = np.cumsum(fields.lengths)
    for number, end in enumerate(ends):
        span = slice(end - fields.lengths[number], end)
        path, run = (_pieces(*columns) for columns in fields.spans[:, :, span])
        blank, label, best_blank, best_label, scorer = fields.numbers[:, number].tolist()
        tokens = tuple(fields.tokens[span].tolist())
        prefixes.append(_Prefix(tokens, blank, label, best_blank, best_label, scorer, path, run))
    return fields.steps, prefixes


def _pieces(first: IntArray, after: IntArray, mass: IntArray) -> tuple[Piece, ...]:
    masses = mass.view(np.float64)
    return tuple(zip(first.tolist(), after.tolist(), masses.tolist(), strict=True))


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
        fields = _PrefixRecord.of(numbers[begin:end])
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

    def tensor(arrays: list[Any], dtype: torch.dtype, *shape: int) -> Tensor:
        array = np.concatenate(arrays) if arrays else np.zeros(shape)
        return torch.from_numpy(array).to(device, dtype)

    sequences = Ragged.from_flat(
        tensor(tokens, torch.int64, 0), lengths=tensor(lengths, torch.int64, 0).cpu()
    )
    offsets = torch.tensor([0, *accumulate(counts)], device=device)
    spans_of_tokens = sequences.with_values(tensor(times, torch.int64, 0, 2))
    means = sequences.with_values(tensor(confidences, dtype, 0))
    return Hypotheses(sequences, tensor(scores, dtype, 0), offsets, spans_of_tokens, means)
