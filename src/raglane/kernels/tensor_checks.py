"""Checks of the tensors of a call, for every backend, and their gate to the cpu kernels.

The caller can change parameters, attributes of a layer and offsets at any time: by ``.data =``,
``set_``, ``resize_``, ``functional_call``, a parametrization or a hook. So each call checks them:
:func:`check` for most backends, :class:`Gate` for the cpu kernels, just before C gets their
addresses. No result of a check is kept between calls.

NOTE (threads): the caller of :class:`Gate` holds the storages until C returns, because another
thread may replace the memory of a weight meanwhile. Addresses are computed from those storages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from raglane._utils.checks import check_like, check_offsets_tensor, check_storage, check_unchanged
from raglane._utils.tracing import index_arithmetic, records_operators
from raglane.cells import CELLS
from raglane.cells.module import ModuleCell
from raglane.cells.regularised import Marked
from raglane.cells.spec import CellSpec
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from raglane.kernels.contract import Request
from raglane.native.library import DTYPES
from raglane.native.memory import NO_MEMORY, address, contiguous

Shape = tuple[int, ...]
Shapes = tuple[tuple[str, Shape | None, bool], ...]
"""The weights of a cell, in the order of its ``weights_type``: name, shape (None if the weight must
be None), and True if it may be None."""

Admitted = tuple[Tensor, tuple[Any, ...], list[int], list[UntypedStorage]]
"""Offsets, the tensors of a layer, their addresses in the order of C's struct, and their
storages."""

# ---- requests ------------------------------------------------------------------------------------


def weight_shapes(cell: CellSpec, input_size: int, state_sizes: Shape) -> Shapes | None:
    """Return the weights of a cell in one layer and direction; None for a user's module."""
    # int, because it may be symbolic while tracing, and a symbol is no key of a cache.
    return (
        None if isinstance(cell, ModuleCell) else _weight_shapes(cell, int(input_size), state_sizes)
    )


@lru_cache(maxsize=512)
def _weight_shapes(cell: CellSpec, input_size: int, state_sizes: Shape) -> Shapes:
    hidden_size = state_sizes[-1]
    projection = 0 if state_sizes[0] == hidden_size else state_sizes[0]
    shapes = cell.shapes(input_size, hidden_size, True, projection)
    required = cell.shapes(input_size, hidden_size, False, projection)
    rules = [(name, shape, required[name] is None) for name, shape in shapes.items()]
    # ``shapes`` leaves out the last field of Weights, the projection, in a layer without one.
    return (*rules, *[("weight_hr", None, True)] * (len(cell.weights_type._fields) - len(rules)))


def check_stack(
    cell: CellSpec,
    weights: tuple[Any, ...],
    input_size: int,
    state_sizes: Shape,
    directions: int,
    like: Tensor,
    depth: int = 0,
) -> None:
    """Check the weights of a stack of layers, whose first one has index ``depth``."""
    if isinstance(cell, Marked):
        cell = cell.inner
        weights = tuple(marked.inner for marked in weights)
    state_sizes = state_sizes[: len(cell.states)]
    for index, of_direction in enumerate(weights):
        layer, direction = divmod(index, directions)
        width = directions * state_sizes[0] if layer else input_size
        shapes = weight_shapes(cell.above() if layer else cell, width, state_sizes)
        if shapes is None:
            continue
        for (kind, shape, is_optional), weight in zip(shapes, of_direction, strict=True):
            if weight is None and is_optional:
                continue
            name = f"{kind}_l{depth + layer}{'_reverse' if direction else ''}"
            if shape is None:
                rule = "None in a layer of this cell and these sizes"
                raise ArgumentTypeError(
                    name, f"a {type(weight).__name__}", rule, "build a new layer"
                )
            check_like(name, weight, shape, like)


_copied = index_arithmetic(Tensor.clone)


