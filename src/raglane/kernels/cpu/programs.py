"""Runs programs, steps of any cell, on the cpu kernels: one time loop in C++ over all elements of a
batch.
"""

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
from raglane.programs.program import KINDS, OPERATIONS, Operand, Program, product_program

_NUMBERS = {name: number for number, name in enumerate(OPERATIONS)}
# The structs raglane_program and raglane_outer.
_pack, _pack_outer = struct.Struct("=16q").pack, struct.Struct("=15q").pack
_NOWHERE = Operand(-1)


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
    """Run a program on a ragged batch; return its outputs ``(N, width)`` and the final states ``(B,
    width)``.

    All tensors are float32, or all float64; with float32, elements and outputs may be bfloat16.
    ``over`` maps the index of an output to the tensor whose memory it reuses. This may be one of
    ``elements``, if it is used only once.
    """
    encoded = encode(program)
    inputs = (elements, sequences, states, vectors, weights)
    if (
        output_dtypes is None
        and (made := _run_by_operator(encoded, offsets, ascending, inputs, over)) is not None
    ):
        return made
    for name, own, shapes in zip(_INPUTS, inputs, encoded.shapes, strict=True):
        if len(own) != len(shapes):
            got = f"{len(own)} tensors"
            rule = f"the {len(shapes)} tensors of the program"
            raise ShapeError(name, got, rule, f"pass {len(shapes)}")
    count, batch = _sizes(offsets, elements)
    dtype = _computed_in(inputs)
    narrow = (dtype, torch.bfloat16) if dtype is torch.float32 else (dtype,)
    rows = ((count,), (batch,), (batch,), (), ())
    fields = array("q")
    # References keep copies alive until C returns, and storages that another thread replaces
    # meanwhile.
    tensors: list[Tensor] = []
    storages = []
    for name, own, shapes, size in zip(_INPUTS, inputs, encoded.shapes, rows, strict=True):
        dtypes = narrow if name == "elements" else (dtype,)
        for index, (part, shape) in enumerate(zip(own, shapes, strict=True)):
            tensors.append(checked_rows(f"{name}[{index}]", part, (*size, *shape), dtypes))
            storages.append(tensors[-1].untyped_storage())
            _add(fields, tensors[-1])
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
        check_unchanged(
            offsets, count, torch.device("cpu")
        )  # raises the message of the other backends
        raise
    return outputs, finals


def _run_by_operator(
    encoded: Encoded,
    offsets: Tensor,
    ascending: bool,
    inputs: Sequence[Sequence[Tensor]],
    over: Mapping[int, Tensor],
) -> tuple[list[Tensor], list[Tensor]] | None:
    """As :func:`run`, by one call of C++; None if that cannot read a tensor, or is missing."""
    operators = library.operators()
    kernels = library.library()
    if [*map(len, inputs)] != [*map(len, encoded.shapes)]:
        return None
    reused = [over.get(index) for index in range(len(encoded.program.outputs))]
    new = len(reused) - len(over) + len(encoded.shapes[2])
    # torch's tracer cannot record such a call, and ends the process.
    if is_jit_traced() or operators is None or not new:  # no results are those of a failure
        return None
    settings = kernels.numbers[kernels.isa], kernels.flags, kernels.threads(), ascending
    try:
        made = operators.run_program(encoded.code, offsets, [*chain(*inputs)], reused, *settings)
    except NO_MEMORY:
        return None
    if len(made) != new:
        return None
    results = iter(made)
    return [next(results) if part is None else part for part in reused], [*results]


