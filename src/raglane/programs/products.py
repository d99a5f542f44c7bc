"""Rules for matrix products of rows with matrices computed from parameters, and of rows with
rows.
"""

# ruff: noqa: ARG001 (all rules have the same arguments, whether they read them or not)

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raglane.programs.expressions import Expression
from raglane.programs.graph import Columns, Graph, Refused
from raglane.programs.row_counts import FREE, SHIFT, align, free, order_of
from raglane.programs.trace import Tracer

# The most numbers that a product of rows with rows has before they are summed.
_LARGEST = 1 << 16
# An operand with columns of fewer nodes is read piece by piece, others are joined first.
_PIECES = 4


def _batched(tracer: Tracer, start: Tensor | None, a: Any, b: Any) -> Tensor:
    """Trace ``start + a @ b`` for ``(g, m, k)`` and ``(g, k, n)``; ``start`` are marks ``(g, m,
    n)``.
    """
    if tracer.is_known(a) and not tracer.is_known(b):
        turned = None if start is None else start.transpose(1, 2)
        return _turn(tracer, _batched(tracer, turned, _turn(tracer, b), _turn(tracer, a)))
    marks = tracer.marks(a)
    groups, m, k = marks.shape
    n = b.shape[2]
    if not groups * m * n:
        raise Refused("it multiplies nothing")
    if start is None:
        start = torch.full((groups, m, n), (FREE << SHIFT) | tracer.graph.number(0.0))
    which = np.repeat(np.arange(groups), m)
    matrices = None if tracer.is_known(b) else tracer.marks(b)
    if matrices is not None and not bool((matrices >> SHIFT == FREE).all()):
        return _rows_with_rows(tracer, start, marks, matrices)
    aligned = align([marks.reshape(-1, k), start.reshape(-1, n)], tracer.rows)
    columns, begin = aligned.columns
    chosen = which[aligned.chosen]
    order, which_matrix = _shared(chosen if matrices is None else _first_equal(matrices)[chosen])
    if matrices is None:
        weight = _known_weight(tracer, b, which_matrix)
    else:
        weight = _copied_weight(tracer, matrices[which_matrix])
    product = _product(
        tracer,
        begin[order].reshape(-1),
        columns[order].reshape(-1),
        weight,
        len(order) // len(which_matrix),
        len(which_matrix),
    )
    results = np.empty_like(begin)
    results[order] = product.reshape(-1, n)
    return tracer.wrap(aligned.marks(results.reshape(-1, n)).reshape(groups, m, n), tracer.dtype)


def _first_equal(matrices: Tensor) -> Any:
    """Return for each matrix the index of the first one with the same marks."""
    first: dict[bytes, int] = {}
    return np.asarray(
        [first.setdefault(matrix.numpy().tobytes(), index) for index, matrix in enumerate(matrices)]
    )


def _shared(chosen: Any) -> tuple[Any, Any]:
    """Return an order of the rows, part by part, and the matrices that each part multiplies.

    If a matrix has more rows than another, all rows are one part, and the weight repeats the
    matrices.
    """
    matrices, counts = np.unique(chosen, return_counts=True)
    if (counts != counts[0]).any():
        return np.arange(len(chosen)), chosen
    return np.argsort(chosen, kind="stable").reshape(len(matrices), -1).T.reshape(-1), matrices


def _viewed(tracer: Tracer, tensor: Any, function: Any, *args: int) -> Tensor:
    """Return a view of a tensor by an operation of torch."""
    if tracer.is_known(tensor):
        return tracer.note(function, tensor, *args)
    return tracer.wrap(function(tracer.marks(tensor), *args), tensor.dtype)


def _turn(tracer: Tracer, tensor: Any) -> Tensor:
    return _viewed(tracer, tensor, torch.ops.aten.transpose.int, 1, 2)


def _known_weight(tracer: Tracer, b: Any, which: Any) -> int:
    """Return the weight whose group k is the transpose of ``b[which[k]]``."""
    order = tuple(which.tolist())

    def make() -> Tensor:
        turned = tracer.note(torch.ops.aten.transpose.int, b, 1, 2)
        if order == tuple(range(b.shape[0])):
            return turned
        return tracer.note(
            torch.ops.aten.index_select.default, turned, 0, tracer.fixed(torch.from_numpy(which))
        )

    return tracer.weight((tracer.record(b).index, order), make)


def _copied_weight(tracer: Tracer, matrices: Tensor) -> int:
    """Return a weight from parameters that was copied for each row; ``matrices`` are marks ``(groups,
    k, n)``.
    """
    columns = (matrices & ((1 << SHIFT) - 1)).numpy()
    graph = tracer.graph
    nodes = np.unique(graph.nodes_of(columns.reshape(-1)))
    if len(nodes) != 1 or graph.nodes[nodes[0]].operation != "vector":
        raise Refused("it multiplies by a matrix that it computes")
    start = graph.starts[nodes[0]]
    vector = tracer.vector_tensor(start)
    index = torch.from_numpy(columns - start).transpose(1, 2)

    def make() -> Tensor:
        whole = tracer.note(torch.ops.aten.reshape.default, vector, [-1])
        taken = tracer.note(
            torch.ops.aten.index_select.default, whole, 0, tracer.fixed(index.reshape(-1))
        )
        return tracer.note(torch.ops.aten.reshape.default, taken, list(index.shape))

    return tracer.weight((tracer.record(vector).index, columns.tobytes(), columns.shape), make)


