"""A hierarchical attention network: words to sentences, sentences to documents."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

import raglane as rl


def sample() -> tuple[Any, ...]:
    lengths = ((4, 2, 5), (3,), (1, 6))
    documents = [[torch.randint(0, 15, (length,)) for length in item] for item in lengths]
    return documents, torch.randint(0, 3, (3,))


class PlainPooling(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(size, size)
        self.query = nn.Linear(size, 1, bias=False)

    def forward(self, padded: Tensor, lengths: Tensor) -> Tensor:
        mask = torch.arange(padded.shape[1]) < lengths[:, None]
        scores = self.query(torch.tanh(self.hidden(padded))).squeeze(-1)
        weights = scores.masked_fill(~mask, -torch.inf).softmax(1)
        return (weights[..., None] * padded).sum(1)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(15, 4)
        self.words = nn.GRU(4, 3, batch_first=True, bidirectional=True)
        self.of_words = PlainPooling(6)
        self.sentences = nn.GRU(6, 3, batch_first=True, bidirectional=True)
        self.of_sentences = PlainPooling(6)
        self.head = nn.Linear(6, 3)

    def forward(self, documents: list[list[Tensor]], labels: Tensor) -> Any:
        sentences = [sentence for document in documents for sentence in document]
        lengths = torch.tensor([len(sentence) for sentence in sentences])
        embedded = self.embedding(pad_sequence(sentences, batch_first=True))
        packed = pack_padded_sequence(embedded, lengths, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.words(packed)[0], batch_first=True)
        vectors = self.of_words(out, lengths)
        counts = torch.tensor([len(document) for document in documents])
        padded = pad_sequence(vectors.split(counts.tolist()), batch_first=True)
        packed = pack_padded_sequence(padded, counts, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.sentences(packed)[0], batch_first=True)
        logits = self.head(self.of_sentences(out, counts))
        return F.cross_entropy(logits, labels), logits.argmax(-1).tolist()


class Ragged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(15, 4)
        self.words = rl.nn.GRU(4, 3, bidirectional=True)
        self.of_words = rl.nn.AttentionPooling(6, bias=True)
        self.sentences = rl.nn.GRU(6, 3, bidirectional=True)
        self.of_sentences = rl.nn.AttentionPooling(6, bias=True)
        self.head = nn.Linear(6, 3)

    def forward(self, documents: list[list[Tensor]], labels: Tensor) -> Any:
        docs = rl.collate(documents)
        out, _ = self.words(self.embedding(docs.inner))
        out, _ = self.sentences(docs.regroup(self.of_words(out)))
        logits = self.head(self.of_sentences(out))
        return F.cross_entropy(logits, labels), logits.argmax(-1).tolist()
