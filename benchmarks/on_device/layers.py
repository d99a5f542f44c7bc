"""The layers of the parts by name: those of torch, and those that run as loops of torch's
operations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import raglane as rl

__all__ = ["LAYERS", "LINEAR", "LOOPS", "OwnGRU", "build", "state_of"]


class OwnGRU(nn.Module):
    """A user-defined GRU for :class:`rl.nn.Recurrent`."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        self.of_input = nn.Linear(input_size, 3 * hidden_size)
        self.of_state = nn.Linear(hidden_size, 3 * hidden_size)

    def step(self, x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        x_r, x_z, x_n = self.of_input(x_t).chunk(3, 1)
        h_r, h_z, h_n = self.of_state(state).chunk(3, 1)
        z = torch.sigmoid(x_z + h_z)
        n = torch.tanh(x_n + torch.sigmoid(x_r + h_r) * h_n)
        state = (1 - z) * n + z * state
        return state, state


LOOPS: dict[str, Callable[..., Any]] = {
    "IndRNN": rl.nn.IndRNN,
    "SRU": rl.nn.SRU,
    "QRNN": rl.nn.QRNN,
    "MinGRU": rl.nn.MinGRU,
    "MinLSTM": rl.nn.MinLSTM,
    "LayerNormLSTM": rl.nn.LayerNormLSTM,
    "LayerNormGRU": rl.nn.LayerNormGRU,
    "PeepholeLSTM": rl.nn.PeepholeLSTM,
    "CoupledLSTM": rl.nn.CoupledLSTM,
    "GRU, reset before": partial(rl.nn.GRU, reset_after=False),
    "LSTM, zoneout": partial(rl.nn.LSTM, zoneout=0.1),
    "own GRU": partial(rl.nn.Recurrent, OwnGRU),
}
"""Layers without a kernel of torch on a GPU: they run as loops of its operations."""

LINEAR = ("MinGRU", "MinLSTM", "QRNN", "IndRNN", "SRU")
"""Layers of which a pass or both run long sequences in chunks."""

LAYERS: dict[str, Callable[..., Any]] = {
    "LSTM": rl.nn.LSTM,
    "GRU": rl.nn.GRU,
    "RNN": rl.nn.RNN,
    "LSTM, projection": lambda d, h, **options: rl.nn.LSTM(d, h, proj_size=h // 2, **options),
    **LOOPS,
}
"""All layers: functions from the sizes of input and state, and options, to a layer."""


def build(
    name: str, sizes: tuple[int, int], device: torch.device, dtype: torch.dtype, **options: Any
) -> Any:
    """Return a layer of ``LAYERS`` on a device."""
    return LAYERS[name](*sizes, **options).to(device=device, dtype=dtype)


def state_of(state: Any) -> list[Tensor]:
    """Return the parts of a layer's state."""
    return list(state) if isinstance(state, tuple) else [state]
