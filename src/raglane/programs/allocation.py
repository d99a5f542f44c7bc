"""The memory of a program's locals: values that are not alive together share it."""

from __future__ import annotations

from dataclasses import replace

from raglane.programs.program import OPERATIONS, Block, Instruction, Operand, Program

_ROWS = (
    *("row_sum", "row_max", "row_cumsum", "norm", "norm_backward", "row_dot", "column_dot"),
    *("gather", "product"),
)
_EACH = frozenset(OPERATIONS) - frozenset(_ROWS)


def allocate(program: Program) -> Program:
    """Return the program with locals shared by values that are not alive together; results keep
    their own.
    """
    last = _last_uses(program)
    end = len(program.instructions)
    blocks = [block for block in program.blocks if block.kind != "local"]
    inputs = [index for index, block in enumerate(program.blocks) if block.kind != "local"]
    home = {old: new for new, old in enumerate(inputs)}
    free: list[int] = []
    for index, instruction in enumerate(program.instructions):
        for result in instruction.results:
            if result.block in home:
                continue
            width = program.blocks[result.block].width
            stays = last[result.block] == end
            replaced = None if stays else _replaced(program, instruction, last, index)
            if replaced is not None:
                home[result.block] = home[replaced]
                last[replaced] = -1
                continue
            fitting = [] if stays else [block for block in free if blocks[block].width >= width]
            if fitting:
                home[result.block] = min(fitting, key=lambda block: blocks[block].width)
                free.remove(home[result.block])
            else:
                blocks.append(Block("local", width))
                home[result.block] = len(blocks) - 1
        free += _freed(program, instruction, last, index, home)
    return _moved(program, tuple(blocks), home)


def _last_uses(program: Program) -> dict[int, int]:
    """Return the last instruction that uses each block."""
    end = len(program.instructions)
    # Results of a step have their own blocks, so that they can be computed in place. So have
    # products of elements: the kernels compute them before the loop if nothing else writes there.
    last = {operand.block: end for operand in program.next_states}
    last |= {operand.block: end for operand, _ in program.outputs}
    for instruction in program.instructions:
        if _reads_only_elements(program, instruction):
            last[instruction.results[0].block] = end
    for index in range(end - 1, -1, -1):
        instruction = program.instructions[index]
        for operand in (*instruction.operands, *instruction.results):
            last.setdefault(operand.block, index)
    return last


def _freed(
    program: Program,
    instruction: Instruction,
    last: dict[int, int],
    index: int,
    home: dict[int, int],
) -> list[int]:
    """Return the memory of locals that no later instruction uses."""
    operands = (*instruction.operands, *instruction.results)
    ended = {operand.block for operand in operands if last[operand.block] == index}
    return [home[block] for block in ended if block >= 0 and program.blocks[block].kind == "local"]


def _moved(program: Program, blocks: tuple[Block, ...], home: dict[int, int]) -> Program:
    """Return the program with each block at its new index."""

    def moved(operand: Operand) -> Operand:
        return operand if operand.block < 0 else operand._replace(block=home[operand.block])

    instructions = [
        replace(
            instruction,
            results=tuple(map(moved, instruction.results)),
            operands=tuple(map(moved, instruction.operands)),
        )
        for instruction in program.instructions
    ]
    outputs = tuple((moved(operand), width) for operand, width in program.outputs)
    states = tuple(map(moved, program.next_states))
    return Program(blocks, program.weights, tuple(instructions), outputs, states)


def _reads_only_elements(program: Program, instruction: Instruction) -> bool:
    """Return True for a product that does not depend on the step before."""
    kinds = {
        program.blocks[operand.block].kind for operand in instruction.operands if operand.block >= 0
    }
    return instruction.operation == "product" and kinds <= {"element", "vector"}


def _replaced(
    program: Program, instruction: Instruction, last: dict[int, int], index: int
) -> int | None:
    """Return an operand that the result may overwrite: a whole local that is not read again."""
    (result, *others) = instruction.results
    width = program.blocks[result.block].width
    if others or instruction.operation not in _EACH or result.start or instruction.width != width:
        return None
    for operand in instruction.operands:
        if operand.block < 0 or operand.block == result.block or not _is_whole(operand):
            continue
        block = program.blocks[operand.block]
        spread = any(
            other.block == operand.block and other != operand for other in instruction.operands
        )
        if (
            block.kind == "local"
            and block.width == width
            and last[operand.block] == index
            and not spread
        ):
            return operand.block
    return None


def _is_whole(operand: Operand) -> bool:
    """Return True for an operand that reads its block from the first column on, each once."""
    return not (operand.start or operand.spread or operand.along)
