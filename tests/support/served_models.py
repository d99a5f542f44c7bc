"""Models for streams, and their sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import raglane as rl
from raglane.serve import Engine


class Leaky(nn.Module):
    """A user's cell of two states, one of which a step does not change."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        self.linear, self.recurrent = (
            nn.Linear(input_size, hidden_size),
            nn.Linear(hidden_size, hidden_size),
        )

    def initial_state(self, count: int) -> tuple[Tensor, Tensor]:
        like = self.linear.weight
        return like.new_full((count, self.hidden_size), 0.5), like.new_full((count, 2), 0.25)

    def step(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h, kept = state
        h = 0.9 * h + torch.tanh(self.linear(x) + self.recurrent(h)) * kept[:, :1]
        return h.sin(), (h, kept)


class Skips(nn.Module):
    """Two layers that read normalised elements and each other's outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.enter = nn.LayerNorm(6), nn.Linear(6, 5)
        self.one, self.two = rl.nn.GRU(5, 4), rl.nn.LSTM(10, 3, num_layers=2)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(7, 2)

    def forward(self, batch: rl.Ragged) -> rl.Ragged:
        one, _ = self.one(batch.map(self.norm).map(self.enter).map(F.gelu))
        two, _ = self.two(batch.with_values(torch.cat([one.values, batch.values], 1)))
        return batch.with_values(self.head(self.drop(torch.cat([two.values, one.values], 1))))


class Voice(nn.Module):
    """Convolutions inside a frame, then over frames, then a layer; as a voice activity detector has
    them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(
            nn.Conv1d(2, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU(), nn.Conv1d(4, 3, 2, 2)
        )
        self.over = rl.nn.CausalConv1d(3, 5, 3, dilation=2)
        self.layer, self.head = rl.nn.LSTM(5, 4), nn.Linear(4, 1)

    def forward(self, batch: rl.Ragged) -> rl.Ragged:
        frames = batch.map(lambda values: self.inside(values.unflatten(1, (2, 3)))[:, :, 0])
        over, _ = self.over(frames)
        out, _ = self.layer(over.map(torch.relu))
        return out.map(lambda values: torch.sigmoid(self.head(values)))


LAYERS: dict[str, Callable[..., nn.Module]] = {
    name: getattr(rl.nn, name)
    for name in (
        *(
            "LSTM",
            "GRU",
            "RNN",
            "PeepholeLSTM",
            "CoupledLSTM",
            "LayerNormLSTM",
            "LayerNormGRU",
            "SLSTM",
            "GRUD",
        ),
        *("CfC", "IndRNN", "SRU", "QRNN", "MinGRU", "MinLSTM"),
    )
}

MODELS: dict[str, Callable[[], Any]] = {
    **{name: lambda made=made: made(6, 4, num_layers=2) for name, made in LAYERS.items()},  # type: ignore[misc]
    "projected": lambda: rl.nn.LSTM(6, 5, proj_size=3),
    "learned": lambda: rl.nn.GRU(6, 4, initial_state="learned"),
    "zoneout": lambda: rl.nn.LSTM(6, 4, zoneout=0.1),
    "own cell": lambda: rl.nn.Recurrent(Leaky, 6, 4, num_layers=2),
    "skips": Skips,
    "voice": Voice,
    "several": lambda: [
        nn.Linear(6, 4),
        nn.ReLU(),
        rl.nn.LSTM(4, 3),
        nn.LayerNorm(3),
        rl.nn.SRU(3, 3),
    ],
    **{
        f"pooling {name}": lambda name=name: rl.nn.SequenceEncoder(6, 4, pooling=name)  # type: ignore[misc]
        for name in ("final", "last", "first", "mean", "max", "logsumexp", "attention")
    },
}


def made(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return a model in evaluation mode, with parameters and statistics that are not those of a new
    one.
    """
    torch.manual_seed(0)
    model = MODELS[name]()
    whole = nn.ModuleList(model) if isinstance(model, list) else model
    for part in (*whole.parameters(), *whole.buffers()):
        if part.is_floating_point():
            part.data = part.data + 0.1 * torch.rand_like(part)
    whole.eval().to(dtype)
    return model


def engine_of(**options: Any) -> Engine:
    """Return a small engine of an LSTM, or of another model."""
    torch.manual_seed(0)
    return Engine(**{"model": rl.nn.LSTM(3, 4).eval(), "max_streams": 2, "max_queue": 4, **options})
