"""Layers with the weights of other libraries: ``rl.import_layer``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from raglane._utils.checks import check_choice
from raglane._utils.messages import quote
from raglane.errors import ArgumentError, ArgumentTypeError
from raglane.nn.porting.arrays import KINDS
from raglane.nn.porting.flax import of_flax
from raglane.nn.porting.keras import of_arrays, of_keras
from raglane.nn.porting.onnx import of_onnx
from raglane.nn.porting.xlstm import of_slstm
from raglane.nn.recurrent.layer import RecurrentLayer


def import_layer(
    source: Any,
    kind: Literal["lstm", "gru", "gru_reset_before", "rnn", "rnn_relu"] | None = None,
    *,
    node: str | None = None,
) -> RecurrentLayer:
    """Return a layer with the weights of another library's, which computes the same outputs and
    final states.

    The library itself is not imported. :doc:`/weights` has an example of each.

    Args:
        source: one of

            - a Keras 3 layer ``LSTM``, ``GRU`` or ``SimpleRNN``, or ``Bidirectional`` of one; or
              the list of arrays that its ``get_weights()`` returns, with ``kind``.
            - the parameters of a Flax cell, of its ``RNN``, or of a ``Bidirectional`` of two: a
              dict of arrays by the names of ``flax.linen`` or ``flax.nnx``. With ``flax.nnx`` it is
              ``nnx.state(cell).to_pure_dict()``.
            - an ONNX model with a node LSTM, GRU or RNN: the path of the file, or a ``ModelProto``.
            - an sLSTM cell of ``xlstm``, or of TiRex: its input is that of the four gates. Or their
              sLSTM layer without a convolution; the result is its recurrence, without the norm that
              follows.
        kind: of arrays, the cell: ``"lstm"``, ``"gru"``, ``"gru_reset_before"`` (Keras'
            ``reset_after=False``), ``"rnn"`` (with tanh) or ``"rnn_relu"``.
            Of parameters of Flax only for ``"rnn_relu"``, since they do not contain the activation.
            Otherwise None.
        node: the name of the node, or of its first output, in an ONNX model with several.

    Returns:
        A layer of ``rl.nn`` with copies of the weights, in their dtype. It is ``batch_first``,
        except for an ONNX node with another layout. If an ONNX node has constant initial states
        that are not zeros, they are learned ones of the layer. Options of the library that are not
        weights, such as dropout, are left out.

    Raises:
        ArgumentTypeError: ``source`` is none of these.
        ArgumentError: the layer has options that no layer of ``rl.nn`` has, such as other
            activations; or an array is not constant, not of real numbers, or not used.
        ShapeError: the shapes of the arrays do not match each other.

    Example:
        >>> import numpy as np
        >>> arrays = [np.ones((3, 16)), np.ones((4, 16)), np.ones(16)]  # keras_layer.get_weights()
        >>> rl.import_layer(arrays, "lstm")
        LSTM(3, 4, batch_first=True)
    """
    is_onnx = isinstance(source, str | Path) or hasattr(source, "SerializeToString")
    has_kind = isinstance(source, Mapping | list | tuple)
    for name, value, is_used in (("kind", kind, has_kind), ("node", node, is_onnx)):
        if value is not None and not is_used:
            raise ArgumentError(name, quote(value), "None for this source", "leave it out")
    if is_onnx:
        return of_onnx(source, node)
    if isinstance(source, Mapping):
        return of_flax(source, kind)
    if isinstance(source, list | tuple):
        return of_arrays(source, check_choice("kind", kind, tuple(KINDS)))
    if hasattr(source, "get_weights") and hasattr(source, "get_config"):
        return of_keras(source)
    if isinstance(source, torch.nn.Module) and hasattr(
        getattr(source, "slstm_cell", source), "_recurrent_kernel_"
    ):
        return of_slstm(source)
    rule = "a recurrent layer of Keras, parameters of Flax, an ONNX model, or an sLSTM of xlstm"
    fix = "pass one of these; rl.accelerate converts torch.nn.LSTM, GRU and RNN"
    raise ArgumentTypeError("source", f"a {type(source).__name__}", rule, fix)
