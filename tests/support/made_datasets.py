"""Datasets in memory that tests make of arrays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from raglane.data import Dataset
from raglane.data.records import Records
from raglane.data.tensors import Tensors

__all__ = ["changed", "dataset", "of_tensors"]


def dataset(values: npt.NDArray[Any], offsets: npt.NDArray[np.int64], **columns: Any) -> Dataset:
    """Return a dataset of sequences in memory; ``columns`` are those of Records."""
    return Dataset(Records(values, offsets, **columns))


def changed(data: Dataset, **columns: Any) -> Dataset:
    """Return a dataset in memory with other columns."""
    return Dataset(replace(data.records, **columns))


def of_tensors(
    values: Tensor,
    offsets: Tensor,
    targets: Tensor | None = None,
    *,
    per_element: bool = False,
    forecast: bool = False,
    ids: tuple[str | int, ...] | None = None,
) -> Dataset:
    """Return a dataset with these tensors."""
    data = dataset(
        np.zeros((int(offsets[-1]), 1), np.float32), offsets.numpy(), channels=("x",), ids=ids
    )
    data._tensors = Tensors(values, offsets, targets, per_element, forecast)
    return data
