"""Attention pooling of a bidirectional GRU, with the weights that it gives to words."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

import raglane as rl


def sample() -> tuple[Any, ...]:
    texts = [torch.randint(0, 20, (length,)) for length in (6, 2, 9, 1)]
    return texts, torch.randint(0, 2, (4,))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 5)
        self.gru = nn.GRU(5, 4, batch_first=True, bidirectional=True)
        self.hidden = nn.Linear(8, 7)
        self.score = nn.Linear(7, 1)
        self.head = nn.Linear(16, 1)

    def forward(self, texts: list[Tensor], labels: Tensor) -> Any:
        lengths = torch.tensor([len(text) for text in texts])
        embedded = self.embedding(pad_sequence(texts, batch_first=True))
        packed = pack_padded_sequence(embedded, lengths, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True)
        mask = torch.arange(out.shape[1]) < lengths[:, None]
        scores = self.score(torch.tanh(self.hidden(out))).squeeze(-1)
        weights = scores.masked_fill(~mask, -torch.inf).softmax(1)
        pooled = (weights[..., None] * out).sum(1)
        largest = out.masked_fill(~mask[..., None], -torch.inf).amax(1)
        logits = self.head(torch.cat([pooled, largest], -1)).squeeze(-1)
        loss = F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))
        return loss, weights.argmax(1).tolist()


class Ragged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 5)
        self.gru = rl.nn.GRU(5, 4, bidirectional=True)
        self.hidden = nn.Linear(8, 7)
        self.score = nn.Linear(7, 1)
        self.head = nn.Linear(16, 1)

    def forward(self, texts: list[Tensor], labels: Tensor) -> Any:
        out, _ = self.gru(self.embedding(rl.Ragged(texts)))
        weights = self.score(torch.tanh(self.hidden(out))).softmax(1)
        pooled = (weights * out).sum(1)
        logits = self.head(torch.cat([pooled, out.amax(1)], -1)).squeeze(-1)
        loss = F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))
        return loss, weights.squeeze(-1).argmax(1).tolist()
