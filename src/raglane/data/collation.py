"""``rl.collate``: make a batch of a list of samples, for a DataLoader's ``collate_fn``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raglane._utils.checks import as_tensor, check_tensor, check_unmasked
from raglane._utils.messages import quote
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from raglane.ragged import Ragged
from raglane.ragged.nested import Nested
from raglane.segments import lengths_of

# The kind of a sample is the first class that it is an instance of. The order matters: NumPy's
# strings are str, some of its numbers are float or complex but keep their dtype, and bool is an
# int.
_KINDS: tuple[Any, ...] = (
    str,
    bytes,
    Tensor,
    np.ndarray,
    np.generic,
    bool,
    int,
    float,
    complex,
    Mapping,
    Ragged,
    list,
)


class Items(Sequence[Any]):
    """Items of a dataset, each made when it is used; collate makes a batch of all of them at
    once.
    """

    def __init__(self, dataset: Any, rows: Tensor) -> None:
        self._dataset = dataset
        self._rows = rows

    def __len__(self) -> int:
        return self._rows.shape[0]

    def __getitem__(self, index: Any) -> Any:
        rows = self._rows[index]
        return self._dataset[int(rows)] if rows.dim() == 0 else Items(self._dataset, rows)

    def batch(self) -> dict[str, Ragged | Tensor]:
        """Return the batch of these items."""
        return self._dataset._batch(self._rows)


def collate(samples: Sequence[Any] | Mapping[Any, Any]) -> Any:
    """Make a batch of samples: the same structure, with a Ragged or a stacked tensor in each field.

    ========================================  ==================================================================
    in each sample                            in the batch
    ========================================  ==================================================================
    tensor or array with a dimension or more  :class:`~raglane.Ragged`, also for equal lengths: the first dimension
                                              is the steps, and may differ
    tensor or array ``()``, NumPy number      tensor ``(B,)`` of its dtype
    bool, int, float, complex                 tensor ``(B,)``: bool, int64, torch's default float or complex dtype
    str, bytes                                list of the ``B`` strings
    None                                      None
    list of numbers                           Ragged: a sequence of numbers; ints are int64; floats, and ints mixed
                                              with floats, torch's default float dtype; lists that are all empty
                                              are int64
    list of lists of bools or with floats     Ragged: a sequence of channels
    list of lists of ints, tensors or arrays  :class:`~raglane.ragged.Nested`: a group of sequences of any lengths,
                                              such as a document of sentences
    Ragged                                    the same
    tuple, named tuple, dict, dataclass       the same, of batches; a dataclass's ``__init__`` is not run
    ========================================  ==================================================================

    Sequences keep the order of the samples. A list is a sequence, as in the datasets and tokenizers
    of Hugging Face; a record is a tuple. The function works in the workers of a DataLoader and with
    ``pin_memory=True`` (a DataLoader pins tensors and Ragged batches in tuples, dicts and named
    tuples, but not in dataclasses). Samples of a :class:`~raglane.data.Dataset` that a DataLoader
    fetches become a batch without a loop over them.

    Args:
        samples: one or more samples of the same structure, in a list; or a mapping with such a list
            under each key, as tokenizers return them.

    Returns:
        The batch, with the structure of a sample.

    Raises:
        ArgumentError: there are no samples, dicts have different keys, tuples have different
            lengths, or a number exceeds 64 bits. The message names the field and the first sample
            that differs; so do the others.
        ArgumentTypeError: a sample has the wrong type, another type than the first, or masked
            elements.
        ShapeError: trailing dimensions, dtypes or devices of tensors or arrays differ.

    Example:
        >>> batch = collate([(torch.ones(4, 12), 1), (torch.ones(2, 12), 0)])
        >>> batch[0]
        Ragged(shape=(2, *, 12), dtype=torch.float32, device=cpu, lengths=[4, 2], density=0.75)
        >>> batch[1]
        tensor([1, 0])
        >>> batch = collate([{"words": np.arange(3), "name": "a"}, {"words": np.arange(5), "name": "b"}])
        >>> batch["words"].lengths, batch["name"]
        (tensor([3, 5]), ['a', 'b'])
        >>> batch = collate({"input_ids": [[5, 17, 3], [9]], "labels": [1, 0]})
        >>> batch["input_ids"].values, batch["input_ids"].lengths, batch["labels"]
        (tensor([ 5, 17,  3,  9]), tensor([3, 1]), tensor([1, 0]))
        >>> docs = collate([[[5, 2, 3], [4]], [[7, 8]]])  # documents of sentences
        >>> docs.inner.tolist(), docs.regroup(docs.inner.lengths).tolist()
        ([[5, 2, 3], [4], [7, 8]], [[3, 1], [2]])
        >>> collate([torch.ones(4, 12), torch.ones(2, 13)])
        Traceback (most recent call last):
        ...
        raglane.errors.ShapeError: samples[1] must be features (12,), as in samples[0], got features (13,). \
Give every sample the same trailing dimensions.
    """
    if isinstance(samples, Items):
        return samples.batch()
    if isinstance(samples, Mapping):
        return _columns(samples)
    if isinstance(samples, (str, bytes, Tensor)) or not isinstance(samples, Sequence):
        got = type(samples).__name__
        rule = "a list of samples, or a dict of lists"
        raise ArgumentTypeError("samples", got, rule, "pass a list")
    if not samples:
        raise ArgumentError(
            "samples", "an empty list", "at least one sample", "leave empty batches out"
        )
    return _collate(samples, "")


def _collate(samples: Sequence[Any], field: str) -> Any:
    """Return the batch of one field of the samples; ``field`` is its path in a sample, such as
    ``['x'][0].y``.
    """
    first = samples[0]
    kind = _kind(first, field)
    for number, sample in enumerate(samples):
        # Skips the slower comparison of kinds for samples of exactly the first type.
        if type(sample) is not type(first) and _kind(sample, field, number) is not kind:
            got = _name(sample)
            rule = f"{_name(first)}, like samples[0]{field}"
            raise ArgumentTypeError(
                _sample_name(number, field), got, rule, "give every sample the same kind"
            )
    if kind is Tensor:
        return _tensors(samples, field)
    if kind is np.ndarray:
        return _arrays(samples, field)
    if kind is int:
        for number, sample in enumerate(samples):
            _check_int(sample, _sample_name(number, field))
    if kind in (bool, int, float, complex):
        return torch.tensor(samples)
    if kind in (str, bytes):
        return list(samples)
    if isinstance(first, tuple):
        return _tuples(samples, field)
    if kind is Mapping:
        return _mappings(samples, field)
    if kind in (list, Ragged):
        return _lists(samples, field)
    return None if kind is None else _dataclasses(samples, field)


def _kind(sample: Any, field: str, number: int = 0) -> Any:
    """Return the kind of a sample, on which the samples of a batch must agree."""
    if sample is None:
        return None
    for kind in _KINDS:
        if isinstance(sample, kind):
            return np.ndarray if kind is np.generic else kind
    if isinstance(sample, tuple):
        return type(sample) if hasattr(sample, "_fields") else tuple
    if dataclasses.is_dataclass(sample) and not isinstance(sample, type):
        return type(sample)
    rule = "a tensor, array, number, string, None, list of numbers, or a tuple, named tuple, dict or dataclass of these"
    raise ArgumentTypeError(
        _sample_name(number, field), _name(sample), rule, "convert it in the dataset"
    )


def _name(sample: Any) -> str:
    if sample is None:
        return "None"
    name = type(sample).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _sample_name(number: int, field: str) -> str:
    return f"samples[{number}]{field}"


def _check_same(values: Sequence[Any], field: str, what: str, fix: str) -> None:
    """Raise a ShapeError for the first sample that differs from sample 0."""
    for number, value in enumerate(values):
        if value != values[0]:
            got = f"{what} {value}"
            rule = f"{what} {values[0]}, as in {_sample_name(0, field)}"
            raise ShapeError(_sample_name(number, field), got, rule, fix)


def _check_alike(samples: Sequence[Any], shapes: list[tuple[int, ...]], field: str) -> None:
    """Raise unless number of dimensions, trailing dimensions and dtypes agree."""
    fix = "give every sample the same number of dimensions"
    _check_same([len(shape) for shape in shapes], field, "dimensions:", fix)
    _check_same(
        [shape[1:] for shape in shapes],
        field,
        "features",
        "give every sample the same trailing dimensions",
    )
    _check_same(
        [sample.dtype for sample in samples], field, "dtype", "give every sample the same dtype"
    )


def _tensors(samples: Sequence[Tensor], field: str) -> Ragged | Tensor:
    """Return a Ragged of tensors, or a stacked tensor if they have no dimension."""
    for number, sample in enumerate(samples):
        check_tensor(_sample_name(number, field), sample)
    shapes = [tuple(sample.shape) for sample in samples]
    _check_alike(samples, shapes, field)
    _check_same(
        [sample.device for sample in samples], field, "device", "move every sample to one device"
    )
    if not shapes[0]:
        return torch.stack(tuple(samples))
    return Ragged.from_flat(torch.cat(tuple(samples)), lengths=lengths_of(samples))


def _arrays(arrays: Sequence[Any], field: str) -> Ragged | Tensor:
    """Return the batch of NumPy arrays or numbers, copied by NumPy so that no read-only array is
    shared.
    """
    samples = [np.asarray(sample) for sample in arrays]
    shapes = [sample.shape for sample in samples]
    for number, sample in enumerate(samples):
        check_unmasked(_sample_name(number, field), arrays[number])
        if sample.dtype.kind not in "biufc":
            got = f"dtype {sample.dtype}"
            rule = "of booleans, integers, floats or complex numbers"
            raise ArgumentTypeError(_sample_name(number, field), got, rule, "convert the array")
    _check_alike(samples, shapes, field)
    native = samples[0].dtype.newbyteorder("=")
    flat = np.stack(samples) if not shapes[0] else np.concatenate(samples)
    values = as_tensor(flat.astype(native, copy=False))
    if not shapes[0]:
        return values
    return Ragged.from_flat(values, lengths=torch.tensor([shape[0] for shape in shapes]))


def _tuples(samples: Sequence[tuple[Any, ...]], field: str) -> tuple[Any, ...]:
    first = samples[0]
    for number, sample in enumerate(samples):
        if len(sample) != len(first):
            got = f"a tuple of {len(sample)}"
            rule = f"a tuple of {len(first)}, as in {_sample_name(0, field)}"
            raise ArgumentError(
                _sample_name(number, field), got, rule, "give every sample the same entries"
            )
    names: tuple[str, ...] | None = getattr(first, "_fields", None)
    paths = (
        [f".{name}" for name in names]
        if names is not None
        else [f"[{entry}]" for entry in range(len(first))]
    )
    entries = [
        _collate(column, field + path)
        for path, column in zip(paths, zip(*samples, strict=True), strict=True)
    ]
    # ``_make``, because a named tuple may redefine ``__new__``.
    kind: Any = type(first)
    return tuple(entries) if names is None else kind._make(entries)


def _mappings(samples: Sequence[Mapping[Any, Any]], field: str) -> dict[Any, Any]:
    """Return the batch of dicts, with the keys in the order of the first sample."""
    first = samples[0]
    for number, sample in enumerate(samples):
        if sample.keys() != first.keys():
            odd = ", ".join(sorted(map(repr, sample.keys() ^ first.keys())))
            got = f"a dict that differs in {odd}"
            rule = f"a dict with the keys of {_sample_name(0, field)}"
            raise ArgumentError(
                _sample_name(number, field), got, rule, "give every sample the same keys"
            )
    return {
        key: _collate([sample[key] for sample in samples], f"{field}[{key!r}]") for key in first
    }


def _columns(columns: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the batch of a dict of lists, with one entry per sample in each list."""
    rule = "a list with one entry per sample under each key"
    fix = "pass a list of samples, or a dict of such lists"
    lists: dict[Any, list[Any]] = {}
    for key, column in columns.items():
        if (
            not isinstance(column, (list, tuple, Tensor, np.ndarray))
            or getattr(column, "ndim", 1) == 0
        ):
            raise ArgumentTypeError(f"samples[{key!r}]", _name(column), rule, fix)
        lists[key] = list(column)
    count = len(next(iter(lists.values()), []))
    for key, samples in lists.items():
        if len(samples) != count:
            rule = f"{count} entries, as under the first key"
            raise ArgumentError(f"samples[{key!r}]", f"{len(samples)} entries", rule, fix)
    if not count:
        raise ArgumentError(
            "samples", "no entries", "at least one sample", "leave empty batches out"
        )
    return {key: _collate(column, f"[{key!r}]") for key, column in lists.items()}


