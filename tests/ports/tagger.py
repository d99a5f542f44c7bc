"""A tagger: a bidirectional LSTM over words, a tag per word, and its accuracy."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

import raglane as rl


def sample() -> tuple[Any, ...]:
    lengths = (5, 1, 7, 3)
    words = [torch.randint(0, 20, (length,)) for length in lengths]
    return words, [torch.randint(0, 4, (length,)) for length in lengths]


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.lstm = nn.LSTM(6, 5, batch_first=True, bidirectional=True)
        self.head = nn.Linear(10, 4)

    def forward(self, words: list[Tensor], tags: list[Tensor]) -> Any:
        lengths = torch.tensor([len(sentence) for sentence in words])
        embedded = self.embedding(pad_sequence(words, batch_first=True))
        packed = pack_padded_sequence(embedded, lengths, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        target = pad_sequence(tags, batch_first=True, padding_value=-100)
        logits = self.head(out)
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100)
        right = (logits.argmax(-1) == target)[target != -100]
        return loss, right.double().mean()


class Ragged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.lstm = rl.nn.LSTM(6, 5, bidirectional=True)
        self.head = nn.Linear(10, 4)

    def forward(self, words: list[Tensor], tags: list[Tensor]) -> Any:
        target = rl.Ragged(tags)
        out, _ = self.lstm(self.embedding(rl.Ragged(words)))
        logits = self.head(out)
        right = logits.argmax(-1) == target
        return F.cross_entropy(logits, target), right.double().mean()
