"""A model as stages, which run on the rows of elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raglane._utils.checks import check_unchanged
from raglane.kernels.cpu.prepared import Runner
from raglane.streams.stages import Stage


@dataclass(frozen=True, eq=False)
class Prepared:
    """A model as stages."""

    stages: tuple[Stage, ...]
    features: tuple[int, ...]  # the shape of an element
    dtype: torch.dtype  # of the elements: int64 for tokens
    tokens: int  # the number of tokens; 0 for numbers
    output: int  # the index of the result among the rows
    output_features: tuple[int, ...]
    output_dtype: torch.dtype
    digest: bytes

    @property
    def width(self) -> int:
        """The numbers of an element."""
        return math.prod(self.features)

    @property
    def output_width(self) -> int:
        """The numbers of a result."""
        return math.prod(self.output_features)

    @property
    def starts(self) -> tuple[Tensor, ...]:
        """The first states of a stream, in the order of the pools."""
        return tuple([start for stage in self.stages for start in stage.starts])

    def pools(self, slots: int) -> list[list[Tensor]]:
        """Return the pools of each stage."""
        return [stage.kernel.pools(slots) for stage in self.stages]

    def begin(self, pools: Sequence[Sequence[Tensor]], slots: Tensor | slice = slice(None)) -> None:
        """Write the first states to slots."""
        for stage, stage_pools in zip(self.stages, pools, strict=True):
            for start, pool in zip(stage.starts, stage_pools, strict=True):
                pool[slots] = start

    def runner(self, pools: list[list[Tensor]], threads: int | None = None) -> Runner:
        """Return a runner of the stages; ``rows[self.output]`` is its result."""
        stages = [(stage.kernel, stage.reads) for stage in self.stages]
        return Runner(stages, self.width, self.dtype, pools, threads)

    def run_whole(self, rows: Tensor, offsets: Tensor, threads: int | None = None) -> Tensor:
        """Return the output of each row of whole sequences."""
        check_unchanged(offsets, rows.shape[0], rows.device)
        elements = rows.shape[0]
        sequences = len(offsets) - 1
        pools = self.pools(sequences)
        self.begin(pools)
        runner = self.runner(pools, threads)
        runner.reserve(elements, sequences)
        runner.rows[0][:elements] = rows
        runner.offsets[: sequences + 1] = offsets.numpy()
        runner.slots[:sequences] = np.arange(sequences)
        runner.run(elements, sequences)
        return runner.rows[self.output][:elements]

    @property
    def facts(self) -> tuple[Any, ...]:
        """The shapes and dtypes of frames and results, and the number of tokens."""
        return self.features, self.dtype, self.tokens, self.output_features, self.output_dtype