def run_lowered(
    lowered: Lowered,
    offsets: Tensor,
    ascending: bool,
    given: Mapping[int, Tensor],
    weights: Sequence[Tensor],
    over: Mapping[int, Tensor] = {},
) -> tuple[list[Tensor], list[Tensor]]:
    """Run the program of a lowered graph, whose inputs are ``given`` by node; see :func:`run`."""
    inputs: Any = {
        name: [given[node] for node in lowered.given.get(kind, ())]
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
    parts = (
        program.blocks,
        program.weights,
        program.instructions,
        program.outputs,
        program.next_states,
    )
    numbers = [
        *map(len, parts),
        sum(len(instruction.columns) for instruction in program.instructions),
    ]
    try:
        for block in program.blocks:
            numbers += KINDS.index(block.kind), block.width, block.index
        for weight in program.weights:
            numbers += weight.groups, weight.rows, weight.depth
        for instruction in program.instructions:
            numbers += (
                _NUMBERS[instruction.operation],
                instruction.width,
                instruction.segments,
                _bits_of(instruction.epsilon),
                instruction.weight,
                len(instruction.columns),
            )
            for places, most in ((instruction.results, 2), (instruction.operands, 3)):
                for place in (*places, *[_NOWHERE] * (most - len(places))):
                    numbers += _place(place)
        for output, width in program.outputs:
            numbers += (*_place(output), width)
        for state in program.next_states:
            numbers += _place(state)
        for instruction in program.instructions:
            numbers += instruction.columns
        code = array("q", numbers)
    except (KeyError, ValueError, OverflowError, TypeError, struct.error) as error:
        rule = "of kinds, operations and numbers of raglane.programs.program"
        raise ArgumentError("program", quote(str(error)), rule, "build it again") from error
    # C cannot see wrong numbers of results and operands, because encoded ones are padded.
    for number, instruction in enumerate(program.instructions):
        counts = len(instruction.results), len(instruction.operands)
        right = 2 if instruction.operation == "norm" else 1, OPERATIONS[instruction.operation]
        if counts != right:
            got = f"{counts[0]} results and {counts[1]} operands of {instruction.operation}"
            raise ArgumentError(
                f"instructions[{number}]", got, f"of {right[0]} and {right[1]}", "build it again"
            )
    shapes = tuple([tuple([(width,) for width in program.given(kind)]) for kind in KINDS[:-1]])
    weights = tuple([(weight.groups, weight.rows, weight.depth) for weight in program.weights])
    return Encoded(torch.frombuffer(code, dtype=torch.int64), (*shapes, weights), program)


def _place(place: Operand) -> tuple[int, ...]:
    return place.block, place.start, bool(place.spread), _bits_of(place.number)


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


def _memory(own: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the memory of an output: the caller's tensor if it fits."""
    if (
        own is not None
        and own.shape == shape
        and own.dtype is dtype
        and own.stride(1) == 1
        and own.is_cpu
    ):
        return own
    return torch.empty(shape, dtype=dtype, device="cpu")


def _computed_in(inputs: Sequence[Sequence[Tensor]]) -> torch.dtype:
    """Return the dtype of a call: that of the first tensor, with float32 for bfloat16."""
    first = next((part for own in inputs for part in own), None)
    if first is None:
        return torch.float32
    if not isinstance(first, Tensor) or first.dtype not in DTYPES:
        got = str(first.dtype) if isinstance(first, Tensor) else f"a {type(first).__name__}"
        rule = f"tensors of {', '.join(map(str, DTYPES))}, which the cpu kernels compute in"
        raise ShapeError("elements", got, rule, "convert it with .to()")
    return torch.float64 if first.dtype is torch.float64 else torch.float32


def _add(fields: array[int], part: Tensor) -> None:
    strides = (
        part.stride()
        if part.dim() == 3
        else (part.stride(0), 0, 0)
        if part.dim() == 2
        else (0, 0, 0)
    )
    fields.extend((part.data_ptr(), DTYPES[part.dtype], *strides))


# ---- products of the rows of all elements --------------------------------------------------------


def times(rows: Tensor, weight: Tensor) -> Tensor:
    """Return ``rows @ weight.T``, group by group; the bits of a row do not depend on the other
    rows.
    """
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
    offsets = torch.frombuffer(
        array("q", (0, rows.shape[0])), dtype=torch.int64
    )  # sooner than torch.tensor
    outputs, _ = run(
        product_program(groups, width, depth), offsets=offsets, elements=[rows], weights=[weight]
    )
    return outputs[0]


def outer_products(
    left: Tensor, right: Tensor | None, *, groups: int = 1, sums: bool = False
) -> tuple[Tensor | None, Tensor | None]:
    """Return the sums over the elements of the outer products of their rows, and of the rows of
    ``left``.
    """
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
    addresses = [pointer(part) for part in (left, right, to, total)]
    head = abi, isa, dtype, flags & 1, threads, count
    call("raglane_outer_products", _pack_outer(*head, *shape, *strides, *addresses))
    return to, total


def _rows(name: str, part: Any, count: int | None, dtype: torch.dtype | None) -> Tensor:
    """Return ``count`` rows that C can read, of a dtype; None for any."""
    try:
        rows, columns = part.shape
    except (AttributeError, TypeError, ValueError):
        rows = columns = 0
    shape = rows if count is None else count, columns
    return checked_rows(name, part, shape, tuple(DTYPES) if dtype is None else (dtype,))
