"""The batches of training, and rare tokens that are replaced in them."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from raglane._utils.messages import argument
from raglane.data.collation import collate
from raglane.data.dataset import Dataset
from raglane.data.order import BatchLimit, BatchSampler, EpochOrder
from raglane.data.order.tbptt import TBPTTSampler
from raglane.data.prepare.preprocess import Preprocessor
from raglane.errors import ArgumentError, DataError
from raglane.ragged import Ragged
from raglane.training.settings import Settings


@dataclass(frozen=True)
class Batch:
    """The inputs and targets of a batch."""

    inputs: Ragged
    # A Ragged for sequences of labels, which have other lengths than the inputs.
    targets: Tensor | Ragged | None
    # ``(B,)`` int64, positions in the dataset; -1 if a stream of chunks has ended.
    index: Tensor
    # ``(B,)`` bool on the CPU, the chunks that begin a sequence; None for whole sequences.
    begins: Tensor | None = None

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device."""
        targets = None if self.targets is None else self.targets.to(device, non_blocking=True)
        return Batch(self.inputs.to(device, non_blocking=True), targets, self.index, self.begins)


def targets_of(batch: Batch) -> Tensor:
    """Return the targets of a batch, one per sequence or element; raise if it has none."""
    if not isinstance(batch.targets, Tensor):
        raise ArgumentError("batch", "no targets", "a batch with targets", "pass data with labels")
    return batch.targets


def make_batch(samples: Sequence[Any]) -> Batch:
    """Return a batch of samples, collated by ``rl.collate``."""
    batch = collate(samples)
    inputs = batch["inputs"]
    targets = batch.get("target")
    # Targets per element share the offsets of the inputs.
    is_per_element = isinstance(targets, Ragged) and targets.offsets is inputs.offsets
    return Batch(inputs, targets.values if is_per_element else targets, batch["index"])


class Remaining(Sampler[Any]):
    """The remaining batches of an epoch; their number is that at the start."""

    def __init__(self, order: BatchSampler | TBPTTSampler) -> None:
        self._order = order
        self._count = len(order) - order.state_dict()["done"]

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        return iter(self._order)


class ChunkedBatches(Remaining):
    """The remaining batches of an epoch whose sequences are cut into chunks."""

    def __iter__(self) -> Iterator[Batch]:
        for chunk in super().__iter__():
            targets = chunk.targets.values if isinstance(chunk.targets, Ragged) else None
            yield Batch(chunk.inputs, targets, chunk.sequences, chunk.begins)


def chunked_order(
    dataset: Dataset, settings: Settings, rank: int = 0, ranks: int = 1
) -> TBPTTSampler:
    """Return the sampler of chunks for truncated backpropagation."""
    whole = make_batch(dataset.__getitems__(list(range(len(dataset)))))
    targets = None if whole.targets is None else whole.inputs._like(targets_of(whole))
    streams = settings.batch_size
    steps = settings.bptt_steps or 1
    return TBPTTSampler(
        whole.inputs,
        streams,
        steps,
        targets=targets,
        seed=settings.seed,
        num_replicas=ranks,
        rank=rank,
    )


def training_order(
    lengths: Tensor, settings: Settings, rank: int = 0, ranks: int = 1
) -> BatchSampler:
    """Return the batch sampler of whole sequences."""
    limit = BatchLimit(sequences=settings.batch_size)
    if settings.batch_elements is not None:
        too_long: Any = settings.too_long  # one of its choices
        limit = BatchLimit(elements=settings.batch_elements, too_long=too_long)
    kind = EpochOrder.bucketed() if settings.bucket else EpochOrder.random()
    return BatchSampler(
        lengths,
        limit,
        kind,
        seed=settings.seed,
        num_replicas=ranks,
        rank=rank,
        largest_first=settings.largest_first,
    )


def steps_per_epoch(training: Dataset, settings: Settings) -> int:
    """Return about the number of optimizer steps of an epoch."""
    elements = int(training.lengths.cpu().numpy().sum(dtype=np.int64))
    if settings.bptt_steps is not None:
        batches = elements / min(settings.batch_size, len(training)) / settings.bptt_steps
    elif settings.batch_elements is not None:
        batches = elements / settings.batch_elements
    else:
        batches = len(training) / settings.batch_size
    return max(math.ceil(math.ceil(batches) / settings.accumulate), 1)


def training_batches(
    training: Dataset, settings: Settings, rank: int, ranks: int
) -> tuple[Dataset, BatchSampler | TBPTTSampler, int]:
    """Return the sequences, possibly split, the batch sampler of a rank, and the usual number of
    elements per batch.
    """
    if settings.batch_elements is not None and settings.too_long == "chunk":
        training = training.chunk(settings.batch_elements)
    # NumPy: torch takes 36 times as long for the sum.
    mean = int(training.lengths.cpu().numpy().sum(dtype=np.int64)) / max(len(training), 1)
    if settings.bptt_steps is not None:
        chunks = chunked_order(training, settings, rank, ranks)
        return training, chunks, len(chunks.streams) * min(int(mean) + 1, settings.bptt_steps)
    order = training_order(training.lengths, settings, rank, ranks)
    if len(order) == 0 < len(training):
        got = f"{order.too_long:,} sequences, all too long for a batch"
        rule = "at least one that fits into a batch"
        fix = f"raise {argument('batch_elements')}, or pass {argument('too_long', 'split')}"
        raise DataError("data", got, rule, fix)
    return training, order, int(mean * min(order.limit.usual(mean), len(training))) // ranks


