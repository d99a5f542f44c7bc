"""The rows and columns that the operands of an operation consist of.

While a step is traced, a tensor is represented by its *marks*, an int64 tensor of its shape: the
row and the column of the graph of each number. So torch itself executes operations that move
numbers, including views and their aliases. The rows, :attr:`raglane.programs.trace.Tracer.rows` of
them, must all be treated alike and must not meet.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from raglane.programs.graph import DEPENDS, Columns, Refused

SHIFT = 40
"""A mark is the row, shifted by this number of bits, and the column."""
_MASK = (1 << SHIFT) - 1
FREE = 1 << 20
"""The row in marks of numbers that all rows share."""


class RowsMeet(Refused):
    """An operation combines rows of the batch."""


def marks_of(columns: Columns, rows: int) -> Tensor:
    """Return the marks ``(rows, w)`` of columns that each row has."""
    return torch.from_numpy((np.arange(rows)[:, None] << SHIFT) | np.asarray(columns)[None])


def free(columns: Columns) -> Tensor:
    """Return the marks ``(w,)`` of columns that all rows share."""
    return torch.from_numpy((FREE << SHIFT) | np.asarray(columns))


class Aligned:
    """The columns of operands that one row reads."""

    def __init__(
        self, operands: Sequence[Columns], rows: list[Columns], shared: Columns, count: int
    ) -> None:
        distinct = shared
        if len(shared):
            # Values that all rows share are computed once.
            marks = np.concatenate([operand[shared] for operand in operands], 1)
            _, first, self._which = np.unique(marks, axis=0, return_index=True, return_inverse=True)
            order = np.argsort(first)
            distinct = shared[first[order]]
            self._which = np.argsort(order)[self._which.reshape(-1)]
        self.chosen = np.concatenate([rows[0], distinct]) if rows else distinct
        self.columns = [operand[self.chosen] & _MASK for operand in operands]
        self._rows = rows
        self._shared = shared
        self._count = count

    def marks(self, results: Columns) -> Tensor:
        """Return the marks ``(count, n)`` of results ``(K, n)`` computed from the operands."""
        marks = np.empty((self._count, results.shape[1]), np.int64)
        per_row = len(self._rows[0]) if self._rows else 0
        for row, indexes in enumerate(self._rows):
            marks[indexes] = (row << SHIFT) | results[:per_row]
        if len(self._shared):
            marks[self._shared] = (FREE << SHIFT) | results[per_row:][self._which]
        return torch.from_numpy(marks)


def align(operands: Sequence[Tensor], rows: int) -> Aligned:
    """Return the columns of operands that one row reads; raises Refused if rows differ."""
    arrays = [operand.numpy() for operand in operands]
    count = arrays[0].shape[0]
    owners = [operand >> SHIFT for operand in arrays]
    row = np.minimum.reduce(
        [operand.min(1) if operand.shape[1] else np.full(count, FREE) for operand in owners]
    )
    if any(((operand != row[:, None]) & (operand != FREE)).any() for operand in owners):
        raise RowsMeet("rows of the batch meet")
    free_places = np.flatnonzero(row == FREE)
    if len(free_places) == count:
        return Aligned(arrays, [], free_places, count)
    row_indexes = [np.flatnonzero(row == index) for index in range(rows)]
    for operand in arrays:
        first = operand[row_indexes[0]] & _MASK
        for others in row_indexes[1:]:
            if len(others) != len(row_indexes[0]) or not np.array_equal(
                operand[others] & _MASK, first
            ):
                raise Refused(f"it does not treat all rows of the batch alike, {DEPENDS}")
    return Aligned(arrays, row_indexes, free_places, count)


def order_of(operands: Sequence[Columns]) -> Columns:
    """Return the order in which an operation computes its results, so that fewer operands are
    copied: that of the first operand without repetitions, or as they are.
    """
    for columns in operands:
        if len(np.unique(columns)) == len(columns):
            return np.argsort(columns, kind="stable")
    return np.arange(len(operands[0]))


# Attributes that differ between a stand-in and its tensor, or that a trace does not have.
_HIDDEN = frozenset(
    "requires_grad grad grad_fn is_leaf _version _base _is_view output_nr retains_grad data_ptr storage untyped_storage"
    " register_hook register_post_accumulate_grad_hook retain_grad backward tolist numpy __array__ __dlpack__".split()
)
_ROWS = f"its operations depend on the number of rows, which is that of the sequences, {DEPENDS}"
_ARITHMETIC = frozenset(
    "mul rmul multiply add radd sub rsub div rdiv divide truediv rtruediv pow rpow".split()
)
_HOST = {"device": torch.device("cpu"), "is_meta": False, "is_cpu": True}


class RowCount(int):
    """The number of rows, or a multiple of it."""


class _RowShape(tuple[int, ...]):
    """A ``torch.Size`` whose ``numel`` keeps the type of its factors."""

    def numel(self) -> int:
        return math.prod(self)


def _counted(name: str) -> Callable[..., Any]:
    plain = getattr(int, name)

    def method(self: RowCount, other: Any) -> Any:
        result = plain(self, other)
        return result if result is NotImplemented else RowCount(result)

    return method


def _refused(name: str) -> Callable[..., Any]:
    plain = getattr(int, name)

    def method(self: RowCount, *other: Any) -> Any:
        if _is_ours(sys._getframe(1)) or (
            other and type(other[0]) is RowCount and name in ("__eq__", "__ne__")
        ):
            return plain(self, *other)
        raise Refused(_ROWS)

    return method


for _name in ("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__"):
    setattr(RowCount, _name, _counted(_name))
_OTHERS = "eq ne lt le gt ge bool int float index truediv rtruediv floordiv rfloordiv mod rmod divmod rdivmod pow rpow"
_BITS = "and rand or ror xor rxor lshift rlshift rshift rrshift invert neg pos abs round trunc floor ceil"
_TEXT = "hash str repr format"
for _name in (*_OTHERS.split(), *_BITS.split(), *_TEXT.split()):
    setattr(RowCount, f"__{_name}__", _refused(f"__{_name}__"))


class Reading(TorchFunctionMode):
    """Observes everything that a step reads of tensors."""

    def __init__(self, rows: int, is_nothing: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self._rows = rows
        self._is_nothing = is_nothing

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not all(issubclass(kind, Tensor) for kind in types):
            return NotImplemented  # a Ragged, which calls the function on its values
        name = func.__name__
        if name == "__get__":
            name = func.__self__.__name__
        if name in _HIDDEN and not _is_ours(_caller()):
            raise Refused(f"it reads {name} of a tensor, which a program does not have")
        if name.strip("_") in _ARITHMETIC and any(type(argument) is RowCount for argument in args):
            raise Refused(_ROWS)
        if name in ("__getitem__", "__setitem__"):
            args = (args[0], _index(args[1]), *args[2:])
        # Functions of torch are traced operation by operation.
        with torch._C.DisableTorchFunction():
            result = func(*args, **(kwargs or {}))
        if name in _HOST:
            return _HOST[name]
        if type(result) in (int, tuple, torch.Size):
            result = self._marked(result, args)
        if name in ("__len__", "__iter__", "unbind"):
            self._check_dim(name, *args, **(kwargs or {}))
        return result

    def _check_dim(self, name: str, tensor: Any, dim: int = 0) -> None:
        """Raise Refused if the step iterates over rows."""
        if not isinstance(tensor, Tensor) or not tensor.dim() or dim % tensor.dim():
            return
        if tensor.shape[0] % self._rows == 0 and not _is_ours(_caller()):
            raise Refused(
                f"it takes {name.strip('_')}() of rows; a program can follow shape[0], and rows side by side"
            )

    def _marked(self, result: Any, args: Any) -> Any:
        """Return numbers as :class:`RowCount` if they come from the number of rows."""
        if type(result) is int:
            is_count = result % self._rows == 0 or (
                isinstance(args[0], Tensor) and self._is_nothing(args[0])
            )
            return RowCount(result) if result and is_count else result
        if all(type(item) is int for item in result):
            return _RowShape([self._marked(item, args) for item in result])
        return result


def _index(index: Any) -> Any:
    """Return an index with its lists as tensors: torch would make them on the device of the
    operand, which has no numbers.
    """
    if isinstance(index, tuple):
        return tuple(map(_as_tensor, index))
    return _as_tensor(index)


def _as_tensor(index: Any) -> Any:
    is_list = (
        isinstance(index, list | tuple | range)
        and len(index)
        and all(type(item) in (int, bool) for item in index)
    )
    return torch.tensor(index, device="cpu") if is_list else index


def _is_ours(frame: FrameType | None) -> bool:
    """Return True for a frame of torch's or Raglane's code, whose comparisons only raise errors."""
    return frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in (
        "torch",
        "raglane",
    )


def _caller() -> FrameType | None:
    """Return the frame that called a function of torch."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") in (
        __name__,
        "torch._tensor",
        "torch.overrides",
    ):
        frame = frame.f_back
    return frame
