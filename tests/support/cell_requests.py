"""Random weights and states of any cell, and comparisons of results."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from raglane.cells import CellSpec


def random_weights(
    cell: CellSpec,
    input_size: int,
    hidden_size: int,
    bias: bool = True,
    dtype: torch.dtype = torch.float64,
    device: torch.device | None = None,
    projection: int = 0,
) -> Any:
    """Return weights that require gradients, of one layer in one direction."""
    return cell.weights_type(
        *(
            None
            if shape is None
            else torch.randn(shape, dtype=torch.float64, device=device)
            .mul(0.6)
            .to(dtype)
            .requires_grad_()
            for shape in cell.shapes(input_size, hidden_size, bias, projection).values()
        )
    )


def possible(cell: CellSpec, state: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Turn random states into valid ones: the normalizer of an sLSTM is positive."""
    return tuple(
        part.abs() + 0.5 if name == "n" else part
        for name, part in zip(cell.states, state, strict=True)
    )


def largest_error(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference, relative to the largest value."""
    assert ours.shape == theirs.shape
    if not theirs.numel():
        return 0.0
    ours, theirs = ours.detach(), theirs.detach()
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1))


def squares(parts: Iterable[Tensor]) -> Tensor:
    """Return the sum of all squares."""
    return torch.stack([part.square().sum() for part in parts]).sum()
