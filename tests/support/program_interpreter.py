"""An interpreter of programs in NumPy, sequence by sequence, independent of the kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from raglane.programs.program import Instruction, Operand, Program

Array = Any  # an ndarray; NumPy's functions have no better types


def _sigmoid(a: Array) -> Array:
    e = np.exp(-np.abs(a))
    return np.where(a >= 0, 1 / (1 + e), e / (1 + e))


def _true(a: Array) -> Array:
    return a != 0


_EACH: dict[str, Callable[..., Array]] = {
    **{
        name: getattr(np, name)
        for name in "abs sign exp expm1 log log1p sqrt tanh sin cos floor round".split()
    },
    "copy": lambda a: a,
    "neg": np.negative,
    "not": lambda a: ~_true(a),
    "relu": lambda a: np.maximum(a, 0),
    "rsqrt": lambda a: 1 / np.sqrt(a),
    "reciprocal": lambda a: 1 / a,
    "sigmoid": _sigmoid,
    "erf": lambda a: np.vectorize(math.erf, otypes=[a.dtype])(a),
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "max": np.maximum,
    "min": np.minimum,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "and": lambda a, b: _true(a) & _true(b),
    "or": lambda a, b: _true(a) | _true(b),
    "pow": np.power,
    "sigmoid_backward": lambda g, y: g * y * (1 - y),
    "tanh_backward": lambda g, y: g * (1 - y * y),
    "fma": lambda a, b, c: a * b + c,
    "where": lambda a, b, c: np.where(_true(a), b, c),
}


def run_program(
    program: Program,
    offsets: Sequence[int],
    *,
    ascending: bool = True,
    elements: Sequence[Array] = (),
    sequences: Sequence[Array] = (),
    states: Sequence[Array] = (),
    vectors: Sequence[Array] = (),
    weights: Sequence[Array] = (),
) -> tuple[list[Array], list[Array]]:
    """Run the program of one step on a ragged batch; return the outputs ``(N, width)`` and final
    states ``(B, width)``.

    Shapes: elements ``(N, width)``, sequences and initial states ``(B, width)``, vectors
    ``(width,)``, weights ``(groups, rows, depth)``. An empty sequence keeps its initial states.
    """
    dtype = next(part for group in (elements, states, vectors) for part in group).dtype
    outputs = [np.full((offsets[-1], width), np.nan, dtype) for _, width in program.outputs]
    final = [state.copy() for state in states]
    for sequence in range(len(offsets) - 1):
        places = range(offsets[sequence], offsets[sequence + 1])
        for element in places if ascending else reversed(places):
            given = {
                "element": [part[element] for part in elements],
                "sequence": [part[sequence] for part in sequences],
                "state": [part[sequence].copy() for part in final],
                "vector": list(vectors),
            }
            rows = [
                np.full(block.width, np.nan, dtype)
                if block.kind == "local"
                else given[block.kind][block.index]
                for block in program.blocks
            ]
            for instruction in program.instructions:
                _execute(program, instruction, rows, weights)
            for output, (place, width) in zip(outputs, program.outputs, strict=True):
                output[element] = _read(rows, place, width, dtype)
            for state, place in zip(final, program.next_states, strict=True):
                state[sequence] = _read(rows, place, state.shape[1], dtype)
    return outputs, final


def _read(rows: list[Array], place: Operand, width: int, dtype: Any) -> Array:
    if place.block < 0:
        return np.full(width, place.number, dtype)
    if place.spread:
        return np.repeat(rows[place.block][place.start], width)
    return rows[place.block][place.start : place.start + width].copy()


def _matrices(rows: list[Array], instruction: Instruction, dtype: Any) -> list[Array]:
    """Return the operands of an instruction, with columns repeated along rows or columns."""
    count, groups = instruction.segments, instruction.groups
    wide = instruction.width // count
    found = []
    for place in instruction.operands:
        if place.along == "rows":
            found.append(np.repeat(rows[place.block][place.start :][:count], wide))
        elif place.along == "columns":
            each = rows[place.block][place.start :][: groups * wide].reshape(groups, 1, wide)
            found.append(np.repeat(each, count // groups, 1).reshape(-1))
        else:
            found.append(_read(rows, place, instruction.width, dtype))
    return found


def _execute(
    program: Program, instruction: Instruction, rows: list[Array], weights: Sequence[Array]
) -> None:
    width, parts = instruction.width, instruction.segments
    dtype = rows[instruction.results[0].block].dtype
    name = instruction.operation
    if name in _EACH:
        results = [_EACH[name](*_matrices(rows, instruction, dtype))]
    elif name in ("row_dot", "column_dot"):
        first, second = (
            matrix.reshape(instruction.groups, -1, width // parts)
            for matrix in _matrices(rows, instruction, dtype)
        )
        results = [(first * second).sum(2 if name == "row_dot" else 1)]
    elif name == "gather":
        place = instruction.operands[0]
        results = [rows[place.block][place.start + np.asarray(instruction.columns)]]
    elif name == "product":
        start, a = instruction.operands
        weight = weights[instruction.weight]
        groups, _, depth = weight.shape
        read = _read(rows, a, parts * groups * depth, dtype).reshape(parts, groups, depth)
        results = [
            _read(rows, start, width, dtype) + np.einsum("gnk,pgk->pgn", weight, read).reshape(-1)
        ]
    else:
        widths = (width, width, parts) if name == "norm_backward" else (width,)
        read = [
            _read(rows, place, size, dtype)
            for place, size in zip(instruction.operands, widths, strict=True)
        ]
        results = _ROWS[name](*(part.reshape(parts, -1) for part in read), instruction.epsilon)
    for place, result in zip(instruction.results, results, strict=True):
        flat = result.reshape(-1).astype(dtype)
        rows[place.block][place.start : place.start + len(flat)] = flat


def _norm(a: Array, epsilon: float) -> list[Array]:
    centred = a - a.mean(1, keepdims=True)
    scale = 1 / np.sqrt((centred * centred).mean(1, keepdims=True) + epsilon)
    return [centred * scale, scale]


def _norm_backward(g: Array, y: Array, scale: Array, epsilon: float) -> list[Array]:
    return [scale * (g - g.mean(1, keepdims=True) - y * (g * y).mean(1, keepdims=True))]


_ROWS: dict[str, Callable[..., list[Array]]] = {
    "row_sum": lambda a, epsilon: [a.sum(1)],  # noqa: ARG005
    "row_max": lambda a, epsilon: [a.max(1)],  # noqa: ARG005
    "norm": _norm,
    "norm_backward": _norm_backward,
    "row_cumsum": lambda a, epsilon: [a.cumsum(1)],  # noqa: ARG005
}
