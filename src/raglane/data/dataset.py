"""The dataset: sequences in files, tables or memory, and batches cut out of them."""

from __future__ import annotations

import copy
import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from raglane._utils.checks import as_tensor, check_kind, check_whole, read_index
from raglane._utils.messages import count_of
from raglane.data.collation import Items
from raglane.data.columns import Columns
from raglane.data.prepare.encoders import between_ends, nothing_to_learn
from raglane.data.prepare.missing import refuse_absent
from raglane.data.prepare.preprocess import Preprocessor
from raglane.data.prepare.statistics import Statistics
from raglane.data.records import NO_ROLES, Feature, Records, Targets, for_task
from raglane.data.store.fragments import StoreLayout
from raglane.data.store.gathering import Codes, Fragments, Gathered
from raglane.data.store.hashing import sequence_hashes
from raglane.data.store.stores import MemoryStore, stores_of
from raglane.data.tensors import Sequences, Tensors
from raglane.errors import ArgumentError, message
from raglane.ragged import Ragged
from raglane.tasks import TASKS

# The most fragments whose codes are cached.
_CACHED_CODES = 256

_Index = Sequence[int] | npt.NDArray[Any] | Tensor


class Dataset(TorchDataset[dict[str, Tensor]], Sequences):
    """Sequences in files, a table or memory, as a torch dataset.

    An item is a dict: ``"inputs"``, ``(L, *features)``; ``"target"`` if there are targets,
    ``(*features)`` or ``(L, *features)``; ``"index"``, ``()`` int64, the row in this dataset. A
    DataLoader with ``collate_fn=raglane.collate`` fetches all items of a batch in one call.

    Sequences that :func:`~raglane.data.read` returns are in memory. Other data is opened: only the
    current batch is in memory. A folder that :func:`~raglane.data.convert` wrote opens at once,
    whatever its size, because lengths, vocabulary, scale and classes are stored in it. Arrow files
    are mapped into memory; Parquet is read by row group. DataLoader workers open the files again by
    their paths.

    Args:
        source: a path, a pattern, a folder, a URL, or a list of these, of any format of
            :func:`~raglane.data.read`; or an object with the Arrow interface: a ``pyarrow.Table``,
            a pandas or Polars frame, a Hugging Face dataset.
        columns: which columns hold what, and the task; None guesses, for the task ``"classify"`` or
            the folder's.
        format: the name of a format, as for :func:`~raglane.data.read`; None uses the suffix.
        preprocessor: converts tokens, features and labels to tensors; None leaves features
            unchanged, and learns vocabulary and classes from all sequences.

    Attributes:
        columns: which columns hold what. A second file is read in the same way with them.
        source: the file or folder, or ``Path("data")``.
        notes: lines for the user, such as guessed columns.
        roles: which column is what, by which rule; () for data that is not in memory.
        skipped: the rows that ``on_bad_row="skip"`` left out.

    Raises:
        ArgumentTypeError: an argument of the wrong kind.
        DataError: the data cannot be read. An error within the data may be raised when that part is
            used.
        MissingExtraError: pyarrow is not installed.

    Example:
        >>> import pyarrow
        >>> table = pyarrow.table({"x": [[1.0, 2.0], [], [3.0]], "kind": ["a", "b", "a"]})
        >>> data = Dataset(table)
        >>> len(data), data.lengths.tolist(), data[2]["inputs"].tolist()
        (3, [2, 0, 1], [[3.0]])
        >>> batch = data[[2, 0]].batch()
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
        fix = "pass e.g. rl.data.Columns(label=...)"
        check_kind("columns", columns, (Columns, type(None)), "an object of Columns, or None", fix)
        fix = "fit one with rl.data.Preprocessor.fit"
        check_kind(
            "preprocessor", preprocessor, (Preprocessor, type(None)), "a Preprocessor, or None", fix
        )
        stores, self.columns = stores_of(source, columns, format)
        read = [store.in_memory for store in stores if store.in_memory is not None]
        self.notes = tuple(dict.fromkeys(note for records in read for note in records.notes))
        self.roles = read[0].roles if read else NO_ROLES
        self.skipped = tuple(row for records in read for row in records.skipped)
        # The only source, if it is in memory.
        self._in_memory = stores[0].in_memory if len(stores) == 1 else None
        self.source = Path("data") if self._in_memory is None else self._in_memory.source
        self._fragments = Fragments(stores)
        self._preprocessor = preprocessor
        self._needs_labels = self.columns.need_labels
        if self._in_memory is not None and TASKS[self.columns.task].label is not None:
            self._needs_labels &= self._in_memory.has_targets
        self._learned: Preprocessor | None = None
        self._rows: npt.NDArray[Any] | None = None
        self._records: Records | None = None
        self._tensors: Tensors | None = None
        self._lengths: npt.NDArray[Any] | None = None
        self._statistics: Statistics | None = None
        self._fragment_codes: dict[int, Codes] = {}
        # The first elements of each sequence of the source that a forecast reads without a target,
        # see `holdout.ends_held_out`; None for none.
        self._context: npt.NDArray[np.int64] | None = None
        self._is_cut = False

    def __getstate__(self) -> dict[str, Any]:
        # A DataLoader worker computes these again if it needs them.
        return {**self.__dict__, "_fragment_codes": {}, "_lengths": None, "_records": None}

    def __len__(self) -> int:
        return len(self._fragments) if self._rows is None else len(self._rows)

    def __repr__(self) -> str:
        parts = [count_of(len(self), "sequence")]
        if self._in_memory is not None:
            parts.append("tokens" if self.is_tokens else count_of(len(self.channels), "channel"))
        return f"Dataset({', '.join(parts)}; {self.source})"

    @overload
    def __getitem__(self, index: int) -> dict[str, Tensor]: ...
    @overload
    def __getitem__(self, index: list[int]) -> Items: ...
    def __getitem__(self, index: Any) -> Any:
        """Return the item of a row, or the items of a list of rows; a negative index counts from
        the end.
        """
        if isinstance(index, list):
            return self.__getitems__(index)
        index = check_whole("index", index)
        row = index + len(self) if index < 0 else index
        if not 0 <= row < len(self):
            rule = f"from {-len(self)} to {len(self) - 1}, for {len(self)} sequences"
            raise IndexError(message("index", f"{index}", rule, "use an index below len(dataset)"))
        item = self.take([row]).item(0) if self._tensors is None else self._tensors.item(row)
        return {**item, "index": torch.tensor(row)}

    def __getitems__(self, indices: Sequence[int] | Tensor) -> Items:
        """Return the items of some rows. A DataLoader calls it for each batch."""
        # The fast path for a list from a sampler: read_index takes as long as the rest of a small
        # batch.
        is_plain = isinstance(indices, list) and set(map(type, indices)) == {int}
        if is_plain and min(indices) >= 0 and max(indices) < len(self):
            return Items(self, torch.tensor(indices))
        return Items(self, read_index(indices, len(self)))

    def _batch(self, rows: Tensor) -> dict[str, Ragged | Tensor]:
        if self._tensors is not None:
            return self._tensors.batch(rows)
        return {**self.take(rows).batch(), "index": rows}

    @property
    def is_in_memory(self) -> bool:
        """True if the sequences are in memory, rather than read batch by batch."""
        return self._in_memory is not None

    @property
    def records(self) -> Records:
        """The columns of the sequences as NumPy arrays; sequences that are not in memory are
        read.
        """
        self._refuse_pieces()
        if self._in_memory is not None and self._rows is None:
            return self._in_memory
        if self._records is None:
            if self._in_memory is not None:
                self._records = self._in_memory.select(self._source_rows())
            else:
                self._records = self._fragments.records(
                    self._source_rows(), self.columns, self.source
                )
        return self._records

    @property
    def values(self) -> npt.NDArray[Any]:
        """The source's elements, ``(N, C)`` float32 with NaN for missing features, or ``(N,)``
        tokens (str).
        """
        return self.records.values

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        """The offsets of the sequences in ``values``, ``(B + 1,)``."""
        return self.records.offsets

    @property
    def labels(self) -> tuple[str, ...] | None:
        """The label of each sequence, or None."""
        return self.records.labels

    @property
    def tags(self) -> npt.NDArray[np.object_] | None:
        """The label of each element, ``(N,)`` str, or None."""
        return self.records.tags

    @property
    def targets(self) -> Targets | None:
        """The numbers or sets of labels to learn, with ``values`` of one row per sequence or per
        element; or None.
        """
        return self.records.targets

    @property
    def features(self) -> tuple[Feature, ...]:
        """The columns in addition to ``values``."""
        return self.records.features

    @property
    def _layout(self) -> StoreLayout:
        return self._fragments.layout

    @property
    def channels(self) -> tuple[str, ...]:
        """The names of the ``C`` feature columns; () for tokens."""
        return self._layout.channels

    @property
    def is_tokens(self) -> bool:
        """True if the elements are tokens rather than rows of numbers."""
        return self._layout.is_tokens

    @property
    def has_labels(self) -> bool:
        """True if there is a label per sequence."""
        return self._layout.has_labels

    @property
    def label_kinds(self) -> tuple[str, ...]:
        """The kinds of the labels, such as whole numbers; () without labels."""
        return self._layout.label_kinds

    @property
    def has_ids(self) -> bool:
        """True if the source has ids; otherwise they are row numbers."""
        return self._layout.ids != "none"

    @property
    def preprocessor(self) -> Preprocessor:
        """The preprocessor that was passed, or one learned from all sequences of the source."""
        if self._preprocessor is not None:
            return self._preprocessor
        if self._learned is None:
            counted = self.statistics if self._in_memory is None else Statistics.of(self._in_memory)
            # Without labels there are no classes to learn.
            task = (
                self.columns.task
                if self.columns.wants_labels or TASKS[self._task].label is None
                else "forecast"
            )
            self._learned = Preprocessor.fit(counted, task=task, standardize=False, missing="zero")
        return self._learned

    @property
    def statistics(self) -> Statistics:
        """The statistics of these sequences; of a subset that is not in memory, those of the whole
        source.
        """
        if self._statistics is None:
            self._statistics = (
                Statistics.of(self.records)
                if self._in_memory is not None
                else self._fragments.statistics()
            )
        return self._statistics

    def statistics_for(self, task: str) -> Statistics:
        """Return the statistics of the sequences and of the labels that a task learns."""
        self._refuse_pieces()
        if self._in_memory is None:
            return self.statistics
        records = for_task(self.records, task)
        if TASKS[task].label is not None and not records.has_targets:
            raise nothing_to_learn(str(self.source), task)
        return self.statistics if records is self.records else Statistics.of(records)

    @property
    def fingerprint(self) -> str:
        """A short text that differs for other sequences, labels or order; made of counts if they
        are not in memory.
        """
        if self._in_memory is not None:
            hashes = sequence_hashes(self.records)
            return hashlib.sha256(np.ascontiguousarray(hashes).data).hexdigest()[:16]
        digest = hashlib.sha256(json.dumps(self.statistics.to_config(), sort_keys=True).encode())
        digest.update(np.ascontiguousarray(self._all_lengths).data)
        if self._rows is not None:
            digest.update(np.ascontiguousarray(self._rows).data)
        return digest.hexdigest()[:16]

    def classes(self) -> npt.NDArray[np.int64] | None:
        """The class of each sequence, ``(B,)`` int64: its index in ``preprocessor.labels``; None
        without such labels.

        Only labels are read.
        """
        return self._fragments.labels(self._source_rows(), self._codes)

    def label_ranks(self) -> npt.NDArray[np.int64] | None:
        """The rank of each sequence's label among all labels in alphabetical order, ``(B,)``; None
        without labels.
        """
        if not self.has_labels:
            return None
        if self._in_memory is not None:
            return np.unique(np.array(self.labels, dtype=object), return_inverse=True)[1]
        classes = self.classes()
        if classes is None:
            return None
        ranks: npt.NDArray[np.int64] = np.argsort(
            np.argsort(np.array(self.preprocessor.labels, dtype=object))
        )
        return ranks[classes]

    def label_counts(self) -> Counter[str]:
        """Return the number of occurrences of each label; of sequences not in memory, only labels
        per sequence.
        """
        if self._in_memory is not None:
            return self.statistics.labels
        classes = self.classes()
        names = self.preprocessor.labels or ()
        return (
            Counter() if classes is None else Counter(names[number] for number in classes.tolist())
        )

    def refuse_missing(self) -> None:
        """Raise a :class:`~raglane.errors.DataError` if a feature of sequences in memory is
        missing.
        """
        if self._in_memory is not None and not self._in_memory.is_tokens:
            records = self.records
            refuse_absent(records.values, records.offsets, records.channels, self._where)

    def _where(self, row: int) -> tuple[str, str]:
        return self._fragments.where(int(self._source_rows()[row]))

    @property
    def forecast(self) -> bool:
        """True if the target of each element is the next element."""
        return self._needs_labels and TASKS[self._task].label is None

    @property
    def _task(self) -> str:
        return (self._preprocessor or self.columns).task

    @property
    def _learns_labels(self) -> bool:
        return self._needs_labels and TASKS[self._task].label is not None

    @property
    def lengths(self) -> Tensor:
        """The lengths of the inputs, ``(B,)`` int32 or int64: in a forecast the last element is
        only a target.
        """
        if self._tensors is not None:
            return self._tensors.lengths
        lengths = self.element_counts
        if self._task == "language":
            # Each text begins with the end token.
            return as_tensor(lengths + 1)
        return as_tensor(np.maximum(lengths - 1, 0) if self.forecast else lengths)

    @property
    def element_counts(self) -> npt.NDArray[Any]:
        """The number of elements of each sequence in the source, ``(B,)`` int32 or int64."""
        return self._all_lengths if self._rows is None else self._all_lengths[self._rows]

    @property
    def _all_lengths(self) -> npt.NDArray[Any]:
        if self._lengths is None:
            self._lengths = self._fragments.lengths()
        return self._lengths

    @property
    def ids(self) -> tuple[str | int, ...]:
        """The id of each sequence in the source, or its row number from 0."""
        rows = range(len(self)) if self._rows is None else self._rows.tolist()
        if self._in_memory is not None:
            ids = self._in_memory.ids
            return tuple(rows) if ids is None else tuple(ids[row] for row in rows)
        return tuple(map(self._fragments.id_of, rows))

    def with_preprocessor(
        self, preprocessor: Preprocessor, require_targets: bool = True
    ) -> Dataset:
        """Return the same sequences with another preprocessor, and without targets unless they are
        required.
        """
        self._refuse_pieces()
        other = copy.copy(self)
        other._preprocessor = preprocessor
        other._fragment_codes = {}
        other._tensors = None
        other._needs_labels = require_targets and (
            self._in_memory is not None or self._needs_labels
        )
        if self._in_memory is not None:
            records = for_task(
                self._in_memory, preprocessor.task if require_targets else "forecast"
            )
            if records is not self._in_memory:
                other._in_memory = records
                other._fragments = Fragments([MemoryStore(records)])
                other._records = None
            other._tensors = other._read(self._source_rows())
        return other

    def _refuse_pieces(self) -> None:
        """Raise if the sequences were cut, because the source has whole sequences instead of the
        pieces.
        """
        if self._is_cut:
            fix = "read columns, fit and apply a preprocessor first, then cut; rl.fit cuts with too_long='chunk'"
            raise ArgumentError("data", "the pieces of Dataset.cut", "whole sequences", fix)

    def subset(self, index: _Index) -> Dataset:
        """Return some of the sequences, in the order of ``index``, without reading them.

        Args:
            index: ``(M,)`` integers (a negative one counts from the end) or ``(B,)`` booleans.

        Raises:
            ArgumentTypeError: neither integers nor booleans.
            ShapeError: not one-dimensional, or a mask of another length.
            IndexError: a row that does not exist.
        """
        rows = read_index(index, len(self))
        return self._rows_of(rows, None if self._tensors is None else self._tensors.select(rows))

    def chunk(self, max_length: int) -> Dataset:
        """Return the same elements, in memory, with longer sequences cut into pieces.

        Read columns such as ``labels``, and apply a preprocessor, before. The pieces of a sequence
        are in its place. Each has the sequence's id and, with a target per sequence, its target. A
        :class:`~raglane.data.BatchSampler` takes the lengths of the pieces; or, except in a
        forecast, those of the whole sequences, with a limit that splits, which numbers the pieces
        in the same way.

        Args:
            max_length: the length of a piece, at least 1; only the last piece of a sequence may be
                shorter. In a forecast a piece ends between an element and its target, so it has one
                target less.

        Raises:
            ArgumentTypeError: not a whole number.
            ArgumentError: below 1.

        Example:
            >>> from raglane.data import read
            >>> pieces = read([[0.0, 0.1], [0.2, 0.3, 0.4]], labels=["a", "b"]).chunk(2)
            >>> pieces.lengths.tolist(), [item["target"].item() for item in pieces], pieces.ids
            ([2, 2, 1], [0, 1, 1], (0, 1, 1))
        """
        tensors, owners = self.tensors().cut(check_whole("max_length", max_length, 1))
        pieces = self._rows_of(owners, tensors)
        pieces._is_cut = True
        return pieces

    def _rows_of(self, rows: Tensor, tensors: Tensors | None) -> Dataset:
        chosen = rows.numpy() if self._rows is None else self._rows[rows.numpy()]
        other = copy.copy(self)
        # int32 takes half the memory.
        other._rows = chosen.astype(np.int32) if len(self._fragments) < 2**31 else chosen
        other._tensors = tensors
        other._records = None
        if self._in_memory is not None:
            other._statistics = None
        return other

    def take(self, index: _Index) -> Tensors:
        """Return some of the sequences as flat tensors.

        Args:
            index: as :meth:`subset` accepts it.

        Returns:
            An object with ``values``, ``(N, input_size)`` float32 or ``(N,)`` int64; ``offsets``,
            ``(M + 1,)`` int64; ``lengths``, ``(M,)`` int64; ``targets``, as
            :meth:`Preprocessor.apply` describes them, or None; and ``batch()``, which returns the
            batch of :func:`raglane.collate`.

        Raises:
            ArgumentTypeError: neither integers nor booleans.
            DataError: a damaged file, a missing feature under ``missing="raise"``, or an unknown
                label.
            IndexError: a row that does not exist.
        """
        rows = read_index(index, len(self))
        return (
            self._read(self._source_rows()[rows.numpy()])
            if self._tensors is None
            else self._tensors.select(rows)
        )

    def tensors(self) -> Tensors:
        """Return all sequences as flat tensors, see :meth:`take`."""
        return self._read(self._source_rows()) if self._tensors is None else self._tensors

    def batch(self) -> dict[str, Ragged | Tensor]:
        """Return all sequences as the batch that :func:`raglane.collate` makes of them.

        Example:
            >>> from raglane.data import read
            >>> read([[0.5], [0.25, 0.75]], labels=["b", "a"]).batch()["target"]
            tensor([1, 0])
        """
        return self.tensors().batch()

    def _source_rows(self) -> npt.NDArray[np.int64]:
        return (
            np.arange(len(self._fragments)) if self._rows is None else self._rows.astype(np.int64)
        )

    def _read(self, rows: npt.NDArray[np.int64]) -> Tensors:
        """Return rows of the source as tensors."""
        gathered = Gathered(self._fragments, rows, self._codes)
        has_words = gathered.layout is not None and gathered.layout.is_tokens
        if self._preprocessor is None and not (
            self._learns_labels or gathered.features or has_words
        ):
            # Nothing is learned, so that the source need not be counted.
            values = as_tensor(gathered.values)
            offsets = torch.from_numpy(gathered.offsets)
            if self._task == "language":
                values, offsets = between_ends(values, offsets, with_last=self.forecast)
            return Tensors(values, offsets, forecast=self.forecast)
        with_targets = self.forecast or self._learns_labels
        tensors = self.preprocessor._tensors(
            gathered, with_targets=with_targets, scale=self._preprocessor is not None
        )
        if self._context is None:
            return tensors
        return replace(tensors, context=torch.from_numpy(self._context[rows]))

    def targets_of_all(self) -> Tensor | None:
        """Return the targets of all sequences; for classes of sequences only labels are read."""
        if (
            self._tensors is None
            and TASKS[self._task].label == "class"
            and not self.preprocessor.per_element
        ):
            classes = self.classes()
            return None if classes is None else torch.from_numpy(classes)
        return self.tensors().targets

    def _codes(self, number: int) -> Codes:
        if number not in self._fragment_codes:
            if len(self._fragment_codes) > _CACHED_CODES:
                self._fragment_codes.clear()
            fragment = self._fragments.get(number)
            with_classes = self._learns_labels and fragment.labels is not None
            self._fragment_codes[number] = Codes(None, None)
            # Without words nothing is learned, so that the source need not be counted.
            if fragment.words is not None or with_classes:
                self._fragment_codes[number] = self.preprocessor._codes_of(
                    fragment, with_classes=with_classes
                )
        return self._fragment_codes[number]
