"""One layer in one direction as a program, as a function that PyTorch can differentiate, twice.

All that is computed from parameters alone is computed by torch, under autograd. The loop is one function to
autograd, whose inputs are what a step reads and all parameters. A second derivative goes through the reference kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from raglane import segments
from raglane._utils.tracing import are_transformed
from raglane.kernels import reference
from raglane.kernels.contract import Request
from raglane.kernels.cpu.layer import is_last_use, spend
from raglane.kernels.cpu.programs import outer_products, times
from raglane.kernels.cpu.programs import run as run_program
from raglane.native import library
from raglane.programs.compiled import Backward, CompiledStep, Fetch, Forward, Wanted
from raglane.programs.lower import Lowered
from raglane.programs.parameters import ParameterValues
from raglane.programs.step import Step


@dataclass(frozen=True, eq=False)
class StepCall:
    """One run of a compiled step."""

    compiled: CompiledStep
    step: Step  # with the weights of this call
    offsets: Tensor
    ascending: bool  # sequences are read from their first element on
    need_output: bool
    need_states: bool
    counts: tuple[int, int, int]  # elements, states and leaves among the tensors of a run

    def parts(self, tensors: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Elements, states and leaves."""
        elements, states, _ = self.counts
        return tensors[:elements], tensors[elements : elements + states], tensors[elements + states :]

    def split(self, states: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
        """What belongs to each state of the cell, as what changes and what does not."""
        pairs = list(zip(states, self.compiled.order, strict=True))
        return [part for part, (changes, _) in pairs if changes], [part for part, (changes, _) in pairs if not changes]

    def join(self, changing: list[Any], unchanged: list[Any]) -> list[Any]:
        """The inverse of :meth:`split`."""
        return [(changing if changes else unchanged)[place] for changes, place in self.compiled.order]


def run_loop(call: StepCall, tensors: tuple[Tensor, ...]) -> tuple[Tensor | None, list[Tensor], list[Tensor]]:
    """Run it."""
    if torch.is_grad_enabled() and any(part.requires_grad for part in tensors):
        found = list(_Loop.apply(call, *tensors))  # type: ignore[no-untyped-call]
    else:
        elements, states, leaves = call.parts(tensors)
        vectors, weights = call.compiled.trace.parameters.of(leaves)
        found, _ = _forward(call, elements, states, vectors, weights, None)
    output = found.pop(0) if call.need_output else None
    count = len(call.compiled.order)
    return output, found[:count], found[count:]


def _forward(
    call: StepCall,
    elements: tuple[Tensor, ...],
    states: tuple[Tensor, ...],
    vectors: list[Tensor],
    weights: list[Tensor],
    wanted: Wanted | None,
) -> tuple[list[Tensor], dict[int, Tensor]]:
    """Output, final states, states of every step; and what was saved, by node."""
    compiled = call.compiled
    program = compiled.forward(call.need_output, call.need_states, wanted)
    changing, unchanged = call.split(states)
    given = dict(zip(compiled.elements, elements, strict=True))
    given |= dict(zip(compiled.states, changing, strict=True))
    given |= dict(zip(compiled.unchanged, unchanged, strict=True))
    given |= dict(zip(compiled.vectors, vectors, strict=True))
    over = _beside(program, elements[0])
    outputs, finals = _run(program.lowered, call, call.ascending, given, weights, over)
    found = [] if program.output is None else [outputs[program.output]]
    found += call.join(finals, unchanged)
    if call.need_states:
        count = elements[0].shape[0]
        spread = [segments.spread(part, call.offsets, count) for part in unchanged]
        found += call.join([outputs[place] for place in program.states], spread)
    return found, {node: outputs[place] for node, place in program.saved.items()}


def _beside(program: Forward, like: Tensor) -> dict[int, Tensor]:
    """Memory for what is saved for the backward pass alone: in one piece, which the next call is given again."""
    widths = {
        place: program.lowered.program.outputs[place][1] for node, place in program.saved.items() if node in program.own
    }
    if len(widths) < 2:
        return {}
    whole = library.empty(like, like.shape[0], sum(widths.values()))
    return dict(zip(widths, whole.split(list(widths.values()), 1), strict=True))


def _run(
    lowered: Lowered,
    call: StepCall,
    ascending: bool,
    given: dict[int, Tensor],
    weights: list[Tensor],
    over: Mapping[int, Tensor] = {},
) -> tuple[list[Tensor], list[Tensor]]:
    def tensors(kind: Any) -> list[Tensor]:
        return [given[node] for node in lowered.given.get(kind, ())]

    return run_program(
        lowered.program,
        offsets=call.offsets,
        ascending=ascending,
        elements=tensors("element"),
        sequences=tensors("sequence"),
        states=tensors("state"),
        vectors=tensors("vector"),
        weights=[weights[index].transpose(1, 2) if turned else weights[index] for index, turned in lowered.weights],
        over=over,
    )


class _Loop(torch.autograd.Function):
    """Inputs are (loop, *tensors); outputs those of :func:`_forward`."""

    @staticmethod
    def forward(ctx: Any, call: StepCall, *tensors: Tensor) -> tuple[Tensor, ...]:
        elements, states, leaves = call.parts(tensors)
        wishes = ctx.needs_input_grad[1:]
        _, _, wished_leaves = call.parts(wishes)
        ctx.call = call
        ctx.known = made = ParameterValues(call.compiled.trace.parameters, leaves, wished_leaves)
        ctx.wanted = _wanted(call, wishes, made)
        found, saved = _forward(call, elements, states, made.vectors, made.weights, ctx.wanted)
        ctx.nodes = list(saved)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *saved.values())
        # An output must not be an input.
        found = [part.view_as(part) if any(part is one for one in tensors) else part for part in found]
        has = _recorded(call, ctx.wanted, call.parts(wishes)[1])
        ctx.mark_non_differentiable(*[part for part, flag in zip(found, has, strict=True) if not flag])
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        call: StepCall = ctx.call
        count = sum(call.counts)
        kept = ctx.saved_tensors  # read once: a checkpoint gives them no second time
        tensors, saved = kept[:count], kept[count:]
        if torch.is_grad_enabled() or are_transformed(grads):
            return None, *_reference_gradients(call, tensors, grads, ctx.needs_input_grad[1:])
        return None, *_Backward(ctx, tensors, dict(zip(ctx.nodes, saved, strict=True))).run(list(grads))


