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
                for own in (case, case.with_own_weights()):
                    reason, is_finite = own.difference(generator)
                    if reason:
                        return reason
                    has_finite = has_finite or is_finite
    except Exception as error:
        return (
            f"its program could not be verified: {type(error).__name__}: {str(error).rstrip('.')}"
        )
    return (
        ""
        if has_finite
        else "its program could not be verified: one step of torch gives no finite number"
    )


def verify_loop(
    step: Step, compiled: CompiledStep, run: Run, machine: Machine, slack: float
) -> str:
    """Return how a loop over sequences of a few lengths differs from the reference; empty if they
    agree.

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
                lengths = torch.arange(19, device="cpu") % 4
                lengths[-1] = last
                offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
                elements, states, leaves = case.parts
                rows = torch.randint(19, (int(offsets[-1]),), generator=generator)
                elements = [part.detach()[rows].requires_grad_() for part in elements]
                # Near 1, because a cell may divide by a state.
                states = [(1 + 0.1 * part.detach()).requires_grad_() for part in states]
                tensors = *elements, *states, *leaves
                call = replace(case.call, offsets=offsets, ascending=ascending, long=long)
                output, finals, _ = run(call, tensors)
                if long < LONG:
                    right, last_states, _ = run(replace(call, long=LONG), tensors)
                else:
                    whole = step.whole(compiled.trace.prepares)
                    weights = (
                        step.weights
                        if compiled.trace.reads_itself
                        else step.with_tensors(leaves, elements)
                    )
                    request = Request(whole, elements[0], offsets, None, (), (weights,))
                    ran = reference.run_direction(request, weights, tuple(states), not ascending)
                    right = ran.output
                    last_states = list(ran.state)
                got = [cast(Tensor, output), *finals]
                want = [cast(Tensor, right), *last_states]
                seeds = [torch.randn(part.shape, generator=generator) for part in want]
                wished = [part for part in tensors if part.requires_grad]
                for results in (got, want):
                    pairs = [
                        pair for pair in zip(results, seeds, strict=True) if pair[0].requires_grad
                    ]
                    found = gradients(pairs, wished, keep=True)
                    results += [
                        torch.zeros_like(to) if part is None else part
                        for part, to in zip(found, wished, strict=True)
                    ]
                if not all(
                    _agree(*pair, step.dtype, slack=slack) for pair in zip(got, want, strict=True)
                ):
                    return "its kernel differs from torch over several steps"
    except Exception as error:
        return f"its kernel could not be verified: {type(error).__name__}: {str(error).rstrip('.')}"
    return ""


def verify_call(
    call: StepCall, tensors: tuple[Tensor, ...], finals: Sequence[Tensor], run: Run
) -> str:
    """Compare a program with the module as it is, on the first row that each sequence of a call
    reads, from its initial and from its final state.
    """
    count = len(call.compiled.elements)
    end = count + len(call.compiled.order)
    with default_modes(grad=True):
        starts = call.offsets[:-1]
        ends = call.offsets[1:]
        rows = torch.arange(len(starts), device="cpu")[ends > starts]
        first = starts[rows] if call.ascending else ends[rows] - 1
        given = [part.detach().index_select(0, first) for part in tensors[:count]]
        given += [part.detach().index_select(0, rows) for part in tensors[count:end]]
        if not len(rows) or not all(bool(part.isfinite().all()) for part in given):
            return ""
        # Zeros, the usual initial states, hide all that is multiplied by a state.
        last = [part.detach().index_select(0, rows) for part in finals]
        if all(bool(part.isfinite().all()) for part in last):
            pairs = zip(given, [*given[:count], *last], strict=True)
            given = [torch.cat(pair) for pair in pairs]
        offsets = torch.arange(given[0].shape[0] + 1, device="cpu")
        one = replace(call, offsets=offsets, ascending=True, need_output=True, need_states=False)
        try:
            case = _Case(one, run, (*[part.requires_grad_() for part in given], *tensors[end:]), 0)
            reason, _ = case.with_own_weights().difference(torch.Generator().manual_seed(0))
        except Exception as error:
            return f"its program could not be verified: {type(error).__name__}: {str(error).rstrip('.')}"
    return reason


class _Case(NamedTuple):
    """A run of one step and its tensors; the gradients of its results are drawn from a seed."""

    call: StepCall
    run: Run
    tensors: tuple[Tensor, ...]
    seed: int
    is_own: bool = False  # the user's module itself runs
    slack: float = 1.0

    @property
    def parts(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Elements, states and leaves."""
        count = len(self.call.compiled.elements)
        end = count + len(self.call.compiled.order)
        return list(self.tensors[:count]), list(self.tensors[count:end]), list(self.tensors[end:])

    def with_own_weights(self) -> _Case:
        """Return the case with the cell's weights; in bfloat16, in which programs do not compute,
        the case itself.
        """
        step = self.call.step
        if any(part.dtype is torch.bfloat16 or part.is_inference() for part in step.leaves):
            return self
        elements, states, _ = self.parts
        return self._replace(
            tensors=(*elements, *states, *step.leaves), is_own=isinstance(step.weights, nn.Module)
        )

    def difference(self, generator: torch.Generator) -> tuple[str, bool]:
        """Return how the program differs from torch's step (empty if not), and True if a number was
        finite.
        """
        want = self.by_torch(
            self.tensors
        )  # first, so that the reason for a step with an error is torch's
        output, finals, _ = self.run(self.call, self.tensors)
        got = self._with_gradients(
            [part for part in (output, *finals) if part is not None], self.tensors
        )
        with torch.no_grad():
            plain = self._replace(tensors=tuple([part.detach() for part in self.tensors]))._step()
        if not all(
            _agree(one, other, other.dtype) for one, other in zip(plain, want[0], strict=True)
        ):
            return "its step does something else where no gradients are recorded", True
        near: list[_Results] = []
        for index, kind in enumerate(("values", "gradients")):
            for place, (one, other) in enumerate(zip(got[index], want[index], strict=True)):
                if _agree(one, other, self.call.step.dtype, slack=self.slack):
                    continue
                near = near or [self.by_torch(self.nudged(generator)) for _ in range(_NUDGES)]
                if not _agree(
                    one, other, self.call.step.dtype, [results[index][place] for results in near]
                ):
                    return f"the {kind} of its program differ from those of torch", True
        return "", any(bool(part.isfinite().any()) for part in want[0] if part.numel())

    def by_torch(self, tensors: tuple[Tensor, ...]) -> _Results:
        return self._with_gradients(self._replace(tensors=tensors)._step(), tensors)

    def _step(self) -> list[Tensor]:
        elements, states, leaves = self.parts
        step = self.call.step
        prepares = self.call.compiled.trace.prepares
        output, new, _ = step.run(
            None if self.is_own else leaves, elements, states, self.call.offsets, prepares
        )
        return [output, *new]

    def nudged(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Return the tensors, with input and states moved by a few roundings; masks and weights do
        not change.
        """
        elements, states, leaves = self.parts

        def near(part: Tensor) -> Tensor:
            noise = torch.randn(part.shape, generator=generator, dtype=part.dtype)
            return (part.detach() * (1 + 4 * torch.finfo(part.dtype).eps * noise)).requires_grad_()

        return near(elements[0]), *elements[1:], *map(near, states), *leaves

    def _with_gradients(self, results: list[Tensor], tensors: tuple[Tensor, ...]) -> _Results:
        generator = torch.Generator().manual_seed(self.seed)
        grads = [torch.randn(part.shape, generator=generator, dtype=part.dtype) for part in results]
        wished = [part for part in tensors if part.requires_grad]
        pairs = [pair for pair in zip(results, grads, strict=True) if pair[0].requires_grad]
        # A graph that a module built from its parameters before belongs to the module, and is
        # differentiated later.
        computed = gradients(pairs, wished, keep=not all(part.is_leaf for part in wished))
        return results, [
            torch.zeros_like(part) if grad is None else grad
            for part, grad in zip(wished, computed, strict=True)
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
            given = (
                given + noise * torch.randn(given.shape, generator=generator, dtype=given.dtype)
            ).requires_grad_()
        leaves.append(given)
    call = StepCall(
        compiled, step, torch.arange(rows + 1, device="cpu"), True, True, False, machine
    )
    return _Case(
        call, run, (*elements, *states, *leaves), int(torch.randint(2**31, (), generator=generator))
    )


def _agree(
    one: Tensor,
    other: Tensor,
    dtype: torch.dtype,
    near: Sequence[Tensor] = (),
    *,
    slack: float = 1.0,
) -> bool:
    """Return True if two results agree, or differ no more than results ``near`` of slightly
    different numbers.
    """
    one = one.detach()
    other = other.detach()
    finite = other[other.isfinite()]
    scale = 1 + float(finite.abs().max()) if finite.numel() else 1.0
    tolerance = slack * _TOLERANCES[dtype]
    alike = torch.isclose(one, other, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
    if near:
        alike |= (one - other).abs() <= 4 * torch.stack(
            [(part.detach() - other).abs() for part in near]
        ).amax(0)
    return bool(alike.all())
