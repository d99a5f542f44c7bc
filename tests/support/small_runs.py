"""Settings and data of a short training."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from made_datasets import dataset
from raglane.data import Dataset
from raglane.data.records import offsets_of
from raglane.training.settings import Settings

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
