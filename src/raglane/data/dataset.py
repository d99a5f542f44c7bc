"""Sequences as a torch dataset: flat tensors, items that are views of them, and a split into two parts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from raglane import segments
from raglane._utils.checks import (
    check_flag,
    check_kind,
    check_offsets,
    check_real,
    check_tensor,
    check_whole,
    read_index,
)
from raglane._utils.messages import argument, message
from raglane.data.collate import Samples
from raglane.data.epochs import check_least
from raglane.data.order.limit import pieces_of
from raglane.data.records import Records
from raglane.errors import ArgumentError, ShapeError
from raglane.ragged import Ragged


class Sequences(TorchDataset[dict[str, Tensor]]):
    """Sequences as a torch dataset, in memory or not: its items, and whole batches of them."""

    @abstractmethod
    def __len__(self) -> int:
        """The number of sequences."""

    @property
    @abstractmethod
    def lengths(self) -> Tensor:
        """``(B,)`` integers: the elements of each sequence's inputs."""

    @property
    @abstractmethod
    def ids(self) -> tuple[str | int, ...]:
        """One per sequence."""

    @abstractmethod
    def subset(self, index: Sequence[int] | npt.NDArray[Any] | Tensor) -> Sequences:
        """Some of the sequences, in the order of ``index``."""

    @abstractmethod
    def take(self, index: Sequence[int] | npt.NDArray[Any] | Tensor) -> SequenceDataset:
        """Some of the sequences, as tensors in memory."""

    @abstractmethod
    def targets_of_all(self) -> Tensor | None:
        """The targets of all sequences; None where there are none."""

    def in_memory(self) -> SequenceDataset:
        """All sequences, as tensors in memory."""
        return self.take(range(len(self)))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """The item of row ``index``; below 0 counts from the end."""
        index = check_whole("index", index)
        row = index + len(self) if index < 0 else index
        if not 0 <= row < len(self):
            raise IndexError(
                message(
                    "index",
                    f"{index}",
                    f"from {-len(self)} to {len(self) - 1}, for {len(self)} sequences",
                    "use an index below len(dataset)",
                )
            )
        return self._item(row)

    def _item(self, row: int) -> dict[str, Tensor]:
        return {**self.take([row])._item(0), "index": torch.tensor(row)}

    def __getitems__(self, indices: Sequence[int] | Tensor) -> Samples:
        """The items of some rows, for a DataLoader, which asks for all of a batch at once."""
        # For a list from a sampler read_index takes as long as the rest of a small batch.
        is_plain = isinstance(indices, list) and set(map(type, indices)) == {int}
        if is_plain and min(indices) >= 0 and max(indices) < len(self):
            return _Items(self, torch.tensor(indices))
        return _Items(self, read_index(indices, len(self)))

    def _batch(self, rows: Tensor) -> dict[str, Ragged | Tensor]:
        return {**self.take(rows).batch(), "index": rows}


