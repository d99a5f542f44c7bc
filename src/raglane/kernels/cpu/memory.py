"""What goes down to C by its address, held against what C will read and write there.

C takes an address at its word. Whatever a caller can reach may have changed since it was last looked at: by
``.data =``, ``set_``, ``resize_``, ``functional_call``, a parametrization, a hook on saved tensors, an attribute of the
layer. So nothing is remembered from call to call, and every tensor is looked at between the last line of the caller's
code and the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raglane.cells import CELLS
from raglane.checks import check_like
from raglane.errors import ArgumentError, ShapeError, message
from raglane.kernels.checks import check_offsets, check_weights, weight_shapes
from raglane.kernels.cpu.guards import Alike, guard
from raglane.native.library import DTYPES
from raglane.native.memory import NO_MEMORY, plain

__all__ = ["Given", "Layer", "Saved"]


class Layer(NamedTuple):
    """A layer and its batch: what forward and backward both read. ``K`` directions, other letters as in ``Request``.

    Attributes:
        cell: a key of ``CELLS``.
        values: ``(N, D)``.
        offsets: ``(B + 1,)`` int64.
        initial: ``(K, B, size)`` per state, or nothing where all begin with zeros.
        weights: those of the cell's ``weights_type``, direction after direction.
        sizes: of the states.
        directions: ``K``.
        depth: which layer of a stack this is, for messages.
    """

    cell: str
    values: Tensor
    offsets: Tensor
    initial: tuple[Tensor, ...]
    weights: tuple[Tensor | None, ...]
    sizes: tuple[int, ...]
    directions: int
    depth: int = 0

    def tensors(self) -> tuple[Tensor | None, ...]:
        """All that may have a gradient, in the order in which gradients are given."""
        return (self.values, *self.initial, *self.weights)

    def checked(self) -> Layer:
        """The same layer, all of it in memory that C can read; what lies well is not copied.

        Raises:
            ArgumentTypeError, ShapeError, ArgumentError: as :func:`raglane.kernels.checks.check` for a request.
        """
        try:
            if self._lies_well():
                return self
        except NO_MEMORY:
            pass  # the words follow
        self._explain()
        return self._replace(
            values=plain(self.values),
            offsets=plain(self.offsets),
            initial=tuple(plain(part) for part in self.initial),
            weights=tuple(None if part is None else plain(part) for part in self.weights),
        )

    def _lies_well(self) -> bool:
        """A quick look at everything: storages one by one, all else at once where :func:`guard` can."""
        cell, values, offsets, initial, weights, sizes, directions, _ = self
        dtype, (_, width), (count,) = values.dtype, values.shape, offsets.shape
        rules = _rules(cell, width, sizes, directions, dtype)
        size, parts = rules.size, [values, offsets]
        for part, (_, room, optional) in zip(weights, rules.weights, strict=True):
            if part is not None:
                parts.append(part)
                if part.untyped_storage().nbytes() < room + part.storage_offset() * size:
                    return False
            elif not optional:
                return False
        if (
            count == 0
            or values.untyped_storage().nbytes() < values.nbytes + values.storage_offset() * size
            or offsets.untyped_storage().nbytes() < 8 * (count + offsets.storage_offset())
        ):
            return False
        expected, alike = rules.expected
        if len(parts) != expected or not alike(*parts):
            shapes = [shape for part, (shape, _, _) in zip(weights, rules.weights, strict=True) if part is not None]
            if not (
                _all_lie_well((values,), ((values.shape[0], width),), values)
                and _all_lie_well((offsets,), ((count,),), rules.integers)
                and _all_lie_well(parts[2:], shapes, values)  # type: ignore[arg-type]
            ):
                return False
            rules.expect(parts, ((None, width), (None,), *shapes))  # type: ignore[arg-type]
        if initial:
            return len(initial) == len(sizes) and _all_lie_well(
                initial, [(directions, count - 1, each) for each in sizes], values
            )
        return True

    def _explain(self) -> None:
        """Raise where something is wrong, with the words that every backend has for it."""
        if self.cell not in CELLS:
            raise ArgumentError(message("cell", repr(self.cell), f"one of {', '.join(CELLS)}", "choose one of them"))
        cell, values = CELLS[self.cell], self.values
        if values.dim() != 2:
            raise ShapeError(message("input", f"shape {tuple(values.shape)}", "(N, D)", "pass the flat values"))
        check_like("input", values, tuple(values.shape), values)
        if not values.is_cpu or values.dtype not in DTYPES:
            rule = f"the cpu kernels compute in {', '.join(map(str, DTYPES))}"
            raise ShapeError(message("input", f"{values.dtype} on {values.device}", rule, "convert it with .to()"))
        check_offsets(self.offsets, values.shape[0], values.device)
        each = len(cell.weights_type._fields)
        if self.directions not in (1, 2) or len(self.weights) != each * self.directions:
            got = f"{len(self.weights)} weights for {self.directions} directions"
            raise ShapeError(message("weights", got, f"{each} for each of one or two directions", "pass all of them"))
        if len(self.sizes) != len(cell.states) or (self.initial and len(self.initial) != len(self.sizes)):
            got = f"{len(self.initial)} of sizes {self.sizes}"
            raise ShapeError(message("hx", got, f"the states {', '.join(cell.states)}", "pass one tensor for each"))
        rows = (self.directions, self.offsets.shape[0] - 1)
        for name, size, part in zip(cell.states, self.sizes, self.initial, strict=False):
            check_like(f"hx ({name})", part, (*rows, size), values)
        for direction in range(self.directions):
            own = self.weights[each * direction :][:each]
            check_weights(cell, own, values.shape[1], self.sizes, values, (self.depth, direction))


class Saved(NamedTuple):
    """What backward needs of forward besides the layer; tensors without numbers where there is nothing.

    Attributes:
        output: ``(N, K * P)``.
        gates: ``(K, N, ...)``, as the kernels lay them out.
        cells: ``c`` after each element, where the cell has one: ``(K, N, H)`` of an LSTM, ``(N, K * H)`` of an
            element-wise cell.
        is_shared: whether the caller has got ``cells`` as well.
    """

    output: Tensor
    gates: Tensor
    cells: Tensor
    is_shared: bool = False

    def checked(self, layer: Layer, shapes: tuple[tuple[int, ...], ...]) -> Saved:
        """The same in memory that C can read.

        Args:
            layer: the layer, checked.
            shapes: what the three must have.

        Raises:
            ArgumentTypeError, ShapeError: a hook on saved tensors gave back something else than was saved.
        """
        if _all_lie_well(self[:3], shapes, layer.values):
            return self
        names = ("saved output", "saved gates", "saved cells")
        output, gates, cells = _all_checked(names, self[:3], shapes, layer.values)
        return Saved(output, gates, cells, self.is_shared)  # type: ignore[arg-type]


class Given(NamedTuple):
    """The gradients of what running a layer gave; None stands for zeros."""

    output: Tensor | None
    cells: Tensor | None
    final: tuple[Tensor | None, ...]

    def checked(self, layer: Layer, output: tuple[int, ...], cells: tuple[int, ...]) -> Given:
        """The same in memory that C can read.

        Args:
            layer: the layer, checked.
            output: the output's shape.
            cells: that of ``Saved.cells``.

        Raises:
            ArgumentTypeError, ShapeError: a gradient that does not fit what it is of.
        """
        directions, count = layer.directions, layer.offsets.shape[0] - 1
        parts = (self.output, self.cells, *self.final)
        shapes = (output, cells, *[(directions, count, size) for size in layer.sizes])
        if _all_lie_well(parts, shapes, layer.values):
            return self
        names = ("gradient of the output", "gradient of c", "gradient of the final h", "gradient of the final c")
        found = _all_checked(names, parts, shapes, layer.values)
        return Given(found[0], found[1], tuple(found[2:]))


class _Rule(NamedTuple):
    """What a weight must be: its shape, None where there must be none; its bytes; whether it may be left out."""

    shape: tuple[int, ...] | None
    room: int
    optional: bool


def _nothing(*_: Tensor) -> bool:
    return False


class _Rules:
    """What the tensors of a layer must be.

    Attributes:
        size: the bytes of a number.
        weights: their rules, direction after direction.
        integers: a tensor as offsets are.
        expected: how many tensors there were last, and what says at once whether so many are what they must be.
    """

    __slots__ = ("expected", "integers", "size", "weights")

    def __init__(self, size: int, weights: tuple[_Rule, ...]) -> None:
        self.size, self.weights = size, weights
        self.integers = torch.empty(0, dtype=torch.int64, device="cpu")
        self.expected: tuple[int, Alike] = (0, _nothing)

    def expect(self, parts: Sequence[Tensor], shapes: Sequence[tuple[int | None, ...]]) -> None:
        """Expect tensors like these from now on, which are what they must be."""
        alike = guard(parts, shapes)
        if alike is not None:
            self.expected = (len(parts), alike)


@lru_cache(maxsize=512)
def _rules(cell: str, input_size: int, sizes: tuple[int, ...], directions: int, dtype: torch.dtype) -> _Rules:
    """The rules for the tensors of a layer."""
    size = dtype.itemsize
    if dtype not in DTYPES or len(sizes) != len(CELLS[cell].states) or directions not in (1, 2):
        raise ValueError
    rules = []
    for _, shape, optional in weight_shapes(CELLS[cell], input_size, sizes) or ():
        room = 0 if shape is None else size * torch.Size(shape).numel()
        rules.append(_Rule(shape, room, optional or shape is None))
    return _Rules(size, tuple(rules) * directions)


def _all_lie_well(parts: Sequence[Any], shapes: Sequence[tuple[int, ...]], like: Tensor) -> bool:
    """Whether C can read tensors of these shapes as they are, and as what ``like`` is; there is nothing in None."""
    dtype, size = like.dtype, like.element_size()
    try:
        for part, shape in zip(parts, shapes, strict=False):
            if part is not None and (
                part.shape != shape
                or part.dtype is not dtype
                or not part.is_cpu
                or not part.is_contiguous()
                or part.is_neg()
                or part.untyped_storage().nbytes() < part.nbytes + part.storage_offset() * size
            ):
                return False
    except NO_MEMORY:
        return False
    return True


def _all_checked(
    names: Sequence[str], parts: Sequence[Any], shapes: Sequence[tuple[int, ...]], like: Tensor
) -> list[Tensor | None]:
    """Tensors in memory that C can read, None for None."""
    found: list[Tensor | None] = []
    for name, part, shape in zip(names, parts, shapes, strict=False):
        if part is not None:
            check_like(name, part, shape, like)
        found.append(None if part is None else plain(part))
    return found
