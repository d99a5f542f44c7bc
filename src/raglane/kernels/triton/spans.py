"""The columns that the operands of a program read, and where its values are cut into variables.

Triton cannot slice registers. So each input and each result of an instruction is a *definition*,
which is cut wherever an operand begins or ends. The cuts of the operands and the result of a
pointwise instruction agree.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from raglane.programs.graph import Refused
from raglane.programs.program import Instruction, Operand, Program

# The columns of the widest variable.
_WIDEST = 128
# The most variables of a step.
_MOST_VARIABLES = 192
# A reduction of more segments reads them from scratch.
_FEW = 8
REDUCTIONS = ("row_sum", "row_max")
_BY_ROW = (*REDUCTIONS, "product", "gather", "norm", "norm_backward", "row_cumsum")


class Span(NamedTuple):
    """Columns of a definition as an operand; ``definition`` -1 is a number, and ``repeats`` columns
    are the same.
    """

    definition: int
    low: int
    high: int
    repeats: int = 0  # of a repeated column or number
    number: float = 0.0

    @property
    def width(self) -> int:
        """Columns of the operand."""
        return self.repeats or self.high - self.low


@dataclass
class Definition:
    """An input, or the result of an instruction."""

    width: int
    source: str = ""  # the name of an input's argument
    kind: str = ""  # element, sequence, state or vector; empty for a result
    cuts: set[int] = field(default_factory=set)
    is_scratch: bool = False  # a product reads it
    column: int = 0  # in scratch

    def bounds(self, low: int = 0, high: int = -1) -> list[tuple[int, int]]:
        """Return the bounds of the columns between two cuts."""
        high = self.width if high < 0 else high
        cuts = {low, high, *(cut for cut in self.cuts if low < cut < high)}
        return list(itertools.pairwise(sorted(cuts)))


class _Written(NamedTuple):
    """Columns ``low`` to ``high - 1`` of a block, and the definition that was written there."""

    low: int
    high: int
    definition: int
    first: int  # column of the definition


class PlacedInstruction(NamedTuple):
    """An instruction with its operands, as spans, and the definitions of its results."""

    instruction: Instruction
    operands: tuple[tuple[Span, ...], ...]
    results: tuple[int, ...]


class ProgramColumns:
    """The definitions of a program, its instructions as steps on them, and the cuts.

    Products of elements and parameters alone are not among the steps of a loop: they are computed
    before it, and their results are elements.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.definitions: list[Definition] = []
        self.steps: list[PlacedInstruction] = []
        self.before: list[int] = []  # instructions
        self.is_cut = False  # values wider than a variable
        # Products within a step are sums of tiles, with few values in registers.
        self.is_tiled = False
        self.has_steps = bool(program.next_states or program.widths("sequence"))
        self._resolve()
        self._cut()

    def _resolve(self) -> None:
        """Make the definitions, and find those that each operand reads."""
        program = self.program
        self.written: list[list[_Written]] = [[] for _ in program.blocks]
        self.inputs: dict[tuple[str, int], int] = {}
        for number, block in enumerate(program.blocks):
            if block.kind != "local":
                self.inputs[block.kind, block.index] = len(self.definitions)
                source = f"{block.kind}{block.index}"
                self._define(number, 0, Definition(block.width, source, block.kind))
        for index, instruction in enumerate(program.instructions):
            self._add_step(index, instruction)
        self.outputs = [self._read(operand, width) for operand, width in program.outputs]
        self.following = [
            self._read(operand, width)
            for operand, width in zip(program.next_states, program.widths("state"), strict=True)
        ]

    def _add_step(self, index: int, instruction: Instruction) -> None:
        """Make the definitions of an instruction's results, and its step, if the loop runs it."""
        widths = _widths(self.program, instruction)
        operands = tuple(map(self._read, instruction.operands, widths))
        if instruction.operation in ("product", "gather"):
            operands = (*operands[:-1], self._copied(operands[-1]))
        is_product = instruction.operation == "product"
        is_before = self.has_steps and is_product and self._is_before_loop(operands)
        source = f"product{len(self.before)}" if is_before else ""
        results = []
        for result, width in zip(instruction.results, _result_widths(instruction), strict=True):
            results.append(len(self.definitions))
            definition = Definition(width, source, "element" if is_before else "")
            self._define(result.block, result.start, definition)
        if is_before:
            self.before.append(index)
        else:
            self.steps.append(PlacedInstruction(instruction, operands, tuple(results)))

    def _define(self, block: int, start: int, definition: Definition) -> None:
        end = start + definition.width
        pieces = [_Written(start, end, len(self.definitions), 0)]
        for piece in self.written[block]:
            if piece.low < start:
                pieces.append(piece._replace(high=min(piece.high, start)))
            if piece.high > end:
                low = max(piece.low, end)
                pieces.append(piece._replace(low=low, first=piece.first + low - piece.low))
        self.written[block] = sorted(pieces)
        self.definitions.append(definition)

    def _read(self, operand: Operand, width: int) -> tuple[Span, ...]:
        if operand.block < 0:
            return (Span(-1, 0, 0, width, operand.number),)
        begin = operand.start
        end = operand.start + (1 if operand.spread else width)
        repeats = width if operand.spread else 0
        spans = [
            Span(
                piece.definition,
                piece.first + max(piece.low, begin) - piece.low,
                piece.first + min(piece.high, end) - piece.low,
                repeats,
            )
            for piece in self.written[operand.block]
            if piece.low < end and piece.high > begin
        ]
        if sum(span.high - span.low for span in spans) != end - begin:
            raise Refused("it reads a value that no instruction has written")
        return tuple(spans)

    def _copied(self, spans: tuple[Span, ...]) -> tuple[Span, ...]:
        """Return an operand that is read in memory: a copy if it repeats a column or a number."""
        if all(span.definition >= 0 and not span.repeats for span in spans):
            return spans
        width = sum(span.width for span in spans)
        result = len(self.definitions)
        self.definitions.append(Definition(width))
        copy = Instruction("copy", (Operand(-1),), (Operand(-1),), width)
        self.steps.append(PlacedInstruction(copy, (spans,), (result,)))
        return (Span(result, 0, width),)

    def _is_before_loop(self, operands: Sequence[tuple[Span, ...]]) -> bool:
        """Return True if a product depends on elements and parameters only, and its operand is
        adjacent columns of an element.
        """
        start, operand = operands
        read = [span for span in (*start, *operand) if span.definition >= 0]
        sources = [self.definitions[span.definition] for span in read]
        if not all(source.source.startswith(("element", "vector")) for source in sources):
            return False
        return len(operand) == 1 and sources[-1].kind == "element"

    def _cut(self) -> None:
        """Cut the definitions until operands and results of each instruction agree."""
        pairs: list[tuple[int, Sequence[Span]]] = []  # a definition and what it is aligned with
        for instruction, operands, results in self.steps:
            self._segment(instruction, operands, results)
            aligned = operands[:1] if instruction.operation == "product" else operands
            if instruction.operation in (*REDUCTIONS, "gather"):
                continue
            # The last operand of norm_backward has a column for each segment.
            aligned = aligned[:2] if instruction.operation == "norm_backward" else aligned
            pairs += [(results[0], spans) for spans in aligned]
        for output in self.outputs:
            self._cut_spans(output, sum(span.width for span in output))
        states = [self.inputs["state", index] for index in range(len(self.following))]
        pairs += list(zip(states, self.following, strict=True))
        self._align_all(pairs)
        self.channels = self._width_of_channels(states)
        if not self.channels:
            for definition in self.definitions:
                if not definition.kind:
                    self._cut_wide(definition)
            self._align_all(pairs)
        in_registers = [other for other in self.definitions if other.kind in ("", "state")]
        if sum(len(definition.bounds()) for definition in in_registers) > _MOST_VARIABLES:
            raise Refused(
                f"it has more than {_MOST_VARIABLES} values of {_WIDEST} columns, too many for registers"
            )

    def _cut_wide(self, definition: Definition) -> None:
        """Cut columns that are wider than a variable."""
        for low, high in definition.bounds():
            definition.cuts |= set(range(low, high, _width_of_pieces(high - low))) - {0}
            self.is_cut |= high - low > _WIDEST

    def _width_of_channels(self, states: Sequence[int]) -> int:
        """Return the number of columns of an element-wise loop, which instances can divide among
        themselves; 0 if there is no such loop.
        """
        if not self.has_steps or any(step.instruction.operation in _BY_ROW for step in self.steps):
            return 0
        stored = [(self.definitions[index], 0, -1) for index in states]
        stored += [
            (self.definitions[span.definition], span.low, span.high)
            for out in self.outputs
            for span in out
        ]
        widths = {
            high - low for definition, *bounds in stored for low, high in definition.bounds(*bounds)
        }
        inner = {
            high - low
            for step in self.steps
            for low, high in self.definitions[step.results[0]].bounds()
        }
        return max(widths) if len(widths) == 1 and inner <= {1, *widths} else 0

    def _align_all(self, pairs: Sequence[tuple[int, Sequence[Span]]]) -> None:
        while any(self._align(self.definitions[index], spans) for index, spans in pairs):
            pass

    def _align(self, result: Definition, spans: Sequence[Span]) -> bool:
        begin = 0
        changes = False
        for span in spans:
            end = begin + span.width
            cuts = {cut for cut in (begin, end) if 0 < cut < result.width}
            if span.definition >= 0:
                other = self.definitions[span.definition]
                back = {span.low, span.high}
                if not span.repeats:
                    shift = begin - span.low
                    cuts |= {cut + shift for cut in other.cuts if span.low < cut < span.high}
                    back |= {cut - shift for cut in result.cuts if begin < cut < end}
                back = {cut for cut in back if 0 < cut < other.width} - other.cuts
                changes |= bool(back)
                other.cuts |= back
            changes |= not cuts <= result.cuts
            result.cuts |= cuts
            begin = end
        return changes

    def _segment(
        self, instruction: Instruction, operands: Sequence[Sequence[Span]], results: Sequence[int]
    ) -> None:
        """Cut at the bounds of segments and groups."""
        name = instruction.operation
        segments = instruction.segments
        result = self.definitions[results[0]]
        if name == "product":
            weight = self.program.weights[instruction.weight]
            result.cuts |= set(range(weight.rows, result.width, weight.rows))
            for span in operands[1]:
                source = self.definitions[span.definition]
                source.is_scratch |= self.has_steps or source.kind in ("", "vector")
        elif name == "gather":
            for span in operands[0]:
                self.definitions[span.definition].is_scratch = True
        elif name in REDUCTIONS and self.is_narrow(instruction, operands[0]):
            self.definitions[operands[0][0].definition].is_scratch = True
        elif name in REDUCTIONS:
            result.cuts |= set(range(1, segments))
            self._cut_spans(operands[0], instruction.width // segments)
        elif name in ("norm", "norm_backward", "row_cumsum"):
            result.cuts |= set(range(0, result.width, instruction.width // segments)) - {0}
            if name == "norm":
                self.definitions[results[1]].cuts |= set(range(1, segments))
            if name == "norm_backward":
                self._cut_spans(operands[2], 1)

    def is_narrow(self, instruction: Instruction, spans: Sequence[Span]) -> bool:
        """Return True if a reduction of many segments reads them from scratch, a column of all
        segments at a time.
        """
        return (
            instruction.segments > _FEW
            and len(spans) == 1
            and spans[0].definition >= 0
            and not spans[0].repeats
        )

    def _cut_spans(self, spans: Sequence[Span], every: int) -> None:
        """Add cuts at both ends of each value that is read, and at every n-th column."""
        begin = 0
        for span in spans:
            if span.definition >= 0:
                other = self.definitions[span.definition]
                cuts = {span.low, span.high}
                if not span.repeats:
                    first = -begin % every
                    cuts |= set(range(span.low + first, span.high, every))
                other.cuts |= {cut for cut in cuts if 0 < cut < other.width}
            begin += span.width


def _width_of_pieces(width: int) -> int:
    """Return the columns of the pieces of a wide value: equal ones, which have the same layout in
    registers.
    """
    count = -(-width // _WIDEST)
    every = 4 if width % 4 == 0 else 1  # a load of four numbers is aligned
    return -(-width // count // every) * every


def _widths(program: Program, instruction: Instruction) -> list[int]:
    """Return the columns of each operand."""
    widths = [instruction.width] * len(instruction.operands)
    if instruction.operation == "product":
        weight = program.weights[instruction.weight]
        widths[1] = instruction.segments * weight.groups * weight.depth
    elif instruction.operation == "norm_backward":
        widths[2] = instruction.segments
    elif instruction.operation == "gather":
        widths[0] = 1 + max(instruction.columns)
    return widths


def _result_widths(instruction: Instruction) -> list[int]:
    if instruction.operation in REDUCTIONS:
        return [instruction.segments]
    return [instruction.width, instruction.segments][: len(instruction.results)]
