"""Scores of single sequences: the hardest ones, and the mean per range of lengths."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raglane.data.dataset import Dataset
from raglane.data.lengths import Distribution, buckets
from raglane.data.order import BatchLimit
from raglane.ragged import Ragged
from raglane.training.batches import Batch, in_order
from raglane.training.checkpoint import SavedModel
from raglane.training.inference import answering, predict
from raglane.training.tasks import make_task
from raglane.training.tasks.base import targets_of, values_of

# Sequences that are measured one by one at most, and ranges of lengths.
_MOST, _RANGES = 5_000, 6
# Tasks whose answer to a sequence is one that a line of a table can hold.
_TOLD = ("classify", "regress", "multilabel")


@dataclass(frozen=True)
class Range:
    """The sequences of some lengths: how many, and the means of the loss and the metric over what they count."""

    low: int
    high: int
    sequences: int
    loss: float
    metric: float

    def __str__(self) -> str:
        return f"{self.low:,}" if self.low == self.high else f"{self.low:,} to {self.high:,}"


@dataclass(frozen=True)
class Hard:
    """A sequence with a large loss; what it is and what the model says are texts, "" where they are too long."""

    id: str
    length: int
    loss: float
    metric: float
    true: str
    predicted: str


@dataclass(frozen=True)
class Each:
    """The scores of sequences, one by one."""

    records: Dataset
    rows: npt.NDArray[np.int64]
    loss: npt.NDArray[np.float64]
    metric: npt.NDArray[np.float64]
    count: npt.NDArray[np.float64]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """``(B,)``, of the sequences as the data has them."""
        return np.asarray(self.records.element_counts)[self.rows]

    def ranges(self) -> tuple[Range, ...]:
        """Ranges of lengths with about as many sequences each."""
        found = []
        for bucket in buckets(Distribution.of(self.lengths), _RANGES):
            of = (self.lengths >= bucket.low) & (self.lengths <= bucket.high) & (self.count > 0)
            count = self.count[of]
            if count.sum():
                loss, metric = (float(numbers[of] @ count / count.sum()) for numbers in (self.loss, self.metric))
                found.append(Range(bucket.low, bucket.high, int(of.sum()), loss, metric))
        return tuple(found)

    def hardest(self, saved: SavedModel, device: torch.device, most: int = 10) -> tuple[Hard, ...]:
        """The sequences with the largest losses, the largest first."""
        order = np.argsort(-np.nan_to_num(self.loss, nan=-1.0), kind="stable")[:most]
        order = order[self.count[order] > 0]
        chosen = self.records.subset(self.rows[order])
        told, true = [""] * len(chosen), [""] * len(chosen)
        if saved.task in _TOLD and not saved.preprocessor.per_element and len(chosen):
            told = [_said(entry) for entry in predict(saved, chosen, device=device)["prediction"]]
            known = chosen.labels if chosen.labels is not None else chosen.targets.values if chosen.targets else ()
            true = [_said(entry) for entry in known]
        return tuple(
            Hard(str(name), int(length), float(self.loss[place]), float(self.metric[place]), is_so, said)
            for name, length, place, is_so, said in zip(
                chosen.ids, chosen.element_counts.tolist(), order.tolist(), true, told, strict=True
            )
        )


def measure_each(saved: SavedModel, records: Dataset, device: torch.device, seed: int = 0) -> Each:
    """Measure a model on sequences one by one; of more than 5,000 on so many that are drawn by chance."""
    rows = drawn(records, seed)
    dataset = saved.preprocessor.apply(records.subset(rows))
    task = make_task(saved.preprocessor, saved.model.config)
    model = saved.model.to(device)
    sums: list[Tensor] = []
    with answering(model):
        for batch in in_order(dataset, BatchLimit(sequences=256)):
            output = model(batch.inputs.to(device))
            # One by one on the CPU, where a small sum costs less.
            rows_of = values_of(output).cpu()
            for one, answer in _apart(batch, rows_of, isinstance(output, Ragged)):
                score = task.score(answer, one)
                sums.append(torch.stack([part.detach().double() for part in (score.loss, score.metric, score.count)]))
    loss, metric, count = (torch.stack(sums) if sums else torch.zeros(0, 3, dtype=torch.float64)).numpy().T
    with np.errstate(invalid="ignore", divide="ignore"):
        return Each(records, rows, loss / count, metric / count, count)


def drawn(records: Dataset, seed: int = 0) -> npt.NDArray[np.int64]:
    """The sequences to measure one by one: all of them, or 5,000 that are drawn by chance."""
    rows = np.arange(len(records))
    if len(rows) > _MOST:
        rows = np.sort(np.random.default_rng(seed).choice(rows, _MOST, replace=False))
    return rows


def _apart(batch: Batch, answers: Tensor, per_element: bool) -> list[tuple[Batch, Tensor]]:
    """The sequences of a batch as batches of their own, with the answers to each."""
    ends = batch.inputs.offsets.cpu().tolist()
    targets, found = targets_of(batch), []
    for place in range(len(ends) - 1):
        elements = slice(ends[place], ends[place + 1])
        own = elements if per_element else slice(place, place + 1)
        inputs = Ragged.from_flat(batch.inputs.values[elements], lengths=[elements.stop - elements.start])
        found.append((Batch(inputs, targets[own], batch.index[place : place + 1]), answers[own]))
    return found


def _said(entry: object) -> str:
    """A label, a number, or several."""
    if isinstance(entry, np.ndarray):
        return _said(entry.tolist())
    if isinstance(entry, list | tuple | set | frozenset):
        return ", ".join(map(_said, entry))
    return f"{entry:.4g}" if isinstance(entry, float) else str(entry)