def _lists(samples: Sequence[Any], field: str) -> Ragged | Nested:
    """Return a Ragged of lists of numbers, or of lists of channels; or a batch of groups."""
    if isinstance(samples[0], Ragged) or _are_groups(samples):
        return _groups(samples, field)
    elements = list(chain.from_iterable(samples))
    is_deep = set(map(type, elements)) == {list}
    widths = set(map(len, elements)) if is_deep else {0}
    numbers = list(chain.from_iterable(elements)) if is_deep else elements
    kinds = set(map(type, numbers))
    is_large = kinds == {int} and not -(2**63) <= min(numbers) <= max(numbers) < 2**63
    if (kinds != {bool} and not kinds <= {int, float}) or len(widths) > 1 or is_large:
        raise _odd_element(samples, elements[0], bool in kinds, field)
    dtype = torch.int64
    if bool in kinds:
        dtype = torch.bool
    elif float in kinds:
        dtype = torch.get_default_dtype()
    values = torch.tensor(numbers, dtype=dtype)
    lengths = torch.tensor([len(sample) for sample in samples])
    return Ragged.from_flat(
        values.view(len(elements), *widths) if is_deep else values, lengths=lengths
    )


def _are_groups(samples: Sequence[list[Any]]) -> bool:
    """Return True for lists of sequences, by their kinds: lists of ints, tensors or arrays."""
    elements = list(chain.from_iterable(samples))
    kinds = set(map(type, elements))
    if kinds == {list}:
        numbers = set(map(type, chain.from_iterable(elements)))
        return numbers <= {int}
    return bool(elements) and all(
        isinstance(element, Tensor | np.ndarray) and element.ndim > 0 for element in elements
    )


