"""Any cell as a program made of its equations in plain torch, on the cpu kernels or on a GPU.

``backend.py`` compiles steps and runs them, ``backward.py`` computes their gradients, and
``verify.py`` compares them with torch. ``program_operator.py`` has the operators of graphs, and
``modules.py`` the users' modules in them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from raglane._utils.tracing import has_tangent, is_exporting, records_operators
from raglane.cells import CELLS
from raglane.cells.module import ModuleCell
from raglane.kernels import reference
from raglane.kernels.contract import Request, Result, run_directions, run_layers
from raglane.kernels.program.backend import ProgramBackend, run, warn

__all__ = ["BACKEND", "GPU", "warn"]


class _Backend(ProgramBackend):
    """The backend, with graphs of operators for compilers and exports."""

    def run(self, request: Request, schedule: str) -> Result:
        """See :class:`~raglane.kernels.contract.Backend`."""
        # Operators would drop tangents.
        if not records_operators() or has_tangent(request.tensors()):
            return run(request)
        if request.cell.name in CELLS and not torch.is_autocast_enabled(self._device):
            return _run_operators(request)
        if is_exporting():
            return reference.BACKEND.run(request, schedule)  # which raises an error
        if torch.compiler.is_dynamo_compiling():
            if isinstance(request.cell, ModuleCell):
                from raglane.kernels.program import modules

                named, reason = modules.named(request)
                if not reason:
                    return _run_operators(named)
                torch._dynamo.graph_break(
                    msg=f"the cell {request.cell.name!r} cannot be part of a graph: {reason}"
                )
            untraced: Callable[[Request], Result] = torch.compiler.disable(run)
            return untraced(request)
        return run(request)


def _run_operators(request: Request) -> Result:
    from raglane.kernels.program import program_operator

    return run_layers(request, partial(run_directions, run=program_operator.run_direction))


BACKEND = _Backend("cpu")
"""The backend of the cpu kernels; it keeps nothing between runs."""
GPU = _Backend("cuda")
"""The backend of Triton."""
