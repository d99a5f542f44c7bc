"""Language models."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from raglane.data.dataset import Dataset
from raglane.data.prepare.encoders import END
from raglane.data.prepare.preprocess import Preprocessor
from raglane.data.splitting import characters_in
from raglane.ragged import Ragged
from raglane.training.batches import Batch, targets_of
from raglane.training.tasks.base import Measured, Score, Task, values_of


class Language(Task):
    """The next token: cross-entropy and bits per token. The end of a text is a token."""

    options: ClassVar[tuple[str, ...]] = ("horizon",)

    @staticmethod
    def output_size(preprocessor: Preprocessor) -> int:
        """Return the number of tokens."""
        return len(preprocessor.vocabulary or ())

    def score(self, output: Tensor | Ragged, batch: Batch, *, training: bool = False) -> Score:  # noqa: ARG002
        """Return the cross-entropy of logits ``(N, V)`` for the next tokens."""
        targets = targets_of(batch)
        loss = F.cross_entropy(values_of(output), targets, reduction="sum")
        return Score(
            loss, loss.detach() / math.log(2), torch.as_tensor(targets.shape[0]), torch.zeros(())
        )

    def meter(self, model: Any, records: Dataset) -> _Bits:  # noqa: ARG002
        """Return a meter of perplexity and bits per character."""
        return _Bits(self, records)

    def answer(self, model: Any, inputs: Ragged, horizon: int) -> Tensor:
        """Return ``(B, 1 + horizon)`` float64: the bits of each text, and the likeliest next
        tokens.
        """
        logits = values_of(model(inputs)).double()
        # An input begins with the end token, and the target of its last token is the end token.
        targets = torch.cat([inputs.values[1:], inputs.values.new_ones(1)])[: len(inputs.values)]
        targets[inputs.offsets[1:] - 1] = 1
        nats = -logits.log_softmax(-1).gather(1, targets.unsqueeze(1))
        bits = inputs.map(lambda _: nats).sum(1) / math.log(2)
        return torch.cat(
            [bits, model.generate(inputs, horizon, lambda scores: scores.argmax(-1)).double()],
            dim=1,
        )

    def columns(self, output: Tensor, model: Any, *, probabilities: bool) -> dict[str, list[Any]]:  # noqa: ARG002
        """Return the likeliest next tokens of each text, up to the end, and the bits of the
        text.
        """
        words = self.preprocessor.vocabulary or ()
        rows = [[words[int(token)] for token in row] for row in output[:, 1:].tolist()]
        cut = [row[: row.index(END)] if END in row else row for row in rows]
        return {"prediction": cut, "bits": output[:, 0].tolist()}


class _Bits:
    """Accumulates the cross-entropy; the baseline are the token frequencies of the same data."""

    def __init__(self, task: Language, records: Dataset) -> None:
        self.task = task
        self.records = records
        self.counts: Counter[int] = Counter()
        self.nats = 0.0

    def add(self, output: Tensor, batch: Batch) -> None:
        self.nats += float(self.task.score(output, batch).loss.double())
        self.counts.update(targets_of(batch).tolist())

    def measured(self) -> Measured:
        """Return perplexities and, for data in memory, bits per character."""
        total = self.counts.total()
        if total == 0:
            return Measured({"perplexity": math.nan})
        unigram = -sum(count * math.log(count / total) for count in self.counts.values())
        numbers = {
            "perplexity": _exp(self.nats / total),
            "unigram_perplexity": _exp(unigram / total),
        }
        split = self.task.preprocessor.split
        # Texts on disk are not read again for it.
        characters = None
        if self.records.is_in_memory:
            characters = characters_in(self.records.values.tolist(), len(self.records), split)
        if characters:
            numbers |= {"bits_per_character": self.nats / math.log(2) / characters}
        if self.counts[0]:
            # The share of unknown tokens, which are easy to predict.
            numbers["unknown"] = self.counts[0] / total
        return Measured(numbers)


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf
