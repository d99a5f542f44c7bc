"""Locals that share their memory: each lives from its first instruction to its last."""

from __future__ import annotations

from dataclasses import replace

from raglane.programs.program import OPERATIONS, Block, Instruction, Operand, Program

__all__ = ["allocate"]

_ROWS = ("row_sum", "row_max", "row_cumsum", "norm", "norm_backward", "gather", "product")
_EACH = frozenset(OPERATIONS) - frozenset(_ROWS)


def allocate(program: Program) -> Program:
    """The same program with as few locals as their lives allow; what a step leaves keeps one of its own.

    Example:
        >>> blocks = (Block("state", 4), *[Block("local", 4)] * 3)
        >>> chain = [Instruction("tanh", (Operand(i + 1),), (Operand(i),), 4) for i in range(3)]
        >>> len(allocate(Program(blocks, (), tuple(chain), (), (Operand(3),))).blocks)
        3
    """
    end = len(program.instructions)
    # What a step leaves has a block of its own, so that it can be computed where it goes.
    last = {place.block: end for place in (*program.next_states, *(place for place, _ in program.outputs))}
    left = frozenset(last)
    for index in range(end - 1, -1, -1):
        instruction = program.instructions[index]
        for place in (*instruction.operands, *instruction.results):
            last.setdefault(place.block, index)
    blocks = [block for block in program.blocks if block.kind != "local"]
    kept = [index for index, block in enumerate(program.blocks) if block.kind != "local"]
    home = {old: new for new, old in enumerate(kept)}
    free: list[int] = []
    for index, instruction in enumerate(program.instructions):
        for place in instruction.results:
            if place.block in home:
                continue
            width = program.blocks[place.block].width
            is_left = place.block in left
            replaced = None if is_left else _replaced(program, instruction, last, index)
            if replaced is not None:
                home[place.block] = home[replaced]
                last[replaced] = -1
                continue
            fitting = [] if is_left else [block for block in free if blocks[block].width >= width]
            if fitting:
                found = min(fitting, key=lambda block: blocks[block].width)
                free.remove(found)
            else:
                blocks.append(Block("local", width))
                found = len(blocks) - 1
            home[place.block] = found
        ended = {place.block for place in (*instruction.operands, *instruction.results) if last[place.block] == index}
        free += [home[block] for block in ended if block >= 0 and program.blocks[block].kind == "local"]

    def moved(place: Operand) -> Operand:
        return place if place.block < 0 else replace(place, block=home[place.block])

    return replace(
        program,
        blocks=tuple(blocks),
        instructions=tuple(
            replace(
                instruction,
                results=tuple(moved(place) for place in instruction.results),
                operands=tuple(moved(place) for place in instruction.operands),
            )
            for instruction in program.instructions
        ),
        outputs=tuple((moved(place), width) for place, width in program.outputs),
        next_states=tuple(moved(place) for place in program.next_states),
    )


def _replaced(program: Program, instruction: Instruction, last: dict[int, int], index: int) -> int | None:
    """An operand that the result may be written over: a whole local that nobody reads again."""
    (result, *others) = instruction.results
    width = program.blocks[result.block].width
    if others or instruction.operation not in _EACH or result.start or instruction.width != width:
        return None
    for place in instruction.operands:
        if place.block < 0 or place.block == result.block or place.start or place.spread:
            continue
        block = program.blocks[place.block]
        spread = any(other.block == place.block and other != place for other in instruction.operands)
        if block.kind == "local" and block.width == width and last[place.block] == index and not spread:
            return place.block
    return None
