"""The cells of Keras as loops of NumPy, whose outputs converted layers are compared with."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import raglane as rl

D, H, B, T = 3, 5, 4, 6
GATES = {"lstm": 4, "gru": 3, "gru_reset_before": 3, "rnn": 1, "rnn_relu": 1}


def sigmoid(values: Any) -> Any:
    return 1 / (1 + np.exp(-values))


def _step(kind: str, x: Any, h: Any, c: Any, w: Any, u: Any, b: Any, reset: Any) -> tuple[Any, Any]:
    """One step of Keras' cells: kernels ``(D, G * H)``, gates i f c o and z r h; ``reset`` is the
    second bias.
    """
    if kind == "lstm":
        i, f, g, o = np.split(x @ w + h @ u + b + reset, 4, 1)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        return sigmoid(o) * np.tanh(c), c
    if kind.startswith("rnn"):
        argument = x @ w + h @ u + b + reset
        return (np.tanh(argument) if kind == "rnn" else np.maximum(argument, 0)), c
    xz, xr, xh = np.split(x @ w + b, 3, 1)
    hz, hr, hh = np.split(h @ u + reset, 3, 1)
    z, r = sigmoid(xz + hz), sigmoid(xr + hr)
    inner = r * hh if kind == "gru" else (r * h) @ u[:, 2 * H :]
    return z * h + (1 - z) * np.tanh(xh + inner), c


def run_keras(kind: str, values: Any, directions: list[list[Any]]) -> Any:
    outputs = []
    for reverse, (w, u, *bias) in enumerate(directions):
        b, reset = bias[0] if bias and bias[0].ndim == 2 else ([*bias, 0.0][0], 0.0)
        h, c, found = np.zeros((B, H)), np.zeros((B, H)), []
        for x in values[::-1] if reverse else values:
            h, c = _step(kind, x, h, c, w, u, b, reset)
            found.append(h)
        outputs.append(np.stack(found[::-1] if reverse else found))
    return np.concatenate(outputs, 2)


def keras_arrays(kind: str, bias: bool = True) -> list[Any]:
    random, rows = np.random.default_rng(7), GATES[kind] * H
    shapes = [(D, rows), (H, rows), *([(2, rows) if kind == "gru" else (rows,)] if bias else [])]
    return [random.normal(size=shape) for shape in shapes]


def output_of(layer: Any, values: Any, batch_first: bool = True) -> Any:
    """The outputs of a layer on a batch with sequences of every length, which must not depend on
    the padding.
    """
    ragged, _ = layer(
        rl.Ragged([torch.as_tensor(values[: max(0, T - 2 * row), row]) for row in range(B)])
    )
    output, _ = layer(
        torch.as_tensor(values).transpose(0, 1) if batch_first else torch.as_tensor(values)
    )
    output = output.transpose(0, 1) if batch_first else output
    if not layer.bidirectional:
        for row, part in enumerate(ragged.to_list()):
            torch.testing.assert_close(part, output[: len(part), row], rtol=0, atol=1e-12)
    return output.detach().numpy()
