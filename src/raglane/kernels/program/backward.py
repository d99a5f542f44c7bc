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
    """Functions that run programs on a kind of device: see :mod:`raglane.kernels.cpu.programs`."""

    run_lowered: Callable[..., tuple[list[Tensor], list[Tensor]]]
    times: Callable[[Tensor, Tensor], Tensor]
    outer_products: Callable[..., tuple[Tensor | None, Tensor | None]]
    # The sequences as run_lowered reads them, from the arguments of triton's Places.
    places: Callable[..., Any]


@dataclass(slots=True, eq=False)  # not frozen, which takes three times as long to build
class StepCall:
    """One run of a compiled step on its tensors: elements, states, parameters and buffers."""

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
    places: Any = field(default=None, init=False)  # for the forward and the backward pass


class Gradients:
    """The gradients of one run: those of the loop, and the products and sums after it."""

    def __init__(
        self,
        call: StepCall,
        selection: Wanted,
        values: ParameterValues,
        tensors: tuple[Tensor, ...],
        saved: dict[int, Tensor],
    ) -> None:
        self.call = call
        self.selection = selection
        self.values = values
        self.saved = saved
        self.compiled = call.compiled
        self.elements = tensors[: len(self.compiled.elements)]
        self.states = tensors[len(self.elements) :][: len(self.compiled.order)]
        self.inputs = saved | dict(zip(self.compiled.elements, self.elements, strict=True))
        self.count = self.elements[0].shape[0]

    def run(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Compute the gradients of the run's tensors from those of its results."""
        call = self.call
        compiled = self.compiled
        program = compiled.backward(self.selection)
        like = self.elements[0]
        count = len(compiled.order)
        grad_output = grads[0] if call.need_output else None
        of_states = grads[int(call.need_output) :]
        of_finals = [of_states[index] for index in compiled.changing_places]
        inputs = self.inputs
        unchanged = [self.states[index] for index in compiled.unchanged_places]
        inputs |= dict(zip(compiled.unchanged, unchanged, strict=True))
        inputs |= dict(zip(compiled.vectors, self.values.vectors, strict=True))
        if program.grad_output >= 0:
            inputs[program.grad_output] = _filled(
                grad_output, like, self.count, len(compiled.trace.result.output)
            )
        if call.need_states:
            for node, index in zip(program.grad_states, compiled.changing_places, strict=False):
                width = self.states[index].shape[1]
                inputs[node] = _filled(of_states[count + index], like, self.count, width)
        # Sums over the elements of a sequence begin at zero.
        nodes = program.lowered.inputs.get("state", ())
        widths = program.lowered.program.widths("state")
        of_finals += [None] * (len(nodes) - len(of_finals))
        for node, width, grad in zip(nodes, widths, of_finals, strict=True):
            inputs[node] = _filled(grad, like, call.offsets.shape[0] - 1, width)
        over = self._over(program)
        self.outputs, self.finals = call.machine.run_lowered(
            program.lowered, call.places, not call.ascending, inputs, self.values.weights, over
        )
        if over:
            spend(*over.values())
        grad_states: list[Tensor | None] = [None] * count
        for final, index in zip(self.finals, compiled.changing_places, strict=False):
            grad_states[index] = final
        for number, index in enumerate(compiled.unchanged_places):
            steps = of_states[count + index] if call.need_states else None
            summed = program.unchanged.get(number)
            grad_states[index] = self._unchanged(summed, of_states[index], steps)
        return [*self._elements(program), *grad_states, *self._leaves(program)]

    def _over(self, program: Backward) -> dict[int, Tensor]:
        """Return tensors that only this pass reads, and reads once, so that outputs may be there."""
        call = self.call
        if not self.elements[0].is_cpu or call.is_hooked or not is_last_use():
            return {}
        unshared = self.compiled.forward(
            call.need_output, call.need_states, self.selection
        ).only_saved
        over = program.over.items()
        return {output: self.saved[node] for output, node in over if node in unshared}

    def _take(self, fetch: Fetch) -> Tensor:
        """Return columns of every element."""
        whole = self.inputs[fetch.node] if fetch.output < 0 else self.outputs[fetch.output]
        if fetch.width == whole.shape[1]:
            return whole
        return whole[:, fetch.start : fetch.start + fetch.width]

    def _unchanged(
        self, summed: int | None, final: Tensor | None, steps: Tensor | None
    ) -> Tensor | None:
        """Return the gradient of a state that the step returns as it is."""
        terms = [] if final is None else [final]
        terms += [] if summed is None else [self.finals[summed]]
        terms += [] if steps is None else [segments.sum(steps, self.call.offsets)]
        return sum(terms[1:], terms[0]) if terms else None

    def _elements(self, program: Backward) -> list[Tensor | None]:
        """Return the gradients of inputs with a row per element."""
        grads: list[Tensor | None] = []
        for index, (node, element) in enumerate(
            zip(self.compiled.elements, self.elements, strict=True)
        ):
            if not self.selection.elements[index]:
                grads.append(None)
                continue
            # Outputs of the loop, and products after it.
            deferred = [product for product in program.deferred if product[2].node == node]
            total = self._take(program.elements[index]) if index in program.elements else None
            if total is not None and deferred:
                total = total.clone()  # the sums for parameters may read it too
            for weight, fetch, to in deferred:
                product = self.call.machine.times(self._take(fetch), self.values.weights[weight].mT)
                if total is None and to.width == element.shape[1]:
                    total = product
                    continue
                total = torch.zeros_like(element) if total is None else total
                total[:, to.start : to.start + to.width] += product
            grads.append(torch.zeros_like(element) if total is None else total)
        return grads

    def _leaves(self, program: Backward) -> list[Tensor | None]:
        """Return the gradients of parameters, from those of the vectors and weights of them."""
        grads: dict[int, Tensor] = {}
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
            index = vectors + weight
            grads[index] = grads[index] + share if index in grads else share
        for index, source in program.vectors.items():
            if source not in sums:
                rows = self.finals[source] if isinstance(source, int) else self._take(source)
                sums[source] = cast(
                    Tensor, self.call.machine.outer_products(rows, None, sums=True)[1]
                )
            # Two parameters keep these gradients, which the caller may change in-place.
            total = sums[source]
            is_shared = any(grad is total for grad in grads.values())
            grads[index] = total.clone() if is_shared else total
        return self.values.gradients(grads)


def _filled(grad: Tensor | None, like: Tensor, rows: int, width: int) -> Tensor:
    return like.new_zeros(rows, width) if grad is None else grad.contiguous()


def reference_gradients(
    call: StepCall,
    tensors: tuple[Tensor, ...],
    grads: tuple[Tensor | None, ...],
    needed: tuple[bool, ...],
) -> list[Tensor | None]:
    """Compute all gradients with the reference kernel, differentiably, or within torch.func."""
    keep = torch.is_grad_enabled()
    inputs = [_input(tensor, keep) for tensor in tensors]
    results = _reference_results(call, inputs, tensors)
    ends = []
    seeds = []
    for tensor, grad in zip(results, grads, strict=True):
        if tensor is not None and grad is not None and tensor.requires_grad:
            ends.append(tensor)
            seeds.append(grad)
    leaves = [tensor for tensor, is_needed in zip(inputs, needed, strict=True) if is_needed]
    computed = iter(torch.autograd.grad(ends, leaves, seeds, create_graph=keep, allow_unused=True))
    return [next(computed) if is_needed else None for is_needed in needed]


def _input(tensor: Tensor, keep: bool) -> Tensor:
    """Return a view, or a detached tensor: a gradient stops here if others were computed from it."""
    return tensor.view_as(tensor) if keep else tensor.detach().requires_grad_(tensor.requires_grad)


def _reference_results(
    call: StepCall, inputs: list[Tensor], tensors: tuple[Tensor, ...]
) -> list[Tensor | None]:
    """Return the results of a call by the reference kernel, in the order of the gradients."""
    count = len(call.compiled.elements)
    end = count + len(call.compiled.order)
    if call.compiled.trace.reads_itself:
        # A step that reaches its parameters by itself does not read views of them.
        inputs = [*inputs[:end], *tensors[end:]]
    weights = call.step.with_tensors(inputs[end:], inputs[:count])
    whole = call.step.whole(call.compiled.trace.prepares)
    request = Request(
        whole, inputs[0], call.offsets, None, (), (weights,), need_states=call.need_states
    )
    state = tuple(inputs[count:end])
    with torch.enable_grad():
        result = reference.run_direction(request, weights, state, not call.ascending)
    output = [result.output] if call.need_output else []
    return [*output, *result.state, *(result.states or ())]
