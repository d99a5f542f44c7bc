"""The backend ``cpu``: layers and directions on top of :mod:`raglane.kernels.cpu.recurrence`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from raglane.kernels import reference
from raglane.kernels.checks import check
from raglane.kernels.contract import Request, Result, Traits
from raglane.kernels.cpu.memory import Layer
from raglane.kernels.cpu.recurrence import run_layer
from raglane.native.cells import has_cell
from raglane.native.library import leave_lost_threads, missing_kernels
from raglane.tracing import has_tangent

__all__ = ["BACKEND", "CpuBackend"]

_DTYPES = (torch.float32, torch.float64, torch.bfloat16)


class CpuBackend:
    """Runs RNN, LSTM, GRU and the element-wise cells in ``lanes`` on a CPU.

    A sequence's outputs and states are the same bits whichever batch it came in, at any number of threads; gradients
    are the same bits from run to run. Under :func:`torch.autocast` all is cast to its dtype once, before the first
    layer; float64 is left alone. Derivatives that are taken forward are the reference kernel's affair.
    """

    name = "cpu"
    schedules = ("lanes",)

    def refuses(self, traits: Traits, schedule: str) -> str | None:  # noqa: ARG002
        """See :class:`~raglane.kernels.contract.Backend`."""
        if not has_cell(traits.cell.name):
            return missing_kernels() or f"the cpu kernels do not know the cell {traits.cell.name!r}"
        if traits.device.type != "cpu":
            return f"the cpu kernels do not run on {traits.device}"
        if _dtype(traits.dtype) not in _DTYPES:
            return f"the cpu kernels do not compute in {traits.dtype}"
        return None

    def run(self, request: Request, schedule: str) -> Result:
        """See :class:`~raglane.kernels.contract.Backend`."""
        if torch.is_autocast_enabled("cpu"):
            request = check(request).cast(torch.get_autocast_dtype("cpu"))
        if has_tangent(request.tensors()):
            return reference.BACKEND.run(request, schedule)
        leave_lost_threads()
        values, count, state = request.values, request.directions, request.state
        sizes = tuple([part.shape[2] for part in state]) or request.state_sizes
        finals: list[tuple[Tensor, ...]] = []
        histories: list[tuple[Tensor, ...]] = []
        output: Tensor | None = None
        for index in range(request.layers):
            is_last = index == request.layers - 1
            if index > 0 and request.dropout > 0:
                values = F.dropout(values, request.dropout, request.training)
            rows = slice(index * count, (index + 1) * count)
            initial = state if request.layers == 1 else tuple([part[rows] for part in state])
            weights = request.weights[rows.start]
            if count > 1:
                weights = (*weights, *request.weights[rows.start + 1])
            layer = Layer(request.cell.name, values, request.offsets, initial, weights, sizes, count, index)
            output, final, states = run_layer(layer, request.need_output or not is_last, request.need_states)
            finals.append(final)
            if states is not None:
                histories.append(states)
            if output is not None:
                values = output
        final = finals[0] if request.layers == 1 else tuple(torch.cat(parts) for parts in zip(*finals, strict=True))
        return Result(output if request.need_output else None, final, tuple(histories) if request.need_states else None)


BACKEND = CpuBackend()
"""The one instance; it keeps nothing between runs."""


def _dtype(dtype: torch.dtype) -> torch.dtype:
    """What the kernels will compute in."""
    if dtype is not torch.float64 and torch.is_autocast_enabled("cpu"):
        return torch.get_autocast_dtype("cpu")
    return dtype
