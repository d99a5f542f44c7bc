"""Any cell as a program made of its equations in plain torch, on the cpu kernels or on a GPU.

``backend.py`` compiles steps and runs them, ``backward.py`` computes their gradients, and
``verify.py`` compares them with torch. ``program_operator.py`` has the operators of graphs, and
``modules.py`` the users' modules in them. They are imported when a cell becomes a program: layers of torch's
cells need none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch

from raglane._utils.tracing import (
    has_tangent,
    is_exporting,
    is_jit_traced,
    records_operators,
)
from raglane.cells import CELLS
from raglane.cells.module import ModuleCell
from raglane.cells.spec import CellSpec
from raglane.kernels import reference
from raglane.kernels.contract import Request, Result, Traits, run_directions, run_layers
from raglane.native import library

__all__ = ["BACKEND", "GPU", "warn"]


_DTYPES = {
    "cpu": (torch.float32, torch.float64, torch.bfloat16),
    "cuda": (torch.float32, torch.bfloat16, torch.float16),
}


class _Backend:
    """Runs a cell in ``lanes``, as a program made of its ``step`` in plain torch; in graphs by
    operators.
    """

    schedules = ("lanes",)
    layouts: ClassVar[dict[str, type]] = {}

    def __init__(self, device: str) -> None:
        self._device = device

    def refuses(self, traits: Traits, schedule: str) -> str | None:  # noqa: ARG002
        """See :class:`~raglane.kernels.contract.Backend`; the step is traced for the answer."""
        unsupported = _unsupported(traits, self._device)
        if unsupported is not None or torch.compiler.is_compiling():
            # While compiling, the call, which runs outside of the graph, decides.
            return unsupported
        reason = self.why_not(traits)
        return (
            f"the cell {traits.cell.name!r} cannot become a program: {reason}" if reason else None
        )

    def why_not(self, traits: Traits) -> str:
        """Return why a step cannot become a program, a clause; empty if it can or is not to."""
        if _unsupported(traits, self._device) is not None:
            return ""
        from raglane.kernels.program.backend import first_step
        from raglane.programs.graph import Refused

        try:
            first_step(traits)
        except Refused as refused:
            return refused.reason
        return ""

    def origin(self, traits: Traits, shows: bool) -> tuple[str, str]:
        """Return the origin of the first layer's program with its time, and the program as text."""
        from raglane.kernels.program.backend import first_step
        from raglane.programs.program import printed

        compiled = first_step(traits)
        if compiled is None:
            return "", ""
        origin = "read from the disk" if compiled.is_read else "traced"
        not_kept = f"; not kept on the disk: {compiled.not_kept}" if compiled.not_kept else ""
        text = printed(compiled.forward(True, False, None).lowered.program) if shows else ""
        return f"{origin} and verified in {1e3 * compiled.seconds:.0f} ms{not_kept}", text

    def run(self, request: Request, schedule: str) -> Result:
        """See :class:`~raglane.kernels.contract.Backend`."""
        from raglane.kernels.program.backend import run

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


def _unsupported(traits: Traits, device: str) -> str | None:
    """Return why no program runs here, whatever the step is."""
    if is_jit_traced():
        return "a trace of torch.jit records PyTorch's own operators"
    if traits.device.type != device:
        return (
            f"programs do not run on {traits.device}"
            if device == "cpu"
            else f"Triton needs {device} tensors"
        )
    missing = library.missing_kernels() if device == "cpu" else _missing_triton()
    if missing:
        return missing
    if traits.checkpoints:
        return "programs save all that backward needs"
    if traits.dtype not in _DTYPES[device]:
        return f"programs do not compute in {traits.dtype}"
    if traits.cell.follows_autocast and torch.is_autocast_enabled(device):
        return "autocast decides operation by operation what a user's cell computes in"
    return None


def _missing_triton() -> str:
    from raglane.kernels.triton import launch

    return launch.missing()


def _run_operators(request: Request) -> Result:
    from raglane.kernels.program import program_operator

    return run_layers(request, partial(run_directions, run=program_operator.run_direction))


def warn(cell: CellSpec, reason: str) -> None:
    """Warn once for each kind of cell that plain torch runs it, many times slower."""
    from raglane.kernels.program import backend

    backend.warn(cell, reason)


BACKEND = _Backend("cpu")
"""The backend of the cpu kernels; it keeps nothing between runs."""
GPU = _Backend("cuda")
"""The backend of Triton."""
