"""Names by characters: the last state of a GRU decides the language."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

import raglane as rl


def sample() -> tuple[Any, ...]:
    names = [torch.randint(0, 27, (length,)) for length in (6, 2, 9, 1, 4)]
    return names, torch.randint(0, 3, (5,))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(27, 4)
        self.gru = nn.GRU(4, 6, num_layers=2, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, names: list[Tensor], languages: Tensor) -> Any:
        lengths = torch.tensor([len(name) for name in names])
        embedded = self.embedding(pad_sequence(names, batch_first=True))
        packed = pack_padded_sequence(embedded, lengths, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True)
        logits = self.head(out[torch.arange(len(names)), lengths - 1])
        loss = F.cross_entropy(logits, languages)
        return loss, logits.argmax(-1).tolist()


class Ragged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(27, 4)
        self.gru = rl.nn.GRU(4, 6, num_layers=2)
        self.head = nn.Linear(6, 3)

    def forward(self, names: list[Tensor], languages: Tensor) -> Any:
        out, _ = self.gru(self.embedding(rl.Ragged(names)))
        logits = self.head(out[:, -1])
        return F.cross_entropy(logits, languages), logits.argmax(-1).tolist()
