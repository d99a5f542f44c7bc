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

__all__ = ["KINDS", "OPERATIONS", "Block", "Instruction", "Kind", "Operand", "Program", "Weight"]

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
    """Where numbers lie.

    Attributes:
        kind: see this file's table.
        width: columns, at least 1.
        index: which of the tensors of this kind that a call is given; 0 for a local.

    Example:
        >>> Block("state", 64).kind
        'state'
    """

    kind: Kind
    width: int
    index: int = 0


@dataclass(frozen=True, slots=True)
class Operand:
    """Columns of a block; or a number, the same for all rows and columns.

    Attributes:
        block: the place in :attr:`Program.blocks`; -1 for a number.
        start: the first column.
        spread: whether one column stands for all, so that it alone is read.
        number: where ``block`` is -1.

    Example:
        >>> Operand(-1, number=0.5).number
        0.5
    """

    block: int
    start: int = 0
    spread: bool = False
    number: float = 0.0


@dataclass(frozen=True, slots=True)
class Weight:
    """The shape of a matrix that products read, or as many as there are groups.

    Attributes:
        groups: matrices: 1, or of a block-diagonal product the number of its blocks.
        rows: the columns that each gives to the result.
        depth: the columns that each reads.

    Example:
        >>> Weight(groups=8, rows=64, depth=64).depth
        64
    """

    groups: int
    rows: int
    depth: int


@dataclass(frozen=True, slots=True)
class Instruction:
    """One operation on whole rows.

    Results may lie where an operand does of an operation that takes one number at a time, if it is the same place; no
    other overlap of a result and an operand is allowed.

    Attributes:
        operation: a name among :data:`OPERATIONS`.
        results: where the first column of each result lies: one, of ``norm`` two. All are locals.
        operands: as many as the operation has.
        width: ``w``: columns of the result; of a reduction, of the operand.
        segments: parts of a row, for ``row_sum``, ``row_max``, ``row_cumsum``, ``norm`` and ``norm_backward``.
        epsilon: of ``norm``.
        weight: of ``product``: the place in :attr:`Program.weights`.
        columns: of ``gather``.

    Example:
        >>> Instruction("tanh", (Operand(1),), (Operand(0),), width=64).operation
        'tanh'
    """

    operation: str
    results: tuple[Operand, ...]
    operands: tuple[Operand, ...]
    width: int
    segments: int = 1
    epsilon: float = 0.0
    weight: int = -1
    columns: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Program:
    """One step.

    Attributes:
        blocks: all that is read and written; of each kind but locals, tensors are given in the order of ``index``.
        weights: the matrices that products read, in the order in which they are given.
        instructions: in the order in which they are computed.
        outputs: what is written for each element, to one tensor ``(N, width)`` each: its first column and its width.
        next_states: where the next value of each state lies, in the order of their ``index``; its width is the state's.

    Example:
        A unit that leaks: ``h' = 0.9 * h + x``, whose output is ``tanh(h')``.

        >>> blocks = (Block("element", 4), Block("state", 4), Block("local", 4), Block("local", 4))
        >>> leak = Instruction("fma", (Operand(2),), (Operand(1), Operand(-1, number=0.9), Operand(0)), width=4)
        >>> squash = Instruction("tanh", (Operand(3),), (Operand(2),), width=4)
        >>> leaky = Program(blocks, (), (leak, squash), ((Operand(3), 4),), (Operand(2),))
        >>> len(leaky.instructions)
        2
    """

    blocks: tuple[Block, ...]
    weights: tuple[Weight, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[tuple[Operand, int], ...]
    next_states: tuple[Operand, ...]

    def given(self, kind: Kind) -> tuple[int, ...]:
        """The widths of the tensors of a kind that a call is given, in their order."""
        blocks = sorted((block for block in self.blocks if block.kind == kind), key=lambda block: block.index)
        return tuple(block.width for block in blocks)
