"""What a program is: one step of a cell, forward or backward, as a list of instructions.

A program is data. What runs one (the cpu kernels, or an interpreter of a few lines) needs to know nothing of the cell,
of torch or of gradients: a backward pass is a program like any other, run from the last element of a sequence to the
first, whose states are gradients.

A step computes rows side by side, one row for each sequence that runs; rows never meet. What a row reads and writes
lies in blocks. A block is ``(rows, width)``, or ``(width,)`` where all rows share it:

========  =====================  ==========================================================================
kind      given as               what it holds in a step
========  =====================  ==========================================================================
element   ``(N, width)``         the row of the element that is computed now
sequence  ``(B, width)``         the row of the sequence: the same in all of its steps
state     ``(B, width)``         what the step before it left as the next state, at first the initial state
vector    ``(width,)``           the same for all rows: a bias, a gain
local     nothing                what the step computes; at its start it holds nothing that may be read
========  =====================  ==========================================================================

Only locals are written by instructions. When all instructions of a step are done, ``outputs`` are written to the rows
of their elements, and ``next_states`` become the states: both read locals, or any other block.

Numbers are all of one dtype, float32 or float64. A comparison gives 1 or 0; what asks for truth (``where``, ``and``,
``or``, ``not``) takes all but 0 for true. NaN spreads through every operation, ``max``, ``min`` and ``relu`` included,
but not through ``where``, which only chooses, nor through comparisons, where it is unequal to all, nor through a power
of 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["element", "sequence", "state", "vector", "local"]
KINDS: tuple[Kind, ...] = get_args(Kind)

OPERATIONS: dict[str, int] = {
    # One number at a time: how many operands.
    **dict.fromkeys(("copy", "neg", "abs", "sign", "not", "relu", "exp", "expm1", "log", "log1p", "sqrt"), 1),
    **dict.fromkeys(("rsqrt", "reciprocal", "sigmoid", "tanh", "erf", "sin", "cos", "floor", "round"), 1),
    **dict.fromkeys(
        ("add", "sub", "mul", "div", "max", "min", "lt", "le", "gt", "ge", "eq", "ne", "and", "or", "pow"), 2
    ),
    "sigmoid_backward": 2,
    "tanh_backward": 2,
    "fma": 3,
    "where": 3,
    # A row at a time.
    "row_sum": 1,
    "row_max": 1,
    "norm": 1,
    "norm_backward": 3,
    "row_cumsum": 1,
    "gather": 1,
    "product": 2,
}
"""Every operation by its name, with the number of operands. ``w`` is the instruction's ``width``.

One number at a time, on ``w`` columns: ``copy a``; ``neg a``; ``abs a``; ``sign a`` (-1, 0 or 1); ``not a``; ``relu
a``; ``exp a``; ``expm1 a``; ``log a``; ``log1p a``; ``sqrt a``; ``rsqrt a`` = 1 / sqrt(a); ``reciprocal a``;
``sigmoid a``; ``tanh a``; ``erf a``; ``sin a``; ``cos a``; ``floor a``; ``round a``, halves to the even; ``add a b``;
``sub a b`` = a - b; ``mul a b``; ``div a b`` = a / b; ``max a b``; ``min a b``; ``lt a b`` = a < b, and so on; ``and a
b``; ``or a b``; ``pow a b`` = a to the power b; ``sigmoid_backward g y`` = g * y * (1 - y); ``tanh_backward g y`` = g *
(1 - y * y); ``fma a b c`` = a * b + c, rounded once; ``where a b c`` = b where a is true, else c.

A row at a time, each in ``segments`` parts of ``w / segments`` columns that follow each other:

- ``row_sum a``, ``row_max a``: of ``w`` columns, one number for each part, so ``segments`` columns.
- ``norm a``: two results: ``w`` columns of (a - mean) * r, and ``segments`` columns of r = 1 / sqrt(variance +
  epsilon). Mean and variance are those of a part; the variance divides by its number of columns.
- ``norm_backward g y r``: r * (g - mean(g) - y * mean(g * y)), where y and r are the results of ``norm``.
- ``row_cumsum a``: column j is the sum of the columns of its part up to j, one after the other.
- ``gather a``: column j is column ``columns[j]`` of a, counted from where the operand starts.
- ``product s a``: ``w`` columns of s + a @ W.T with the weight ``weight``, which is ``(groups, w / groups, k)``.
  Columns of ``a`` are ``groups * k``; its g-th k columns give the g-th columns of the result. A sum starts from s and
  takes k = 0, 1, 2 ... one fused multiply-add at a time.
