"""A slow stand-in of kernels/cpu/prepared.py with the same interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from raglane.kernels.cpu.layer import layer_of
from raglane.kernels.cpu.programs import run
from raglane.programs.program import Program


class PreparedLayer:
    """One layer with packed weights."""

    def __init__(
        self, cell_name: str, weights: Sequence[Any], sizes: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> None:
        self.cell, self.weights, self.sizes = cell_name, tuple(weights), sizes
        width = weights[0].shape[1]
        offsets = torch.zeros(1, dtype=torch.int64)
        tensors = (weights[0].new_empty(0, width), *self.weights)
        self.layer = layer_of(cell_name, offsets, tensors, len(self.weights), sizes, 1)
        self.state_dtype = torch.float32 if weights[0].dtype is torch.bfloat16 else weights[0].dtype
        self.packed = self.layer.packed(self.weights, 0, dtype)

    def run(self, rows: Tensor, offsets: Tensor, slots: Tensor | None = None, pools: Sequence[Tensor] = ()) -> Tensor:
        """Run."""
        states = () if slots is None else tuple([pool[slots].to(rows.dtype).unsqueeze(0) for pool in pools])
        admitted = self.layer.admit(offsets, (rows, *states, *self.weights))
        result = self.layer.forward(admitted, need_output=True, save=False, need_c=False, packed=self.packed)
        if slots is not None:
            for pool, final in zip(pools, result.final, strict=True):
                pool[slots] = final[0].to(pool.dtype)
        assert result.output is not None  # noqa: S101
        return result.output


class PreparedProgram:
    """One program with packed weights."""

    def __init__(
        self,
        program: Program,
        *,
        vectors: Sequence[Tensor] = (),
        weights: Sequence[Tensor] = (),
        dtype: torch.dtype = torch.float32,
        output_dtypes: Sequence[torch.dtype] | None = None,
    ) -> None:
        self.program, self.vectors, self.weights = program, list(vectors), list(weights)
        self.dtypes, self.state_dtype = output_dtypes, dtype

    def run(
        self, rows: Sequence[Tensor], offsets: Tensor, slots: Tensor | None = None, pools: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        """Run."""
        count = offsets.shape[0] - 1
        dtype = torch.float64 if rows[0].dtype is torch.float64 else torch.float32
        states = (
            [torch.zeros(count, size, dtype=dtype) for size in self.program.given("state")]
            if slots is None
            else [pool[slots] for pool in pools]
        )
        outputs, finals = run(
            self.program,
            offsets=offsets,
            elements=rows,
            states=states,
            vectors=self.vectors,
            weights=self.weights,
            output_dtypes=self.dtypes,
        )
        if slots is not None:
            for pool, final in zip(pools, finals, strict=True):
                pool[slots] = final
        return outputs
