"""Scores of single sequences: the sequences with the largest losses, and means per range of
lengths.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raglane.data.dataset import Dataset
from raglane.data.order import BatchLimit
from raglane.data.prepare.lengths import LengthCounts, buckets
from raglane.data.splitting import join_tokens
from raglane.ragged import Ragged
from raglane.training.batches import Batch, in_order, targets_of
from raglane.training.checkpoint import SavedModel
from raglane.training.inference import answering, predict
from raglane.training.tasks import make_task
from raglane.training.tasks.base import values_of

# The maximum number of sequences.
_MOST = 5_000
# The number of ranges of lengths.
_RANGES = 6
# Tasks whose prediction for a sequence fits into a row of a table.
_SHORT = ("classify", "regress", "multilabel", "transcribe")


class LengthRange(NamedTuple):
    """The number, mean loss and mean metric of the sequences in a range of lengths."""

    low: int
    high: int
    sequences: int
    loss: float
    metric: float

    def __str__(self) -> str:
        return f"{self.low:,}" if self.low == self.high else f"{self.low:,} to {self.high:,}"


class HardSequence(NamedTuple):
    """A sequence with a large loss; target and prediction are texts, empty for tasks with long
    ones.
    """

    id: str
    length: int
    loss: float
    metric: float
    true: str
    predicted: str


@dataclass(frozen=True)
class SequenceScores:
    """The scores of single sequences."""

    records: Dataset
    rows: npt.NDArray[np.int64]
    loss: npt.NDArray[np.float64]
    metric: npt.NDArray[np.float64]
    count: npt.NDArray[np.float64]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """The lengths of the sequences, ``(B,)``."""
        return np.asarray(self.records.element_counts)[self.rows]

    def ranges(self) -> tuple[LengthRange, ...]:
        """Return ranges of lengths with about equal numbers of sequences."""
        ranges = []
        for bucket in buckets(LengthCounts.of(self.lengths), _RANGES):
            of = (self.lengths >= bucket.low) & (self.lengths <= bucket.high) & (self.count > 0)
            count = self.count[of]
            if count.sum():
                loss, metric = (
                    float(numbers[of] @ count / count.sum()) for numbers in (self.loss, self.metric)
                )
                ranges.append(LengthRange(bucket.low, bucket.high, int(of.sum()), loss, metric))
        return tuple(ranges)

    def hardest(
        self, saved: SavedModel, device: torch.device, most: int = 10
    ) -> tuple[HardSequence, ...]:
        """Return the sequences with the largest losses, in descending order."""
        order = np.argsort(-np.nan_to_num(self.loss, nan=-1.0), kind="stable")[:most]
        order = order[self.count[order] > 0]
        chosen = self.records.subset(self.rows[order])
        predicted = [""] * len(chosen)
        true = [""] * len(chosen)
        if saved.task in _SHORT and not saved.preprocessor.per_element and len(chosen):
            predicted = [
                _format(entry) for entry in predict(saved, chosen, device=device)["prediction"]
            ]
            split = saved.preprocessor.label_split
            true = [
                _format(entry) if split is None else join_tokens(entry, split)
                for entry in _true_entries(chosen)
            ]
        return tuple(
            HardSequence(
                str(name),
                int(length),
                float(self.loss[index]),
                float(self.metric[index]),
                target,
                prediction,
            )
            for name, length, index, target, prediction in zip(
                chosen.ids,
                chosen.element_counts.tolist(),
                order.tolist(),
                true,
                predicted,
                strict=True,
            )
        )


def measure_sequences(
    saved: SavedModel, records: Dataset, device: torch.device, seed: int = 0
) -> SequenceScores:
    """Measure a model on each sequence, or on 5,000 random ones."""
    rows = sampled_rows(records, seed)
    dataset = saved.preprocessor.apply(records.subset(rows))
    task = make_task(saved.preprocessor, saved.model.config, saved.model)
    model = saved.model.to(device)
    sums: list[Tensor] = []
    with answering(model):
        for batch in in_order(dataset, BatchLimit(sequences=256)):
            output = model(batch.inputs.to(device))
            # On the CPU, where small sums are faster.
            rows_of = values_of(output).cpu()
            for single, answer in _apart(batch, rows_of, isinstance(output, Ragged)):
                score = task.score(answer, single)
                sums.append(
                    torch.stack(
                        [
                            tensor.detach().double()
                            for tensor in (score.loss, score.metric, score.count)
                        ]
                    )
                )
    loss, metric, count = (
        (torch.stack(sums) if sums else torch.zeros(0, 3, dtype=torch.float64)).numpy().T
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        return SequenceScores(records, rows, loss / count, metric / count, count)


def sampled_rows(records: Dataset, seed: int) -> npt.NDArray[np.int64]:
    """Return the sequences to measure: all, or 5,000 random ones, in order."""
    rows = np.arange(len(records))
    if len(rows) > _MOST:
        rows = np.sort(np.random.default_rng(seed).choice(rows, _MOST, replace=False))
    return rows


def _apart(batch: Batch, answers: Tensor, per_element: bool) -> list[tuple[Batch, Tensor]]:
    """Return each sequence of a batch as a batch, with the outputs of the model for it."""
    ends = batch.inputs.offsets.cpu().tolist()
    pairs = []
    for sequence in range(len(ends) - 1):
        elements = slice(ends[sequence], ends[sequence + 1])
        rows = elements if per_element else slice(sequence, sequence + 1)
        inputs = Ragged.from_flat(
            batch.inputs.values[elements], lengths=[elements.stop - elements.start]
        )
        index = batch.index[sequence : sequence + 1]
        targets = batch.targets
        targets = (
            targets.select([sequence]) if isinstance(targets, Ragged) else targets_of(batch)[rows]
        )
        pairs.append((Batch(inputs, targets, index), answers[rows]))
    return pairs


def _true_entries(records: Dataset) -> Iterable[Any]:
    """Return the label or target of each sequence; nothing without them."""
    if records.labels is not None:
        return records.labels
    return () if records.targets is None else records.targets.values


def _format(entry: object) -> str:
    """Format a label, a number, or a list of them."""
    if isinstance(entry, np.ndarray):
        return _format(entry.tolist())
    if isinstance(entry, list | tuple | set | frozenset):
        return ", ".join(map(_format, entry))
    return f"{entry:.4g}" if isinstance(entry, float) else str(entry)
