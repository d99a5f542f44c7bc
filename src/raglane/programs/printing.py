"""Programs to be read by people."""

from __future__ import annotations

from raglane.programs.compiled import Compiled
from raglane.programs.lower import Lowered
from raglane.programs.program import Instruction, Operand, Program

__all__ = ["written"]

_SIGNS = {"add": "+", "sub": "-", "mul": "*", "div": "/", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "=="}
_SIGNS |= {"ne": "!=", "and": "and", "or": "or"}
_GIVEN = {"element": "x", "sequence": "mask", "state": "state", "vector": "vector"}


def written(compiled: Compiled) -> str:
    """The forward program of a step, one instruction in a line."""
    return _written(compiled.forward(True, False).lowered)


def _written(lowered: Lowered) -> str:
    program = lowered.program
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
