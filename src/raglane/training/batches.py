"""The batches of training: which sequences make each, and what a model of a task gets from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from raglane.data.chunks import Chunks
from raglane.data.collate import collate
from raglane.data.dataset import SequenceDataset
from raglane.data.samplers import BucketBatchSampler
from raglane.ragged import Ragged

__all__ = ["Batch", "ChunkedBatches", "in_order", "loader", "make_batch", "order_of_data", "training_order"]


@dataclass(frozen=True)
class Batch:
    """The sequences of a batch and what a model has to say about them.

    Args:
        inputs: sequences of ``(L, C)`` float32 or ``(L,)`` int64 tokens; for a forecast without their last element.
        targets: classify ``(B,)`` int64; tag ``(N,)`` int64; forecast ``(N, C)`` float32, the element after each.
            None where the data has none.
        index: ``(B,)`` int64, which sequences of the dataset these are; -1 where a stream of chunks has ended.
        begins: ``(B,)`` bool on the CPU, the rows that begin a sequence; None where all rows are whole sequences.

    Example:
        >>> batch = Batch(Ragged([torch.ones(3, 2)]), torch.tensor([1]), torch.tensor([0]))
        >>> batch.to(torch.device("cpu")).targets
        tensor([1])
    """

    inputs: Ragged
    targets: Tensor | None
    index: Tensor
    begins: Tensor | None = None

    def to(self, device: torch.device) -> Batch:
        """The batch on a device."""
        targets = None if self.targets is None else self.targets.to(device, non_blocking=True)
        return Batch(self.inputs.to(device, non_blocking=True), targets, self.index, self.begins)


def make_batch(samples: Sequence[Any]) -> Batch:
    """What ``rl.collate`` makes of samples, as a model and its task want it.

    Args:
        samples: of a :class:`~raglane.data.SequenceDataset`.

    Example:
        >>> values, offsets = torch.arange(12.0).view(6, 2), torch.tensor([0, 2, 6])
        >>> make_batch(SequenceDataset(values, offsets, torch.tensor([1, 0])).__getitems__([1])).targets
        tensor([0])
    """
    batch = collate(samples)
    targets = batch.get("target")
    return Batch(batch["inputs"], targets.values if isinstance(targets, Ragged) else targets, batch["index"])


class ChunkedBatches:
    """The batches of an epoch whose sequences are cut into chunks: what a loop iterates over.

    Args:
        dataset: with a target per element.
        batch_size: streams.
        steps: the most elements of a chunk.
        seed: of the run.

    Example:
        >>> data = SequenceDataset(torch.arange(5), torch.tensor([0, 5]), forecast=True)
        >>> [batch.inputs.values.tolist() for batch in ChunkedBatches(data, 1, 3, 0)]
        [[0, 1, 2], [3]]
    """

    def __init__(self, dataset: SequenceDataset, batch_size: int, steps: int, seed: int) -> None:
        whole = make_batch(dataset.__getitems__(list(range(len(dataset)))))
        targets = None if whole.targets is None else whole.inputs._like(whole.targets)
        self.chunks = Chunks(whole.inputs, batch_size, steps, targets=targets, seed=seed)
        self.first = 0

    def __len__(self) -> int:
        return len(self.chunks) - self.first

    def from_batch(self, epoch: int, first: int = 0) -> ChunkedBatches:
        """Set the epoch, from 0, and the batch of it to begin with; returns the same object."""
        self.chunks.set_epoch(epoch)
        self.chunks.load_state_dict(self.chunks.state_dict(done=first))
        self.first = first
        return self

    def __iter__(self) -> Iterator[Batch]:
        for chunk in self.chunks:
            targets = chunk.targets.values if isinstance(chunk.targets, Ragged) else None
            yield Batch(chunk.inputs, targets, chunk.sequences, chunk.begins)


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
    # One stream of random numbers per run, at a place of its own for each epoch.
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    shuffled = torch.randperm(lengths.shape[0], generator=generator)
    return [batch.tolist() for batch in torch.split(shuffled, batch_size)]


def in_order(dataset: SequenceDataset, batch_size: int) -> Iterator[Batch]:
    """All sequences in the order of the data, batch by batch.

    Args:
        dataset: the sequences.
        batch_size: sequences of a batch; the last may have fewer.
    """
    for rows in order_of_data(len(dataset), batch_size):
        yield make_batch(dataset.__getitems__(rows))


def order_of_data(count: int, batch_size: int) -> list[list[int]]:
    """Which sequences make each batch where none is shuffled.

    Example:
        >>> order_of_data(5, 2)
        [[0, 1], [2, 3], [4]]
    """
    return [list(range(start, min(start + batch_size, count))) for start in range(0, count, batch_size)]


def loader(dataset: SequenceDataset, order: list[list[int]], workers: int = 0) -> DataLoader[Any]:
    """A DataLoader that gives the batches of ``order``, each a :class:`Batch`.

    Args:
        dataset: the sequences.
        order: which of them make each batch.
        workers: processes that cut batches; 0 cuts them here.
    """
    return DataLoader(
        dataset,
        batch_sampler=order,
        collate_fn=make_batch,
        num_workers=workers,
        worker_init_fn=_ignore_stops if workers else None,
        # Its own generator: the loader draws a number at each start, and would move the one that dropout uses.
        generator=torch.Generator(),
    )


def _ignore_stops(worker: int) -> None:  # noqa: ARG001
    """Leave Ctrl-C and SIGTERM, which can reach every process of a group, to the training process."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
