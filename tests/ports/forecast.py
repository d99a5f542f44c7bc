"""DeepAR: a normal distribution of the next number, given the scaled numbers before it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import raglane as rl


def sample() -> tuple[Any, ...]:
    lengths = (8, 3, 12, 5)
    series = [torch.rand(length).double() * 10 for length in lengths]
    return series, [torch.randn(length, 2).double() for length in lengths]


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 5, batch_first=True)
        self.mean = nn.Linear(5, 1)
        self.deviation = nn.Linear(5, 1)

    def forward(self, series: list[Tensor], known: list[Tensor]) -> Any:
        lengths = torch.tensor([len(numbers) for numbers in series])
        z = pad_sequence(series, batch_first=True)
        mask = torch.arange(z.shape[1]) < lengths[:, None]
        scale = 1 + z.abs().sum(1, keepdim=True) / lengths[:, None]
        before = F.pad(z / scale, (1, 0))[:, :-1]
        covariates = pad_sequence(known, batch_first=True)
        out, _ = self.lstm(torch.cat([before[..., None], covariates], -1))
        mean = self.mean(out).squeeze(-1) * scale
        deviation = F.softplus(self.deviation(out)).squeeze(-1) * scale
        loss = F.gaussian_nll_loss(mean[mask], z[mask], deviation[mask] ** 2)
        return loss, (mean - z)[mask].abs().mean()


class Ragged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = rl.nn.LSTM(3, 5)
        self.mean = nn.Linear(5, 1)
        self.deviation = nn.Linear(5, 1)

    def forward(self, series: list[Tensor], known: list[Tensor]) -> Any:
        z = rl.Ragged(series)
        scale = 1 + z.abs().mean(1, keepdim=True)
        before = (z / scale).shift(1)
        out, _ = self.lstm(torch.cat([before[..., None], rl.Ragged(known)], -1))
        mean = self.mean(out).squeeze(-1) * scale
        deviation = F.softplus(self.deviation(out)).squeeze(-1) * scale
        return F.gaussian_nll_loss(mean, z, deviation**2), (mean - z).abs().mean()
