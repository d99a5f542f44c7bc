"""Rules that translate operations of torch to nodes of a graph (:data:`RULES`), and the tracing of
a step by them.
"""

# ruff: noqa: ARG001 (all rules have the same arguments)

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raglane.cells.module import ModuleCell
from raglane.programs import formulas
from raglane.programs.formulas import FORMULAS, TRUTHS
from raglane.programs.graph import DEPENDS, Columns, Graph, Refused, Result
from raglane.programs.products import PRODUCTS
from raglane.programs.rows import align, free
from raglane.programs.step import Step, default_modes
from raglane.programs.trace import Trace, Tracer, draws_random_numbers, rows_for

Rule = Callable[..., Any]
RowFormula = Callable[[Graph, Columns, int], Columns]
_BATCH_NORMS = (
    *("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training"),
    *("cudnn_batch_norm", "_batch_norm_with_update", "_batch_norm_no_update"),
)
_MOVES = (
    *(
        "view",
        "_unsafe_view",
        "reshape",
        "t",
        "transpose",
        "permute",
        "expand",
        "unsqueeze",
        "squeeze",
        "select",
    ),
    *(
        "slice",
        "split",
        "split_with_sizes",
        "unsafe_split",
        "unsafe_split_with_sizes",
        "unsafe_chunk",
        "chunk",
    ),
    *(
        "unbind",
        "clone",
        "contiguous",
        "alias",
        "repeat",
        "roll",
        "flip",
        "narrow",
        "diagonal",
        "unfold",
    ),
    *(
        "movedim",
        "expand_as",
        "view_as",
        "tile",
        "flatten",
        "rot90",
        "swapaxes",
        "lift_fresh",
        "as_strided",
    ),
)


