"""Compiled steps: traced or read from the disk once, compared with torch, and run."""

from __future__ import annotations

import time
import warnings
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from raglane._utils.tracing import are_transformed, has_tangent
from raglane.cells.module import ModuleCell
from raglane.cells.regularised import Regularised
from raglane.cells.spec import CellSpec
from raglane.kernels import reference
from raglane.kernels.checks import check_offsets
from raglane.kernels.contract import DirectionResult, Request
from raglane.kernels.program.loop import StepCall, run_loop
from raglane.kernels.program.verify import verify, verify_call
from raglane.programs import stored
from raglane.programs.compiled import CompiledStep
from raglane.programs.graph import Refused, Unkept
from raglane.programs.keys import lasting_key
from raglane.programs.step import Step, trace

# Of so many calls of a program, one is compared with the module as it is then; the first is the first of them.
_CALLS = 1000
_MOST = 1024

_steps: OrderedDict[Any, CompiledStep | Refused] = OrderedDict()
_warned: set[Any] = set()


def step_of(cell: CellSpec, weights: Any, width: int, sizes: tuple[int, ...], dtype: torch.dtype) -> Step:
    """A step whose numbers are computed in float32 where values are bfloat16."""
    output = cell.output_size if isinstance(cell, ModuleCell) else sizes[0]
    return Step(cell, weights, width, sizes, output, torch.float32 if dtype is torch.bfloat16 else dtype)


def ready(step: Step) -> CompiledStep:
    """The verified programs of a step; a Refused says why there are none."""
    found = _steps.get(step.key)
    if found is None:
        start = time.perf_counter()
        try:
            found = _made(step)
        except Refused as refused:
            found = Refused(refused.reason)
        else:
            found.seconds = time.perf_counter() - start
        _remember(step.key, found)
    if isinstance(found, Refused):
        raise Refused(found.reason)
    return found


def _remember(key: Any, found: CompiledStep | Refused) -> None:
    _steps[key] = found
    while len(_steps) > _MOST:
        _steps.popitem(last=False)


def forget() -> None:
    """Forget all programs of this process; what is on the disk stays."""
    _steps.clear()


def _made(step: Step) -> CompiledStep:
    """Verified programs: of a trace on the disk that holds, or else of one that is made and written now."""
    disk_key, not_kept = "", ""
    try:
        disk_key = lasting_key(step.facts)
        known = stored.load(step, disk_key)
        if known is not None:
            compiled = CompiledStep(known, step.key, is_read=True, disk_key=disk_key)
            if not verify(step, compiled):  # a file is no reason to refuse a cell
                return compiled
    except Unkept as error:
        not_kept = error.reason
    compiled = CompiledStep(trace(step), step.key, disk_key=disk_key, not_kept=not_kept)
    reason = verify(step, compiled)
    if reason:
        raise Refused(reason)
    if disk_key:
        try:
            stored.save(step, disk_key, compiled.trace)
        except Unkept as error:
            compiled.not_kept = error.reason
    return compiled


def _end(call: StepCall, reason: str) -> None:
    """Use programs no longer that were found to differ from their module."""
    step, compiled = call.step, call.compiled
    _remember(compiled.key, Refused(reason))
    if compiled.disk_key:
        stored.remove(compiled.disk_key)
    said = "the module, or what it reads, was changed where no program can see it, or its step is not that of a row"
    warnings.warn(f"The cell {step.cell.name!r} runs in plain torch from now on: {reason}; {said}.", stacklevel=2)


def warn(cell: CellSpec, reason: str) -> None:
    """Say once for each kind of cell that plain torch runs it, many times slower."""
    kind = cell.name if not isinstance(cell, Regularised) else cell.inner.name
    if kind not in _warned:
        _warned.add(kind)
        warnings.warn(f"The cell {kind!r} runs in plain torch, step by step: {reason}.", stacklevel=2)


def run_direction(layer: Request, weights: Any, state: tuple[Tensor, ...], reverse: bool) -> DirectionResult:
    """See :class:`~raglane.kernels.layers.RunDirection`."""
    cell, values = layer.cell, layer.values
    reason = ""
    try:
        step = step_of(cell, weights, values.shape[1], tuple([part.shape[1] for part in state]), values.dtype)
        compiled = ready(step)
    except Refused as refused:
        reason = refused.reason
    if reason or not compiled.trace.prepares or has_tangent(step.leaves):
        check_offsets(layer.offsets, values.shape[0], values.device)  # before C does
    if reason:
        warn(cell, reason)
    if reason or has_tangent(step.leaves):
        return reference.run_direction(layer, weights, state, reverse)
    rows = values if compiled.trace.prepares else cell.prepare(weights, values, layer.offsets)
    tensors = tuple([step.converted(part) for part in (rows, *step.elements, *state, *step.leaves)])
    counts = (1 + len(step.elements), len(state), len(step.leaves))
    call = StepCall(compiled, step, layer.offsets, not reverse, layer.need_output, layer.need_states, counts)
    out, finals, states = run_loop(call, tensors)
    if compiled.calls % _CALLS == 0 and not are_transformed(tensors):
        reason = verify_call(call, tensors)
        if reason:
            _end(call, reason)
            return reference.run_direction(layer, weights, state, reverse)
    compiled.calls += 1
    narrow = values.dtype
    return DirectionResult(
        None if out is None else out.to(narrow),
        tuple([part.to(narrow) for part in finals]),
        tuple([part.to(narrow) for part in states]) if layer.need_states else None,
    )
