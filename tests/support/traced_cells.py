"""Programs of cells, compared with the reference backend: values and all gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from raglane.cells import CellSpec
from raglane.cells.module import ModuleCell
from raglane.kernels import reference
from raglane.kernels.contract import Request
from raglane.kernels.program.backend import MACHINES, run_loop
from raglane.kernels.program.backward import StepCall
from raglane.programs.compiled import CompiledStep
from raglane.programs.rules import trace
from raglane.programs.step import Step

OFFSETS = torch.tensor([0, 3, 3, 4, 9])  # lengths 3, 0, 1, 5
N, B = 9, 4


def module_cell(module: Any) -> ModuleCell:
    """Wrap a user's module as a cell."""
    sizes, is_tuple = (module.hidden_size,), False
    if hasattr(module, "initial_state"):
        own = module.initial_state(1)
        is_tuple = not isinstance(own, Tensor)
        sizes = tuple(part.shape[1] for part in (own if is_tuple else (own,)))
    size = getattr(module, "output_size", module.hidden_size)
    return ModuleCell(module, output_size=size, state_sizes=sizes, is_tuple=is_tuple)


def compiled_of(
    cell: CellSpec, weights: Any, sizes: tuple[int, ...], output: int, width: int = 5
) -> tuple[CompiledStep, Step]:
    """Return the compiled step of a cell, and its step."""
    step = Step(cell, weights, width, sizes, output, torch.float64)
    return CompiledStep(trace(step)), step


def agree(
    cell: CellSpec,
    weights: Any,
    sizes: tuple[int, ...],
    output: int,
    *,
    width: int = 5,
    need_states: bool = False,
    prepares: bool = True,
) -> CompiledStep:
    """Assert that a program agrees with the reference in both directions, with lengths 0 and 1."""
    compiled, step = compiled_of(cell, weights, sizes, output, width)
    assert compiled.trace.prepares == prepares
    leaves, more = step.leaves, step.elements
    rows = compiled.trace.result.graph.nodes[compiled.elements[0]].width
    x = torch.randn(N, rows, dtype=torch.float64, requires_grad=True)
    states = [torch.randn(B, size, dtype=torch.float64, requires_grad=True) for size in sizes]
    for part in leaves:
        if part.is_leaf and part.dtype.is_floating_point:
            part.requires_grad_()
    tensors = (x, *more, *states, *leaves)
    for ascending in (True, False):
        call = StepCall(compiled, step, OFFSETS, ascending, True, need_states, MACHINES["cpu"])
        mine, finals, steps = run_loop(call, tensors)
        request = Request(
            step.whole(prepares), x, OFFSETS, None, (), (weights,), need_states=need_states
        )
        theirs = reference.run_direction(request, weights, tuple(states), not ascending)
        got: list[Any] = [mine, *finals, *steps]
        want: list[Any] = [theirs.output, *theirs.state, *(theirs.states or ())]
        with torch.no_grad():  # another program, which saves nothing
            bare, *rest = run_loop(call, tensors)
        torch.testing.assert_close(
            [got, [bare, *rest[0], *rest[1]]], [want, want], rtol=1e-9, atol=1e-11
        )
        grads = [torch.randn_like(part) for part in want]
        wished = [part for part in tensors if part.requires_grad]
        for one, other in zip(
            _gradients(got, wished, grads), _gradients(want, wished, grads), strict=True
        ):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)
    return compiled


def _gradients(results: list[Any], leaves: list[Any], grads: list[Tensor]) -> list[Tensor]:
    parts, slopes = zip(
        *((p, g) for p, g in zip(results, grads, strict=True) if p.requires_grad), strict=True
    )
    return list(
        torch.autograd.grad(parts, leaves, slopes, allow_unused=True, materialize_grads=True)
    )


class Sized(nn.Module):
    """The base of user-defined cells."""

    input_size, hidden_size = 5, 4
