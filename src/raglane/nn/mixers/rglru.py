"""The RG-LRU of Griffin."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor, nn

from raglane._utils.checks import check_count
from raglane.kernels.cpu.recurrences import wide
from raglane.nn.mixers.block import (
    BlockLayer,
    LayerOptions,
    Placed,
    RecurrentBlock,
    States,
    check_divides,
    check_optional_count,
    convolution,
    head_size,
)
from raglane.nn.mixers.gated_decay import rates_of
from raglane.nn.mixers.ways import Decay, Way


class _Gates(nn.Module):
    """The parameters of the recurrence, with the names of transformers."""

    def __init__(self, width: int, heads: int, placed: Placed) -> None:
        super().__init__()
        size = width // heads
        for name in ("input", "recurrent"):
            weight = nn.Parameter(torch.empty(heads, size, size, **placed))
            self.register_parameter(f"{name}_gate_weight", weight)
            bias = nn.Parameter(torch.empty(heads, size, **placed))
            self.register_parameter(f"{name}_gate_bias", bias)
        self.recurrent_param = nn.Parameter(torch.empty(width, **placed))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw decays between 0.9 and 0.999 for open gates."""
        for name, parameter in self.named_parameters():
            if name.endswith("weight"):
                nn.init.normal_(parameter, std=parameter.shape[2] ** -0.5)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        decays = nn.init.uniform_(self.recurrent_param, 0.9**2, 0.999**2)
        decays.log_().mul_(-0.5).expm1_().log_()


def decay_of(gates: Any, x: Tensor, way: Way) -> Decay:
    """Return the arguments of the recurrence of rows ``(R, width)``, by parameters with the names of
    transformers.
    """
    return Decay(
        x,
        way.product(x, gates.input_gate_weight, is_turned=True),
        way.product(x, gates.recurrent_gate_weight, is_turned=True),
        way.derived(_for_row, gates.input_gate_bias),
        way.derived(_for_row, gates.recurrent_gate_bias),
        way.derived(rates_of, gates.recurrent_param),
    )


def _for_row(bias: Tensor) -> Tensor:
    """Return the bias of all heads."""
    return wide(bias).flatten()


class RGLRUBlock(RecurrentBlock):
    """See :class:`RGLRU`."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        width: int | None,
        num_heads: int | None,
        kernel_size: int,
        **placed: Unpack[Placed],
    ) -> None:
        inner = hidden_size if width is None else width
        heads = inner // head_size(inner, 256) if num_heads is None else num_heads
        check_divides("num_heads", heads, "the width", inner)
        super().__init__(input_size, hidden_size, ((kernel_size - 1) * inner, inner, 1))
        self.linear_y = nn.Linear(input_size, inner, **placed)
        self.linear_x = nn.Linear(input_size, inner, **placed)
        self.conv_1d = convolution(inner, kernel_size, True, placed)
        self.rg_lru = _Gates(inner, heads, placed)
        self.linear_out = nn.Linear(inner, hidden_size, **placed)
        self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        for module in (self.linear_y, self.linear_x, self.conv_1d, self.linear_out):
            fan = module.weight[0].numel()
            nn.init.normal_(module.weight, std=fan**-0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    def mix(self, x: Tensor, states: States, way: Way) -> tuple[Tensor, States]:
        """See :class:`RecurrentBlock`."""
        gate = way.gelu(way.linear(self.linear_y, x))
        inner, before = way.convolve(way.linear(self.linear_x, x), self.conv_1d, states[0])
        h, after = way.decay(decay_of(self.rg_lru, inner, way), (states[1], states[2]))
        return way.linear(self.linear_out, h * gate), (before, *after)


class RGLRU(BlockLayer):
    """The real-gated linear recurrent unit of Griffin (De et al. 2024, arXiv:2402.19427).

    A layer is one recurrent block, ``RecurrentGemmaRecurrentBlock`` of transformers, whose
    ``state_dict`` it loads: a branch of a linear layer and a GELU, times another of a linear layer, a
    short convolution and the recurrence. The equations are in docs/cells.md. It is called like other
    layers; ``state`` is the last ``kernel_size - 1`` inputs of the convolution, ``(1, B,
    (kernel_size - 1) * width)``, the state ``(1, B, width)``, and ``(1, B, 1)``, 0 before the first
    element and 1 after it. On a CPU, a sequence has the same bits as a whole, in pieces and by
    steps, and in any batch.

    Args:
        input_size: features of an element.
        hidden_size: features of an output.
        num_layers: the number of blocks. Each one above the first reads its input divided by its
            root mean square, and adds it to its output.
        width: channels of the recurrence; None for ``hidden_size``.
        num_heads: blocks of the matrices of the gates; None for blocks of at most 256 channels.
        kernel_size: the number of elements that an output of the convolution reads.
        device, dtype: of the parameters.
        **options: ``batch_first``, ``dropout``, ``bidirectional``, and ``schedule``, ``backend``,
            ``initial_state`` and ``input_dropout`` as for other layers.

    Raises:
        ArgumentError: a size is not a whole number of at least 1, or ``num_heads`` does not divide
            the width.

    Example:
        >>> layer = RGLRU(16, 16, num_heads=4)
        >>> out, (before, h, has_begun) = layer(Ragged([torch.randn(5, 16), torch.randn(2, 16)]))
        >>> out.values.shape, before.shape, h.shape, has_begun.shape
        (torch.Size([7, 16]), torch.Size([1, 2, 48]), torch.Size([1, 2, 16]), torch.Size([1, 2, 1]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        width: int | None = None,
        num_heads: int | None = None,
        kernel_size: int = 4,
        **options: Unpack[LayerOptions],
    ) -> None:
        settings = {
            "width": check_optional_count("width", width),
            "num_heads": num_heads,
            "kernel_size": check_count("kernel_size", kernel_size),
        }
        super().__init__(RGLRUBlock, input_size, hidden_size, num_layers, settings, **options)
