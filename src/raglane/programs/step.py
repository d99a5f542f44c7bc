"""A cell's step with the weights of a call: its key, torch's way to run it, and its trace."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from raglane.cells.module import ModuleCell
from raglane.cells.spec import CellSpec
from raglane.programs.graph import DEPENDS, Refused, Result
from raglane.programs.rules import RULES
from raglane.programs.trace import Trace, Tracer, draws_random_numbers, rows_for
from raglane.programs.weights import Survey, cell_key, replaced, survey


class Step:
    """One step of a cell with certain weights, as a function of all tensors that it reads."""

    def __init__(
        self, cell: CellSpec, weights: Any, width: int, sizes: tuple[int, ...], output: int, dtype: torch.dtype
    ) -> None:
        self.cell, self.given = cell, weights
        self.width, self.sizes, self.output, self.dtype = width, sizes, output, dtype
        found = survey(weights)
        self.leaves, self.elements = found.leaves, found.elements
        # All that decides what is computed; and what stands in classes, which may be changed while the process lives.
        self.facts = cell_key(cell), found.key, width, sizes, output, dtype
        self.key = (self.facts, *found.classes)

    def converted(self, part: Tensor) -> Tensor:
        """A tensor in the dtype that is computed in: bfloat16 is widened."""
        return part.to(self.dtype) if part.dtype is torch.bfloat16 else part

    @property
    def widths(self) -> list[int]:
        """Columns of the input and of each tensor that has a row for each element."""
        return [self.width, *(part.shape[1] for part in self.elements)]

    def whole(self, prepares: bool) -> CellSpec:
        """A cell that takes this step, whatever stands before it."""
        return self.cell if prepares else _Bare(self.cell)

    def weights(self, leaves: list[Tensor], elements: list[Tensor]) -> Any:
        """The weights with these tensors."""
        swapped = {id(part): leaves[index] for index, part in enumerate(self.leaves)}
        swapped |= {id(part): elements[index + 1] for index, part in enumerate(self.elements)}
        return replaced(self.given, lambda part: swapped[id(part)])

    def run(
        self,
        leaves: list[Tensor] | None,
        elements: list[Tensor],
        states: list[Tensor],
        offsets: Tensor,
        prepares: bool,
    ) -> tuple[Tensor, tuple[Tensor, ...], bool]:
        """One step in torch: output, new states, and whether it changed its module; no leaves for a module as it is."""
        weights = self.given if leaves is None else self.weights(leaves, elements)
        before = _held(weights)
        rows = self.cell.prepare(weights, elements[0], offsets) if prepares else elements[0]
        output, new = self.cell.step(weights, rows, tuple(states))
        return output, new, before != _held(weights)


class _Bare(CellSpec):
    """A cell that is given what another one has prepared."""

    def __init__(self, inner: CellSpec) -> None:
        self.name, self.step = inner.name, inner.step  # type: ignore[method-assign]

    def prepare(self, weights: Any, values: Tensor, offsets: Tensor) -> Tensor:  # noqa: ARG002
        return values

    def step(self, weights: Any, prepared: Tensor, state: Any, mask: Any = None) -> Any:
        raise NotImplementedError


def _held(weights: Any) -> Any:
    """What modules hold, with tensors by their identity."""
    if not isinstance(weights, nn.Module):
        return None
    found = Survey(by_identity=True)
    return found.module(weights), found.classes


def plainly() -> Any:
    """Whatever mode of torch's functions is at work, such as the one that computes row by row, is left out."""
    return torch._C.DisableTorchFunction()


def trace(step: Step) -> Trace:
    """Trace a step; a Refused says why it cannot become a program."""
    # With what a cell prepares inside, all that depends on a row is computed in one order of sums.
    try:
        return _traced(step, True)
    except Refused:
        if isinstance(step.cell, ModuleCell) and not hasattr(step.given, "prepare"):
            raise
    return _traced(step, False)


def _traced(step: Step, prepares: bool) -> Trace:
    # Numbers are computed as in any other call, whatever stands around this one.
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False), plainly():
        widths = step.widths if prepares else [_prepared_width(step), *step.widths[1:]]
        dims = [size for part in step.leaves for size in part.shape]
        tracer = Tracer(step.dtype, rows_for([*widths, *step.sizes, step.output, *dims, math.prod(step.sizes)]), RULES)
        leaves = [tracer.leaf(step.converted(part.detach()), part) for part in step.leaves]
        offsets = tracer.nothing(tracer.rows + 1, dtype=torch.int64)
        elements = [tracer.source("element", width) for width in widths]
        states = [tracer.source("state", size) for size in step.sizes]
        rows = [part for part, _ in elements], [part for part, _ in states]
        try:
            (found, new, changed), drew = draws_random_numbers(
                lambda: tracer.run(lambda: step.run(leaves, *rows, offsets, prepares))
            )
        except Refused:
            raise
        except Exception as error:
            raise Refused(f"tracing it raised {type(error).__name__}: {error}") from error
        if drew:
            raise Refused(f"it draws random numbers inside the step, {DEPENDS}")
        if changed:
            raise Refused(f"it changes its own attributes, {DEPENDS}")
        if len(new) != len(step.sizes):
            raise Refused("it gives another number of states than it takes")
        columns = tracer.columns(found, step.output)
        after = [tracer.columns(part, size) for part, size in zip(new, step.sizes, strict=True)]
        nodes = [index for _, index in elements], [index for _, index in states]
        return tracer.finish(Result(tracer.graph, *nodes, [], columns, after), prepares)


def _prepared_width(step: Step) -> int:
    dtype = next((part.dtype for part in step.leaves if part.dtype.is_floating_point), step.dtype)
    try:
        rows = torch.zeros(1, step.width, dtype=dtype, device="cpu")
        prepared = step.cell.prepare(step.given, rows, torch.tensor([0, 1], device="cpu"))
    except Exception as error:
        raise Refused(f"what it prepares raised {type(error).__name__}: {error}") from error
    return int(prepared.shape[1])
