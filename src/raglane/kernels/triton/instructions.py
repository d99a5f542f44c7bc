"""The text of the instructions of a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import chain, groupby, islice
from typing import NamedTuple

from raglane.kernels.triton.spans import PlacedInstruction, ProgramColumns, Span

# The columns that `tl.dot` reads at a time.
_DEPTH = 16
# Within a step, the sums that are made together.
_SUMS = 8
# The numbers of a tile of a weight, and its fewest columns.
_TILE = 1024
_LEAST_DEEP = 8
# The tiles that are loaded at a time, whose numbers take registers.
_TILES = 8
_LEAST = 'float("-inf")'
CHANNELS = 32
"""The channels of an instance of an element-wise loop."""

_TRUTHS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_NAMED = ("exp", "expm1", "log", "log1p", "rsqrt", "reciprocal", "sigmoid", "tanh")
FORMULAS = {
    **{name: f"tl.where({{0}} {sign} {{1}}, 1.0, 0.0)" for name, sign in _TRUTHS.items()},
    **{name: f"{name}({{0}})" for name in _NAMED},
    "copy": "{0}",
    "neg": "-{0}",
    "abs": "tl.abs({0})",
    "sign": "tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, {0}))",
    "not": "tl.where({0} == 0, 1.0, 0.0)",
    "relu": "tl.where({0} < 0, 0.0, {0})",
    "floor": "tl.floor({0})",
    "round": "round_half_even({0})",
    "sqrt": "tl.sqrt_rn({0})",
    "erf": "tl.erf({0})",
    "sin": "tl.sin({0})",
    "cos": "tl.cos({0})",
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "div({0}, {1})",
    "pow": "pow({0}, {1})",
    "max": "larger({0}, {1})",
    "min": "smaller({0}, {1})",
    "and": "tl.where(({0} != 0) & ({1} != 0), 1.0, 0.0)",
    "or": "tl.where(({0} != 0) | ({1} != 0), 1.0, 0.0)",
    "sigmoid_backward": "{0} * {1} * (1.0 - {1})",
    "tanh_backward": "{0} * (1.0 - {1} * {1})",
    "fma": "{0} * {1} + {2}",
    "where": "tl.where({0} != 0, {1}, {2})",
}
"""Pointwise operations, some by :mod:`raglane.kernels.triton.functions`."""


def padded(width: int) -> int:
    """Return the columns of a variable: a power of two."""
    return 1 if width == 1 else max(16, 1 << (width - 1).bit_length())


def variable(definition: int, low: int, letter: str = "v") -> str:
    """Return the name of a part of a result or a state; of its tangent with the letter t."""
    return f"{letter}{definition}_{low}"


def mask_of(rows: str, width: int) -> str:
    """Return the condition of columns that are not padding, in some rows."""
    return " & ".join([f"{rows}[:, None]", *_inner(width)])


def _inner(width: int) -> list[str]:
    """Return the condition of columns that are not padding, if there are others."""
    size = padded(width)
    return [f"(c{size} < {width})"] if size != width else []


def _load(address: str, conditions: Sequence[str]) -> str:
    mask = f", mask={' & '.join(conditions)}, other=0.0" if conditions else ""
    return f"tl.load({address}{mask})"


class _Factor(NamedTuple):
    """The columns that a part of a product reads, and the rows of its weight."""

    read: Span
    address: str  # of the weight's first number
    stride: int


class Instructions:
    """The lines of a step."""

    def __init__(self, columns: ProgramColumns, rows: int, scratch: int) -> None:
        # The columns of the widest variable of an instance that runs some channels.
        self.widest = min(padded(columns.channels), CHANNELS) if columns.channels else 1 << 30
        self.columns = columns
        self.definitions = columns.definitions
        self.rows = rows
        self.scratch = scratch
        self.lines: list[str] = []
        # Of an element-wise loop, the lines that load a step's inputs; elsewhere they are among the
        # others.
        self.loads: list[str] = [] if columns.channels else self.lines
        self.head: list[str] = []  # before the loop
        self.sizes: dict[str, int] = {}  # columns of each variable
        self.numbers: dict[str, str] = {}  # variables by number
        self.tables: list[tuple[int, ...]] = []  # of gather
        self.together: set[int] = set()  # numbers of sums that are made together
        self._inputs: dict[tuple[int, int, int], str] = {}
        self._loaded: dict[str, str] = {}  # variables of products within a step by their loads
        self._unfenced: set[int] = set()  # stored in scratch since the last barrier

    # Variables.

    def loaded(self, index: int, low: int, high: int, rows: str, mask: str) -> str:
        """Return the text that loads columns of an input."""
        source = self.definitions[index].source
        address = f"{source} + {rows}[:, None] * {source}_s + {low} + c{padded(high - low)}"
        return _load(address, [mask_of(mask, high - low)])

    def column_variable(self, index: int, low: int, high: int) -> str:
        """Return the variable of columns of a definition; of an input, after it is loaded."""
        definition = self.definitions[index]
        if definition.kind in ("", "state"):
            return variable(index, low)
        key = index, low, high
        if key not in self._inputs:
            name = f"x{index}_{low}_{high}"
            size = padded(high - low)
            self._inputs[key] = name
            self.sizes[name] = min(size, self.widest)
            if definition.kind == "vector":
                # Registers are scarce where instances run all channels of a row.
                lines = self.head if self.columns.channels else self.lines
                lines.append(
                    f"{name} = {_load(f'{definition.source} + {low} + c{size}', _inner(high - low))}"
                )
            elif definition.kind == "sequence":
                self.head.append(f"{name} = {self.loaded(index, low, high, 'row', 'valid')}")
            else:
                self.loads.append(f"{name} = {self.loaded(index, low, high, 'at', 'live')}")
        return self._inputs[key]

    def operand(self, spans: Sequence[Span], low: int, high: int) -> tuple[str, bool]:
        """Return the variable of columns of an operand, and True if it has all rows and columns."""
        begin = 0
        for span in spans:
            if begin <= low and high <= begin + span.width:
                break
            begin += span.width
        if span.definition < 0:
            return self._number(span.number), False
        has_rows = self.definitions[span.definition].kind != "vector"
        if span.repeats:
            return self.column_variable(
                span.definition, span.low, span.high
            ), has_rows and high - low == 1
        first = span.low + low - begin
        return self.column_variable(span.definition, first, first + high - low), has_rows

    def _number(self, number: float) -> str:
        value = repr(number) if math.isfinite(number) else f'float("{number}")'
        return self.numbers.setdefault(value, f"k{len(self.numbers)}")

    def whole(self, spans: Sequence[Span], low: int, high: int) -> str:
        """Return columns of an operand with all rows and columns."""
        text, is_full = self.operand(spans, low, high)
        return text if is_full else self._broadcast(text, high - low)

    def _broadcast(self, text: str, width: int) -> str:
        return f"tl.broadcast_to({text}, ({self.rows}, {min(padded(width), self.widest)}))"

    def bounds_of(self, spans: Sequence[Span]) -> Iterator[tuple[int, int]]:
        """Yield the bounds of the parts of an operand."""
        begin = 0
        for span in spans:
            bounds = [(span.low, span.low + span.width)]
            if span.definition >= 0 and not span.repeats:
                bounds = self.definitions[span.definition].bounds(span.low, span.high)
            yield from ((begin + low - span.low, begin + high - span.low) for low, high in bounds)
            begin += span.width

    def _within(self, spans: Sequence[Span], low: int, high: int) -> list[tuple[str, int]]:
        """Return the parts of an operand between two columns, with their widths."""
        bounds = [(max(begin, low), min(end, high)) for begin, end in self.bounds_of(spans)]
        return [
            (self.whole(spans, begin, end), end - begin) for begin, end in bounds if begin < end
        ]

    def _set(self, index: int, low: int, high: int, text: str) -> None:
        name = variable(index, low)
        self.sizes[name] = min(padded(high - low), self.widest)
        self.lines.append(f"{name} = {text}")

    # Scratch.

    def store(self, index: int) -> None:
        """Store a definition in scratch if it is read there."""
        definition = self.definitions[index]
        if not definition.is_scratch:
            return
        columns = (Span(index, 0, definition.width),)
        for low, high in definition.bounds():
            size = padded(high - low)
            mask = "".join(f", mask={condition}" for condition in _inner(high - low))
            address = f"local + {definition.column + low} + c{size}"
            self.lines.append(f"tl.store({address}, {self.whole(columns, low, high)}{mask})")
        self._unfenced.add(index)

    def _fence(self, spans: Sequence[Span]) -> None:
        if any(span.definition in self._unfenced for span in spans):
            self.lines.append("tl.debug_barrier()")
            self._unfenced.clear()

    # Instructions.

    def emit(self, step: PlacedInstruction) -> None:
        """Append the lines of an instruction."""
        name = step.instruction.operation
        if name in FORMULAS:
            for low, high in self.definitions[step.results[0]].bounds():
                operands = [self.operand(spans, low, high) for spans in step.operands]
                text = FORMULAS[name].format(*[text for text, _ in operands])
                if not any(is_full for _, is_full in operands):
                    text = self._broadcast(text, high - low)
                self._set(step.results[0], low, high, text)
        elif name in ("row_sum", "row_max"):
            self._reduce(step)
        else:
            getattr(self, f"_{name}")(step)

    def _segments(self, step: PlacedInstruction) -> Iterator[tuple[int, int, int]]:
        size = step.instruction.width // step.instruction.segments
        return (
            (segment, segment * size, (segment + 1) * size)
            for segment in range(step.instruction.segments)
        )

    def _sum(self, pieces: Sequence[tuple[str, int]]) -> str:
        return " + ".join(
            text if width == 1 else f"tl.sum({_filled(text, width, '0.0')}, 1, keep_dims=True)"
            for text, width in pieces
        )

    def _reduce(self, step: PlacedInstruction) -> None:
        (spans,) = step.operands
        (result,) = step.results
        instruction = step.instruction
        is_sum = instruction.operation == "row_sum"
        if self.columns.is_narrow(instruction, spans):
            self._reduce_in_scratch(step, spans[0])
            return
        for segment, low, high in self._segments(step):
            pieces = self._within(spans, low, high)
            text = self._sum(pieces) if is_sum else self._most(pieces)
            self._set(result, segment, segment + 1, text)

    def _most(self, pieces: Sequence[tuple[str, int]]) -> str:
        """Return the text of the largest number of each row."""
        texts = [
            text if width == 1 else f"row_max({_filled(text, width, _LEAST)})"
            for text, width in pieces
        ]
        return reduce(lambda most, text: f"larger({most}, {text})", texts)

    def _reduce_in_scratch(self, step: PlacedInstruction, span: Span) -> None:
        """Append a reduction that reads a column of all segments at a time."""
        (result,) = step.results
        size = step.instruction.width // step.instruction.segments
        self._fence([span])
        source = f"local + {self.definitions[span.definition].column + span.low}"
        for low, high in self.definitions[result].bounds():
            # Columns of the padding read the last segment.
            address = f"{source} + tl.minimum({low} + c{padded(high - low)}, {high - 1}) * {size}"
            self._set(result, low, high, f"tl.load({address})")
            name = variable(result, low)
            total = f"larger({name}, tl.load({address} + j))"
            if step.instruction.operation == "row_sum":
                total = f"{name} + tl.load({address} + j)"
            self.lines += [f"for j in range(1, {size}):", f"    {name} = {total}"]

    def _row_cumsum(self, step: PlacedInstruction) -> None:
        for _, low, high in self._segments(step):
            before = ""
            for begin, end in self.definitions[step.results[0]].bounds(low, high):
                text = self.whole(step.operands[0], begin, end)
                total = text if end - begin == 1 else f"tl.cumsum({text}, 1)"
                self._set(step.results[0], begin, end, f"{total}{before}")
                before = f" + {self._sum([(text, end - begin)])}{before}"

    def _mean(self, name: str, pieces: Sequence[tuple[str, int]], step: PlacedInstruction) -> str:
        """Append the mean of a segment; return its variable."""
        share = step.instruction.segments / step.instruction.width
        self.lines.append(f"{name} = ({self._sum(pieces)}) * {share!r}")
        return name

    def _norm(self, step: PlacedInstruction) -> None:
        (spans,) = step.operands
        (normed, factor) = step.results
        for segment, low, high in self._segments(step):
            pieces = self._within(spans, low, high)
            mean = self._mean(f"mean{normed}_{segment}", pieces, step)
            squares = [(f"({text} - {mean}) * ({text} - {mean})", width) for text, width in pieces]
            square = self._mean(f"square{normed}_{segment}", squares, step)
            self._set(
                factor, segment, segment + 1, f"rsqrt({square} + {step.instruction.epsilon!r})"
            )
            for begin, end in self.definitions[normed].bounds(low, high):
                text = f"({self.whole(spans, begin, end)} - {mean}) * {variable(factor, segment)}"
                self._set(normed, begin, end, text)

    def _norm_backward(self, step: PlacedInstruction) -> None:
        (gradient, normed, factor) = step.operands
        (result,) = step.results
        for segment, low, high in self._segments(step):
            bounds = self.definitions[result].bounds(low, high)
            g = [(self.whole(gradient, begin, end), end - begin) for begin, end in bounds]
            y = [self.whole(normed, begin, end) for begin, end in bounds]
            products = [
                (f"{text} * {other}", width) for (text, width), other in zip(g, y, strict=True)
            ]
            mean = self._mean(f"mean{result}_{segment}", g, step)
            slope = self._mean(f"slope{result}_{segment}", products, step)
            r, _ = self.operand(factor, segment, segment + 1)
            for (begin, end), (text, _), other in zip(bounds, g, y, strict=True):
                self._set(result, begin, end, f"{r} * ({text} - {mean} - {other} * {slope})")

    def _gather(self, step: PlacedInstruction) -> None:
        """Read columns of scratch by a table of their indexes there."""
        (spans,) = step.operands
        self._fence(spans)
        columns = [
            self.definitions[span.definition].column + at
            for span in spans
            for at in range(span.low, span.high)
        ]
        table = f"table{len(self.tables)}"
        self.tables.append(tuple([columns[column] for column in step.instruction.columns]))
        for low, high in self.definitions[step.results[0]].bounds():
            size = padded(high - low)
            index = f"tl.load({table} + {low} + c{size}, mask=c{size} < {high - low}, other=0)"
            self._set(step.results[0], low, high, f"tl.load(local + {index})")

    def _product(self, step: PlacedInstruction) -> None:
        (start, operand) = step.operands
        (result,) = step.results
        self._fence(operand)
        bounds = self.definitions[result].bounds()
        for low, high in bounds:
            self._set(
                result, low, high, self._broadcast(self.operand(start, low, high)[0], high - low)
            )
        if self.columns.is_tiled:
            for size, equal in groupby(bounds, lambda pair: padded(pair[1] - pair[0])):
                while chosen := list(islice(equal, max(1, _SUMS // self.rows))):
                    self._add_tiles(step, chosen, size)
            return
        for low, high in bounds:
            for factor in self._factors(step, low):
                self._add_product(variable(result, low), factor, high - low)

    def _factors(self, step: PlacedInstruction, low: int) -> Iterator[_Factor]:
        """Yield the factors of some columns of a product."""
        weight = self.columns.program.weights[step.instruction.weight]
        segment, first = divmod(low, weight.rows)  # of the result's segments and groups
        offset = -segment * weight.depth  # of the span, in the columns that this segment reads
        for span in step.operands[1]:
            begin = max(offset, 0)
            end = min(offset + span.width, weight.depth)
            if begin < end:
                row = segment % weight.groups * weight.depth + begin
                yield _Factor(
                    Span(span.definition, span.low + begin - offset, span.low + end - offset),
                    f"weight{step.instruction.weight} + {row * weight.rows + first}",
                    weight.rows,
                )
            offset += span.width

    def _add_tiles(
        self, step: PlacedInstruction, bounds: Sequence[tuple[int, int]], size: int
    ) -> None:
        """Add a product within a step: tiles of the weight times columns of scratch, which are
        summed at the end.
        """
        (result,) = step.results
        factors = [list(self._factors(step, low)) for low, _ in bounds]
        deepest = max(padded(factor.read.width) for factor in chain(*factors))
        deep = min(max(_LEAST_DEEP, _TILE // size), deepest)
        rows = [[f"a{result}_{low}_{row}" for row in range(self.rows)] for low, _ in bounds]
        names = list(chain(*rows))
        self.lines += [f"{name} = tl.full(({deep}, {size}), 0.0, tl.float32)" for name in names]
        for (low, high), sums, of_columns in zip(bounds, rows, factors, strict=True):
            for factor in of_columns:
                self._add_factor(factor, sums, high - low, deep, _TILES // len(bounds))
        totals = ", ".join(f"s{name}" for name in names)
        self.lines.append(
            f"{totals} = tl.reduce(({', '.join(names)}), 0, add{len(names)}, keep_dims=True)"
        )
        self.together.add(len(names))
        for (low, _), (*others, last) in zip(bounds, rows, strict=True):
            text = f"s{last}"
            for row, name in enumerate(others):
                text = f"tl.where(of_row == {row}, s{name}, {text})"
            self.lines.append(f"{variable(result, low)} += {text}")

    def _add_factor(
        self, factor: _Factor, sums: Sequence[str], columns: int, deep: int, tiles: int
    ) -> None:
        """Add the tiles of a factor to the sums of all rows, in passes of some tiles."""
        read = factor.read
        source = self.definitions[read.definition].column + read.low
        passed = tiles * deep  # columns of a pass
        indent = ""
        k = ""
        step = deep
        if read.width > passed:
            indent = "    "
            k = "k + "
            step = passed
            self.lines.append(f"for k in range(0, {read.width}, {passed}):")
        for begin in range(0, min(read.width, passed), deep):
            at = f"({k}{begin} + d{deep})"
            ends = [f"({at} < {read.width})"] if read.width % step else []
            address = f"{factor.address} + {at} * {factor.stride} + c{padded(columns)}"
            tile = self._loaded_once(address, [*ends, *_inner(columns)], indent)
            for row, name in enumerate(sums):
                address = f"base + {row * self.scratch + source} + {at}"
                column = self._loaded_once(address, ends, indent)
                self.lines.append(f"{indent}{name} += {column} * {tile}")

    def _loaded_once(self, address: str, conditions: Sequence[str], indent: str) -> str:
        """Return the variable of numbers that are loaded once in a step, or in each pass of a
        loop.
        """
        load = _load(address, conditions)
        if indent or load not in self._loaded:
            self._loaded[load] = f"w{len(self.lines)}"
            self.lines.append(f"{indent}{self._loaded[load]} = {load}")
        return self._loaded[load]

    def _add_product(self, total: str, factor: _Factor, width: int) -> None:
        """Add the product of columns and rows of a weight to a result."""
        span = factor.read
        definition = self.definitions[span.definition]
        size = padded(width)
        depth = span.width
        # Outer products, because the columns of a padded tile would take registers.
        is_thin = depth < _DEPTH
        columns = "k" if is_thin else f"k + c{_DEPTH}"
        ends = [f"(c{_DEPTH} + k < {depth})"] if depth % _DEPTH and not is_thin else []
        if definition.is_scratch:
            read = _load(f"local + {definition.column + span.low} + {columns}", ends)
        else:
            row = f"{definition.source} + at[:, None] * {definition.source}_s"
            read = _load(f"{row} + {span.low} + {columns}", ["live[:, None]", *ends])
        self.lines.append(f"for k in range(0, {depth}, {1 if is_thin else _DEPTH}):")
        if is_thin:
            weight = _load(f"{factor.address} + k * {factor.stride} + c{size}", _inner(width))
            self.lines.append(f"    {total} += {read} * {weight}")
            return
        if width == 1:
            weight = _load(f"{factor.address} + (k + c{_DEPTH}) * {factor.stride}", ends)
            self.lines.insert(-1, f"parts = tl.full(({self.rows}, {_DEPTH}), 0.0, tl.float32)")
            self.lines += [
                f"    parts += {read} * {weight}",
                f"{total} += tl.sum(parts, 1, keep_dims=True)",
            ]
            return
        deep = f"(k + tl.arange(0, {_DEPTH}))[:, None]"
        # The last row again, times zero, which is NaN for an infinite weight: a mask of rows would
        # take registers.
        deep = f"tl.minimum({deep}, {depth - 1})" if ends else deep
        weight = _load(f"{factor.address} + {deep} * {factor.stride} + c{size}", _inner(width))
        self.lines.append(
            f"    {total} = tl.dot({read}, {weight}, {total}, input_precision=precision)"
        )


def _filled(text: str, width: int, fill: str) -> str:
    """Return a variable with a number in the columns of its padding."""
    size = padded(width)
    return text if size == width else f"tl.where(c{size} < {width}, {text}, {fill})"
