"""The batches of training: their sequences, their inputs and targets, and rare tokens that are hidden in them."""

from __future__ import annotations

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

from raglane._utils.messages import argument, message
from raglane.data.collate import collate
from raglane.data.dataset import Dataset
from raglane.data.order import BatchLimit, BatchSampler, EpochOrder
from raglane.data.preprocess import Preprocessor
from raglane.data.tbptt import TBPTTSampler
from raglane.errors import DataError
from raglane.ragged import Ragged
from raglane.training.settings import Settings


@dataclass(frozen=True)
class Batch:
    """The sequences of a batch and what a model has to say about them."""

    inputs: Ragged
    targets: Tensor | None
    # ``(B,)`` int64, places in the dataset; -1 where a stream of chunks has ended.
    index: Tensor
    # ``(B,)`` bool on the CPU, the rows that begin a sequence; None where all rows are whole sequences.
    begins: Tensor | None = None

    def to(self, device: torch.device) -> Batch:
        """The batch on a device."""
        targets = None if self.targets is None else self.targets.to(device, non_blocking=True)
        return Batch(self.inputs.to(device, non_blocking=True), targets, self.index, self.begins)


def make_batch(samples: Sequence[Any]) -> Batch:
    """A batch of samples, collated by ``rl.collate``."""
    batch = collate(samples)
    targets = batch.get("target")
    return Batch(batch["inputs"], targets.values if isinstance(targets, Ragged) else targets, batch["index"])


class ChunkedBatches:
    """The batches that are left of an epoch whose sequences are cut into chunks: what a loop iterates over."""

    def __init__(self, chunks: TBPTTSampler) -> None:
        self._chunks = chunks
        self._count = len(chunks) - chunks.state_dict()["done"]

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Batch]:
        for chunk in self._chunks:
            targets = chunk.targets.values if isinstance(chunk.targets, Ragged) else None
            yield Batch(chunk.inputs, targets, chunk.sequences, chunk.begins)


def chunked_order(dataset: Dataset, settings: Settings, rank: int = 0, ranks: int = 1) -> TBPTTSampler:
    """The chunks of a training, epoch after epoch."""
    whole = make_batch(dataset.__getitems__(list(range(len(dataset)))))
    targets = None if whole.targets is None else whole.inputs._like(whole.targets)
    streams, steps = settings.batch_size, settings.bptt_steps or 1
    return TBPTTSampler(whole.inputs, streams, steps, targets=targets, seed=settings.seed, ranks=ranks, rank=rank)


def training_order(lengths: Tensor, settings: Settings, rank: int = 0, ranks: int = 1) -> BatchSampler:
    """The batches of a training, epoch after epoch."""
    limit = BatchLimit(sequences=settings.batch_size)
    if settings.batch_elements is not None:
        limit = BatchLimit(elements=settings.batch_elements, too_long=settings.too_long)
    kind = EpochOrder.grouped() if settings.bucket else EpochOrder.random()
    shared = {"rank": rank, "ranks": ranks}
    return BatchSampler(lengths, limit, kind, seed=settings.seed, largest_first=settings.largest_first, **shared)


def training_batches(
    training: Dataset, settings: Settings, rank: int, ranks: int
) -> tuple[Dataset, BatchSampler | TBPTTSampler, int]:
    """The sequences as batches have them, the batches of a rank, and how many elements one usually has."""
    if settings.batch_elements is not None and settings.too_long == "split":
        training = training.cut(settings.batch_elements)
    # NumPy adds up 10**9 of 32 bits in half a second, torch in eighteen.
    mean = int(training.lengths.cpu().numpy().sum(dtype=np.int64)) / max(len(training), 1)
    if settings.bptt_steps is not None:
        chunks = chunked_order(training, settings, rank, ranks)
        return training, chunks, len(chunks.streams) * min(int(mean) + 1, settings.bptt_steps)
    order = training_order(training.lengths, settings, rank, ranks)
    if len(order) == 0 < len(training):
        got, rule = (
            f"{order.too_long:,} sequences, all too long for a batch",
            "data with at least one sequence that fits a batch",
        )
        fix = f"raise {argument('batch_elements')}, or pass {argument('too_long', 'split')}"
        raise DataError(message("data", got, rule, fix))
    return training, order, int(mean * min(order.limit.usual(mean), len(training))) // ranks