class SequenceDataset(Sequences):
    """Sequences, and what is to be learned of them, held as flat tensors.

    An item is a dict: ``"inputs"``, ``(L, *features)``, a view of the flat values; ``"target"`` where there are
    targets, ``(*features)`` or ``(L, *features)``; ``"index"``, ``()`` int64, the row in this dataset.
    :func:`raglane.collate` makes a batch of such items, of those that a DataLoader asks for without a loop over them.

    Args:
        values: ``(N, *features)``: float32 features, or int64 token indices ``(N,)``.
        offsets: ``(B + 1,)`` int64, first 0, last ``N``.
        targets: ``(B, *features)``, one per sequence, or ``(N, *features)``, one per element; None where there are
            none.
        per_element: whether ``targets`` is one per element; ``B`` and ``N`` may be equal, so it must be said.
        forecast: whether the target of each element is the element after it, ``(L - 1, *features)``; the last of a
            sequence is no input. Then there are no other targets.
        ids: one per sequence; None numbers the rows from 0.

    The arguments are attributes too, and so is ``lengths``, ``(B,)`` int64, of the inputs.

    Raises:
        ArgumentTypeError: an argument of the wrong kind.
        ArgumentError: ``forecast`` with targets.
        ShapeError: the tensors do not fit together.

    Example:
        >>> data = SequenceDataset(torch.arange(5), torch.tensor([0, 2, 5]), torch.tensor([7, 8]))
        >>> len(data), data.lengths.tolist(), data[1]["inputs"].tolist(), data[1]["target"].item()
        (2, [2, 3], [2, 3, 4], 8)
        >>> data.subset([1])[0]["inputs"].tolist()
        [2, 3, 4]
    """

    def __init__(
        self,
        values: Tensor,
        offsets: Tensor,
        targets: Tensor | None = None,
        *,
        per_element: bool = False,
        forecast: bool = False,
        ids: Sequence[str | int] | None = None,
    ) -> None:
        total = check_tensor("values", values, 1).shape[0]
        if check_tensor("offsets", offsets).dtype != torch.int64 or offsets.dim() != 1:
            got = f"{offsets.dtype} of shape {tuple(offsets.shape)}"
            raise ShapeError(message("offsets", got, "of shape (B + 1,), int64", "pass the offsets of these values"))
        if offsets.is_cpu:
            check_offsets(offsets, total, "offsets")
        count = offsets.shape[0] - 1
        expected = total if check_flag("per_element", per_element) else count
        if check_flag("forecast", forecast) and targets is not None:
            rule = "False with targets, since a forecast predicts the elements themselves"
            raise ArgumentError(message("forecast", "True, and targets", rule, "pass either forecast or targets"))
        if targets is not None and check_tensor("targets", targets).shape[:1] != (expected,):
            rule = f"of shape ({expected}, *features), one per {'element' if per_element else 'sequence'}"
            raise ShapeError(message("targets", f"shape {tuple(targets.shape)}", rule, "pass that many"))
        if ids is not None:
            check_kind("ids", ids, Sequence, "a tuple or a list with one id per sequence", "convert them")
        if ids is not None and len(ids) != count:
            raise ShapeError(
                message("ids", f"{len(ids)}", f"one id for each of the {count} sequences", "pass that many")
            )
        self.values = values
        self.offsets = offsets
        self.targets = targets
        self.per_element = per_element
        self.forecast = forecast
        self._lengths = (offsets.diff() - 1).clamp(min=0) if forecast else offsets.diff()
        self._ids: tuple[str | int, ...] = tuple(range(count)) if ids is None else tuple(ids)

    def __len__(self) -> int:
        return self.offsets.shape[0] - 1

    @property
    def lengths(self) -> Tensor:
        """``(B,)`` int64: the elements of each sequence's inputs."""
        return self._lengths

    @property
    def ids(self) -> tuple[str | int, ...]:
        """One per sequence."""
        return self._ids

    def _item(self, row: int) -> dict[str, Tensor]:
        start, end = self.offsets[row : row + 2].tolist()
        item = {"inputs": self.values[start : max(end - 1, start) if self.forecast else end]}
        if self.forecast:
            item["target"] = self.values[start + 1 : end]
        elif self.targets is not None:
            item["target"] = self.targets[start:end] if self.per_element else self.targets[row]
        item["index"] = torch.tensor(row)
        return item

    def batch(self) -> dict[str, Ragged | Tensor]:
        """All sequences as the batch that :func:`raglane.collate` makes of them, without a copy where it can be.

        Example:
            >>> data = SequenceDataset(torch.arange(5), torch.tensor([0, 2, 5]), torch.tensor([7, 8]))
            >>> data.batch()["target"]
            tensor([7, 8])
        """
        rows = torch.arange(len(self))
        if self.forecast:
            return self._batch(rows)
        batch: dict[str, Ragged | Tensor] = {}
        # Without the checks of from_flat: they are those of the dataset.
        inputs = Ragged._make(self.values, self.offsets, self.lengths if self.lengths.is_cpu else None)
        batch["inputs"] = inputs
        if self.targets is not None:
            batch["target"] = inputs._like(self.targets) if self.per_element else self.targets
        return {**batch, "index": rows}

    def _batch(self, rows: Tensor) -> dict[str, Ragged | Tensor]:
        lengths = self._lengths[rows]
        elements = segments.element_index(self.offsets[rows], lengths, int(lengths.sum()))
        values, offsets = self.values[elements], segments.offsets_from_lengths(lengths)
        # Without the checks of from_flat: the dataset has checked what these follow from.
        inputs = Ragged._make(values, offsets.to(values.device), lengths if lengths.is_cpu else None)
        batch: dict[str, Ragged | Tensor] = {"inputs": inputs}
        if self.forecast:
            batch["target"] = inputs._like(self.values[elements + 1])
        elif self.targets is not None:
            targets = self.targets
            batch["target"] = inputs._like(targets[elements]) if self.per_element else targets[rows]
        batch["index"] = rows
        return batch

    def cut(self, longest: int) -> SequenceDataset:
        """The same elements, with every longer sequence as pieces of at most some length, which share memory with it.

        Pieces come where their sequence was, each with its id and, where there is one per sequence, with its target.
        :class:`~raglane.data.BatchSampler` takes their lengths; or those of the whole sequences, with a limit that
        splits, and numbers the pieces in the same way.

        Args:
            longest: inputs of a piece, at least 1; all but the last of a sequence are as long. The pieces of a forecast
                are cut apart between an element and its target, so each has one target less.

        Raises:
            ArgumentTypeError: not a whole number.
            ArgumentError: below 1.

        Example:
            >>> data = SequenceDataset(torch.arange(5), torch.tensor([0, 2, 5]), torch.tensor([7, 8]))
            >>> pieces = data.cut(2)
            >>> pieces.lengths.tolist(), pieces.targets.tolist(), pieces.ids
            ([2, 2, 1], [7, 8, 8], (0, 1, 1))
        """
        check_least("longest", longest, 1)
        known = self.offsets.diff().cpu().numpy()
        # An element of a forecast that is only a target makes a piece no longer.
        owners, lengths = pieces_of(known, longest + self.forecast)
        targets = self.targets
        if targets is not None and not self.per_element:
            targets = targets[torch.from_numpy(owners).to(targets.device)]
        return self._made_of(self.values, torch.from_numpy(lengths), targets, owners.tolist())

    def subset(self, index: Sequence[int] | npt.NDArray[Any] | Tensor) -> SequenceDataset:
        """Some of the sequences, in the order of ``index``, with copies of their values.

        Args:
            index: ``(M,)`` integers (rows from 0; below 0 counts from the end) or ``(B,)`` booleans.

        Raises:
            ArgumentTypeError: neither integers nor booleans.
            ShapeError: not one-dimensional, or a mask of another length.
            IndexError: a row that does not exist.
        """
        rows = read_index(index, len(self))
        lengths = self.offsets.diff()[rows]
        elements = segments.element_index(self.offsets[rows], lengths, int(lengths.sum()))
        targets = self.targets
        if targets is not None:
            targets = targets[elements if self.per_element else rows]
        return self._made_of(self.values[elements], lengths, targets, rows.tolist())

    def _made_of(self, values: Tensor, lengths: Tensor, targets: Tensor | None, rows: list[int]) -> SequenceDataset:
        """A dataset of the same kind, with the ids of these rows."""
        offsets = segments.offsets_from_lengths(lengths).to(self.offsets.device)
        ids = [self.ids[row] for row in rows]
        return SequenceDataset(values, offsets, targets, per_element=self.per_element, forecast=self.forecast, ids=ids)

    def take(self, index: Sequence[int] | npt.NDArray[Any] | Tensor) -> SequenceDataset:
        """The same as :meth:`subset`."""
        return self.subset(index)

    def targets_of_all(self) -> Tensor | None:
        """The targets."""
        return self.targets

    def in_memory(self) -> SequenceDataset:
        """The dataset itself."""
        return self


