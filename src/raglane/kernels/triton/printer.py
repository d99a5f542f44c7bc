"""Prints a program as the text of a Triton kernel.

An instance of a kernel runs some sequences, from the first step to the last of the longest. The
values of a step are variables in registers, ``(rows, columns)``, with a power of two of columns:
one for each part of a definition (:mod:`raglane.kernels.triton.spans`). The columns of the padding
may hold anything.

NOTE [barriers]: a product reads its left operand column by column in all threads. The operand is an
input, or it is stored in scratch memory, with a barrier before it is read. Successive steps use the
two halves of the scratch, so no second barrier is necessary after it is read: before a half is
written again, all threads have passed the barrier of the step between.
"""

from __future__ import annotations

import itertools
import re
from typing import NamedTuple

from raglane.kernels.triton.instructions import CHANNELS, Instructions, mask_of, padded, variable
from raglane.kernels.triton.linear import Tangents, roles_of
from raglane.kernels.triton.spans import ProgramColumns
from raglane.programs.graph import Refused
from raglane.programs.program import Program

# The rows of an instance by the most numbers of a row that are alive together. So a step of 8 warps
# spills no register: up to 128 units with at most 168 registers, up to 256 with 255, because 168
# would spill.
_ROWS = {8: 1440, 4: 2000, 2: 10400}
# The most numbers of a row that need only few registers of each thread.
_MOST_LIVE = 5500
_FEW_REGISTERS = 168
_REGISTERS = 255
# With fewer numbers an instance has half of the warps, and without a loop more rows.
_FEW_LIVE = 640
_MANY_ROWS = 32
# Numbers that a thread of an element-wise loop loads at a time, because a step takes less time than
# a load, and the most steps of which it does.
_LOADED = 8
_MOST_STEPS = 4


class PrintedKernel(NamedTuple):
    """The text of a kernel, and the products that are computed before it.

    Its arguments are, in this order: the number of rows; that of elements, ``order`` and
    ``offsets`` if the kernel has steps; elements, the results of the products, sequences and
    initial states, each with its stride; vectors; weights ``(groups, depth, rows)``; tables of
    ``gather``; outputs; final states; and scratch.
    """

    text: str
    before: tuple[int, ...]  # instructions whose results are elements
    has_steps: bool
    scratch: int  # numbers of scratch for each instance
    tables: tuple[tuple[int, ...], ...]
    rows: int  # of each instance
    blocks: int  # instances for the same rows: each runs other channels
    warps: int
    registers: int  # at most, of each thread
    is_elementwise: bool
    steps: int  # of each pass of the loop
    roles: tuple[str, ...]  # of the states, as roles_of returns them
    outputs: tuple[int, ...]  # widths
    finals: tuple[int, ...]


