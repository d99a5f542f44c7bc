"""A sequence VAE: a latent vector per sentence, which every step of the decoder reads."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

import raglane as rl


def sample() -> tuple[Any, ...]:
    texts = [torch.randint(1, 12, (length,)) for length in (5, 2, 7)]
    return texts, torch.randn(3, 2).double()


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 4)
        self.encoder = nn.GRU(4, 5, batch_first=True)
        self.latent = nn.Linear(5, 4)
        self.decoder = nn.GRU(6, 5, batch_first=True)
        self.head = nn.Linear(5, 12)

    def forward(self, texts: list[Tensor], noise: Tensor) -> Any:
        lengths = torch.tensor([len(text) for text in texts])
        padded = pad_sequence(texts, batch_first=True)
        packed = pack_padded_sequence(
            self.embedding(padded), lengths, batch_first=True, enforce_sorted=False
        )
        mean, log_variance = self.latent(self.encoder(packed)[1][-1]).chunk(2, -1)
        z = mean + noise * (log_variance / 2).exp()
        before = self.embedding(F.pad(padded, (1, 0))[:, :-1])
        inputs = torch.cat([before, z[:, None].expand(-1, padded.shape[1], -1)], -1)
        logits = self.head(self.decoder(inputs)[0])
        mask = torch.arange(padded.shape[1]) < lengths[:, None]
        written = F.cross_entropy(logits[mask], padded[mask], reduction="sum") / len(texts)
        divergence = (mean**2 + log_variance.exp() - log_variance - 1).sum(-1).mean() / 2
        return written + divergence, divergence


class Ragged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 4)
        self.encoder = rl.nn.GRU(4, 5)
        self.latent = nn.Linear(5, 4)
        self.decoder = rl.nn.GRU(6, 5)
        self.head = nn.Linear(5, 12)

    def forward(self, texts: list[Tensor], noise: Tensor) -> Any:
        text = rl.Ragged(texts)
        out, _ = self.encoder(self.embedding(text))
        mean, log_variance = self.latent(out.last()).chunk(2, -1)
        z = mean + noise * (log_variance / 2).exp()
        before = self.embedding(text.shift(1, fill_value=0))
        logits = self.head(self.decoder(torch.cat([before, before.broadcast(z)], -1))[0])
        written = F.cross_entropy(logits, text, reduction="sum") / len(text)
        divergence = (mean**2 + log_variance.exp() - log_variance - 1).sum(-1).mean() / 2
        return written + divergence, divergence
