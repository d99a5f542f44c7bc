"""Batches for exported models, and the results of exported files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import raglane as rl

D = 3
FEW = [[3, 0, 1, 5], [1], [0, 7], [0, 0, 2], [0, 0], [300, 2, 10], [0]]
"""Lengths of batches, many of them 0."""

# The number of steps or elements, the lengths or offsets that are passed, and those that the file
# uses instead.
FAR = 2**62
ODD: dict[str, list[tuple[int, list[int], list[int]]]] = {
    "padded": [
        (0, [], []),
        (4, [], []),
        (0, [0, 3], [0, 0]),
        (4, [0, 0], [0, 0]),
        (4, [-1, 9], [0, 4]),
    ],
    "flat": [
        (0, [0], [0]),
        (0, [0, 3, 5], [0, 0, 0]),
        (6, [2, 4, 9], [0, 4, 6]),
        (6, [-3, -1, 4, 5], [0, 0, 4, 6]),
    ],
}
ODD["padded"] += [(4, [FAR, -FAR, 1], [4, 0, 1])]
ODD["flat"] += [(6, [0, 5, 3, 4, 6], [0, 5, 5, 6, 6]), (6, [FAR, -FAR, FAR, 0], [0, 0, 6, 6])]


def a_batch(lengths: list[int], features: int = D) -> rl.Ragged:
    """Return a batch of random values."""
    return rl.Ragged.from_flat(torch.randn(sum(lengths), features), lengths=lengths)


def run_file(path: Path, layout: str, batch: rl.Ragged, **others: Tensor) -> list[Any]:
    """Run a file on a batch with ONNX Runtime."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path))
    parts = (batch.values, batch.offsets) if layout == "flat" else batch.to_padded()
    held = dict(zip(("values", "offsets" if layout == "flat" else "lengths"), parts, strict=True))
    return session.run(None, {name: part.numpy() for name, part in (held | others).items()})


def truth(model: nn.Module, layout: str, *arguments: Any, steps: int | None = None) -> list[Tensor]:
    """Run the model; return its outputs in the layout of the file, padded to ``steps`` or to the
    longest sequence.
    """
    with torch.no_grad():
        parts = pytree.tree_leaves(
            model(*arguments), is_leaf=lambda part: isinstance(part, rl.Ragged)
        )
    if layout == "flat":
        return [part.values if isinstance(part, rl.Ragged) else part for part in parts]
    return [
        part.to_padded(total_length=steps)[0] if isinstance(part, rl.Ragged) else part
        for part in parts
    ]


def largest_error(found: list[Any], wanted: list[Tensor]) -> float:
    """Return the largest difference, relative to the largest number of its tensor."""
    worst = 0.0
    for array, tensor in zip(found, wanted, strict=True):
        assert array.shape == tuple(tensor.shape), (array.shape, tensor.shape)
        gap, largest = (
            float(np.abs(part).max(initial=0)) for part in (array - tensor.numpy(), tensor.numpy())
        )
        worst = max(worst, gap / max(largest, 1e-3))
    return worst
