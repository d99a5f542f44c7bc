"""The parts of the data of a training: training, validation and test."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

from raglane._utils.messages import count_of
from raglane.data.dataset import Dataset
from raglane.data.holdout import elements_held_out, ends_held_out, held_out
from raglane.data.records import note_empty, note_single
from raglane.runs.sources import SequenceSource, Sources
from raglane.training.settings import Settings

Log = Callable[[str], None]


def read_parts(
    sources: Sources, records: Dataset, settings: Settings, log: Log
) -> tuple[Dataset, Dataset | None, Dataset | None]:
    """Return the training, validation and test parts; all are read before training, to report
    errors early.
    """
    if (single := note_single(records.element_counts, records.is_tokens)) is not None:
        log(single)
    given_validation = (
        None if sources.validation is None else _read(sources.validation, settings, log)
    )
    where = "" if sources.validation is None else sources.validation.where
    training, validation, notes = _divide(
        records, given_validation, settings, sources.training.where, where
    )
    for note in notes:
        log(note)
    test = None if sources.test is None else _read(sources.test, settings, log)
    for name, source, dataset in (
        ("validation", sources.validation, given_validation),
        ("test", sources.test, test),
    ):
        if source is not None and dataset is not None and (count := _repeated(records, dataset)):
            of = f"{count_of(len(dataset), 'sequence')} of {source.where}"
            log(f"{name}: {count:,} of {of} are also in the training data")
    if test is None and sources.training.is_default:
        test = sources.training.read(settings.task, role="test")
    return training, validation, test


def _repeated(training: Dataset, other: Dataset) -> int:
    """Return the number of sequences of a part with the elements of one for training; 0 if not in
    memory.
    """
    if not training.is_in_memory or not other.is_in_memory:
        return 0

    def hashes(data: Dataset) -> Iterator[int]:
        cut = (
            data.records.values[start:end]
            for start, end in pairwise(data.offsets.tolist())
            if end > start
        )
        return (hash(tuple(elements) if data.is_tokens else elements.tobytes()) for elements in cut)

    seen = set(hashes(training))
    return sum(elements in seen for elements in hashes(other))


def _read(source: SequenceSource, settings: Settings, log: Log) -> Dataset:
    records = source.read(settings.task)
    if settings.task == "classify" and (note := note_empty(records.records)):
        log(f"{source.where}: {note}")
    return records


def hold_out(data: Dataset, fraction: float, seed: int) -> tuple[Dataset, Dataset]:
    """Split off a validation part. Sequences with labels or tags unseen in training return to the
    training part.

    The labels of sequences that are not in memory are not compared. In a forecast of one sequence,
    and of sequences with times, the ends are held out.
    """
    if data.columns.task == "forecast" and data.is_in_memory and _are_series(data):
        return ends_held_out(data, fraction)
    mask = held_out(data, fraction, seed)
    remaining = data.subset(~mask)
    apart = data.subset(mask)
    if not data.is_in_memory:
        return remaining, apart
    rows = np.flatnonzero(mask)
    if apart.labels is not None and remaining.labels is not None:
        rows = rows[_known(apart.labels, remaining.labels)]
    elif apart.tags is not None and remaining.tags is not None:
        rows = rows[
            _all_elements(_known(apart.tags.tolist(), remaining.tags.tolist()), apart.offsets)
        ]
    elif (
        apart.targets is not None
        and remaining.targets is not None
        and remaining.targets.kind == "set"
    ):
        seen = set(chain.from_iterable(remaining.targets.values))
        is_known = np.array(
            [seen.issuperset(labels) for labels in apart.targets.values], dtype=np.bool_
        )
        rows = rows[
            _all_elements(is_known, apart.offsets) if apart.targets.per_element else is_known
        ]
    if len(rows) == len(apart):
        return remaining, apart
    mask[:] = False
    mask[rows] = True
    return data.subset(~mask), data.subset(mask)


def _are_series(data: Dataset) -> bool:
    """Return True for one sequence, and for a panel: sequences with times."""
    return len(data) == 1 or data.records.times is not None


def _all_elements(holds: NDArray[np.bool_], offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return for each sequence whether all its elements are True."""
    broken = np.add.accumulate(np.concatenate([[0], ~holds]))
    return broken[offsets[1:]] == broken[offsets[:-1]]


def _known(words: Iterable[str], others: Iterable[str]) -> NDArray[np.bool_]:
    """Return for each word whether it is among others; NumPy's arrays of strings would have the
    longest width.
    """
    vocabulary = set(others)
    return np.array([word in vocabulary for word in words], dtype=np.bool_)


def _divide(
    data: Dataset, validation: Dataset | None, settings: Settings, where: str, validation_from: str
) -> tuple[Dataset, Dataset | None, tuple[str, ...]]:
    """Return the training and the validation part, and a line on each."""
    training = data
    rule = "none; the training loss decides which epoch is best"
    if validation is not None:
        rule = f"{count_of(len(validation), 'sequence')} of {validation_from}"
    elif settings.validation_fraction > 0:
        training, validation, rule = _held_out(data, settings)
    # NumPy adds up 10**9 numbers of 32 bits in half a second, torch in eighteen.
    elements = int(training.element_counts.sum(dtype=np.int64))
    how = "" if data.is_in_memory else "batch by batch "
    sequences = count_of(len(training), "sequence")
    line = f"training: {sequences}, {elements:,} {_elements_in_words(training)}, {how}from {where}"
    return training, validation, (line, f"validation: {rule}")


def _held_out(data: Dataset, settings: Settings) -> tuple[Dataset, Dataset | None, str]:
    """Return the training and the validation part, and the rule of the split in words."""
    if settings.missing == "raise":
        # Before the split, so that the message counts in all sequences.
        data.refuse_missing()
    training, validation = hold_out(data, settings.validation_fraction, settings.seed)
    if len(validation) == 0:
        return training, None, "none: each sequence held out has a label or a tag that no other has"
    percent = f"{100 * settings.validation_fraction:g} %"
    is_stratified = data.has_labels and settings.task == "classify"
    how = "stratified by label, " if is_stratified else ""
    rule = (
        f"{count_of(len(validation), 'sequence')}, {percent} of the training sequences, "
        f"{how}seed {settings.seed}"
    )
    if is_stratified:
        classes = training.label_counts().keys()
        absent = classes - validation.label_counts().keys()
        rule += f", without {len(absent)} of {len(classes)} classes" if absent else ""
    if elements_held_out(validation):
        rule = f"the end of the sequence, {percent} of its elements"
        if len(data) > 1:
            rule = f"the ends of {len(validation):,} sequences, {percent} of their elements"
    if not data.is_in_memory:
        rule += "; vocabulary and scale are those stored in the folder, of all its sequences"
    return training, validation, rule


def _elements_in_words(training: Dataset) -> str:
    """Return the kind of the elements, with channels and further features of data in memory."""
    words = "tokens" if training.is_tokens else "elements"
    if not training.is_in_memory:
        return words
    if not training.is_tokens:
        words += f" of {count_of(len(training.channels), 'channel')}"
    features = ", ".join(f"{feature.name} ({feature.kind})" for feature in training.features)
    return f"{words} and {features}" if features else words
