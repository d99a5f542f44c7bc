"""The mLSTM of xLSTM."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor, nn

from raglane._utils.checks import check_eps, check_flag
from raglane.kernels.cpu.recurrences import wide
from raglane.nn.mixers.block import (
    BlockLayer,
    LayerOptions,
    Placed,
    RecurrentBlock,
    States,
    check_divides,
    check_optional_count,
    head_size,
)
from raglane.nn.mixers.ways import AttentionArguments, Way

_CAP = 15.0  # of the arguments of both gates
_EPS = 1e-6  # added to the divisor of the recurrence


class MLSTMBlock(RecurrentBlock):
    """See :class:`MLSTM`."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        num_heads: int | None,
        key_size: int | None,
        bias: bool,
        eps: float,
        **placed: Unpack[Placed],
    ) -> None:
        heads = hidden_size // head_size(hidden_size, 64) if num_heads is None else num_heads
        value_size = hidden_size // check_divides("num_heads", heads, "hidden_size", hidden_size)
        size = max(1, value_size // 2) if key_size is None else key_size
        keys = heads * size
        super().__init__(input_size, hidden_size, (size * hidden_size, keys, heads))
        self.heads = heads
        self.eps = eps
        self.q = nn.Linear(input_size, keys, bias, **placed)
        self.k = nn.Linear(input_size, keys, bias, **placed)
        self.v = nn.Linear(input_size, hidden_size, bias, **placed)
        self.ogate_preact = nn.Linear(input_size, hidden_size, bias, **placed)
        self.igate_preact = nn.Linear(input_size, heads, **placed)
        self.fgate_preact = nn.Linear(input_size, heads, **placed)
        self.multihead_norm = nn.LayerNorm(hidden_size, eps, bias=bias, **placed)
        self.out_proj = nn.Linear(hidden_size, hidden_size, bias, **placed)
        self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        for gate in (self.igate_preact, self.fgate_preact):
            nn.init.zeros_(gate.weight)
        nn.init.constant_(self.igate_preact.bias, -10)
        steps = torch.linspace(3, 6, self.heads, device=self.fgate_preact.bias.device)
        self.fgate_preact.bias.copy_(steps)

    def renamed(self, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """Separate the projections of a model with weight_mode="fused"."""
        joined_names = {
            "qkv_opreact": ("q", "k", "v", "ogate_preact"),
            "ifgate_preact": ("igate_preact", "fgate_preact"),
        }
        separate: dict[str, Tensor] = {}
        for joined, names in joined_names.items():
            sizes = [self.get_parameter(f"{name}.weight").shape[0] for name in names]
            for kind in ("weight", "bias"):
                if f"{joined}.{kind}" in parts:
                    rows = parts.pop(f"{joined}.{kind}").split(sizes)
                    separate |= {
                        f"{name}.{kind}": part for name, part in zip(names, rows, strict=True)
                    }
        return parts | separate

    def mix(self, x: Tensor, states: States, way: Way) -> tuple[Tensor, States]:
        """See :class:`RecurrentBlock`."""
        q, k, v = [
            way.linear(module, x).unflatten(1, (self.heads, -1))
            for module in (self.q, self.k, self.v)
        ]
        gain, keep = [
            way.capped(wide(way.linear(module, x)), _CAP)
            for module in (self.igate_preact, self.fgate_preact)
        ]
        parts = AttentionArguments(
            q,
            k,
            v,
            way.log_sigmoid(keep),
            log_gain=gain,
            scale=q.shape[2] ** -0.5,
            eps=_EPS,
        )
        h, after = way.attend(parts, states)
        h = way.normed(way.centred(h), self.multihead_norm.weight, self.eps).flatten(1)
        if self.multihead_norm.bias is not None:
            h = way.shifted(h, self.multihead_norm.bias)
        gate = way.sigmoid(way.linear(self.ogate_preact, x))
        return way.linear(self.out_proj, gate * h), after


class MLSTM(BlockLayer):
    """The mLSTM of xLSTM-large (Beck et al. 2024, arXiv:2405.04517; 2025, arXiv:2503.13427).

    A layer is one block without a convolution, ``xLSTMLayer`` of transformers, whose ``state_dict``
    it loads, with separate and with joined projections. The arguments of both exponential gates are
    bounded by 15. The equations are in docs/cells.md. It is called like other layers; ``state`` is
    the matrix memory ``(1, B, key_size * hidden_size)``, the normaliser ``(1, B, num_heads *
    key_size)`` and the stabiliser ``(1, B, num_heads)``, which begins with zeros. On a CPU, a
    sequence has the same bits as a whole, in pieces and by steps, and in any batch.

    Args:
        input_size: features of an element.
        hidden_size: features of an output.
        num_layers: the number of blocks. Each one above the first reads its input divided by its
            root mean square, and adds it to its output.
        num_heads: heads, which divide ``hidden_size``; None for heads of at most 64 features.
        key_size: features of a query and a key; None for half of those of a value.
        bias: True for biases of the projections and the norm; the gates always have them.
        eps: is added to the variance in the norm.
        device, dtype: of the parameters.
        **options: ``batch_first``, ``dropout``, ``bidirectional``, and ``schedule``, ``backend``,
            ``initial_state`` and ``input_dropout`` as for other layers.

    Raises:
        ArgumentError: a size is not a whole number of at least 1, or ``num_heads`` does not divide
            ``hidden_size``.

    Example:
        >>> layer = MLSTM(16, 16, num_heads=2)
        >>> out, (memory, normaliser, stabiliser) = layer(Ragged([torch.randn(5, 16)]))
        >>> out.values.shape, memory.shape, normaliser.shape, stabiliser.shape
        (torch.Size([5, 16]), torch.Size([1, 1, 64]), torch.Size([1, 1, 8]), torch.Size([1, 1, 2]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        num_heads: int | None = None,
        key_size: int | None = None,
        bias: bool = False,
        eps: float = 1e-6,
        **options: Unpack[LayerOptions],
    ) -> None:
        settings = {
            "num_heads": num_heads,
            "key_size": check_optional_count("key_size", key_size),
            "bias": check_flag("bias", bias),
            "eps": check_eps(eps),
        }
        super().__init__(MLSTMBlock, input_size, hidden_size, num_layers, settings, **options)
