"""Batches of batches: sequences of sequences, such as documents of sentences of words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from raglane.ragged.batch import Ragged
from raglane.ragged.interop import check_ragged


class Nested:
    """A batch of groups of sequences, e.g. documents of sentences; ``rl.collate`` returns it.

    Args:
        inner: all M sequences, group after group.
        lengths: ``(B,)`` integers, the number of sequences of each group, with the sum M.

    Attributes:
        inner: all M sequences, a Ragged.
        outer: the number M of each sequence in the batch, a Ragged of B groups.

    Raises:
        ArgumentTypeError: ``inner`` is not a Ragged.
        ShapeError: the lengths do not add up to M.

    Example:
        >>> docs = Nested(Ragged([[5, 2, 3], [4], [7, 8]]), lengths=[2, 1])
        >>> len(docs), docs[0].tolist()
        (2, [[5, 2, 3], [4]])
        >>> sentences = docs.regroup(docs.inner.float().mean(1))  # a vector per sentence in each document
        >>> sentences.lengths.tolist()
        [2, 1]
    """

    __slots__ = ("inner", "outer")

    def __init__(self, inner: Ragged, lengths: Any) -> None:
        check_ragged("inner", inner)
        self.inner = inner
        numbers = torch.arange(len(inner), device=inner.device)
        self.outer = Ragged.from_flat(numbers, lengths=lengths)

    @classmethod
    def _of(cls, inner: Ragged, outer: Ragged) -> Nested:
        nested = cls.__new__(cls)
        nested.inner = inner
        nested.outer = outer
        return nested

    def regroup(self, rows: Tensor) -> Ragged:
        """Return one row per sequence as a batch of the groups.

        Args:
            rows: ``(M, *features)``, e.g. the last states of a layer that has read ``inner``.

        Raises:
            ArgumentTypeError: not a tensor.
            ShapeError: not one row per sequence, or on another device.
        """
        return self.outer.with_values(rows)

    def __len__(self) -> int:
        """Return B, the number of groups."""
        return len(self.outer)

    def __getitem__(self, index: int) -> Ragged:
        """Return the sequences of a group."""
        return self.inner[self.outer[index]]

    def __iter__(self) -> Iterator[Ragged]:
        """Yield the sequences of each group."""
        return (self[index] for index in range(len(self)))

    def tolist(self) -> list[Any]:
        """Return nested lists of numbers."""
        return [group.tolist() for group in self]

    def to(self, *args: Any, **kwargs: Any) -> Nested:
        """Move or convert the values, as :meth:`raglane.Ragged.to` does."""
        inner = self.inner.to(*args, **kwargs)
        return self._of(inner, self.outer.to(inner.device))

    def pin_memory(self) -> Nested:
        """Return a copy in page-locked memory, as a DataLoader with ``pin_memory=True`` does."""
        return self._of(self.inner.pin_memory(), self.outer.pin_memory())

    def __repr__(self) -> str:
        return f"Nested({len(self)} groups, inner={self.inner!r})"


pytree.register_pytree_node(
    Nested,
    lambda nested: ([nested.inner, nested.outer], None),
    lambda children, _: Nested._of(*children),
    serialized_type_name="raglane.Nested",
)
