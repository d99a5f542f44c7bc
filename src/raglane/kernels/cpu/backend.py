"""The backend ``cpu``: layers and directions on top of :mod:`raglane.kernels.cpu.recurrence`."""

from __future__ import annotations

from typing import ClassVar

import torch

from raglane._utils.tracing import has_tangent
from raglane.kernels import reference
from raglane.kernels.checks import check
from raglane.kernels.contract import Request, Result, Traits
from raglane.kernels.cpu.kind import KINDS
from raglane.kernels.cpu.matrix import MatrixLayer
from raglane.kernels.cpu.recurrence import run_layer
from raglane.kernels.layers import run_layers
from raglane.native.cells import has_cell
from raglane.native.library import leave_lost_threads, missing_kernels

__all__ = ["BACKEND", "CpuBackend"]

_DTYPES = (torch.float32, torch.float64, torch.bfloat16)


class CpuBackend:
    """Runs RNN, LSTM, GRU and the element-wise cells in ``lanes`` on a CPU.

    A sequence's outputs and states are bit-identical in any batch and at any number of threads; gradients are
    bit-identical from run to run. Under :func:`torch.autocast` all is cast to its dtype once, before the first
    layer; float64 is left alone. The reference kernel computes forward-mode derivatives.
    """

    name = "cpu"
    schedules = ("lanes",)
    layouts: ClassVar[dict[str, type]] = {}

    def refuses(self, traits: Traits, schedule: str) -> str | None:  # noqa: ARG002
        """See :class:`~raglane.kernels.contract.Backend`."""
        if not has_cell(traits.cell.name):
            return missing_kernels() or f"the cpu kernels do not know the cell {traits.cell.name!r}"
        if traits.device.type != "cpu":
            return f"the cpu kernels do not run on {traits.device}"
        if _dtype(traits.dtype) not in _DTYPES:
            return f"the cpu kernels do not compute in {traits.dtype}"
        if traits.checkpoints and KINDS[traits.cell.name] is not MatrixLayer:
            return f"the cpu kernels save all that backward needs of the cell {traits.cell.name!r}"
        return None

    def run(self, request: Request, schedule: str) -> Result:
        """See :class:`~raglane.kernels.contract.Backend`."""
        if torch.is_autocast_enabled("cpu"):
            request = check(request).cast(torch.get_autocast_dtype("cpu"))
        if has_tangent(request.tensors()):
            return reference.BACKEND.run(request, schedule)
        leave_lost_threads()
        return run_layers(request, run_layer)


BACKEND = CpuBackend()
"""The one instance; it keeps nothing between runs."""


def _dtype(dtype: torch.dtype) -> torch.dtype:
    """What the kernels will compute in."""
    if dtype is not torch.float64 and torch.is_autocast_enabled("cpu"):
        return torch.get_autocast_dtype("cpu")
    return dtype
