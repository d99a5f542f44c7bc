"""Mamba."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor, nn

from raglane._utils.checks import check_count, check_flag
from raglane.kernels.cpu.recurrences import wide
from raglane.kernels.cpu.steps import MambaStep, parts_of_mamba
from raglane.nn.mixers.block import (
    BlockLayer,
    LayerOptions,
    Placed,
    RecurrentBlock,
    States,
    check_optional_count,
    convolution,
    draw_step_bias,
)
from raglane.nn.mixers.plain import are_products
from raglane.nn.mixers.ways import Scan, Way
from raglane.nn.recurrences.loops import decay_rates


class MambaBlock(RecurrentBlock):
    """See :class:`Mamba`."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        state_size: int,
        kernel_size: int,
        expand: int,
        dt_rank: int | None,
        bias: bool,
        conv_bias: bool,
        **placed: Unpack[Placed],
    ) -> None:
        width = expand * hidden_size
        super().__init__(input_size, hidden_size, ((kernel_size - 1) * width, width * state_size))
        self.rank = -(-hidden_size // 16) if dt_rank is None else dt_rank
        self.state_size = state_size
        self.in_proj = nn.Linear(input_size, 2 * width, bias, **placed)
        self.conv1d = convolution(width, kernel_size, conv_bias, placed)
        self.x_proj = nn.Linear(width, self.rank + 2 * state_size, False, **placed)
        self.dt_proj = nn.Linear(self.rank, width, **placed)
        self.A_log = nn.Parameter(torch.empty(width, state_size, **placed))
        self.D = nn.Parameter(torch.empty(width, **placed))
        self.out_proj = nn.Linear(width, hidden_size, bias, **placed)
        self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        rates = torch.arange(1, self.state_size + 1, dtype=torch.float32, device=self.A_log.device)
        self.A_log.copy_(rates.log().expand_as(self.A_log))
        nn.init.ones_(self.D)
        nn.init.uniform_(self.dt_proj.weight, -(self.rank**-0.5), self.rank**-0.5)
        draw_step_bias(self.dt_proj.bias)

    def _stepped(self, x: Tensor, states: States) -> tuple[Tensor, States] | None:
        """See :class:`RecurrentBlock`; the kernels have a call for this block."""
        linears = (self.in_proj, self.x_proj, self.dt_proj, self.out_proj)
        if not are_products(linears) or self.residual_norm is not None:
            return None
        width = self.D.shape[0]
        earlier = states[0].clone().unflatten(1, (self.conv1d.weight.shape[2] - 1, width))
        state = states[1].clone().unflatten(1, (width, self.state_size))
        parts = parts_of_mamba(linears, self.conv1d, self.A_log.exp().neg_(), self.D)
        step = MambaStep([*parts, *[None] * 4], logarithms=False, ordered=True)
        output = step.run(x, earlier.transpose(1, 2), state)
        return None if output is None else (output, (earlier.flatten(1), state.flatten(1)))

    def mix(self, x: Tensor, states: States, way: Way) -> tuple[Tensor, States]:
        """See :class:`RecurrentBlock`."""
        inner, gate = way.linear(self.in_proj, x).chunk(2, 1)
        inner, before = way.convolve(inner, self.conv1d, states[0])
        inner = way.silu(inner)
        sizes = [self.rank, self.state_size, self.state_size]
        dt, of_b, of_c = way.linear(self.x_proj, inner).split(sizes, 1)
        parts = Scan(
            inner,
            way.product(dt, self.dt_proj.weight),
            decay_rates(self.A_log),
            of_b.unsqueeze(1),
            of_c.unsqueeze(1),
            wide(self.D),
            wide(self.dt_proj.bias),
            softplus=True,
        )
        y, h = way.scan(parts, states[1])
        return way.linear(self.out_proj, y * way.silu(gate)), (before, h)


class Mamba(BlockLayer):
    """Mamba: a selective scan behind a short convolution (Gu and Dao 2023, arXiv:2312.00752).

    A layer is one block, which equals ``Mamba`` of the package mamba_ssm and ``MambaMixer`` of
    transformers, whose ``state_dict`` it loads. The equations are in docs/cells.md. It is called like
    other layers; ``state`` is the last ``kernel_size - 1`` inputs of the convolution, ``(1, B,
    (kernel_size - 1) * expand * hidden_size)``, and the state of the scan, ``(1, B, expand *
    hidden_size * state_size)``. On a CPU, a sequence has the same bits as a whole, in pieces and by
    steps, and in any batch.

    Args:
        input_size: features of an element.
        hidden_size: features of an output, d_model of the paper.
        num_layers: the number of blocks. Each one above the first reads its input divided by its
            root mean square, and adds it to its output, as in the models of the paper.
        state_size: numbers per channel of the state.
        kernel_size: the number of elements that an output of the convolution reads.
        expand: channels per feature.
        dt_rank: the rank of the projection to step sizes; None for a sixteenth of ``hidden_size``,
            rounded up.
        bias: True for biases of the projections at the ends.
        conv_bias: True for a bias of the convolution.
        device, dtype: of the parameters.
        **options: ``batch_first``, ``dropout``, ``bidirectional``, and ``schedule``, ``backend``,
            ``initial_state`` and ``input_dropout`` as for other layers.

    Raises:
        ArgumentError: a size is not a whole number of at least 1.

    Example:
        >>> layer = Mamba(16, 16)
        >>> out, (before, h) = layer(Ragged([torch.randn(5, 16), torch.randn(2, 16)]))
        >>> out.values.shape, before.shape, h.shape
        (torch.Size([7, 16]), torch.Size([1, 2, 96]), torch.Size([1, 2, 512]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        state_size: int = 16,
        kernel_size: int = 4,
        expand: int = 2,
        dt_rank: int | None = None,
        bias: bool = False,
        conv_bias: bool = True,
        **options: Unpack[LayerOptions],
    ) -> None:
        settings = {
            "state_size": check_count("state_size", state_size),
            "kernel_size": check_count("kernel_size", kernel_size),
            "expand": check_count("expand", expand),
            "dt_rank": check_optional_count("dt_rank", dt_rank),
            "bias": check_flag("bias", bias),
            "conv_bias": check_flag("conv_bias", conv_bias),
        }
        super().__init__(MambaBlock, input_size, hidden_size, num_layers, settings, **options)