class _Items(Samples):
    """Items of a dataset, each made only when it is used."""

    def __init__(self, dataset: Sequences, rows: Tensor) -> None:
        self._dataset, self._rows = dataset, rows

    def __len__(self) -> int:
        return self._rows.shape[0]

    def __getitem__(self, place: Any) -> Any:
        rows = self._rows[place]
        return self._dataset[int(rows)] if rows.dim() == 0 else _Items(self._dataset, rows)

    def batch(self) -> dict[str, Ragged | Tensor]:
        """The batch, without a loop over the items."""
        return self._dataset._batch(self._rows)


def split(records: Records, fraction: float, seed: int = 0, stratify: bool = True) -> tuple[Records, Records]:
    """Hold a part out, at random: the rule by which a validation part is made when none is given.

    The part held out has ``round(fraction * B)`` sequences, at least 1 and at most ``B - 1``. Where the records have
    one label per sequence and ``stratify`` is true, each class gives its share, rounded by largest remainder, and keeps
    at least one sequence in the first part: a class of one stays there whole (if that leaves too few to hold out, the
    part held out is smaller). Otherwise, and where every class has one sequence only, each sequence is as likely.
    Both parts keep the order of ``records``.

    Args:
        records: at least 2 sequences.
        fraction: the share to hold out, above 0 and below 1.
        seed: 0 or above; the same seed, the same parts.
        stratify: whether each class gives its share.

    Returns:
        The part that is kept, and the part held out.

    Raises:
        ArgumentTypeError: an argument of the wrong kind.
        ArgumentError: ``fraction`` is not between 0 and 1, ``seed`` is below 0, or there are fewer than 2 sequences.

    Example:
        >>> from raglane.data.records import offsets_of
        >>> labels = ("a",) * 8 + ("b",) * 2
        >>> ten = Records(np.zeros((10, 1), np.float32), offsets_of([1] * 10), labels=labels, channels=("x0",))
        >>> kept, held_out = split(ten, 0.5)
        >>> sorted(held_out.labels)
        ['a', 'a', 'a', 'a', 'b']
    """
    check_kind("records", records, Records, "Records", "read them with rl.data.read")
    check_flag("stratify", stratify)
    classes = None
    if stratify and records.labels is not None:
        _, classes = np.unique(np.array(records.labels, dtype=object), return_inverse=True)
    mask = held_out(len(records), classes, fraction, seed)
    return records.select(~mask), records.select(mask)


