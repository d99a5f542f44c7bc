"""Settings, data and a callback for short trainings."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from made_datasets import dataset
from raglane.data import Dataset
from raglane.data.records import offsets_of
from raglane.training.settings import Settings
from raglane.training.state import Totals, TrainingState

QUICK = Settings(epochs=4, hidden_size=5, batch_size=4, lr=0.05, dropout=0.3, threads=1)


def small_records(count: int = 30, seed: int = 0) -> Dataset:
    """Sequences of three channels whose label is the sign of the first channel's mean."""
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 7, count)
    values = random.normal(size=(int(lengths.sum()), 3)).astype(np.float32)
    offsets = offsets_of(lengths)
    sums = [values[start:end, 0].sum() for start, end in pairwise(offsets)]
    labels = tuple("up" if total > 0 else "down" for total in sums)
    tags = np.where(values[:, 1] > 0, "high", "low").astype(object)
    return dataset(values, offsets, labels=labels, tags=tags, channels=("a", "b", "c"))


class Watcher:
    """A callback that calls a function with epoch and number of each batch, and keeps the rows of
    the history.
    """

    def __init__(self, act: Callable[[int, int], None]) -> None:
        self.act = act
        self.rows: list[dict[str, float]] = []

    def started(self, state: TrainingState, epochs: int, batches: int) -> None: ...

    def batch_done(self, epoch: int, batch: int, totals: Totals) -> None:  # noqa: ARG002
        self.act(epoch, batch)

    def epoch_done(self, row: dict[str, float], is_best: bool) -> None:  # noqa: ARG002
        self.rows.append(row)
