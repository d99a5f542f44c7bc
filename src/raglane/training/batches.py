"""Batches cut from the flat store of a dataset: index arithmetic, no loop over sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from raglane.data.dataset import SequenceDataset
from raglane.data.samplers import BucketBatchSampler
from raglane.ragged import Ragged
from raglane.segments import plain as segments

__all__ = ["Batch", "BatchStore", "in_order", "loader", "training_order"]


@dataclass(frozen=True)
class Batch:
    """The sequences of a batch and what a model has to say about them.

    Args:
        inputs: sequences of ``(L, C)`` float32 or ``(L,)`` int64 tokens; for a forecast without their last element.
        targets: classify ``(B,)`` int64; tag ``(N,)`` int64; forecast ``(N, C)`` float32, the element after each.
            None where the data has none.
        index: ``(B,)`` int64, which sequences of the dataset these are.

    Example:
        >>> batch = Batch(Ragged([torch.ones(3, 2)]), torch.tensor([1]), torch.tensor([0]))
        >>> batch.to(torch.device("cpu")).targets
        tensor([1])
    """

    inputs: Ragged
    targets: Tensor | None
    index: Tensor

    def to(self, device: torch.device) -> Batch:
        """The batch on a device."""
        targets = None if self.targets is None else self.targets.to(device, non_blocking=True)
        return Batch(self.inputs.to(device, non_blocking=True), targets, self.index)


class BatchStore(Dataset[Batch]):
    """A dataset that gives whole batches: a DataLoader asks it for all sequences of a batch at once.

    Args:
        dataset: flat values, offsets and targets.
        task: ``classify``, ``tag`` or ``forecast``.

    Example:
        >>> from raglane.data.dataset import SequenceDataset
        >>> values, offsets = torch.arange(12.0).view(6, 2), torch.tensor([0, 2, 6])
        >>> store = BatchStore(SequenceDataset(values, offsets, torch.tensor([1, 0])), "classify")
        >>> store.__getitems__([1]).inputs.lengths
        tensor([4])
    """

    def __init__(self, dataset: SequenceDataset, task: str) -> None:
        self._dataset = dataset
        self._task = task

    def __len__(self) -> int:
        return len(self._dataset)

    @property
    def lengths(self) -> Tensor:
        """``(B,)`` int64 on the CPU."""
        return self._dataset.lengths

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """The sequences of ``indices`` as one batch, in that order."""
        dataset = self._dataset
        index = torch.as_tensor(indices, dtype=torch.int64)
        starts, lengths = dataset.offsets[index], dataset.lengths[index]
        targets: Tensor | None
        if self._task == "forecast":
            lengths = (lengths - 1).clamp(min=0)
        elements = segments.element_index(starts, lengths, int(lengths.sum()))
        inputs = Ragged.from_flat(dataset.values[elements], lengths=lengths)
        if self._task == "forecast":
            targets = dataset.values[elements + 1]
        elif dataset.targets is None:
            targets = None
        else:
            targets = dataset.targets[index if self._task == "classify" else elements]
        return Batch(inputs, targets, index)


def training_order(lengths: Tensor, batch_size: int, *, bucket: bool, seed: int, epoch: int) -> list[list[int]]:
    """Which sequences make each batch of an epoch: shuffled anew, and the same for the same seed and epoch.

    Args:
        lengths: ``(B,)`` int64.
        batch_size: sequences of a batch; the last may have fewer.
        bucket: batches of similar lengths.
        seed: of the run.
        epoch: from 0.

    Example:
        >>> order = training_order(torch.tensor([3, 1, 2]), 2, bucket=False, seed=0, epoch=0)
        >>> [len(batch) for batch in order], sorted(sum(order, []))
        ([2, 1], [0, 1, 2])
    """
    if bucket:
        sampler = BucketBatchSampler(lengths, batch_size, shuffle=True, seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler)
    # One stream of random numbers a run, at a place of its own for each epoch.
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    shuffled = torch.randperm(lengths.shape[0], generator=generator)
    return [batch.tolist() for batch in torch.split(shuffled, batch_size)]


def in_order(store: BatchStore, batch_size: int) -> Iterator[Batch]:
    """All sequences in the order of the data, batch by batch.

    Args:
        store: the sequences.
        batch_size: sequences of a batch; the last may have fewer.
    """
    for start in range(0, len(store), batch_size):
        yield store.__getitems__(range(start, min(start + batch_size, len(store))))


def loader(store: BatchStore, order: list[list[int]], workers: int = 0) -> DataLoader[Batch]:
    """A DataLoader that gives the batches of ``order``.

    Args:
        store: the sequences.
        order: which of them make each batch.
        workers: processes that cut batches; 0 cuts them here.
    """
    return DataLoader(
        store,
        batch_sampler=order,
        collate_fn=_as_it_is,
        num_workers=workers,
        worker_init_fn=_ignore_stops if workers else None,
        # Its own generator: the loader draws a number at each start, and would move the one that dropout uses.
        generator=torch.Generator(),
    )


def _as_it_is(batch: Any) -> Any:
    return batch


def _ignore_stops(worker: int) -> None:  # noqa: ARG001
    """Leave Ctrl-C and SIGTERM, which can reach every process of a group, to the training process."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
