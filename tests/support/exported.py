"""Batches for exported models, and the results of exported files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import raglane as rl

D = 3
FEW = [[3, 0, 1, 5], [1], [0, 7], [0, 0, 2], [0, 0], [300, 2, 10], [0]]
"""Lengths of batches, many of them 0."""


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
    """Run the model; return its outputs in the layout of the file, padded to ``steps`` or to the longest sequence."""
    with torch.no_grad():
        output = model(*arguments)
    found: list[Tensor] = []

    def take(part: Any) -> None:
        if isinstance(part, rl.Ragged):
            found.append(part.values if layout == "flat" else part.to_padded(total_length=steps)[0])
        elif isinstance(part, Tensor):
            found.append(part)
        else:
            for inner in part.values() if isinstance(part, dict) else part:
                take(inner)

    take(output)
    return found


def largest_error(found: list[Any], wanted: list[Tensor]) -> float:
    """Return the largest difference, relative to the largest number of its tensor."""
    worst = 0.0
    for array, tensor in zip(found, wanted, strict=True):
        assert array.shape == tuple(tensor.shape), (array.shape, tensor.shape)
        if array.size:
            expected = tensor.numpy()
            worst = max(worst, float(np.abs(array - expected).max()) / max(float(np.abs(expected).max()), 1e-3))
    return worst
