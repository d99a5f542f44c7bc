"""Losses of torch, which mean what they mean for flat rows: each real element counts once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from raglane.errors import ArgumentTypeError, ShapeError
from raglane.ragged.base import FlatBatch
from raglane.ragged.face.entry import Arguments, FunctionRow, ModuleEntry, Options, rows_of


def loss(entry: ModuleEntry, args: Arguments, kwargs: Options) -> Any:
    """Call a loss on the flat values of its batches, which must have the same lengths."""
    bound = entry.bind(args, kwargs)
    rows, optional = entry.default
    batch = bound[rows[0]]
    for name in rows:
        _check_ragged(entry, name, bound[name], batch)
    entry.refuse_transformations(batch)
    features = batch._values.dim() - 1
    for name in rows:
        _check_features(entry, name, bound[name], rows[0], features)
        bound[name] = bound[name]._values
    for name in optional:
        value = bound.get(name)
        if isinstance(value, FlatBatch):
            value._needs_lengths_of(name, batch, rows[0])
        if value is not None:
            bound[name] = rows_of(entry.name, value, batch)
    if bound.get("reduction") == "batchmean":
        return entry.function(**(bound | {"reduction": "sum"})) / batch._count
    # Not compared in a graph, which would be one for batches without elements.
    is_unset = entry.has("unset") and not torch.compiler.is_compiling()
    if is_unset and not batch._values.shape[0]:
        rows = batch._values.sum(list(range(1, features + 1)))
        options = {name: bound[name] for name in _REDUCTION if name in bound}
        result = torch.nn.functional.l1_loss(rows, rows, **options)
    else:
        result = entry.function(**bound)
    is_each = bound.get("reduction") == "none" or bound.get("reduce") is False
    return batch._like(result) if is_each else result


_REDUCTION = ("size_average", "reduce", "reduction")


def _check_ragged(entry: ModuleEntry, name: str, value: Any, batch: Any) -> None:
    if not isinstance(value, FlatBatch):
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
        rule = f"a Ragged of the same lengths as the other arguments of {entry.name}"
        fix = (
            "pass r.last() or a pooling as the input for one target per sequence, "
            "or r.broadcast(target) to count it at each element"
        )
        raise ArgumentTypeError(name, f"a {type(value).__name__}{shape}", rule, fix)
    if isinstance(batch, FlatBatch):
        value._needs_lengths_of(name, batch, "the input")


def _check_features(
    entry: ModuleEntry, name: str, batch: FlatBatch, first: str, features: int
) -> None:
    """Raise for shapes that torch would broadcast over rows."""
    has_classes = entry.has("classes")
    if has_classes and features < 1:
        rule = "of elements with a feature dimension, the classes"
        raise ShapeError(name, batch._shape_text(), rule, "give the elements one, r.unsqueeze(-1)")
    if not features - has_classes <= batch._values.dim() - 1 <= features:
        rule = f"of elements with {features} feature dimension(s), like {first}"
        fix = "reshape one with r.squeeze(-1) or r.unsqueeze(-1)"
        raise ShapeError(name, batch._shape_text(), rule, fix)


def _row(
    rows: str = "input target", flags: str = "", optional: str = "", refused: str = ""
) -> FunctionRow:
    default = (tuple(rows.split()), tuple(optional.split()))
    return FunctionRow("loss", loss, default=default, flags=flags, refused=refused)


ROWS: dict[str, FunctionRow] = {
    **dict.fromkeys(
        "cross_entropy nll_loss multilabel_soft_margin_loss".split(),
        _row(flags="classes"),
    ),
    # Torch's result for no element is memory that nothing was written to.
    **dict.fromkeys(
        "multi_margin_loss multilabel_margin_loss".split(), _row(flags="classes unset")
    ),
    **dict.fromkeys(
        """mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy kl_div poisson_nll_loss
        binary_cross_entropy_with_logits soft_margin_loss hinge_embedding_loss""".split(),
        _row(optional="weight"),
    ),
    # Torch reads the numbers of ``var``.
    "gaussian_nll_loss": _row(optional="var", refused="compile export"),
    "margin_ranking_loss": _row("input1 input2 target"),
    "cosine_embedding_loss": _row("input1 input2 target", "classes"),
    "triplet_margin_loss": _row("anchor positive negative", "classes"),
}
