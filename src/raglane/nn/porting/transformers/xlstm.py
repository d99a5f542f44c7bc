"""The mLSTM of xLSTM-large.

The model passes its blocks nothing but rows and states. So the hook keeps the numbers of sequences
in a context, in which each block finds those of its rows when it is called; the block gets them as
an argument.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from raglane.kernels.cpu.recurrences import wide
from raglane.nn.mixers.plain import has_hooks
from raglane.nn.porting.transformers.base import Mixer, of_converted
from raglane.nn.porting.transformers.layout import layout_of
from raglane.nn.recurrences.recurrence_operator import attend


class _Call(NamedTuple):
    """The numbers of the sequences of a call, and how many steps each block has had."""

    numbers: Tensor
    taken: dict[int, int]


_call: ContextVar[_Call | None] = ContextVar("raglane_numbers_of_sequences", default=None)


class XlstmBlock:
    """A block that passes numbers of sequences on to its layer."""

    def __call__(self, x: Tensor, state: Any = None, sequences: Any = None) -> Any:
        """Run the block with the numbers of its rows; long inputs come in pieces."""
        call = _call.get()
        if sequences is None and call is not None:
            begin = call.taken.get(id(self), 0)
            call.taken[id(self)] = begin + x.shape[1]
            sequences = call.numbers[:, begin : begin + x.shape[1]] - 1
        return super().__call__(x, state, sequences)  # type: ignore[misc]

    @of_converted
    def forward(self, x: Tensor, state: Any = None, sequences: Any = None) -> Any:
        """Return the outputs, and the states."""
        block: Any = self
        mixed, state = block.mlstm_layer(block.norm_mlstm(x), state, sequences)
        x = x + mixed
        return x + block.ffn(block.norm_ffn(x)), state


class XlstmMixer(Mixer):
    """The layer of a block."""

    needs_padding = True
    is_passed = False

    @staticmethod
    def remember(numbers: Tensor | None) -> None:
        """Keep the numbers of a call of the model, or forget them."""
        _call.set(None if numbers is None else _Call(numbers, {}))

    @of_converted
    def forward(self, x: Tensor, state: Any = None, sequences: Any = None) -> Any:
        """Return the outputs ``(B, T, D)``, and the states."""
        layout = layout_of(x, sequences, None)
        rows = layout.rows(x)
        q, k, v, gate, log_gain, forget = self._project(rows)
        heads = self.config.num_heads
        q, k, v = [each.flatten(0, 1).unflatten(1, (heads, -1)) for each in (q, k, v)]
        log_gain, forget = [wide(each.flatten(0, 1)) for each in (log_gain, forget)]
        initial: list[Any] = [None] * 3
        if state is not None:
            # Copies where they are saved for backward, because the cache changes in place.
            is_saved = torch.is_grad_enabled()
            initial = [layout.states(each.to(forget.dtype, copy=is_saved)) for each in state]
            initial[2] = initial[2].squeeze(2)
        tensors = (q, k, v, F.logsigmoid(forget), None, log_gain, *initial)
        scale = q.shape[2] ** -0.5
        y, *final = attend(
            tensors, layout.offsets, layout.resets, scale, False, float(self.config.eps)
        )
        y = _normed(self.multihead_norm, y.unflatten(0, rows.shape[:2]))
        output = self.out_proj(self.ogate_act_fn(gate) * y)
        final = [each[: x.shape[0]] for each in final]
        return layout.batch(output), (final[0], final[1], final[2].unsqueeze(2))

    def _project(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys, values, the output gate, and the gates, as logarithms."""
        cap = self.config.gate_soft_cap
        names = ("q", "k", "v", "ogate_preact", "igate_preact", "fgate_preact")
        *parts, gain, forget = [getattr(self, name)(rows) for name in names]
        if cap is not None:
            gain, forget = [cap * torch.tanh(each / cap) for each in (gain, forget)]
        return *parts, gain, forget


def _normed(norm: Any, y: Tensor) -> Tensor:
    """Return the heads ``(B, T, H, V)`` after their norm, flat.

    Torch's variance, which the norm of transformers takes, is six times as slow as its whole norm
    of layers.
    """
    if has_hooks(norm) or type(norm).__name__ != "xLSTMMultiHeadLayerNorm":
        result: Tensor = norm(y)
        return result
    exact = y.float() if norm.force_float32_reductions else y
    flat = F.layer_norm(exact, exact.shape[-1:], eps=norm.eps).to(y.dtype).flatten(2)
    flat = flat if norm.weight is None else flat * norm.weight
    return flat if norm.bias is None else flat + norm.bias
