"""Moves rows of a tensor by an index without repetition.

The backward pass of torch's ``index_select`` adds to its result row by row. If no row is taken
twice, a copy is enough and faster for large tensors. :func:`take_rows` and :func:`place_rows` are
the backward passes of each other, so they are differentiable any number of times.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from raglane._utils.tracing import index_arithmetic, is_exporting, is_jit_traced, is_transformed

# Up to this many numbers, the overhead of a call dominates, which is smaller for torch's backward
# pass than for one in Python. Not compared in an export, whose graph would be refused for sizes on
# the other side.
_FEW = 16384

# Moving a row of fewer numbers takes no longer than looking up its index.
_WIDE = 8

# A result of more bytes does not fit the caches. Then finding the free rows and filling only these
# takes less time than filling the whole result first.
_WORTH_SEARCHING = 4 << 20

# torch cannot move rows of these dtypes, so they are viewed as another dtype of the same width.
_FLOATS_OF_8_BITS = [getattr(torch, name) for name in dir(torch) if name.startswith("float8_")]
_MOVED_AS = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
} | dict.fromkeys(_FLOATS_OF_8_BITS, torch.uint8)


# NOTE [no setup_context]: with setup_context, Function.apply inspects the signature of ``forward``
# in every call, which takes longer than moving the rows of a small batch.
class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor) -> Tensor:
        ctx.size = values.shape[0]
        ctx.save_for_backward(index)
        return values.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return place_rows(grad, index, ctx.size), None


class _PlaceRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, index: Tensor, size: int, fill: float, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.counts = [tensor.shape[0] for tensor in tensors]
        if len(tensors) == 1:
            return _place(tensors[0], index, size, fill)
        return _place_joined(tensors, index, size, fill)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        return None, None, None, *take_rows(grad, index).split_with_sizes(ctx.counts)


def _place_joined(tensors: tuple[Tensor, ...], index: Tensor, size: int, fill: float) -> Tensor:
    # With the fill as an additional row, one pass writes every row of the result.
    joined = torch.cat((*tensors, tensors[0].new_full((1, *tensors[0].shape[1:]), fill)))
    return joined.index_select(0, _source(index, size))


@index_arithmetic
def _source(index: Tensor, size: int) -> Tensor:
    """Return the row that is placed at each of ``size`` rows; the number of rows for free ones."""
    total = index.shape[0]
    return index.new_full((size,), total).index_copy_(
        0, index, torch.arange(total, device=index.device)
    )


def _needs_function(values: Tensor) -> bool:
    """Return True if the autograd functions here are faster than torch's; torch.func supports only
    torch's.
    """
    return (
        values.requires_grad
        and torch.is_grad_enabled()
        and not is_exporting()
        and (values.numel() > _FEW or not values.is_cpu)
        and not is_transformed(values)
    )


def _place(values: Tensor, index: Tensor, size: int, fill: float) -> Tensor:
    shape = (size, *values.shape[1:])
    is_recorded = torch.compiler.is_compiling() or is_jit_traced()
    if values.is_cpu and not is_recorded and values.numel() > _FEW:
        values = values.resolve_neg().resolve_conj().contiguous()
        wide = _widest(values)
        if wide is not values.dtype and not _is_differentiated(values):
            return _place_wide(values, index, size, fill, wide).view(shape)
    # Not compared in a graph, where a product of sizes that is 0 confuses torch's solver, nor in a
    # trace, which runs with indexes that leave other rows free.
    if not is_recorded and size == index.shape[0]:
        placed = values.new_empty(shape)
    elif fill == 0:
        placed = values.new_zeros(shape)
    else:
        placed = values.new_full(shape, fill)
    return placed.index_copy_(0, index, values)


def _is_differentiated(values: Tensor) -> bool:
    """Return True if operations on values are differentiated, so that they cannot be viewed as
    another dtype.
    """
    if (values.requires_grad and torch.is_grad_enabled()) or is_transformed(values):
        return True
    return forward_ad.unpack_dual(values).tangent is not None


def _widest(rows: Tensor) -> torch.dtype:
    """Return the widest dtype as which rows can be viewed, because index_copy_ copies number by
    number on a CPU.
    """
    row_bytes = rows.numel() // rows.shape[0] * rows.element_size()
    start = rows.storage_offset() * rows.element_size()
    for dtype in (torch.complex128, torch.int64):
        if (
            rows.element_size() < dtype.itemsize
            and row_bytes % dtype.itemsize == start % dtype.itemsize == 0
        ):
            return dtype
    return rows.dtype


def _place_wide(values: Tensor, index: Tensor, size: int, fill: float, wide: torch.dtype) -> Tensor:
    values = values.view(values.shape[0], -1)
    placed = values.new_empty(size, values.shape[1])
    others = size - index.shape[0]
    if others and placed.nbytes <= _WORTH_SEARCHING:
        placed.fill_(fill)
    placed.view(wide).index_copy_(0, index, values.view(wide))
    if others and placed.nbytes > _WORTH_SEARCHING:
        is_free = torch.ones(size, dtype=torch.bool, device="cpu")
        is_free.index_fill_(0, index, False)
        free = is_free.nonzero().view(-1)
        row = values.new_full((1, values.shape[1]), fill).view(wide)
        placed.view(wide).index_copy_(0, free, row.expand(others, -1))
    return placed


def take_rows(values: Tensor, index: Tensor) -> Tensor:
    """Return the rows of ``values`` at ``index``, which must not repeat a row."""
    if values.dtype in _MOVED_AS:
        return take_rows(values.view(_MOVED_AS[values.dtype]), index).view(values.dtype)
    if _needs_function(values):
        return _TakeRows.apply(values, index)  # type: ignore[no-untyped-call]
    return values.index_select(0, index)


def place_rows(values: Tensor, index: Tensor, size: int, fill: float = 0.0) -> Tensor:
    """Return a tensor of ``size`` rows with row ``i`` of ``values`` at ``index[i]``, and ``fill``
    in free rows.
    """
    if values.dtype in _MOVED_AS:
        kind = _MOVED_AS[values.dtype]
        bits = (
            torch.full((), fill, dtype=values.dtype, device="cpu").view(kind).item()
        )  # raises if it does not fit
        return place_rows(values.view(kind), index, size, bits).view(values.dtype)
    if _needs_function(values):
        return _PlaceRows.apply(index, size, fill, values)  # type: ignore[no-untyped-call]
    if is_transformed(values):  # torch.vmap supports index_select, but not index_copy_
        return _place_joined((values,), index, size, fill)
    return _place(values, index, size, fill)


def place_joined_rows(
    tensors: tuple[Tensor, ...], index: Tensor, size: int, fill: float = 0.0
) -> Tensor:
    """Return ``place_rows(torch.cat(tensors), index, size, fill)``, with fewer passes over memory."""
    features = math.prod(tensors[0].shape[1:])
    # On a GPU sizes are not compared, which would be a guard of torch.compile.
    is_joined = tensors[0].is_cpu and (
        is_exporting() or features < _WIDE or features * size <= _FEW
    )
    if tensors[0].dtype in _MOVED_AS or is_joined:
        return place_rows(torch.cat(tensors), index, size, fill)
    has_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    if has_gradient and not is_transformed(tensors[0]):
        return _PlaceRows.apply(index, size, fill, *tensors)  # type: ignore[no-untyped-call]
    return _place_joined(tensors, index, size, fill)
