"""JAX: a masked scan over a padded batch, compiled by XLA; forward, or with the gradients of
weights and input.

The input products of all steps are one product before the scan. After its end, a row keeps its
state.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from harness.batch import Batch
from harness.competitors import pytorch
from harness.competitors.base import Answer, Runner, rows_of
from raglane._utils.messages import require

__all__ = ["jax"]


def jax(batch: Batch, mode: str, threads: int) -> Runner:
    """A layer on a padded batch with a mask, compiled for the shapes of this batch before it is
    timed.
    """
    library: Any = require("jax", "bench")
    with _threads(threads):
        library.config.update("jax_platforms", "cpu")
        # The number of threads is read when the client is made.
        require("jax.extend.backend", "bench").clear_backends()
        library.devices()
    weights = {
        name: library.numpy.asarray(weight.numpy()) for name, weight in batch.weights.items()
    }
    values, gradient = (
        library.numpy.asarray(pytorch.pad(flat, batch.lengths).numpy())
        for flat in (batch.values, batch.gradient)
    )
    steps = np.arange(batch.longest)[:, None, None]
    mask = library.numpy.asarray(steps < batch.lengths.numpy()[None, :, None])
    layer = _layer(library, batch)

    def train(weights: Any, values: Any, mask: Any, gradient: Any) -> Any:
        (output, state), pull = library.vjp(lambda w, x: layer(w, x, mask), weights, values)
        zeros = library.tree_util.tree_map(library.numpy.zeros_like, state)
        return output, state, pull((gradient, zeros))

    given = (weights, values, mask, gradient) if mode == "train" else (weights, values, mask)
    compiled = library.jit(train if mode == "train" else layer)

    def call() -> Any:
        return library.block_until_ready(compiled(*given))

    def answer() -> Answer:
        output, state, *pulled = call()
        gradients: dict[str, torch.Tensor] = {}
        if pulled:
            of_weights, of_input = pulled[0]
            gradients = {name: _tensor(gradient) for name, gradient in of_weights.items()}
            gradients["input"] = rows_of(_tensor(of_input), batch.lengths)
        return Answer(
            rows_of(_tensor(output), batch.lengths), tuple(map(_tensor, state)), gradients
        )

    return Runner(call, answer)


def _layer(library: Any, batch: Batch) -> Callable[[Any, Any, Any], Any]:
    """Map weights, padded input ``(T, B, D)`` and mask ``(T, B, 1)`` to outputs ``(T, B, H)`` and
    final states.
    """
    numpy, nn = library.numpy, library.nn
    count, hidden = len(batch.lengths), batch.hidden

    def lstm(product: Any, recurrent: Any, state: Any) -> Any:
        i, f, g, o = numpy.split(product + recurrent, 4, axis=1)
        c = nn.sigmoid(f) * state[1] + nn.sigmoid(i) * numpy.tanh(g)
        return nn.sigmoid(o) * numpy.tanh(c), c

    def gru(product: Any, recurrent: Any, state: Any) -> Any:
        (r, z, n), (r_h, z_h, n_h) = (
            numpy.split(product, 3, axis=1),
            numpy.split(recurrent, 3, axis=1),
        )
        z = nn.sigmoid(z + z_h)
        return ((1 - z) * numpy.tanh(n + nn.sigmoid(r + r_h) * n_h) + z * state[0],)

    def rnn_tanh(product: Any, recurrent: Any, state: Any) -> Any:  # noqa: ARG001
        return (numpy.tanh(product + recurrent),)

    cell = {"lstm": lstm, "gru": gru, "rnn_tanh": rnn_tanh}[batch.cell]
    states = 2 if batch.cell == "lstm" else 1

    def layer(weights: Any, values: Any, mask: Any) -> Any:
        products = values @ weights["weight_ih_l0"].T + weights["bias_ih_l0"]

        def step(state: Any, now: Any) -> Any:
            product, is_real = now
            recurrent = state[0] @ weights["weight_hh_l0"].T + weights["bias_hh_l0"]
            new = cell(product, recurrent, state)
            kept = tuple(
                numpy.where(is_real, after, before)
                for after, before in zip(new, state, strict=True)
            )
            return kept, kept[0]

        start = (numpy.zeros((count, hidden), values.dtype),) * states
        state, output = library.lax.scan(step, start, (products, mask))
        return output, state

    return layer


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """XLA takes this variable for the number of processors, and with it of its threads."""
    before = os.environ.get("NPROC")
    os.environ["NPROC"] = str(count)
    try:
        yield
    finally:
        if before is None:
            del os.environ["NPROC"]
        else:
            os.environ["NPROC"] = before


def _tensor(array: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(array))