def kernel_of(program: Program, ascending: bool, *, of_chunks: bool = False) -> PrintedKernel:
    """Return the kernel of a program; raises Refused with the reason if there is none.

    The number of rows depends on how many values are alive together: they are the registers of a
    step. The kernel ``of_chunks`` has no outputs, and two final states for each carried one, ``s``,
    which runs of steps change to ``a * s + b``: b and a. It exists if the program is linear in
    them.
    """
    columns = ProgramColumns(program)
    if of_chunks and not columns.channels:
        raise Refused("it has no element-wise loop")
    live = _live(columns, ascending, of_chunks)
    rows = _choose_rows(columns, live)
    width = _give_scratch(columns)
    printer = _Printer(columns, ascending, rows, width, of_chunks)
    text = printer.text()
    warps = 4 if rows * live <= 4 * _FEW_LIVE else 8
    blocks = 1
    if columns.channels:  # a thread for each sequence and channel
        blocks = -(-columns.channels // CHANNELS)
        warps = rows
    return PrintedKernel(
        text,
        before=tuple(columns.before),
        has_steps=columns.has_steps,
        scratch=(1 + columns.has_steps) * rows * width,
        tables=tuple(printer.instructions.tables),
        rows=rows,
        blocks=blocks,
        warps=warps,
        registers=_FEW_REGISTERS if live <= _MOST_LIVE and not columns.is_cut else _REGISTERS,
        is_elementwise=bool(columns.channels),
        steps=printer.steps,
        roles=printer.roles,
        outputs=() if of_chunks else tuple([size for _, size in program.outputs]),
        finals=tuple([columns.definitions[state].width for state, _ in printer.finals]),
    )


def _choose_rows(columns: ProgramColumns, live: int) -> int:
    """Return the number of rows of an instance, by the most columns that are alive together; few
    ones are summed in tiles.
    """
    rows = next((rows for rows, most in _ROWS.items() if live <= most), 0)
    if not rows:
        raise Refused(
            f"its step holds {live} numbers at a time, and registers at most {max(_ROWS.values())}"
        )
    if not columns.has_steps and live <= _FEW_LIVE:
        return _MANY_ROWS
    if columns.channels:
        return min(rows, 2)
    if columns.has_steps and rows == max(_ROWS):
        columns.is_tiled = True
        return 4
    return rows


def _give_scratch(columns: ProgramColumns) -> int:
    """Give each definition that is read in scratch its columns there; return their number."""
    width = 0
    for definition in columns.definitions:
        if definition.is_scratch:
            definition.column = width
            width += definition.width
    return width


def _live(columns: ProgramColumns, ascending: bool, of_chunks: bool) -> int:
    """Return the most columns of all values that are alive together in a step."""
    printer = _Printer(columns, ascending, 1, 0, of_chunks)
    printer.text()
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    lines = printer.instructions.lines
    for index, line in enumerate(lines):
        for name in re.findall(r"\b[tvx]\d+(?:_\d+)+\b", line):
            first.setdefault(name, index)
            last[name] = index
    changes = [0] * (len(lines) + 1)
    for name, index in first.items():
        changes[index] += printer.instructions.sizes[name]
        changes[last[name] + 1] -= printer.instructions.sizes[name]
    return max(itertools.accumulate(changes))


def _adder(number: int) -> str:
    """Return the text of a function that adds some numbers to as many others."""
    first = [f"a{index}" for index in range(number)]
    second = [f"b{index}" for index in range(number)]
    sums = ", ".join(map(" + ".join, zip(first, second, strict=True)))
    return f"@triton.jit\ndef add{number}({', '.join([*first, *second])}):\n    return {sums}\n\n\n"


class _Printer:
    """Prints the kernel of one program."""

    def __init__(
        self, columns: ProgramColumns, ascending: bool, rows: int, scratch: int, of_chunks: bool
    ) -> None:
        self.columns = columns
        self.program = columns.program
        self.ascending = ascending
        self.rows = rows
        self.scratch = scratch
        self.instructions = Instructions(columns, rows, scratch)
        self.steps = 1  # of a pass of the loop
        self.roles = roles_of(columns)
        # The definition of each state, and its next value.
        self.following = [
            (columns.inputs["state", index], spans) for index, spans in enumerate(columns.following)
        ]
        # The definition of each final state, and the first letter of its variables.
        self.finals = [(state, "v") for state, _ in self.following]
        self.tangents = None
        if of_chunks:
            carried = [
                state
                for (state, _), role in zip(self.following, self.roles, strict=True)
                if role == "carried"
            ]
            self.finals = [(state, letter) for state in carried for letter in "vt"]
            self.tangents = Tangents(self.instructions, carried)

    def text(self) -> str:
        """Return the text of the kernel."""
        body = self._body()
        lines = [*self._prologue(), *self.instructions.head]
        if self.columns.has_steps:
            loop = [f"    {line}" for line in self._loop(body)]
            lines += [f"for t in range(0, longest, {self.steps}):", *loop, *self._final()]
        else:
            lines += body
        ranges = {name for line in lines for name in re.findall(r"\b[cd]\d+\b", line)}
        lines = [self._range(name[0], int(name[1:])) for name in sorted(ranges)] + lines
        lines = [f"of_row = tl.arange(0, {self.rows})[:, None]", *lines]
        kernel = f"def kernel({', '.join(self._arguments())}):\n" + "".join(
            f"    {line}\n" for line in lines
        )
        return "".join(_adder(number) for number in sorted(self.instructions.together)) + kernel

    def _loop(self, body: list[str]) -> list[str]:
        """Return the lines of a pass of the loop: of an element-wise one some steps, whose inputs
        are loaded first.
        """
        loads = self.instructions.loads
        if loads is self.instructions.lines or not loads:
            return body
        self.steps = max(1, min(_MOST_STEPS, _LOADED // len(loads)))
        names = "|".join(["live", "at", *(line.partition(" ")[0] for line in loads)])

        def numbered(lines: list[str], step: int) -> list[str]:
            return [re.sub(rf"\b({names})\b", rf"\1_{step}", line) for line in lines]

        lines = []
        for step in range(self.steps):
            at = f"begin + (t + {step})" if self.ascending else f"end - 1 - (t + {step})"
            lines += numbered([f"live = t + {step} < length", f"at = {at}", *loads], step)
        for step in range(self.steps):
            lines += numbered(body[2:], step)
        return lines

    def _range(self, axis: str, size: int) -> str:
        """Return the text of column numbers, as rows for d; of values with channels, those of this
        instance.
        """
        widest = self.instructions.widest
        if axis == "d":
            return f"d{size} = tl.arange(0, {size})[:, None]"
        first = f"tl.program_id(1) * {widest} + " if size > 1 and self.columns.channels else ""
        return f"c{size} = {first}tl.arange(0, {min(size, widest)})[None, :]"

    def _arguments(self) -> list[str]:
        program = self.program
        names = ["rows", *(["count", "order", "offsets"] if self.columns.has_steps else [])]
        counts = {
            kind: len(program.widths(kind)) for kind in ("element", "sequence", "state", "vector")
        }
        strided = [f"element{index}" for index in range(counts["element"])]
        strided += [f"product{index}" for index in range(len(self.columns.before))]
        strided += [
            f"{kind}{index}" for kind in ("sequence", "state") for index in range(counts[kind])
        ]
        names += [argument for name in strided for argument in (name, f"{name}_s")]
        rest = (
            ("vector", counts["vector"]),
            ("weight", len(program.weights)),
            ("table", len(self.instructions.tables)),
        )
        outputs = 0 if self.tangents else len(program.outputs)
        for kind, count in (*rest, ("output", outputs), ("final", len(self.finals))):
            names += [f"{kind}{index}" for index in range(count)]
        return [*names, "scratch", "precision: tl.constexpr"]

    def _prologue(self) -> list[str]:
        lines = [
            f"slot = tl.program_id(0) * {self.rows} + tl.arange(0, {self.rows})",
            "valid = slot < rows",
        ]
        if self.columns.has_steps:
            lines += [
                "row = tl.load(order + slot, mask=valid, other=0)",
                # Offsets that were changed on the device lead to no address outside of the
                # elements.
                "begin = tl.minimum(tl.maximum(tl.load(offsets + row, mask=valid, other=0), 0), count)",
                "end = tl.minimum(tl.maximum(tl.load(offsets + row + 1, mask=valid, other=0), begin), count)",
                "length = (end - begin).to(tl.int32)",
                "longest = tl.max(length, 0)",
            ]
        else:
            lines += ["row = slot.to(tl.int64)"]
        lines += [
            f"{name} = tl.full((1, 1), {value}, tl.float32)"
            for value, name in self.instructions.numbers.items()
        ]
        for state, _ in self.following:
            for low, high in self.columns.definitions[state].bounds():
                value = self.instructions.loaded(state, low, high, "row", "valid")
                lines.append(f"{variable(state, low)} = {value}")
        return [*lines, *(self.tangents.head if self.tangents else ())]

    def _body(self) -> list[str]:
        instructions = self.instructions
        definitions = self.columns.definitions
        if self.columns.has_steps:
            begin = "at = begin + t" if self.ascending else "at = end - 1 - t"
            instructions.lines += ["live = t < length", begin]
        else:
            instructions.lines += ["live = valid", "at = row"]
        self._add_scratch()
        for state, _ in self.following:
            for low, high in definitions[state].bounds():
                size = min(padded(high - low), instructions.widest)
                instructions.sizes[variable(state, low)] = size
        for index, definition in enumerate(definitions):
            if definition.kind:
                instructions.store(index)
        for step in self.columns.steps:
            instructions.emit(step)
            if self.tangents:
                self.tangents.emit(step)
            for result in step.results:
                instructions.store(result)
        if not self.tangents:
            self._store_outputs()
        states = self._add_next_states()
        return [*instructions.lines, *(f"{state} = next_{state}" for state in states)]

    def _add_scratch(self) -> None:
        """Append the lines with the addresses of the scratch of this instance and step."""
        if not self.scratch:
            return
        size = self.rows * self.scratch
        half = "0"
        if self.columns.has_steps:
            half = f"t % 2 * {size}"
            size = 2 * size
        instructions = self.instructions
        instructions.head.append(f"own = scratch + tl.program_id(0).to(tl.int64) * {size}")
        instructions.lines.append(f"base = own + {half}")
        instructions.lines.append(f"local = base + of_row * {self.scratch}")

    def _store_outputs(self) -> None:
        instructions = self.instructions
        for index, (output, (_, width)) in enumerate(
            zip(self.columns.outputs, self.program.outputs, strict=True)
        ):
            for low, high in instructions.bounds_of(output):
                address = f"output{index} + at[:, None] * {width} + {low} + c{padded(high - low)}"
                value = instructions.whole(output, low, high)
                mask = mask_of("live", high - low)
                instructions.lines.append(f"tl.store({address}, {value}, mask={mask})")

    def _add_next_states(self) -> list[str]:
        """Append the lines of the next states; return the variables of the states."""
        instructions = self.instructions
        names: list[str] = []
        for index, spans in self.following:
            for low, high in self.columns.definitions[index].bounds():
                state = variable(index, low)
                following = {state: instructions.operand(spans, low, high)[0]}
                if self.tangents:
                    following |= self.tangents.following(index, low, following[state])
                for name, value in following.items():
                    line = f"next_{name} = tl.where(live[:, None], {value}, {name})"
                    instructions.lines.append(line)
                names += following
        return names

    def _final(self) -> list[str]:
        lines = []
        for number, (index, letter) in enumerate(self.finals):
            definition = self.columns.definitions[index]
            for low, high in definition.bounds():
                first = f"final{number} + row[:, None] * {definition.width} + {low}"
                address = f"{first} + c{padded(high - low)}"
                state = variable(index, low, letter)
                lines.append(f"tl.store({address}, {state}, mask={mask_of('valid', high - low)})")
        return lines
