"""Prints a program as the text of a Triton kernel.

An instance of a kernel runs some sequences, from the first step to the last of the longest. Values of a step are
registers, ``(ROWS, columns)``, which Triton cannot slice. So each result is a *definition*, which is cut wherever an
operand begins or ends, and each of its parts is a variable. The cuts of a pointwise instruction's operands and result
agree.

NOTE [barriers]: a product reads its left operand column by column in all threads. The operand is an input, or it is
stored in scratch memory, with a barrier before it is read. Successive steps use the two halves of the scratch, so no
second barrier is necessary after it is read: before a half is written again, all threads have passed the barrier of the
step between.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from raglane.programs.graph import Refused
from raglane.programs.program import Instruction, Operand, Program

# The widest variable, the most variables of a step, and the columns that a product reads at a time.
# The rows of an instance by the most numbers of a row that are alive together: measured with 8 warps, so that a step
# needs at most 168 registers and no others in memory where 128 units have up to 5,500 such numbers.
_ROWS = {8: 1536, 4: 2688, 2: 8192}
_FEW_LIVE, _MOST_LIVE, _REGISTERS = 640, 5500, 168
_WIDEST, _MOST_PARTS, _DEPTH = 128, 192, 16
# A reduction of more segments reads them from scratch.
_FEW = 8

_REDUCTIONS = ("row_sum", "row_max")
_TRUTHS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_FORMULAS = {
    **{name: f"tl.where({{0}} {sign} {{1}}, 1.0, 0.0)" for name, sign in _TRUTHS.items()},
    "copy": "{0}",
    "neg": "-{0}",
    "abs": "tl.abs({0})",
    "sign": "tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, {0}))",
    "not": "tl.where({0} == 0, 1.0, 0.0)",
    "relu": "tl.where({0} < 0, 0.0, {0})",
    "floor": "tl.floor({0})",
    "sqrt": "tl.sqrt_rn({0})",
    "erf": "tl.erf({0})",
    "sin": "tl.sin({0})",
    "cos": "tl.cos({0})",
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "max": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "min": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "and": "tl.where(({0} != 0) & ({1} != 0), 1.0, 0.0)",
    "or": "tl.where(({0} != 0) | ({1} != 0), 1.0, 0.0)",
    "sigmoid_backward": "{0} * {1} * (1.0 - {1})",
    "tanh_backward": "{0} * (1.0 - {1} * {1})",
    "fma": "{0} * {1} + {2}",
    "where": "tl.where({0} != 0, {1}, {2})",
    # The others are functions of raglane.kernels.triton.functions.
    **{name: f"f.{name}({{0}})" for name in ("exp", "expm1", "log", "log1p", "rsqrt", "reciprocal", "sigmoid", "tanh")},
    "round": "f.round_half_even({0})",
    "div": "f.div({0}, {1})",
    "pow": "f.pow({0}, {1})",
}


class Span(NamedTuple):
    """Columns of a definition as an operand; ``definition`` -1 is a number, and ``repeats`` columns are the same."""

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

    def parts(self, low: int = 0, high: int = -1) -> list[tuple[int, int]]:
        """Return the bounds of the parts between two cuts."""
        high = self.width if high < 0 else high
        bounds = sorted({low, high, *(cut for cut in self.cuts if low < cut < high)})
        return list(zip(bounds, bounds[1:], strict=False))


class _Step(NamedTuple):
    """An instruction with its operands, as spans, and the definitions of its results."""

    instruction: Instruction
    operands: tuple[tuple[Span, ...], ...]
    results: tuple[int, ...]


@dataclass(frozen=True)
class Kernel:
    """The text of a kernel, and the products that are computed before it.

    Its arguments are, in this order: the number of rows; that of elements, ``order`` and ``offsets``, if the program has states;
    elements with their strides; the results of the products; sequences with their strides; initial states with their
    strides; vectors; weights ``(groups, depth, rows)``; tables of ``gather``; outputs; final states; and scratch.
    """

    text: str
    before: tuple[int, ...]  # instructions whose results are elements
    has_steps: bool
    scratch: int  # numbers of scratch for each instance
    tables: tuple[tuple[int, ...], ...]
    rows: int  # of each instance
    warps: int
    registers: int | None  # at most, of each thread; None for as many as there are


def kernel_of(program: Program, ascending: bool) -> Kernel:
    """Return the kernel of a program; raises Refused with the reason if there is none.

    The number of rows depends on how many values are alive together: they are the registers of a step.
    """
    printer = _Printer(program, ascending)
    live = printer.live()
    rows = next((rows for rows, most in _ROWS.items() if live <= most), 0)
    if not rows:
        raise Refused(
            f"its step holds {live} numbers at a time, more than the {max(_ROWS.values())} that registers have room for"
        )
    if not printer.has_steps and live <= _FEW_LIVE:
        rows = 32
    elif printer.is_pointwise:
        rows = min(rows, 2)
    return _Printer(program, ascending).run(rows, live)


class _Printer:
    def __init__(self, program: Program, ascending: bool) -> None:
        self.program, self.ascending = program, ascending
        self.sizes: dict[str, int] = {}
        self.definitions: list[Definition] = []
        self.steps: list[_Step] = []
        self.before: list[int] = []
        self.lines: list[str] = []
        self.head: list[str] = []
        self.tables: list[tuple[int, ...]] = []
        self.given: dict[tuple[int, int, int], str] = {}
        self.numbers: dict[str, str] = {}
        self.unfenced: set[int] = set()
        self.has_steps = bool(program.next_states or program.given("sequence"))
        self.resolve()
        self.cut()

    # Definitions and cuts.

    def resolve(self) -> None:
        """Make the definitions, and find those that each operand reads."""
        program = self.program
        # Of each block, the columns that have been written: first, end, definition and its first column.
        self.written: list[list[tuple[int, int, int, int]]] = [[] for _ in program.blocks]
        self.inputs: dict[tuple[str, int], int] = {}
        for place, block in enumerate(program.blocks):
            if block.kind != "local":
                self.inputs[block.kind, block.index] = len(self.definitions)
                self._define(place, 0, Definition(block.width, f"{block.kind}{block.index}", block.kind))
        for index, instruction in enumerate(program.instructions):
            operands = tuple(
                self._read(operand, width)
                for operand, width in zip(instruction.operands, _widths(program, instruction), strict=True)
            )
            if instruction.operation in ("product", "gather"):
                operands = (*operands[:-1], self._copied(operands[-1]))
            is_before = self.has_steps and instruction.operation == "product" and self._is_given(operands)
            results = []
            for result, width in zip(instruction.results, _result_widths(instruction), strict=True):
                results.append(len(self.definitions))
                source = f"product{len(self.before)}" if is_before else ""
                self._define(result.block, result.start, Definition(width, source, "element" if is_before else ""))
            if is_before:
                self.before.append(index)
            else:
                self.steps.append(_Step(instruction, operands, tuple(results)))
        self.outputs = [self._read(place, width) for place, width in program.outputs]
        widths = program.given("state")
        self.following = [self._read(place, width) for place, width in zip(program.next_states, widths, strict=True)]

    def _define(self, block: int, start: int, definition: Definition) -> None:
        end, kept = start + definition.width, []
        for low, high, index, first in self.written[block]:
            kept += [(low, min(high, start), index, first)] if low < start else []
            kept += [(max(low, end), high, index, first + max(low, end) - low)] if high > end else []
        self.written[block] = sorted([*kept, (start, end, len(self.definitions), 0)])
        self.definitions.append(definition)

    def _read(self, place: Operand, width: int) -> tuple[Span, ...]:
        if place.block < 0:
            return (Span(-1, 0, 0, width, place.number),)
        begin, end = place.start, place.start + (1 if place.spread else width)
        found = [
            Span(index, first + max(low, begin) - low, first + min(high, end) - low, width if place.spread else 0)
            for low, high, index, first in self.written[place.block]
            if low < end and high > begin
        ]
        if sum(part.high - part.low for part in found) != end - begin:
            raise Refused("it reads what no instruction has written")
        return tuple(found)

    def _copied(self, spans: tuple[Span, ...]) -> tuple[Span, ...]:
        """Return an operand that is read in memory: a copy if it repeats a column or a number."""
        if all(part.definition >= 0 and not part.repeats for part in spans):
            return spans
        width = sum(part.width for part in spans)
        self.definitions.append(Definition(width))
        made = len(self.definitions) - 1
        copy = Instruction("copy", (Operand(-1),), (Operand(-1),), width)
        self.steps.append(_Step(copy, (spans,), (made,)))
        return (Span(made, 0, width),)

    def _is_given(self, operands: Sequence[tuple[Span, ...]]) -> bool:
        """Return True if a product depends on elements and parameters only; its operand is one part of an element."""
        start, operand = operands
        kinds = {"" if part.definition < 0 else self.definitions[part.definition].kind for part in start}
        is_element = len(operand) == 1 and self._kind(operand[0]) == "element"
        return (
            is_element
            and all(part.definition < 0 or self._kind(part) in ("element", "vector") for part in start)
            and (kinds <= {"", "element", "vector"})
        )

    def _kind(self, part: Span) -> str:
        return "" if part.definition < 0 else self.definitions[part.definition].kind

    def cut(self) -> None:
        """Cut the definitions until operands and results of each instruction agree."""
        pairs: list[tuple[int, Sequence[Span]]] = []  # a definition and what it is aligned with
        for instruction, operands, results in self.steps:
            self._segment(instruction, operands, results)
            aligned = operands[:1] if instruction.operation == "product" else operands
            if instruction.operation in (*_REDUCTIONS, "gather"):
                continue
            # The last operand of norm_backward has a column for each segment.
            aligned = aligned[:2] if instruction.operation == "norm_backward" else aligned
            pairs += [(results[0], spans) for spans in aligned]
        for spans in self.outputs:
            self._cut_spans(spans, sum(span.width for span in spans))
        states = [self.inputs["state", index] for index in range(len(self.following))]
        pairs += list(zip(states, self.following, strict=True))
        for definition in self.definitions:
            definition.cuts |= set(range(_WIDEST, definition.width, _WIDEST)) if not definition.kind else set()
        changes = True
        while changes:
            changes = False
            for index, spans in pairs:
                changes |= self._align(self.definitions[index], spans)
        if sum(len(part.parts()) for part in self.definitions if part.kind in ("", "state")) > _MOST_PARTS:
            raise Refused(f"it has more than {_MOST_PARTS} values of {_WIDEST} columns, too many for registers")

    def _align(self, result: Definition, spans: Sequence[Span]) -> bool:
        begin, changes = 0, False
        for span in spans:
            end = begin + span.width
            cuts = {cut for cut in (begin, end) if 0 < cut < result.width}
            if span.definition >= 0 and not span.repeats:
                other = self.definitions[span.definition]
                shift = begin - span.low
                cuts |= {cut + shift for cut in other.cuts if span.low < cut < span.high}
                back = {cut - shift for cut in result.cuts if begin < cut < end} | {span.low, span.high}
                back = {cut for cut in back if 0 < cut < other.width} - other.cuts
                changes |= bool(back)
                other.cuts |= back
            elif span.definition >= 0:
                other = self.definitions[span.definition]
                back = {cut for cut in (span.low, span.high) if 0 < cut < other.width} - other.cuts
                changes |= bool(back)
                other.cuts |= back
            changes |= not cuts <= result.cuts
            result.cuts |= cuts
            begin = end
        return changes

    def _segment(self, instruction: Instruction, operands: Sequence[Sequence[Span]], results: Sequence[int]) -> None:
        """Cut at the bounds of segments and groups."""
        name, segments = instruction.operation, instruction.segments
        result = self.definitions[results[0]]
        if name == "product":
            weight = self.program.weights[instruction.weight]
            result.cuts |= set(range(weight.rows, result.width, weight.rows))
            for span in operands[1]:
                source = self.definitions[span.definition]
                source.is_scratch |= source.kind in ("", "state", "vector", "sequence")
        elif name == "gather":
            for span in operands[0]:
                self.definitions[span.definition].is_scratch = True
        elif name in _REDUCTIONS and self._is_narrow(instruction, operands[0]):
            self.definitions[operands[0][0].definition].is_scratch = True
        elif name in _REDUCTIONS:
            result.cuts |= set(range(1, segments))
            self._cut_spans(operands[0], instruction.width // segments)
        elif name in ("norm", "norm_backward", "row_cumsum"):
            result.cuts |= set(range(0, result.width, instruction.width // segments)) - {0}
            if name == "norm":
                self.definitions[results[1]].cuts |= set(range(1, segments))
            if name == "norm_backward":
                self._cut_spans(operands[2], 1)

    def _is_narrow(self, instruction: Instruction, spans: Sequence[Span]) -> bool:
        """Return True if a reduction of many segments reads them from scratch, a column of all segments at a time."""
        return instruction.segments > _FEW and len(spans) == 1 and spans[0].definition >= 0 and not spans[0].repeats

    def _cut_spans(self, spans: Sequence[Span], every: int) -> None:
        """Cut what is read at its ends and at every so many columns of the operand."""
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

    # Text.

    @property
    def is_pointwise(self) -> bool:
        """Return True if no instruction of the loop reads another column of its row than its own."""
        return all(step.instruction.operation in _FORMULAS for step in self.steps)

    def run(self, rows: int, live: int) -> Kernel:
        """Print the kernel for blocks of so many rows."""
        self.rows, column = rows, 0
        for definition in self.definitions:
            if definition.is_scratch:
                definition.column, column = column, column + definition.width
        self.scratch = column
        body = self._body()
        head = [*self._prologue(), *self.head]
        sizes = {int(size) for line in (*head, *body) for size in re.findall(r"\bc(\d+)\b", line)}
        head = [f"c{size} = tl.arange(0, {size})[None, :]" for size in sorted(sizes)] + head
        if self.has_steps:
            loop = "for t in range(longest):"
            lines = [*head, loop, *[f"    {line}" for line in body], *self._final()]
        else:
            lines = [*head, *body]
        text = f"def kernel({', '.join(self._arguments())}):\n" + "".join(f"    {line}\n" for line in lines)
        warps = 4 if self.is_pointwise or rows * live <= _FEW_LIVE * 4 else 8
        return Kernel(
            text,
            tuple(self.before),
            self.has_steps,
            2 * rows * column,
            tuple(self.tables),
            rows,
            warps,
            _REGISTERS if live <= _MOST_LIVE else None,
        )

    def _arguments(self) -> list[str]:
        program = self.program
        names = ["rows", *(["count", "order", "offsets"] if self.has_steps else [])]
        for kind in ("element", "sequence", "state"):
            names += [
                name for index in range(len(program.given(kind))) for name in (f"{kind}{index}", f"{kind}{index}_s")
            ]
            if kind == "element":
                names += [
                    name for index in range(len(self.before)) for name in (f"product{index}", f"product{index}_s")
                ]
        names += [f"vector{index}" for index in range(len(program.given("vector")))]
        names += [f"weight{index}" for index in range(len(program.weights))]
        names += [f"table{index}" for index in range(len(self.tables))]
        names += [f"output{index}" for index in range(len(program.outputs))]
        names += [f"final{index}" for index in range(len(program.next_states))]
        return [*names, "scratch", "precision: tl.constexpr"]

    def _prologue(self) -> list[str]:
        lines = [f"slot = tl.program_id(0) * {self.rows} + tl.arange(0, {self.rows})", "valid = slot < rows"]
        if self.has_steps:
            lines += [
                "row = tl.load(order + slot, mask=valid, other=0)",
                # Offsets that were changed on the device lead to no address outside of the elements.
                "begin = tl.minimum(tl.maximum(tl.load(offsets + row, mask=valid, other=0), 0), count)",
                "end = tl.minimum(tl.maximum(tl.load(offsets + row + 1, mask=valid, other=0), begin), count)",
                "length = (end - begin).to(tl.int32)",
                "longest = tl.max(length, 0)",
            ]
        else:
            lines += ["row = slot.to(tl.int64)"]
        lines += [f"{name} = tl.full((1, 1), {value}, tl.float32)" for value, name in self.numbers.items()]
        for index in range(len(self.following)):
            place = self.inputs["state", index]
            for low, high in self.definitions[place].parts():
                self.sizes[_name(place, low)] = _padded(high - low)
                lines.append(f"{_name(place, low)} = {self._loaded(place, low, high, 'row', 'valid')}")
        return lines

    def _body(self) -> list[str]:
        self.lines = []
        if self.has_steps:
            at = "begin + t" if self.ascending else "end - 1 - t"
            half = f"tl.program_id(0) * 2 + t % 2" if self.scratch else ""
            self.lines += ["live = t < length", f"at = {at}"]
        else:
            half = "tl.program_id(0)"
            self.lines += ["live = valid", "at = row"]
        if self.scratch:
            self.lines.append(
                f"local = scratch + ({half}) * {self.rows * self.scratch} + tl.arange(0, {self.rows})[:, None] * {self.scratch}"
            )
        for index, definition in enumerate(self.definitions):
            if definition.kind:
                self._store(index)
        for instruction, operands, results in self.steps:
            self._emit(instruction, operands, results)
            for result in results:
                self._store(result)
        for index, spans in enumerate(self.outputs):
            for start, (text, width, is_full) in self._placed(spans):
                size = _padded(width)
                text = text if is_full else f"tl.broadcast_to({text}, ({self.rows}, {size}))"
                to = f"output{index} + at[:, None] * {sum(span.width for span in spans)} + {start} + c{size}"
                self.lines.append(f"tl.store({to}, {text}, mask={_mask('live', width)})")
        following = []
        for index, spans in enumerate(self.following):
            place = self.inputs["state", index]
            for low, high in self.definitions[place].parts():
                name = _name(place, low)
                text, width, is_full = self._one(spans, low, high)
                self.lines.append(f"next_{name} = tl.where(live[:, None], {text}, {name})")
                following.append(f"{name} = next_{name}")
        return [*self.lines, *following]

    def live(self) -> int:
        """Return the most columns of all values that are alive together."""
        self.run(1, 0)
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        for index, line in enumerate(self.lines):
            for name in re.findall(r"\b[vx]\d+(?:_\d+)+\b", line):
                first.setdefault(name, index)
                last[name] = index
        changes = [0] * (len(self.lines) + 1)
        for name, index in first.items():
            changes[index] += self.sizes[name]
            changes[last[name] + 1] -= self.sizes[name]
        return max(itertools.accumulate(changes))

    def _final(self) -> list[str]:
        lines = []
        for index in range(len(self.following)):
            place = self.inputs["state", index]
            definition = self.definitions[place]
            for low, high in definition.parts():
                to = f"final{index} + row[:, None] * {definition.width} + {low} + c{_padded(high - low)}"
                lines.append(f"tl.store({to}, {_name(place, low)}, mask={_mask('valid', high - low)})")
        return lines

    def _store(self, index: int) -> None:
        """Store a definition that a product reads in scratch."""
        definition = self.definitions[index]
        if not definition.is_scratch:
            return
        for low, high in definition.parts():
            size = _padded(high - low)
            text = self._part(index, low, high)
            mask = f", mask=c{size} < {high - low}" if size != high - low else ""
            whole = f"tl.broadcast_to({text}, ({self.rows}, {size}))"
            self.lines.append(f"tl.store(local + {definition.column + low} + c{size}, {whole}{mask})")
        self.unfenced.add(index)

    def _loaded(self, index: int, low: int, high: int, rows: str, mask: str) -> str:
        definition = self.definitions[index]
        place = f"{definition.source} + {rows}[:, None] * {definition.source}_s + {low} + c{_padded(high - low)}"
        return f"tl.load({place}, mask={_mask(mask, high - low)}, other=0.0).to(tl.float32)"

    def _part(self, index: int, low: int, high: int) -> str:
        """Return the variable of columns of a definition; of an input, after it is loaded."""
        definition = self.definitions[index]
        if definition.kind in ("", "state"):
            return _name(index, low)
        key = index, low, high
        if key not in self.given:
            name = self.given[key] = f"x{index}_{low}_{high}"
            self.sizes[name] = _padded(high - low)
            if definition.kind == "vector":
                size = _padded(high - low)
                mask = f", mask=c{size} < {high - low}, other=0.0" if size != high - low else ""
                self.lines.append(f"{name} = tl.load({definition.source} + {low} + c{size}{mask})")
            elif definition.kind == "sequence":
                self.head.append(f"{name} = {self._loaded(index, low, high, 'row', 'valid')}")
            else:
                self.lines.append(f"{name} = {self._loaded(index, low, high, 'at', 'live')}")
        return self.given[key]

    def _one(self, spans: Sequence[Span], low: int, high: int) -> tuple[str, int, bool]:
        """Return the variable of columns of an operand, its width, and True if it has all rows and columns."""
        begin = 0
        for span in spans:
            if begin <= low and high <= begin + span.width:
                break
            begin += span.width
        if span.definition < 0:
            return self._number(span.number), high - low, False
        definition = self.definitions[span.definition]
        if span.repeats:
            return (
                self._part(span.definition, span.low, span.high),
                high - low,
                high - low == 1 and definition.kind != "vector",
            )
        first = span.low + low - begin
        text = self._part(span.definition, first, first + high - low)
        return text, high - low, definition.kind != "vector"

    def _number(self, number: float) -> str:
        value = (
            "f.NAN"
            if math.isnan(number)
            else f"{'-' if number < 0 else ''}f.INF"
            if math.isinf(number)
            else repr(number)
        )
        return self.numbers.setdefault(value, f"k{len(self.numbers)}")

    def _placed(self, spans: Sequence[Span]) -> Iterator[tuple[int, tuple[str, int, bool]]]:
        """Yield the parts of an operand, with the first column of each."""
        begin = 0
        for span in spans:
            if span.definition < 0 or span.repeats:
                yield begin, self._one(spans, begin, begin + span.width)
            else:
                for low, high in self.definitions[span.definition].parts(span.low, span.high):
                    first = begin + low - span.low
                    yield first, (*self._one(spans, first, first + high - low),)
            begin += span.width

    def _set(self, index: int, low: int, high: int, text: str, is_full: bool = True) -> None:
        self.sizes[_name(index, low)] = _padded(high - low)
        if not is_full:
            text = f"tl.broadcast_to({text}, ({self.rows}, {_padded(high - low)}))"
        self.lines.append(f"{_name(index, low)} = {text}")

    # Instructions.

    def _emit(self, instruction: Instruction, operands: tuple[tuple[Span, ...], ...], results: tuple[int, ...]) -> None:
        name = instruction.operation
        if name in _FORMULAS:
            for low, high in self.definitions[results[0]].parts():
                found = [self._one(spans, low, high) for spans in operands]
                text = _FORMULAS[name].format(*[text for text, _, _ in found])
                self._set(results[0], low, high, text, any(is_full for _, _, is_full in found))
            return
        {
            "product": self._product,
            "gather": self._gather,
            "row_sum": self._reduction,
            "row_max": self._reduction,
            "row_cumsum": self._cumsum,
            "norm": self._norm,
            "norm_backward": self._norm_backward,
        }[name](instruction, operands, results)

    def _segments(self, instruction: Instruction) -> Iterator[tuple[int, int, int]]:
        size = instruction.width // instruction.segments
        for segment in range(instruction.segments):
            yield segment, segment * size, (segment + 1) * size

    def _within(self, spans: Sequence[Span], low: int, high: int) -> list[tuple[str, int]]:
        """Return the full variables of the parts of an operand between two columns."""
        found = []
        for start, (text, width, is_full) in self._placed(spans):
            if low <= start < high or start <= low < start + width:
                begin, end = max(start, low), min(start + width, high)
                text, width, is_full = self._one(spans, begin, end)
                found.append((text if is_full else f"tl.broadcast_to({text}, ({self.rows}, {_padded(width)}))", width))
        return found

    def _sum(self, parts: Sequence[tuple[str, int]]) -> str:
        return " + ".join(
            text if width == 1 else f"tl.sum({_zeroed(text, width)}, 1, keep_dims=True)" for text, width in parts
        )

    def _reduction(
        self, instruction: Instruction, operands: tuple[tuple[Span, ...], ...], results: tuple[int, ...]
    ) -> None:
        if self._is_narrow(instruction, operands[0]):
            self._fence(operands[0])
            size, (span,) = instruction.width // instruction.segments, operands[0]
            source = f"local + {self.definitions[span.definition].column + span.low}"
            for low, high in self.definitions[results[0]].parts():
                name, columns = _name(results[0], low), f"c{_padded(high - low)}"
                self.sizes[name] = _padded(high - low)
                # Columns of the padding read the last segment.
                place = f"{source} + tl.minimum({low} + {columns}, {high - 1}) * {size}"
                self.lines += [f"{name} = tl.load({place})", f"for j in range(1, {size}):"]
                two = f"{name}, tl.load({place} + j)"
                total = "f.add" if instruction.operation == "row_sum" else "f.larger"
                self.lines.append(f"    {name} = {total}({two})")
            return
        for segment, low, high in self._segments(instruction):
            parts = self._within(operands[0], low, high)
            if instruction.operation == "row_sum":
                text = self._sum(parts)
            else:
                text = ""
                for part, width in parts:
                    size = _padded(width)
                    whole = part if size == width else f"tl.where(c{size} < {width}, {part}, -f.INF)"
                    most = part if width == 1 else f"f.row_max({whole})"
                    text = most if not text else f"tl.maximum({text}, {most}, propagate_nan=tl.PropagateNan.ALL)"
            self._set(results[0], segment, segment + 1, text)

    def _cumsum(
        self, instruction: Instruction, operands: tuple[tuple[Span, ...], ...], results: tuple[int, ...]
    ) -> None:
        for _, low, high in self._segments(instruction):
            before = ""
            for begin, end in self.definitions[results[0]].parts(low, high):
                text, width, is_full = self._one(operands[0], begin, end)
                text = text if is_full else f"tl.broadcast_to({text}, ({self.rows}, {_padded(width)}))"
                total = text if width == 1 else f"tl.cumsum({text}, 1)"
                self._set(results[0], begin, end, f"{total}{before}")
                before = f" + {self._sum([(text, width)])}{before}"

    def _norm(self, instruction: Instruction, operands: tuple[tuple[Span, ...], ...], results: tuple[int, ...]) -> None:
        size = instruction.width // instruction.segments
        for segment, low, high in self._segments(instruction):
            own = f"{_name(results[0], low)}_{segment}"
            self.lines.append(f"mean_{own} = ({self._sum(self._within(operands[0], low, high))}) * {1 / size!r}")
            parts = [
                (f"({text} - mean_{own}) * ({text} - mean_{own})", width)
                for text, width in self._within(operands[0], low, high)
            ]
            self.lines.append(f"square_{own} = ({self._sum(parts)}) * {1 / size!r}")
            self._set(results[1], segment, segment + 1, f"f.rsqrt(square_{own} + {instruction.epsilon!r})")
            for begin, end in self.definitions[results[0]].parts(low, high):
                text, _, is_full = self._one(operands[0], begin, end)
                self._set(results[0], begin, end, f"({text} - mean_{own}) * {_name(results[1], segment)}", True)

    def _norm_backward(
        self, instruction: Instruction, operands: tuple[tuple[Span, ...], ...], results: tuple[int, ...]
    ) -> None:
        size = instruction.width // instruction.segments
        gradient, normed, factor = operands
        for segment, low, high in self._segments(instruction):
            own = _name(results[0], low)
            pairs = self.definitions[results[0]].parts(low, high)
            g = [self._whole(gradient, *pair) for pair in pairs]
            y = [self._whole(normed, *pair) for pair in pairs]
            self.lines.append(f"mean_{own} = ({self._sum(g)}) * {1 / size!r}")
            products = [(f"{one} * {other}", width) for (one, width), (other, _) in zip(g, y, strict=True)]
            self.lines.append(f"slope_{own} = ({self._sum(products)}) * {1 / size!r}")
            r, _, _ = self._one(factor, segment, segment + 1)
            for (begin, end), (one, _), (other, _) in zip(pairs, g, y, strict=True):
                self._set(results[0], begin, end, f"{r} * ({one} - mean_{own} - {other} * slope_{own})")

    def _whole(self, spans: Sequence[Span], low: int, high: int) -> tuple[str, int]:
        text, width, is_full = self._one(spans, low, high)
        return text if is_full else f"tl.broadcast_to({text}, ({self.rows}, {_padded(width)}))", width

    def _fence(self, spans: Sequence[Span]) -> None:
        if any(span.definition in self.unfenced for span in spans):
            self.lines.append("tl.debug_barrier()")
            self.unfenced.clear()

    def _gather(
        self, instruction: Instruction, operands: tuple[tuple[Span, ...], ...], results: tuple[int, ...]
    ) -> None:
        """Read columns of scratch by a table of their places there."""
        places = [
            self.definitions[span.definition].column + column
            for span in operands[0]
            for column in range(span.low, span.high)
        ]
        self._fence(operands[0])
        table = f"table{len(self.tables)}"
        self.tables.append(tuple([places[column] for column in instruction.columns]))
        for low, high in self.definitions[results[0]].parts():
            size = _padded(high - low)
            index = f"tl.load({table} + {low} + c{size}, mask=c{size} < {high - low}, other=0)"
            self._set(results[0], low, high, f"tl.load(local + {index})")

    def _product(
        self, instruction: Instruction, operands: tuple[tuple[Span, ...], ...], results: tuple[int, ...]
    ) -> None:
        weight = self.program.weights[instruction.weight]
        start, operand = operands
        self._fence(operand)
        columns = weight.groups * weight.rows  # of a segment of the result
        for low, high in self.definitions[results[0]].parts():
            segment, within = divmod(low, columns)
            group, first = divmod(within, weight.rows)
            width, size = high - low, _padded(high - low)
            begin, _, _ = self._one(start, low, high)
            total = _name(results[0], low)
            self.sizes[total] = size
            self.lines.append(f"{total} = tl.broadcast_to({begin}, ({self.rows}, {size}))")
            at = (segment * weight.groups + group) * weight.depth  # in the operand
            done, place = 0, 0
            for span in operand:
                begin_, end_ = max(place, at), min(place + span.width, at + weight.depth)
                if begin_ < end_:
                    to = f"weight{instruction.weight} + {(group * weight.depth + done) * weight.rows + first}"
                    self._times(total, span, span.low + begin_ - place, end_ - begin_, to, weight.rows, width)
                    done += end_ - begin_
                place += span.width

    def _times(self, total: str, span: Span, low: int, depth: int, weight: str, rows: int, width: int) -> None:
        """Add the product of some columns of an operand and rows of a weight to a result."""
        definition, size = self.definitions[span.definition], _padded(width)
        ends = f"c{_DEPTH} + k < {depth}"
        if definition.is_scratch:
            source = f"local + {definition.column + low} + k + c{_DEPTH}"
            read = f"tl.load({source}, mask={ends}, other=0.0)" if depth % _DEPTH else f"tl.load({source})"
        else:
            source = f"{definition.source} + at[:, None] * {definition.source}_s + {low} + k + c{_DEPTH}"
            mask = f"live[:, None] & ({ends})" if depth % _DEPTH else f"live[:, None] & (c{_DEPTH} >= 0)"
            read = f"tl.load({source}, mask={mask}, other=0.0).to(tl.float32)"
        self.lines.append(f"for k in range(0, {depth}, {_DEPTH}):")
        if width == 1:
            own = f"tl.load({weight} + (k + c{_DEPTH}) * {rows}, mask={ends}, other=0.0)"
            self.lines.append(f"    {total} += tl.sum({read} * {own}, 1, keep_dims=True)")
            return
        deep = f"(k + tl.arange(0, {_DEPTH}))[:, None]"
        mask = [f"({deep} < {depth})"] * bool(depth % _DEPTH) + [f"(c{size} < {width})"] * (size != width)
        masked = f", mask={' & '.join(mask)}, other=0.0" if mask else ""
        own = f"tl.load({weight} + {deep} * {rows} + c{size}{masked})"
        self.lines.append(f"    {total} = tl.dot({read}, {own}, {total}, input_precision=precision)")


def _widths(program: Program, instruction: Instruction) -> list[int]:
    """Return the columns of each operand."""
    widths = [instruction.width] * len(instruction.operands)
    if instruction.operation == "product":
        weight = program.weights[instruction.weight]
        widths[1] = instruction.segments * weight.groups * weight.depth
    elif instruction.operation == "norm_backward":
        widths[2] = instruction.segments
    elif instruction.operation == "gather":
        widths[0] = program.blocks[instruction.operands[0].block].width - instruction.operands[0].start
    return widths


def _result_widths(instruction: Instruction) -> list[int]:
    if instruction.operation in _REDUCTIONS:
        return [instruction.segments]
    return [instruction.width, instruction.segments][: len(instruction.results)]


def _padded(width: int) -> int:
    """Return the columns of a variable: a power of two."""
    return 1 if width == 1 else max(16, 1 << (width - 1).bit_length())


def _name(definition: int, low: int) -> str:
    return f"v{definition}_{low}"


def _mask(rows: str, width: int) -> str:
    size = _padded(width)
    return f"{rows}[:, None] & (c{size} < {width})"


def _zeroed(text: str, width: int) -> str:
    """Return a variable with zeros in the columns of its padding."""
    size = _padded(width)
    return text if size == width else f"tl.where(c{size} < {width}, {text}, 0.0)"
