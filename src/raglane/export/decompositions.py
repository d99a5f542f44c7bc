"""Operators that the exporter of torch does not translate, by others that it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from raglane.errors import require
from raglane.segments import owners


def elements_of_padded(padded: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """The elements of a padded tensor ``(B, T, *features)`` and their offsets, by operators that a graph can hold.

    Lengths above ``T`` count as ``T``, and below 0 as 0.
    """
    lengths = lengths.to(torch.int64).clamp(0, padded.shape[1])
    is_real = torch.arange(padded.shape[1], device=padded.device) < lengths.unsqueeze(1)
    index = is_real.flatten().nonzero().squeeze(1)
    return padded.flatten(0, 1).index_select(0, index), F.pad(lengths.cumsum(0), (1, 0))


def offsets_within(offsets: Tensor, total: Any) -> Tensor:
    """Offsets that divide ``total`` elements, whatever was given, by operators that a graph can hold.

    Those that do stay as they are. Of others the first becomes 0 and the last ``total``; one in between that is out of
    range becomes the nearest that is not. A sequence that would end before it starts becomes empty, and those after it
    keep their lengths as far as there are elements.
    """
    place = torch.arange(offsets.shape[0], device=offsets.device)
    held = torch.where(place + 1 < offsets.shape[0], offsets.to(torch.int64).clamp(0, total), total)
    held = torch.where(place > 0, held, 0)
    # There is no running maximum in ONNX.
    return F.pad(held.diff().clamp(min=0).cumsum(0).clamp(max=total), (1, 0))


def padded_of_elements(values: Tensor, offsets: Tensor, steps: Any) -> Tensor:
    """``(B, steps, *features)`` with zeros where there is no element, by operators that a graph can hold."""
    step = torch.arange(steps, device=values.device)
    is_real = step < offsets.diff().unsqueeze(1)
    element = torch.where(is_real, step + offsets[:-1].unsqueeze(1), values.shape[0])
    return torch.cat([values, values.new_zeros(1, *values.shape[1:])])[element]


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Replacements of operators, for ``ExportedProgram.run_decompositions``."""
    import raglane.packing.operators  # noqa: F401 (registers ours)

    return {
        torch.ops.aten.repeat_interleave.Tensor: _repeat_interleave,
        torch.ops.aten.repeat_interleave.self_Tensor: _repeat_rows,
        torch.ops.raglane.padded_to_flat.default: _padded_to_flat,
        torch.ops.raglane.padded_from_flat.default: _padded_from_flat,
    }


def exact_decompositions() -> dict[Any, Callable[..., Any]]:
    """Replacements of operators of which ONNX computes a part, or keeps a number, in float32, whatever the dtype."""
    aten = torch.ops.aten
    others = (aten.celu, aten.elu, aten.hardsigmoid, aten.leaky_relu)
    return {**torch._decomp.get_decompositions(others), aten.layer_norm.default: _layer_norm}


def exact_translations() -> dict[Any, Callable[..., Any]]:
    """Translations of operators whose own round a number of Python to float32, for graphs of float64."""
    ir: Any = require("onnx_ir", "export")
    op: Any = require("onnxscript", "export").opset20

    # No annotations that are names: the exporter reads them where they are not imported.
    def scalar_tensor(s, dtype=-1, layout="", device="", pin_memory=False):  # type: ignore[no-untyped-def]  # noqa: ARG001
        kind = ir.DataType(dtype if dtype > 0 else ir.DataType.FLOAT)
        return op.Constant(value=ir.tensor(s, dtype=kind)) if isinstance(s, int | float) else op.Cast(s, to=kind)

    scalar_tensor.__annotations__ = {"s": float, "dtype": int, "layout": str, "device": str, "pin_memory": bool}
    return {torch.ops.aten.scalar_tensor.default: scalar_tensor}


def _layer_norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,  # noqa: ARG001
) -> Tensor:
    axes = list(range(-len(normalized_shape), 0))
    centred = input - input.mean(axes, keepdim=True)
    # No quotient by a root: ONNX Runtime makes a LayerNormalization of that, whose eps is a float32.
    scaled = centred * (centred.square().mean(axes, keepdim=True) + eps).rsqrt()
    scaled = scaled if weight is None else scaled * weight
    return scaled if bias is None else scaled + bias


def _repeat_interleave(repeats: Tensor, *, output_size: Any = None) -> Tensor:
    """Each index as often as ``repeats`` says."""
    ends = repeats.cumsum(0)
    total: Any = F.pad(ends, (1, 0))[-1].item() if output_size is None else output_size
    return owners(ends, total)


def _repeat_rows(self: Tensor, repeats: Tensor, dim: int | None = None, *, output_size: Any = None) -> Tensor:
    rows, along = (self.flatten(), 0) if dim is None else (self, dim)
    if repeats.dim() == 0 or repeats.shape[0] == 1:
        repeats = repeats.expand(rows.shape[along])
    return rows.index_select(along, _repeat_interleave(repeats, output_size=output_size))


def _padded_to_flat(padded: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    return elements_of_padded(padded if batch_first else padded.transpose(0, 1), lengths)


def _padded_from_flat(flat: Tensor, offsets: Tensor, batch_first: bool, steps: Any) -> Tensor:
    padded = padded_of_elements(flat, offsets, steps)
    return padded if batch_first else padded.transpose(0, 1)