def check(request: Request, *, numbers: bool = True) -> Request:
    """Check a request's tensors, and the ``numbers`` of offsets; return it with a copy of them."""
    values = request.values
    offsets = request.offsets
    if not isinstance(values, Tensor) or values.dim() != 2:
        got = (
            f"shape {tuple(values.shape)}"
            if isinstance(values, Tensor)
            else f"a {type(values).__name__}"
        )
        raise ShapeError("input", got, "a tensor (N, D)", "pass the flat values")
    check_like("input", values, tuple(values.shape), values)
    if isinstance(offsets, Tensor) and offsets.is_cpu and not records_operators():
        check_storage("offsets", offsets)
        offsets = _copied(offsets)
    if numbers or not isinstance(offsets, Tensor):
        check_unchanged(offsets, values.shape[0], values.device)
    else:
        check_offsets_tensor(offsets, values.device)
    sizes = request.state_sizes
    sizes = (*sizes, *(state.shape[-1] for state in request.state[len(sizes) :]))
    rows = (request.layers * request.directions, offsets.shape[0] - 1)
    for name, size, state in zip(request.cell.states, sizes, request.state, strict=False):
        check_like(f"hx ({name})", state, (*rows, size), values)
    check_stack(
        request.cell,
        request.weights,
        values.shape[1],
        sizes,
        request.directions,
        values,
        request.depth,
    )
    return replace(request, offsets=offsets, lengths=None if offsets.is_cpu else request.lengths)


# ---- the gate to C -------------------------------------------------------------------------------


class Gate:
    """Validates the tensors of layers of one cell and certain sizes.

    Raises ValueError or KeyError for no such layer. Offsets are ``(B + 1,)`` int64; the tensors are those of
    :data:`raglane.kernels.cpu.layer.Tensors`.
    """

    __slots__ = ("_weights", "cell", "directions", "dtype", "input_size", "sizes")

    def __init__(
        self, cell: str, input_size: int, sizes: Shape, directions: int, dtype: torch.dtype
    ) -> None:
        spec = CELLS[cell]
        if dtype not in DTYPES or len(sizes) != len(spec.states) or directions not in (1, 2):
            raise ValueError
        self.cell = cell
        self.input_size = input_size
        self.sizes = sizes
        self.directions = directions
        self.dtype = dtype
        # Of each weight the shape, None if it must be None; and True if it may be None.
        rules = [
            (shape, is_optional or shape is None)
            for _, shape, is_optional in weight_shapes(spec, input_size, sizes) or ()
        ]
        self._weights = tuple(rules) * directions

    def try_validate(self, offsets: Any, tensors: tuple[Any, ...]) -> Admitted | None:
        """Return the tensors, their addresses and storages; None if C cannot read one of them."""
        begin = len(tensors) - len(self._weights)
        try:
            (count,) = offsets.shape
            values = (tensors[0].shape[0], self.input_size)
        except NO_MEMORY:
            return None
        if count == 0 or begin not in (1, 1 + len(self.sizes)):
            return None
        states = [((self.directions, count - 1, size), False) for size in self.sizes[: begin - 1]]
        rules = ((count,), False), (values, False), *states, *self._weights
        addresses = []
        storages = []
        for tensor, (shape, is_optional) in zip((offsets, *tensors), rules, strict=True):
            if tensor is None and is_optional:
                addresses.append(0)
                continue
            dtype = torch.int64 if tensor is offsets else self.dtype
            memory = None if shape is None else address(tensor, shape, dtype)
            if memory is None:
                return None
            begin_address, storage = memory
            addresses.append(begin_address)
            storages.append(storage)
        addresses[1 + begin : 1 + begin] = [0] * (3 - begin)
        return offsets, tensors, addresses, storages

    def normalised(self, offsets: Any, tensors: tuple[Any, ...], depth: int) -> Admitted:
        """Validate the tensors, or copies of those that C cannot read; raise if one is wrong."""
        begin = len(tensors) - len(self._weights)
        check_layer(
            self.cell, offsets, tensors, len(self._weights), self.sizes, self.directions, depth
        )
        if tensors[0].shape[1] != self.input_size:
            got = f"{tensors[0].shape[1]} features"
            rule = f"a tensor of {self.input_size} features, as in the forward pass"
            raise ShapeError("input", got, rule, "do not replace its data before the backward pass")
        spec = CELLS[self.cell]
        names = ["input", *(f"hx ({name})" for name in spec.states[: begin - 1])]
        for direction in range(self.directions):
            end = f"_l{depth}{'_reverse' if direction else ''}"
            names += [
                name + end for name, *_ in weight_shapes(spec, self.input_size, self.sizes) or ()
            ]
        with torch.no_grad():
            pairs = zip(names, tensors, strict=True)
            copies = [
                None if tensor is None else contiguous(name, tensor) for name, tensor in pairs
            ]
        admitted = self.try_validate(contiguous("offsets", offsets), tuple(copies))
        if admitted is None:
            rule = "unchanged during a call"
            fix = "do not change them in another thread"
            raise ShapeError("input, hx, weights", "tensors that changed", rule, fix)
        return admitted


