"""Random programs for the cpu kernels, and tensors for them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from program_interpreter import run_program
from raglane.kernels.cpu.programs import run
from raglane.programs.program import OPERATIONS, Block, Instruction, Kind, Operand, Program, Weight

_WIDTHS = (1, 2, 5, 8, 16, 17, 33, 64, 70, 128)
# Operations that keep numbers small, so that rounding stays small; and all operations.
_TAME = tuple("add sub mul tanh sigmoid fma neg copy relu max min abs where lt norm".split())
_DOTS = ("row_dot", "column_dot")
_ALL = tuple(name for name in OPERATIONS if name not in ("product", *_DOTS))


@dataclass(frozen=True)
class Case:
    """A program and its inputs."""

    program: Program
    offsets: Tensor
    ascending: bool
    given: dict[str, list[Tensor]]

    def run(self) -> list[Tensor]:
        """Return outputs and final states of the cpu kernels."""
        given: dict[str, Any] = dict(self.given)
        outputs, finals = run(self.program, offsets=self.offsets, ascending=self.ascending, **given)
        return outputs + finals

    def expected(self) -> list[Any]:
        """Return the same, computed by NumPy."""
        given = {
            name: [part.resolve_neg().numpy() for part in parts]
            for name, parts in self.given.items()
        }
        with np.errstate(all="ignore"):
            outputs, finals = run_program(
                self.program, self.offsets.tolist(), ascending=self.ascending, **given
            )
        return outputs + finals

    def to(self, dtype: torch.dtype) -> Case:
        """Return the same case in another dtype."""
        return replace(
            self,
            given={name: [part.to(dtype) for part in parts] for name, parts in self.given.items()},
        )

    def sequence(self, number: int) -> Case:
        """Return the case of one sequence of the batch."""
        begin, end = self.offsets[number : number + 2].tolist()
        rows = {"elements": slice(begin, end), "sequences": slice(number, number + 1)}
        rows["states"] = rows["sequences"]
        given = {
            name: [part[rows.get(name, slice(None))] for part in parts]
            for name, parts in self.given.items()
        }
        return replace(self, offsets=torch.tensor([0, end - begin]), given=given)


def draw_lengths(chance: Random) -> list[int]:
    """Draw lengths of a batch, often 0 or 1."""
    return [chance.choice([0, 1, 1, 2, 3, 5, 12]) for _ in range(chance.choice([0, 1, 2, 7, 20]))]


def tensors_for(program: Program, lengths: list[int], *, ascending: bool = True) -> Case:
    """Return random inputs of a program, in float64."""
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    count, batch = int(offsets[-1]), len(lengths)

    def rows(kind: Kind, *size: int) -> list[Tensor]:
        return [torch.randn(*size, width, dtype=torch.float64) for width in program.widths(kind)]

    weights = [
        torch.randn(each.groups, each.rows, each.depth, dtype=torch.float64) * 0.5 / each.depth**0.5
        for each in program.weights
    ]
    given = {
        "elements": rows("element", count),
        "sequences": rows("sequence", batch),
        "states": rows("state", batch),
        "vectors": rows("vector"),
        "weights": weights,
    }
    return Case(program, offsets, ascending, given)


class _Drawing:
    """A program that is being drawn, with the blocks that may be read."""

    def __init__(self, chance: Random, names: tuple[str, ...]) -> None:
        self.chance, self.names = chance, names
        self.blocks: list[Block] = []
        self.readable: list[int] = []  # blocks
        self.weights: list[Weight] = []
        self.instructions: list[Instruction] = []
        for kind, most in (("element", 3), ("sequence", 1), ("state", 3), ("vector", 2)):
            for index in range(chance.randint(1 if kind == "element" else 0, most)):
                self.readable.append(self.block(kind, chance.choice(_WIDTHS), index))  # type: ignore[arg-type]

    def block(self, kind: Kind, width: int, index: int = 0) -> int:
        self.blocks.append(Block(kind, width, index))
        return len(self.blocks) - 1

    def operand(self, width: int, *, whole: bool = False, avoid: int = -1) -> Operand:
        """Draw readable columns, one column that is spread, or a number."""
        chance = self.chance
        fits = [b for b in self.readable if self.blocks[b].width >= width and b != avoid]
        if fits and (whole or chance.random() < 0.8):
            block = chance.choice(fits)
            return Operand(
                block, chance.choice([0, chance.randint(0, self.blocks[block].width - width)])
            )
        others = [b for b in self.readable if b != avoid]
        if others and chance.random() < 0.6:
            block = chance.choice(others)
            return Operand(block, chance.randint(0, self.blocks[block].width - 1), spread=True)
        return Operand(-1, number=chance.choice([0.0, 1.0, -0.5, 1.5]))

    def result(self, width: int, operands: tuple[Operand, ...] = ()) -> Operand:
        """Draw columns of a new local block, or the place of an operand."""
        for place in operands:
            if (
                place.block >= 0
                and self.blocks[place.block].kind == "local"
                and self.chance.random() < 0.3
            ):
                clash = any(
                    other.block == place.block and (other.spread or other.start != place.start)
                    for other in operands
                )
                if not place.spread and not clash:
                    return place
        wider = self.chance.choice([0, 0, 0, 3])
        block = self.block("local", width + wider)
        if not wider:
            self.readable.append(block)
        return Operand(block, self.chance.randint(0, wider))

    def add(self, name: str, width: int) -> None:
        chance = self.chance
        results: tuple[Operand, ...]
        segments = chance.choice([s for s in (1, 2, 3, 4) if width % s == 0])
        if name == "gather":
            from_ = self.operand(1, whole=True)
            if from_.block < 0 or from_.spread:
                return
            rest = self.blocks[from_.block].width - from_.start
            columns = tuple(chance.randrange(rest) for _ in range(width))
            made = Instruction(name, (self.result(width),), (from_,), width, columns=columns)
        elif name == "product":
            sizes = [1, 1, 2, 3], [1, 5, 16, 33, 70], [1, 4, 17]
            groups, rows, depth = map(chance.choice, sizes)
            self.weights.append(Weight(groups, rows, depth))
            parts = chance.choice([1, 1, 2, 3])
            width = parts * groups * rows
            operands = self.operand(width), self.operand(parts * groups * depth)
            made = Instruction(
                name, (self.result(width),), operands, width, parts, weight=len(self.weights) - 1
            )
        elif name in ("row_sum", "row_max", "row_cumsum", "norm", "norm_backward"):
            widths = (width, width, segments) if name == "norm_backward" else (width,)
            operands_ = tuple(self.operand(size) for size in widths)
            results = (self.result(segments if name in ("row_sum", "row_max") else width),)
            if name == "norm":
                results = (*results, self.result(segments))
            made = Instruction(
                name, results, operands_, width, segments, 0.1 if name == "norm" else 0.0
            )
        else:
            operands_ = tuple(self.operand(width) for _ in range(OPERATIONS[name]))
            made = Instruction(name, (self.result(width, operands_),), operands_, width)
        self.instructions.append(made)

    def add_some(self) -> None:
        """Add operations."""
        for _ in range(self.chance.randint(1, 14)):
            name = "product" if self.chance.random() < 0.2 else self.chance.choice(self.names)
            self.add(name, self.chance.choice(_WIDTHS))

    def program(self) -> Program:
        """Return the program of the operations."""
        chance = self.chance
        outputs = []
        for _ in range(chance.randint(0, 3)):
            width = chance.choice(_WIDTHS)
            outputs.append((self.operand(width), width))
        states = [block for block in self.blocks if block.kind == "state"]
        # Bounded, so that it does not grow from step to step.
        next_states = []
        for state in states:
            if chance.random() < 0.3:
                next_states.append(self.operand(state.width))
                continue
            to = Operand(self.block("local", state.width))
            self.instructions.append(
                Instruction("tanh", (to,), (self.operand(state.width),), state.width)
            )
            next_states.append(to)
        return Program(
            tuple(self.blocks),
            tuple(self.weights),
            tuple(self.instructions),
            tuple(outputs),
            tuple(next_states),
        )


def draw(chance: Random, *, tame: bool = True) -> Program:
    """Draw a program; a tame one has only operations that keep numbers small."""
    # The norm of a constant row is only rounding, which a comparison would amplify.
    without = chance.choice([("norm",), ("lt", "where")])
    names = tuple(name for name in _TAME if name not in without) if tame else _ALL
    drawing = _Drawing(chance, names)
    drawing.add_some()
    return drawing.program()


class _Matrices(_Drawing):
    """Programs on matrices of some rows and columns, which read and overwrite each other."""

    def __init__(self, chance: Random) -> None:
        self.rows = chance.choice([1, 4, 6, 12, 70])
        self.columns = chance.choice([1, 3, 16, 33, 64])
        self.chance, self.names = chance, ()
        self.blocks, self.readable, self.weights, self.instructions = [], [], [], []
        size = self.rows * self.columns
        for kind, width in (
            ("element", size),
            ("element", self.rows + 3 * self.columns),
            ("state", size),
            ("state", self.columns),
            ("vector", size + 3),
        ):
            index = sum(block.kind == kind for block in self.blocks)
            self.readable.append(self.block(kind, width, index))  # type: ignore[arg-type]

    def along(self, groups: int) -> Operand:
        """Draw an operand on the matrix."""
        along = self.chance.choice(["", "", "rows", "columns", "number"])
        if along in ("", "number"):
            return self.operand(self.rows * self.columns if along == "" else 1 << 20)
        width = self.rows if along == "rows" else groups * self.columns
        fits = [block for block in self.readable if self.blocks[block].width >= width]
        if not fits:
            return self.operand(1 << 20)
        block = self.chance.choice(fits[-4:])
        start = self.chance.choice([0, self.blocks[block].width - width])
        return Operand(block, start, along=along)  # type: ignore[arg-type]

    def add_matrix(self) -> None:
        """Add an operation on the matrix."""
        chance = self.chance
        groups = chance.choice([g for g in (1, 1, 2, 3) if self.rows % g == 0])
        name = chance.choice(["fma", "mul", "sub", "tanh", "max", *_DOTS, *_DOTS])
        operands = tuple(self.along(groups) for _ in range(OPERATIONS[name]))
        width = self.rows * self.columns
        if name in _DOTS:
            size = self.rows if name == "row_dot" else groups * self.columns
            result = self.result(size)
        else:
            alike = tuple(operand for operand in operands if not operand.along)
            is_read = any(operand.along for operand in operands)
            result = self.result(width, () if is_read else alike)
        self.instructions.append(
            Instruction(name, (result,), operands, width, self.rows, groups=groups)
        )
        if name in _DOTS and chance.random() < 0.5:
            self.instructions.append(Instruction("tanh", (result,), (result,), size))


def draw_matrices(chance: Random) -> Program:
    """Draw a program of operations on matrices."""
    drawing = _Matrices(chance)
    for _ in range(chance.randint(1, 9)):
        drawing.add_matrix()
    return drawing.program()
