"""A siamese LSTM: the distance of the last states of two sentences."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

import raglane as rl


def sample() -> tuple[Any, ...]:
    pairs = [
        [torch.randn(length, 3).double() for length in side] for side in ((4, 2, 7), (1, 6, 3))
    ]
    return *pairs, torch.rand(3).double()


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 5, batch_first=True)

    def encode(self, sentences: list[Tensor]) -> Tensor:
        lengths = torch.tensor([len(sentence) for sentence in sentences])
        padded = pad_sequence(sentences, batch_first=True)
        packed = pack_padded_sequence(padded, lengths, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return out[torch.arange(len(sentences)), lengths - 1]

    def forward(self, first: list[Tensor], second: list[Tensor], likeness: Tensor) -> Any:
        distance = (self.encode(first) - self.encode(second)).abs().sum(-1)
        return F.mse_loss(torch.exp(-distance), likeness), distance


class Ragged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = rl.nn.LSTM(3, 5)

    def encode(self, sentences: list[Tensor]) -> Tensor:
        out, _ = self.lstm(rl.Ragged(sentences))
        return out.last()

    def forward(self, first: list[Tensor], second: list[Tensor], likeness: Tensor) -> Any:
        distance = (self.encode(first) - self.encode(second)).abs().sum(-1)
        return F.mse_loss(torch.exp(-distance), likeness), distance
