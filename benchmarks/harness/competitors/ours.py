"""Raglane's layers on a Ragged batch, and variants that show the cost of one circumstance."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from harness.batch import Batch
from harness.competitors import pytorch
from harness.competitors.base import Answer, Forward, Runner, torch_runner
from raglane.kernels import dispatch
from raglane.nn.porting.accelerate import accelerate
from raglane.nn.recurrent.call import plan_of, prepare
from raglane.nn.recurrent.elementwise_layers import QRNN, SRU, IndRNN, MinGRU, MinLSTM
from raglane.nn.recurrent.explain import explain
from raglane.nn.recurrent.inputs import read
from raglane.nn.recurrent.torch_layers import GRU, LSTM, RNN
from raglane.ragged import Ragged

__all__ = [
    "choice_of",
    "equal",
    "in_float32",
    "kernel",
    "load_layer",
    "loop",
    "lstm",
    "one_element",
    "packed",
    "padded",
    "ragged",
    "ragged_runner",
    "reference",
]

_LAYERS: dict[str, Any] = {
    "lstm": LSTM,
    "gru": GRU,
    "rnn_tanh": RNN,
    "indrnn_tanh": partial(IndRNN, nonlinearity="tanh"),
    "mingru": MinGRU,
    "minlstm": MinLSTM,
    "sru": SRU,
    "qrnn": QRNN,
}


def load_layer(batch: Batch) -> Any:
    """Return a layer of ``rl.nn`` with the batch's weights."""
    return pytorch.load_layer(batch, _LAYERS)


def ragged(batch: Batch, mode: str, threads: int) -> Runner:  # noqa: ARG001
    """Prepare the layer of ``rl.nn`` on a Ragged batch, with ``auto``."""
    return ragged_runner(batch, mode, load_layer(batch))


def ragged_runner(batch: Batch, mode: str, layer: Any) -> Runner:
    """Prepare any layer that takes a Ragged batch."""

    def bind(data: Tensor) -> Forward:
        inputs = Ragged.from_flat(data, lengths=batch.lengths)

        def forward() -> tuple[Tensor, tuple[Tensor, ...]]:
            output, state = layer(inputs)
            return output.values, pytorch.state_of(state)

        return forward

    return torch_runner(mode, layer, bind, batch.values, batch.gradient, _as_it_is)


def packed(batch: Batch, mode: str, threads: int) -> Runner:  # noqa: ARG001
    """Prepare a layer of torch after ``rl.accelerate``, on a PackedSequence."""
    return pytorch.packed_runner(batch, mode, _accelerated(batch))


def padded(batch: Batch, mode: str, threads: int) -> Runner:  # noqa: ARG001
    """Prepare a layer of torch after ``rl.accelerate``, on a padded tensor with lengths."""
    layer = _accelerated(batch)

    def bind(data: Tensor) -> Forward:
        def forward() -> tuple[Tensor, tuple[Tensor, ...]]:
            output, state = layer(data, lengths=batch.lengths)
            return output, pytorch.state_of(state)

        return forward

    return pytorch.padded_runner(batch, mode, layer, bind)


def kernel(batch: Batch, mode: str, threads: int) -> Runner:  # noqa: ARG001
    """Prepare only the backend's call: no checks, no initial state, no Ragged output."""
    layer = load_layer(batch)

    def bind(data: Tensor) -> Forward:
        inputs = Ragged.from_flat(data, lengths=batch.lengths)
        weights = layer._weights()
        request = prepare(
            layer, plan_of(layer, weights, data), read(inputs, None, False), weights, None
        )
        choice = explain(layer, inputs)

        def forward() -> tuple[Tensor, tuple[Tensor, ...]]:
            result = dispatch.BACKENDS[choice.backend].run(request, choice.schedule)
            return cast(Tensor, result.output), tuple(part[0] for part in result.state)

        return forward

    return torch_runner(mode, layer, bind, batch.values, batch.gradient, _as_it_is)


def loop(batch: Batch, mode: str, threads: int) -> Runner:  # noqa: ARG001
    """Prepare the backward time loop of an element-wise cell, without products."""
    from raglane.kernels.cpu.layer import OutputGrads, Saved, layer_of

    module = load_layer(batch)
    cell, sizes = module.cell, module.state_sizes
    names = [f"{name}_l0" for name in cell.shapes(1, 1)]
    offsets = Ragged.from_flat(batch.values, lengths=batch.lengths).offsets
    weights = [None if part is None else part.detach() for part in module._weights()[0]]
    tensors = (batch.values, *weights)
    layer = layer_of(cell.name, offsets, tensors, len(weights), sizes, 1)
    ran = layer.forward(offsets, tensors, need_output=True, save=True, need_c=False)
    saved = Saved(*cast(Any, (ran.output, ran.gates, ran.c_states)))
    grads = OutputGrads(batch.gradient, None, (None,) * len(sizes))

    def walk(wanted: bool) -> tuple[Tensor | None, ...]:
        wants = (wanted,) * len(tensors)
        return layer.backward(offsets, tensors, saved, grads, wants, overwrite=False)

    def answer() -> Answer:
        found = walk(wanted=True)
        pairs = zip(names, found[1:], strict=True)
        gradients = {name: grad for name, grad in pairs if grad is not None} | {
            "input": cast(Tensor, found[0])
        }
        return Answer(cast(Tensor, ran.output), tuple(part[0] for part in ran.final), gradients)

    return Runner(lambda: walk(wanted=False), answer)


def in_float32(batch: Batch) -> Batch:
    """Return the batch in float32."""
    return batch.to(torch.float32)


def equal(batch: Batch) -> Batch:
    """Return the batch's elements in the same number of sequences of equal lengths."""
    count = len(batch.lengths)
    return batch.with_lengths([batch.elements // count] * count)


def lstm(batch: Batch) -> Batch:
    """Return the batch's input for an LSTM of the same sizes."""
    return batch.with_cell("lstm")


def one_element(batch: Batch) -> Batch:
    """Return one sequence of one element, to measure the overhead of a call."""
    return batch.with_lengths([1])


def choice_of(batch: Batch) -> str:
    """Return the backend of ``ours`` in words."""
    choice = explain(load_layer(batch), Ragged.from_flat(batch.values, lengths=batch.lengths))
    return f"backend {choice.backend}, schedule {choice.schedule}"


def reference(batch: Batch, mode: str) -> Answer:
    """Return the expected results: those of the kernel ``reference`` in float64."""
    with dispatch.use_backend(backend="reference"):
        return ragged(batch.to(torch.float64), mode, 1).answer()


def _accelerated(batch: Batch) -> torch.nn.Module:
    layer: torch.nn.Module = pytorch.load_layer(batch)
    accelerate(layer)
    return layer


def _as_it_is(flat: Tensor) -> Tensor:
    return flat