def in_order(dataset: Dataset, limit: BatchLimit) -> Iterator[Batch]:
    """Yield batches of all sequences in the order of the data."""
    for rows in batches_in_order(dataset.lengths, limit):
        yield make_batch(dataset.__getitems__(rows))


def batches_in_order(lengths: Tensor, limit: BatchLimit) -> list[list[int]]:
    """Return the sequences of each batch, without shuffling."""
    bounds = [*limit.cut(lengths.numpy()).tolist(), len(lengths)]
    return [list(range(first, end)) for first, end in pairwise(bounds) if first < end]


def validation_shares(
    validation: Dataset,
    settings: Settings,
    order: BatchSampler | TBPTTSampler,
    rank: int,
    ranks: int,
) -> list[list[int]]:
    """Return this rank's share of each validation batch; empty shares are left out."""
    limit = (
        BatchLimit(sequences=settings.batch_size)
        if isinstance(order, TBPTTSampler)
        else order.limit
    )
    shares = [rows[rank::ranks] for rows in batches_in_order(validation.lengths.cpu(), limit)]
    return [rows for rows in shares if rows]


def loader(
    dataset: Dataset, order: Sampler[list[int]] | list[list[int]], workers: int = 0
) -> DataLoader[Any]:
    """Return a DataLoader of :class:`Batch` in the order of ``order``."""
    return DataLoader(
        dataset,
        batch_sampler=order,
        collate_fn=make_batch,
        num_workers=workers,
        worker_init_fn=_ignore_stops if workers else None,
        # A separate generator: the loader draws from it, and would change the numbers that dropout
        # draws.
        generator=torch.Generator(),
    )


def _ignore_stops(worker: int) -> None:  # noqa: ARG001
    """Ignore Ctrl-C and SIGTERM, which are sent to the whole process group; the training process
    handles them.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def is_of_worker(error: Exception) -> bool:
    """Return True if an error means that a DataLoader worker died."""
    return "DataLoader worker" in str(error) or not isinstance(error, RuntimeError)


def remove_worker_handler() -> None:
    """Remove PyTorch's SIGCHLD handler, which raises repeatedly for a dead worker, even while a
    checkpoint is written.

    Without it PyTorch detects dead workers when it waits for a batch.
    """
    for _ in range(2):
        # The handler may raise here, and only the main thread has handlers.
        with suppress(RuntimeError, ValueError, AttributeError):
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)


@dataclass
class RareTokens:
    """The tokens and categories that occur once in training."""

    rare: list[Tensor]
    rate: float
    in_targets: bool

    @classmethod
    def of(
        cls, training: Dataset, preprocessor: Preprocessor, settings: Settings
    ) -> RareTokens | None:
        """Return the rare tokens of the training data; None without any, or with
        ``unk_dropout=0``.
        """
        if settings.unk_dropout == 0 or (
            preprocessor.vocabulary is None and not preprocessor.categories
        ):
            return None
        rare = _seen_once(training, preprocessor)
        for words in rare:
            # Entry 0 is the unknown token itself.
            words[0] = False
        is_any = any(bool(words.any()) for words in rare)
        return cls(rare, settings.unk_dropout, settings.task == "language") if is_any else None

    def replaced_in(self, batch: Batch) -> Batch:
        """Return the batch with randomly chosen rare tokens replaced by the unknown token."""
        inputs = batch.inputs.map(
            self._replaced if batch.inputs.values.dim() == 1 else self._replaced_columns
        )
        targets = batch.targets
        if self.in_targets and targets is not None:
            targets = self._replaced(targets_of(batch))
        return replace(batch, inputs=inputs, targets=targets)

    def _replaced_columns(self, values: Tensor) -> Tensor:
        """Replace rare categories in ``(N, columns)`` elements, whose last columns are
        categories.
        """
        first = values.shape[1] - len(self.rare)
        columns = [
            self._replaced(values[:, first + index].long(), index)
            for index in range(len(self.rare))
        ]
        return torch.cat([values[:, :first], torch.stack(columns, dim=1).to(values.dtype)], dim=1)

    def _replaced(self, tokens: Tensor, column: int = 0) -> Tensor:
        rare = self.rare[column] = self.rare[column].to(tokens.device)
        return tokens.masked_fill(
            rare[tokens] & (torch.rand(tokens.shape, device=tokens.device) < self.rate), 0
        )


def _seen_once(training: Dataset, preprocessor: Preprocessor) -> list[Tensor]:
    """Return the words of each vocabulary that occur once, as masks in the order of the columns of
    inputs.
    """
    statistics = training.statistics
    coded = [
        (encoder, encoder.vocabulary)
        for encoder in preprocessor.features
        if encoder.vocabulary is not None
    ]
    counted = [(statistics.features[encoder.name].words, words) for encoder, words in coded]
    if preprocessor.vocabulary is not None:
        counted.append((statistics.tokens, preprocessor.vocabulary))
    return [torch.tensor([counts.get(word, 0) == 1 for word in words]) for counts, words in counted]
