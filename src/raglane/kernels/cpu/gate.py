"""The gate to C: every tensor of a layer's call is validated here, just before C gets its address.

A layer's tensors can be changed by anybody until then: by ``.data =``, ``set_``, ``resize_``, ``functional_call``, a
parametrization, a hook on saved tensors, an attribute of the layer. So nothing about a tensor is kept between calls.

NOTE (threads): the caller holds the storages until C returns. Another thread may give a weight other memory meanwhile,
and what C reads must not be freed. Addresses are computed from those storages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from math import prod
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from raglane._utils.checks import check_like
from raglane._utils.messages import message
from raglane.cells import CELLS
from raglane.errors import ArgumentError, ShapeError
from raglane.kernels.checks import check, weight_shapes
from raglane.kernels.contract import Request
from raglane.native.library import DTYPES
from raglane.native.memory import NO_MEMORY, place, plain

Shape = tuple[int, ...]
Alike = Callable[..., bool]
"""Whether tensors have the type, dtype, device, sizes and strides of others; raises TypeError for None."""

# How many templates a gate keeps: with and without states, and with what requires gradients.
_TEMPLATES = 8


class Gate:
    """Validates the tensors of layers of one cell and certain sizes; raises ValueError or KeyError for no such layer.

    Offsets are ``(B + 1,)`` int64; the tensors are those of :data:`raglane.kernels.cpu.layer.Tensors`.
    """

    __slots__ = ("_templates", "_weights", "cell", "directions", "dtype", "input_size", "sizes")

    def __init__(self, cell: str, input_size: int, sizes: Shape, directions: int, dtype: torch.dtype) -> None:
        spec = CELLS[cell]
        if dtype not in DTYPES or len(sizes) != len(spec.states) or directions not in (1, 2):
            raise ValueError
        weights = [
            (shape, dtype.itemsize * prod(shape or (0,)), optional or shape is None)
            for _, shape, optional in weight_shapes(spec, input_size, sizes) or ()
        ]
        self.cell, self.input_size, self.sizes, self.directions, self.dtype = cell, input_size, sizes, directions, dtype
        # Of each weight the shape, None where there must be none; its bytes; and whether it may be left out.
        self._weights = tuple(weights) * directions
        # The last kinds of tensors that were met, each with how many there were.
        self._templates: tuple[tuple[int, Alike], ...] = ()

    def look(
        self, offsets: Any, tensors: tuple[Any, ...]
    ) -> tuple[Tensor, tuple[Any, ...], list[int], list[UntypedStorage]] | None:
        """The same tensors, their addresses in the order of C's struct, and their memory; None if C cannot read them.

        Storages are looked at one by one, all else at once where :func:`guard` can.
        """
        begin, size = len(tensors) - len(self._weights), self.dtype.itemsize
        try:
            values, (count,) = tensors[0], offsets.shape
            storage, at = offsets.untyped_storage(), 8 * offsets.storage_offset()
            if count == 0 or storage.nbytes() < at + 8 * count:
                return None
            parts, storages, addresses = [offsets, values], [storage], [storage.data_ptr() + at]
            storage, at = values.untyped_storage(), size * values.storage_offset()
            room = size * self.input_size * values.shape[0]
            if room and storage.nbytes() < at + room:
                return None
            storages.append(storage)
            addresses.append(storage.data_ptr() + at if room else 0)
            if begin > 1:
                if begin != 1 + len(self.sizes):
                    return None
                for part, width in zip(tensors[1:begin], self.sizes, strict=True):
                    room = size * self.directions * (count - 1) * width
                    storage, at = part.untyped_storage(), size * part.storage_offset()
                    if (
                        part.shape[1] != count - 1
                        or not part.is_contiguous()
                        or (room and storage.nbytes() < at + room)
                    ):
                        return None
                    parts.append(part)
                    storages.append(storage)
                    addresses.append(storage.data_ptr() + at if room else 0)
            addresses += (0,) * (4 - len(addresses))
            for part, (shape, room, optional) in zip(tensors[begin:], self._weights, strict=True):
                if part is None:
                    if not optional:
                        return None
                    addresses.append(0)
                    continue
                storage, at = part.untyped_storage(), size * part.storage_offset()
                # A template cannot tell a weight that must not be there from another of its shape that is missing.
                if shape is None or storage.nbytes() < at + room:
                    return None
                parts.append(part)
                storages.append(storage)
                addresses.append(storage.data_ptr() + at)
            for expected, alike in self._templates:
                if expected == len(parts) and alike(*parts):
                    return offsets, tensors, addresses, storages
        except NO_MEMORY:
            return None  # no tensor, or one without memory
        return (offsets, tensors, addresses, storages) if self._hold_one_by_one(parts, tensors[begin:]) else None

    def _hold_one_by_one(self, parts: list[Tensor], weights: tuple[Any, ...]) -> bool:
        """Whether C can read each of these tensors; where it can, they become a template."""
        offsets, values, *rest = parts
        width, count = self.input_size, offsets.shape[0]
        shapes: list[Shape] = [(count,), (values.shape[0], width)]
        templates: list[tuple[int | None, ...]] = [(None,), (None, width)]
        own = [shape for part, (shape, _, _) in zip(weights, self._weights, strict=True) if part is not None]
        for each in self.sizes[: len(rest) - len(own)]:
            shapes.append((self.directions, count - 1, each))
            templates.append((self.directions, None, each))
        shapes += own  # type: ignore[arg-type]
        templates += own  # type: ignore[arg-type]
        dtypes = [torch.int64, *[self.dtype] * (len(parts) - 1)]
        if not all(map(place, parts, shapes, dtypes)):
            return False
        alike = guard(parts, templates)
        # A template never fits tensors of which two are the same.
        if alike is not None and alike(*parts):
            self._templates = ((len(parts), alike), *self._templates[: _TEMPLATES - 1])
        return True

    def normalised(
        self, offsets: Any, tensors: tuple[Any, ...], depth: int
    ) -> tuple[Tensor, tuple[Any, ...], list[int], list[UntypedStorage]]:
        """What :meth:`look` gives, of copies where C cannot read a tensor; raises where one is wrong."""
        begin = len(tensors) - len(self._weights)
        refuse(self.cell, offsets, tensors[0], tensors[1:begin], tensors[begin:], self.sizes, self.directions, depth)
        if tensors[0].shape[1] != self.input_size:
            rule = f"a tensor with {self.input_size} features, as in the forward pass"
            raise ShapeError(
                message("input", f"{tensors[0].shape[1]} features", rule, "do not change the tensors of the call")
            )
        spec = CELLS[self.cell]
        names = ["input", *(f"hx ({name})" for name in spec.states[: begin - 1])]
        for direction in range(self.directions):
            end = f"_l{depth}{'_reverse' if direction else ''}"
            names += [name + end for name, *_ in weight_shapes(spec, self.input_size, self.sizes) or ()]
        with torch.no_grad():
            copies = [None if part is None else plain(name, part) for name, part in zip(names, tensors, strict=True)]
        found = self.look(plain("offsets", offsets), tuple(copies))
        if found is None:
            rule, fix = "unchanged during a call", "do not change them in another thread"
            raise ShapeError(message("input, hx, weights", "tensors that changed", rule, fix))
        return found


def refuse(
    cell: str,
    offsets: Any,
    values: Any,
    initial: Sequence[Any],
    weights: Sequence[Any],
    sizes: Shape,
    directions: int,
    depth: int = 0,
) -> None:
    """Raise where something about a layer and its tensors is wrong, with the words that every backend has for it."""
    if cell not in CELLS:
        raise ArgumentError(message("cell", repr(cell), f"one of {', '.join(CELLS)}", "choose one of them"))
    spec = CELLS[cell]
    each = len(spec.weights_type._fields)
    if isinstance(values, Tensor) and values.dim() == 2 and (not values.is_cpu or values.dtype not in DTYPES):
        rule = f"of a dtype of the cpu kernels, {', '.join(map(str, DTYPES))}"
        raise ShapeError(message("input", f"{values.dtype} on {values.device}", rule, "convert it with .to()"))
    if directions not in (1, 2) or len(weights) != each * directions:
        got = f"{len(weights)} weights for {directions} directions"
        raise ShapeError(
            message("weights", got, f"{each} weights for each of one or two directions", "pass all of them")
        )
    if len(sizes) != len(spec.states) or (initial and len(initial) != len(sizes)):
        got = f"{len(initial)} of sizes {sizes}"
        raise ShapeError(
            message("hx", got, f"tensors for the states {', '.join(spec.states)}", "pass one tensor for each")
        )
    own = tuple([spec.weights_type(*weights[each * direction :][:each]) for direction in range(directions)])
    request = Request(spec, values, offsets, None, tuple(initial), own, 1, directions, state_sizes=sizes, depth=depth)
    check(request)


def admit(
    names: Iterable[str], parts: Iterable[Any], shapes: Iterable[Shape], like: Tensor
) -> tuple[list[Tensor | None], list[int], list[UntypedStorage]]:
    """Tensors in memory that C can read, their addresses and that memory; None and the null pointer for None."""
    tensors: list[Tensor | None] = []
    addresses, storages, dtype = [], [], like.dtype
    for name, part, shape in zip(names, parts, shapes, strict=False):
        if part is None:
            tensors.append(None)
            addresses.append(0)
            continue
        found = place(part, shape, dtype)
        if found is None:
            check_like(name, part, shape, like)
            part = plain(name, part)
            found = place(part, shape, dtype)
            if found is None:
                raise ShapeError(
                    message(name, "a tensor that changed", "unchanged until the backward pass", "do not change it")
                )
        tensors.append(part)
        addresses.append(found[0])
        storages.append(found[1])
    return tensors, addresses, storages


# ---- many tensors at once -----------------------------------------------------------------------------------------


def guard(examples: Sequence[Tensor], shapes: Sequence[tuple[int | None, ...]]) -> Alike | None:
    """A template of tensors, None for a size that may differ; None where torch has none that is right.

    torch.compile asks this of its inputs before every call, by a private class in C++. It takes a fifth of the time of
    Python, so it is used where it exists and answers rightly when it is tried once. The stride of a dimension before
    one whose size may differ is not part of a template.
    """
    is_for_all = all(map(_has_strides_for_all_sizes, examples, shapes))
    return _make(examples, shapes) if is_for_all and _is_right() else None


def _strides(shape: tuple[int | None, ...]) -> list[int | None]:
    """The strides of contiguous tensors of a shape, None where one follows from a size that may differ."""
    return [None if None in shape[place + 1 :] else prod(shape[place + 1 :]) for place in range(len(shape))]  # type: ignore[arg-type]


def _has_strides_for_all_sizes(example: Tensor, shape: tuple[int | None, ...]) -> bool:
    """Whether any number of rows with an example's strides would be contiguous."""
    if None not in shape:
        return True
    return all(wanted in (None, stride) for wanted, stride in zip(_strides(shape), example.stride(), strict=True))


