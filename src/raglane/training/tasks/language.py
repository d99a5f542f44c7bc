"""The next token of a text."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from raglane.data.dataset import Dataset
from raglane.data.encoders import END
from raglane.data.preprocess import Preprocessor
from raglane.data.splitting import characters_in
from raglane.ragged import Ragged
from raglane.training.batches import Batch
from raglane.training.tasks.base import Measured, Score, Task, targets_of, values_of


class Language(Task):
    """Cross-entropy of the next token, the end of the text among them."""

    metric = "bits_per_token"
    options: ClassVar[tuple[str, ...]] = ("horizon",)

    @staticmethod
    def output_size(preprocessor: Preprocessor) -> int:
        """The number of tokens."""
        return len(preprocessor.vocabulary or ())

    def score(self, output: Tensor | Ragged, batch: Batch, *, training: bool = False) -> Score:  # noqa: ARG002
        """Compare logits ``(N, V)`` with the tokens that came."""
        targets = targets_of(batch)
        loss = F.cross_entropy(values_of(output), targets, reduction="sum")
        return Score(loss, loss.detach() / math.log(2), torch.as_tensor(targets.shape[0]), torch.zeros(()))

    def meter(self, model: Any, records: Dataset) -> _Bits:  # noqa: ARG002
        """Perplexity, and bits per character."""
        return _Bits(self, records)

    def answer(self, model: Any, inputs: Ragged, horizon: int) -> Tensor:
        """``(B, 1 + horizon)`` float64: the bits of each whole text, and the likeliest tokens after it."""
        logits = values_of(model(inputs)).double()
        told = logits.log_softmax(-1)
        # What comes after the end that stands before a text; after its last token, the end again.
        coming = torch.cat([inputs.values[1:], inputs.values.new_ones(1)])[: len(inputs.values)]
        coming[inputs.offsets[1:] - 1] = 1
        nats = -told.gather(1, coming.unsqueeze(1))
        bits = inputs.map(lambda _: nats).sum() / math.log(2)
        following = model.generate(inputs, horizon, lambda scores: scores.argmax(-1))
        return torch.cat([bits, following.double()], dim=1)

    def columns(self, output: Tensor, model: Any, *, probabilities: bool) -> dict[str, list[Any]]:  # noqa: ARG002
        """For each text the likeliest tokens after it, up to the end, and the bits that it takes to tell it."""
        words = self.preprocessor.vocabulary or ()
        rows = [[words[int(place)] for place in row] for row in output[:, 1:].tolist()]
        cut = [row[: row.index(END)] if END in row else row for row in rows]
        return {"prediction": cut, "bits": output[:, 0].tolist()}


class _Bits:
    """The bits of all tokens, beside those of telling each by its frequency in this very data."""

    def __init__(self, task: Language, records: Dataset) -> None:
        self.task, self.records = task, records
        self.counts: Counter[int] = Counter()
        self.nats = 0.0

    def add(self, output: Tensor, batch: Batch) -> None:
        self.nats += float(self.task.score(output, batch).loss.double())
        self.counts.update(targets_of(batch).tolist())

    def measured(self) -> Measured:
        """Per token, and per character where it is known how many there are."""
        total = self.counts.total()
        if total == 0:
            return Measured({"perplexity": math.nan})
        unigram = -sum(count * math.log(count / total) for count in self.counts.values())
        numbers = {"perplexity": _exp(self.nats / total), "unigram_perplexity": _exp(unigram / total)}
        split = self.task.preprocessor.split
        # Texts that are not in memory are not read again for it.
        characters = None
        if self.records.is_in_memory:
            characters = characters_in(self.records.values.tolist(), len(self.records), split)
        if characters:
            numbers |= {"bits_per_character": self.nats / math.log(2) / characters}
        if self.counts[0]:
            # A token that the vocabulary lacks is easily told: its number, not itself.
            numbers["unknown"] = self.counts[0] / total
        return Measured(numbers)


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf
