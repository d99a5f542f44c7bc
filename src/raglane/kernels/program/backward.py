"""The gradients of one run of a program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from raglane import segments
from raglane.kernels import reference
from raglane.kernels.contract import Request
from raglane.kernels.cpu.layer import are_hooked, is_last_use, spend
from raglane.kernels.triton.places import LONG
from raglane.programs.compiled import Backward, CompiledStep, Fetch, Wanted
from raglane.programs.parameters import ParameterValues
from raglane.programs.step import Step


class Machine(NamedTuple):
    """Functions that run programs on a kind of device; they are those of
    :mod:`raglane.kernels.cpu.programs`.
    """

    run_lowered: Callable[..., tuple[list[Tensor], list[Tensor]]]
    times: Callable[[Tensor, Tensor], Tensor]
    outer_products: Callable[..., tuple[Tensor | None, Tensor | None]]
    places: Callable[
        ..., Any
    ]  # of the sequences, as run_lowered reads them, from the arguments of triton's Places


@dataclass(slots=True, eq=False)  # not frozen, which takes three times as long to build
class StepCall:
    """One run of a compiled step. Its tensors are elements, then states, then leaves (parameters
    and buffers).
    """

    compiled: CompiledStep
    step: Step  # with the weights of this call
    offsets: Tensor
    ascending: bool  # sequences are read from their first element on
    need_output: bool
    need_states: bool
    machine: Machine
    lengths: Tensor | None = None  # on the CPU, for offsets on a device
    long: int = LONG  # a GPU may cut sequences of more elements into chunks
    is_hooked: bool = field(default_factory=are_hooked, init=False)
    places: Any = field(
        default=None, init=False
    )  # of the sequences, for the forward and the backward pass


class Gradients:
    """The gradients of one run: those of the loop, and the products and sums after it."""

    def __init__(
        self,
        call: StepCall,
        wanted: Wanted,
        values: ParameterValues,
        tensors: tuple[Tensor, ...],
        saved: dict[int, Tensor],
    ) -> None:
        self.call = call
        self.wanted = wanted
        self.values = values
        self.saved = saved
        self.compiled = call.compiled
        self.elements = tensors[: len(self.compiled.elements)]
        self.states = tensors[len(self.elements) :][: len(self.compiled.order)]
        self.given = saved | dict(zip(self.compiled.elements, self.elements, strict=True))
        self.count = self.elements[0].shape[0]

    def run(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Compute the gradients of the run's tensors from those of its results."""
        call = self.call
        compiled = self.compiled
        program = compiled.backward(self.wanted)
        like = self.elements[0]
        count = len(compiled.order)
        grad_output = grads[0] if call.need_output else None
        rest = grads[int(call.need_output) :]
        finals = [rest[place] for place in compiled.changing_places]
        steps = (
            [rest[count + place] for place in compiled.changing_places] if call.need_states else []
        )
        given = self.given
        unchanged = [self.states[place] for place in compiled.unchanged_places]
        given |= dict(zip(compiled.unchanged, unchanged, strict=True))
        given |= dict(zip(compiled.vectors, self.values.vectors, strict=True))
        if program.grad_output >= 0:
            given[program.grad_output] = _filled(
                grad_output, like, self.count, len(compiled.trace.result.output)
            )
        for node, place, part in zip(
            program.grad_states, compiled.changing_places, steps, strict=False
        ):
            given[node] = _filled(part, like, self.count, self.states[place].shape[1])
        # Sums over the elements of a sequence begin at zero.
        nodes = program.lowered.inputs.get("state", ())
        widths = program.lowered.program.widths("state")
        finals += [None] * (len(nodes) - len(finals))
        for node, width, part in zip(nodes, widths, finals, strict=True):
            given[node] = _filled(part, like, call.offsets.shape[0] - 1, width)
        over = self._over(program)
        self.outputs, self.finals = call.machine.run_lowered(
            program.lowered, call.places, not call.ascending, given, self.values.weights, over
        )
        if over:
            spend(*over.values())
        grad_states: list[Tensor | None] = [None] * count
        for index, place in enumerate(compiled.changing_places):
            grad_states[place] = self.finals[index]
        for index, place in enumerate(compiled.unchanged_places):
            step = rest[count + place] if call.need_states else None
            grad_states[place] = self._unchanged(program.unchanged.get(index), rest[place], step)
        return [*self._elements(program), *grad_states, *self._leaves(program)]

    def _over(self, program: Backward) -> dict[int, Tensor]:
        """Return tensors saved only for this pass and not read again, whose memory outputs may
        take.
        """
        if not self.elements[0].is_cpu or self.call.is_hooked or not is_last_use():
            return {}
        own = self.compiled.forward(
            self.call.need_output, self.call.need_states, self.wanted
        ).only_saved
        return {output: self.saved[node] for output, node in program.over.items() if node in own}

    def _take(self, fetch: Fetch) -> Tensor:
        whole = self.given[fetch.node] if fetch.output < 0 else self.outputs[fetch.output]
        return (
            whole
            if fetch.width == whole.shape[1]
            else whole[:, fetch.start : fetch.start + fetch.width]
        )

    def _unchanged(
        self, summed: int | None, final: Tensor | None, steps: Tensor | None
    ) -> Tensor | None:
        parts = [] if final is None else [final]
        parts += [] if summed is None else [self.finals[summed]]
        parts += [] if steps is None else [segments.sum(steps, self.call.offsets)]
        return sum(parts[1:], parts[0]) if parts else None

    def _elements(self, program: Backward) -> list[Tensor | None]:
        """Return the gradients of inputs with a row per element: outputs of the loop, and products
        after it.
        """
        grads: list[Tensor | None] = []
        for place, (node, element) in enumerate(
            zip(self.compiled.elements, self.elements, strict=True)
        ):
            if not self.wanted.elements[place]:
                grads.append(None)
                continue
            deferred = [part for part in program.deferred if part[2].node == node]
            total = self._take(program.elements[place]) if place in program.elements else None
            if total is not None and deferred:
                total = total.clone()  # the sums for parameters may read it too
            for weight, fetch, to in deferred:
                part = self.call.machine.times(self._take(fetch), self.values.weights[weight].mT)
                if total is None and to.width == element.shape[1]:
                    total = part
                    continue
                total = torch.zeros_like(element) if total is None else total
                total[:, to.start : to.start + to.width] += part
            grads.append(torch.zeros_like(element) if total is None else total)
        return grads

    def _leaves(self, program: Backward) -> list[Tensor | None]:
        """Return the gradients of the parameters, from those of the vectors and weights computed
        from them.
        """
        made: dict[int, Tensor] = {}
        sums: dict[Fetch | int, Tensor] = {}
        due = set(program.vectors.values())
        vectors = len(self.values.vectors)
        for weight, result, operand in program.weights:
            # A bias that was added to a product has the sums of the same rows.
            is_due = result in due and result not in sums
            groups = self.values.weights[weight].shape[0]
            share, total = self.call.machine.outer_products(
                self._take(result), self._take(operand), groups=groups, sums=is_due
            )
            if total is not None:
                sums[result] = total
            share = cast(Tensor, share)
            place = vectors + weight
            made[place] = made[place] + share if place in made else share
        for place, source in program.vectors.items():
            if source not in sums:
                rows = self.finals[source] if isinstance(source, int) else self._take(source)
                sums[source] = cast(
                    Tensor, self.call.machine.outer_products(rows, None, sums=True)[1]
                )
            # Two parameters keep these gradients, which the caller may change in-place.
            total = sums[source]
            made[place] = total.clone() if any(part is total for part in made.values()) else total
        return self.values.gradients(made)


