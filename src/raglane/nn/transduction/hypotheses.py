"""The result of a beam search."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from raglane import segments
from raglane.ragged import Ragged


@dataclass(frozen=True, eq=False)
class Hypotheses:
    """The best token sequences of each item of a batch, as a beam search returns them.

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

    Example:
        >>> import torch
        >>> best = Hypotheses(Ragged([[1, 2], [1], [3]]), torch.tensor([-0.5, -2.0, -0.1]), torch.tensor([0, 2, 3]))
        >>> best.best().to_list()
        [tensor([1, 2]), tensor([3])]
    """

    tokens: Ragged
    scores: Tensor
    offsets: Tensor
    times: Ragged | None = None
    confidences: Ragged | None = None

    def __len__(self) -> int:
        """Return B, the number of items."""
        return self.offsets.shape[0] - 1

    def best(self) -> Ragged:
        """Return the best tokens of each item; an item without hypotheses has an empty sequence."""
        counts = self.offsets.diff()
        best = self.tokens.select(self.offsets[:-1][counts > 0])
        lengths = counts.new_zeros(len(self)).masked_scatter(counts > 0, best.lengths)
        return Ragged.from_flat(best.values, offsets=segments.offsets_from_lengths(lengths))
