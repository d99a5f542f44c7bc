"""Layers of Keras 3, and of the arrays that their ``get_weights`` returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from raglane._utils.checks import read_values
from raglane.errors import ArgumentError, ShapeError
from raglane.nn.porting.arrays import (
    BACKWARDS,
    KINDS,
    Z_R_N,
    Arrays,
    check_option,
    layer_of,
    matrix_of,
    ordered,
)
from raglane.nn.recurrent.layer import RecurrentLayer


def of_arrays(arrays: Sequence[Any], kind: str) -> RecurrentLayer:
    """Return the layer of arrays in the order of Keras' ``get_weights``."""
    if len(arrays) not in (2, 3, 4, 6):
        rule = "2 arrays per direction, or 3 with a bias: kernel, recurrent kernel, bias"
        fix = "pass what layer.get_weights() returns, after the layer was built"
        raise ArgumentError("source", f"{len(arrays)} arrays", rule, fix)
    count = len(arrays) // 2 if len(arrays) > 3 else len(arrays)
    starts = range(0, len(arrays), count)
    directions = [_direction_of(arrays[start : start + count], start, kind) for start in starts]
    return layer_of(KINDS[kind], directions)


def _direction_of(arrays: Sequence[Any], start: int, kind: str) -> Arrays:
    """Return the parameters of one direction, whose first array has the index ``start``."""
    kernel = matrix_of(arrays[0], f"source[{start}]")
    recurrent = matrix_of(arrays[1], f"source[{start + 1}]")
    parameters = {"weight_ih": kernel.t(), "weight_hh": recurrent.t()}
    if len(arrays) == 3:
        name = f"source[{start + 2}]"
        bias = read_values(arrays[2], name)
        if bias.dim() != (2 if kind == "gru" else 1) or (kind == "gru" and bias.shape[0] != 2):
            rule = f"({'2, ' if kind == 'gru' else ''}gates * units,) for kind={kind!r}"
            fix = "a GRU with reset_after has two biases, kind='gru'; without, one, kind='gru_reset_before'"
            raise ShapeError(name, f"shape {tuple(bias.shape)}", rule, fix)
        biases = bias if kind == "gru" else (bias, torch.zeros_like(bias))
        parameters |= zip(("bias_ih", "bias_hh"), biases, strict=True)
    if not kind.startswith("gru"):
        return parameters
    return {name: ordered(array, Z_R_N) for name, array in parameters.items()}


def of_keras(layer: Any) -> RecurrentLayer:
    """Return the layer of a Keras layer."""
    settings = layer.get_config()
    directions = [layer]
    if "merge_mode" in settings:
        check_option("merge_mode", settings["merge_mode"], "concat")
        directions = [layer.forward_layer, layer.backward_layer]
    kinds = {_kind_of(direction, bool(reverse)) for reverse, direction in enumerate(directions)}
    if len(kinds) > 1:
        rule = "layers of one kind in both directions"
        fix = "convert each by itself"
        raise ArgumentError("source", " and ".join(sorted(kinds)), rule, fix)
    return of_arrays(layer.get_weights(), kinds.pop())


def _kind_of(layer: Any, reverse: bool) -> str:
    """Return the kind of a Keras layer of one direction, whose options are checked."""
    settings = layer.get_config()
    name = type(layer).__name__
    activations = ("tanh", "relu") if name == "SimpleRNN" else ("tanh",)
    check_option("the class of the layer", name, "LSTM", "GRU", "SimpleRNN")
    check_option("go_backwards", settings.get("go_backwards", False), reverse, fix=BACKWARDS)
    check_option("activation", settings["activation"], *activations)
    check_option("recurrent_activation", settings.get("recurrent_activation", "sigmoid"), "sigmoid")
    gru = "gru" if settings.get("reset_after", False) else "gru_reset_before"
    rnn = "rnn" if settings["activation"] == "tanh" else "rnn_relu"
    return {"LSTM": "lstm", "GRU": gru, "SimpleRNN": rnn}[name]
