"""Programs compared with steps of torch: values and all gradients.

Before its first use, a program is compared on random numbers: with parameters that are moved away
from zeros and ones by noise, and with the user's module as it is. Later it is compared on rows of a
call, with the module as it is then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from raglane.kernels import reference
from raglane.kernels.contract import Request
from raglane.kernels.program.backward import Machine, StepCall
from raglane.kernels.triton import launch
from raglane.kernels.triton.places import LONG
from raglane.programs.compiled import CompiledStep
from raglane.programs.parameters import gradients
from raglane.programs.step import Step, default_modes

_TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-6}
# If a program disagrees, torch's step is run this often on numbers that differ by a few roundings.
_NUDGES = 4

Run = Callable[[StepCall, tuple[Tensor, ...]], tuple[Tensor | None, list[Tensor], list[Tensor]]]
"""Runs a program: output, final states and the states of every step."""

_Results = tuple[list[Tensor], list[Tensor]]  # values and gradients


def verify(
    step: Step, compiled: CompiledStep, run: Run, machine: Machine, slack: float = 1.0
) -> str:
    """Return how programs differ from one step of torch on random numbers; empty if they agree.

    Rounding alone may change a result, e.g. a quotient by a state that is nearly 0. So a result may
    differ as much as torch's own result does for numbers that are a few roundings apart. ``slack``
    widens the tolerances.
    """
    generator = torch.Generator().manual_seed(0)
    has_finite = False
    try:
        with default_modes(grad=True):
            for rows, noise in ((3, 0.1), (1, 0.0)):
                case = _drawn(step, compiled, run, rows, noise, generator, machine)._replace(
                    slack=slack
                )
                for variant in (case, case.with_own_weights()):
                    reason, is_finite = variant.difference(generator)
                    if reason:
                        return reason
                    has_finite = has_finite or is_finite
    except Exception as error:
        return (
            f"its program could not be verified: {type(error).__name__}: {str(error).rstrip('.')}"
        )
    if not has_finite:
        return "its program could not be verified: one step of torch gives no finite number"
    return ""


def verify_loop(
    step: Step, compiled: CompiledStep, run: Run, machine: Machine, slack: float
) -> str:
    """Return how a loop over sequences differs from the reference; empty if they agree.

    An element-wise loop in chunks is compared with the same loop without.
    """
    generator = torch.Generator().manual_seed(1)
    try:
        kernel = launch.compiled(compiled.forward(True, False, None).lowered.program, True).kernel
        longest = kernel.steps + 2  # more than a pass of the loop
        cases = [(longest, LONG), *([(4 * longest, longest)] if kernel.is_elementwise else [])]
        with default_modes(grad=True):
            case = _drawn(step, compiled, run, 19, 0.1, generator, machine)
            for (last, long), ascending in product(cases, (True, False)):
                loop = case.loop(last, long, ascending, generator)
                got = loop.results()
                if long < LONG:
                    want = loop._replace(call=replace(loop.call, long=LONG)).results()
                else:
                    want = loop.by_reference()
                seeds = [torch.randn(tensor.shape, generator=generator) for tensor in want]
                leaves = [tensor for tensor in loop.tensors if tensor.requires_grad]
                got += _gradients(got, seeds, leaves, keep=True)
                want += _gradients(want, seeds, leaves, keep=True)
                pairs = zip(got, want, strict=True)
                if not all(_agree(*pair, step.dtype, slack=slack) for pair in pairs):
                    return "its kernel differs from torch over several steps"
    except Exception as error:
        return f"its kernel could not be verified: {type(error).__name__}: {str(error).rstrip('.')}"
    return ""


def verify_call(
    call: StepCall, tensors: tuple[Tensor, ...], finals: Sequence[Tensor], run: Run
) -> str:
    """Compare a program with the current module on rows of a call; empty if they agree.

    The rows are the first ones that the sequences read, from their initial and final states.
    """
    count = len(call.compiled.elements)
    end = count + len(call.compiled.order)
    with default_modes(grad=True):
        starts = call.offsets[:-1]
        ends = call.offsets[1:]
        rows = torch.arange(len(starts), device="cpu")[ends > starts]
        first = starts[rows] if call.ascending else ends[rows] - 1
        inputs = [tensor.detach().index_select(0, first) for tensor in tensors[:count]]
        inputs += [state.detach().index_select(0, rows) for state in tensors[count:end]]
        if not len(rows) or not _are_finite(inputs):
            return ""
        # Zeros, the usual initial states, hide all that is multiplied by a state.
        last = [state.detach().index_select(0, rows) for state in finals]
        if _are_finite(last):
            pairs = zip(inputs, [*inputs[:count], *last], strict=True)
            inputs = [torch.cat(pair) for pair in pairs]
        offsets = torch.arange(inputs[0].shape[0] + 1, device="cpu")
        step = replace(call, offsets=offsets, ascending=True, need_output=True, need_states=False)
        try:
            leaves = [tensor.requires_grad_() for tensor in inputs]
            weights = map(_recordable, tensors[end:])
            case = _Case(step, run, (*leaves, *weights), 0)
            reason, _ = case.with_own_weights().difference(torch.Generator().manual_seed(0))
        except Exception as error:
            return f"its program could not be verified: {type(error).__name__}: {str(error).rstrip('.')}"
    return reason


def _recordable(tensor: Tensor) -> Tensor:
    """Return a tensor that autograd may save: a copy of one that was made in inference mode."""
    return tensor.clone() if tensor.is_inference() else tensor


def _are_finite(tensors: Sequence[Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


class _Case(NamedTuple):
    """A run of one step and its tensors; the gradients of its results are drawn from a seed."""

    call: StepCall
    run: Run
    tensors: tuple[Tensor, ...]
    seed: int
    is_own: bool = False  # the user's module itself runs
    slack: float = 1.0

    @property
    def by_kind(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Elements, states and leaves."""
        count = len(self.call.compiled.elements)
        end = count + len(self.call.compiled.order)
        return list(self.tensors[:count]), list(self.tensors[count:end]), list(self.tensors[end:])

    def with_own_weights(self) -> _Case:
        """Return the case with the cell's weights; the case itself if these are bfloat16."""
        step = self.call.step
        # Programs do not compute in bfloat16.
        if any(leaf.dtype is torch.bfloat16 or leaf.is_inference() for leaf in step.leaves):
            return self
        elements, states, _ = self.by_kind
        return self._replace(
            tensors=(*elements, *states, *step.leaves), is_own=isinstance(step.weights, nn.Module)
        )

    def difference(self, generator: torch.Generator) -> tuple[str, bool]:
        """Return how the program differs from torch's step, or "", and whether a number is finite."""
        # First, so that the reason for a step with an error is torch's.
        want = self.by_torch(self.tensors)
        values, _ = want
        dtype = self.call.step.dtype
        got = self._with_gradients(self.results(), self.tensors)
        with torch.no_grad():
            detached = tuple([tensor.detach() for tensor in self.tensors])
            plain = self._replace(tensors=detached)._step()
        if not all(
            _agree(result, other, other.dtype) for result, other in zip(plain, values, strict=True)
        ):
            return "its step does something else where no gradients are recorded", True
        near: list[_Results] = []
        for kind, name in enumerate(("values", "gradients")):
            for index, (result, other) in enumerate(zip(got[kind], want[kind], strict=True)):
                if _agree(result, other, dtype, slack=self.slack):
                    continue
                near = near or [self.by_torch(self.nudged(generator)) for _ in range(_NUDGES)]
                if not _agree(result, other, dtype, [nudged[kind][index] for nudged in near]):
                    return f"the {name} of its program differ from those of torch", True
        return "", any(bool(tensor.isfinite().any()) for tensor in values if tensor.numel())

    def results(self) -> list[Tensor]:
        """Return the output, if needed, and the final states of the program."""
        output, finals, _ = self.run(self.call, self.tensors)
        return finals if output is None else [output, *finals]

    def loop(self, last: int, long: int, ascending: bool, generator: torch.Generator) -> _Case:
        """Return a run over sequences of up to 3 elements, and a last one of ``last``."""
        elements, states, leaves = self.by_kind
        lengths = torch.arange(len(states[0]), device="cpu") % 4
        lengths[-1] = last
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        rows = torch.randint(len(lengths), (int(offsets[-1]),), generator=generator)
        elements = [tensor.detach()[rows].requires_grad_() for tensor in elements]
        # Near 1, because a cell may divide by a state.
        states = [(1 + 0.1 * state.detach()).requires_grad_() for state in states]
        call = replace(self.call, offsets=offsets, ascending=ascending, long=long)
        return self._replace(call=call, tensors=(*elements, *states, *leaves))

    def by_reference(self) -> list[Tensor]:
        """Return the output and the final states of the loop by the reference kernel."""
        call = self.call
        step = call.step
        elements, states, leaves = self.by_kind
        whole = step.whole(call.compiled.trace.prepares)
        weights = step.weights
        if not call.compiled.trace.reads_itself:
            weights = step.with_tensors(leaves, elements)
        request = Request(whole, elements[0], call.offsets, None, (), (weights,))
        result = reference.run_direction(request, weights, tuple(states), not call.ascending)
        return [cast(Tensor, result.output), *result.state]

    def by_torch(self, tensors: tuple[Tensor, ...]) -> _Results:
        return self._with_gradients(self._replace(tensors=tensors)._step(), tensors)

    def _step(self) -> list[Tensor]:
        elements, states, leaves = self.by_kind
        step = self.call.step
        prepares = self.call.compiled.trace.prepares
        output, new, _ = step.run(
            None if self.is_own else leaves, elements, states, self.call.offsets, prepares
        )
        return [output, *new]

    def nudged(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Return the tensors, with input and states, not masks, moved by a few roundings."""
        elements, states, leaves = self.by_kind

        def near(tensor: Tensor) -> Tensor:
            noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
            factors = 1 + 4 * torch.finfo(tensor.dtype).eps * noise
            return (tensor.detach() * factors).requires_grad_()

        return near(elements[0]), *elements[1:], *map(near, states), *leaves

    def _with_gradients(self, results: list[Tensor], tensors: tuple[Tensor, ...]) -> _Results:
        generator = torch.Generator().manual_seed(self.seed)
        seeds = [
            torch.randn(result.shape, generator=generator, dtype=result.dtype) for result in results
        ]
        leaves = [tensor for tensor in tensors if tensor.requires_grad]
        # A graph that a module built from its parameters before belongs to the module, and is
        # differentiated later.
        keep = not all(tensor.is_leaf for tensor in leaves)
        return results, _gradients(results, seeds, leaves, keep=keep)


def _gradients(
    results: list[Tensor], seeds: list[Tensor], leaves: list[Tensor], *, keep: bool
) -> list[Tensor]:
    """Return the gradients of the leaves, zeros if they have none."""
    pairs = [
        (result, seed) for result, seed in zip(results, seeds, strict=True) if result.requires_grad
    ]
    computed = gradients(pairs, leaves, keep=keep)
    return [
        torch.zeros_like(leaf) if grad is None else grad
        for leaf, grad in zip(leaves, computed, strict=True)
    ]


def _drawn(
    step: Step,
    compiled: CompiledStep,
    run: Run,
    rows: int,
    noise: float,
    generator: torch.Generator,
    machine: Machine,
) -> _Case:
    """Return a case of random numbers."""

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=step.dtype).requires_grad_()

    graph = compiled.trace.result.graph
    elements = [drawn(rows, graph.nodes[node].width) for node in compiled.elements]
    # Rows of the weights are masks of zeros and ones.
    elements[1:] = [(marks > 0).to(step.dtype).requires_grad_() for marks in elements[1:]]
    states = [drawn(rows, size) for size in step.sizes]
    leaves = []
    for leaf in step.leaves:
        if compiled.trace.reads_itself:
            leaves.append(_recordable(step.converted(leaf)))
            continue
        copy = step.converted(leaf.detach())
        if copy.dtype.is_floating_point:
            drawn_noise = torch.randn(copy.shape, generator=generator, dtype=copy.dtype)
            copy = (copy + noise * drawn_noise).requires_grad_()
        leaves.append(copy)
    call = StepCall(
        compiled, step, torch.arange(rows + 1, device="cpu"), True, True, False, machine
    )
    return _Case(
        call, run, (*elements, *states, *leaves), int(torch.randint(2**31, (), generator=generator))
    )


def _agree(
    result: Tensor,
    other: Tensor,
    dtype: torch.dtype,
    near: Sequence[Tensor] = (),
    *,
    slack: float = 1.0,
) -> bool:
    """Return True if two results agree, or differ no more than those ``near`` do.

    ``near`` are results of slightly different numbers.
    """
    result = result.detach()
    other = other.detach()
    finite = other[other.isfinite()]
    scale = 1 + float(finite.abs().max()) if finite.numel() else 1.0
    tolerance = slack * _TOLERANCES[dtype]
    alike = torch.isclose(result, other, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
    if near:
        differences = torch.stack([(tensor.detach() - other).abs() for tensor in near])
        alike |= (result - other).abs() <= 4 * differences.amax(0)
    return bool(alike.all())
