"""Runs programs, steps of any cell, on the cpu kernels: one time loop in C++ over a batch."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raglane._utils.checks import check_unchanged
from raglane._utils.messages import quote
from raglane._utils.tracing import is_jit_traced
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from raglane.native import library
from raglane.native.library import DTYPES, call, program_preamble
from raglane.native.memory import NO_MEMORY, checked_rows, contiguous, pointer
from raglane.programs.lower import Lowered
from raglane.programs.program import KINDS, OPERATIONS, Operand, Program

_NUMBERS = {name: number for number, name in enumerate(OPERATIONS)}
_pack = struct.Struct("=16q").pack  # the struct raglane_program
_pack_outer = struct.Struct("=15q").pack  # the struct raglane_outer
_pack_product = struct.Struct("=24q").pack  # the struct raglane_factors
_NOWHERE = Operand(-1)
_SPREADS = {"rows": 2, "columns": 3}  # raglane_spread


def run(
    program: Program,
    *,
    offsets: Tensor,
    ascending: bool = True,
    elements: Sequence[Tensor] = (),
    sequences: Sequence[Tensor] = (),
    states: Sequence[Tensor] = (),
    vectors: Sequence[Tensor] = (),
    weights: Sequence[Tensor] = (),
    output_dtypes: Sequence[torch.dtype] | None = None,
    over: Mapping[int, Tensor] = {},
) -> tuple[list[Tensor], list[Tensor]]:
    """Run a program on a batch; return its outputs ``(N, width)`` and final states ``(B, width)``.

    All tensors are float32, or all float64; with float32, elements and outputs may be bfloat16.
    ``over`` maps the index of an output to the tensor whose memory it reuses. This may be one of
    ``elements``, if it is used only once.
    """
    encoded = encode(program)
    inputs = (elements, sequences, states, vectors, weights)
    if output_dtypes is None:
        results = _run_by_operator(encoded, offsets, ascending, inputs, over)
        if results is not None:
            return results
    for name, tensors, shapes in zip(_INPUTS, inputs, encoded.shapes, strict=True):
        if len(tensors) != len(shapes):
            got = f"{len(tensors)} tensors"
            rule = f"the {len(shapes)} tensors of the program"
            raise ShapeError(name, got, rule, f"pass {len(shapes)}")
    count, batch = _sizes(offsets, elements)
    dtype = _computed_in(inputs)
    narrow = (dtype, torch.bfloat16) if dtype is torch.float32 else (dtype,)
    rows = ((count,), (batch,), (batch,), (), ())
    fields = array("q")
    # References keep copies alive until C returns, and storages that another thread replaces
    # meanwhile.
    readable: list[Tensor] = []
    storages = []
    for name, tensors, shapes, size in zip(_INPUTS, inputs, encoded.shapes, rows, strict=True):
        dtypes = narrow if name == "elements" else (dtype,)
        for index, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
            checked = checked_rows(f"{name}[{index}]", tensor, (*size, *shape), dtypes)
            readable.append(checked)
            storages.append(checked.untyped_storage())
            _add(fields, checked)
    kinds = [dtype] * len(program.outputs) if output_dtypes is None else list(output_dtypes)
    if len(kinds) != len(program.outputs) or not set(kinds) <= set(narrow):
        rule = f"{len(program.outputs)} dtypes of {', '.join(map(str, narrow))}"
        raise ArgumentError("output_dtypes", quote(kinds), rule, "leave it out")
    outputs = [
        _memory(over.get(index), (count, width), kind)
        for index, ((_, width), kind) in enumerate(zip(program.outputs, kinds, strict=True))
    ]
    finals = [torch.empty(batch, *shape, dtype=dtype, device="cpu") for shape in encoded.shapes[2]]
    for result in chain(outputs, finals):
        _add(fields, result)
    offsets = contiguous("offsets", offsets)
    code = encoded.code.data_ptr(), len(encoded.code)
    pointers = offsets.data_ptr(), 0, *code, fields.buffer_info()[0], len(fields) // 5, 0
    argument = _pack(*program_preamble(dtype), batch, count, ascending, 0, *pointers)
    try:
        call("raglane_run_program", argument)
    except ArgumentError:
        # Raises the message of the other backends.
        check_unchanged(offsets, count, torch.device("cpu"))
        raise
    return outputs, finals


def _run_by_operator(
    encoded: Encoded,
    offsets: Tensor,
    ascending: bool,
    inputs: Sequence[Sequence[Tensor]],
    over: Mapping[int, Tensor],
) -> tuple[list[Tensor], list[Tensor]] | None:
    """Do what :func:`run` does by one call of C++; None if it cannot read a tensor, or is missing."""
    operators = library.operators()
    kernels = library.library()
    if [*map(len, inputs)] != [*map(len, encoded.shapes)]:
        return None
    reused = [over.get(index) for index in range(len(encoded.program.outputs))]
    # torch's tracer cannot record such a call, and ends the process.
    if is_jit_traced() or operators is None:
        return None
    settings = kernels.numbers[kernels.isa], kernels.flags, kernels.threads(), ascending
    try:
        results, status, _ = operators.run_program(
            encoded.code, offsets, [*chain(*inputs)], reused, *settings
        )
    except NO_MEMORY:
        return None
    if status:
        return None
    following = iter(results)
    outputs = [next(following) if tensor is None else tensor for tensor in reused]
    return outputs, [*following]


def run_lowered(
    lowered: Lowered,
    offsets: Tensor,
    ascending: bool,
    values: Mapping[int, Tensor],
    weights: Sequence[Tensor],
    over: Mapping[int, Tensor] = {},
) -> tuple[list[Tensor], list[Tensor]]:
    """Run the program of a lowered graph on ``values`` of its nodes; see :func:`run`."""
    inputs: Any = {
        name: [values[node] for node in lowered.inputs.get(kind, ())]
        for name, kind in zip(_INPUTS, KINDS, strict=False)
    }
    turned = [
        weights[index].transpose(1, 2) if turned else weights[index]
        for index, turned in lowered.weights
    ]
    return run(
        lowered.program,
        offsets=offsets,
        ascending=ascending,
        **inputs | {"weights": turned},
        over=over,
    )


# ---- the program as integers ---------------------------------------------------------------------

_INPUTS = ("elements", "sequences", "states", "vectors", "weights")


class Encoded(NamedTuple):
    """A program as integers for C, and the shapes of its inputs."""

    code: Tensor
    shapes: tuple[tuple[tuple[int, ...], ...], ...]
    program: Program


@lru_cache(maxsize=256)
def encode(program: Program) -> Encoded:
    """Return a program as integers for C."""
    if not isinstance(program, Program):
        raise ArgumentTypeError("program", f"a {type(program).__name__}", "a Program", "build one")
    try:
        code = array("q", _numbers_of(program))
    except (KeyError, ValueError, OverflowError, TypeError, struct.error) as error:
        rule = "of kinds, operations and numbers of raglane.programs.program"
        raise ArgumentError("program", quote(str(error)), rule, "build it again") from error
    _check_counts(program)
    shapes = tuple([tuple([(width,) for width in program.widths(kind)]) for kind in KINDS[:-1]])
    weights = tuple([(weight.groups, weight.rows, weight.depth) for weight in program.weights])
    return Encoded(torch.frombuffer(code, dtype=torch.int64), (*shapes, weights), program)


def _numbers_of(program: Program) -> list[int]:
    """Return the integers of a program, in the order of ``raglane_program`` in ``raglane.h``."""
    instructions = program.instructions
    numbers = [
        len(program.blocks),
        len(program.weights),
        len(instructions),
        len(program.outputs),
        len(program.next_states),
        sum(len(instruction.columns) for instruction in instructions),
    ]
    for block in program.blocks:
        numbers += KINDS.index(block.kind), block.width, block.index
    for weight in program.weights:
        numbers += weight.groups, weight.rows, weight.depth
    for instruction in instructions:
        numbers += (
            _NUMBERS[instruction.operation],
            instruction.width,
            instruction.segments,
            _bits_of(instruction.epsilon),
            instruction.weight,
            len(instruction.columns),
            instruction.groups,
        )
        for operands, most in ((instruction.results, 2), (instruction.operands, 3)):
            for operand in (*operands, *[_NOWHERE] * (most - len(operands))):
                numbers += _fields_of(operand)
    for output, width in program.outputs:
        numbers += (*_fields_of(output), width)
    for state in program.next_states:
        numbers += _fields_of(state)
    for instruction in instructions:
        numbers += instruction.columns
    return numbers


def _check_counts(program: Program) -> None:
    """Raise for wrong numbers of results and operands: C sees padded ones."""
    for number, instruction in enumerate(program.instructions):
        counts = len(instruction.results), len(instruction.operands)
        right = 2 if instruction.operation == "norm" else 1, OPERATIONS[instruction.operation]
        if counts != right:
            got = f"{counts[0]} results and {counts[1]} operands of {instruction.operation}"
            raise ArgumentError(
                f"instructions[{number}]", got, f"of {right[0]} and {right[1]}", "build it again"
            )


def _fields_of(operand: Operand) -> tuple[int, ...]:
    spread = _SPREADS[operand.along] if operand.along else bool(operand.spread)
    return operand.block, operand.start, spread, _bits_of(operand.number)


def _bits_of(number: float) -> int:
    """Return the bits of a float64."""
    bits: int = struct.unpack("=q", struct.pack("=d", number))[0]
    return bits


# ---- tensors -------------------------------------------------------------------------------------


def _sizes(offsets: Tensor, elements: Sequence[Tensor]) -> tuple[int, int]:
    """Return ``N`` and ``B``; C checks the numbers of the offsets."""
    try:
        is_right = (
            offsets.dim() == 1
            and offsets.shape[0] > 0
            and offsets.dtype is torch.int64
            and offsets.is_cpu
            and offsets.untyped_storage().nbytes()
            >= 8 * (offsets.storage_offset() + offsets.shape[0])
        )
        count = int(elements[0].shape[0] if elements else offsets[-1])
    except NO_MEMORY:
        is_right = False
        count = 0
    if not is_right:
        check_unchanged(offsets, count, torch.device("cpu"))
    return count, offsets.shape[0] - 1


def _memory(over: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the memory of an output: the caller's tensor if it fits."""
    if (
        over is not None
        and over.shape == shape
        and over.dtype is dtype
        and over.stride(1) == 1
        and over.is_cpu
    ):
        return over
    return torch.empty(shape, dtype=dtype, device="cpu")


