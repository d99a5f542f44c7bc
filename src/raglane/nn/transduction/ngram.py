"""An n-gram model of tokens, which scores the prefixes of a beam search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raglane._utils.checks import check_count, check_whole, read_integers
from raglane._utils.messages import message
from raglane.errors import ArgumentError, ShapeError
from raglane.kernels.cpu.prefixes import Grams
from raglane.nn.transduction.tokens import as_tokens
from raglane.ragged import Ragged
from raglane.segments import IntArray

Reals = NDArray[np.float64]


class NGram:
    """An n-gram model: the probability of a token after the tokens before it, counted in sequences.

    Probabilities are smoothed by the interpolated method of Kneser and Ney ("Improved backing-off for m-gram language
    modeling", 1995) in the notation of Chen and Goodman (1999): each count is reduced by the discount
    ``D = n1 / (n1 + 2 n2)`` of its order, where ``n1`` n-grams occur once and ``n2`` twice. The discounted mass goes to
    the lower order, in which the number of different tokens before an n-gram replaces its count. The lowest order is
    interpolated with the uniform distribution over all tokens and the end of a sequence.

    A :class:`CTCBeamSearch` evaluates the model in C++. The model is also a function ``ngram(prefixes, tokens)``.

    Args:
        sequences: the training data, a Ragged of tokens, ``(N,)`` of an integer dtype from 0 to ``num_tokens - 1``, or
            a list of lists.
        num_tokens: the number of tokens. For a search: the number C of classes, with the blank.
        order: the maximum length of n-grams, at least 1.

    Raises:
        ArgumentTypeError: the sequences do not consist of integers.
        ArgumentError: a token or a number is out of range, or there is no sequence.

    Example:
        >>> ngram = NGram([[1, 2, 1, 2], [1, 2, 3]], num_tokens=4, order=2)
        >>> ngram(Ragged([[1], [1]]), torch.tensor([2, 3])).exp().tolist()  # after 1, the tokens 2 and 3
        [0.8..., 0.0...]
    """

    def __init__(self, sequences: Ragged | Sequence[Sequence[int]], num_tokens: int, order: int = 3) -> None:
        self.num_tokens, self.order = check_count("num_tokens", num_tokens), check_whole("order", order, 1, most=32)
        tokens = as_tokens("sequences", sequences, self.num_tokens)
        if len(tokens) == 0:
            raise ArgumentError(message("sequences", "none", "at least one sequence", "pass the training data"))
        self._grams = grams = _count(tokens.values.numpy(), tokens.offsets.numpy(), self.num_tokens, self.order)
        contexts = torch.arange(len(grams.shorter), device="cpu").repeat_interleave(grams.first.diff())
        self._keys = contexts * (self.num_tokens + 1) + grams.tokens

    def __repr__(self) -> str:
        grams = self._grams.tokens.shape[0]
        return f"NGram(num_tokens={self.num_tokens}, order={self.order}), {grams:,} n-grams"

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
        given = read_integers(tokens, "tokens")
        following = as_tokens("tokens", Ragged.from_flat(given, lengths=given.shape), self.num_tokens + 1).values
        if len(before) != len(following):
            rule = f"one token for each of the {len(before)} prefixes"
            raise ShapeError(message("tokens", f"{len(following)} tokens", rule, "pass a tensor (M,)"))
        ends, lengths = before.offsets[1:], before.lengths
        contexts = torch.full_like(lengths, self._grams.begin)
        for back in range(self.order - 1, 0, -1):
            has = lengths >= back
            contexts[has] = self._take(contexts[has], before.values[ends[has] - back])[1]
        return self._take(contexts, following)[0]

    def _take(self, contexts: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probability of a token after each context, and the next contexts."""
        grams, keys, size = self._grams, self._keys, self.num_tokens + 1
        log_probs = torch.zeros(len(tokens), dtype=torch.float64, device="cpu")
        while True:
            place = torch.searchsorted(keys, contexts * size + tokens).clamp(max=len(keys) - 1)
            missing = keys[place] != contexts * size + tokens
            if not bool(missing.any()):
                return log_probs + grams.log_probs[place], grams.next[place]
            log_probs[missing] += grams.backoff[contexts[missing]]
            contexts = torch.where(missing, grams.shorter[contexts], contexts)


def _count(values: IntArray, offsets: IntArray, count: int, order: int) -> Grams:
    """Count and smooth the n-grams of sequences; contexts of length l are numbered after the shorter ones."""
    end, begin, size = count, count + 1, count + 2
    # Before each sequence order - 1 symbols for its begin, and after it one for its end.
    padded = np.full(len(values) + (len(offsets) - 1) * order, begin, dtype=np.int64)
    sequence = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    padded[np.arange(len(values)) + sequence * order + order - 1] = values
    padded[offsets[1:] + np.arange(1, len(offsets)) * order - 1] = end
    predicted = (padded != begin).nonzero()[0]
    symbols = padded[predicted]

    # Codes of the l symbols that end at each position, and from these the n-grams, sorted by context and symbol.
    codes: list[IntArray] = [np.zeros(len(padded), dtype=np.int64)]
    keys: list[IntArray] = []
    examples: list[IntArray] = []  # for each n-gram a place in ``predicted``
    members: list[IntArray] = []  # for each place its n-gram
    for length in range(order):
        if length:
            codes.append(np.unique(np.roll(codes[-1], 1) * size + padded, return_inverse=True)[1])
        key, example, member = np.unique(
            codes[length][predicted - 1] * size + symbols, return_index=True, return_inverse=True
        )
        keys.append(key)
        examples.append(example)
        members.append(member)
    contexts = [np.unique(key // size) for key in keys]
    bases = np.cumsum([0, *map(len, contexts)])

    def numbers(length: int, wanted: IntArray) -> tuple[IntArray, NDArray[np.bool_]]:
        """Return the numbers of contexts, given by their codes, and True for those that exist."""
        place = np.searchsorted(contexts[length], wanted).clip(max=len(contexts[length]) - 1)
        return bases[length] + place, contexts[length][place] == wanted

    firsts, shorter, backoff, tokens, following, log_probs = [], [], [], [], [], []
    lower: Reals = np.full(count + 1, 1 / (count + 1))
    after = np.zeros(0, dtype=np.int64)
    for length, (key, example) in enumerate(zip(keys, examples, strict=True)):
        if length == order - 1:
            counts = np.bincount(members[length])
        else:
            counts = np.bincount(members[length][examples[length + 1]])
        once, twice = int((counts == 1).sum()), int((counts == 2).sum())
        discount = once / (once + 2 * twice) if once else 0.5
        _, owner = np.unique(key // size, return_inverse=True)
        totals, kinds = np.bincount(owner, counts), np.bincount(owner)
        share = discount * kinds / totals
        parts = members[length - 1][example] if length else key
        found = (counts - discount) / totals[owner] + share[owner] * lower[parts]
        here = predicted[example]
        landing = after[parts] if length else np.zeros(len(key), dtype=np.int64)
        if length + 1 < order:
            number, exists = numbers(length + 1, codes[length + 1][here])
            landing = np.where(exists, number, landing)
        lower, after = found, landing
        lengths = np.bincount(owner)
        if length == 0:  # all tokens, those without a count too
            dense, key = key, np.arange(count + 1)
            found = np.full(count + 1, share[0] / (count + 1))
            found[dense], landing = lower, np.zeros(count + 1, dtype=np.int64)
            landing[dense] = after
            lengths = np.array([count + 1])
            shorter.append(np.zeros(1, dtype=np.int64))
        else:
            one = here[np.searchsorted(owner, np.arange(len(contexts[length])))]
            shorter.append(numbers(length - 1, codes[length - 1][one - 1])[0])
        firsts.append(lengths)
        backoff.append(np.log(share))
        tokens.append(key % size)
        following.append(landing)
        log_probs.append(np.log(found))

    def tensor(parts: list[Any]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts))

    start = int(numbers(order - 1, codes[order - 1][order - 2 : order - 1])[0][0]) if order > 1 else 0
    first = torch.from_numpy(np.concatenate([[0], np.cumsum(np.concatenate(firsts))]).astype(np.int64))
    listed = (tensor(part) for part in (shorter, backoff, tokens, following, log_probs))
    return Grams(order, start, first, *listed)
