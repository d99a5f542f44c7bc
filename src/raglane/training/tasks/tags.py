"""Tagging, with scores of entities: labels such as ``B-PER`` and ``I-PER``, which mark runs of
elements.

IOB1, IOB2, IOE, BIOES and BILOU are read by one rule, that of the shared task of CoNLL-2000: an
entity begins at ``B`` and ``S``, at another type, after ``O``, and after ``E`` and ``S``. It ends
where the next one begins, or at ``O``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from raglane.data.dataset import Dataset
from raglane.data.prepare.encoders import IGNORED, IGNORED_CLASS, without_ignored
from raglane.ragged import Ragged
from raglane.training.batches import Batch, targets_of
from raglane.training.settings import ModelSettings
from raglane.training.tasks.base import Measured, Score
from raglane.training.tasks.labels import Classify, Confusion

_is_label = re.compile(r"O|[BIESLUM](-.+)?").fullmatch
# The last and the only element of an entity are E and S, or L and U.
_SAME = {"L": "E", "U": "S", "M": "I"}


class Tag(Classify):
    """One class per element; elements of the class -100 do not count, and entities are scored."""

    def score(self, output: Tensor | Ragged, batch: Batch, *, training: bool = False) -> Score:
        """Return cross-entropy and accuracy of logits ``(N, K)``."""
        score = super().score(output, batch, training=training)
        return replace(score, count=(targets_of(batch) != IGNORED_CLASS).sum())

    @staticmethod
    def notes(training: Dataset, validation: Dataset | None, settings: ModelSettings) -> list[str]:  # noqa: ARG004
        """Return a line on the elements that do not count."""
        counts = training.statistics_for(settings.task).labels
        if len(without_ignored(counts, settings.task)) == len(counts):
            return []
        share = f"{counts[IGNORED]:,} of {sum(counts.values()):,} elements"
        return [f"labels: {IGNORED} is no class: {share} of the training part do not count"]

    def meter(self, model: Any, records: Dataset, top: int = 1) -> Confusion:
        """Return a meter of the confusion matrix, and of entities if the labels mark them."""
        labels = self.preprocessor.labels or ()
        return Entities(labels, top) if are_entities(labels) else super().meter(model, records, top)


def are_entities(labels: Sequence[str]) -> bool:
    """Return True if labels are parts of entities, at least one of them with a type."""
    return all(map(_is_label, labels)) and any("-" in label for label in labels)


class Entities(Confusion):
    """Counts the entities in the labels, in the predictions, and in both."""

    def __init__(self, labels: tuple[str, ...], top: int) -> None:
        super().__init__(labels, top)
        marks = [_SAME.get(label[0], label[0]) for label in labels]
        names = [label[1:].split("-", 1)[-1] or "_" for label in labels]
        self.types = sorted({name for name, mark in zip(names, marks, strict=True) if mark != "O"})
        self._type = torch.tensor([self.types.index(n) if n in self.types else -1 for n in names])
        self._is_inside = torch.tensor([mark != "O" for mark in marks])
        self._begins = torch.tensor([mark in "BS" for mark in marks])
        self._ends = torch.tensor([mark in "ES" for mark in marks])
        # Rows: in the labels, in the predictions, in both.
        self.counts = torch.zeros((3, len(self.types)), dtype=torch.int64)

    def add(self, output: Tensor, batch: Batch) -> None:
        """Add a batch and its logits ``(N, K)``."""
        super().add(output, batch)
        offsets = batch.inputs.offsets.cpu()
        true = self._spans(targets_of(batch).cpu(), offsets)
        predicted = self._spans(output.argmax(-1).cpu(), offsets)
        both = true[(true == predicted).all(1)]
        for row, spans in enumerate((true, predicted, both)):
            types = spans[spans[:, 1] >= 0, 1]
            self.counts[row] += torch.bincount(types, minlength=len(self.types))

    def _spans(self, classes: Tensor, offsets: Tensor) -> Tensor:
        """Return ``(N, 2)`` int64: the end and the type of the entity that begins at an element; -1
        for other elements.
        """
        count = len(classes)
        spans = torch.full((count, 2), -1)
        if count == 0:
            return spans
        is_first = torch.zeros(count, dtype=torch.bool)
        is_first[offsets[:-1][offsets.diff() > 0]] = True
        is_inside = self._is_inside[classes]
        types = self._type[classes]
        is_open = (is_inside & ~self._ends[classes]).roll(1) & ~is_first
        is_new = is_inside & (self._begins[classes] | ~is_open | (types != types.roll(1)))
        starts = is_new.nonzero().squeeze(1)
        breaks = (is_new | ~is_inside | is_first).nonzero().squeeze(1)
        ends = torch.cat([breaks, torch.tensor([count])])
        spans[starts, 0] = ends[torch.searchsorted(breaks, starts, right=True)]
        spans[starts, 1] = types[starts]
        return spans

    def measured(self) -> Measured:
        """Return scores over all entities, and a row for each type."""
        measured = super().measured()
        every = torch.cat([self.counts.sum(1, keepdim=True), self.counts], dim=1).double()
        true, predicted, both = every
        scores = {
            "f1": 2 * both / (true + predicted).clamp(min=1),
            "precision": both / predicted.clamp(min=1),
            "recall": both / true.clamp(min=1),
        }
        names = {"entity_f1": "f1", "entity_precision": "precision", "entity_recall": "recall"}
        numbers = measured.numbers | {name: float(scores[key][0]) for name, key in names.items()}
        table = tuple(
            {"label": name, **{key: float(score[place]) for key, score in scores.items()}}
            | {"count": int(true[place])}
            for place, name in enumerate(self.types, 1)
        )
        return Measured(numbers, measured.labels, measured.confusion, table)
