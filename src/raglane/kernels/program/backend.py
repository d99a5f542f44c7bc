"""The backend ``program``: any cell whose step can be traced, on the cpu kernels."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from raglane._utils import caches
from raglane._utils.tracing import are_transformed, has_tangent, is_exporting, records_operators
from raglane.cells import CELLS
from raglane.cells.module import ModuleCell
from raglane.cells.regularised import Regularised
from raglane.cells.spec import CellSpec
from raglane.kernels import reference
from raglane.kernels.checks import check, check_offsets
from raglane.kernels.contract import DirectionResult, Request, Result, Traits
from raglane.kernels.layers import run_directions, run_layers
from raglane.kernels.program.loop import Loop, run_loop
from raglane.kernels.program.verify import verify, verify_call
from raglane.native.library import leave_lost_threads, missing_kernels
from raglane.programs.cache import KIND, Entry, Wish, anew, keep, lookup
from raglane.programs.graph import Refused
from raglane.programs.printing import written
from raglane.programs.step import Step
from raglane.programs.weights import Survey

__all__ = ["BACKEND", "ProgramBackend", "computed", "ready", "run_direction", "warn"]

# Of so many calls of a program, one is compared with the module as it is then; the first is the first of them.
_CALLS = 1000
_DTYPES = (torch.float32, torch.float64, torch.bfloat16)


class ProgramBackend:
    """Runs any cell in ``lanes`` on a CPU, as a program made of its ``step`` in plain torch.

    What it promises is what the backend ``cpu`` promises. Sums and states are float32 where values are bfloat16. What
    cannot become a program runs in plain torch.
    """

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
        return "" if _elsewhere(traits) is not None else self._entry(traits)[1]

    def origin(self, traits: Traits) -> str:
        """Where the program that runs this comes from, and how long it took."""
        entry, reason = self._entry(traits)
        if entry is None or reason:
            return reason
        made = "read from the disk" if entry.is_read else "traced"
        unkept = f"; not kept on the disk: {entry.unkept}" if entry.unkept else ""
        return f"{made} and verified in {1e3 * entry.seconds:.0f} ms{unkept}"

    def printed(self, traits: Traits) -> str:
        """The program that runs this, to be read."""
        entry, reason = self._entry(traits)
        if entry is None or entry.compiled is None:
            return reason
        return written(entry.compiled)

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

    def _entry(self, traits: Traits) -> tuple[Entry | None, str]:
        """The program of the first layer, and why there is none."""
        if not traits.weights:
            return None, ""
        cell, weights = traits.cell, traits.weights[0]
        if isinstance(cell, Regularised):
            cell = cell.inner  # masks come with a batch, and change nothing in what can become a program
        sizes = _sizes(cell, weights, traits.hidden_size)
        output = cell.output_size if isinstance(cell, ModuleCell) else sizes[0]
        wish = Wish(cell, weights, traits.input_size, sizes, output, computed(traits.dtype))
        try:
            entry, _ = ready(wish)
        except Refused as refused:
            return None, refused.reason
        return entry, entry.reason


BACKEND = ProgramBackend()
"""The one instance; it keeps nothing between runs."""

_warned: set[Any] = set()


def ready(wish: Wish) -> tuple[Entry, Survey]:
    """The verified programs of a step, or the reason why there are none."""
    entry, found = lookup(wish)
    if entry.compiled is not None and not entry.is_verified:
        start, before = time.perf_counter(), entry.seconds
        _compare(wish, entry, found)
        if entry.reason and entry.is_read:  # a file is no reason to refuse a cell
            entry = anew(wish, entry, found)
            _compare(wish, entry, found)
        if entry.reason:
            entry.compiled = None
        entry.seconds = before + time.perf_counter() - start
        entry.is_verified = True
        keep(wish, entry, found)
    return entry, found


def _end(wish: Wish, entry: Entry, reason: str) -> None:
    """Use programs no longer that were found to differ from their module."""
    entry.compiled, entry.reason = None, reason
    if entry.lasting:
        caches.save(KIND, entry.lasting, "")
    said = "the module, or what it reads, was changed where no program can see it, or its step is not that of a row"
    warnings.warn(f"The cell {wish.cell.name!r} runs in plain torch from now on: {reason}; {said}.", stacklevel=2)


def _compare(wish: Wish, entry: Entry, found: Survey) -> None:
    """Say why programs must not be used, if that is so."""
    if entry.compiled is not None:
        entry.reason = verify(wish, entry, found)


def warn(cell: CellSpec, reason: str) -> None:
    """Say once for each kind of cell that plain torch runs it, many times slower."""
    kind = cell.name if not isinstance(cell, Regularised) else cell.inner.name
    if kind not in _warned:
        _warned.add(kind)
        warnings.warn(f"The cell {kind!r} runs in plain torch, step by step: {reason}.", stacklevel=2)


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


def computed(dtype: torch.dtype) -> torch.dtype:
    """What numbers are computed in where values have this dtype."""
    return torch.float32 if dtype is torch.bfloat16 else dtype


def _sizes(cell: CellSpec, weights: Any, hidden_size: int) -> tuple[int, ...]:
    projection = getattr(weights, "projection", None)
    return cell.state_sizes(hidden_size, 0 if projection is None else projection.shape[0])


def _run(request: Request, schedule: str) -> Result:
    """See :meth:`ProgramBackend.run`."""
    request = check(request, numbers=False)
    if torch.is_autocast_enabled("cpu"):
        if request.cell.follows_autocast:
            return reference.BACKEND.run(request, schedule)
        request = request.cast(torch.get_autocast_dtype("cpu"))
    if records_operators() or has_tangent(request.tensors()):
        return reference.BACKEND.run(request, schedule)
    leave_lost_threads()
    return run_layers(request, _run_layer)


def _run_layer(layer: Request) -> Result:
    return run_directions(layer, run_direction)


def run_direction(layer: Request, weights: Any, state: tuple[Tensor, ...], reverse: bool) -> DirectionResult:
    """See :class:`~raglane.kernels.layers.RunDirection`."""
    cell, values = layer.cell, layer.values
    sizes = tuple([part.shape[1] for part in state])
    output = cell.output_size if isinstance(cell, ModuleCell) else sizes[0]
    wish = Wish(cell, weights, values.shape[1], sizes, output, computed(values.dtype))
    try:
        entry, found = ready(wish)
        reason = entry.reason
    except Refused as refused:
        reason = refused.reason
    if reason or entry.compiled is None or not entry.prepares or has_tangent(found.leaves):
        check_offsets(layer.offsets, values.shape[0], values.device)  # before C does
    if not reason and has_tangent(found.leaves):
        return reference.run_direction(layer, weights, state, reverse)
    if reason or entry.compiled is None:
        warn(cell, reason)
        return reference.run_direction(layer, weights, state, reverse)
    step = Step(cell, weights, found, entry.prepares)
    rows = values if entry.prepares else cell.prepare(weights, values, layer.offsets)
    tensors = tuple([wish.given(part) for part in (rows, *found.elements, *state, *found.leaves)])
    widths = (1 + len(found.elements), len(state), len(found.leaves))
    loop = Loop(entry.compiled, step, layer.offsets, not reverse, layer.need_output, layer.need_states, widths)
    out, finals, states = run_loop(loop, tensors)
    if entry.calls % _CALLS == 0 and not are_transformed(tensors):
        reason = verify_call(loop, tensors, found, wish.dtype)
        if reason:
            _end(wish, entry, reason)
            return reference.run_direction(layer, weights, state, reverse)
    entry.calls += 1
    narrow = values.dtype
    return DirectionResult(
        None if out is None else out.to(narrow),
        tuple([part.to(narrow) for part in finals]),
        tuple([part.to(narrow) for part in states]) if layer.need_states else None,
    )
