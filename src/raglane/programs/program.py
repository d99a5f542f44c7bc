"""Programs: one step of a cell, forward or backward, as a list of instructions.

A program is data, independent of cells, torch and gradients. The cpu kernels run it, or an
interpreter of a few lines. A backward pass is a program whose states are gradients, run from the
last element of a sequence to the first.

A step computes one row for each running sequence, independently of other rows. Rows read and write
blocks. A block is ``(rows, width)``, or ``(width,)`` if all rows share it:

========  =====================  ==========================================================================
kind      argument               contents in a step
========  =====================  ==========================================================================
element   ``(N, width)``         the row of the current element
sequence  ``(B, width)``         the row of the sequence, the same in all of its steps
state     ``(B, width)``         the next state of the previous step, at first the initial state
vector    ``(width,)``           the same for all rows, e.g. a bias
local     none                   results of the step, undefined at its start
========  =====================  ==========================================================================

Instructions write only locals. After all instructions of a step, ``outputs`` are written to the
rows of their elements, and ``next_states`` become the states; both may be any block.

All numbers have one dtype, float32 or float64. Comparisons return 1 or 0, and ``where``, ``and``,
``or`` and ``not`` treat all but 0 as true. NaN propagates through every operation, including
``max``, ``min`` and ``relu``, except for ``where``, comparisons (where it is unequal to everything)
and a power of 0.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

Kind = Literal["element", "sequence", "state", "vector", "local"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_UNARY = """
    copy neg abs sign not relu exp expm1 log log1p sqrt rsqrt reciprocal sigmoid tanh erf sin cos
    floor round
"""
_BINARY = "add sub mul div max min lt le gt ge eq ne and or pow"

OPERATIONS: dict[str, int] = {
    # Pointwise operations.
    **dict.fromkeys(_UNARY.split(), 1),
    **dict.fromkeys(_BINARY.split(), 2),
    "sigmoid_backward": 2,
    "tanh_backward": 2,
    "fma": 3,
    "where": 3,
    # Operations on rows.
    "row_sum": 1,
    "row_max": 1,
    "norm": 1,
    "norm_backward": 3,
    "row_cumsum": 1,
    "row_dot": 2,
    "column_dot": 2,
    "gather": 1,
    "product": 2,
}
"""The number of operands of every operation by its name. ``w`` is the instruction's ``width``.

Pointwise, on ``w`` columns, or on the numbers of a matrix (see :class:`Operand`): ``copy a``;
``neg a``; ``abs a``; ``sign a`` (-1, 0 or 1); ``not a``;
``relu a``; ``exp a``; ``expm1 a``; ``log a``; ``log1p a``; ``sqrt a``; ``rsqrt a`` = 1 / sqrt(a);
``reciprocal a``; ``sigmoid a``; ``tanh a``; ``erf a``; ``sin a``; ``cos a``; ``floor a``; ``round
a``, halves to the even; ``add a b``; ``sub a b`` = a - b; ``mul a b``; ``div a b`` = a / b; ``max a
b``; ``min a b``; ``lt a b`` = a < b, and so on; ``and a b``; ``or a b``; ``pow a b`` = a to the
power b; ``sigmoid_backward g y`` = g * y * (1 - y); ``tanh_backward g y`` = g * (1 - y * y); ``fma
a b c`` = a * b + c, rounded once; ``where a b c`` = b where a is true, else c.

On rows, each in ``segments`` adjacent parts of ``w / segments`` columns:

- ``row_sum a``, ``row_max a``: from ``w`` columns one number for each part, so ``segments``
  columns.
- ``norm a``: two results: ``w`` columns of (a - mean) * r, and ``segments`` columns of r = 1 /
  sqrt(variance + epsilon). Mean and variance are those of a part; the variance divides by its
  number of columns.
- ``norm_backward g y r``: r * (g - mean(g) - y * mean(g * y)), where y and r are the results of
  ``norm``.
- ``row_cumsum a``: column j is the sum of the columns of its part up to j, in order.
- ``row_dot a b``: from two matrices with a row for each part, the sum of ``a * b`` along each row,
  so ``segments`` columns.
- ``column_dot a b``: the same along each column, in each of ``groups`` groups of as many rows: ``w /
  segments`` columns for each group. A sum takes one row after the other, one fused multiply-add at
  a time.
- ``gather a``: column j is column ``columns[j]`` of a, counted from where the operand starts.
- ``product s a``: columns of s + a @ W.T with the weight ``weight``, which is ``(groups, w /
  segments / groups, k)``. A part of ``a`` has ``groups * k`` columns; its g-th k columns give the
  g-th columns of the part of the result. A sum starts from s and takes k = 0, 1, 2 ... one fused
  multiply-add at a time.