def _computed_in(inputs: Sequence[Sequence[Tensor]]) -> torch.dtype:
    """Return the dtype of a call: that of the first tensor, with float32 for bfloat16."""
    first = next(chain.from_iterable(inputs), None)
    if first is None:
        return torch.float32
    if not isinstance(first, Tensor) or first.dtype not in DTYPES:
        got = str(first.dtype) if isinstance(first, Tensor) else f"a {type(first).__name__}"
        rule = f"tensors of {', '.join(map(str, DTYPES))}, which the cpu kernels compute in"
        raise ShapeError("elements", got, rule, "convert it with .to()")
    return torch.float64 if first.dtype is torch.float64 else torch.float32


def _add(fields: array[int], tensor: Tensor) -> None:
    """Add the struct of a tensor: its address, dtype and strides."""
    dimensions = tensor.dim()
    strides: tuple[int, ...] = (0, 0, 0)
    if dimensions == 3:
        strides = tensor.stride()
    elif dimensions == 2:
        strides = tensor.stride(0), 0, 0
    fields.extend((tensor.data_ptr(), DTYPES[tensor.dtype], *strides))


# ---- products of the rows of all elements --------------------------------------------------------


def times(rows: Tensor, weight: Tensor) -> Tensor:
    """Return ``rows @ weight.T``, group by group; the bits of a row depend on no other row."""
    if not isinstance(weight, Tensor) or weight.dim() != 3 or not weight.numel():
        got = (
            f"shape {tuple(weight.shape)}"
            if isinstance(weight, Tensor)
            else f"a {type(weight).__name__}"
        )
        raise ShapeError(
            "weight",
            got,
            "a tensor (groups, width, depth), all above 0",
            "pass a tensor of that shape",
        )
    groups, width, depth = weight.shape
    # Views of their own, whose memory no other thread replaces.
    rows = _rows("rows", rows.detach() if isinstance(rows, Tensor) else rows, None, None)
    if rows.shape[1] != groups * depth:
        got = f"shape {tuple(rows.shape)}"
        rule = f"rows of {groups * depth} numbers, {groups} groups of {depth}"
        raise ShapeError("rows", got, rule, "pass rows of that length")
    wide = torch.promote_types(rows.dtype, torch.float32)
    weight = checked_rows("weight", weight.detach(), tuple(weight.shape), (wide,))
    output = torch.empty(rows.shape[0], groups * width, dtype=wide, device="cpu")
    tensors = array("q")
    for tensor in (rows, weight, output):
        _add(tensors, tensor)
    head = *program_preamble(wide), rows.shape[0], groups, width, depth
    call("raglane_product", _pack_product(*head, *tensors))
    return output


