"""Compiled steps: traced or read from the disk once, compared with torch, and run.

Each program is compared with steps of torch before its first use, and now and then later: values and all gradients.
Before the first use, numbers are random: once with parameters that random numbers move away from zeros and ones, and
once with the user's module as it is. Later it is compared on a call's own rows, with the module as it is then.
"""

from __future__ import annotations

import time
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from raglane._utils.tracing import are_transformed, has_tangent
from raglane.cells.module import ModuleCell
from raglane.cells.regularised import Regularised
from raglane.cells.spec import CellSpec
from raglane.kernels import reference
from raglane.kernels.checks import check_offsets
from raglane.kernels.contract import DirectionResult, Request
from raglane.kernels.program.loop import StepCall, run_loop
from raglane.programs import stored
from raglane.programs.compiled import CompiledStep
from raglane.programs.graph import Refused, Unkept
from raglane.programs.keys import lasting_key
from raglane.programs.parameters import gradients
from raglane.programs.step import Step, plainly, trace

# Of so many calls of a program, one is compared with the module as it is then; the first is the first of them.
_CALLS = 1000
_TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-6}
# Where a program disagrees, torch's step is run as often on numbers that differ by a few roundings.
_NUDGES = 4
_MOST_STEPS = 1024

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
    while len(_steps) > _MOST_STEPS:
        _steps.popitem(last=False)


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
    """See :class:`~raglane.kernels.contract.RunDirection`."""
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


# ---- comparison with torch ----------------------------------------------------------------------------------------


def verify(step: Step, compiled: CompiledStep) -> str:
    """Why programs differ from one step of torch on random numbers; nothing where they agree.

    Random numbers may be such that rounding alone changes a result: a quotient by a state that is nearly 0. A result
    may differ as far as torch's own does where the numbers are a few roundings apart.
    """
    generator = torch.Generator().manual_seed(0)
    is_telling = False
    try:
        with _recording():
            for rows, noise in ((3, 0.1), (1, 0.0)):
                case = _drawn(step, compiled, rows, noise, generator)
                for own in (case, case.as_it_is()):
                    reason, is_finite = own.difference(generator)
                    if reason:
                        return reason
                    is_telling = is_telling or is_finite
    except Exception as error:
        return f"its program could not be verified: {type(error).__name__}: {error}"
    return "" if is_telling else "its program could not be verified: one step of torch gives no finite number"


def verify_call(call: StepCall, tensors: tuple[Tensor, ...]) -> str:
    """Compare a program with the module as it is, on the first rows that each sequence of a call reads."""
    elements, states, _ = call.parts(tensors)
    with _recording():
        starts, ends = call.offsets[:-1], call.offsets[1:]
        rows = torch.arange(len(starts), device="cpu")[ends > starts]
        first = starts[rows] if call.ascending else ends[rows] - 1
        given = [part.detach().index_select(0, first) for part in elements]
        given += [part.detach().index_select(0, rows) for part in states]
        if not len(rows) or not all(bool(part.isfinite().all()) for part in given):
            return ""
        one = replace(call, offsets=torch.arange(len(rows) + 1, device="cpu"), ascending=True)
        one = replace(one, need_output=True, need_states=False)
        try:
            case = _Case(one, (*[part.requires_grad_() for part in given], *call.parts(tensors)[2]), 0)
            reason, _ = case.as_it_is().difference(torch.Generator().manual_seed(0))
        except Exception as error:
            return f"its program could not be verified: {type(error).__name__}: {error}"
    return reason


@contextmanager
def _recording() -> Iterator[None]:
    """Numbers are computed and recorded as in any other call, whatever stands around this one."""
    # To leave the inference mode also makes autograd see what is computed within an operator of a compiled graph.
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False), plainly():
        yield


_Results = tuple[list[Tensor], list[Tensor]]  # values and gradients