"""


@dataclass(frozen=True, slots=True)
class Block:
    """Where numbers lie."""

    kind: Kind
    width: int  # at least 1
    index: int = 0  # which of the tensors of this kind that a call is given; 0 for a local


@dataclass(frozen=True, slots=True)
class Operand:
    """Columns of a block; or a number, the same for all rows and columns."""

    block: int  # -1 for a number
    start: int = 0
    spread: bool = False  # one column stands for all
    number: float = 0.0


@dataclass(frozen=True, slots=True)
class Weight:
    """The shape of a matrix that products read, or of several: the blocks of a block-diagonal product."""

    groups: int
    rows: int  # columns that each gives to the result
    depth: int  # columns that each reads


@dataclass(frozen=True, slots=True)
class Instruction:
    """One operation on whole rows.

    A result may lie exactly where an operand does if the operation takes one number at a time. No other overlap of
    results and operands is allowed.
    """

    operation: str
    results: tuple[Operand, ...]  # one, of ``norm`` two; all are locals
    operands: tuple[Operand, ...]
    width: int  # ``w``: columns of the result; of a reduction, of the operand
    segments: int = 1
    epsilon: float = 0.0
    weight: int = -1
    columns: tuple[int, ...] = ()  # of ``gather``


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """One step. Programs are equal only to themselves: to compare all instructions takes longer than a small batch."""

    blocks: tuple[Block, ...]  # tensors of each kind are given in the order of their index
    weights: tuple[Weight, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[tuple[Operand, int], ...]  # written for each element to a tensor (N, width)
    next_states: tuple[Operand, ...]  # in the order of the states' index

    def given(self, kind: Kind) -> tuple[int, ...]:
        """The widths of the tensors of a kind that a call is given, in their order."""
        blocks = sorted((block for block in self.blocks if block.kind == kind), key=lambda block: block.index)
        return tuple(block.width for block in blocks)


_SIGNS = {"add": "+", "sub": "-", "mul": "*", "div": "/", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "=="}
_SIGNS |= {"ne": "!=", "and": "and", "or": "or"}
_GIVEN = {"element": "x", "sequence": "mask", "state": "state", "vector": "vector"}


def printed(program: Program) -> str:
    """A program to be read by people: one instruction in a line."""
    names = _names(program)
    lines = [
        f"given {names[index]}: {block.kind}, {block.width} columns"
        for index, block in enumerate(program.blocks)
        if block.kind != "local"
    ]
    for index, weight in enumerate(program.weights):
        groups = f"{weight.groups} times " if weight.groups > 1 else ""
        lines.append(f"given W{index}: weight, {groups}{weight.rows} x {weight.depth}")
    lines += [_line(program, names, instruction) for instruction in program.instructions]
    lines += [f"output {_place(program, names, place, width)}" for place, width in program.outputs]
    for index, (place, width) in enumerate(zip(program.next_states, program.given("state"), strict=True)):
        lines.append(f"next state{index} {_place(program, names, place, width)}")
    return "\n".join(lines)


def _names(program: Program) -> list[str]:
    names, locals_ = [], 0
    for block in program.blocks:
        if block.kind == "local":
            names.append(_letter(locals_))
            locals_ += 1
        else:
            names.append(f"{_GIVEN[block.kind]}{block.index}")
    return names


def _letter(number: int) -> str:
    """a, b ... z, aa, ab ..."""
    more, last = divmod(number, 26)
    return (_letter(more - 1) if more else "") + chr(ord("a") + last)


def _place(program: Program, names: list[str], place: Operand, width: int) -> str:
    if place.block < 0:
        return f"{place.number:g}"
    name = names[place.block]
    if place.spread:
        return f"{name}[{place.start}]"
    is_all = place.start == 0 and program.blocks[place.block].width == width
    return name if is_all else f"{name}[{place.start}:{place.start + width}]"


def _line(program: Program, names: list[str], instruction: Instruction) -> str:
    name, width, parts = instruction.operation, instruction.width, instruction.segments
    reduces = name in ("row_sum", "row_max")
    target = _place(program, names, instruction.results[0], parts if reduces else width)
    widths = [width] * len(instruction.operands)
    if name == "product":
        weight = program.weights[instruction.weight]
        widths[1] = weight.groups * weight.depth
        start, operand = (
            _place(program, names, place, size) for place, size in zip(instruction.operands, widths, strict=True)
        )
        begins = "" if start == "0" else f"{start} + "
        return f"{target} = {begins}{operand} @ W{instruction.weight}.T"
    if name == "norm_backward":
        widths[2] = parts
    if name == "gather":
        source = names[instruction.operands[0].block]
        return f"{target} = {len(instruction.columns)} columns of {source}, starting {list(instruction.columns[:4])}"
    shown = [_place(program, names, place, size) for place, size in zip(instruction.operands, widths, strict=True)]
    if name in _SIGNS:
        return f"{target} = {shown[0]} {_SIGNS[name]} {shown[1]}"
    if name == "fma":
        return f"{target} = {shown[0]} * {shown[1]} + {shown[2]}"
    if name == "copy":
        return f"{target} = {shown[0]}"
    if name == "norm":
        target += f", {_place(program, names, instruction.results[1], parts)}"
    more = f", parts={parts}" if parts > 1 else ""
    return f"{target} = {name}({', '.join(shown)}{more})"
