"""Which sequences of a batch are drawn, and what stands in their elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError, message, printable, quote
from raglane.ragged import Ragged
from raglane.schedules.base import longest
from raglane.schedules.costs import lengths_of
from raglane.segments import offsets_from_lengths

__all__ = ["MOST_SEQUENCES", "Sample", "read_labels"]

MOST_SEQUENCES = 200
"""Sequences that a picture shows."""

# Elements of a drawn batch, padding included: tables of a few hundred megabytes.
_MOST_ELEMENTS = 2**23


@dataclass(frozen=True, eq=False)
class Sample:
    """The sequences that a picture draws.

    Attributes:
        all: ``(B,)``, the lengths of the whole batch.
        index: ``(D,)``, which of them are drawn, ascending.
        lengths: ``(D,)``, theirs.
        starts: the number in the values of the first element of each drawn sequence.
        labels: the text in each element of each drawn sequence, or None for the element's number in the values.
    """

    all: Tensor
    index: Tensor
    lengths: Tensor
    starts: list[int]
    labels: list[list[str]] | None = None

    @classmethod
    def read(cls, lengths: Any, labels: Any = None) -> Sample:
        """Choose from lengths of any kind, and check the labels, where there are some.

        Example:
            >>> sample = Sample.read([3] * 1000)
            >>> sample.lengths.shape, sample.index[-1].item(), sample.remark
            (torch.Size([200]), 999, '; 200 of 1,000 sequences drawn')
        """
        known = lengths_of(lengths)
        count = known.shape[0]
        most = min(count, MOST_SEQUENCES)
        index = (torch.arange(most, device="cpu") * (count - 1)).div(max(most - 1, 1), rounding_mode="floor")
        drawn = known[index]
        elements = most * longest(drawn)
        if elements > _MOST_ELEMENTS:
            rule = f"at most {_MOST_ELEMENTS:,} elements in the padded batch that is drawn"
            raise ArgumentError(message("lengths", f"{elements:,}", rule, "draw fewer sequences, or their first steps"))
        starts = offsets_from_lengths(known)[index].tolist()
        return cls(known, index, drawn, starts, None if labels is None else read_labels(labels, known, index))

    @property
    def steps(self) -> int:
        """The longest length that is drawn."""
        return longest(self.lengths)

    @property
    def remark(self) -> str:
        """What a picture says where it leaves sequences out."""
        count = self.all.shape[0]
        return f"; {MOST_SEQUENCES} of {count:,} sequences drawn" if count > MOST_SEQUENCES else ""

    def text(self, sequence: int, step: int) -> str:
        """What stands in an element of a drawn sequence."""
        return str(self.starts[sequence] + step) if self.labels is None else self.labels[sequence][step]

    def names(self) -> list[str]:
        """The number of each drawn sequence in the caller's order."""
        return [str(number) for number in self.index.tolist()]


def read_labels(labels: Any, lengths: Tensor, index: Tensor) -> list[list[str]]:
    """The labels of the sequences that are drawn, as texts of printable characters.

    Example:
        >>> read_labels(["ab", ["c"]], torch.tensor([2, 1]), torch.tensor([1]))
        [['c']]
    """
    if isinstance(labels, Ragged) and labels.features == ():
        labels = labels.to_list()
    rule, fix = "one label for each element", "pass for each sequence a list of its labels"
    if not isinstance(labels, Sequence) or isinstance(labels, str | bytes):
        raise ArgumentTypeError(message("labels", quote(labels), rule, fix))
    if len(labels) != lengths.shape[0]:
        raise ShapeError(message("labels", f"{len(labels)} lists", f"{rule}, and {lengths.shape[0]} sequences", fix))
    read = []
    for place in index.tolist():
        one = labels[place].tolist() if isinstance(labels[place], Tensor) else labels[place]
        if not isinstance(one, Sequence) or isinstance(one, bytes):
            raise ArgumentTypeError(message("labels", f"{quote(one)} for sequence {place}", rule, fix))
        if len(one) != int(lengths[place]):
            got = f"{len(one)} for sequence {place}"
            raise ShapeError(message("labels", got, f"{rule}, and it has {int(lengths[place])}", fix))
        read.append([printable(f"{text:g}" if isinstance(text, float) else str(text)) for text in one])
    return read