def _product(
    tracer: Tracer, start: Columns, columns: Columns, weight: int, segments: int, groups: int
) -> Columns:
    """Add a product, or one for each of the few pieces of an operand."""
    graph = tracer.graph
    cuts = _cuts(graph, columns) if segments * groups == 1 else []
    if not 1 <= len(cuts) < _PIECES:
        return graph.product(start, columns, weight, segments)
    whole = tracer.weight_tensor(weight)
    for low, high in zip([0, *cuts], [*cuts, len(columns)], strict=True):
        piece = tracer.weight(
            (tracer.record(whole).index, "columns", low, high),
            lambda low=low, high=high: tracer.note(  # type: ignore[misc]
                torch.ops.aten.slice.Tensor, whole, 2, low, high
            ),
        )
        start = graph.product(start, columns[low:high], piece)
    return start


def _cuts(graph: Graph, columns: Columns) -> list[int]:
    """Return where an operand continues with other columns."""
    nodes = graph.nodes_of(columns)
    continues = (np.diff(columns) == 1) & (np.diff(nodes) == 0)
    return [int(index) + 1 for index in np.flatnonzero(~continues)]


def _rows_with_rows(tracer: Tracer, start: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Multiply matrices of each row: products of numbers, and their sums."""
    groups, m, k = a.shape
    n = b.shape[2]
    if m * n * k * max(1, groups // tracer.rows) > _LARGEST:
        raise Refused("each row has a product of its own that is too large")
    shape = (groups, m, n, k)
    left = a.unsqueeze(2).expand(shape)
    right = b.transpose(1, 2).unsqueeze(1).expand(shape)
    count = groups * m * n
    aligned = align(
        [left.reshape(count, k), right.reshape(count, k), start.reshape(count, 1)], tracer.rows
    )
    flat = [columns.reshape(-1) for columns in aligned.columns]
    order = order_of(flat[:2])
    first, second = (Expression(tracer.graph, columns[order]) for columns in flat[:2])
    products = (first * second)[np.argsort(order)]
    starts = Expression(tracer.graph, flat[2])
    totals = (products.sums(len(starts)) + starts).columns
    return tracer.wrap(aligned.marks(totals.reshape(-1, 1)).reshape(groups, m, n), tracer.dtype)


def _as_batch(matrix: Any, tracer: Tracer) -> Any:
    """Return ``(m, k)`` as ``(1, m, k)``."""
    return _viewed(tracer, matrix, torch.ops.aten.unsqueeze.default, 0)


def _matrices(is_batched: bool) -> Callable[..., Tensor]:
    """A rule for ``a @ b``, or ``start + a @ b``."""

    def rule(
        tracer: Tracer, function: Any, *operands: Any, beta: float = 1, alpha: float = 1
    ) -> Tensor:
        if beta != 1 or alpha != 1:
            raise Refused(
                "no program has a product with alpha or beta: multiply the operands by them"
            )
        *begin, a, b = operands
        start = tracer.marks(begin[0]).expand(*a.shape[:-1], b.shape[-1]) if begin else None
        if is_batched:
            return _batched(tracer, start, a, b)
        product = _batched(
            tracer,
            None if start is None else start.unsqueeze(0),
            _as_batch(a, tracer),
            _as_batch(b, tracer),
        )
        return tracer.wrap(tracer.marks(product)[0], tracer.dtype)

    return rule


def _mv(tracer: Tracer, function: Any, a: Any, b: Any) -> Tensor:
    column = _viewed(tracer, b, torch.ops.aten.unsqueeze.default, 1)
    product = _batched(tracer, None, _as_batch(a, tracer), _as_batch(column, tracer))
    return tracer.wrap(tracer.marks(product)[0, :, 0], tracer.dtype)


def _convolution(
    tracer: Tracer,
    function: Any,
    source: Any,
    weight: Any,
    bias: Any,
    strides: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    _: list[int],
    groups: int,
) -> Tensor:
    """Trace a convolution inside each row as products of its windows with one weight."""
    if transposed or not tracer.is_known(weight) or tracer.is_known(source):
        raise Refused("no program has this form of the convolution")
    marks = tracer.marks(source)
    kernel = weight.shape[2:]
    zero = int(free(np.asarray([tracer.graph.number(0.0)]))[0])
    marks = torch.constant_pad_nd(
        marks, [amount for pad in reversed(padding) for amount in (pad, pad)], zero
    )
    for axis, (size, stride, step) in enumerate(zip(kernel, strides, dilation, strict=True)):
        marks = marks.unfold(2 + axis, (size - 1) * step + 1, stride)[..., ::step]
    rows, channels, *spatial = marks.shape[: 2 + len(kernel)]
    depth = channels // groups * math.prod(kernel)
    width = weight.shape[0] // groups
    # The windows (group, row and place, offset and channel), whose adjacent columns are results of
    # one product.
    windows = marks.reshape(rows, groups, channels // groups, math.prod(spatial), math.prod(kernel))
    windows = windows.permute(1, 0, 3, 4, 2).reshape(groups, -1, depth)
    moved = tracer.note(torch.ops.aten.permute.default, weight, [0, *range(2, weight.dim()), 1])
    matrices = tracer.note(torch.ops.aten.reshape.default, moved, [groups, width, depth])
    start = None
    if bias is not None:
        start = tracer.marks(bias).reshape(groups, 1, width).expand(groups, windows.shape[1], width)
    product = _batched(tracer, start, tracer.wrap(windows, tracer.dtype), _turn(tracer, matrices))
    whole = (
        tracer.marks(product).reshape(groups, rows, math.prod(spatial), width).permute(1, 0, 3, 2)
    )
    return tracer.wrap(whole.reshape(rows, groups * width, *spatial), tracer.dtype)


PRODUCTS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("mm", "addmm"), _matrices(False)),
    **dict.fromkeys(("bmm", "baddbmm"), _matrices(True)),
    "mv": _mv,
    "convolution": _convolution,
}
"""Rules by the name of torch's operation, as in :data:`raglane.programs.rules.RULES`."""
