"""Mamba-2."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor, nn

from raglane._utils.checks import check_count, check_eps, check_flag
from raglane.kernels.cpu.recurrences import wide
from raglane.nn.mixers.block import (
    BlockLayer,
    LayerOptions,
    Placed,
    RecurrentBlock,
    States,
    check_divides,
    convolution,
    draw_step_bias,
    head_size,
)
from raglane.nn.mixers.ways import AttentionArguments, Limits, Way
from raglane.nn.recurrences.arguments import check_limits
from raglane.nn.recurrences.loops import decay_rates


class Mamba2Block(RecurrentBlock):
    """See :class:`Mamba2`."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        state_size: int,
        kernel_size: int,
        expand: int,
        head_dim: int | None,
        num_groups: int,
        dt_limit: Limits,
        eps: float,
        bias: bool,
        conv_bias: bool,
        **placed: Unpack[Placed],
    ) -> None:
        width = expand * hidden_size
        size = head_size(width, 64) if head_dim is None else head_dim
        heads = width // check_divides("head_dim", size, "expand * hidden_size", width)
        check_divides("num_groups", num_groups, "the number of heads", heads)
        channels = width + 2 * num_groups * state_size
        sizes = ((kernel_size - 1) * channels, width * state_size)
        super().__init__(input_size, hidden_size, sizes)
        self.groups = num_groups
        self.splits = [width, num_groups * state_size, num_groups * state_size]
        self.dt_limit = dt_limit
        self.eps = eps
        self.in_proj = nn.Linear(input_size, width + channels + heads, bias, **placed)
        self.conv1d = convolution(channels, kernel_size, conv_bias, placed)
        self.dt_bias = nn.Parameter(torch.empty(heads, **placed))
        self.A_log = nn.Parameter(torch.empty(heads, **placed))
        self.D = nn.Parameter(torch.empty(heads, **placed))
        self.norm = nn.RMSNorm(width, eps, **placed)
        self.out_proj = nn.Linear(width, hidden_size, bias, **placed)
        self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        nn.init.uniform_(self.A_log, 1, 16)
        self.A_log.log_()
        nn.init.ones_(self.D)
        draw_step_bias(self.dt_bias)

    def mix(self, x: Tensor, states: States, way: Way) -> tuple[Tensor, States]:
        """See :class:`RecurrentBlock`."""
        heads = self.D.shape[0]
        sizes = [self.splits[0], sum(self.splits), heads]
        gate, inner, dt = way.linear(self.in_proj, x).split(sizes, 1)
        inner, before = way.convolve(inner, self.conv1d, states[0])
        inner, of_b, of_c = way.silu(inner).split(self.splits, 1)
        steps = way.softplus(way.shifted(wide(dt), wide(self.dt_bias))).clamp(*self.dt_limit)
        v = inner.unflatten(1, (heads, -1))
        parts = AttentionArguments(
            of_c.unflatten(1, (self.groups, -1)),
            of_b.unflatten(1, (self.groups, -1)),
            v,
            way.scaled(steps, way.derived(decay_rates, self.A_log)),
            steps,
        )
        y, after = way.attend(parts, states[1:])
        skipped = way.scaled(inner, way.derived(torch.repeat_interleave, self.D, v.shape[2]))
        y = (y.flatten(1) + skipped) * way.silu(gate)
        y = way.normed(y.unflatten(1, (self.groups, -1)), self.norm.weight, self.eps)
        return way.linear(self.out_proj, y.flatten(1)), (before, *after)


class Mamba2(BlockLayer):
    """Mamba-2: state space duality (Dao and Gu 2024, arXiv:2405.21060).

    A layer is one block, which equals ``Mamba2`` of the package mamba_ssm and ``Mamba2Mixer`` of
    transformers, whose ``state_dict`` it loads: the gate before a norm of groups, and ``D`` for each
    head. The equations are in docs/cells.md. It is called like other layers; ``state`` is the last
    ``kernel_size - 1`` inputs of the convolution, ``(1, B, (kernel_size - 1) * channels)`` with
    ``expand * hidden_size + 2 * num_groups * state_size`` channels, and the states of the heads, ``(1,
    B, expand * hidden_size * state_size)``, of which a head has ``(state_size, head_dim)``. On a
    CPU, a sequence has the same bits as a whole, in pieces and by steps, and in any batch.

    Args:
        input_size: features of an element.
        hidden_size: features of an output, d_model of the paper.
        num_layers: the number of blocks. Each one above the first reads its input divided by its
            root mean square, and adds it to its output, as in the models of the paper.
        state_size: numbers per channel of the state.
        kernel_size: the number of elements that an output of the convolution reads.
        expand: channels per feature.
        head_dim: channels of a head; None for the largest divisor of the channels up to 64.
        num_groups: the number of groups of heads that share what is written and read, and of the norm.
        dt_limit: the smallest and the largest step size; None for no limits.
        eps: is added to the mean square in the norm.
        bias: True for biases of the projections at the ends.
        conv_bias: True for a bias of the convolution.
        device, dtype: of the parameters.
        **options: ``batch_first``, ``dropout``, ``bidirectional``, and ``schedule``, ``backend``,
            ``initial_state`` and ``input_dropout`` as for other layers.

    Raises:
        ArgumentError: a size is not a whole number of at least 1, or sizes do not divide each other.

    Example:
        >>> layer = Mamba2(16, 16, state_size=32)
        >>> out, (before, h) = layer(Ragged([torch.randn(5, 16), torch.randn(2, 16)]))
        >>> out.values.shape, before.shape, h.shape
        (torch.Size([7, 16]), torch.Size([1, 2, 288]), torch.Size([1, 2, 1024]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        state_size: int = 128,
        kernel_size: int = 4,
        expand: int = 2,
        head_dim: int | None = None,
        num_groups: int = 1,
        dt_limit: Limits | None = None,
        eps: float = 1e-5,
        bias: bool = False,
        conv_bias: bool = True,
        **options: Unpack[LayerOptions],
    ) -> None:
        settings = {
            "state_size": check_count("state_size", state_size),
            "kernel_size": check_count("kernel_size", kernel_size),
            "expand": check_count("expand", expand),
            "head_dim": head_dim,
            "num_groups": num_groups,
            "dt_limit": check_limits("dt_limit", dt_limit),
            "eps": check_eps(eps),
            "bias": check_flag("bias", bias),
            "conv_bias": check_flag("conv_bias", conv_bias),
        }
        super().__init__(Mamba2Block, input_size, hidden_size, num_layers, settings, **options)