def _filled(part: Tensor | None, like: Tensor, rows: int, width: int) -> Tensor:
    return like.new_zeros(rows, width) if part is None else part.contiguous()


def reference_gradients(
    call: StepCall,
    tensors: tuple[Tensor, ...],
    grads: tuple[Tensor | None, ...],
    wishes: tuple[bool, ...],
) -> list[Tensor | None]:
    """Compute all gradients with the reference kernel, for second derivatives and within
    torch.func.
    """
    keep = torch.is_grad_enabled()
    count = len(call.compiled.elements)
    end = count + len(call.compiled.order)
    # Views, so that a gradient stops here if one of them was computed from another.
    inputs = [
        part.view_as(part) if keep else part.detach().requires_grad_(part.requires_grad)
        for part in tensors
    ]
    if call.compiled.trace.reads_itself:
        # A step that reaches its parameters by itself does not read views of them.
        inputs = [*inputs[:end], *tensors[end:]]
    weights = call.step.with_tensors(inputs[end:], inputs[:count])
    whole = call.step.whole(call.compiled.trace.prepares)
    request = Request(
        whole, inputs[0], call.offsets, None, (), (weights,), need_states=call.need_states
    )
    with torch.enable_grad():
        ran = reference.run_direction(
            request, weights, tuple(inputs[count:end]), not call.ascending
        )
    results = [*([ran.output] if call.need_output else []), *ran.state, *(ran.states or ())]
    pairs: list[Any] = [pair for pair in zip(results, grads, strict=True) if pair[1] is not None]
    pairs = [(part, grad) for part, grad in pairs if part is not None and part.requires_grad]
    ends = [part for part, _ in pairs]
    seeds = [grad for _, grad in pairs]
    wanted = [part for part, wish in zip(inputs, wishes, strict=True) if wish]
    computed = iter(torch.autograd.grad(ends, wanted, seeds, create_graph=keep, allow_unused=True))
    return [next(computed) if wish else None for wish in wishes]
