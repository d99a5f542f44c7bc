"""A char-RNN: next characters, in chunks of 4 steps between which gradients end."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import raglane as rl


def sample() -> tuple[Any, ...]:
    return ([torch.randint(0, 15, (length,)) for length in (11, 3, 6, 2)],)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(15, 4)
        self.lstm = nn.LSTM(4, 6, batch_first=True)
        self.head = nn.Linear(6, 15)

    def forward(self, texts: list[Tensor]) -> Any:
        inputs = pad_sequence([text[:-1] for text in texts], batch_first=True)
        shifted = [text[1:] for text in texts]
        targets = pad_sequence(shifted, batch_first=True, padding_value=-100)
        state: Any = None
        losses = []
        for start in range(0, inputs.shape[1], 4):
            chunk = inputs[:, start : start + 4]
            out, state = self.lstm(self.embedding(chunk), state)
            state = tuple(part.detach() for part in state)
            logits = self.head(out).flatten(0, 1)
            wanted = targets[:, start : start + 4].flatten()
            losses.append(F.cross_entropy(logits, wanted, ignore_index=-100))
        return sum(losses), None


class Ragged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(15, 4)
        self.lstm = rl.nn.LSTM(4, 6)
        self.head = nn.Linear(6, 15)

    def forward(self, texts: list[Tensor]) -> Any:
        text = rl.Ragged(texts)
        state: Any = None
        losses = []
        for chunk, wanted in zip(text[:, :-1].split(4, 1), text[:, 1:].split(4, 1), strict=True):
            out, state = self.lstm(self.embedding(chunk), state)
            state = tuple(part.detach() for part in state)
            losses.append(F.cross_entropy(self.head(out), wanted))
        return sum(losses), None
