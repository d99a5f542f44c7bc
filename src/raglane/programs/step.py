"""A cell's step as one function of tensors, and its trace."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from raglane.cells.spec import CellSpec
from raglane.programs.graph import DEPENDS, Refused, Result
from raglane.programs.rules import RULES
from raglane.programs.trace import Trace, Tracer, draws_random_numbers, rows_for
from raglane.programs.weights import Survey, replaced

__all__ = ["Step", "trace"]


class Step:
    """One step of a cell with certain weights, as a function of all tensors that it reads.

    Args:
        cell: the equations.
        weights: what it reads, for everything but their tensors.
        found: the survey of ``weights``.
        prepares: whether what the cell prepares is a part of the step; else the step is given it.

    Attributes:
        given: ``weights``.
    """

    def __init__(self, cell: CellSpec, weights: Any, found: Survey, prepares: bool) -> None:
        self.cell, self.prepares = cell, prepares
        self.given = weights
        self._names = {id(part): ("leaf", index) for index, part in enumerate(found.leaves)}
        self._names |= {id(part): ("element", index + 1) for index, part in enumerate(found.elements)}

    @property
    def whole(self) -> CellSpec:
        """A cell that takes this step, whatever stands before it."""
        return self.cell if self.prepares else _Bare(self.cell)

    def weights(self, leaves: list[Tensor], elements: list[Tensor]) -> Any:
        """The weights with these tensors."""

        def swap(part: Tensor) -> Tensor:
            kind, index = self._names[id(part)]
            return leaves[index] if kind == "leaf" else elements[index]

        return replaced(self.given, swap)

    def run(
        self, leaves: list[Tensor] | None, elements: list[Tensor], states: list[Tensor], offsets: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...], bool]:
        """One step of as many sequences as there are rows.

        Args:
            leaves: in place of the survey's; None for a module as it is.
            elements: the rows of the input, or of what was prepared; and in place of the survey's.
            states: ``(R, size)`` each.
            offsets: of sequences of one element each.

        Returns:
            The output, the new states, and whether the step changed what its module holds.
        """
        weights = self.given if leaves is None else self.weights(leaves, elements)
        before = _held(weights)
        rows = self.cell.prepare(weights, elements[0], offsets) if self.prepares else elements[0]
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


def trace(
    step: Step,
    given: list[Tensor],
    originals: list[Tensor],
    widths: list[int],
    sizes: tuple[int, ...],
    output: int,
    dtype: torch.dtype,
) -> Trace:
    """Trace a step."""
    dims = [size for part in given for size in part.shape]
    tracer = Tracer(dtype, rows_for([*widths, *sizes, output, *dims, math.prod(sizes)]), RULES)
    leaves: list[Tensor] = [tracer.leaf(*pair) for pair in zip(given, originals, strict=True)]
    offsets = tracer.nothing(tracer.rows + 1, dtype=torch.int64)
    elements = [tracer.source("element", width) for width in widths]
    states = [tracer.source("state", size) for size in sizes]

    rows = [part for part, _ in elements], [part for part, _ in states]
    try:
        (found, new, changed), drew = draws_random_numbers(lambda: tracer.run(lambda: step.run(leaves, *rows, offsets)))
    except Refused:
        raise
    except Exception as error:
        raise Refused(f"tracing it raised {type(error).__name__}: {error}") from error
    if drew:
        raise Refused(f"it draws random numbers inside the step, {DEPENDS}")
    if changed:
        raise Refused(f"it changes its own attributes, {DEPENDS}")
    if len(new) != len(sizes):
        raise Refused("it gives another number of states than it takes")
    columns = tracer.columns(found, output)
    after = [tracer.columns(part, size) for part, size in zip(new, sizes, strict=True)]
    nodes = [index for _, index in elements], [index for _, index in states]
    result = Result(tracer.graph, *nodes, [], columns, after)
    return tracer.finish(result)
