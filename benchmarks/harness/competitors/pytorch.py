"""PyTorch's layers: packed, padded, and packed in a batch that is sorted by length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pad_packed_sequence,
    pad_sequence,
)

from harness.batch import Batch
from harness.competitors.base import Answer, Forward, Runner, rows_of, torch_runner

__all__ = [
    "load_layer",
    "packed",
    "packed_runner",
    "pad",
    "padded",
    "padded_runner",
    "sorted_first",
    "state_of",
]

_LAYERS: dict[str, Any] = {
    "lstm": torch.nn.LSTM,
    "gru": torch.nn.GRU,
    "rnn_tanh": torch.nn.RNN,
}


def load_layer(batch: Batch, layers: dict[str, Any] | None = None) -> Any:
    """Return a layer with the batch's weights."""
    kind = (_LAYERS if layers is None else layers)[batch.cell]
    layer = kind(batch.values.shape[1], batch.hidden, dtype=batch.dtype, device="cpu")
    layer.load_state_dict(batch.weights)
    return layer


def state_of(state: Any) -> tuple[Tensor, ...]:
    """Return the final states of a layer, ``(B, H)`` each."""
    return tuple(part[0] for part in (state if isinstance(state, tuple) else (state,)))


def pad(flat: Tensor, lengths: Tensor) -> Tensor:
    """Convert flat values ``(N, F)`` to a tensor ``(T, B, F)`` padded with zeros."""
    return pad_sequence(list(flat.split(lengths.tolist())))


def packed(batch: Batch, mode: str, threads: int) -> Runner:  # noqa: ARG001
    """Prepare torch's layer on a PackedSequence in the caller's order; packing is not timed."""
    return packed_runner(batch, mode, load_layer(batch))


def packed_runner(batch: Batch, mode: str, layer: Any) -> Runner:
    """Prepare any layer that takes a PackedSequence."""
    return _pack_runner(
        batch, mode, layer, torch.arange(len(batch.lengths), device="cpu"), enforce_sorted=False
    )


def sorted_first(batch: Batch, mode: str, threads: int) -> Runner:  # noqa: ARG001
    """Prepare torch's layer on a sorted and packed batch; outputs stay in that order."""
    order = batch.lengths.argsort(descending=True, stable=True)
    runner = _pack_runner(batch, mode, load_layer(batch), order, enforce_sorted=True)
    back = order.argsort()

    def answer() -> Answer:
        found = runner.answer()
        return replace(found, state=tuple(part[back] for part in found.state or ()))

    return Runner(runner.call, answer)


def padded(batch: Batch, mode: str, threads: int) -> Runner:  # noqa: ARG001
    """Prepare torch's layer on a padded tensor; the final state of a short row follows its
    padding.
    """
    layer = load_layer(batch)
    is_ragged = len(set(batch.lengths.tolist())) > 1

    def bind(data: Tensor) -> Forward:
        def forward() -> tuple[Tensor, tuple[Tensor, ...] | None]:
            output, state = layer(data)
            return output, None if is_ragged else state_of(state)

        return forward

    return padded_runner(batch, mode, layer, bind)


def padded_runner(
    batch: Batch, mode: str, layer: torch.nn.Module, bind: Callable[[Tensor], Forward]
) -> Runner:
    """Prepare any layer that takes a padded tensor ``(T, B, D)``."""

    def flatten(tensor: Tensor) -> Tensor:
        return rows_of(tensor, batch.lengths)

    data, gradient = (pad(flat, batch.lengths) for flat in (batch.values, batch.gradient))
    return torch_runner(mode, layer, bind, data, gradient, flatten)


def _pack_runner(
    batch: Batch, mode: str, layer: Any, order: Tensor, *, enforce_sorted: bool
) -> Runner:
    """Prepare a layer on a pack of the sequences in some order."""
    lengths, back = batch.lengths[order], order.argsort()

    def pack(flat: Tensor) -> PackedSequence:
        return pack_padded_sequence(
            pad(flat, batch.lengths)[:, order], lengths, enforce_sorted=enforce_sorted
        )

    layout = pack(batch.values)

    def bind(data: Tensor) -> Forward:
        inputs = layout._replace(data=data)

        def forward() -> tuple[Tensor, tuple[Tensor, ...]]:
            output, state = layer(inputs)
            return output.data, state_of(state)

        return forward

    def flatten(data: Tensor) -> Tensor:
        unpacked, _ = pad_packed_sequence(layout._replace(data=data))
        return rows_of(unpacked[:, back], batch.lengths)

    return torch_runner(mode, layer, bind, layout.data, pack(batch.gradient).data, flatten)
