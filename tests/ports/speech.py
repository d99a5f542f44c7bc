"""Convolutions with CTC: half the frames, a GRU, and the likeliest path."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

import raglane as rl


def sample() -> tuple[Any, ...]:
    sounds = [torch.randn(length, 3).double() for length in (17, 9, 24, 8)]
    return sounds, [torch.randint(1, 5, (length,)) for length in (3, 2, 5, 0)]


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 6, 5, stride=2, padding=2)
        self.gru = nn.GRU(6, 5, batch_first=True, bidirectional=True)
        self.head = nn.Linear(10, 5)

    def forward(self, sounds: list[Tensor], texts: list[Tensor]) -> Any:
        lengths = torch.tensor([len(sound) for sound in sounds])
        frames = self.conv(pad_sequence(sounds, batch_first=True).transpose(1, 2)).relu()
        counts = (lengths - 1) // 2 + 1
        packed = pack_padded_sequence(
            frames.transpose(1, 2), counts, batch_first=True, enforce_sorted=False
        )
        out, _ = pad_packed_sequence(self.gru(packed)[0])
        log_probs = self.head(out).log_softmax(-1)
        labels = torch.tensor([len(text) for text in texts])
        loss = F.ctc_loss(log_probs, torch.cat(texts), counts, labels)
        found = []
        for path, count in zip(log_probs.argmax(-1).T, counts, strict=True):
            runs = torch.unique_consecutive(path[:count])
            found.append(runs[runs != 0].tolist())
        return loss, found


class Ragged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = rl.nn.Conv1d(3, 6, 5, stride=2, padding=2)
        self.gru = rl.nn.GRU(6, 5, bidirectional=True)
        self.head = nn.Linear(10, 5)

    def forward(self, sounds: list[Tensor], texts: list[Tensor]) -> Any:
        out, _ = self.gru(self.conv(rl.Ragged(sounds)).relu())
        log_probs = self.head(out).log_softmax(-1)
        loss = rl.transduction.ctc_loss(log_probs, rl.Ragged(texts))
        return loss, rl.transduction.ctc_greedy_search(log_probs).best().tolist()