"""


@dataclass(frozen=True, slots=True)
class Block:
    """A block of numbers."""

    kind: Kind
    width: int  # at least 1
    index: int = 0  # among the arguments of this kind; 0 for a local


class Operand(NamedTuple):
    """Columns of a block, or a number for all rows and columns.

    Pointwise operations and dots may also read a matrix with ``segments`` rows along ``rows``, a
    column for each of its rows, or along ``columns``, a column for each of its columns and groups.
    """

    block: int  # -1 for a number
    start: int = 0
    spread: bool = False  # one column is repeated
    number: float = 0.0
    along: Literal["", "rows", "columns"] = ""


class Weight(NamedTuple):
    """The shape of a matrix of products, or of the blocks of a block-diagonal matrix."""

    groups: int
    rows: int  # columns of the result of each
    depth: int  # columns that each reads


@dataclass(frozen=True, slots=True)
class Instruction:
    """One operation on whole rows.

    A result may take the place of an operand if the operation is pointwise. Otherwise they must not
    overlap.
    """

    operation: str
    results: tuple[Operand, ...]  # one, of ``norm`` two; all are locals
    operands: tuple[Operand, ...]
    width: int  # ``w``: columns of the result; of a reduction, of the operand
    segments: int = 1
    epsilon: float = 0.0
    weight: int = -1
    columns: tuple[int, ...] = ()  # of ``gather``
    groups: int = 1  # of as many rows of a matrix, which has ``segments`` rows


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """One step. Programs are equal only to themselves, because comparing instructions would take
    long.
    """

    blocks: tuple[Block, ...]  # arguments of each kind are in the order of their index
    weights: tuple[Weight, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[tuple[Operand, int], ...]  # written for each element to a tensor (N, width)
    next_states: tuple[Operand, ...]  # in the order of the states' index

    @lru_cache(maxsize=1024)  # noqa: B019 (calls of layers need it, and programs are few)
    def widths(self, kind: Kind) -> tuple[int, ...]:
        """Return the widths of the arguments of a kind, in their order."""
        blocks = sorted(
            (block for block in self.blocks if block.kind == kind), key=lambda block: block.index
        )
        return tuple(block.width for block in blocks)


@lru_cache(maxsize=256)
def product_program(groups: int, width: int, depth: int) -> Program:
    """Return a program without states: the products of the rows of elements and a weight ``(groups,
    width, depth)``.
    """
    columns = groups * width
    blocks = Block("element", groups * depth), Block("local", columns)
    product = Instruction("product", (Operand(1),), (Operand(-1), Operand(0)), columns, weight=0)
    return Program(
        blocks, (Weight(groups, width, depth),), (product,), ((Operand(1), columns),), ()
    )


_SIGNS = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "eq": "==",
    "ne": "!=",
    "and": "and",
    "or": "or",
}
_INPUTS = {"element": "x", "sequence": "mask", "state": "state", "vector": "vector"}


def printed(program: Program) -> str:
    """Return a program as text, one instruction per line."""
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
    lines += [
        f"output {_operand(program, names, operand, width)}" for operand, width in program.outputs
    ]
    for index, (operand, width) in enumerate(
        zip(program.next_states, program.widths("state"), strict=True)
    ):
        lines.append(f"next state{index} {_operand(program, names, operand, width)}")
    return "\n".join(lines)


def _names(program: Program) -> list[str]:
    letters = map(_letter, itertools.count())
    return [
        next(letters) if block.kind == "local" else f"{_INPUTS[block.kind]}{block.index}"
        for block in program.blocks
    ]


def _letter(number: int) -> str:
    """Return a, b ... z, aa, ab ..."""
    more, last = divmod(number, 26)
    return (_letter(more - 1) if more else "") + chr(ord("a") + last)


def _operand(program: Program, names: list[str], operand: Operand, width: int) -> str:
    if operand.block < 0:
        return f"{operand.number:g}"
    name = names[operand.block]
    if operand.spread:
        return f"{name}[{operand.start}]"
    if operand.along:
        return f"{name}[{operand.start}:] along {operand.along}"
    is_all = operand.start == 0 and program.blocks[operand.block].width == width
    return name if is_all else f"{name}[{operand.start}:{operand.start + width}]"


def _line(program: Program, names: list[str], instruction: Instruction) -> str:
    name = instruction.operation
    width = instruction.width
    segments = instruction.segments
    written = {"row_sum": segments, "row_max": segments, "row_dot": segments}
    written["column_dot"] = width // segments * instruction.groups
    target = _operand(program, names, instruction.results[0], written.get(name, width))
    widths = [width] * len(instruction.operands)
    if name == "product":
        weight = program.weights[instruction.weight]
        widths[1] = segments * weight.groups * weight.depth
        start = _operand(program, names, instruction.operands[0], widths[0])
        operand = _operand(program, names, instruction.operands[1], widths[1])
        begins = "" if start == "0" else f"{start} + "
        each = f", parts={segments}" if segments > 1 else ""
        return f"{target} = {begins}{operand} @ W{instruction.weight}.T{each}"
    if name == "norm_backward":
        widths[2] = segments
    if name == "gather":
        source = names[instruction.operands[0].block]
        return f"{target} = {len(instruction.columns)} columns of {source}, starting {list(instruction.columns[:4])}"
    shown = [
        _operand(program, names, operand, size)
        for operand, size in zip(instruction.operands, widths, strict=True)
    ]
    if name in _SIGNS:
        return f"{target} = {shown[0]} {_SIGNS[name]} {shown[1]}"
    if name == "fma":
        return f"{target} = {shown[0]} * {shown[1]} + {shown[2]}"
    if name == "copy":
        return f"{target} = {shown[0]}"
    if name == "norm":
        target += f", {_operand(program, names, instruction.results[1], segments)}"
    more = f", parts={segments}" if segments > 1 else ""
    return f"{target} = {name}({', '.join(shown)}{more})"
