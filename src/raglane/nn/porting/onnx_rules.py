"""The operators of ONNX that exporters write between constants, sizes and recurrent nodes.

Sizes that a file does not contain are NaN in tensors of float64, which arithmetic propagates, and
axes of such a size are *spread*.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_MOST = 2**31  # numbers of a tensor


@dataclass(frozen=True)
class Constant:
    """A value that depends on constants and sizes only.

    Attributes:
        tensor: the numbers; unknown sizes are NaN.
        spread: axes of an unknown size, along which the numbers repeat. The tensor has size 1
            there.
    """

    tensor: Tensor
    spread: AbstractSet[int] = frozenset()


class UnsupportedError(Exception):
    """The result of a node with these inputs is unknown."""


def integers_of(sizes: Sequence[float]) -> Tensor:
    """Return integers, as float64 if some are unknown."""
    is_unknown = any(math.isnan(size) for size in sizes)
    return torch.tensor(sizes, dtype=torch.float64 if is_unknown else torch.int64, device="cpu")


def _has_unknown(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and bool(tensor.isnan().any())


@dataclass(frozen=True)
class NodeCall:
    """A node with the values of its attributes and inputs."""

    attributes: dict[str, Any]
    inputs: list[Constant | None]
    outputs: int

    def value(self, index: int) -> Constant:
        """Return an input that must be there."""
        value = self.inputs[index]
        if value is None:
            raise UnsupportedError
        return value

    def values(self) -> list[Constant]:
        """Return all inputs, which must be there."""
        return [self.value(index) for index in range(len(self.inputs))]

    def tensor(self, index: int) -> Tensor:
        """Return the numbers of an input without spread axes."""
        value = self.value(index)
        if value.spread:
            raise UnsupportedError
        return value.tensor

    def integers(self, name: str, index: int) -> list[int | None] | None:
        """Return integers, of an attribute in older models; None for unknown ones."""
        if index >= len(self.inputs) or self.inputs[index] is None:
            numbers: Any = self.attributes.get(name)
            return numbers
        return [
            None if math.isnan(number) else int(number)
            for number in self.tensor(index).flatten().tolist()
        ]

    def exact(self, name: str, index: int) -> list[int] | None:
        """Return integers that must not be unknown."""
        numbers = self.integers(name, index)
        if numbers is None:
            return None
        if None in numbers:
            raise UnsupportedError
        return [number for number in numbers if number is not None]

    def axes(self, rank: int, index: int = 1) -> list[int] | None:
        """Return the axes of a node as numbers from 0."""
        axes = self.exact("axes", index)
        return None if axes is None else [_axis(axis, rank) for axis in axes]

    def axis(self, default: int, rank: int) -> int:
        """Return the axis of a node as a number from 0."""
        return _axis(self.attributes.get("axis", default), rank)


def _axis(axis: int, rank: int) -> int:
    if not -rank <= axis < rank:
        raise UnsupportedError
    return axis % rank


def _uniform(value: Constant) -> Tensor:
    """Return the only number of a value, without dimensions."""
    first = value.tensor.flatten()[:1]
    if not (value.tensor == first).all() and not value.tensor.isnan().all():
        raise UnsupportedError
    return first.reshape(())


def _check_size(shape: Sequence[int]) -> None:
    """Raise for a tensor of more numbers than any weight has."""
    if math.prod(shape) > _MOST:
        raise UnsupportedError


def _repeated(number: Tensor, sizes: Sequence[int | None]) -> Constant:
    """Return a number repeated in all axes, of which some have an unknown size."""
    shape = [1 if size is None else size for size in sizes]
    _check_size(shape)
    spread = {axis for axis, size in enumerate(sizes) if size is None}
    return Constant(number.expand(shape), spread)


_VALUES = {
    "value_float": torch.float32,
    "value_floats": torch.float32,
    "value_int": torch.int64,
    "value_ints": torch.int64,
}


def _constant(call: NodeCall) -> Constant:
    ((name, value),) = call.attributes.items()
    if name == "value":
        return Constant(value)
    return Constant(torch.tensor(value, dtype=_VALUES[name], device="cpu"))


def _constant_of_shape(call: NodeCall) -> Constant:
    number = call.attributes.get("value", torch.zeros(1, device="cpu"))
    return _repeated(number.reshape(()), call.integers("", 0) or [])


def _shape(call: NodeCall) -> Constant:
    value = call.value(0)
    sizes = [
        math.nan if axis in value.spread else size for axis, size in enumerate(value.tensor.shape)
    ]
    start = call.attributes.get("start", 0)
    return Constant(integers_of(sizes[start : call.attributes.get("end")]))


def _size(call: NodeCall) -> Constant:
    value = call.value(0)
    return Constant(integers_of([math.nan if value.spread else value.tensor.numel()])[0])


def _expand(call: NodeCall) -> Constant:
    value = call.value(0)
    target = call.integers("", 1) or []
    dimensions = value.tensor.dim()
    rank = max(len(target), dimensions)
    tensor = value.tensor.reshape([1] * (rank - dimensions) + [*value.tensor.shape])
    sizes: list[int | None] = [*[1] * (rank - len(target)), *target]
    before = {axis + rank - dimensions for axis in value.spread}
    # A size of 1 repeats to an unknown size, and an unknown size to 1 stays unknown.
    spread = {
        axis
        for axis, size in enumerate(sizes)
        if (size is None and tensor.shape[axis] == 1) or (axis in before and size in (None, 1))
    }
    shape = [tensor.shape[axis] if size in (None, 1) else size for axis, size in enumerate(sizes)]
    _check_size(shape)
    return Constant(tensor.expand(shape), spread)


def _tile(call: NodeCall) -> Constant:
    value = call.value(0)
    repeats = call.integers("repeats", 1) or []
    is_unknown = {axis for axis, count in enumerate(repeats) if count is None}
    if any(value.tensor.shape[axis] != 1 for axis in is_unknown):
        raise UnsupportedError
    counts = [
        1 if count is None or axis in value.spread else count for axis, count in enumerate(repeats)
    ]
    _check_size([*value.tensor.shape, *counts])
    return Constant(value.tensor.repeat(counts), value.spread | is_unknown)


def _reshape(call: NodeCall) -> Constant:
    value = call.value(0)
    sizes = call.integers("shape", 1) or []
    if not call.attributes.get("allowzero", 0):
        shape = [
            None if axis in value.spread else size for axis, size in enumerate(value.tensor.shape)
        ]
        sizes = [shape[axis] if size == 0 else size for axis, size in enumerate(sizes)]
    if not value.spread and None not in sizes:
        return Constant(value.tensor.reshape([size for size in sizes if size is not None]))
    return _repeated(_uniform(value), [None if size == -1 else size for size in sizes])


def _flatten(call: NodeCall) -> Constant:
    tensor = call.tensor(0)
    axis = call.attributes.get("axis", 1)
    return Constant(tensor.reshape(math.prod(tensor.shape[:axis]), -1))


def _transpose(call: NodeCall) -> Constant:
    value = call.value(0)
    order = call.attributes.get("perm", [*range(value.tensor.dim())][::-1])
    spread = {axis for axis, before in enumerate(order) if before in value.spread}
    return Constant(value.tensor.permute(order), spread)


def _squeeze(call: NodeCall) -> Constant:
    value = call.value(0)
    axes = call.axes(value.tensor.dim())
    if axes is None:
        return Constant(call.tensor(0).squeeze())
    if any(value.tensor.shape[axis] != 1 for axis in axes):
        raise UnsupportedError
    rest = [axis for axis in range(value.tensor.dim()) if axis not in axes]
    spread = {index for index, axis in enumerate(rest) if axis in value.spread}
    shape = [value.tensor.shape[axis] for axis in rest]
    return Constant(value.tensor.reshape(shape), spread)


def _unsqueeze(call: NodeCall) -> Constant:
    value = call.value(0)
    count = len(call.exact("axes", 1) or [])
    rank = value.tensor.dim() + count
    axes = call.axes(rank) or []
    rest = [axis for axis in range(rank) if axis not in axes]
    shape = [1] * rank
    for axis, size in zip(rest, value.tensor.shape, strict=True):
        shape[axis] = size
    return Constant(value.tensor.reshape(shape), {rest[axis] for axis in value.spread})


def _concat(call: NodeCall) -> Constant:
    values = call.values()
    rank = values[0].tensor.dim()
    joined = call.axis(0, rank)
    if any(joined in value.spread or value.tensor.dim() != rank for value in values):
        raise UnsupportedError
    shape = [max(value.tensor.shape[axis] for value in values) for axis in range(rank)]
    spread = {axis for value in values for axis in value.spread if shape[axis] == 1}
    tensors = []
    for value in values:
        sizes = [-1 if axis == joined else size for axis, size in enumerate(shape)]
        if any(
            size not in (-1, value.tensor.shape[axis]) and axis not in value.spread
            for axis, size in enumerate(sizes)
        ):
            raise UnsupportedError
        tensors.append(value.tensor.expand(sizes))
    return Constant(torch.cat(tensors, joined), spread)


def _slice(call: NodeCall) -> Constant:
    value = call.value(0)
    starts = call.exact("starts", 1) or []
    ends = call.exact("ends", 2) or []
    axes = call.axes(value.tensor.dim(), 3) or [*range(len(starts))]
    steps = call.exact("steps", 4) or [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        value = _sliced(value, axis, start, end, step)
    return value


def _sliced(value: Constant, axis: int, start: int, end: int, step: int) -> Constant:
    """Return a slice along an axis; of an unknown size, it has the size that it states."""
    if axis in value.spread:
        if not 0 <= start < end < 2**31 or step != 1:
            return value
        sizes = [-1] * value.tensor.dim()
        sizes[axis] = end - start
        return Constant(value.tensor.expand(sizes), value.spread - {axis})
    indices = [*range(value.tensor.shape[axis])][start:end:step]
    return Constant(value.tensor.index_select(axis, integers_of(indices).long()), value.spread)


def _gather(call: NodeCall) -> Constant:
    value = call.value(0)
    indices = call.tensor(1).long()
    axis = call.axis(0, value.tensor.dim())
    size = value.tensor.shape[axis]
    flat = torch.zeros_like(indices) if axis in value.spread else indices + size * (indices < 0)
    sizes = value.tensor.shape
    shape = [*sizes[:axis], *indices.shape, *sizes[axis + 1 :]]
    tensor = value.tensor.index_select(axis, flat.flatten()).reshape(shape)
    added = indices.dim() - 1
    spread = {other + added * (other > axis) for other in value.spread - {axis}}
    return Constant(tensor, spread)


def _split(call: NodeCall) -> list[Constant]:
    value = call.value(0)
    axis = call.axis(0, value.tensor.dim())
    if axis in value.spread:
        raise UnsupportedError
    sizes = call.exact("split", 1) or -(-value.tensor.shape[axis] // call.outputs)
    tensors = value.tensor.split(sizes, axis)
    if len(tensors) != call.outputs:
        raise UnsupportedError
    return [Constant(tensor, value.spread) for tensor in tensors]


_NUMBERS = {
    1: torch.float32,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    10: torch.float16,
    11: torch.float64,
    16: torch.bfloat16,
}


def _cast(call: NodeCall) -> Constant:
    value = call.value(0)
    dtype = _NUMBERS[call.attributes["to"]]
    if dtype.is_floating_point or not _has_unknown(value.tensor):
        return Constant(value.tensor.to(dtype), value.spread)
    if dtype is torch.bool:
        raise UnsupportedError
    return Constant(value.tensor.double().trunc(), value.spread)


def _elementwise(function: Callable[..., Tensor]) -> Callable[[NodeCall], Constant]:
    """Return the rule of an operator on elements of tensors that broadcast."""

    def rule(call: NodeCall) -> Constant:
        values = call.values()
        rank = max(value.tensor.dim() for value in values)
        spread = {rank - value.tensor.dim() + axis for value in values for axis in value.spread}
        tensor = function(*(value.tensor for value in values))
        return Constant(tensor, {axis for axis in spread if tensor.shape[axis] == 1})

    return rule


def _equal(first: Tensor, second: Tensor) -> Tensor:
    equal = first == second
    if not (_has_unknown(first) or _has_unknown(second)):
        return equal
    return torch.where((first + second).isnan(), math.nan, equal.double())


def _where(condition: Tensor, first: Tensor, second: Tensor) -> Tensor:
    if not _has_unknown(condition):
        return torch.where(condition.bool(), first, second)
    either = torch.where(condition.nan_to_num().bool(), first, second).double()
    return torch.where(condition.isnan() & (first != second), math.nan, either)


def _div(first: Tensor, second: Tensor) -> Tensor:
    if _has_unknown(first) or _has_unknown(second):
        # Of integers with unknown ones the quotient would be truncated.
        return (first / second) * math.nan
    is_float = first.is_floating_point()
    return torch.div(first, second, rounding_mode=None if is_float else "trunc")


def _reduced(function: Callable[..., Tensor]) -> Callable[[NodeCall], Constant]:
    """Return the rule of an operator that reduces axes."""

    def rule(call: NodeCall) -> Constant:
        tensor = call.tensor(0)
        axes = call.axes(tensor.dim())
        keeps = bool(call.attributes.get("keepdims", 1))
        if not axes:
            if call.attributes.get("noop_with_empty_axes", 0):
                return Constant(tensor)
            axes = [*range(tensor.dim())]
        return Constant(function(tensor, dim=axes, keepdim=keeps))

    return rule


def _product(tensor: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    for axis in sorted(dim, reverse=True):
        tensor = tensor.prod(axis, keepdim=keepdim)
    return tensor


def _dequantized(call: NodeCall) -> Constant:
    tensor = call.tensor(0)
    scale = call.tensor(1)
    zero = call.tensor(2) if len(call.inputs) > 2 else torch.zeros_like(scale)
    if scale.dim() > 1 or call.attributes.get("block_size", 0):
        raise UnsupportedError
    shape = [1] * tensor.dim()
    if scale.dim() == 1 and scale.numel() > 1:
        shape[call.axis(1, tensor.dim())] = -1
    difference = tensor.long() - zero.long().reshape(shape)
    return Constant(difference.to(scale.dtype) * scale.reshape(shape))


_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "Identity": torch.clone,
    "Add": torch.add,
    "Sub": torch.sub,
    "Mul": torch.mul,
    "Div": _div,
    "Pow": torch.pow,
    "Max": torch.maximum,
    "Min": torch.minimum,
    "Equal": _equal,
    "Where": _where,
    "Neg": torch.neg,
    "Abs": torch.abs,
    "Sqrt": torch.sqrt,
    "Reciprocal": torch.reciprocal,
    "Exp": torch.exp,
    "Tanh": torch.tanh,
    "Sigmoid": torch.sigmoid,
    "Relu": torch.relu,
}
RULES: dict[str, Callable[[NodeCall], Constant | list[Constant]]] = {
    "Constant": _constant,
    "ConstantOfShape": _constant_of_shape,
    "Shape": _shape,
    "Size": _size,
    "Expand": _expand,
    "Tile": _tile,
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Transpose": _transpose,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Concat": _concat,
    "Slice": _slice,
    "Gather": _gather,
    "Split": _split,
    "Cast": _cast,
    "DequantizeLinear": _dequantized,
    "ReduceSum": _reduced(torch.sum),
    "ReduceMean": _reduced(torch.mean),
    "ReduceMax": _reduced(torch.amax),
    "ReduceProd": _reduced(_product),
    "ReduceL2": _reduced(torch.linalg.vector_norm),
    **{name: _elementwise(function) for name, function in _FUNCTIONS.items()},
}
