"""Indexing of sequences, steps and features: ``r[:, 1:]``, ``r[:, -1]``, ``r[..., 0]``."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raglane import segments
from raglane._utils.checks import as_tensor
from raglane._utils.messages import quote
from raglane._utils.tracing import is_for_onnx, is_transformed
from raglane.errors import ArgumentError, ArgumentTypeError, DimensionError, ShapeError
from raglane.ragged.base import FlatBatch
from raglane.ragged.face.entry import (
    Arguments,
    FunctionRow,
    ModuleEntry,
    Options,
    check_together,
    ragged_input,
    rows_of,
    sure,
)
from raglane.segments.indexing import take_rows

_ALL = slice(None)
_FAR = 2**62  # beyond each step; an offset plus it is still an int64


def index(batch: Any, key: Any) -> Any:
    """Return ``batch[key]`` for a tuple, an ellipsis, None or a ragged mask."""
    if type(key) is tuple and len(key) == 2 and _is_all(key[0]) and isinstance(key[1], slice):
        return batch if _is_all(key[1]) else _slice(batch, key[1])  # the commonest
    return _masked(batch, key) if isinstance(key, FlatBatch) else _index(batch, key)


def _index(batch: Any, key: Any) -> Any:
    sequences, steps, *features = _expanded(batch, key if isinstance(key, tuple) else (key,))
    if isinstance(sequences, FlatBatch):
        batch, sequences = _masked(batch, sequences), _ALL
    if _is_integer(sequences):
        return batch[operator.index(sequences)][(steps, *features)]
    _check_features(features)
    if not isinstance(steps, slice) and _is_numbers(sequences):
        return _pairs(batch, sequences, steps)[(..., *features)]
    if not _is_all(sequences):
        batch = batch[sequences]
    if isinstance(steps, slice):
        result = batch if _is_all(steps) else _slice(batch, steps)
        return result._like(result._values[(_ALL, *features)]) if features else result
    within = _numbers(steps)
    if within.dim() == 0:
        return _step(batch, int(within))[(_ALL, *features)]
    every = torch.arange(batch._count, device=batch.device).view(-1, *[1] * within.dim())
    return _pairs(batch, every, within)[(_ALL,) * (1 + within.dim()) + tuple(features)]


def _expanded(batch: FlatBatch, key: tuple[Any, ...]) -> list[Any]:
    """Return an index with one entry per dimension, and the new dimensions of None."""
    axes = sum(entry is not None and entry is not Ellipsis for entry in key)
    axes += sum(isinstance(entry, FlatBatch) for entry in key)
    missing = batch._values.dim() + 1 - axes
    dots = [place for place, entry in enumerate(key) if entry is Ellipsis]
    if missing < 0 or len(dots) > 1:
        rule = f"at most one entry for each dimension of {batch._shape_text()}"
        raise DimensionError("index", quote(key), rule, "leave out the others")
    place = dots[0] if dots else len(key)
    entries = [*key[:place], *[_ALL] * (missing if dots else max(missing, 0)), *key[place + 1 :]]
    if isinstance(entries[0], FlatBatch):
        entries.insert(1, _ALL)
    if entries[0] is None or entries[1] is None:
        rule = "an index that keeps sequences and steps the first two dimensions"
        raise ArgumentTypeError("index", quote(key), rule, "pass e.g. r[..., None]")
    while len(entries) > 2 and _is_all(entries[-1]):
        entries.pop()
    return entries


def _is_all(entry: Any) -> bool:
    return isinstance(entry, slice) and entry == _ALL


def _is_integer(entry: Any) -> bool:
    if isinstance(entry, Tensor | np.ndarray):
        return entry.ndim == 0 and entry.dtype not in (torch.bool, np.bool_)
    if isinstance(entry, bool | slice | list | tuple):
        return False
    return hasattr(entry, "__index__")


def _is_numbers(entry: Any) -> bool:
    """Return True for a list or tensor of integers, not of bools."""
    return not isinstance(entry, slice) and as_tensor(entry).dtype is not torch.bool


def _numbers(entry: Any) -> Tensor:
    """Return an index of steps, integers."""
    try:
        numbers = as_tensor(entry)
    except (TypeError, ValueError, RuntimeError):
        numbers = torch.empty(0)
    if isinstance(entry, list) and not entry:  # which has no dtype
        numbers = numbers.long()
    if numbers.dtype.is_floating_point or numbers.dtype.is_complex or numbers.dtype is torch.bool:
        rule = "an integer, a slice, or integers in a list or tensor"
        fix = "pass r[mask] with a Ragged of bools to choose elements"
        raise ArgumentTypeError("index of the steps", quote(entry), rule, fix)
    return numbers


def _check_features(entries: list[Any]) -> None:
    if sum(isinstance(entry, Tensor | np.ndarray | list) for entry in entries) > 1:
        rule = "integers and slices for the features, and at most one list or tensor"
        raise ArgumentTypeError("index", quote(entries), rule, "index in two steps")
    if any(isinstance(entry, FlatBatch) for entry in entries):
        rule, fix = "integers, slices or tensors", "call torch.gather(r, dim, index)"
        raise ArgumentTypeError("index of the features", "a Ragged", rule, fix)


def _masked(batch: Any, mask: FlatBatch) -> Any:
    """Return the elements where a Ragged of bools is True, sequence by sequence."""
    if mask.dtype is not torch.bool or mask.feature_shape:
        got = f"a Ragged of {mask.dtype} with elements of shape {tuple(mask.feature_shape)}"
        rule, fix = (
            "a Ragged of one bool per element",
            "call torch.take_along_dim for indices of steps",
        )
        raise ArgumentTypeError("index", got, rule, fix)
    mask._needs_lengths_of("index", batch, "the batch")
    rows = mask._values.nonzero().view(-1)
    lengths = segments.sum(mask._values, batch.offsets)
    return batch._build(take_rows(batch._values, rows), lengths.cpu())


def _ends_of(steps: slice) -> list[int | None]:
    """Return start, stop and stride of a slice, or raise if it is none of steps."""
    try:
        ends = [
            None if part is None else max(-_FAR, min(operator.index(part), _FAR))
            for part in (steps.start, steps.stop, steps.step)
        ]
    except TypeError as error:
        rule = "a slice of integers"
        raise ArgumentTypeError(
            "index of the steps", quote(steps), rule, "pass r[:, 2:5]"
        ) from error
    if ends[2] is not None and ends[2] < 1:
        fix = "call r.flip(1) to reverse the steps"
        raise ArgumentError("index of the steps", quote(steps), "a slice with a step above 0", fix)
    return ends


def _slice(batch: Any, steps: slice) -> Any:
    """Return the same steps of each sequence, those that it has."""
    start, stop, stride = _ends_of(steps)
    # NumPy's operations have a third of torch's overhead.
    can_read = batch._is_on_host() and not is_transformed(batch._offsets)
    kind: Any = np if can_read else torch
    offsets = batch.offsets.numpy() if can_read else batch._host_offsets()
    begins, ends = offsets[:-1], offsets[1:]
    lasts = ends if stop is None else _bound(kind, stop, begins, ends)
    if start:
        begins = _bound(kind, start, begins, ends)
    counts = lasts - begins
    if start and stop is not None:
        counts = counts.clip(min=0)
    if stride is not None and stride > 1:
        counts = (counts + stride - 1) // stride
    if not (kind is np or batch.is_cpu):
        begins = begins.to(batch.device, non_blocking=True)
    return batch._slices(begins, counts, stride=stride or 1)


def _bound(kind: Any, place: int, begins: Any, ends: Any) -> Any:
    """Return an end of a slice in the sequences, of arrays of NumPy or tensors of torch."""
    return kind.minimum(begins + place, ends) if place >= 0 else kind.maximum(ends + place, begins)


def _step(batch: Any, step: int) -> Tensor:
    """Return one step of each sequence, ``(B, *features)``."""
    least = step + 1 if step >= 0 else -step
    batch._needs_elements("index of the steps", least)
    offsets = batch.offsets
    rows = offsets[:-1] + step if step >= 0 else offsets[1:] + step
    if is_for_onnx():
        rows = sure(rows, offsets.diff() >= least, batch._values.shape[0])
    return batch._values.index_select(0, rows)


def _pairs(batch: Any, sequences: Any, steps: Any) -> Tensor:
    """Return the elements at pairs of a sequence and a step."""
    chosen, within = (_numbers(entry).to(batch.device) for entry in (sequences, steps))
    try:
        chosen, within = torch.broadcast_tensors(chosen, within)
    except RuntimeError as error:
        got = f"shapes {tuple(chosen.shape)} and {tuple(within.shape)}"
        rule = "sequences and steps of one shape"
        raise ShapeError("index", got, rule, "pass one step per sequence") from error
    batch._needs_true(
        "index", (chosen >= -batch._count) & (chosen < batch._count), "sequences of the batch"
    )
    offsets = batch.offsets
    lengths = offsets.diff()[chosen]
    exists = (within >= -lengths) & (within < lengths)
    batch._needs_steps("index", exists)
    rows = offsets[:-1][chosen] + torch.where(within < 0, within + lengths, within)
    return batch._values[sure(rows, exists, batch._values.shape[0])]


def masked_select(entry: ModuleEntry, args: Arguments, kwargs: Options) -> Tensor:
    """Return the values at which a mask is True, in one dimension."""
    bound = entry.bind(args, kwargs)
    batch = ragged_input(entry, bound["input"])
    mask = bound["mask"]
    if isinstance(mask, FlatBatch):
        check_together(entry.name, batch, mask)
    return torch.masked_select(batch._values, rows_of(entry.name, mask, batch))


ROWS: dict[str, FunctionRow] = {
    "masked_select": FunctionRow("index", masked_select, "input mask", refused="onnx")
}
