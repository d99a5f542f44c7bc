"""Rules that translate operations of torch to nodes of a graph (:data:`RULES`), and the tracing of
a step by them.
"""

# ruff: noqa: ARG001 (all rules have the same arguments)

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raglane.cells.module import ModuleCell
from raglane.programs import formulas
from raglane.programs.expressions import Expression, sigmoid, stop
from raglane.programs.formulas import FORMULAS, TRUTHS
from raglane.programs.graph import DEPENDS, Refused, StepGraph
from raglane.programs.products import PRODUCTS
from raglane.programs.row_counts import align, free
from raglane.programs.step import Step, default_modes
from raglane.programs.trace import Trace, Tracer, draws_random_numbers, rows_for

Rule = Callable[..., Any]
RowFormula = Callable[[Expression, int], Expression]
_BATCH_NORMS = (
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_no_training",
    "cudnn_batch_norm",
    "_batch_norm_with_update",
    "_batch_norm_no_update",
)
_EXTENSIONS = tuple(
    f"{kind}_pad{count}d" for kind in ("reflection", "replication") for count in (1, 2, 3)
)
_MOVES = tuple(
    """
    view _unsafe_view reshape t transpose permute expand unsqueeze squeeze select slice split
    split_with_sizes unsafe_split unsafe_split_with_sizes unsafe_chunk chunk unbind clone contiguous
    alias repeat roll flip narrow diagonal unfold movedim expand_as view_as tile flatten rot90
    swapaxes lift_fresh as_strided
    """.split()
)


