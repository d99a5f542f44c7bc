"""Reductions: over the steps of each sequence, over features, over both or over everything."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from raglane import segments
from raglane._utils.tracing import is_for_onnx
from raglane.errors import ArgumentTypeError
from raglane.ragged.base import FlatBatch
from raglane.ragged.face.entry import (
    Arguments,
    FunctionRow,
    ModuleEntry,
    Options,
    check_floating,
    check_real,
    dimension,
    like,
    ragged_input,
    refuse_dimension,
    sure,
)
from raglane.segments import steps


def reduce(entry: ModuleEntry, args: Arguments, kwargs: Options, empty: Any = None) -> Any:
    """Call a reduction; ``empty`` is the result of empty sequences instead of torch's."""
    if _is_over_steps(entry, args, kwargs):  # the commonest, in less time
        return _steps(entry, ragged_input(entry, args[0]), (1,), False, {}, empty)
    bound = entry.bind(args, kwargs)
    batch = ragged_input(entry, bound.pop(entry.signature[0], None))
    if "other" in bound or isinstance(bound.get("dim"), FlatBatch | Tensor):
        return entry.default(batch, bound.get("other", bound.get("dim")))
    if isinstance(bound.get("dim"), bool) and "unbiased" in entry.signature:
        bound["unbiased"] = bound.pop("dim")
    dims = _dimensions(entry, bound.pop("dim", None), batch)
    keepdim = bool(bound.pop("keepdim", False))
    if empty is not None and dims[:1] != (1,):
        rule = "passed with dim=1, the steps of each sequence"
        raise ArgumentTypeError("empty", "other dimensions", rule, "leave it out, or pass dim=1")
    if not dims:
        return _all(entry, batch, keepdim, bound)
    if dims[0] > 1:
        features = [dim - 1 for dim in dims]
        chosen = features[0] if len(features) == 1 else features
        if keepdim:
            bound["keepdim"] = True
        return like(batch, entry.function(batch._values, dim=chosen, **bound))
    if dims[0] == 0:
        return _sequences(entry, batch, dims, keepdim, bound)
    return _steps(entry, batch, dims, keepdim, bound, empty)


def _is_over_steps(entry: ModuleEntry, args: Arguments, kwargs: Options) -> bool:
    """Return True for ``f(r, 1)`` and ``f(r, dim=1)``."""
    if len(args) == 1:
        dim = kwargs.get("dim") if len(kwargs) == 1 else None
    else:
        dim = args[1] if len(args) == 2 and not kwargs and entry.has_dim_second else None
    return type(dim) is int and dim == 1


def _dimensions(entry: ModuleEntry, dim: Any, batch: FlatBatch) -> tuple[int, ...]:
    """Return dimensions counted from the front, sorted; none for all."""
    if dim is None or dim == ():
        return ()
    if type(dim) is int:
        return (dimension(entry, dim, batch),)
    several = dim if isinstance(dim, tuple | list) else (dim,)
    dims = tuple(sorted(dimension(entry, each, batch) for each in several))
    if len(set(dims)) < len(dims) or (len(dims) > 1 and entry.has("single")):
        rule = "one dimension" if entry.has("single") else "different dimensions"
        raise ArgumentTypeError(f"dim of {entry.name}", f"{dim}", rule, "pass e.g. dim=1")
    return dims


def _all(entry: ModuleEntry, batch: FlatBatch, keepdim: bool, options: Options) -> Any:
    if entry.has("indexed"):
        rule = "given, because an index of all real values has no meaning in the batch"
        fix = "pass dim=1 for the steps of each sequence, or a feature dimension"
        raise ArgumentTypeError(f"dim of {entry.name}", "none", rule, fix)
    result = entry.function(batch._values, **options)
    if not keepdim:
        return result
    several = list(result) if isinstance(result, tuple) else [result]
    several = [each.reshape((1,) * (batch._values.dim() + 1)) for each in several]
    return type(result)(several) if isinstance(result, tuple) else several[0]


def _sequences(
    entry: ModuleEntry, batch: FlatBatch, dims: tuple[int, ...], keepdim: bool, options: Options
) -> Any:
    """Reduce all real elements, ``dim=(0, 1)``, possibly with features."""
    if dims[:2] != (0, 1):
        fix = "pass dim=1 for the steps of each sequence, or dim=(0, 1) for all elements"
        raise refuse_dimension(entry, 0, batch, fix)
    rows = [dim - 1 for dim in dims[1:]]
    if keepdim:
        options["keepdim"] = True
    result = entry.function(batch._values, dim=rows, **options)
    return result.unsqueeze(0) if keepdim else result


