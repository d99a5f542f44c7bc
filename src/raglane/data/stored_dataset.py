"""Sequences where they are stored, as a torch dataset: batches are cut out of files that need not fit in memory."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from raglane._utils.arrays import as_tensor
from raglane._utils.checks import check_kind, check_whole, read_index
from raglane.data.collate import Samples
from raglane.data.dataset import SequenceDataset
from raglane.data.encoders import between_ends
from raglane.data.gathering import Gathered, KeptParts, Places
from raglane.data.preprocess import Preprocessor
from raglane.data.records import TASKS, Columns
from raglane.data.statistics import Counted, Statistics
from raglane.data.stores import stores_of
from raglane.errors import message

# Parts of whose words the places are kept.
_TABLES = 256


class Dataset(TorchDataset[dict[str, Tensor]], Counted):
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
        self._parts = KeptParts(stores)
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
        return len(self._parts) if self._rows is None else len(self._rows)

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
            self._statistics = self._parts.statistics()
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
        rows = np.arange(len(self._parts)) if self._rows is None else self._rows.astype(np.int64)
        return self._parts.labels(rows, self._places)

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
            self._lengths = self._parts.lengths()
        return self._lengths

    @property
    def ids(self) -> tuple[str | int, ...]:
        """One per sequence, those of the data, or the row numbers from 0 where it has none."""
        rows = range(len(self)) if self._rows is None else self._rows.tolist()
        return tuple(map(self._parts.id_of, rows))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """The item of row ``index``; below 0 counts from the end."""
        index = check_whole("index", index)
        row = index + len(self) if index < 0 else index
        if not 0 <= row < len(self):
            raise IndexError(message("index", f"{index}", f"there are {len(self)} sequences", "see len(dataset)"))
        return {**self.take([row])[0], "index": torch.tensor(row)}

    def __getitems__(self, indices: Sequence[int] | Tensor) -> Samples:
        """The items of some rows, for a DataLoader, which asks for all of a batch at once."""
        return _Items(self, read_index(indices, len(self)))

    def with_preprocessor(self, preprocessor: Preprocessor) -> Dataset:
        """The same sequences, turned into tensors in another way."""
        other = copy.copy(self)
        other._preprocessor = preprocessor
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
        other._rows = chosen.astype(np.int32) if len(self._parts) < 2**31 else chosen
        return other

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
        found = Gathered(self._parts, rows, self._places)
        learns = self.columns.wants_labels and not self.forecast
        if learns:
            found.check_targets(self.columns.task)
        if self._preprocessor is not None:
            found.preprocess(self._preprocessor)
        targets = None if found.targets is None else torch.from_numpy(found.targets)
        per_element = found.has_tags
        if learns and found.sets_or_numbers is not None and TASKS[self._task].label != "class":
            targets, per_element = found.encoded(self.preprocessor), bool(self.preprocessor.per_element)
        inputs, offsets = as_tensor(found.values), torch.from_numpy(found.offsets)
        if found.features:
            inputs = found.beside(self.preprocessor, inputs)
        if self._task == "language":
            inputs, offsets = between_ends(inputs, offsets, with_last=self.forecast)
        return SequenceDataset(
            inputs, offsets, targets, per_element=targets is not None and per_element, forecast=self.forecast
        )

    def _places(self, number: int) -> Places:
        """What the words of a part are to the model: the places of its tokens and of its labels."""
        if number not in self._tables:
            if len(self._tables) > _TABLES:
                self._tables.clear()
            part = self._parts.get(number)
            tokens = None if part.words is None else self.preprocessor.token_places(part.words)
            wanted = part.labels is not None and self.columns.wants_labels and not self.forecast
            labels = self.preprocessor.class_places(part.label_words) if wanted else None
            self._tables[number] = tokens, labels
        return self._tables[number]


class _Items(Samples):
    """Items of a dataset, each made only when somebody takes it."""

    def __init__(self, dataset: Dataset, rows: Tensor) -> None:
        self._dataset, self._rows = dataset, rows

    def __len__(self) -> int:
        return self._rows.shape[0]

    def __getitem__(self, place: Any) -> Any:
        rows = self._rows[place]
        return self._dataset[int(rows)] if rows.dim() == 0 else _Items(self._dataset, rows)

    def batch(self) -> dict[str, Any]:
        """The batch, cut out of the files."""
        return {**self._dataset.take(self._rows).batch(), "index": self._rows}
