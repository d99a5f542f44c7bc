"""sLSTM cells of xlstm and TiRex, and their layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from raglane.nn.porting.arrays import check_option, dtype_of, filled
from raglane.nn.recurrent.cell_layers import SLSTM
from raglane.nn.recurrent.layer import RecurrentLayer


def slstm_weights(kernel: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return an sLSTM cell's recurrent weights ``(4 * H, H / heads)`` and bias ``(4 * H,)`` in our
    order of rows.
    """
    heads, rows, columns = kernel.shape
    if rows > columns:  # (heads, 4 * size, size), and the bias gate after gate
        size = columns
        return kernel.view(heads, 4, size, size).transpose(0, 1).reshape(-1, size), bias
    size = rows  # (heads, size, 4 * size): the transpose, and the bias head after head
    hidden = kernel.view(heads, size, 4, size).permute(2, 0, 3, 1).reshape(-1, size)
    return hidden, bias.view(heads, 4, size).transpose(0, 1).flatten()


def of_slstm(source: Any) -> RecurrentLayer:
    """Return the layer of an sLSTM cell, or of the projections and the cell of a layer."""
    cell = getattr(source, "slstm_cell", source)
    check_option("function", getattr(cell.config, "function", "slstm"), "slstm")
    hidden, bias = slstm_weights(cell._recurrent_kernel_, cell._bias_)
    arrays = {"weight_hh": hidden, "bias_ih": bias}
    units = len(hidden) // 4
    if cell is not source:
        fix = "pass its slstm_cell, or use rl.accelerate"
        check_option("conv1d", hasattr(source, "conv1d"), False, fix=fix)
        # The layer passes the product of fgate to the cell's input gate, and that of igate to its
        # forget gate.
        gates = [source.fgate, source.igate, source.zgate, source.ogate]
        arrays["weight_ih"] = torch.cat([torch.block_diag(*gate.weight) for gate in gates])
    layer = SLSTM(
        units if "weight_ih" in arrays else 4 * units,
        units,
        num_heads=len(cell._recurrent_kernel_),
        input_weights="weight_ih" in arrays,
        batch_first=True,
        device=hidden.device,
        dtype=dtype_of([arrays]),
    )
    return filled(layer, [arrays])