def check_layer(
    cell: str,
    offsets: Any,
    tensors: Sequence[Any],
    weights: int,
    sizes: Shape,
    directions: int,
    depth: int = 0,
) -> None:
    """Raise an error in terms of a layer's arguments; the last ``weights`` tensors are weights."""
    if cell not in CELLS:
        raise ArgumentError("cell", repr(cell), f"one of {', '.join(CELLS)}", "choose one of them")
    spec = CELLS[cell]
    values = tensors[0]
    begin = len(tensors) - weights
    each = len(spec.weights_type._fields)
    initial = tuple(tensors[1:begin])
    if (
        isinstance(values, Tensor)
        and values.dim() == 2
        and (not values.is_cpu or values.dtype not in DTYPES)
    ):
        rule = f"{', '.join(map(str, DTYPES))} on the CPU, which the cpu kernels compute in"
        raise ShapeError(
            "input", f"{values.dtype} on {values.device}", rule, "convert it with .to()"
        )
    if directions not in (1, 2) or weights != each * directions:
        got = f"{weights} weights for {directions} directions"
        raise ShapeError(
            "weights", got, f"{each} for each of one or two directions", "pass all of them"
        )
    if len(sizes) != len(spec.states) or (initial and len(initial) != len(sizes)):
        got = f"{len(initial)} of sizes {sizes}"
        raise ShapeError(
            "hx", got, f"the states {', '.join(spec.states)}", "pass one tensor for each"
        )
    of_directions = [
        spec.weights_type(*tensors[begin + each * direction :][:each])
        for direction in range(directions)
    ]
    check(
        Request(
            spec,
            values,
            offsets,
            None,
            initial,
            tuple(of_directions),
            directions=directions,
            state_sizes=sizes,
            depth=depth,
        )
    )


def admit(
    names: Iterable[str], tensors: Iterable[Any], shapes: Iterable[Shape], like: Tensor
) -> tuple[list[Tensor | None], list[int], list[UntypedStorage]]:
    """Return tensors that C can read, their addresses, 0 for None, and their storages."""
    readable: list[Tensor | None] = []
    addresses = []
    storages = []
    dtype = like.dtype
    for name, tensor, shape in zip(names, tensors, shapes, strict=False):
        if tensor is None:
            readable.append(None)
            addresses.append(0)
            continue
        memory = address(tensor, shape, dtype)
        if memory is None:
            check_like(name, tensor, shape, like)
            tensor = contiguous(name, tensor)
            memory = address(tensor, shape, dtype)
            if memory is None:
                fix = "do not change it in another thread"
                raise ShapeError(name, "a tensor that changed", "unchanged during a call", fix)
        begin, storage = memory
        readable.append(tensor)
        addresses.append(begin)
        storages.append(storage)
    return readable, addresses, storages
