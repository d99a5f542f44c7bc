"""Gated DeltaNet."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor, nn

from raglane._utils.checks import check_count, check_eps
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
from raglane.nn.mixers.ways import AttentionArguments, Way
from raglane.nn.recurrences.loops import decay_rates

_EPS = 1e-6  # added to sums of squares of keys and queries


class GatedDeltaNetBlock(RecurrentBlock):
    """See :class:`GatedDeltaNet`."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        num_heads: int | None,
        num_value_heads: int | None,
        key_size: int | None,
        value_size: int | None,
        kernel_size: int,
        eps: float,
        **placed: Unpack[Placed],
    ) -> None:
        size = head_size(hidden_size, 128) if key_size is None else key_size
        heads = max(1, hidden_size // size) if num_heads is None else num_heads
        value_heads = 2 * heads if num_value_heads is None else num_value_heads
        check_divides("num_heads", heads, "num_value_heads", value_heads)
        width = value_heads * (size if value_size is None else value_size)
        splits = [heads * size, heads * size, width]
        sizes = ((kernel_size - 1) * sum(splits), size * width)
        super().__init__(input_size, hidden_size, sizes)
        self.heads = heads
        self.splits = splits
        self.eps = eps
        self.in_proj_qkv = nn.Linear(input_size, sum(splits), False, **placed)
        self.in_proj_z = nn.Linear(input_size, width, False, **placed)
        self.in_proj_b = nn.Linear(input_size, value_heads, False, **placed)
        self.in_proj_a = nn.Linear(input_size, value_heads, False, **placed)
        self.conv1d = convolution(sum(splits), kernel_size, False, placed)
        self.dt_bias = nn.Parameter(torch.empty(value_heads, **placed))
        self.A_log = nn.Parameter(torch.empty(value_heads, **placed))
        self.norm = nn.RMSNorm(width // value_heads, eps, **placed)
        self.out_proj = nn.Linear(width, hidden_size, False, **placed)
        self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        nn.init.uniform_(self.A_log, 0.01, 16)
        self.A_log.log_()
        nn.init.ones_(self.dt_bias)

    def renamed(self, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """Separate the projections of Qwen3-Next, whose rows are head by head."""
        sizes = [size // self.heads for size in (*self.splits, self.splits[2])]
        each = self.A_log.shape[0] // self.heads
        joined_names = {
            "in_proj_qkvz.weight": (sizes, ("q", "k", "v", "z")),
            "in_proj_ba.weight": ([each, each], ("b", "a")),
        }
        separate: dict[str, Tensor] = {}
        for joined, (rows, names) in joined_names.items():
            if joined in parts:
                heads = parts.pop(joined).unflatten(0, (self.heads, -1)).split(rows, 1)
                separate |= {
                    name: tensor.flatten(0, 1) for name, tensor in zip(names, heads, strict=True)
                }
        if "q" in separate:
            separate["qkv"] = torch.cat([separate.pop(name) for name in "qkv"])
        return parts | {f"in_proj_{name}.weight": tensor for name, tensor in separate.items()}

    def mix(self, x: Tensor, states: States, way: Way) -> tuple[Tensor, States]:
        """See :class:`RecurrentBlock`."""
        inner = way.linear(self.in_proj_qkv, x)
        inner, before = way.convolve(inner, self.conv1d, states[0])
        q, k, v = way.silu(inner).split(self.splits, 1)
        q, k = [way.unit(each.unflatten(1, (self.heads, -1)), _EPS) for each in (q, k)]
        steps = wide(way.linear(self.in_proj_a, x))
        steps = way.softplus(way.shifted(steps, wide(self.dt_bias)))
        parts = AttentionArguments(
            q,
            k,
            v.unflatten(1, (self.A_log.shape[0], -1)),
            way.scaled(steps, way.derived(decay_rates, self.A_log)),
            way.sigmoid(wide(way.linear(self.in_proj_b, x))),
            scale=q.shape[2] ** -0.5,
            delta=True,
        )
        y, after = way.attend(parts, states[1:])
        y = way.normed(y, self.norm.weight, self.eps).flatten(1)
        gate = way.silu(way.linear(self.in_proj_z, x))
        return way.linear(self.out_proj, y * gate), (before, *after)


class GatedDeltaNet(BlockLayer):
    """Gated DeltaNet: a delta rule with decays (Yang et al. 2025, arXiv:2412.06464).

    A layer is one block, the linear attention of Qwen3-Next and Qwen3.5, whose ``state_dict`` it
    loads: those of ``Qwen3NextGatedDeltaNet`` of transformers, with joined projections, and of
    ``Qwen3_5GatedDeltaNet``. The equations are in docs/cells.md. It is called like other layers;
    ``state`` is the last ``kernel_size - 1`` inputs of the convolution of queries, keys and values,
    and the states of the heads, ``(1, B, num_value_heads * key_size * value_size)``. On a CPU, a
    sequence has the same bits as a whole, in pieces and by steps, and in any batch.

    Args:
        input_size: features of an element.
        hidden_size: features of an output.
        num_layers: the number of blocks. Each one above the first reads its input divided by its
            root mean square, and adds it to its output.
        num_heads: heads of queries and keys; None for ``hidden_size / key_size``.
        num_value_heads: heads of values, of which each head of keys serves equally many; None for
            ``2 * num_heads``.
        key_size: features of a query and a key; None for the largest divisor of ``hidden_size`` up to
            128.
        value_size: features of a value; None for ``key_size``.
        kernel_size: the number of elements that an output of the convolution reads.
        eps: is added to the mean square in the norm.
        device, dtype: of the parameters.
        **options: ``batch_first``, ``dropout``, ``bidirectional``, and ``schedule``, ``backend``,
            ``initial_state`` and ``input_dropout`` as for other layers.

    Raises:
        ArgumentError: a size is not a whole number of at least 1, or ``num_heads`` does not divide
            ``num_value_heads``.

    Example:
        >>> layer = GatedDeltaNet(16, 16, key_size=8)
        >>> out, (before, s) = layer(Ragged([torch.randn(5, 16), torch.randn(2, 16)]))
        >>> out.values.shape, before.shape, s.shape
        (torch.Size([7, 16]), torch.Size([1, 2, 192]), torch.Size([1, 2, 256]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        num_heads: int | None = None,
        num_value_heads: int | None = None,
        key_size: int | None = None,
        value_size: int | None = None,
        kernel_size: int = 4,
        eps: float = 1e-6,
        **options: Unpack[LayerOptions],
    ) -> None:
        settings = {
            "num_heads": check_optional_count("num_heads", num_heads),
            "num_value_heads": check_optional_count("num_value_heads", num_value_heads),
            "key_size": check_optional_count("key_size", key_size),
            "value_size": check_optional_count("value_size", value_size),
            "kernel_size": check_count("kernel_size", kernel_size),
            "eps": check_eps(eps),
        }
        super().__init__(
            GatedDeltaNetBlock, input_size, hidden_size, num_layers, settings, **options
        )