def outer_products(
    left: Tensor, right: Tensor | None, *, groups: int = 1, sums: bool = False
) -> tuple[Tensor | None, Tensor | None]:
    """Return the sums over the elements of outer products of rows, and of the rows of ``left``."""
    left = _rows("left", left, None, None)
    count, columns = left.shape
    if right is not None:
        right = _rows("right", right, count, left.dtype)
    wide = columns if right is None else right.shape[1]
    if groups < 1 or columns % groups or wide % groups or not columns or not wide:
        got = f"{groups} for {columns} and {wide} columns"
        raise ArgumentError(
            "groups", got, "a divisor of both", "drop the columns that belong to no group"
        )
    shape = (groups, columns // groups, wide // groups)
    to = None if right is None else torch.empty(shape, dtype=left.dtype, device="cpu")
    total = torch.empty(columns, dtype=left.dtype, device="cpu") if sums else None
    abi, isa, dtype, flags, threads = program_preamble(left.dtype)
    strides = left.stride(0), 0 if right is None else right.stride(0)
    pointers = map(pointer, (left, right, to, total))
    head = abi, isa, dtype, flags & 1, threads, count
    call("raglane_outer_products", _pack_outer(*head, *shape, *strides, *pointers))
    return to, total


def _rows(name: str, tensor: Any, count: int | None, dtype: torch.dtype | None) -> Tensor:
    """Return ``count`` rows that C can read, of a dtype; None for any."""
    try:
        rows, columns = tensor.shape
    except (AttributeError, TypeError, ValueError):
        rows = columns = 0
    shape = rows if count is None else count, columns
    return checked_rows(name, tensor, shape, tuple(DTYPES) if dtype is None else (dtype,))