class Remaining(Sampler[list[int]]):
    """The batches that are left of an epoch; their number is that at the start."""

    def __init__(self, order: BatchSampler) -> None:
        self._order = order
        self._count = len(order) - order.state_dict()["done"]

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._order)


def in_order(dataset: Dataset, limit: BatchLimit) -> Iterator[Batch]:
    """All sequences in the order of the data, batch by batch."""
    for rows in order_of_data(dataset.lengths, limit):
        yield make_batch(dataset.__getitems__(rows))


def order_of_data(lengths: Tensor, limit: BatchLimit) -> list[list[int]]:
    """Which sequences make each batch where none is shuffled."""
    bounds = [*limit.cut(lengths.numpy()).tolist(), len(lengths)]
    return [list(range(first, end)) for first, end in pairwise(bounds) if first < end]


def shares_of(
    validation: Dataset, settings: Settings, order: BatchSampler | TBPTTSampler, rank: int, ranks: int
) -> list[list[int]]:
    """The batches of the validation part: of each this rank's share. A rank that has none of any has no batches."""
    limit = BatchLimit(sequences=settings.batch_size) if isinstance(order, TBPTTSampler) else order.limit
    shares = [rows[rank::ranks] for rows in order_of_data(validation.lengths.cpu(), limit)]
    return [rows for rows in shares if rows]


def loader(dataset: Dataset, order: Sampler[list[int]] | list[list[int]], workers: int = 0) -> DataLoader[Any]:
    """A DataLoader that gives the batches of ``order``, each a :class:`Batch`."""
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def is_of_worker(error: Exception) -> bool:
    """True for the error of a worker that has gone: PyTorch's, or that of the pipe to it."""
    return "DataLoader worker" in str(error) or not isinstance(error, RuntimeError)


def hear_no_more_of_workers() -> None:
    """Without PyTorch's handler, which raises for a worker that has gone again and again, within a checkpoint, too.

    It only tells earlier what PyTorch sees when it waits for a batch, and so is not set again.
    """
    for _ in range(2):
        # It may be about to raise; and only the main thread has handlers.
        with suppress(RuntimeError, ValueError, AttributeError):
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)


@dataclass
class RareTokens:
    """The tokens and categories that occur once in training."""

    rare: list[Tensor]
    rate: float
    in_targets: bool

    @classmethod
    def of(cls, training: Dataset, preprocessor: Preprocessor, settings: Settings) -> RareTokens | None:
        """Those of the training part; None where there are none, or none is to be hidden."""
        if settings.unk_dropout == 0 or (preprocessor.vocabulary is None and not preprocessor.categories):
            return None
        rare = _seen_once(training, preprocessor)
        for words in rare:
            # The unknown token itself.
            words[0] = False
        is_any = any(bool(words.any()) for words in rare)
        return cls(rare, settings.unk_dropout, settings.task == "language") if is_any else None

    def hidden_in(self, batch: Batch) -> Batch:
        """The batch with some of them, drawn anew, as the unknown token."""
        inputs = batch.inputs.map(self._hidden if batch.inputs.values.dim() == 1 else self._hidden_columns)
        targets = batch.targets
        if self.in_targets and targets is not None:
            targets = self._hidden(targets)
        return replace(batch, inputs=inputs, targets=targets)

    def _hidden_columns(self, values: Tensor) -> Tensor:
        """The same of rows of numbers, whose last columns are places of categories."""
        first = values.shape[1] - len(self.rare)
        columns = [self._hidden(values[:, first + place].long(), place) for place in range(len(self.rare))]
        return torch.cat([values[:, :first], torch.stack(columns, dim=1).to(values.dtype)], dim=1)

    def _hidden(self, tokens: Tensor, column: int = 0) -> Tensor:
        rare = self.rare[column] = self.rare[column].to(tokens.device)
        drawn = torch.rand(tokens.shape, device=tokens.device) < self.rate
        return tokens.masked_fill(rare[tokens] & drawn, 0)


def _seen_once(training: Dataset, preprocessor: Preprocessor) -> list[Tensor]:
    """Return the words of each vocabulary that occur once, as masks in the order of the columns of inputs."""
    known = training.statistics
    coded = [(encoder, encoder.vocabulary) for encoder in preprocessor.features if encoder.vocabulary is not None]
    counted = [(known.features[encoder.name].words, words) for encoder, words in coded]
    if preprocessor.vocabulary is not None:
        counted.append((known.tokens, preprocessor.vocabulary))
    return [torch.tensor([counts.get(word, 0) == 1 for word in words]) for counts, words in counted]