def _recorded(call: StepCall, wanted: Wanted, states: tuple[Any, ...]) -> list[bool]:
    """Which results have a gradient where plain torch runs the steps one after the other."""
    changing, unchanged = call.split(tuple(map(bool, states)))
    output, new = call.compiled.recorded(wanted, tuple(changing))
    finals = list(new)
    if any(before and not now for before, now in zip(changing, new, strict=True)):
        # The final state of an empty sequence is its initial one.
        has_empty = not bool(call.offsets.diff().all())
        finals = [now or (before and has_empty) for before, now in zip(changing, new, strict=True)]
    found = [output] if call.need_output else []
    found += call.join(finals, unchanged)
    return found + call.join(list(new), unchanged) if call.need_states else found


def _wanted(call: StepCall, wishes: tuple[bool, ...], made: ParameterValues) -> Wanted:
    elements, states, _ = call.parts(wishes)  # type: ignore[arg-type]
    _, unchanged = call.split(states)
    given = call.need_output, call.need_states
    return Wanted(*given, tuple(map(bool, elements)), tuple(map(bool, unchanged)), *made.wanted)


class _Backward:
    """The gradients of one run: those of the loop, and the products and sums after it."""

    def __init__(self, ctx: Any, tensors: tuple[Tensor, ...], saved: dict[int, Tensor]) -> None:
        self.call: StepCall = ctx.call
        self.compiled, self.wishes = self.call.compiled, ctx.needs_input_grad[1:]
        self.wanted: Wanted = ctx.wanted
        self.known: ParameterValues = ctx.known
        self.elements, self.states, _ = self.call.parts(tensors)
        self.saved = saved
        self.given = saved | dict(zip(self.compiled.elements, self.elements, strict=True))
        self.count = self.elements[0].shape[0]

    def run(self, grads: list[Tensor | None]) -> list[Tensor | None]:
        call, compiled = self.call, self.compiled
        program = compiled.backward(self.wanted)
        like = self.elements[0]
        grad_output = grads.pop(0) if call.need_output else None
        finals, unchanged_finals = call.split(tuple(grads[: len(compiled.order)]))
        steps, unchanged_steps = call.split(tuple(grads[len(compiled.order) :])) if call.need_states else ([], [])
        changing, unchanged = call.split(self.states)
        given = self.given
        given |= dict(zip(compiled.unchanged, unchanged, strict=True))
        given |= dict(zip(compiled.vectors, self.known.vectors, strict=True))
        if program.grad_output >= 0:
            size = len(compiled.trace.result.output)
            given[program.grad_output] = _filled(grad_output, like, (self.count, size))
        for node, state, part in zip(program.grad_states, changing, steps, strict=False):  # none, or one for each
            given[node] = _filled(part, like, (self.count, state.shape[1]))
        # Sums over the elements of a sequence begin at zero.
        batch, nodes = call.offsets.shape[0] - 1, program.lowered.given.get("state", ())
        widths = program.lowered.program.given("state")
        finals = [*finals, *[None] * (len(nodes) - len(finals))]
        for node, width, part in zip(nodes, widths, finals, strict=True):
            given[node] = _filled(part, like, (batch, width))
        over = self._over(program)
        self.outputs, self.finals = _run(program.lowered, call, not call.ascending, given, self.known.weights, over)
        if over:
            spend(*over.values())
        pairs = zip(unchanged_finals, unchanged_steps or [None] * len(unchanged_finals), strict=True)
        grad_unchanged = [self._unchanged(program.unchanged.get(place), *pair) for place, pair in enumerate(pairs)]
        grad_states = call.join(self.finals[: len(changing)], grad_unchanged)
        found = [*self._elements(program), *grad_states, *self._leaves(program)]
        return [part if wish else None for part, wish in zip(found, self.wishes, strict=True)]

    def _over(self, program: Backward) -> dict[int, Tensor]:
        """What was saved for this pass alone, and is never read again: outputs take its memory."""
        if not is_last_use():
            return {}
        own = self.compiled.forward(self.call.need_output, self.call.need_states, self.wanted).own
        return {output: self.saved[node] for output, node in program.over.items() if node in own}

    def _take(self, fetch: Fetch) -> Tensor:
        whole = self.given[fetch.node] if fetch.output < 0 else self.outputs[fetch.output]
        return whole[:, fetch.start : fetch.start + fetch.width]

    def _unchanged(self, summed: int | None, final: Tensor | None, steps: Tensor | None) -> Tensor | None:
        parts = [] if final is None else [final]
        parts += [] if summed is None else [self.finals[summed]]
        parts += [] if steps is None else [segments.sum(steps, self.call.offsets)]
        return sum(parts[1:], parts[0]) if parts else None

    def _elements(self, program: Backward) -> list[Tensor | None]:
        """The gradients of what is given for each element: what the loop has left, and the products after it."""
        found: list[Tensor | None] = []
        for place, (node, element) in enumerate(zip(self.compiled.elements, self.elements, strict=True)):
            if not self.wanted.elements[place]:
                found.append(None)
                continue
            deferred = [part for part in program.deferred if part[2].node == node]
            total = self._take(program.elements[place]) if place in program.elements else None
            if total is not None and deferred:
                total = total.clone()  # the sums for parameters may read it too
            for weight, fetch, to in deferred:
                part = times(self._take(fetch), self.known.weights[weight].mT)
                if total is None and to.width == element.shape[1]:
                    total = part
                    continue
                total = torch.zeros_like(element) if total is None else total
                total[:, to.start : to.start + to.width] += part
            found.append(torch.zeros_like(element) if total is None else total)
        return found

    def _leaves(self, program: Backward) -> list[Tensor | None]:
        """The gradients of the parameters, by way of what was made of them."""
        made: dict[int, Tensor] = {}
        sums: dict[Fetch | int, Tensor] = {}
        due, vectors = set(program.vectors.values()), len(self.known.vectors)
        for weight, result, operand in program.weights:
            # A bias that was added to a product has the sums of the same rows.
            is_due, groups = result in due and result not in sums, self.known.weights[weight].shape[0]
            share, total = outer_products(self._take(result), self._take(operand), groups=groups, sums=is_due)
            if total is not None:
                sums[result] = total
            share, place = cast(Tensor, share), vectors + weight
            made[place] = made[place] + share if place in made else share
        for place, source in program.vectors.items():
            if source not in sums:
                rows = self.finals[source] if isinstance(source, int) else self._take(source)
                sums[source] = cast(Tensor, outer_products(rows, None, sums=True)[1])
            made[place] = sums[source]
        return self.known.gradients(made)


