"""The backend ``program``: any cell whose step can be traced, on the cpu kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch

from raglane._utils.tracing import has_tangent, is_exporting, records_operators
from raglane.cells import CELLS
from raglane.cells.module import ModuleCell
from raglane.cells.regularised import Regularised
from raglane.kernels import reference
from raglane.kernels.checks import check
from raglane.kernels.contract import Request, Result, Traits, run_directions, run_layers
from raglane.kernels.program.steps import ready, run_direction, step_of
from raglane.native.library import leave_lost_threads, missing_kernels
from raglane.programs.compiled import CompiledStep
from raglane.programs.graph import Refused
from raglane.programs.program import printed

_DTYPES = (torch.float32, torch.float64, torch.bfloat16)


class ProgramBackend:
    """Runs any cell in ``lanes`` on a CPU, as a program made of its ``step`` in plain torch."""

    name = "program"
    schedules = ("lanes",)
    layouts: ClassVar[dict[str, type]] = {}

    def refuses(self, traits: Traits, schedule: str) -> str | None:  # noqa: ARG002
        """See :class:`~raglane.kernels.contract.Backend`; a step is traced to answer."""
        elsewhere = _elsewhere(traits)
        if elsewhere is not None:
            return elsewhere
        if torch.compiler.is_compiling():
            return None  # what runs outside of the graphs decides for itself
        reason = self.why_not(traits)
        return f"the cell {traits.cell.name!r} cannot become a program: {reason}" if reason else None

    def why_not(self, traits: Traits) -> str:
        """Why a step cannot become a program, in a clause; nothing if it can, or where none would run."""
        if _elsewhere(traits) is not None:
            return ""
        try:
            _first_step(traits)
        except Refused as refused:
            return refused.reason
        return ""

    def origin(self, traits: Traits, shows: bool) -> tuple[str, str]:
        """Where the program of the first layer comes from, how long it took, and the program itself, to be read."""
        try:
            compiled = _first_step(traits)
        except Refused as refused:
            return refused.reason, refused.reason if shows else ""
        if compiled is None:
            return "", ""
        made = "read from the disk" if compiled.is_read else "traced"
        not_kept = f"; not kept on the disk: {compiled.not_kept}" if compiled.not_kept else ""
        shown = printed(compiled.forward(True, False).lowered.program) if shows else ""
        return f"{made} and verified in {1e3 * compiled.seconds:.0f} ms{not_kept}", shown

    def run(self, request: Request, schedule: str) -> Result:
        """See :class:`~raglane.kernels.contract.Backend`."""
        if records_operators() and request.cell.name in CELLS and not torch.is_autocast_enabled("cpu"):
            from raglane.kernels.program import operators

            return run_layers(request, partial(run_directions, run=operators.run_direction))
        if is_exporting():
            return reference.BACKEND.run(request, schedule)  # which says that it cannot
        if torch.compiler.is_dynamo_compiling():
            if isinstance(request.cell, ModuleCell):
                from raglane.kernels.program import modules, operators

                request, reason = modules.named(request)
                if not reason:
                    return run_layers(request, partial(run_directions, run=operators.run_direction))
                said = f"the cell {request.cell.name!r} cannot be part of a graph: {reason}"
                torch._dynamo.graph_break(msg=said)
            untraced: Callable[[Request, str], Result] = torch.compiler.disable(_run)
            return untraced(request, schedule)
        return _run(request, schedule)


BACKEND = ProgramBackend()
"""The one instance; it keeps nothing between runs."""


def _first_step(traits: Traits) -> CompiledStep | None:
    """The programs of the first layer; None where its weights are not there."""
    if not traits.weights:
        return None
    cell, weights = traits.cell, traits.weights[0]
    if isinstance(cell, Regularised):
        cell = cell.inner  # masks come with a batch, and change nothing in what can become a program
    projection = getattr(weights, "projection", None)
    sizes = cell.state_sizes(traits.hidden_size, 0 if projection is None else projection.shape[0])
    return ready(step_of(cell, weights, traits.input_size, sizes, traits.dtype))


def _elsewhere(traits: Traits) -> str | None:
    """Why no program runs here, whatever the step is."""
    missing = missing_kernels()
    if missing:
        return missing
    if traits.checkpoints:
        return "programs save all that backward needs"
    if traits.device.type != "cpu":
        return f"programs do not run on {traits.device}"
    if traits.dtype not in _DTYPES:
        return f"programs do not compute in {traits.dtype}"
    if traits.cell.follows_autocast and torch.is_autocast_enabled("cpu"):
        return "autocast decides operation by operation what a user's cell computes in"
    return None


def _run(request: Request, schedule: str) -> Result:
    request = check(request, numbers=False)
    if torch.is_autocast_enabled("cpu"):
        if request.cell.follows_autocast:
            return reference.BACKEND.run(request, schedule)
        request = request.cast(torch.get_autocast_dtype("cpu"))
    if records_operators() or has_tangent(request.tensors()):
        return reference.BACKEND.run(request, schedule)
    leave_lost_threads()
    return run_layers(request, partial(run_directions, run=run_direction))