@dataclass(frozen=True)
class _Case:
    """What is run, on which numbers; the results' gradients are drawn from a seed."""

    call: StepCall
    tensors: tuple[Tensor, ...]
    seed: int
    is_own: bool = False  # whether a user's module runs as it is

    def as_it_is(self) -> _Case:
        """The same for the weights as they are; in bfloat16, in which no program computes, the case itself."""
        step = self.call.step
        if any(part.dtype is torch.bfloat16 or part.is_inference() for part in step.leaves):
            return self
        elements, states, _ = self.call.parts(self.tensors)
        return replace(self, tensors=(*elements, *states, *step.leaves), is_own=isinstance(step.given, nn.Module))

    def difference(self, generator: torch.Generator) -> tuple[str, bool]:
        """Why the program is none of torch's step, or nothing; and whether a number was finite."""
        output, finals, _ = run_loop(self.call, self.tensors)
        got = self._with_gradients([part for part in (output, *finals) if part is not None], self.tensors)
        want = self.by_torch(self.tensors)
        with torch.no_grad():
            plain = self._step(tuple([part.detach() for part in self.tensors]))
        if not all(_agree(one, other, other.dtype) for one, other in zip(plain, want[0], strict=True)):
            return "its step does something else where no gradients are recorded", True
        near: list[_Results] = []
        for index, kind in enumerate(("values", "gradients")):
            for place, (one, other) in enumerate(zip(got[index], want[index], strict=True)):
                if _agree(one, other, self.call.step.dtype):
                    continue
                near = near or [self.by_torch(self.nudged(generator)) for _ in range(_NUDGES)]
                if not _agree(one, other, self.call.step.dtype, [results[index][place] for results in near]):
                    return f"the {kind} of its program differ from those of torch", True
        return "", any(bool(part.isfinite().any()) for part in want[0] if part.numel())

    def by_torch(self, tensors: tuple[Tensor, ...]) -> _Results:
        return self._with_gradients(self._step(tensors), tensors)

    def _step(self, tensors: tuple[Tensor, ...]) -> list[Tensor]:
        call, (elements, states, leaves) = self.call, self.call.parts(tensors)
        given = None if self.is_own else list(leaves)
        prepares = call.compiled.trace.prepares
        output, new, _ = call.step.run(given, list(elements), list(states), call.offsets, prepares)
        return [output, *new]

    def nudged(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        """The tensors, with what is read and the states a few roundings away; masks and weights stay."""
        elements, states, leaves = self.call.parts(self.tensors)

        def near(part: Tensor) -> Tensor:
            noise = torch.randn(part.shape, generator=generator, dtype=part.dtype)
            return (part.detach() * (1 + 4 * torch.finfo(part.dtype).eps * noise)).requires_grad_()

        return near(elements[0]), *elements[1:], *map(near, states), *leaves

    def _with_gradients(self, results: list[Tensor], tensors: tuple[Tensor, ...]) -> _Results:
        generator = torch.Generator().manual_seed(self.seed)
        grads = [torch.randn(part.shape, generator=generator, dtype=part.dtype) for part in results]
        wished = [part for part in tensors if part.requires_grad]
        pairs = [pair for pair in zip(results, grads, strict=True) if pair[0].requires_grad]
        # What a module computed from its parameters beforehand is its own, and is differentiated by itself later.
        found = gradients(pairs, wished, keep=not all(part.is_leaf for part in wished))
        return results, [
            torch.zeros_like(part) if grad is None else grad for part, grad in zip(wished, found, strict=True)
        ]


def _drawn(step: Step, compiled: CompiledStep, rows: int, noise: float, generator: torch.Generator) -> _Case:

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=step.dtype).requires_grad_()

    graph = compiled.trace.result.graph
    elements = [drawn(rows, graph.nodes[node].width) for node in compiled.elements]
    # Rows of the weights are masks of zeros and ones.
    elements[1:] = [(part > 0).to(step.dtype).requires_grad_() for part in elements[1:]]
    states = [drawn(rows, size) for size in step.sizes]
    leaves = []
    for part in step.leaves:
        if compiled.trace.reads_itself:
            leaves.append(step.converted(part))
            continue
        given = step.converted(part.detach())
        if given.dtype.is_floating_point:
            given = (given + noise * torch.randn(given.shape, generator=generator, dtype=given.dtype)).requires_grad_()
        leaves.append(given)
    offsets = torch.arange(rows + 1, device="cpu")
    call = StepCall(compiled, step, offsets, True, True, False, (len(elements), len(states), len(leaves)))
    return _Case(call, (*elements, *states, *leaves), int(torch.randint(2**31, (), generator=generator)))


def _agree(one: Tensor, other: Tensor, dtype: torch.dtype, near: Sequence[Tensor] = ()) -> bool:
    """Whether two results are alike, or no further apart than those of numbers a few roundings apart."""
    one, other = one.detach(), other.detach()
    finite = other[other.isfinite()]
    scale = 1 + float(finite.abs().max()) if finite.numel() else 1.0
    tolerance = _TOLERANCES[dtype]
    alike = torch.isclose(one, other, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
    if near:
        alike |= (one - other).abs() <= 4 * torch.stack([(part.detach() - other).abs() for part in near]).amax(0)
    return bool(alike.all())
