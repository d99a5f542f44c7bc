"""The result of a search."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import Tensor

from raglane import segments
from raglane._utils.messages import count_of, message, quote
from raglane.ragged import Ragged

# The items that are printed, and their tokens.
_SHOWN = 4
_TOKENS = 12


@dataclass(frozen=True, eq=False, repr=False)
class Hypotheses:
    """The best token sequences of each item of a batch, as searches return them.

    The M hypotheses of all B items are stored item after item, those of an item from the best to
    the worst. An item may have fewer than the requested number, and none if no sequence has a
    probability above 0.

    Attributes:
        tokens: M sequences of tokens, int64, without blanks and end tokens.
        scores: ``(M,)``, the score of each hypothesis, e.g. its log-probability. Higher is better.
        offsets: ``(B + 1,)`` int64, the first hypothesis of each item.
        times: of searches in time, values ``(N, 2)`` int64: the first step of each token and the
            step after its last.
        confidences: of searches in time, values ``(N,)``: the probability of each token, given the
            tokens before it; of CTC, the mean of its probability over its steps.
        state: of searches that read streams: what the next call continues from.

    Example:
        >>> import torch
        >>> best = Hypotheses(Ragged([[1, 2], [1], [3]]), torch.tensor([-0.5, -2.0, -0.1]), torch.tensor([0, 2, 3]))
        >>> best.best().tolist()
        [[1, 2], [3]]
        >>> [(tokens.tolist(), score.item()) for tokens, score in best[0]]
        [([1, 2], -0.5), ([1], -2.0)]
    """

    tokens: Ragged
    scores: Tensor
    offsets: Tensor
    times: Ragged | None = None
    confidences: Ragged | None = None
    state: Any = None

    def __repr__(self) -> str:
        counts = f"{len(self.scores):,} of {count_of(len(self), 'item')}"
        shown = [f"  {index}: {_shown(item)}" for index, item in enumerate(islice(self, _SHOWN))]
        more = [f"  ... {len(self) - _SHOWN:,} more"] * (len(self) > _SHOWN)
        return "\n".join([f"Hypotheses: {counts}, the best of each:", *shown, *more])

    def __len__(self) -> int:
        """Return B, the number of items."""
        return self.offsets.shape[0] - 1

    def __getitem__(self, item: int) -> list[tuple[Tensor, Tensor]]:
        """Return the tokens and the score of each hypothesis of an item, the best first.

        Raises:
            IndexError: the item does not exist.
        """
        count = len(self)
        place = operator.index(item)
        if not -count <= place < count:
            rule = f"from {-count} to {count - 1}, for {count} items"
            raise IndexError(message("index", quote(item), rule, "use an index below len(h)"))
        first, end = self.offsets[place % count : place % count + 2].tolist()
        return [(self.tokens[number], self.scores[number]) for number in range(first, end)]

    def __iter__(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Yield the hypotheses of each item."""
        return (self[item] for item in range(len(self)))

    def best(self) -> Ragged:
        """Return the best tokens of each item; an item without hypotheses has an empty sequence."""
        counts = self.offsets.diff()
        best = self.tokens.select(self.offsets[:-1][counts > 0])
        lengths = counts.new_zeros(len(self)).masked_scatter(counts > 0, best.lengths)
        return Ragged.from_flat(best.values, offsets=segments.offsets_from_lengths(lengths))


def _shown(item: list[tuple[Tensor, Tensor]]) -> str:
    """Return the best tokens of an item and their score on a short line."""
    if not item:
        return "none"
    tokens, score = item[0]
    more = ", ..." if len(tokens) > _TOKENS else ""
    return f"[{', '.join(map(str, tokens[:_TOKENS].tolist()))}{more}], score {float(score):.4g}"
