"""The competitors: one file each, and one line in ``COMPETITORS``."""

from __future__ import annotations

from typing import Literal

from harness.cases import ELEMENTWISE, TORCH_CELLS
from harness.competitors import exported, jax_scan, onnx_engines, ours, plain_cells, pytorch
from harness.competitors.base import Competitor

__all__ = ["COMPETITORS", "RIVALS", "TORCH"]

_FLOAT32 = ("float32",)
_LAYOUTS: tuple[Literal["padded", "flat"], ...] = ("padded", "flat")

COMPETITORS: dict[str, Competitor] = {
    competitor.name: competitor
    for competitor in (
        Competitor("ours", "rl.nn's layer on a Ragged batch", ours.ragged, "ours"),
        Competitor(
            "ours-packed",
            "a layer after rl.accelerate, on a PackedSequence",
            ours.packed,
            "ours",
            cells=TORCH_CELLS,
        ),
        Competitor(
            "ours-padded",
            "a layer after rl.accelerate, on a padded tensor with lengths",
            ours.padded,
            "ours",
            cells=TORCH_CELLS,
        ),
        Competitor("ours-kernel", "only the kernel, without the layer", ours.kernel, "ours"),
        Competitor(
            "ours-equal",
            "ours on as many elements in sequences of one length",
            ours.ragged,
            "ours",
            view=ours.equal,
        ),
        Competitor(
            "ours-element", "ours on one element", ours.ragged, "ours", view=ours.one_element
        ),
        Competitor(
            "ours-float32",
            "ours on the same numbers in float32",
            ours.ragged,
            "ours",
            dtypes=("bfloat16",),
            view=ours.in_float32,
        ),
        Competitor(
            "ours-loop",
            "only the backward time loop, without products",
            ours.loop,
            "ours",
            cells=ELEMENTWISE,
            modes=("train",),
        ),
        Competitor(
            "ours-lstm",
            "our LSTM of the same sizes on the same input",
            ours.ragged,
            "ours",
            view=ours.lstm,
        ),
        *(
            Competitor(
                f"exported-{layout}",
                f"the layer as rl.export.onnx writes it, layout {layout}, in ONNX Runtime; inference in float32",
                exported.exported(layout),
                "ours",
                modules=("onnxscript", "onnxruntime"),
                modes=("infer",),
                dtypes=_FLOAT32,
            )
            for layout in _LAYOUTS
        ),
        *(
            Competitor(
                f"own-{schedule}",
                f"rl.nn.Recurrent, schedule {schedule}",
                plain_cells.under(schedule),
                "ours",
                cells=("gru",),
            )
            for schedule in ("each", "packed", "lanes")
        ),
        Competitor(
            "torch-packed",
            "torch.nn on a PackedSequence of the caller's order",
            pytorch.packed,
            "torch",
            cells=TORCH_CELLS,
        ),
        Competitor(
            "torch-padded",
            "torch.nn on a padded tensor",
            pytorch.padded,
            "torch",
            cells=TORCH_CELLS,
        ),
        Competitor(
            "torch-sorted",
            "torch.nn on a batch sorted by length, then packed",
            pytorch.sorted_first,
            "torch",
            cells=TORCH_CELLS,
        ),
        Competitor(
            "torch-steps",
            "the cell in plain torch, step by step over a pack",
            plain_cells.steps(hoists=False),
            "torch",
            cells=ELEMENTWISE,
        ),
        Competitor(
            "torch-hoisted",
            "the same, with the input products of all steps made before the first",
            plain_cells.steps(hoists=True),
            "torch",
            cells=ELEMENTWISE,
        ),
        Competitor(
            "onnxruntime",
            "ONNX Runtime on a padded batch with lengths; inference in float32",
            onnx_engines.onnxruntime,
            "engine",
            modules=("onnx", "onnxruntime"),
            cells=TORCH_CELLS,
            modes=("infer",),
            dtypes=_FLOAT32,
        ),
        Competitor(
            "openvino",
            "OpenVINO on a padded batch with lengths; inference in float32",
            onnx_engines.openvino,
            "engine",
            modules=("onnx", "openvino"),
            cells=TORCH_CELLS,
            modes=("infer",),
            dtypes=_FLOAT32,
        ),
        Competitor(
            "jax",
            "JAX, a masked scan compiled by XLA; float32",
            jax_scan.jax,
            "engine",
            modules=("jax",),
            cells=TORCH_CELLS,
            dtypes=_FLOAT32,
        ),
    )
}
"""Every competitor by name: Raglane and its variants, PyTorch, and other engines."""

RIVALS = tuple(name for name, competitor in COMPETITORS.items() if competitor.family != "ours")
"""The competitors other than Raglane."""

TORCH = tuple(name for name, competitor in COMPETITORS.items() if competitor.family == "torch")
"""PyTorch's variants; ratios are relative to the fastest of them."""
