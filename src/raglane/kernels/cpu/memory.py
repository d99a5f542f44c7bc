"""What goes down to C by its address, held against what C will read and write there: a layer's tensors before its call,
what forward saved, and the gradients that come in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raglane._utils.checks import check_like
from raglane.cells import CELLS
from raglane.errors import ArgumentError, ShapeError, message
from raglane.kernels.checks import check_offsets, check_weights, weight_shapes
from raglane.kernels.cpu.guards import Alike, guard
from raglane.native.library import DTYPES
from raglane.native.memory import NO_MEMORY, lies_nowhere, plain

__all__ = ["Given", "Rules", "Saved", "Storages", "refuse"]

Storages = list[torch.UntypedStorage]
"""The memory of tensors that were looked at.

NOTE (threads): whoever calls C holds it until C returns. Another thread may give a weight other memory meanwhile
(``.data =``, ``.to()``, ``set_``), and what C reads must not be given back."""

# How many kinds of tensors a layer knows at a glance.
_LOOKS = 4


class _Weight(NamedTuple):
    """What a weight must be: its shape, None where there must be none; its bytes; whether it may be left out."""

    shape: tuple[int, ...] | None
    room: int
    optional: bool


class Rules:
    """What the tensors of a layer must be.

    Args:
        cell: a key of ``CELLS``.
        input_size: ``D``.
        sizes: of the states.
        directions: ``K``.
        dtype: of all.

    Raises:
        ValueError, KeyError: the kernels have no such layer.
    """

    __slots__ = ("_integers", "_looks", "_weights", "cell", "directions", "input_size", "size", "sizes")

    def __init__(self, cell: str, input_size: int, sizes: tuple[int, ...], directions: int, dtype: torch.dtype) -> None:
        spec, size = CELLS[cell], dtype.itemsize
        if dtype not in DTYPES or len(sizes) != len(spec.states) or directions not in (1, 2):
            raise ValueError
        weights = []
        for _, shape, optional in weight_shapes(spec, input_size, sizes) or ():
            room = 0 if shape is None else size * torch.Size(shape).numel()
            weights.append(_Weight(shape, room, optional or shape is None))
        self.cell, self.input_size, self.sizes, self.directions, self.size = cell, input_size, sizes, directions, size
        self._weights = tuple(weights) * directions
        self._integers = torch.empty(0, dtype=torch.int64, device="cpu")
        # For how many tensors, and what says at once whether so many are what they must be: the last few that were met,
        # since all layers of these sizes share them, and one may train while another answers.
        self._looks: tuple[tuple[int, Alike], ...] = ()

    def checked(self, offsets: Any, tensors: tuple[Any, ...], depth: int) -> tuple[Tensor, tuple[Any, ...], Storages]:
        """Offsets and a layer's tensors in memory that C can read, and that memory; what lies well is not copied.

        Args:
            offsets: ``(B + 1,)`` int64.
            tensors: see :data:`raglane.kernels.cpu.layer.Tensors`.
            depth: which layer of a stack this is, for messages.
        """
        if storages := self.hold(offsets, tensors):
            return offsets, tensors, storages
        begin = len(tensors) - len(self._weights)
        refuse(self.cell, offsets, tensors[0], tensors[1:begin], tensors[begin:], self.sizes, self.directions, depth)
        if tensors[0].shape[1] != self.input_size:
            rule = f"{self.input_size} features, as when the layer ran"
            raise ShapeError(message("input", f"{tensors[0].shape[1]} features", rule, "leave its tensors alone"))
        names = self._names(begin - 1, depth)
        found = [None if part is None else plain(name, part) for name, part in zip(names, tensors, strict=True)]
        offsets = plain("offsets", offsets)
        storages = [part.untyped_storage() for part in (offsets, *found) if part is not None]
        return offsets, tuple(found), storages

    def _names(self, states: int, depth: int) -> list[str]:
        """What messages call a layer's tensors, so many of them initial states."""
        spec = CELLS[self.cell]
        names = ["input", *(f"hx ({name})" for name in spec.states[:states])]
        for direction in range(self.directions):
            end = f"_l{depth}{'_reverse' if direction else ''}"
            names += [name + end for name, *_ in weight_shapes(spec, self.input_size, self.sizes) or ()]
        return names

    def hold(self, offsets: Any, tensors: tuple[Any, ...]) -> Storages:
        """A quick look at everything: its memory, if C can read it as it is; else nothing."""
        try:
            return self._hold(offsets, tensors)
        except NO_MEMORY:
            return []  # no tensor, or one without memory

    def _hold(self, offsets: Tensor, tensors: tuple[Any, ...]) -> Storages:
        """Storages one by one, all else at once where :func:`guard` can."""
        values, begin, size = tensors[0], len(tensors) - len(self._weights), self.size
        elements, (count,) = values.shape[0], offsets.shape
        parts = [values, offsets]
        storages = [values.untyped_storage(), offsets.untyped_storage()]
        for part, (shape, room, optional) in zip(tensors[begin:], self._weights, strict=True):
            if part is not None:
                parts.append(part)
                storages.append(storage := part.untyped_storage())
                # A look at all cannot tell one that must not be there from another of its shape that is missing.
                if shape is None or storage.nbytes() < room + part.storage_offset() * size:
                    return []
            elif not optional:
                return []
        if (
            count == 0
            or storages[0].nbytes() < (elements * self.input_size + values.storage_offset()) * size
            or storages[1].nbytes() < 8 * (count + offsets.storage_offset())
        ):
            return []
        for expected, alike in self._looks:
            if expected == len(parts) and alike(*parts):
                break
        else:
            if not self._hold_one_by_one(parts, tensors[begin:]):
                return []
        if begin > 1:
            shapes = [(self.directions, count - 1, each) for each in self.sizes]
            if begin != 1 + len(shapes) or not _all_lie_well(tensors[1:begin], shapes, values):
                return []
            storages += [part.untyped_storage() for part in tensors[1:begin]]
        return storages

    def _hold_one_by_one(self, parts: list[Tensor], weights: tuple[Any, ...]) -> bool:
        """The same tensor by tensor; where it holds, tensors like these are known at a glance from now on."""
        values, offsets, *given = parts
        width = self.input_size
        shapes = [shape for part, (shape, _, _) in zip(weights, self._weights, strict=True) if part is not None]
        if not (
            values.dtype.itemsize == self.size
            and values.dtype in DTYPES
            and _all_lie_well((values,), ((values.shape[0], width),), values)
            and _all_lie_well((offsets,), ((offsets.shape[0],),), self._integers)
            and _all_lie_well(given, shapes, values)  # type: ignore[arg-type]
        ):
            return False
        alike = guard(parts, ((None, width), (None,), *shapes))  # type: ignore[arg-type]
        if alike is not None:
            self._looks = ((len(parts), alike), *self._looks[: _LOOKS - 1])
        return True


