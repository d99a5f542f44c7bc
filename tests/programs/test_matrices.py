"""Cells with a matrix in each row: values and gradients of their programs, and that no matrix is
copied to repeat or to turn it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raglane.programs.compiled import CompiledStep, Wanted
from raglane.programs.program import Program
from traced_cells import agree, module_cell

Step = Callable[["Memory", Tensor, Tensor], tuple[Tensor, Tensor]]


class Memory(nn.Module):
    """A cell whose state is a matrix, or one for each head."""

    def __init__(self, step: Step, *shape: int, gates: int) -> None:
        super().__init__()
        self.shape = shape
        self.input_size, self.hidden_size = 5, math.prod(shape)
        self.output_size = shape[-1] * (shape[0] if len(shape) == 3 else 1)
        self.gates = nn.Linear(5, gates)
        self.rule = step

    def step(self, x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One step."""
        read, memory = self.rule(self, self.gates(x_t), state.unflatten(1, self.shape))
        return read.flatten(1), memory.flatten(1)


def fast_weights(cell: Memory, gates: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    v, k, q, decay = gates.split([*cell.shape, cell.shape[1], 1], 1)
    memory = memory * decay.sigmoid().unsqueeze(2) + v.unsqueeze(2) * k.unsqueeze(1)
    # Both ways to read it: rows of one are columns of the other.
    return torch.bmm(memory.mT, torch.bmm(memory, q.unsqueeze(2)).tanh()).squeeze(2), memory.tanh()


def delta_rule(cell: Memory, gates: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    v, k, q = gates.split([cell.shape[0], cell.shape[1], cell.shape[0]], 1)
    k = nn.functional.normalize(k, dim=1)
    error = v - torch.einsum("bij,bj->bi", memory, k)
    memory = memory + 0.5 * torch.einsum("bi,bj->bij", error, k)
    return torch.einsum("bij,bi->bj", memory, q), memory.sin()


def slots(cell: Memory, gates: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    query, erased, added = gates.split([cell.shape[1]] * 3, 1)
    weights = torch.einsum("bsd,bd->bs", memory, query).softmax(1)
    read = torch.einsum("bs,bsd->bd", weights, memory)
    memory = memory * (1 - torch.einsum("bs,bd->bsd", weights, erased.sigmoid()))
    return read, memory + weights.unsqueeze(2) * added.tanh().unsqueeze(1)


def turned(cell: Memory, gates: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """The memory is stored by its columns."""
    by_column = memory.mT
    v, k, q = gates.split([cell.shape[1], cell.shape[0], cell.shape[1]], 1)
    by_column = by_column * 0.9 + torch.einsum("bi,bj->bij", v, k)
    gate = torch.einsum("bij,bi->bj", by_column, q).sigmoid()
    memory = torch.lerp(by_column, torch.einsum("bj,bi->bij", k, v), gate.unsqueeze(1)).mT
    return (memory * gate.unsqueeze(2)).sum(1), memory


def heads(cell: Memory, gates: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    count, rows, columns = cell.shape
    v, k, q, decay = gates.split([count * rows, count * columns, count * rows, count], 1)
    v, q = (part.unflatten(1, (count, rows)) for part in (v, q))
    k = k.unflatten(1, (count, columns)).softmax(2)
    memory = memory * decay.sigmoid()[:, :, None, None] + v.unsqueeze(3) * k.unsqueeze(2)
    seen = (memory @ k.unsqueeze(3)).squeeze(3)
    memory = memory - 0.5 * seen.tanh().unsqueeze(3) * k.unsqueeze(2)
    return torch.einsum("bhij,bhi->bhj", memory, q), memory


CELLS: dict[str, tuple[Step, tuple[int, ...], int]] = {
    "fast weights": (fast_weights, (8, 19), 8 + 19 + 19 + 1),
    "fast weights, square": (fast_weights, (16, 16), 3 * 16 + 1),
    "delta rule": (delta_rule, (20, 33), 20 + 33 + 20),
    "slots": (slots, (5, 24), 3 * 24),
    "slots, square": (slots, (16, 16), 3 * 16),
    "turned": (turned, (8, 17), 17 + 8 + 17),
    "heads": (heads, (3, 4, 16), 3 * (4 + 16 + 4 + 1)),
    "heads, square": (heads, (2, 16, 16), 2 * (3 * 16 + 1)),
}


def programs_of(compiled: CompiledStep) -> list[Program]:
    """Return the programs of training."""
    weights = compiled.trace.parameters.weights
    sizes = (compiled.elements, compiled.unchanged, compiled.vectors, weights)
    wanted: Any = Wanted(True, False, *[(True,) * len(nodes) for nodes in sizes])
    forward, backward = compiled.forward(True, False, wanted), compiled.backward(wanted)
    return [forward.lowered.program, backward.lowered.program]


@pytest.mark.parametrize("name", CELLS)
def test_a_cell_with_a_matrix_in_each_row(name: str) -> None:
    rule, shape, gates = CELLS[name]
    module = Memory(rule, *shape, gates=gates).double()
    compiled = agree(module_cell(module), module, (module.hidden_size,), module.output_size)
    size = module.hidden_size
    for program in programs_of(compiled):
        operations = [instruction.operation for instruction in program.instructions]
        assert {"row_dot", "column_dot"} & set(operations)
        for instruction in program.instructions:
            assert instruction.operation != "gather" or instruction.width < size


@pytest.mark.parametrize("name", CELLS)
def test_programs_without_operations_on_matrices(name: str) -> None:
    rule, shape, gates = CELLS[name]
    module = Memory(rule, *shape, gates=gates).double()
    compiled = agree(module_cell(module), module, (module.hidden_size,), module.output_size)
    for program in programs_of(CompiledStep(compiled.trace, has_matrices=False)):
        assert not any(instruction.groups > 1 for instruction in program.instructions)
        assert not any(operand.along for step in program.instructions for operand in step.operands)