def held_out(count: int, classes: npt.NDArray[np.int64] | None, fraction: float, seed: int) -> npt.NDArray[np.bool_]:
    """Which sequences :func:`split` holds out."""
    rule, fix = "above 0 and below 1", "pass e.g. 0.1"
    fraction = check_real("fraction", fraction, rule, lambda share: 0 < share < 1, fix)
    check_least("seed", seed, 0)
    if count < 2:
        got = f"{count} sequence" + "s" * (count != 1)
        fix = f"pass more data, or disable validation with {argument('validation_fraction', 0)}"
        raise ArgumentError(message("records", got, "at least 2 sequences, for two parts", fix))
    mask = np.zeros(count, dtype=np.bool_)
    size = min(max(round(fraction * count), 1), count - 1)
    shuffled = np.random.default_rng(seed).permutation(count)
    quota = np.zeros(0, dtype=np.int64)
    if classes is not None:
        classes = classes[shuffled]
        quota = _quotas(np.bincount(classes), fraction, size)
    if classes is not None and quota.any():
        # The rank of each within its class, in the shuffled order: the first `quota` of a class are held out.
        by_class = np.argsort(classes, kind="stable")
        starts = np.concatenate([[0], np.cumsum(np.bincount(classes))[:-1]])
        rank = np.empty(count, dtype=np.int64)
        rank[by_class] = np.arange(count) - starts[classes[by_class]]
        mask[shuffled[rank < quota[classes]]] = True
    else:
        mask[shuffled[:size]] = True
    return mask


def _quotas(sizes: npt.NDArray[np.int64], fraction: float, total: int) -> npt.NDArray[np.int64]:
    """How many of each class to hold out: ``(classes,)``, each below its size, ``total`` in all where that can be."""
    room = sizes - 1
    quota: npt.NDArray[np.int64] = np.minimum(np.floor(sizes * fraction).astype(np.int64), room)
    while (missing := total - int(quota.sum())) > 0 and (quota < room).any():
        remainder = np.where(quota < room, sizes * fraction - quota, -np.inf)
        most = np.argsort(-remainder, kind="stable")[: min(missing, int((quota < room).sum()))]
        quota[most] += 1
    return quota