def _filled(part: Tensor | None, like: Tensor, shape: tuple[int, ...]) -> Tensor:
    return like.new_zeros(shape) if part is None else part.contiguous()


def _reference_gradients(
    call: StepCall, tensors: tuple[Tensor, ...], grads: tuple[Tensor | None, ...], wishes: tuple[bool, ...]
) -> list[Tensor | None]:
    """All gradients by way of the reference kernel: where they are to be differentiated, or torch.func is at work."""
    keep = torch.is_grad_enabled()
    # Views, so that a gradient stops here where one of them was computed from another.
    inputs = [part.view_as(part) if keep else part.detach().requires_grad_(part.requires_grad) for part in tensors]
    if call.compiled.trace.reads_itself:
        # A step that reaches its parameters by itself reads no views of them.
        inputs = [*inputs[: sum(call.counts[:2])], *call.parts(tensors)[2]]
    elements, states, leaves = call.parts(tuple(inputs))
    weights = call.step.weights(list(leaves), list(elements))
    whole = call.step.whole(call.compiled.trace.prepares)
    request = Request(whole, elements[0], call.offsets, None, (), (weights,), need_states=call.need_states)
    with torch.enable_grad():
        ran = reference.run_direction(request, weights, states, not call.ascending)
    results = [*([ran.output] if call.need_output else []), *ran.state, *(ran.states or ())]
    pairs: list[Any] = [pair for pair in zip(results, grads, strict=True) if pair[1] is not None]
    pairs = [(part, grad) for part, grad in pairs if part is not None and part.requires_grad]
    ends, seeds = [part for part, _ in pairs], [grad for _, grad in pairs]
    wanted = [part for part, wish in zip(inputs, wishes, strict=True) if wish]
    found = iter(torch.autograd.grad(ends, wanted, seeds, create_graph=keep, allow_unused=True))
    return [next(found) if wish else None for wish in wishes]
