"""A BiLSTM-CRF: the likelihood of the tags, and the best tags."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

import raglane as rl


def sample() -> tuple[Any, ...]:
    lengths = (4, 1, 6, 2)
    words = [torch.randint(0, 20, (length,)) for length in lengths]
    return words, [torch.randint(0, 3, (length,)) for length in lengths]


class PlainCRF(nn.Module):
    def __init__(self, tags: int) -> None:
        super().__init__()
        self.start_transitions = nn.Parameter(torch.empty(tags))
        self.end_transitions = nn.Parameter(torch.empty(tags))
        self.transitions = nn.Parameter(torch.empty(tags, tags))

    def log_likelihood(self, emissions: Tensor, tags: Tensor) -> Tensor:
        score = self.start_transitions[tags[0]] + emissions[0, tags[0]]
        paths = self.start_transitions + emissions[0]
        for step in range(1, len(tags)):
            score = score + self.transitions[tags[step - 1], tags[step]]
            score = score + emissions[step, tags[step]]
            paths = torch.logsumexp(paths[:, None] + self.transitions, 0) + emissions[step]
        score = score + self.end_transitions[tags[-1]]
        return score - torch.logsumexp(paths + self.end_transitions, 0)

    def decode(self, emissions: Tensor) -> list[int]:
        paths = self.start_transitions + emissions[0]
        moves = []
        for row in emissions[1:]:
            paths, move = (paths[:, None] + self.transitions + row).max(0)
            moves.append(move)
        best = [int((paths + self.end_transitions).argmax())]
        for move in reversed(moves):
            best.append(int(move[best[-1]]))
        return best[::-1]


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.lstm = nn.LSTM(6, 5, batch_first=True, bidirectional=True)
        self.head = nn.Linear(10, 3)
        self.crf = PlainCRF(3)

    def forward(self, words: list[Tensor], tags: list[Tensor]) -> Any:
        lengths = torch.tensor([len(sentence) for sentence in words])
        embedded = self.embedding(pad_sequence(words, batch_first=True))
        packed = pack_padded_sequence(embedded, lengths, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        emissions = [row[:length] for row, length in zip(self.head(out), lengths, strict=True)]
        pairs = zip(emissions, tags, strict=True)
        likelihood = torch.stack([self.crf.log_likelihood(*pair) for pair in pairs])
        return -likelihood.mean(), [self.crf.decode(rows) for rows in emissions]


class Ragged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.lstm = rl.nn.LSTM(6, 5, bidirectional=True)
        self.head = nn.Linear(10, 3)
        self.crf = rl.nn.CRF(3)

    def forward(self, words: list[Tensor], tags: list[Tensor]) -> Any:
        out, _ = self.lstm(self.embedding(rl.Ragged(words)))
        emissions = self.head(out)
        loss = self.crf.loss(emissions, rl.Ragged(tags))
        return loss, self.crf.decode(emissions).tolist()
