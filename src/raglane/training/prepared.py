"""What a run needs before its first batch: preprocessing, targets, batches and a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from raglane.data.chunks import Chunks
from raglane.data.dataset import SequenceDataset
from raglane.data.order import Batches
from raglane.data.preprocess import Preprocessor
from raglane.data.records import Records
from raglane.data.stored_dataset import Dataset
from raglane.errors import ArgumentError, DataError, argument, message, quote
from raglane.training.batches import RareTokens, chunked_order, training_order
from raglane.training.checkpoint import model_files
from raglane.training.machine import check_machine, check_size
from raglane.training.model import ModelConfig, SequenceModel
from raglane.training.ranks.group import ALONE, Ranks
from raglane.training.settings import Settings
from raglane.training.tasks import Task, fit, make_task


@dataclass(frozen=True)
class Prepared:
    """What a run needs besides its settings and its folder."""

    model: SequenceModel
    task: Task
    training: SequenceDataset | Dataset
    order: Batches | Chunks
    validation: SequenceDataset | Dataset | None
    device: torch.device
    files: Callable[[], dict[str, bytes]]
    rare: RareTokens | None


def prepare(
    settings: Settings,
    training: Records | Dataset,
    validation: Records | Dataset | None,
    test: Records | None,
    columns: Mapping[str, Any],
    ranks: Ranks = ALONE,
) -> Prepared:
    """Fit the preprocessing, and build the model."""
    device = ranks.device_of(check_machine(settings))
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    preprocessor = fit(training, settings)
    _refuse_one_class(preprocessor, training)
    task = make_task(preprocessor, settings)

    def applied(records: Records | Dataset) -> SequenceDataset | Dataset:
        dataset: SequenceDataset | Dataset = preprocessor.apply(records)
        task.check(dataset, str(records.source) if isinstance(records, Records) else "data")
        return dataset

    training_set = applied(training)
    validation_set = None if validation is None else applied(validation)
    if test is not None:
        applied(test)
    if isinstance(training_set, Dataset):
        _refuse_in_memory(settings)
    if settings.class_weights != "none":
        targets = _targets_of(training_set)
        task.class_weights = None if targets is None else task.weigh(targets)
    config = ModelConfig.of(settings, preprocessor)
    # Before sequences are split, whose pieces would count what a sequence has several times.
    rare = RareTokens.of(training_set, preprocessor, settings)
    if settings.batch_elements is not None and settings.too_long == "split" and not isinstance(training_set, Dataset):
        training_set = training_set.cut(settings.batch_elements)
    order: Batches | Chunks = (
        training_order(training_set.lengths, settings, ranks.rank, ranks.count)
        if settings.steps is None or isinstance(training_set, Dataset)
        else chunked_order(training_set, settings, ranks.rank, ranks.count)
    )
    # NumPy adds up 10**9 of 32 bits in half a second, torch in eighteen.
    mean = int(training_set.lengths.cpu().numpy().sum(dtype=np.int64)) / max(len(training_set), 1)
    if isinstance(order, Chunks):
        elements = len(order.streams) * min(int(mean) + 1, settings.steps or 1)
    else:
        elements = int(mean * min(order.limit.usual(mean), len(training_set))) // ranks.count
    if isinstance(order, Batches) and len(order) == 0 < len(training_set):
        got, rule = f"{order.too_long:,} sequences, all too long for a batch", "at least one to learn from"
        fix = f"raise {argument('batch_elements')}, or pass {argument('too_long', 'split')}"
        raise DataError(message("data", got, rule, fix))
    check_size(config, settings, device, elements)
    model = SequenceModel(config)
    return Prepared(
        model,
        task,
        training_set,
        order,
        validation_set,
        device,
        lambda: model_files(model, preprocessor, columns),
        rare,
    )


def _refuse_one_class(preprocessor: Preprocessor, training: Records | Dataset) -> None:
    """Refuse to tell apart what is all the same: any model would be right, and none would have learned."""
    labels = preprocessor.labels or ()
    if preprocessor.task in ("classify", "tag") and len(labels) == 1:
        source = str(training.source) if isinstance(training, Records) else "data"
        got, rule = f"one class throughout, {quote(labels[0])}", "at least two classes to tell apart"
        raise DataError(message(source, got, rule, "add data of another, or check which column holds the labels"))


def _refuse_in_memory(settings: Settings) -> None:
    """Refuse what is done to sequences that are in memory, where they are not."""
    there = "in memory, and those of a converted folder are not there"
    if settings.batch_elements is not None and settings.too_long == "split":
        fix = f"pass {argument('too_long', 'drop')} or {argument('too_long', 'alone')}"
        raise ArgumentError(message("too_long", "'split'", f"sequences are split {there}", fix))
    if settings.steps is not None:
        fix = f"leave {argument('steps')} out, or train on the file itself"
        raise ArgumentError(message("steps", f"{settings.steps}", f"sequences are cut into chunks {there}", fix))
    if settings.class_weights != "none" and settings.task != "classify":
        fix = f"leave {argument('class_weights')} out, or train on the file itself"
        raise ArgumentError(
            message(
                "class_weights",
                repr(settings.class_weights),
                f"labels are weighed {there}, but for one per sequence",
                fix,
            )
        )


def _targets_of(training: SequenceDataset | Dataset) -> torch.Tensor | None:
    """What there is to learn, where classes are counted."""
    if isinstance(training, SequenceDataset):
        return training.targets
    labels = training.labels()
    return None if labels is None else torch.from_numpy(labels)
