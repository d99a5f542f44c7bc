"""Sequences where they are stored, as a torch dataset: batches are cut out of files that need not fit in memory."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raglane._utils.checks import as_tensor, check_kind, read_index
from raglane.data.dataset import SequenceDataset, Sequences
from raglane.data.encoders import between_ends
from raglane.data.gathering import Fragments, Gathered, Places
from raglane.data.preprocess import Preprocessor
from raglane.data.records import TASKS, Columns
from raglane.data.statistics import Counted, Statistics
from raglane.data.stores import stores_of

# Fragments whose tables of places are kept.
_TABLES = 256


class Dataset(Sequences, Counted):
    """Sequences in files, in a table or in a frame, of which only the batch at hand is in memory.

    It gives what :class:`~raglane.data.SequenceDataset` gives, its twin whose tensors are in memory: items, and batches
    for :func:`raglane.collate` that are cut out without a loop over sequences. A folder that
    :func:`~raglane.data.convert` wrote opens at once, whatever its size: lengths, vocabulary, scale and classes are
    read, not counted. Workers of a DataLoader open the files again by their paths.

    Args:
        source: a path, a pattern, a folder, a URL, or a list of these, of every format of :func:`~raglane.data.read`;
            or what speaks Arrow: a ``pyarrow.Table``, a frame of pandas or Polars, a dataset of Hugging Face. Arrow
            files are mapped into memory, Parquet is read by row group, and other files are read as a whole.
        columns: which columns hold what, and the task; None guesses, for the task ``"classify"`` or that of the folder.
        format: a key of ``FORMATS``; None goes by the suffix.
        preprocessor: what turns tokens, features and labels into tensors; None leaves features as they are and learns
            vocabulary and classes from all sequences.

    Raises:
        ArgumentTypeError: an argument of the wrong kind.
        DataError: the data cannot be read; what is wrong within it may show only when it is used.
        MissingExtraError: pyarrow is not installed.

    Example:
        >>> import pyarrow
        >>> table = pyarrow.table({"x": [[1.0, 2.0], [], [3.0]], "kind": ["a", "b", "a"]})
        >>> data = Dataset(table)
        >>> len(data), data.lengths.tolist(), data[2]["inputs"].tolist()
        (3, [2, 0, 1], [[3.0]])
        >>> batch = data.__getitems__([2, 0]).batch()
        >>> batch["inputs"].lengths, batch["target"]
        (tensor([1, 2]), tensor([0, 0]))
    """

    def __init__(
        self,
        source: Any,
        columns: Columns | None = None,
        *,
        format: str | None = None,
        preprocessor: Preprocessor | None = None,
    ) -> None:
        fix = "pass rl.data.Columns(label=...), say"
        check_kind("columns", columns, (Columns, type(None)), "an object of Columns, or None", fix)
        fix = "fit one with rl.data.Preprocessor.fit"
        check_kind("preprocessor", preprocessor, (Preprocessor, type(None)), "a Preprocessor, or None", fix)
        stores, self.columns = stores_of(source, columns, format)
        self._fragments = Fragments(stores)
        self._preprocessor = preprocessor
        self._learned: Preprocessor | None = None
        self._rows: npt.NDArray[Any] | None = None
        self._lengths: npt.NDArray[Any] | None = None
        self._statistics: Statistics | None = None
        self._tables: dict[int, Places] = {}

    def __getstate__(self) -> dict[str, Any]:
        # A worker needs no lengths, and finds the rest where it is.
        return {**self.__dict__, "_tables": {}, "_lengths": None}

    def __len__(self) -> int:
        return len(self._fragments) if self._rows is None else len(self._rows)

    @property
    def preprocessor(self) -> Preprocessor:
        """What turns the data into tensors, the one that was given, or one learned from all sequences."""
        if self._preprocessor is not None:
            return self._preprocessor
        if self._learned is None:
            known, task = self.statistics, self.columns.task
            # Without labels nothing is to be learned of them.
            task = task if self.columns.wants_labels or TASKS[task].label is None else "forecast"
            self._learned = Preprocessor.fit(known, task=task, standardize=False, missing="zero")
        return self._learned

    @property
    def statistics(self) -> Statistics:
        """What is counted of all sequences of the files; read where it stands beside them, else counted now."""
        if self._statistics is None:
            self._statistics = self._fragments.statistics()
        return self._statistics

    @property
    def fingerprint(self) -> str:
        """A short text that differs for other sequences, or another order; made of lengths and of what is counted."""
        digest = hashlib.sha256(json.dumps(self.statistics.to_config(), sort_keys=True).encode())
        digest.update(np.ascontiguousarray(self._all_lengths).data)
        if self._rows is not None:
            digest.update(np.ascontiguousarray(self._rows).data)
        return digest.hexdigest()[:16]

    def labels(self) -> npt.NDArray[np.int64] | None:
        """The class of each sequence, ``(B,)`` int64: its place in ``preprocessor.labels``; None without such labels.

        Only labels are read; they take 8 bytes each.
        """
        rows = np.arange(len(self._fragments)) if self._rows is None else self._rows.astype(np.int64)
        return self._fragments.labels(rows, self._places)

    @property
    def forecast(self) -> bool:
        """Whether the target of each element is the element after it."""
        return self.columns.need_labels and TASKS[self._task].label is None

    @property
    def _task(self) -> str:
        return (self._preprocessor or self.columns).task

    @property
    def lengths(self) -> Tensor:
        """``(B,)`` int32 or int64: the elements of each sequence's inputs; in files where they are known there."""
        lengths = self._all_lengths
        if self._rows is not None:
            lengths = lengths[self._rows]
        if self._task == "language":
            # An end stands before each text.
            return as_tensor(lengths + 1)
        return as_tensor(np.maximum(lengths - 1, 0) if self.forecast else lengths)

    @property
    def _all_lengths(self) -> npt.NDArray[Any]:
        if self._lengths is None:
            self._lengths = self._fragments.lengths()
        return self._lengths

    @property
    def ids(self) -> tuple[str | int, ...]:
        """One per sequence, those of the data, or the row numbers from 0 where it has none."""
        rows = range(len(self)) if self._rows is None else self._rows.tolist()
        return tuple(map(self._fragments.id_of, rows))

    def with_preprocessor(self, preprocessor: Preprocessor, require_targets: bool = True) -> Dataset:
        """The same sequences, turned into tensors in another way; without targets if none are required."""
        other = copy.copy(self)
        other._preprocessor, other._tables = preprocessor, {}
        if not require_targets:
            other.columns = replace(self.columns, need_labels=False)
        return other

    def subset(self, index: Sequence[int] | npt.NDArray[Any] | Tensor) -> Dataset:
        """Some of the sequences, in the order of ``index``; none of them is read.

        Args:
            index: ``(M,)`` integers (rows from 0; below 0 counts from the end) or ``(B,)`` booleans.

        Raises:
            ArgumentTypeError: neither integers nor booleans.
            ShapeError: not one-dimensional, or a mask of another length.
            IndexError: a row that does not exist.
        """
        rows = read_index(index, len(self)).numpy()
        chosen = rows if self._rows is None else self._rows[rows]
        other = copy.copy(self)
        # Half the memory, where that is enough.
        other._rows = chosen.astype(np.int32) if len(self._fragments) < 2**31 else chosen
        return other

    # As records call it.
    select = subset

    def take(self, index: Sequence[int] | npt.NDArray[Any] | Tensor) -> SequenceDataset:
        """Some of the sequences, as tensors in memory.

        Args:
            index: ``(M,)`` integers (rows from 0; below 0 counts from the end) or ``(B,)`` booleans.

        Returns:
            Its values are ``(N, input_size)`` float32 or ``(N,)`` int64; its targets, where there are labels, as
            :meth:`Preprocessor.apply` gives them.

        Raises:
            ArgumentTypeError: neither integers nor booleans.
            DataError: a file is damaged, a feature is missing where none may, or a label is unknown.
            IndexError: a row that does not exist.
        """
        rows = read_index(index, len(self)).numpy()
        if self._rows is not None:
            rows = self._rows[rows].astype(np.int64)
        found = Gathered(self._fragments, rows, self._places)
        has_words = found.layout is not None and found.layout.is_tokens
        if self._preprocessor is None and not (self._learns_labels or found.features or has_words):
            # Nothing is learned of the data, so it is not counted.
            values, offsets = as_tensor(found.values), torch.from_numpy(found.offsets)
            if self._task == "language":
                values, offsets = between_ends(values, offsets, with_last=self.forecast)
            return SequenceDataset(values, offsets, forecast=self.forecast)
        with_targets = self.forecast or self._learns_labels
        return self.preprocessor._tensors(found, with_targets=with_targets, scale=self._preprocessor is not None)

    def targets_of_all(self) -> Tensor | None:
        """The class of each sequence, of which only labels are read; or all targets, with all that is read for them."""
        if TASKS[self._task].label == "class" and not self.preprocessor.per_element:
            labels = self.labels()
            return None if labels is None else torch.from_numpy(labels)
        return self.in_memory().targets

    @property
    def _learns_labels(self) -> bool:
        return self.columns.wants_labels and not self.forecast

    def _places(self, number: int) -> Places:
        if number not in self._tables:
            if len(self._tables) > _TABLES:
                self._tables.clear()
            fragment = self._fragments.get(number)
            with_classes = self._learns_labels and fragment.labels is not None
            self._tables[number] = None, None
            # Without words nothing is learned of the data, so it is not counted.
            if fragment.words is not None or with_classes:
                self._tables[number] = self.preprocessor._places_in(fragment, with_classes=with_classes)
        return self._tables[number]
