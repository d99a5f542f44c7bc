"""Entries of the table of torch functions, and what the kinds of functions share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from raglane import segments
from raglane._utils.messages import quote
from raglane._utils.tracing import is_exporting, is_for_onnx, is_transformed
from raglane.errors import ArgumentTypeError, DimensionError, ShapeError
from raglane.ragged.base import FlatBatch

Arguments = tuple[Any, ...]
Options = dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class FunctionRow:
    """A function of torch that accepts a Ragged.

    ``run`` calls it. ``signature`` names its parameters in torch's order, those after ``*`` by
    keyword only. ``steps`` computes it over the steps of each sequence, ``default`` is a value that
    depends on the kind, and ``flags`` are properties. ``refused`` lists the transformations in which
    it raises an error, over the steps if it has ``steps``: ``"compile"``, ``"export"``, ``"vmap"``,
    ``"grad"``, ``"jvp"`` or ``"onnx"``, of which ``"export"`` is a part. It is right in all others.
    """

    kind: str
    run: Callable[[ModuleEntry, Arguments, Options], Any]
    signature: str = ""
    steps: Callable[..., Any] | None = None
    default: Any = None
    flags: str = ""
    refused: str = ""


class ModuleEntry:
    """A row for one function in a module of torch."""

    def __init__(self, name: str, row: FunctionRow, function: Callable[..., Any]) -> None:
        parameters = row.signature
        if row.kind == "loss":  # written in Python; the order differs from loss to loss
            parameters = " ".join(signature(function).parameters)
        by_position, _, by_keyword = parameters.partition("*")
        self.name = name
        self.function = function
        self.run = row.run
        self.steps = row.steps
        self.default = row.default
        self.flags = frozenset(row.flags.split())
        self.refused = frozenset(row.refused.split())
        self.signature = (*by_position.split(), *by_keyword.split())
        self.by_position = len(by_position.split())
        self.has_dim_second = by_position.split()[1:2] == ["dim"]
        self.accepted = {*self.signature, *_ALIASES, "out"}

    def has(self, flag: str) -> bool:
        """Return True for a property of the function, such as ``"one dim"``."""
        return flag in self.flags

    def bind(self, args: Arguments, kwargs: Options) -> Options:
        """Return the arguments by their names."""
        if len(args) > self.by_position or not kwargs.keys() <= self.accepted:
            got = f"{len(args)} by position, and {', '.join(kwargs) or 'none'} by keyword"
            rule = f"those of torch: {', '.join(self.signature)}"
            fix = f"pass at most {self.by_position} by position, and the others by keyword"
            raise ArgumentTypeError(f"arguments of {self.name}", got, rule, fix)
        bound = dict(zip(self.signature, args, strict=False)) | kwargs
        for name, alias in _ALIASES.items():
            if name in kwargs:
                bound[alias] = bound.pop(name)
        if "out" in kwargs:
            refuse_out(bound)
        return bound

    def refuse_transformations(self, batch: FlatBatch) -> None:
        """Raise within a transformation that the function does not support."""
        if not self.refused:
            return
        place = ""
        if is_for_onnx() and self.refused & {"onnx", "export"}:
            place = "rl.export.onnx"
        elif "export" in self.refused and is_exporting():
            place = "torch.export"
        elif "compile" in self.refused and torch.compiler.is_compiling():
            # With fullgraph=True an error with this message: torch.compile does not trace how ours
            # are raised. Otherwise the function runs between two graphs.
            torch._dynamo.graph_break(msg=f"{self.name} of a Ragged reads its lengths")
        elif "vmap" in self.refused and is_transformed(batch._values):
            place = "torch.func"
        if place:
            rule = f"called outside of {place}"
            fix = "call it before or after the transformed function"
            if is_for_onnx():
                fix = "call it on the outputs of the file"
            raise ArgumentTypeError(self.name, f"a Ragged within {place}", rule, fix)


_ALIASES = {"axis": "dim", "self": "input"}


def refuse_out(options: Options) -> None:
    """Raise if a result should be written to a tensor."""
    if options.get("out") is not None:
        rule = "left out for a Ragged, which is immutable"
        raise ArgumentTypeError("out", "a tensor", rule, "use the result of the call")
    options.pop("out", None)


def batches_of(values: Iterable[Any]) -> list[FlatBatch]:
    """Return the ragged batches among arguments, also those in lists."""
    batches: list[FlatBatch] = []
    for value in values:
        if isinstance(value, FlatBatch):
            batches.append(value)
        elif isinstance(value, list | tuple):
            batches.extend(item for item in value if isinstance(item, FlatBatch))
    return batches


def ragged_input(entry: ModuleEntry, value: Any) -> FlatBatch:
    """Return the first argument, which must be the Ragged."""
    if not isinstance(value, FlatBatch):
        fix = "pass the Ragged as input, or build one of the other with rl.Ragged"
        rule = "called with a Ragged as its input"
        raise ArgumentTypeError(entry.name, f"a {type(value).__name__} with a Ragged", rule, fix)
    if entry.steps is None:
        entry.refuse_transformations(value)
    return value


def check_together(name: str, batch: FlatBatch, other: FlatBatch) -> None:
    """Raise if two batches differ in their lengths or numbers of feature dimensions."""
    if batch._values.dim() != other._values.dim():
        got = f"batches with elements of shape {tuple(batch.feature_shape)} and {tuple(other.feature_shape)}"
        fix = "give the smaller one a dimension, r.unsqueeze(-1)"
        raise ShapeError(
            name, got, "called with elements that have the same number of feature dimensions", fix
        )
    other._needs_lengths_of(name, batch, "the other batch")


def rows_of(name: str, value: Any, batch: FlatBatch) -> Any:
    """Return an argument as it meets flat values: rows of a batch, or a tensor that broadcasts.

    A tensor ``(B, 1, *features)`` is repeated over the steps.
    """
    if isinstance(value, FlatBatch):
        return value._values
    features = batch._values.dim() - 1
    if not isinstance(value, Tensor) or value.dim() <= features:
        return value
    if value.dim() == features + 1 and value.shape[0] == 1:
        return value[0]
    if value.dim() == features + 2 and value.shape[1] == 1:
        if value.shape[0] == 1:
            return value[0, 0]
        if value.shape[0] == batch._count:
            return segments.spread(value[:, 0], batch.offsets, batch._values.shape[0])
    rule = f"called with a tensor that broadcasts to {batch._shape_text()}"
    fix = "pass x[:, None] for a tensor x with one value per sequence, or a Ragged for one per element"
    raise ShapeError(name, f"a tensor of shape {tuple(value.shape)}", rule, fix)


def dimension(entry: ModuleEntry, dim: Any, batch: FlatBatch, more: int = 0) -> int:
    """Return a dimension counted from the front; ``more`` for results with more dimensions."""
    count = batch._values.dim() + 1 + more
    if isinstance(dim, bool) or not isinstance(dim, int | torch.SymInt):
        rule = "an integer: 1 for the steps, -1 for the last dimension"
        raise ArgumentTypeError(
            f"dim of {entry.name}", quote(dim), rule, "pass dim=1 for the steps of each sequence"
        )
    if not -count <= dim < count:
        rule = f"from {-count} to {count - 1}, for {batch._shape_text()}"
        raise DimensionError(f"dim of {entry.name}", quote(dim), rule, "pass a dimension of it")
    counted: Any = dim % count
    return int(counted) if isinstance(counted, int) else counted


def refuse_dimension(entry: ModuleEntry, dim: Any, batch: FlatBatch, fix: str) -> ArgumentTypeError:
    """Return the error of a dimension over which a function has no meaning."""
    has_steps = entry.steps is not None and dim != 1
    rule = f"{'1, the steps, or ' * has_steps}a dimension of the features"
    return ArgumentTypeError(f"dim of {entry.name}", f"{dim} of {batch._shape_text()}", rule, fix)


def like(batch: FlatBatch, result: Any) -> Any:
    """Return the batch with the rows of a result, or of each result of a tuple or list."""
    if isinstance(result, Tensor):
        return batch._like(result)
    return type(result)([batch._like(rows) for rows in result])


def sure(index: Tensor, exists: Tensor, size: Any) -> Tensor:
    """Return an index of rows whose existence has been asserted.

    NOTE (files): a file of ONNX has no assertions. In its graph, rows that do not exist get the
    index ``size``, which is out of bounds, so that its runtime raises an error.
    """
    return torch.where(exists, index, size) if is_for_onnx() else index


def check_floating(name: str, values: Tensor) -> None:
    """Raise for integers and bools."""
    if not (values.is_floating_point() or values.is_complex()):
        fix = "convert it with r.float()"
        raise ArgumentTypeError(name, str(values.dtype), "of a floating-point dtype", fix)


def check_real(name: str, values: Tensor) -> None:
    """Raise for complex numbers, which cannot be compared."""
    if values.is_complex():
        fix = "call it on r.abs()"
        raise ArgumentTypeError(
            name, str(values.dtype), "of real numbers, which can be compared", fix
        )