def _make(examples: Sequence[Tensor], shapes: Sequence[tuple[int | None, ...]]) -> Alike | None:
    sizes: list[Any] = [list(shape) for shape in shapes]
    strides: list[Any] = [
        [None if wanted is None else stride for wanted, stride in zip(_strides(shape), part.stride(), strict=True)]
        for part, shape in zip(examples, shapes, strict=True)
    ]
    try:
        made = torch._C._dynamo.guards.TensorGuards(*examples, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        check: Alike = made.check
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return None
    return check


@lru_cache(maxsize=1)
def _is_right() -> bool:
    """Whether the class exists and tells apart what must be told apart."""
    # Whatever torch's defaults are when somebody asks first.
    zeros = partial(torch.zeros, dtype=torch.float32, device="cpu")
    good, weight = zeros(4, 3), torch.nn.Parameter(zeros(2, 3))
    alike = _make([good, weight], [(None, 3), (2, 3)])
    others = [
        zeros(5, 2),
        zeros(3, 4).t(),
        zeros(4, 6)[:, ::2],
        zeros(4, 3, 1),
        zeros(4, 3).double(),
        torch.zeros(4, 3, device="meta", dtype=torch.float32),
        zeros(4, 3).to_sparse(),
        torch._neg_view(zeros(4, 3)),
    ]
    try:
        return (
            alike is not None
            and alike(zeros(7, 3), weight)
            and not any(alike(other, weight) for other in others)
            and not alike(good, torch.nn.Parameter(zeros(3, 3)))
        )
    except (TypeError, ValueError, RuntimeError):
        return False
