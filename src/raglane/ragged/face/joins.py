"""Functions that join, split or reshape batches, products over features, and attention."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from raglane import segments
from raglane._utils.messages import quote
from raglane.errors import ArgumentTypeError, ShapeError
from raglane.ragged.base import FlatBatch
from raglane.ragged.face.entry import (
    Arguments,
    FunctionRow,
    ModuleEntry,
    Options,
    batches_of,
    check_together,
    dimension,
    like,
    ragged_input,
    refuse_dimension,
)


def _all_ragged(entry: ModuleEntry, batches: Any) -> list[FlatBatch]:
    """Return the batches of a join, which must all be ragged."""
    for other in batches:
        if not isinstance(other, FlatBatch):
            shape = f" of shape {tuple(other.shape)}" if isinstance(other, Tensor) else ""
            got = f"a {type(other).__name__}{shape} with a Ragged"
            rule = "called with batches of the same lengths, so that no row meets another element"
            fix = (
                "pass r.broadcast(x) for a tensor x with one row per sequence, which is "
                "x[:, None].expand_as(r) if r has its features, or r.with_values(x) for one row "
                "per element in the order of r"
            )
            raise ArgumentTypeError(entry.name, got, rule, fix)
    entry.refuse_transformations(batches[0])
    return list(batches)


def cat(entry: ModuleEntry, args: Arguments, kwargs: Options) -> Any:
    """Join batches: more sequences (0), longer sequences (1), or more features."""
    bound = entry.bind(args, kwargs)
    batches = _all_ragged(entry, bound["tensors"])
    first = batches[0]
    dim = dimension(entry, bound.get("dim", 0), first)
    if dim == 1:
        return first.concat(*batches[1:])  # type: ignore[attr-defined]
    if dim == 0:
        return _more_sequences(entry, batches)
    for other in batches[1:]:
        check_together(entry.name, first, other)
    return first._like(torch.cat([batch._values for batch in batches], dim - 1))


def _more_sequences(entry: ModuleEntry, batches: list[FlatBatch]) -> FlatBatch:
    for other in batches[1:]:
        if other.feature_shape != batches[0].feature_shape or other.device != batches[0].device:
            got = f"elements of shape {tuple(other.feature_shape)} on {other.device}"
            rule = f"of shape {tuple(batches[0].feature_shape)} on {batches[0].device}, like the first batch"
            raise ShapeError(entry.name, got, rule, "join batches with the same features")
    starts = [0]
    for batch in batches[:-1]:
        starts.append(starts[-1] + batch._values.shape[0])
    offsets = [batch.offsets[1:] + start for batch, start in zip(batches, starts, strict=True)]
    lengths = [each for each in (batch._known_lengths() for batch in batches) if each is not None]
    return batches[0]._make(
        torch.cat([batch._values for batch in batches]),
        torch.cat([batches[0].offsets[:1], *offsets]),
        torch.cat(lengths) if len(lengths) == len(batches) else None,
    )


def stack(entry: ModuleEntry, args: Arguments, kwargs: Options) -> Any:
    """Stack batches along a new dimension of the features."""
    bound = entry.bind(args, kwargs)
    batches = _all_ragged(entry, bound["tensors"])
    first = batches[0]
    dim = dimension(entry, bound.get("dim", 0), first, more=1)
    if dim < 2:
        fix = "call torch.cat([a, b]) for more sequences, or pass dim=-1"
        raise refuse_dimension(entry, dim, first, fix)
    for other in batches[1:]:
        check_together(entry.name, first, other)
    return first._like(torch.stack([batch._values for batch in batches], dim - 1))


def split(entry: ModuleEntry, args: Arguments, kwargs: Options) -> Any:
    """Split a batch: ``split``, ``chunk`` and ``tensor_split`` of sequences, steps or features."""
    bound = entry.bind(args, kwargs)
    batch: Any = ragged_input(entry, bound["input"])
    dim = dimension(entry, bound.get("dim", 0), batch)
    sizes = bound[entry.signature[1]]
    if dim > 1:
        return like(batch, entry.function(batch._values, sizes, dim=dim - 1))
    if dim == 0:
        pieces = entry.function(torch.arange(len(batch), device="cpu"), sizes)
        return tuple(
            batch[int(piece[0]) : int(piece[-1]) + 1] if len(piece) else batch[:0]
            for piece in pieces
        )
    if entry.name != "split" or not isinstance(sizes, int):
        fix = "call torch.split(r, k, 1) for steps 0 to k, k to 2 k, ..., or r[:, a:b]"
        raise refuse_dimension(entry, 1, batch, fix)
    longest = max(batch.max_length, 1)
    return tuple(batch[:, start : start + sizes] for start in range(0, longest, sizes))


def unbind(entry: ModuleEntry, args: Arguments, kwargs: Options) -> Any:
    """Return the sequences, or the features along a dimension."""
    bound = entry.bind(args, kwargs)
    batch: Any = ragged_input(entry, bound["input"])
    dim = dimension(entry, bound.get("dim", 0), batch)
    if dim == 0:
        return tuple(batch)
    if dim == 1:
        fix = "loop over the sequences with torch.unbind(r), or call r.to_padded() for one tensor per step"
        raise refuse_dimension(entry, 1, batch, fix)
    return like(batch, torch.unbind(batch._values, dim - 1))


def equal(entry: ModuleEntry, args: Arguments, kwargs: Options) -> bool:
    """Return True for the same lengths and values."""
    bound = entry.bind(args, kwargs)
    one, other = _all_ragged(entry, (bound["input"], bound["other"]))
    return torch.equal(one.offsets, other.offsets) and torch.equal(one._values, other._values)


def allclose(entry: ModuleEntry, args: Arguments, kwargs: Options) -> bool:
    """Return True if the values of batches of the same lengths are close."""
    bound = entry.bind(args, kwargs)
    one, other = _all_ragged(entry, (bound["input"], bound["other"]))
    check_together(entry.name, one, other)
    rest = {name: value for name, value in bound.items() if name not in ("input", "other")}
    return torch.allclose(one._values, other._values, **rest)


def shape_of_features(entry: ModuleEntry, args: Arguments, kwargs: Options) -> Any:
    """Change dimensions of the features: ``unsqueeze``, ``flatten``, ``transpose`` and others."""
    batch = ragged_input(entry, args[0] if args else kwargs.pop("input", None))
    if "sizes" in entry.signature and len(args) > 3:
        args = (*args[:2], args[2:])
    bound = entry.bind((batch, *args[1:]), kwargs)
    adds = int(entry.has("adds"))
    names = [name for name in entry.signature if "dim" in name or name in ("source", "destination")]
    if entry.name in ("squeeze", "flatten") and not bound.keys() & set(names):
        fix = "pass the dimensions, e.g. -1; those of sequences and steps do not change"
        raise ArgumentTypeError(f"dim of {entry.name}", "none", "given", fix)
    for name in names:
        if name not in bound and name == "end_dim":
            bound[name] = -1
        if name in bound:
            bound[name] = _features(entry, bound[name], batch, adds)
    bound["input"] = batch._values
    # Not a method of a tensor, which torch.compile does not trace, nor the name that torch.vmap
    # does not support.
    name = "movedim" if entry.name == "moveaxis" else entry.name
    return batch._like(getattr(torch, name)(*bound.values()))


def _features(entry: ModuleEntry, dims: Any, batch: FlatBatch, adds: int) -> Any:
    """Return dimensions of the features as those of the flat values."""
    if isinstance(dims, tuple | list):
        return [_features(entry, dim, batch, adds) for dim in dims]
    dim = dimension(entry, dims, batch, adds)
    if dim < 2:
        fix = (
            "pass a dimension of the features, such as -1: sequences and steps stay the first two; "
            "in place of torch's attention use rl.nn.Attention"
        )
        raise refuse_dimension(entry, dims, batch, fix)
    return dim - 1


def permute(entry: ModuleEntry, args: Arguments, kwargs: Options) -> Any:
    """Permute the features: ``r.permute(0, 1, 3, 2)``."""
    batch = ragged_input(entry, args[0] if args else kwargs["input"])
    given: Any = kwargs.get("dims", args[1] if len(args) == 2 else args[1:])
    dims = [dimension(entry, dim, batch) for dim in given]
    if dims[:2] != [0, 1]:
        fix = "begin with 0, 1: sequences and steps stay the first two dimensions"
        raise refuse_dimension(entry, tuple(given), batch, fix)
    return batch._like(batch._values.permute(0, *(dim - 1 for dim in dims[2:])))


def matmul(entry: ModuleEntry, args: Arguments, kwargs: Options) -> Any:
    """Multiply features by a vector or matrix, or by one matrix ``(B, F, G)`` per sequence."""
    bound = entry.bind(args, kwargs)
    one, other = (bound[name] for name in entry.signature[:2])
    if (
        torch.compiler.is_compiling()
        and isinstance(one, Tensor)
        and entry.function is Tensor.matmul
    ):
        # torch.compile swaps the operands of r @ matrix.
        fix = "call torch.matmul(r, matrix) or torch.nn.functional.linear(r, weight)"
        rule = "called by its name within torch.compile"
        raise ArgumentTypeError("matmul", "the operator @ of a Ragged", rule, fix)
    if isinstance(one, FlatBatch) and isinstance(other, Tensor):
        if len(one.feature_shape) == 1 and other.dim() == 3:
            matrices = _of_sequences(entry, other, one)
            return one._like((one._values.unsqueeze(-2) @ matrices).squeeze(-2))
        if one.feature_shape and other.dim() <= 2:
            return one._like(one._values @ other)
    if isinstance(other, FlatBatch) and len(other.feature_shape) > 1:
        if isinstance(one, Tensor) and one.dim() == 2:
            return other._like(one @ other._values)
        if isinstance(one, FlatBatch):
            check_together(entry.name, other, one)
            return other._like(one._values @ other._values)
    fix = "call r @ matrix, which multiplies the features, after r.unsqueeze(-1) if there are none"
    rule = "a Ragged and a vector or matrix of its features, because steps differ in number"
    got = f"{_shape_of(one)} and {_shape_of(other)}"
    raise ArgumentTypeError(f"the operands of {entry.name}", got, rule, fix)


def _shape_of(operand: Any) -> str:
    if isinstance(operand, FlatBatch):
        return operand._shape_text()
    return str(tuple(operand.shape)) if isinstance(operand, Tensor) else quote(operand)


def _of_sequences(entry: ModuleEntry, tensor: Tensor, batch: FlatBatch) -> Tensor:
    """Repeat the rows of a tensor ``(B, ...)`` for the elements of their sequences."""
    if tensor.shape[0] != batch._count:
        got, rule = (
            f"a tensor of shape {tuple(tensor.shape)}",
            f"one row for each of {batch._count} sequences",
        )
        raise ShapeError(entry.name, got, rule, "pass a tensor (B, ...)")
    return segments.spread(tensor, batch.offsets, batch._values.shape[0])


def einsum(entry: ModuleEntry, args: Arguments, kwargs: Options) -> Any:  # noqa: ARG001
    """Sum products over features, steps or both: the rows of flat values take the letter of the
    sequences.
    """
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = list(operands[0])
    batch, *others = batches_of(operands)
    for other in others:
        other._needs_lengths_of(entry.name, batch, "the other batch")
    inputs, _, output = str(equation).replace(" ", "").partition("->")
    terms = inputs.split(",")
    rows = _letters(entry, equation, terms, operands, output)
    flat = [
        _of_sequences(entry, operand, batch)
        if isinstance(operand, Tensor) and term.startswith(rows[0])
        else operand
        for term, operand in zip(terms, operands, strict=True)
    ]
    flat = [operand._values if isinstance(operand, FlatBatch) else operand for operand in flat]
    result = torch.einsum(f"{inputs}->{output}".replace(rows[1], ""), *flat)
    if rows[1] in output:
        return batch._like(result)
    return segments.sum(result, batch.offsets) if output.startswith(rows[0]) else result


def _letters(
    entry: ModuleEntry, equation: Any, terms: list[str], operands: list[Any], output: str
) -> str:
    """Return the letters of sequences and steps of an equation, or raise."""
    pairs = list(zip(terms, operands, strict=False))
    ragged = [term for term, operand in pairs if isinstance(operand, FlatBatch)]
    dense = [term for term, operand in pairs if not isinstance(operand, FlatBatch)]
    rows = ragged[0][:2]
    is_valid = [
        rows.isalpha() and len(set(rows)) == 2,
        len(terms) == len(operands),
        "->" in str(equation),
        all(term[:2] == rows and not set(rows) & set(term[2:]) for term in ragged),
        not any(rows[1] in term or rows[0] in term[1:] for term in dense),
        output[:2] == rows or rows[1] not in output,
        rows[0] not in output[1:],
    ]
    if not all(is_valid):
        rule = (
            "one in which each Ragged begins with the letters of sequences and steps, as does its "
            "result, and a tensor has no steps, and its sequences first"
        )
        fix = "write e.g. 'btf,fg->btg' or 'btf,bf->bt'"
        raise ArgumentTypeError(entry.name, f"the equation {quote(equation)}", rule, fix)
    return rows


def pad(entry: ModuleEntry, args: Arguments, kwargs: Options) -> Any:
    """Pad features, and the ends of each sequence."""
    bound = entry.bind(args, kwargs)
    batch: Any = ragged_input(entry, bound["input"])
    amounts = [operator.index(amount) for amount in bound["pad"]]
    features = len(batch.feature_shape)
    mode = bound.get("mode", "constant")
    if (
        len(amounts) % 2
        or len(amounts) > 2 * features + 2
        or (len(amounts) > 2 * features and mode != "constant")
    ):
        got, rule = (
            f"{amounts}, mode {quote(mode)}",
            "two numbers per feature dimension, then two for the steps, with a constant",
        )
        raise ArgumentTypeError(
            "pad", got, rule, "pass e.g. (0, 0, 1, 0) for one step before (B, *, F)"
        )
    of_features, of_steps = amounts[: 2 * features], amounts[2 * features :]
    if any(of_features):
        batch = batch._like(entry.function(batch._values, of_features, mode, bound.get("value")))
    if not any(of_steps):
        return batch
    before, after = of_steps
    batch._needs_elements("pad", max(-before, 0) + max(-after, 0))
    batch = batch[:, max(-before, 0) : -max(-after, 0) or None]
    ends = []
    for amount in (before, after):
        lengths = torch.full((len(batch),), max(amount, 0), device="cpu")
        shape = (int(lengths.sum()), *batch.feature_shape)
        ends.append(batch._build(batch._values.new_full(shape, bound.get("value") or 0), lengths))
    return ends[0].concat(batch, ends[1])


def attention(entry: ModuleEntry, args: Arguments, kwargs: Options) -> Any:
    """Attend within each sequence: ``scaled_dot_product_attention`` of batches ``(B, *, E)``."""
    bound = entry.bind(args, kwargs)
    batches = [bound.pop(name) for name in ("query", "key", "value")]
    query, key, value = _all_ragged(entry, batches)
    if (
        any(len(batch.feature_shape) != 1 for batch in batches)
        or bound.pop("attn_mask", None) is not None
    ):
        got = f"elements of shape {tuple(query.feature_shape)}, or an attn_mask"
        rule = "called with batches (B, *, E), of which each sequence attends to its own elements"
        raise ArgumentTypeError(entry.name, got, rule, "use rl.nn.Attention for several heads")
    value._needs_lengths_of("value", key, "the key")
    if query._count != key._count:
        got, rule = (
            f"{query._count} and {key._count} sequences",
            "called with as many of query and key",
        )
        raise ShapeError(entry.name, got, rule, "build both from the same sequences")
    padded = [batch.to_padded()[0] for batch in batches]
    # A sequence without keys attends to the zeros of its padding, as in torch.
    mask = (key.mask() | (key.lengths == 0)[:, None])[:, None, :]
    if bound.pop("is_causal", False):
        mask = (
            mask
            & torch.ones(
                padded[0].shape[1], padded[1].shape[1], device=mask.device, dtype=torch.bool
            ).tril()
        )
    result = entry.function(*padded, attn_mask=mask, **bound)
    return query._like(result[query.mask()])


ROWS: dict[str, FunctionRow] = {
    **dict.fromkeys(("cat", "concat", "concatenate"), FunctionRow("join", cat, "tensors dim")),
    "stack": FunctionRow("join", stack, "tensors dim"),
    "split": FunctionRow("join", split, "input split_size_or_sections dim"),
    "chunk": FunctionRow("join", split, "input chunks dim"),
    "tensor_split": FunctionRow("join", split, "input indices_or_sections dim"),
    "unbind": FunctionRow("join", unbind, "input dim"),
    "equal": FunctionRow("join", equal, "input other", refused="compile export"),
    "allclose": FunctionRow(
        "join", allclose, "input other rtol atol equal_nan", refused="compile export"
    ),
    "unsqueeze": FunctionRow("features", shape_of_features, "input dim", flags="adds"),
    "squeeze": FunctionRow("features", shape_of_features, "input dim"),
    "flatten": FunctionRow("features", shape_of_features, "input start_dim end_dim"),
    "unflatten": FunctionRow("features", shape_of_features, "input dim sizes"),
    **dict.fromkeys(
        ("transpose", "swapaxes", "swapdims"),
        FunctionRow("features", shape_of_features, "input dim0 dim1"),
    ),
    **dict.fromkeys(
        ("movedim", "moveaxis"),
        FunctionRow("features", shape_of_features, "input source destination"),
    ),
    "permute": FunctionRow("features", permute),
    "matmul": FunctionRow("features", matmul, "input other"),
    "bmm": FunctionRow("features", matmul, "input mat2"),
    "mm": FunctionRow("features", matmul, "input mat2"),
    "mv": FunctionRow("features", matmul, "input vec"),
    "einsum": FunctionRow("features", einsum),
    "pad": FunctionRow("join", pad, "input pad mode value", refused="export"),
    "scaled_dot_product_attention": FunctionRow(
        "join",
        attention,
        "query key value attn_mask dropout_p is_causal scale enable_gqa",
        refused="compile export vmap grad jvp",
    ),
}