def _groups(samples: Sequence[Any], field: str) -> Nested:
    """Return a batch of groups of sequences."""
    lengths = [len(sample) for sample in samples]
    if isinstance(samples[0], Ragged):
        inner: Any = torch.cat(list(samples))
    else:
        inner = _collate(list(chain.from_iterable(samples)), field)
    return Nested(inner, lengths)


def _odd_element(samples: Sequence[list[Any]], first: Any, has_bool: bool, field: str) -> Exception:
    """Return the error for the first element that differs from the others."""
    rule = "a number, or a list of numbers, since a list is a sequence"
    fix = "pass a tuple for a record"
    for number, sample in enumerate(samples):
        for step, element in enumerate(sample):
            name = f"{_sample_name(number, field)}[{step}]"
            if isinstance(element, list) != isinstance(first, list):
                return ArgumentTypeError(name, _name(element), rule, fix)
            if isinstance(element, list) and len(element) != len(first):
                got = f"a list of {len(element)}"
                same = f"a list of {len(first)}, like the first element"
                return ShapeError(name, got, same, "give every element the same channels")
            for entry in element if isinstance(element, list) else [element]:
                if isinstance(entry, str):
                    fix = "convert tokens to numbers with a vocabulary or a tokenizer, or leave the field out"
                if type(entry) not in (bool, int, float):
                    return ArgumentTypeError(name, _name(entry), rule, fix)
                if has_bool and not isinstance(entry, bool):
                    same = "a boolean, or a number, like the other entries"
                    return ArgumentTypeError(name, _name(entry), same, "convert the others")
                if isinstance(entry, int):
                    _check_int(entry, name)
    return ArgumentTypeError(f"samples{field}", "lists of several kinds", rule, fix)


def _check_int(number: int, name: str) -> None:
    if not -(2**63) <= number < 2**63:
        raise ArgumentError(
            name, quote(number), "an integer that fits 64 bits", "pass a float or a str"
        )


def _dataclasses(samples: Sequence[Any], field: str) -> Any:
    # Without __init__, whose checks and conversions apply to one sample.
    batch = object.__new__(type(samples[0]))
    for name in (entry.name for entry in dataclasses.fields(samples[0])):
        object.__setattr__(
            batch, name, _collate([getattr(sample, name) for sample in samples], f"{field}.{name}")
        )
    return batch
