"""Our layer as ``rl.export.onnx`` writes it, in ONNX Runtime: the price of leaving Raglane.
Inference in float32.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

from harness.batch import Batch
from harness.competitors import onnx_engines, ours
from harness.competitors.base import Answer, Runner, rows_of
from raglane import export
from raglane.ragged import Ragged

__all__ = ["exported"]


def exported(layout: Literal["padded", "flat"]) -> Callable[[Batch, str, int], Runner]:
    """Return the function that prepares the exported layer for batches of a layout."""

    def prepare(batch: Batch, mode: str, threads: int) -> Runner:  # noqa: ARG001
        given = Ragged.from_flat(batch.values, lengths=batch.lengths)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "layer.onnx")
            export.onnx(ours.load_layer(batch), path, example=given, layout=layout, verify=False)
            session = onnx_engines.session_of(path.read_bytes(), threads)
        padded, lengths = given.to_padded()
        held = {"values": padded, "lengths": lengths}
        if layout == "flat":
            held = {"values": given.values, "offsets": given.offsets}
        call, outputs = onnx_engines.bound(
            session, {name: part.numpy() for name, part in held.items()}
        )

        def answer() -> Answer:
            output, *state = (torch.from_numpy(part) for part in outputs())
            flat = output if layout == "flat" else rows_of(output.transpose(0, 1), batch.lengths)
            return Answer(flat, tuple(part[0] for part in state))

        return Runner(call, answer, held)

    return prepare
