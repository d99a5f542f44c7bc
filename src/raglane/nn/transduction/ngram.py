"""An n-gram model of tokens, which scores the prefixes of a beam search."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from raglane import segments
from raglane._utils.checks import check_count, check_whole, read_integers
from raglane.errors import ArgumentError, ShapeError
from raglane.kernels.cpu.transduction import Grams
from raglane.nn.transduction.tokens import as_tokens
from raglane.ragged import Ragged

Tokens = tuple[int, ...]


class NGram:
    """An n-gram model: the probability of a token after the tokens before it, counted in sequences.

    Probabilities are smoothed by the interpolated method of Kneser and Ney ("Improved backing-off
    for m-gram language modeling", 1995) in the notation of Chen and Goodman (1999): each count is
    reduced by the discount ``D = n1 / (n1 + 2 n2)`` of its order, where ``n1`` n-grams occur once
    and ``n2`` twice. The discounted mass goes to the lower order, in which the number of different
    tokens before an n-gram replaces its count. The lowest order is interpolated with the uniform
    distribution over all tokens and the end of a sequence.

    A :class:`CTCBeamSearch` evaluates the model in C++. The model is also a function
    ``ngram(prefixes, tokens)``.

    Args:
        sequences: the training data, a Ragged of tokens, ``(N,)`` of an integer dtype from 0 to
            ``num_tokens - 1``, or a list of lists.
        num_tokens: the number of tokens. For a search: the number C of classes, with the blank.
        n: the maximum length of n-grams, at least 1.

    Raises:
        ArgumentTypeError: the sequences do not consist of integers.
        ArgumentError: a token or a number is out of range, or there is no sequence.

    Example:
        >>> ngram = NGram([[1, 2, 1, 2], [1, 2, 3]], num_tokens=4, n=2)
        >>> ngram(Ragged([[1], [1]]), torch.tensor([2, 3])).exp().tolist()  # after 1, the tokens 2 and 3
        [0.8..., 0.0...]
    """

    def __init__(
        self, sequences: Ragged | Sequence[Sequence[int]], num_tokens: int, n: int = 3
    ) -> None:
        self.num_tokens = check_count("num_tokens", num_tokens)
        self.n = check_whole("n", n, 1, most=32)
        tokens = as_tokens("sequences", sequences, self.num_tokens)
        if len(tokens) == 0:
            raise ArgumentError(
                "sequences", "none", "at least one sequence", "pass the training data"
            )
        lists = [sequence.tolist() for sequence in tokens]
        self._grams = grams = _estimated(lists, self.num_tokens, self.n)
        contexts = torch.arange(len(grams.shorter), device="cpu").repeat_interleave(
            grams.first.diff()
        )
        self._keys = contexts * (self.num_tokens + 1) + grams.tokens

    def __repr__(self) -> str:
        return f"NGram(num_tokens={self.num_tokens}, n={self.n}), {self._grams.tokens.shape[0]:,} n-grams"

    def __call__(self, prefixes: Ragged, tokens: Tensor) -> Tensor:
        """Return the log-probability of one token after each prefix.

        Args:
            prefixes: M sequences of tokens, from their begin.
            tokens: ``(M,)`` integers, the next tokens; ``num_tokens`` is the end of a sequence.

        Returns:
            ``(M,)`` float64 on the CPU.

        Raises:
            ArgumentTypeError: the tokens are not integers.
            ArgumentError: a token is out of range.
            ShapeError: there is not one token per prefix.
        """
        before = as_tokens("prefixes", prefixes, self.num_tokens)
        integers = read_integers(tokens, "tokens")
        sequence = Ragged.from_flat(integers, lengths=integers.shape)
        following = as_tokens("tokens", sequence, self.num_tokens + 1).values
        if len(before) != len(following):
            rule = f"one token for each of the {len(before)} prefixes"
            raise ShapeError("tokens", f"{len(following)} tokens", rule, "pass a tensor (M,)")
        ends = before.offsets[1:]
        lengths = before.lengths
        contexts = torch.full_like(lengths, self._grams.begin)
        for back in range(self.n - 1, 0, -1):
            reaches = lengths >= back
            last = before.values[ends[reaches] - back]
            _, contexts[reaches] = self._take(contexts[reaches], last)
        return self._take(contexts, following)[0]

    def _take(self, contexts: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probability of a token after each context, and the next contexts."""
        grams = self._grams
        keys = self._keys
        size = self.num_tokens + 1
        log_probs = torch.zeros(len(tokens), dtype=torch.float64, device="cpu")
        while True:
            sought = contexts * size + tokens
            index = torch.searchsorted(keys, sought).clamp(max=len(keys) - 1)
            missing = keys[index] != sought
            if not bool(missing.any()):
                return log_probs + grams.log_probs[index], grams.next[index]
            log_probs[missing] += grams.backoff[contexts[missing]]
            contexts = torch.where(missing, grams.shorter[contexts], contexts)


def _counted(sequences: list[list[int]], begin: int, end: int, order: int) -> list[Counter[Tokens]]:
    """Count the n-grams of each length from 1 to ``order``."""
    counts: list[Counter[Tokens]] = [Counter()]
    for sequence in sequences:
        padded = [*[begin] * (order - 1), *sequence, end]
        counts[0].update(zip(*(padded[skipped:] for skipped in range(order)), strict=False))
    for _ in range(order - 1):
        counts.insert(0, Counter(gram[1:] for gram in counts[0]))
    return counts


def _discount(counts: Counter[Tokens]) -> float:
    frequencies = Counter(counts.values())
    once = frequencies[1]
    twice = frequencies[2]
    return once / (once + 2 * twice) if once else 0.5


def _estimated(sequences: list[list[int]], count: int, order: int) -> Grams:
    """Count and smooth n-grams; contexts of length l are numbered after the shorter ones."""
    begin = count + 1
    counts = _counted(sequences, begin, count, order)
    contexts = [context for grams in counts for context in sorted({gram[:-1] for gram in grams})]
    numbers = {context: number for number, context in enumerate(contexts)}

    chances: dict[Tokens, float] = {(): 1 / (count + 1)}
    following: dict[Tokens, int] = {(): 0}  # the longest context that ends an n-gram
    backoff: list[float] = []
    # All single tokens, those without a count too.
    grams: list[Tokens] = [(token,) for token in range(count + 1)]
    for length, counted in enumerate(counts):
        totals: Counter[Tokens] = Counter()
        for gram, times in counted.items():
            totals[gram[:-1]] += times
        discount = _discount(counted)
        kinds = Counter(gram[:-1] for gram in counted)
        # The probability that each context gives to the lower order.
        shares = {
            context: discount * kinds[context] / totals[context] for context in sorted(totals)
        }
        backoff += shares.values()
        for gram in sorted(counted) if length else grams:
            reduced = max(counted[gram] - discount, 0) / totals[gram[:-1]]
            chances[gram] = reduced + shares[gram[:-1]] * chances[gram[1:]]
            following[gram] = numbers.get(gram, following[gram[1:]])
    del chances[()]
    sizes = np.bincount([numbers[gram[:-1]] for gram in chances])
    log_probs = torch.tensor(list(chances.values()), dtype=torch.float64, device="cpu").log()
    return Grams(
        order=order,
        begin=numbers[(begin,) * (order - 1)],
        first=segments.offsets_from_lengths(torch.from_numpy(sizes)),
        shorter=torch.tensor([numbers[context[1:]] for context in contexts], device="cpu"),
        backoff=torch.tensor(backoff, dtype=torch.float64, device="cpu").log(),
        tokens=torch.tensor([gram[-1] for gram in chances], device="cpu"),
        next=torch.tensor([following[gram] for gram in chances], device="cpu"),
        log_probs=log_probs,
    )