def refuse(
    cell: str,
    offsets: Any,
    values: Any,
    initial: Sequence[Any],
    weights: Sequence[Any],
    sizes: tuple[int, ...],
    directions: int,
    depth: int = 0,
) -> None:
    """Raise where something about a layer and its tensors is wrong, with the words that every backend has for it.

    Args:
        cell: a key of ``CELLS``.
        offsets: ``(B + 1,)`` int64.
        values: ``(N, D)``.
        initial: ``(K, B, size)`` per state, or nothing.
        weights: those of the cell's ``weights_type``, direction after direction.
        sizes: of the states.
        directions: ``K``.
        depth: which layer of a stack this is.
    """
    if cell not in CELLS:
        raise ArgumentError(message("cell", repr(cell), f"one of {', '.join(CELLS)}", "choose one of them"))
    spec = CELLS[cell]
    if not isinstance(values, Tensor) or values.dim() != 2:
        got = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else f"a {type(values).__name__}"
        raise ShapeError(message("input", got, "(N, D)", "pass the flat values"))
    check_like("input", values, tuple(values.shape), values)
    if not values.is_cpu or values.dtype not in DTYPES:
        rule = f"the cpu kernels compute in {', '.join(map(str, DTYPES))}"
        raise ShapeError(message("input", f"{values.dtype} on {values.device}", rule, "convert it with .to()"))
    check_offsets(offsets, values.shape[0], values.device)
    each = len(spec.weights_type._fields)
    if directions not in (1, 2) or len(weights) != each * directions:
        got = f"{len(weights)} weights for {directions} directions"
        raise ShapeError(message("weights", got, f"{each} for each of one or two directions", "pass all of them"))
    if len(sizes) != len(spec.states) or (initial and len(initial) != len(sizes)):
        got = f"{len(initial)} of sizes {sizes}"
        raise ShapeError(message("hx", got, f"the states {', '.join(spec.states)}", "pass one tensor for each"))
    rows = (directions, offsets.shape[0] - 1)
    for name, size, part in zip(spec.states, sizes, initial, strict=False):
        check_like(f"hx ({name})", part, (*rows, size), values)
    for direction in range(directions):
        own = tuple(weights[each * direction :][:each])
        check_weights(spec, own, values.shape[1], sizes, values, (depth, direction))


class Saved(NamedTuple):
    """What backward needs of forward besides the layer; tensors without numbers where there is nothing.

    Attributes:
        output: ``(N, K * P)``.
        gates: ``(K, N, ...)``, as the kernels lay them out.
        c_states: ``c`` after each element, where the cell has one: ``(K, N, H)`` of an LSTM, ``(N, K * H)`` of an
            element-wise cell.
        is_shared: whether the caller has ``c_states`` as well.
    """

    output: Tensor
    gates: Tensor
    c_states: Tensor
    is_shared: bool = False

    def checked(self, shapes: Sequence[tuple[int, ...]], like: Tensor) -> Saved:
        """The same in memory that C can read."""
        if _all_lie_well(self[:3], shapes, like):
            return self
        names = ("saved output", "saved gates", "saved c")
        output, gates, c_states = _all_checked(names, self[:3], shapes, like)
        return Saved(output, gates, c_states, self.is_shared)  # type: ignore[arg-type]


class Given(NamedTuple):
    """The gradients of what running a layer gave; None stands for zeros."""

    output: Tensor | None
    c_states: Tensor | None
    final: tuple[Tensor | None, ...]

    def checked(self, shapes: Sequence[tuple[int, ...]], like: Tensor) -> Given:
        """The same in memory that C can read."""
        parts = (self.output, self.c_states, *self.final)
        if _all_lie_well(parts, shapes, like):
            return self
        names = ("gradient of the output", "gradient of c", "gradient of the final h", "gradient of the final c")
        found = _all_checked(names, parts, shapes, like)
        return Given(found[0], found[1], tuple(found[2:]))


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
                or lies_nowhere(part)
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
        found.append(None if part is None else plain(name, part))
    return found
