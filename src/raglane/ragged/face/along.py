"""Functions along one dimension: the steps of each sequence, or a dimension of the features."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from raglane import segments
from raglane.errors import ArgumentTypeError, ShapeError
from raglane.ragged.base import FlatBatch
from raglane.ragged.face.entry import (
    Arguments,
    FunctionRow,
    ModuleEntry,
    Options,
    batches_of,
    check_floating,
    check_real,
    check_together,
    dimension,
    like,
    ragged_input,
    refuse_dimension,
    sure,
)
from raglane.segments import like_rows, steps

_WHOLE = "pass dim=1 for the steps of each sequence, or dim=-1 for the last dimension"


def along(entry: ModuleEntry, args: Arguments, kwargs: Options) -> Any:
    """Call a function with an argument ``dim``."""
    bound = entry.bind(args, kwargs)
    batch = ragged_input(entry, bound[entry.signature[0]])
    given = bound.get("dim", entry.default)
    if given is None and entry.has("whole"):
        bound.pop("dim", None)
        return _call(entry, bound | {entry.signature[0]: batch._values})
    if given is None:
        raise ArgumentTypeError(f"dim of {entry.name}", "none", "given", _WHOLE)
    dim = dimension(entry, given, batch, more=entry.has("adds"))
    if dim == 0 or (dim == 1 and entry.steps is None):
        fix = _WHOLE if dim == 0 else "pass a dimension of the features"
        raise refuse_dimension(entry, given, batch, fix)
    bound["dim"] = dim
    if entry.name != "diff":  # which joins batches of other lengths
        for other in batches_of(bound.values())[1:]:
            check_together(entry.name, batch, other)
    if dim == 1 and entry.steps is not None:
        entry.refuse_transformations(batch)
        return entry.steps(batch, entry, bound)
    _check_quantile(bound.get("q"))
    rows = {
        name: value._values if isinstance(value, FlatBatch) else value
        for name, value in bound.items()
    }
    return like(batch, _call(entry, rows | {"dim": dim - 1}))


def _check_quantile(q: Any) -> None:
    if isinstance(q, Tensor) and q.dim():
        got, rule = "several quantiles of features", "a number for features"
        fix = "pass each, e.g. torch.stack([r.quantile(q, -1) for q in qs.tolist()], -1)"
        raise ArgumentTypeError("q", got, rule, fix)


def _call(entry: ModuleEntry, bound: Options) -> Any:
    """Call the function; the first parameter of methods has no name."""
    return entry.function(bound.pop(entry.signature[0]), **bound)


def _on_values(function: Any) -> Any:
    """Return the steps of a function of flat values and offsets that keeps the lengths."""

    def call(batch: FlatBatch, entry: ModuleEntry, bound: Options) -> FlatBatch:
        dtype = bound.get("dtype")
        values = batch._values if dtype is None else batch._values.to(dtype)
        check_floating(entry.name, values)
        check_real(entry.name, values)
        return batch._like(function(values, batch.offsets))

    return call


def _each_sequence(batch: FlatBatch, entry: ModuleEntry, bound: Options) -> Any:
    """Call the function on each sequence, in a loop."""
    split = {
        name: torch.split(value._values, batch.lengths_cpu.tolist())
        for name, value in bound.items()
        if isinstance(value, FlatBatch)
    }
    bound["dim"] = 0
    if not len(batch):  # the shape of results is that of one sequence
        split = {name: (batch._values.new_zeros(2, *batch.feature_shape),) for name in split}
    results = [
        _call(entry, bound | {name: rows[b] for name, rows in split.items()})
        for b in range(max(len(batch), 1))
    ]
    keepdim = bool(bound.get("keepdim"))
    if isinstance(results[0], Tensor):
        return _joined(batch, results, keepdim)
    pairs = [_joined(batch, list(each), keepdim) for each in zip(*results, strict=True)]
    return type(results[0])(pairs)


def _quantile(batch: FlatBatch, entry: ModuleEntry, bound: Options) -> Any:
    """Return the quantiles of each sequence, ``(B, *features)``, or ``(Q, B, *features)`` for a
    tensor of them.
    """
    each = torch.as_tensor(bound["q"], dtype=batch.dtype, device=batch.device)
    results = [_each_sequence(batch, entry, bound | {"q": q}) for q in each.reshape(-1)]
    return torch.stack(results) if each.dim() else results[0]


def _joined(batch: FlatBatch, results: list[Tensor], keepdim: bool) -> Any:
    """Return a batch of results with steps, or a tensor of results without."""
    if keepdim or results[0].dim() < batch._values.dim():
        return torch.stack(results)[: len(batch)]
    if not len(batch):
        return batch._like(results[0][:0])
    lengths = torch.tensor([rows.shape[0] for rows in results], device="cpu")
    return batch._build(torch.cat(results), lengths)


def _cumsum(batch: FlatBatch, entry: ModuleEntry, bound: Options) -> FlatBatch:  # noqa: ARG001
    values = batch._values if bound.get("dtype") is None else batch._values.to(bound["dtype"])
    # In a graph, lengths are no numbers of the host.
    longest = batch._values.shape[0] if torch.compiler.is_compiling() else batch.max_length
    return batch._like(segments.cumsum(values, batch.offsets, longest))


def _sort(batch: FlatBatch, entry: ModuleEntry, bound: Options) -> Any:  # noqa: ARG001
    order, sorted_steps = _order(batch, bool(bound.get("descending")))
    pair: Any = batch._like(batch._values.gather(0, order)), batch._like(sorted_steps)
    return torch.return_types.sort(pair)


def _argsort(batch: FlatBatch, entry: ModuleEntry, bound: Options) -> FlatBatch:  # noqa: ARG001
    return batch._like(_order(batch, bool(bound.get("descending")))[1])


def _order(batch: FlatBatch, descending: bool) -> tuple[Tensor, Tensor]:
    """Return the rows that sort each sequence, and their steps."""
    offsets = batch.offsets
    order = steps.order(batch._values.detach(), offsets, descending)
    starts = segments.spread(offsets[:-1], offsets, batch._values.shape[0])
    return order, order - like_rows(starts, order)


def _topk(batch: FlatBatch, entry: ModuleEntry, bound: Options) -> Any:
    """Return the ``k`` largest or smallest of each sequence, ``(B, k, *features)``."""
    k = bound["k"]
    batch._needs_elements(entry.name, k)
    order, sorted_steps = _order(batch, bool(bound.get("largest", True)))
    offsets = batch.offsets
    first = offsets[:-1, None] + torch.arange(k, device=batch.device)
    first = sure(first, (offsets.diff() >= k)[:, None], batch._values.shape[0])
    return torch.return_types.topk((batch._values.gather(0, order)[first], sorted_steps[first]))


def _diff(batch: Any, entry: ModuleEntry, bound: Options) -> Any:  # noqa: ARG001
    ends = [bound.get("prepend"), bound.get("append")]
    if any(end is not None and not isinstance(end, FlatBatch) for end in ends):
        fix = "pass a Ragged, or call torch.cat([x, r], 1) first"
        raise ArgumentTypeError("prepend, append", "a tensor", "a Ragged along the steps", fix)
    batch = torch.cat([part for part in (ends[0], batch, ends[1]) if part is not None], 1)
    for _ in range(bound.get("n", 1)):
        batch = (
            batch[:, 1:] != batch[:, :-1]
            if batch.dtype is torch.bool
            else batch[:, 1:] - batch[:, :-1]
        )
    return batch


def flip(entry: ModuleEntry, args: Arguments, kwargs: Options) -> FlatBatch:
    """Reverse the steps of each sequence, features or both."""
    bound = entry.bind(args[:2], kwargs) if len(args) < 3 else {"input": args[0], "dims": args[1:]}
    batch = ragged_input(entry, bound["input"])
    dims = bound["dims"] if isinstance(bound["dims"], tuple | list) else (bound["dims"],)
    counted = [dimension(entry, dim, batch) for dim in dims]
    if len(set(counted)) < len(counted):
        fix = "pass each dimension once"
        raise ArgumentTypeError("dims of flip", f"{dims}", "different dimensions", fix)
    if 0 in counted:
        raise refuse_dimension(entry, 0, batch, "use r[::-1] to reverse the order of sequences")
    values = batch._values.flip([dim - 1 for dim in counted if dim > 1])
    return batch._like(segments.reverse(values, batch.offsets) if 1 in counted else values)


def roll(entry: ModuleEntry, args: Arguments, kwargs: Options) -> Any:
    """Roll features."""
    bound = entry.bind(args, kwargs)
    batch = ragged_input(entry, bound["input"])
    dims = bound.get("dims", ())
    several = dims if isinstance(dims, tuple | list) else (dims,)
    counted = [dimension(entry, dim, batch) for dim in several]
    if not counted or min(counted) < 2:
        fix = "call r.shift(k), which shifts within each sequence, or pass a feature dimension"
        raise refuse_dimension(entry, dims, batch, fix)
    return batch._like(torch.roll(batch._values, bound["shifts"], [dim - 1 for dim in counted]))


def gather(entry: ModuleEntry, args: Arguments, kwargs: Options) -> Any:
    """Take values at steps or features: ``gather``, ``take_along_dim`` and ``index_select``."""
    bound = entry.bind(args, kwargs)
    batch = ragged_input(entry, bound["input"])
    index: Any = bound["index"] if "index" in bound else bound.get("indices")
    dim = dimension(entry, bound["dim"], batch)
    if entry.name == "index_select":
        whole: list[Any] = [slice(None)] * dim
        return batch[(*whole, index)]
    rows = index._values if isinstance(index, FlatBatch) else index
    if dim == 0 or (dim > 1 and not isinstance(index, FlatBatch)):
        rule = "a Ragged of the same lengths for features, or dim=1 for the steps"
        raise ArgumentTypeError("index", "other dimensions", rule, "pass dim=1 or a Ragged index")
    if dim > 1:
        check_together(entry.name, batch, index)
        values = bound | {"input": batch._values, "dim": dim - 1}
        values["index" if "index" in bound else "indices"] = rows
        return batch._like(_call(entry, values))
    if isinstance(index, FlatBatch):
        return index._like(_taken(entry, batch, rows, index))
    flat = rows.reshape(rows.shape[0] * rows.shape[1], *rows.shape[2:])
    offsets = torch.arange(rows.shape[0] + 1, device=rows.device) * rows.shape[1]
    return _taken(entry, batch, flat, batch._make(flat, offsets, None)).view(
        *rows.shape[:2], *batch.feature_shape
    )


def _taken(entry: ModuleEntry, batch: FlatBatch, index: Tensor, owner: FlatBatch) -> Tensor:
    """Return the values at steps ``index``, whose rows belong to the sequences of ``owner``."""
    if owner._count != batch._count or index.dim() != batch._values.dim():
        got = (
            f"an index of {owner._count} sequences, with elements of shape {tuple(index.shape[1:])}"
        )
        rule = f"an index of {batch._count} sequences with {len(batch.feature_shape)} feature dimension(s)"
        raise ShapeError("index", got, rule, "give it the dimensions of the input")
    total = index.shape[0]
    lengths = like_rows(segments.spread(batch.offsets.diff(), owner.offsets, total), index)
    starts = like_rows(segments.spread(batch.offsets[:-1], owner.offsets, total), index)
    exists = (index >= 0) & (index < lengths)
    batch._needs_steps(entry.name, exists)
    values = batch._values
    rows = sure(index + starts, exists, values.shape[0])
    if entry.name == "take_along_dim":
        # Not torch's function, of which a graph would have a fixed number of rows.
        shape = torch.broadcast_shapes(values.shape[1:], rows.shape[1:])
        values, rows = values.expand(-1, *shape), rows.expand(-1, *shape)
    return values.gather(0, rows)


def _row(
    signature: str, over_steps: Any = None, default: Any = None, flags: str = ""
) -> FunctionRow:
    # A loop over the sequences reads their lengths.
    is_loop = over_steps in (_LOOP, _quantile)
    refused = "compile export" if is_loop else ""
    return FunctionRow("along a dim", along, signature, over_steps, default, flags, refused)


_LOOP = _each_sequence

ROWS: dict[str, FunctionRow] = {
    "softmax": _row("input dim _stacklevel dtype", _on_values(segments.softmax)),
    "log_softmax": _row("input dim _stacklevel dtype", _on_values(steps.log_softmax)),
    "softmin": _row("input dim _stacklevel dtype", _on_values(steps.softmin)),
    "cumsum": FunctionRow("along a dim", along, "input dim * dtype", _cumsum, refused="export"),
    "sort": _row("input dim descending * stable", _sort, -1),
    "argsort": _row("input dim descending * stable", _argsort, -1),
    "topk": _row("input k dim largest sorted", _topk, -1),
    "diff": _row("input n dim prepend append", _diff, -1),
    "flip": FunctionRow("along a dim", flip, "input dims"),
    "roll": FunctionRow("along a dim", roll, "input shifts dims"),
    "gather": FunctionRow("along a dim", gather, "input dim index * sparse_grad"),
    "take_along_dim": FunctionRow("along a dim", gather, "input indices dim"),
    "index_select": FunctionRow("along a dim", gather, "input dim index"),
    "cummax": _row("input dim", _LOOP),
    "cummin": _row("input dim", _LOOP),
    "cumprod": _row("input dim * dtype", _LOOP),
    "logcumsumexp": _row("input dim", _LOOP),
    "median": _row("input dim keepdim", _LOOP, flags="whole"),
    "nanmedian": _row("input dim keepdim", _LOOP, flags="whole"),
    "mode": _row("input dim keepdim", _LOOP, -1),
    **dict.fromkeys(
        ("quantile", "nanquantile"),
        _row("input q dim keepdim * interpolation", _quantile, flags="whole"),
    ),
    "kthvalue": _row("input k dim keepdim", _LOOP, -1),
    "normalize": _row("input p dim eps", _LOOP, 1),
    "cosine_similarity": _row("x1 x2 dim eps", _LOOP, 1),
    "glu": _row("input dim", _LOOP, -1),
    "gumbel_softmax": _row("logits tau hard eps dim", _LOOP, -1),
}
