"""The training and the validation part: the latter is given, or held out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from raglane.data.dataset import held_out, split
from raglane.data.missing import refuse_missing
from raglane.data.records import Records
from raglane.data.stored_dataset import Dataset
from raglane.errors import count_of
from raglane.training.settings import Settings


def hold_out(records: Records, fraction: float, seed: int) -> tuple[Records, Records]:
    """Split off a validation part that holds no label and no tag which the training part lacks.

    A sequence with a label or a tag that only the held-out part has goes back to the training part: a model can
    neither learn nor be measured on what it has never seen.
    """
    numbered = replace(records, ids=tuple(range(len(records))))
    kept, apart = split(numbered, fraction, seed)
    rows = np.array(apart.ids, dtype=np.int64)
    if apart.labels is not None and kept.labels is not None:
        rows = rows[_known(apart.labels, kept.labels)]
    elif apart.tags is not None and kept.tags is not None:
        rows = rows[_all_in_each(_known(apart.tags.tolist(), kept.tags.tolist()), apart.offsets)]
    elif apart.targets is not None and kept.targets is not None and not kept.targets.is_numbers:
        seen = set(chain.from_iterable(kept.targets.values))
        known = np.array([seen.issuperset(labels) for labels in apart.targets.values], dtype=np.bool_)
        rows = rows[_all_in_each(known, apart.offsets) if apart.targets.per_element else known]
    mask = np.zeros(len(records), dtype=np.bool_)
    mask[rows] = True
    return records.select(~mask), records.select(mask)


def _all_in_each(holds: NDArray[np.bool_], offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
    """For each sequence, whether something holds of all its elements."""
    broken = np.add.accumulate(np.concatenate([[0], ~holds]))
    all_hold: NDArray[np.bool_] = broken[offsets[1:]] == broken[offsets[:-1]]
    return all_hold


def _known(words: Iterable[str], there: Iterable[str]) -> NDArray[np.bool_]:
    """For each word, whether it is there too; as objects, since NumPy makes room in each for the longest."""
    known = set(there)
    return np.array([word in known for word in words], dtype=np.bool_)


def divide(
    records: Records | Dataset, validation: Records | None, settings: Settings, where: str, validation_from: str = ""
) -> tuple[Records | Dataset, Records | Dataset | None, tuple[str, ...]]:
    """The training and the validation part, and a line on each."""
    rule = "none; the training loss decides which epoch is best"
    if validation is not None:
        rule = f"{count_of(len(validation), 'sequence')} of {validation_from}"
    if isinstance(records, Dataset):
        return _divide_stored(records, validation, settings, where, rule)
    training = records
    if validation is None and settings.validation_fraction > 0:
        if settings.missing == "error" and not records.is_tokens:
            # Before the split, after which rows have other numbers.
            refuse_missing(records)
        training, validation = hold_out(records, settings.validation_fraction, settings.seed)
        how = "stratified by label, " if records.labels is not None and settings.task == "classify" else ""
        share = f"{100 * settings.validation_fraction:g} % of the training sequences"
        rule = f"{count_of(len(validation), 'sequence')}, {share}, {how}seed {settings.seed}"
        if len(validation) == 0:
            validation, rule = None, "none: each sequence held out has a label or a tag that no other has"
    what = "tokens" if training.is_tokens else f"elements of {count_of(len(training.channels), 'channel')}"
    if training.features:
        what += f" and {', '.join(f'{feature.name} ({feature.kind})' for feature in training.features)}"
    found = f"training: {count_of(len(training), 'sequence')}, {len(training.values):,} {what}, from {where}"
    return training, validation, (found, f"validation: {rule}")


def _divide_stored(
    training: Dataset, validation: Records | Dataset | None, settings: Settings, where: str, rule: str
) -> tuple[Dataset, Records | Dataset | None, tuple[str, ...]]:
    """The same of a folder that was converted, which is not read: vocabulary, scale and classes stand beside it."""
    what = "tokens" if training.statistics.tokens else "elements"
    if validation is None and settings.validation_fraction > 0:
        classes = training.labels() if settings.task == "classify" else None
        if classes is not None:
            # In the order of their texts, as split has them: so the parts are those of data that was not converted.
            classes = np.argsort(np.argsort(np.array(training.preprocessor.labels, dtype=object)))[classes]
        mask = held_out(len(training), classes, settings.validation_fraction, settings.seed)
        training, validation = training.subset(~mask), training.subset(mask)
        share = f"{100 * settings.validation_fraction:g} % of the training sequences"
        how = "" if classes is None else "stratified by label, "
        rule = f"{count_of(len(validation), 'sequence')}, {share}, {how}seed {settings.seed}; "
        rule += "vocabulary and scale were counted of all, these too"
    # NumPy adds up 10**9 of 32 bits in half a second, torch in eighteen.
    elements = int(training.lengths.numpy().sum(dtype=np.int64))
    found = f"training: {count_of(len(training), 'sequence')}, {elements:,} {what}, batch by batch from {where}"
    return training, validation, (found, f"validation: {rule}")
