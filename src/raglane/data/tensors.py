"""Flat tensors of sequences, their items and their batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raglane import segments
from raglane.data.columns import Columns
from raglane.data.order.limit import pieces_of
from raglane.data.prepare.statistics import Statistics
from raglane.ragged import Ragged


class Sequences(ABC):
    """The interface of a dataset that a preprocessor uses."""

    columns: Columns
    source: Path

    @abstractmethod
    def statistics_for(self, task: str) -> Statistics:
        """Return the statistics of the sequences and of the labels that a task learns."""

    @abstractmethod
    def with_preprocessor(self, preprocessor: Any, require_targets: bool = True) -> Any:
        """Return the same sequences with another preprocessor."""

    @abstractmethod
    def refuse_missing(self) -> None:
        """Raise if a feature of sequences in memory is missing."""


@dataclass(frozen=True, eq=False)
class Tensors:
    """Sequences as flat tensors on the CPU.

    Attributes:
        values: ``(N, *features)``.
        offsets: ``(B + 1,)`` int64.
        targets: ``(B, *features)``, or with ``per_element`` ``(N, *features)``; None without
            targets.
        target_offsets: ``(B + 1,)`` int64 if the target of a sequence is a sequence, of ``targets
            (M,)``; else None.
        per_element: whether there is a target per element.
        forecast: whether the target of each element is the next one, so that the last element is no
            input.
        context: ``(B,)`` int64, the number of first targets of each sequence that are NaN, in a
            forecast of numbers; None for none.
    """

    values: Tensor
    offsets: Tensor
    targets: Tensor | None = None
    per_element: bool = False
    forecast: bool = False
    context: Tensor | None = None
    target_offsets: Tensor | None = None

    def __len__(self) -> int:
        return self.offsets.shape[0] - 1

    @cached_property
    def lengths(self) -> Tensor:
        """The lengths of the inputs, ``(B,)`` int64."""
        lengths = self.offsets.diff()
        return (lengths - 1).clamp(min=0) if self.forecast else lengths

    def item(self, row: int) -> dict[str, Tensor]:
        """Return one sequence and its target as views."""
        start, end = self.offsets[row : row + 2].tolist()
        item = {"inputs": self.values[start : max(end - 1, start) if self.forecast else end]}
        if self.forecast:
            item["target"] = self.values[start + 1 : end]
            if self.context is not None:
                item["target"] = item["target"].clone()
                item["target"][: int(self.context[row])] = torch.nan
        elif self.targets is not None and self.target_offsets is not None:
            item["target"] = self.targets[slice(*self.target_offsets[row : row + 2].tolist())]
        elif self.targets is not None:
            item["target"] = self.targets[start:end] if self.per_element else self.targets[row]
        return item

    def batch(self, rows: Tensor | None = None) -> dict[str, Ragged | Tensor]:
        """Return the batch of some sequences, or of all: without a copy, unless it is a
        forecast.
        """
        values = self.values
        offsets = self.offsets
        targets = self.targets
        lengths = self.lengths
        target_offsets = self.target_offsets
        if rows is not None or self.forecast:
            rows = torch.arange(len(self)) if rows is None else rows
            lengths = lengths[rows]
            elements = segments.element_index(offsets[rows], lengths, int(lengths.sum()))
            values = values[elements]
            offsets = segments.offsets_from_lengths(lengths)
            if self.forecast:
                targets = self.values[elements + 1]
                if self.context is not None:
                    first = self.offsets[rows] + self.context[rows]
                    targets[elements < first.repeat_interleave(lengths)] = torch.nan
            else:
                targets, target_offsets = self._targets_of(rows, elements)
        # Without the checks of from_flat, because values and offsets fit together.
        inputs = Ragged._make(values, offsets, lengths)
        batch: dict[str, Ragged | Tensor] = {"inputs": inputs}
        if targets is not None and target_offsets is not None:
            batch["target"] = Ragged._make(targets, target_offsets, target_offsets.diff())
        elif targets is not None:
            batch["target"] = (
                inputs._like(targets) if self.per_element or self.forecast else targets
            )
        return batch | {"index": torch.arange(len(self)) if rows is None else rows}

    def select(self, rows: Tensor) -> Tensors:
        """Return copies of some sequences."""
        lengths = self.offsets.diff()[rows]
        elements = segments.element_index(self.offsets[rows], lengths, int(lengths.sum()))
        targets, target_offsets = self._targets_of(rows, elements)
        return replace(
            self,
            values=self.values[elements],
            offsets=segments.offsets_from_lengths(lengths),
            targets=targets,
            target_offsets=target_offsets,
            context=None if self.context is None else self.context[rows],
        )

    def _targets_of(self, rows: Tensor, elements: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the targets of some sequences, by their rows and the flat indices of their
        elements; and offsets.
        """
        if self.targets is None:
            return None, None
        if self.target_offsets is None:
            return self.targets[elements if self.per_element else rows], None
        lengths = self.target_offsets.diff()[rows]
        index = segments.element_index(self.target_offsets[rows], lengths, int(lengths.sum()))
        return self.targets[index], segments.offsets_from_lengths(lengths)

    def cut(self, longest: int) -> tuple[Tensors, Tensor]:
        """Return the sequences cut into pieces of at most ``longest`` inputs, and the row of each
        piece.
        """
        # A forecast's piece has one more element, which is only a target.
        owners, lengths = map(
            torch.from_numpy, pieces_of(self.offsets.diff().numpy(), longest + self.forecast)
        )
        targets = self.targets
        target_offsets = self.target_offsets
        if not self.per_element:
            targets, target_offsets = self._targets_of(owners, owners)
        offsets = segments.offsets_from_lengths(lengths)
        context = self.context
        if context is not None:
            context = context[owners] - (offsets[:-1] - self.offsets[owners])
        return replace(
            self, offsets=offsets, targets=targets, target_offsets=target_offsets, context=context
        ), owners
