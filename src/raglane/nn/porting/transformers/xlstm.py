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
from torch import Tensor, nn

from raglane.kernels.cpu.gated_norm import GatedNorm
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
        names = ("q", "k", "v", "ogate_preact", "igate_preact", "fgate_preact")
        *parts, gate, gain, keep = [getattr(self, name)(rows) for name in names]
        heads = self.config.num_heads
        q, k, v = [each.flatten(0, 1).unflatten(1, (heads, -1)) for each in parts]
        # Operations of both gates at once take half of the time.
        gates = torch.stack([gain, keep]).flatten(1, 2)
        cap = self.config.gate_soft_cap
        gates = gates if cap is None else cap * torch.tanh(gates / cap)
        log_gain, forget = wide(gates)
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
        output = self.out_proj(_gated(self, y, gate))
        final[2] = final[2].unsqueeze(2)
        return layout.batch(output), tuple([each[: x.shape[0]] for each in final])


def _gated(layer: Any, y: Tensor, gate: Tensor) -> Tensor:
    """Return the heads ``(N, H, V)`` after their norm, times the gate ``(B, T, H * V)``."""
    norm, act = layer.multihead_norm, layer.ogate_act_fn
    is_plain = type(norm).__name__ == "xLSTMMultiHeadLayerNorm" and type(act) is nn.Sigmoid
    if not is_plain or norm.weight is None or has_hooks(norm) or has_hooks(act):
        result: Tensor = act(gate) * norm(y.unflatten(0, gate.shape[:2]))
        return result
    gated = GatedNorm(y.shape[1], norm.eps, is_centred=True)
    output = gated(y.flatten(1), gate.flatten(0, 1), norm.weight).view_as(gate)
    return output if norm.bias is None else output + act(gate) * norm.bias