def _with_features_as_steps(
    values: Tensor, offsets: Tensor, dims: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Return values in which the features of all dimensions but the first are further steps."""
    if len(dims) == 1:
        return values, offsets
    features = [dim - 1 for dim in dims[1:]]
    values = values.movedim(features, [*range(1, len(dims))])
    repeats = values.shape[1 : len(dims)].numel()
    values = values.reshape(values.shape[0] * repeats, *values.shape[len(dims) :])
    return values, offsets * repeats


def _steps(
    entry: ModuleEntry,
    batch: FlatBatch,
    dims: tuple[int, ...],
    keepdim: bool,
    options: Options,
    empty: Any,
) -> Any:
    if entry.steps is None:
        fix = "pass a feature dimension, or call it on each sequence of r.to_list()"
        raise refuse_dimension(entry, 1, batch, fix)
    entry.refuse_transformations(batch)
    if "ord" in options:
        options["p"] = options.pop("ord")
    values = _checked(entry, batch._values, options.pop("dtype", None))
    values, offsets = _with_features_as_steps(values, batch.offsets, dims)
    has_identity = not entry.has("nonempty") and options.get("p") not in (torch.inf, -torch.inf)
    is_asserted = empty is None and not has_identity
    if is_asserted:
        batch._needs_elements(entry.name)
    results = entry.steps(values, offsets, **options)
    several = list(results) if isinstance(results, tuple) else [results]
    if is_asserted and is_for_onnx():
        every = torch.arange(batch._count, device=batch.device)
        every = sure(every, offsets.diff() > 0, batch._count)
        several = [each.index_select(0, every) for each in several]
    if empty is not None:
        several = [
            segments.where_empty(each, offsets, batch._value("empty", empty)) for each in several
        ]
    if keepdim:
        for dim in dims:
            several = [each.unsqueeze(dim) for each in several]
    return type(results)(several) if isinstance(results, tuple) else several[0]


def _checked(entry: ModuleEntry, values: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return values in a dtype, or raise if the reduction has no meaning for theirs."""
    if dtype is not None:
        values = values.to(dtype)
    if entry.has("floating"):
        check_floating(entry.name, values)
    if entry.has("real"):
        check_real(entry.name, values)
    return values


def linalg_norm(entry: ModuleEntry, args: Arguments, kwargs: Options) -> Any:
    """Return the norm of vectors, or of matrices in two dimensions of the features."""
    bound = entry.bind(args, kwargs)
    batch = ragged_input(entry, bound.pop("A"))
    dim = bound.pop("dim", None)
    order = bound.pop("ord", None)
    if not isinstance(dim, tuple | list) or len(dim) != 2:
        if dim is None and order is not None:
            rule = "given with ord, which would be the order of a norm of matrices"
            raise ArgumentTypeError("dim of norm", "none", rule, "pass dim=1 for the steps")
        return torch.linalg.vector_norm(batch, 2 if order is None else order, dim, **bound)
    counted = [dimension(entry, each, batch) for each in dim]
    if min(counted) < 2:
        fix = "pass two dimensions of the features, or one dimension"
        raise refuse_dimension(entry, dim, batch, fix)
    rows = [each - 1 for each in counted]
    return batch._like(entry.function(batch._values, order or "fro", rows, **bound))


def _and_mean(over_steps: Any) -> Any:
    """Return a function of the steps that also returns their mean."""

    def call(values: Tensor, offsets: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        return over_steps(values, offsets, **options), steps.mean(values, offsets)

    return call


def _row(signature: str, over_steps: Any, flags: str = "", default: Any = None) -> FunctionRow:
    return FunctionRow("reduction", reduce, f"input {signature}", over_steps, default, flags)


ROWS: dict[str, FunctionRow] = {
    "sum": _row("dim keepdim * dtype", segments.sum),
    "nansum": _row("dim keepdim * dtype", steps.nansum),
    "mean": _row("dim keepdim * dtype", steps.mean, "floating empty"),
    "nanmean": _row("dim keepdim * dtype", steps.nanmean, "floating empty"),
    "amax": _row("dim keepdim", steps.amax, "nonempty empty real"),
    "amin": _row("dim keepdim", steps.amin, "nonempty empty real"),
    "max": _row("dim keepdim * other", steps.max, "nonempty single real", torch.maximum),
    "min": _row("dim keepdim * other", steps.min, "nonempty single real", torch.minimum),
    "argmax": _row("dim keepdim", steps.argmax, "nonempty single indexed real"),
    "argmin": _row("dim keepdim", steps.argmin, "nonempty single indexed real"),
    "prod": FunctionRow(
        "reduction", reduce, "input dim keepdim * dtype", steps.prod, flags="single", refused="jvp"
    ),
    "std": _row("dim unbiased keepdim * correction", steps.std, "floating empty"),
    "var": _row("dim unbiased keepdim * correction", steps.var, "floating empty"),
    "norm": _row("p dim keepdim out dtype", steps.norm, "floating"),
    "linalg.vector_norm": FunctionRow(
        "reduction", reduce, "x ord dim keepdim * dtype", steps.norm, flags="floating"
    ),
    "linalg.norm": FunctionRow("reduction", linalg_norm, "A ord dim keepdim * dtype"),
    "aminmax": _row("* dim keepdim", steps.aminmax, "nonempty single real"),
    "logsumexp": _row("dim keepdim", steps.logsumexp, "empty"),
    "any": _row("dim keepdim", steps.any),
    "all": _row("dim keepdim", steps.all),
    "count_nonzero": _row("dim", steps.count_nonzero),
    "std_mean": _row("dim unbiased keepdim * correction", _and_mean(steps.std), "floating"),
    "var_mean": _row("dim unbiased keepdim * correction", _and_mean(steps.var), "floating"),
}
