"""The numbers of a case: weights, a batch, and the gradient of its outputs."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from harness.cases import Case, Size
from raglane import cells

__all__ = ["Batch"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, eq=False)
class Batch:
    """The weights, input and output gradient of a layer, in the flat layout.

    Attributes:
        cell: a key of ``CELLS``.
        weights: by their names in the layer: ``weight_ih_l0 (G * H, D)``, ``weight_hh_l0 (G * H,
            H)`` and so on.
        values: ``(N, D)``, sequence after sequence.
        lengths: ``(B,)`` int64.
        gradient: ``(N, H)``, the gradient of a loss with respect to the outputs.
    """

    cell: str
    weights: dict[str, Tensor]
    values: Tensor
    lengths: Tensor
    gradient: Tensor

    @classmethod
    def of(cls, case: Case) -> Batch:
        """Draw the numbers of a case, which are the same in every run and for any mode, dtype and
        threads.

        Example:
            >>> from harness.cases import Size
            >>> from harness.lengths import LENGTHS
            >>> batch = Batch.of(Case("grid", "gru", Size(2, 4, 3), LENGTHS["tens"], "train", "bfloat16", 1))
            >>> batch.values.shape, batch.values.dtype, batch.weights["weight_hh_l0"].shape
            (torch.Size([20, 3]), torch.bfloat16, torch.Size([12, 4]))
        """
        size = case.size
        generator = torch.Generator("cpu").manual_seed(zlib.crc32(case.name.encode()))
        lengths = torch.tensor(case.lengths.draw(size.batch), dtype=torch.int64, device="cpu")
        total = int(lengths.sum())

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device="cpu")

        weights = _weights(case.cell, size, generator)
        batch = cls(
            case.cell, weights, normal(total, size.input), lengths, normal(total, size.hidden)
        )
        return batch.to(_DTYPES[case.dtype])

    def with_cell(self, cell: str) -> Batch:
        """Return the same input with the weights of another cell of the same sizes."""
        size = Size(len(self.lengths), self.hidden, self.values.shape[1])
        weights = _weights(
            cell, size, torch.Generator("cpu").manual_seed(zlib.crc32(cell.encode()))
        )
        return replace(self, cell=cell, weights=weights).to(self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of everything but the lengths."""
        return self.values.dtype

    @property
    def hidden(self) -> int:
        """``H``."""
        return self.gradient.shape[1]

    @property
    def elements(self) -> int:
        """``N``."""
        return self.values.shape[0]

    @property
    def longest(self) -> int:
        """``T``, the steps of a padded batch."""
        return int(self.lengths.max())

    @property
    def density(self) -> float:
        """``N / (B * T)``."""
        return self.elements / (len(self.lengths) * self.longest)

    def to(self, dtype: torch.dtype) -> Batch:
        """Return the same numbers in another dtype."""
        return replace(
            self,
            weights={name: weight.to(dtype) for name, weight in self.weights.items()},
            values=self.values.to(dtype),
            gradient=self.gradient.to(dtype),
        )

    def with_lengths(self, lengths: list[int]) -> Batch:
        """Return the first elements as sequences of other lengths."""
        total = sum(lengths)
        return replace(
            self,
            values=self.values[:total].contiguous(),
            gradient=self.gradient[:total].contiguous(),
            lengths=torch.tensor(lengths, dtype=torch.int64, device="cpu"),
        )


def _weights(cell: str, size: Size, generator: torch.Generator) -> dict[str, Tensor]:
    """Draw weights like torch's initialisation."""
    bound = size.hidden**-0.5
    shapes = cells.CELLS[cell].shapes(size.input, size.hidden)
    return {
        f"{name}_l0": torch.empty(shape, device="cpu").uniform_(-bound, bound, generator=generator)
        for name, shape in shapes.items()
        if shape is not None
    }