def _move(tracer: Tracer, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Move the marks of a tensor as torch moves its numbers."""
    like = args[0]
    moved = function(tracer.marks(like), *args[1:], **kwargs)
    if isinstance(moved, Tensor):
        return tracer.wrap(moved, like.dtype)
    return type(moved)(tracer.wrap(piece, like.dtype) for piece in moved)


def _join(tracer: Tracer, function: Any, tensors: Any, *args: Any) -> Tensor:
    marks = function([tracer.marks(tensor) for tensor in tensors], *args)
    return tracer.wrap(marks, _common(tracer, tensors))


def _pick(tracer: Tracer, function: Any, source: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Index columns by numbers that are constants."""

    def plain(argument: Any) -> Any:
        if isinstance(argument, list | tuple):
            return [plain(item) for item in argument]
        return tracer.constant(argument) if isinstance(argument, Tensor) else argument

    return tracer.wrap(function(tracer.marks(source), *map(plain, args), **kwargs), source.dtype)


def _pad(
    tracer: Tracer, function: Any, source: Any, amounts: list[int], value: float = 0
) -> Tensor:
    fill = int(free(np.asarray([tracer.graph.number(value)]))[0])
    return tracer.wrap(function(tracer.marks(source), amounts, fill), source.dtype)


def _extended(tracer: Tracer, function: Any, source: Any, amounts: list[int]) -> Tensor:
    """Pad the last dimensions with copies of columns."""
    kind = function._schema.name.removeprefix("aten::")[:-2]
    extend = getattr(torch.ops.aten, f"{kind}1d").default
    marks = tracer.marks(source)
    for pair in range(len(amounts) // 2):
        dim = marks.dim() - 1 - pair
        columns = torch.arange(marks.shape[dim], dtype=torch.float64, device="cpu")
        index = extend(columns[None, None], amounts[2 * pair : 2 * pair + 2])[0, 0].long()
        marks = marks.index_select(dim, index)
    return tracer.wrap(marks, source.dtype)


def _filled(value: float | None) -> Rule:
    def rule(tracer: Tracer, function: Any, like: Any, *args: Any, **kwargs: Any) -> Tensor:
        arguments = list(args)
        shape = arguments.pop(0) if "new_" in function._schema.name else like.shape
        number = arguments[0] if value is None else value
        dtype = kwargs.get("dtype") or like.dtype
        if isinstance(number, Tensor):
            raise Refused("it fills a tensor with a number that it computes")
        mark = free(np.asarray([tracer.graph.number(float(number))]))
        return tracer.wrap(mark.expand(math.prod(shape)).clone().reshape(tuple(shape)), dtype)

    return rule


def _detach(tracer: Tracer, function: Any, source: Any) -> Tensor:
    rule = _pointwise(stop, source.dtype is torch.bool)
    return tracer.detach(source, rule(tracer, None, source))


def _convert(tracer: Tracer, function: Any, source: Any, **kwargs: Any) -> Tensor:
    dtype = kwargs.get("dtype") or source.dtype
    is_count = source.dtype is torch.bool and not dtype.is_floating_point
    if is_count or dtype in (source.dtype, tracer.dtype):
        return tracer.wrap(tracer.marks(source).clone(), dtype)
    if dtype is torch.bool:
        return _pointwise(lambda a: a.differs(0.0), True)(tracer, None, source)
    raise Refused(f"it changes {source.dtype} to {dtype}")


def _common(tracer: Tracer, operands: Any) -> torch.dtype:
    """Return the dtype of a result by torch's promotion of its operands."""
    tensors = [operand for operand in operands if isinstance(operand, Tensor)]
    dtype = functools.reduce(torch.promote_types, [tensor.dtype for tensor in tensors])
    # Numbers without dimensions do not widen tensors of one floating dtype.
    shaped = {tensor.dtype for tensor in tensors if tensor.dim()}
    if len(shaped) == 1 and next(iter(shaped)).is_floating_point:
        (dtype,) = shaped
    if not dtype.is_floating_point and any(type(operand) is float for operand in operands):
        dtype = tracer.dtype
    if dtype.is_floating_point and dtype is not tracer.dtype:
        raise Refused(f"it computes in {dtype}")
    return dtype


def _pointwise(formula: Callable[..., Expression], is_truth: bool = False) -> Rule:
    """Return the rule of a pointwise operation."""

    def rule(tracer: Tracer, function: Any, *args: Any, **kwargs: Any) -> Tensor:
        arguments = dict(enumerate(args)) | kwargs
        names = [name for name, argument in arguments.items() if isinstance(argument, Tensor)]
        dtype = torch.bool if is_truth else _number_dtype(tracer, function, arguments.values())
        marks = [tracer.marks(arguments[name]) for name in names]
        shape = np.broadcast_shapes(*(mark.shape for mark in marks))
        if not math.prod(shape):
            return tracer.wrap(free(np.empty(0, np.int64)).reshape(shape), dtype)
        aligned = align([mark.expand(shape).reshape(-1, 1) for mark in marks], tracer.rows)
        # In the order of the first operand: results of permuted numbers need no copy. Repeated
        # numbers stay apart.
        first = aligned.columns[0][:, 0]
        order = np.arange(len(first))
        if len(np.unique(first)) == len(first):
            order = np.argsort(first, kind="stable")
        for name, columns in zip(names, aligned.columns, strict=True):
            arguments[name] = Expression(tracer.graph, columns[order, 0])
        operands = [arguments[index] for index in range(len(args))]
        result = formula(*operands, **{name: arguments[name] for name in kwargs})
        back = result.columns[np.argsort(order)]
        return tracer.wrap(aligned.marks(back.reshape(-1, 1)).reshape(shape), dtype)

    return rule


def _number_dtype(tracer: Tracer, function: Any, operands: Any) -> torch.dtype:
    """Return the dtype of a pointwise operation whose results are no truths."""
    dtype = _common(tracer, operands)
    if function is None or dtype.is_floating_point:
        return dtype
    if function._schema.name == "aten::div":
        return tracer.dtype
    if dtype is torch.bool:
        raise Refused("it computes with booleans as with numbers")
    return dtype


# Operations on rows.


def _dims(dim: Any, count: int) -> list[int]:
    if dim is None or dim in ([], ()):
        return list(range(count))
    return [index % count for index in (dim if isinstance(dim, list | tuple) else [dim])]


def _along(
    tracer: Tracer, source: Tensor, dims: list[int], formula: RowFormula, keeps: bool | None
) -> Tensor:
    """Apply a formula to the segments of rows along some dimensions; ``keeps`` is None for a
    formula that reduces none.
    """
    marks = tracer.marks(source)
    others = [dim for dim in range(marks.dim()) if dim not in dims]
    order = [*others, *dims]
    moved = marks.permute(order)
    shape = [marks.shape[dim] for dim in others]
    count = math.prod(shape)
    if not marks.numel():
        raise Refused("it reduces nothing")
    aligned = align([moved.reshape(count, -1)], tracer.rows)
    columns = aligned.columns[0]
    result = formula(Expression(tracer.graph, columns.reshape(-1)), len(columns)).columns
    if keeps is None:
        back = sorted(range(len(order)), key=order.__getitem__)
        mapped = aligned.marks(result.reshape(columns.shape)).reshape(moved.shape)
        return tracer.wrap(mapped.permute(back), source.dtype)
    reduced = aligned.marks(result.reshape(-1, 1)).reshape(shape)
    for dim in sorted(dims) if keeps else ():
        reduced = reduced.unsqueeze(dim)
    return tracer.wrap(reduced, source.dtype)


def _reduction(formula: RowFormula) -> Rule:
    def rule(
        tracer: Tracer,
        function: Any,
        source: Any,
        dim: Any = None,
        keepdim: bool = False,
        **kwargs: Any,
    ) -> Any:
        dtype = kwargs.get("dtype") or source.dtype
        if not source.dtype is dtype is tracer.dtype:
            raise Refused(f"it reduces {source.dtype} to {dtype}")
        return _along(tracer, source, _dims(dim, source.dim()), formula, bool(keepdim))

    return rule


def _var(tracer: Tracer, function: Any, source: Any, dim: Any = None, **kwargs: Any) -> Any:
    name = function._schema.name
    correction = kwargs.get("correction")
    if isinstance(dim, bool):
        raise Refused("no program has this form of the variance")
    formula = formulas.variance(1.0 if correction is None else float(correction))
    dims = _dims(dim, source.dim())
    keeps = bool(kwargs.get("keepdim"))
    variance = _along(tracer, source, dims, formula, keeps)
    if name == "aten::std":
        return _pointwise(formulas.root)(tracer, None, variance)
    if name == "aten::var_mean":
        return variance, _along(tracer, source, dims, formulas.mean, keeps)
    return variance


def _extreme(formula: RowFormula) -> Rule:
    """Return the rule of ``max`` or ``min``, without its indices."""

    def rule(
        tracer: Tracer, function: Any, source: Any, dim: Any = None, keepdim: bool = False
    ) -> Any:
        if isinstance(dim, Tensor):
            name = "maximum" if function._schema.name == "aten::max" else "minimum"
            return RULES[name](tracer, None, source, dim)
        if dim is None:
            return _along(tracer, source, _dims(dim, source.dim()), formula, keepdim)
        first = _along(tracer, source, [dim % source.dim()], formulas.first_of(formula), keepdim)
        return first, tracer.nothing(*first.shape)

    return rule


def _mapping(formula: RowFormula) -> Rule:
    def rule(
        tracer: Tracer, function: Any, source: Any, dim: int, to: Any = None, **kwargs: Any
    ) -> Tensor:
        if source.dtype is not tracer.dtype or kwargs.get("dtype") not in (None, tracer.dtype):
            raise Refused(f"it sums {source.dtype}")
        return _along(tracer, source, [dim % source.dim()], formula, None)

    return rule


def _length(
    tracer: Tracer,
    function: Any,
    source: Any,
    ord: float = 2,
    dim: Any = None,
    keepdim: bool = False,
) -> Any:
    def formula(a: Expression, segments: int) -> Expression:
        if ord == 1:
            return abs(a).sums(segments)
        if ord != 2:
            raise Refused(f"no program has the norm of order {ord}")
        return formulas.root((a * a).sums(segments))

    return _along(tracer, source, _dims(dim, source.dim()), formula, keepdim)


def _normalised(
    tracer: Tracer,
    source: Tensor,
    segments: tuple[int, ...],
    epsilon: float,
    gain: Any,
    bias: Any,
    shape: tuple[int, ...],
) -> Any:
    """Normalise ``source``, viewed as ``segments``, along the last dimension; gain and bias have
    ``shape``.
    """

    def formula(a: Expression, count: int) -> Expression:
        return Expression(a.graph, a.graph.norm(a.columns, count, epsilon)[0])

    wide = tracer.wrap(tracer.marks(source).reshape(segments), source.dtype)
    wide = _along(tracer, wide, [len(segments) - 1], formula, None)
    normal = tracer.wrap(tracer.marks(wide).reshape(source.shape), tracer.dtype)
    scaled = _applied(tracer, normal, (("mul", gain), ("add", bias)), shape)
    return scaled, tracer.nothing(1), tracer.nothing(1)


def _applied(
    tracer: Tracer, source: Any, operations: tuple[tuple[str, Any], ...], shape: tuple[int, ...]
) -> Any:
    """Apply operations in turn, with operands of a shape; those with None are left out."""
    for name, operand in operations:
        if operand is not None:
            shaped = tracer.wrap(tracer.marks(operand).reshape(shape), operand.dtype)
            source = RULES[name](tracer, None, source, shaped)
    return source


def _layer_norm(
    tracer: Tracer, function: Any, source: Any, shape: Any, gain: Any, bias: Any, epsilon: float
) -> Any:
    leading = source.shape[: source.dim() - len(shape)]
    segments = (*leading, math.prod(shape))
    return _normalised(tracer, source, segments, epsilon, gain, bias, tuple(shape))


def _group_norm(
    tracer: Tracer,
    function: Any,
    source: Any,
    gain: Any,
    bias: Any,
    count: int,
    channels: int,
    positions: int,
    groups: int,
    epsilon: float,
) -> Any:
    shape = (channels, *(1,) * (source.dim() - 2))
    segments = (count, groups, channels // groups * positions)
    return _normalised(tracer, source, segments, epsilon, gain, bias, shape)


def _gated(tracer: Tracer, function: Any, source: Any, dim: int = -1) -> Tensor:
    value, gate = (tracer.wrap(half, source.dtype) for half in tracer.marks(source).chunk(2, dim))
    gated: Tensor = _pointwise(lambda a, b: a * sigmoid(b))(tracer, None, value, gate)
    return gated


def _batch_norm(
    tracer: Tracer,
    function: Any,
    source: Any,
    gain: Any,
    bias: Any,
    mean: Any,
    variance: Any,
    *options: Any,
) -> Any:
    name = function._schema.name
    in_inference = name == "aten::_native_batch_norm_legit_no_training" or (
        name == "aten::native_batch_norm" and options[0] is False
    )
    if not in_inference:
        raise Refused(f"batch normalisation mixes the rows of the batch, {DEPENDS}")
    epsilon = options[-1]
    biased = tracer.note(torch.ops.aten.add.Scalar, variance, epsilon)
    scale = tracer.note(torch.ops.aten.rsqrt.default, biased)
    operations = (("sub", mean), ("mul", scale), ("mul", gain), ("add", bias))
    shape = (-1, *(1,) * (source.dim() - 2))
    scaled = _applied(tracer, source, operations, shape)
    return scaled, tracer.nothing(1), tracer.nothing(1)


def _log_sigmoid(tracer: Tracer, function: Any, source: Any) -> Any:
    return _pointwise(formulas.log_sigmoid)(tracer, None, source), tracer.nothing(1)


def _copy(tracer: Tracer, function: Any, target: Any, source: Any, *_: Any) -> Tensor:
    return tracer.wrap(tracer.marks(source).expand(target.shape).clone(), target.dtype)


RULES: dict[str, Rule] = {
    **dict.fromkeys(_MOVES, _move),
    **dict.fromkeys(("cat", "stack"), _join),
    **dict.fromkeys(("index", "index_select", "gather", "take_along_dim"), _pick),
    "constant_pad_nd": _pad,
    **dict.fromkeys(_EXTENSIONS, _extended),
    **dict.fromkeys(("zeros_like", "new_zeros", "zero"), _filled(0.0)),
    **dict.fromkeys(("ones_like", "new_ones"), _filled(1.0)),
    **dict.fromkeys(("full_like", "new_full", "fill"), _filled(None)),
    # The contents of new memory are undefined.
    **dict.fromkeys(("empty_like", "new_empty"), _filled(math.nan)),
    "detach": _detach,
    "glu": _gated,
    "log_sigmoid_forward": _log_sigmoid,
    "_to_copy": _convert,
    "copy": _copy,
    **{name: _pointwise(formula) for name, formula in FORMULAS.items()},
    **{name: _pointwise(formula, True) for name, formula in TRUTHS.items()},
    "sum": _reduction(Expression.sums),
    "mean": _reduction(formulas.mean),
    "amax": _reduction(formulas.largest),
    "amin": _reduction(formulas.smallest),
    "prod": _reduction(formulas.product),
    "logsumexp": _reduction(formulas.log_sum),
    **dict.fromkeys(("var", "std", "var_mean"), _var),
    "max": _extreme(formulas.largest),
    "min": _extreme(formulas.smallest),
    "cumsum": _mapping(Expression.cumsum),
    **dict.fromkeys(("_softmax", "_safe_softmax"), _mapping(formulas.softmax)),
    "_log_softmax": _mapping(formulas.log_softmax),
    "linalg_vector_norm": _length,
    "native_layer_norm": _layer_norm,
    "native_group_norm": _group_norm,
    **dict.fromkeys(_BATCH_NORMS, _batch_norm),
    **PRODUCTS,
}
"""The rule of each operation of torch, by its name: a function of the tracer, the operation and its
arguments."""


def trace(step: Step) -> Trace:
    """Trace a step; raises Refused with the reason if it cannot become a program."""
    # With the cell's prepare inside, everything that depends on a row is computed in one order of
    # sums.
    try:
        return _trace(step, True)
    except Refused:
        if isinstance(step.cell, ModuleCell) and not hasattr(step.weights, "prepare"):
            raise
    return _trace(step, False)


def _trace(step: Step, prepares: bool) -> Trace:
    with default_modes(grad=False):
        widths = step.widths if prepares else [_prepared_width(step), *step.widths[1:]]
        dims = [size for leaf in step.leaves for size in leaf.shape]
        sizes = [*widths, *step.sizes, step.output, *dims, math.prod(step.sizes)]
        tracer = Tracer(step.dtype, rows_for(sizes), RULES)
        leaves = [tracer.leaf(step.converted(leaf.detach()), leaf) for leaf in step.leaves]
        offsets = tracer.nothing(tracer.rows + 1, dtype=torch.int64)
        elements = [tracer.source("element", width) for width in widths]
        states = [tracer.source("state", size) for size in step.sizes]
        rows = [element.values for element in elements]
        before = [state.values for state in states]
        output, new = _recorded(
            tracer, lambda: step.run(leaves, rows, before, offsets, prepares), len(states)
        )
        result = StepGraph(
            tracer.graph,
            elements=[element.node for element in elements],
            states=[state.node for state in states],
            vectors=[],
            output=tracer.columns(output, step.output),
            new=[tracer.columns(state, size) for state, size in zip(new, step.sizes, strict=True)],
        )
        return tracer.finish(result, prepares)


def _recorded(tracer: Tracer, run: Callable[[], Any], states: int) -> tuple[Any, Any]:
    """Run a step while its operations are recorded; return its output and new states."""
    try:
        (output, new, changed), drew = draws_random_numbers(lambda: tracer.run(run))
    except Refused:
        raise
    except Exception as error:
        reason = f"tracing it raised {type(error).__name__}: {str(error).rstrip('.')}"
        raise Refused(reason) from error
    if drew:
        raise Refused(f"it draws random numbers inside the step, {DEPENDS}")
    if changed:
        raise Refused(f"it changes its own attributes, {DEPENDS}")
    if len(new) != states:
        raise Refused("it returns another number of states than it receives")
    return output, new


def _prepared_width(step: Step) -> int:
    dtype = next((leaf.dtype for leaf in step.leaves if leaf.dtype.is_floating_point), step.dtype)
    try:
        rows = torch.zeros(1, step.width, dtype=dtype, device="cpu")
        prepared = step.cell.prepare(step.weights, rows, torch.tensor([0, 1], device="cpu"))
    except Exception as error:
        raise Refused(f"its prepare raised {type(error).__name__}: {error}") from error
    return int(prepared.shape[1])
