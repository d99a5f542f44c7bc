"""Checks of a request's tensors, in the words of every backend.

A layer's parameters and attributes, and the offsets of a batch, are their owner's to change at any time. So every
backend checks what it is given in every call: by :func:`check`, or by the gate of the cpu kernels
(:mod:`raglane.kernels.cpu.gate`), which reads memory by its address and calls :func:`check` for the words.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from raglane._utils.checks import check_dense, check_like, check_storage
from raglane._utils.messages import message
from raglane._utils.tracing import index_arithmetic, records_operators
from raglane.cells.module import ModuleCell
from raglane.cells.regularised import Regularised
from raglane.cells.spec import CellSpec
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from raglane.kernels.contract import Request

Shapes = tuple[tuple[str, tuple[int, ...] | None, bool], ...]
"""What a cell's weights must be, in the order of its ``weights_type``: the name, the shape (None where there must be no
such weight), and whether it may be left out."""


def weight_shapes(cell: CellSpec, input_size: int, state_sizes: tuple[int, ...]) -> Shapes | None:
    """What the weights of one layer in one direction must be; None for a user's module."""
    return None if isinstance(cell, ModuleCell) else _weight_shapes(cell, input_size, state_sizes)


@lru_cache(maxsize=512)
def _weight_shapes(cell: CellSpec, input_size: int, state_sizes: tuple[int, ...]) -> Shapes:
    hidden_size = state_sizes[-1]
    projection = 0 if state_sizes[0] == hidden_size else state_sizes[0]
    shapes = cell.shapes(input_size, hidden_size, True, projection)
    needed = cell.shapes(input_size, hidden_size, False, projection)
    rules = [(name, shape, needed[name] is None) for name, shape in shapes.items()]
    # The last field of Weights is a projection's, which few layers have.
    missing = len(cell.weights_type._fields) - len(rules)
    return (*rules, *[("weight_hr", None, True)] * missing)


def check_weights(
    cell: CellSpec,
    weights: tuple[Any, ...],
    input_size: int,
    state_sizes: tuple[int, ...],
    like: Tensor,
    place: tuple[int, int] = (0, 0),
) -> None:
    """Refuse weights of one layer in one direction that do not fit its cell and sizes."""
    shapes = weight_shapes(cell, input_size, state_sizes)
    if shapes is None:
        return
    for (kind, shape, optional), part in zip(shapes, weights, strict=True):
        name = f"{kind}_l{place[0]}{'_reverse' if place[1] else ''}"
        if shape is None:
            if part is not None:
                rule = "None: a layer of this cell and these sizes has no such weight"
                raise ArgumentTypeError(message(name, f"a {type(part).__name__}", rule, "build the layer again"))
        elif part is not None or not optional:
            check_like(name, part, shape, like)


def check_offsets(offsets: Any, total: int, device: torch.device) -> None:
    """Refuse offsets that are not those of a batch of ``total`` elements. Numbers on a device are taken on trust."""
    if not isinstance(offsets, Tensor):
        raise ArgumentTypeError(message("offsets", f"a {type(offsets).__name__}", "a tensor (B + 1,)", "pass a tensor"))
    _check_tensor(offsets, device)
    if offsets.is_cpu and not records_operators():
        _check_numbers(offsets, total)


def _check_tensor(offsets: Tensor, device: torch.device) -> None:
    """Refuse offsets that are none, whatever their numbers."""
    check_dense("offsets", offsets)
    if offsets.dim() != 1 or not offsets.shape[0] or offsets.dtype is not torch.int64 or offsets.device != device:
        got = f"shape {tuple(offsets.shape)}, {offsets.dtype}, on {offsets.device}"
        rule = f"of shape (B + 1,), torch.int64, on {device} like the values"
        raise ShapeError(message("offsets", got, rule, "build the batch again"))
    check_storage("offsets", offsets)


@index_arithmetic
def _check_numbers(offsets: Tensor, total: int) -> None:
    fix = "build the batch again: its offsets were changed"
    falls = offsets.diff() < 0
    if int(offsets[0]) != 0:
        raise ArgumentError(message("offsets[0]", str(int(offsets[0])), "0", fix))
    if bool(falls.any()):
        place = 1 + int(falls.nonzero()[0])
        got = f"{int(offsets[place])} after {int(offsets[place - 1])}"
        raise ArgumentError(message(f"offsets[{place}]", got, "at least the offset before it", fix))
    if int(offsets[-1]) != total:
        raise ArgumentError(message("offsets[-1]", str(int(offsets[-1])), f"the number of elements, {total}", fix))


def check_stack(
    cell: CellSpec,
    weights: tuple[Any, ...],
    input_size: int,
    state_sizes: tuple[int, ...],
    directions: int,
    like: Tensor,
    depth: int = 0,
) -> None:
    """Refuse weights of a stack of layers that do not fit its cell and sizes; ``depth`` is that of its first layer."""
    if isinstance(cell, Regularised):
        cell, weights = cell.inner, tuple(part.inner for part in weights)
    state_sizes = state_sizes[: len(cell.states)]
    for index, part in enumerate(weights):
        layer, direction = divmod(index, directions)
        width = directions * state_sizes[0] if layer else input_size
        check_weights(cell.above() if layer else cell, part, width, state_sizes, like, (depth + layer, direction))


_copied = index_arithmetic(Tensor.clone)


def check(request: Request, *, numbers: bool = True) -> Request:
    """Check the tensors of a request."""
    values, offsets = request.values, request.offsets
    if not isinstance(values, Tensor) or values.dim() != 2:
        got = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else f"a {type(values).__name__}"
        raise ShapeError(message("input", got, "a tensor (N, D)", "pass the flat values"))
    check_like("input", values, tuple(values.shape), values)
    if isinstance(offsets, Tensor) and offsets.is_cpu and not records_operators():
        check_storage("offsets", offsets)
        offsets = _copied(offsets)
    if numbers or not isinstance(offsets, Tensor):
        check_offsets(offsets, values.shape[0], values.device)
    else:
        _check_tensor(offsets, values.device)
    known = request.state_sizes
    sizes = (*known, *(part.shape[-1] for part in request.state[len(known) :]))
    rows = (request.layers * request.directions, offsets.shape[0] - 1)
    for name, size, part in zip(request.cell.states, sizes, request.state, strict=False):
        check_like(f"hx ({name})", part, (*rows, size), values)
    check_stack(request.cell, request.weights, values.shape[1], sizes, request.directions, values, request.depth)
    return replace(request, offsets=offsets, lengths=None if offsets.is_cpu else request.lengths)