def _move(tracer: Tracer, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Move the marks of a tensor as torch moves its numbers."""
    like = args[0]
    found = function(tracer.marks(like), *args[1:], **kwargs)
    if isinstance(found, Tensor):
        return tracer.wrap(found, like.dtype)
    return type(found)(tracer.wrap(part, like.dtype) for part in found)


def _join(tracer: Tracer, function: Any, parts: Any, *args: Any) -> Tensor:
    return tracer.wrap(
        function([tracer.marks(part) for part in parts], *args), _common(tracer, parts)
    )


def _pick(tracer: Tracer, function: Any, source: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Index columns by numbers that are constants."""

    def plain(part: Any) -> Any:
        if isinstance(part, list | tuple):
            return [plain(item) for item in part]
        return tracer.constant(part) if isinstance(part, Tensor) else part

    return tracer.wrap(function(tracer.marks(source), *map(plain, args), **kwargs), source.dtype)


def _pad(
    tracer: Tracer, function: Any, source: Any, amounts: list[int], value: float = 0
) -> Tensor:
    fill = int(free(np.asarray([tracer.graph.number(value)]))[0])
    return tracer.wrap(function(tracer.marks(source), amounts, fill), source.dtype)


def _filled(value: float | None) -> Rule:
    def rule(tracer: Tracer, function: Any, like: Any, *args: Any, **kwargs: Any) -> Tensor:
        name = function._schema.name
        shape = args[0] if "new_" in name else like.shape
        number = value if value is not None else args[1] if "new_" in name else args[0]
        dtype = kwargs.get("dtype") or like.dtype
        if isinstance(number, Tensor):
            raise Refused("it fills a tensor with a number that it computes")
        mark = free(np.asarray([tracer.graph.number(float(number))]))
        return tracer.wrap(mark.expand(math.prod(shape)).clone().reshape(tuple(shape)), dtype)

    return rule


def _detach(tracer: Tracer, function: Any, source: Any) -> Tensor:
    found = _pointwise(lambda g, a: g.each("stop", a), source.dtype is torch.bool)(
        tracer, None, source
    )
    return tracer.detach(source, found)


def _convert(tracer: Tracer, function: Any, source: Any, **kwargs: Any) -> Tensor:
    dtype = kwargs.get("dtype") or source.dtype
    if dtype in (source.dtype, tracer.dtype) or (
        source.dtype is torch.bool and not dtype.is_floating_point
    ):
        return tracer.wrap(tracer.marks(source).clone(), dtype)
    if dtype is torch.bool:
        return _pointwise(lambda g, a: g.each("ne", a, 0.0), True)(tracer, None, source)
    raise Refused(f"it changes {source.dtype} to {dtype}")


def _common(tracer: Tracer, parts: Any) -> torch.dtype:
    tensors = [part for part in parts if isinstance(part, Tensor)]
    dtype = tensors[0].dtype
    for part in tensors[1:]:
        dtype = torch.promote_types(dtype, part.dtype)
    if len({part.dtype for part in tensors}) > 1:
        shaped = [part for part in tensors if part.dim()]
        if shaped and all(
            part.dtype is shaped[0].dtype and part.dtype.is_floating_point for part in shaped
        ):
            dtype = shaped[0].dtype
    if not dtype.is_floating_point and any(type(part) is float for part in parts):
        dtype = tracer.dtype
    if dtype.is_floating_point and dtype is not tracer.dtype:
        raise Refused(f"it computes in {dtype}")
    return dtype


def _pointwise(formula: Callable[..., Columns], is_truth: bool = False) -> Rule:
    """Return the rule of a pointwise operation."""

    def rule(tracer: Tracer, function: Any, *args: Any, **kwargs: Any) -> Tensor:
        given = dict(enumerate(args)) | kwargs
        tensors = [name for name, part in given.items() if isinstance(part, Tensor)]
        dtype = torch.bool if is_truth else _common(tracer, given.values())
        if function is not None and not dtype.is_floating_point and not is_truth:
            if function._schema.name == "aten::div":
                dtype = tracer.dtype
            elif dtype is torch.bool:
                raise Refused("it computes with booleans as with numbers")
        marks = [tracer.marks(given[name]) for name in tensors]
        shape = np.broadcast_shapes(*(part.shape for part in marks))
        aligned = align([part.expand(shape).reshape(-1, 1) for part in marks], tracer.rows)
        # In the order of the first operand: results of permuted numbers need no copy. Repeated
        # numbers stay apart.
        first = aligned.columns[0][:, 0]
        order = (
            np.argsort(first, kind="stable")
            if len(set(first.tolist())) == len(first)
            else np.arange(len(first))
        )
        given |= {
            name: columns[order, 0] for name, columns in zip(tensors, aligned.columns, strict=True)
        }
        operands = [given[place] for place in range(len(args))]
        named = {name: given[name] for name in kwargs}
        found = (
            formula(tracer.graph, *operands, **named) if math.prod(shape) else np.empty(0, np.int64)
        )
        back = found[np.argsort(order)]
        return tracer.wrap(aligned.marks(back.reshape(-1, 1)).reshape(shape), dtype)

    return rule


# Operations on rows.


def _dims(dim: Any, count: int) -> list[int]:
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return list(range(count))
    return [part % count for part in (dim if isinstance(dim, list | tuple) else [dim])]


def _along(
    tracer: Tracer, source: Tensor, dims: list[int], formula: RowFormula, keeps: bool | None
) -> Tensor:
    """Apply a formula to the parts of rows along some dimensions."""
    marks = tracer.marks(source)
    kept = [dim for dim in range(marks.dim()) if dim not in dims]
    order = [*kept, *dims]
    moved = marks.permute(order)
    count = math.prod(marks.shape[dim] for dim in kept)
    if not marks.numel():
        raise Refused("it reduces nothing")
    aligned = align([moved.reshape(count, -1)], tracer.rows)
    columns = aligned.columns[0]
    found = formula(tracer.graph, columns.reshape(-1), len(columns))
    if keeps is not None:
        reduced = aligned.marks(found.reshape(-1, 1)).reshape([marks.shape[dim] for dim in kept])
        for dim in sorted(dims) if keeps else ():
            reduced = reduced.unsqueeze(dim)
        return tracer.wrap(reduced, source.dtype)
    back = sorted(range(len(order)), key=order.__getitem__)
    return tracer.wrap(
        aligned.marks(found.reshape(columns.shape)).reshape(moved.shape).permute(back), source.dtype
    )


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
    found = _along(tracer, source, dims, formula, bool(kwargs.get("keepdim")))
    if name == "aten::std":
        return _pointwise(formulas.root)(tracer, None, found)
    if name == "aten::var_mean":
        return found, _along(tracer, source, dims, formulas.mean, bool(kwargs.get("keepdim")))
    return found


def _extreme(formula: RowFormula) -> Rule:
    """Return the rule of ``max`` or ``min``, without its indices."""

    def rule(
        tracer: Tracer, function: Any, source: Any, dim: Any = None, keepdim: bool = False
    ) -> Any:
        if isinstance(dim, Tensor):
            return RULES["maximum" if function._schema.name == "aten::max" else "minimum"](
                tracer, None, source, dim
            )
        if dim is None:
            return _along(tracer, source, _dims(dim, source.dim()), formula, keepdim)
        found = _along(tracer, source, [dim % source.dim()], formulas.first_of(formula), keepdim)
        return found, tracer.nothing(*found.shape)

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
    def formula(g: Graph, a: Columns, parts: int) -> Columns:
        if ord == 1:
            return g.sums(g.each("abs", a), parts)
        if ord != 2:
            raise Refused(f"no program has the norm of order {ord}")
        return formulas.root(g, g.sums(g.each("mul", a, a), parts))

    return _along(tracer, source, _dims(dim, source.dim()), formula, keepdim)


def _normalised(
    tracer: Tracer,
    source: Tensor,
    parts: tuple[int, ...],
    epsilon: float,
    gain: Any,
    bias: Any,
    shape: tuple[int, ...],
) -> Any:
    """Normalise ``source``, viewed as ``parts``, along the last dimension; gain and bias have
    ``shape``.
    """
    wide = tracer.wrap(tracer.marks(source).reshape(parts), source.dtype)
    found = _along(
        tracer, wide, [len(parts) - 1], lambda g, a, count: g.norm(a, count, epsilon)[0], None
    )
    found = tracer.wrap(tracer.marks(found).reshape(source.shape), tracer.dtype)
    for part, name in ((gain, "mul"), (bias, "add")):
        if part is not None:
            found = RULES[name](
                tracer, None, found, tracer.wrap(tracer.marks(part).reshape(shape), part.dtype)
            )
    return found, tracer.nothing(1), tracer.nothing(1)


def _layer_norm(
    tracer: Tracer, function: Any, source: Any, shape: Any, gain: Any, bias: Any, epsilon: float
) -> Any:
    kept = source.shape[: source.dim() - len(shape)]
    return _normalised(tracer, source, (*kept, math.prod(shape)), epsilon, gain, bias, tuple(shape))


def _group_norm(
    tracer: Tracer, function: Any, source: Any, gain: Any, bias: Any, *sizes: Any
) -> Any:
    count, channels, rest, groups, epsilon = sizes
    shape = (channels, *(1,) * (source.dim() - 2))
    return _normalised(
        tracer, source, (count, groups, channels // groups * rest), epsilon, gain, bias, shape
    )


def _gated(tracer: Tracer, function: Any, source: Any, dim: int = -1) -> Tensor:
    one, gate = (tracer.wrap(part, source.dtype) for part in tracer.marks(source).chunk(2, dim))
    found: Tensor = _pointwise(lambda g, a, b: g.each("mul", a, g.each("sigmoid", b)))(
        tracer, None, one, gate
    )
    return found


def _batch_norm(
    tracer: Tracer, function: Any, source: Any, gain: Any, bias: Any, *rest: Any
) -> Any:
    if function._schema.name != "aten::_native_batch_norm_legit_no_training" and not (
        function._schema.name == "aten::native_batch_norm" and rest[2] is False
    ):
        raise Refused(f"batch normalisation mixes the rows of the batch, {DEPENDS}")
    mean = rest[0]
    variance = rest[1]
    epsilon = rest[-1]
    add = torch.ops.aten.add.Scalar
    shape = (-1, *(1,) * (source.dim() - 2))
    scale = tracer.note(torch.ops.aten.rsqrt.default, tracer.note(add, variance, epsilon))
    found = source
    for part, name in ((mean, "sub"), (scale, "mul"), (gain, "mul"), (bias, "add")):
        if part is not None:
            found = RULES[name](
                tracer, None, found, tracer.wrap(tracer.marks(part).reshape(shape), tracer.dtype)
            )
    return found, tracer.nothing(1), tracer.nothing(1)


RULES: dict[str, Rule] = {
    **dict.fromkeys(_MOVES, _move),
    **dict.fromkeys(("cat", "stack"), _join),
    **dict.fromkeys(("index", "index_select", "gather", "take_along_dim"), _pick),
    "constant_pad_nd": _pad,
    **dict.fromkeys(("zeros_like", "new_zeros", "zero"), _filled(0.0)),
    **dict.fromkeys(("ones_like", "new_ones"), _filled(1.0)),
    **dict.fromkeys(("full_like", "new_full", "fill"), _filled(None)),
    # The contents of new memory are undefined.
    **dict.fromkeys(("empty_like", "new_empty"), _filled(math.nan)),
    "detach": _detach,
    "glu": _gated,
    "log_sigmoid_forward": lambda t, _, source: (
        _pointwise(formulas.log_sigmoid)(t, None, source),
        t.nothing(1),
    ),
    "_to_copy": _convert,
    "copy": lambda t, _, to, source, *__: t.wrap(
        t.marks(source).expand(to.shape).clone(), to.dtype
    ),
    **{name: _pointwise(formula) for name, formula in FORMULAS.items()},
    **{name: _pointwise(formula, True) for name, formula in TRUTHS.items()},
    "sum": _reduction(Graph.sums),
    "mean": _reduction(formulas.mean),
    "amax": _reduction(formulas.largest),
    "amin": _reduction(formulas.smallest),
    "prod": _reduction(formulas.product),
    "logsumexp": _reduction(formulas.log_sum),
    **dict.fromkeys(("var", "std", "var_mean"), _var),
    "max": _extreme(formulas.largest),
    "min": _extreme(formulas.smallest),
    "cumsum": _mapping(Graph.cumsum),
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
        dims = [size for part in step.leaves for size in part.shape]
        tracer = Tracer(
            step.dtype,
            rows_for([*widths, *step.sizes, step.output, *dims, math.prod(step.sizes)]),
            RULES,
        )
        leaves = [tracer.leaf(step.converted(part.detach()), part) for part in step.leaves]
        offsets = tracer.nothing(tracer.rows + 1, dtype=torch.int64)
        elements = [tracer.source("element", width) for width in widths]
        states = [tracer.source("state", size) for size in step.sizes]
        rows = [part for part, _ in elements], [part for part, _ in states]
        try:
            (output, new, changed), drew = draws_random_numbers(
                lambda: tracer.run(lambda: step.run(leaves, *rows, offsets, prepares))
            )
        except Refused:
            raise
        except Exception as error:
            raise Refused(
                f"tracing it raised {type(error).__name__}: {str(error).rstrip('.')}"
            ) from error
        if drew:
            raise Refused(f"it draws random numbers inside the step, {DEPENDS}")
        if changed:
            raise Refused(f"it changes its own attributes, {DEPENDS}")
        if len(new) != len(step.sizes):
            raise Refused("it returns another number of states than it receives")
        columns = tracer.columns(output, step.output)
        after = [tracer.columns(part, size) for part, size in zip(new, step.sizes, strict=True)]
        nodes = [index for _, index in elements], [index for _, index in states]
        return tracer.finish(Result(tracer.graph, *nodes, [], columns, after), prepares)


def _prepared_width(step: Step) -> int:
    dtype = next((part.dtype for part in step.leaves if part.dtype.is_floating_point), step.dtype)
    try:
        rows = torch.zeros(1, step.width, dtype=dtype, device="cpu")
        prepared = step.cell.prepare(step.weights, rows, torch.tensor([0, 1], device="cpu"))
    except Exception as error:
        raise Refused(f"its prepare raised {type(error).__name__}: {error}") from error
    return int(prepared.shape[1])
