"""Cells in plain torch: as a loop over the steps of a pack, and as a user's own module under each
schedule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from harness.batch import Batch
from harness.competitors import ours, pytorch
from harness.competitors.base import Runner
from raglane.nn.recurrent.any_cell import Recurrent

__all__ = ["steps", "under"]


def steps(hoists: bool) -> Callable[[Batch, str, int], Runner]:
    """Prepare a loop over the steps of a pack, without Raglane."""

    def prepare(batch: Batch, mode: str, threads: int) -> Runner:  # noqa: ARG001
        return pytorch.packed_runner(batch, mode, _PackedLoop(ours.load_layer(batch), hoists))

    return prepare


class _PackedLoop(nn.Module):
    """A layer of one cell that takes a PackedSequence, as a loop in plain torch."""

    def __init__(self, layer: Any, hoists: bool) -> None:
        super().__init__()
        self._layer = [layer]  # in a list, so that its parameters keep their names
        self._hoists = hoists
        for name, parameter in layer.named_parameters():
            self.register_parameter(name, parameter)

    def forward(self, packed: PackedSequence) -> tuple[PackedSequence, Any]:
        """Return outputs as a pack, and the final states, ``(1, B, H)`` each."""
        (layer,) = self._layer
        cell, weights = layer.cell, layer._weights()[0]

        def prepare(rows: Tensor) -> Tensor:
            offsets = torch.tensor([0, rows.shape[0]], device=rows.device)
            prepared: Tensor = cell.prepare(weights, rows, offsets)
            return prepared

        inputs = prepare(packed.data) if self._hoists else packed.data
        counts = packed.batch_sizes.tolist()
        state = tuple(packed.data.new_zeros(counts[0], size) for size in layer.state_sizes)
        outputs: list[Tensor] = []
        ended: list[tuple[Tensor, ...]] = []
        for count, rows in zip(counts, inputs.split(counts), strict=True):
            if count < state[0].shape[0]:
                ended.append(tuple(part[count:] for part in state))
            ready = rows if self._hoists else prepare(rows)
            output, state = cell.step(weights, ready, tuple(part[:count] for part in state))
            outputs.append(output)
        final = tuple(torch.cat(parts) for parts in zip(state, *ended[::-1], strict=True))
        if packed.unsorted_indices is not None:
            final = tuple(part[packed.unsorted_indices] for part in final)
        return packed._replace(data=torch.cat(outputs)), tuple(part.unsqueeze(0) for part in final)


def under(schedule: str) -> Callable[[Batch, str, int], Runner]:
    """Prepare a user-defined GRU in plain torch, with a schedule."""

    def prepare(batch: Batch, mode: str, threads: int) -> Runner:  # noqa: ARG001
        return ours.ragged_runner(batch, mode, _OwnLayer(batch, schedule))

    return prepare


class _OwnLayer(nn.Module):
    """Return a layer of the cell below, with the names of parameters of torch's layer."""

    def __init__(self, batch: Batch, schedule: Any) -> None:
        super().__init__()
        self._layer = [Recurrent(_OwnGRU(batch), schedule=schedule)]
        for name, parameter in self._layer[0].cells[0].named_parameters():
            self.register_parameter(f"{name}_l0", parameter)

    def forward(self, inputs: Any) -> Any:
        return self._layer[0](inputs)


class _OwnGRU(nn.Module):
    """A user-defined GRU."""

    def __init__(self, batch: Batch) -> None:
        super().__init__()
        self.input_size, self.hidden_size = batch.values.shape[1], batch.hidden
        self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh = (
            nn.Parameter(batch.weights[f"{name}_l0"])
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )

    def prepare(self, values: Tensor, offsets: Tensor) -> Tensor:  # noqa: ARG002
        return nn.functional.linear(values, self.weight_ih, self.bias_ih)

    def step(self, x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        x_r, x_z, x_n = x_t.chunk(3, 1)
        h_r, h_z, h_n = nn.functional.linear(state, self.weight_hh, self.bias_hh).chunk(3, 1)
        z = torch.sigmoid(x_z + h_z)
        n = torch.tanh(x_n + torch.sigmoid(x_r + h_r) * h_n)
        state = (1 - z) * n + z * state
        return state, state
