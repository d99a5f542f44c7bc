"""Packages whose weights ``rl.import_layer`` reads; an example returns the largest difference in
a dtype.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from comparison import BOUNDS

import raglane as rl


def compare(example: Callable[[torch.dtype], float]) -> dict[str, float]:
    """Return the differences of an example by dtype, without a dtype in which the package does not
    compute.
    """
    found = {}
    for dtype in BOUNDS:
        torch.manual_seed(0)
        difference = example(dtype)
        assert not difference > BOUNDS[dtype], f"{difference:.1e} in {dtype}"
        if not math.isnan(difference):
            found[f"difference {str(dtype)[6:]}"] = difference
    return found


def _worst(pairs: Any) -> float:
    """Return the largest difference of pairs of arrays, relative to the largest number of the
    second of each.
    """
    worst = 0.0
    for ours, theirs in pairs:
        theirs = torch.as_tensor(np.asarray(theirs)).double()
        worst = max(worst, float((ours.detach() - theirs).abs().max() / theirs.abs().max()))
    return worst


def keras(dtype: torch.dtype) -> float:
    """LSTM, GRU, SimpleRNN and Bidirectional of Keras 3, with its torch backend."""
    os.environ["KERAS_BACKEND"] = "torch"
    import keras as k

    k.config.set_floatx(str(dtype)[6:])  # of initial states
    options = {
        "dtype": str(dtype)[6:],
        "return_sequences": True,
        "return_state": True,
        "bias_initializer": "glorot_uniform",
    }
    makers = [
        lambda: k.layers.LSTM(5, **options),
        lambda: k.layers.LSTM(5, use_bias=False, **options),
        lambda: k.layers.GRU(5, **options),
        lambda: k.layers.GRU(5, use_bias=False, **options),
        lambda: k.layers.Bidirectional(k.layers.LSTM(5, **options), dtype=options["dtype"]),
        lambda: k.layers.Bidirectional(k.layers.GRU(5, **options), dtype=options["dtype"]),
    ]
    if dtype is torch.float32:  # Keras rounds the others to it
        makers += [
            lambda: k.layers.GRU(5, reset_after=False, **options),
            lambda: k.layers.SimpleRNN(5, **options),
            lambda: k.layers.SimpleRNN(5, activation="relu", **options),
            lambda: k.layers.Bidirectional(k.layers.GRU(5, reset_after=False, **options)),
        ]
    values = torch.randn(3, 7, 4, dtype=dtype)
    pairs = []
    for make in makers:
        layer = make()
        output, *state = [part.detach() for part in layer(values)]
        # Keras has all states of one direction, then those of the other.
        ours, final = rl.import_layer(layer)(values)
        parts = torch.stack(final if isinstance(final, tuple) else (final,), 1).flatten(0, 1)
        pairs += [(ours, output), *zip(parts, state, strict=True)]
    return _worst(pairs)


def flax(dtype: torch.dtype) -> float:
    """Cells of flax.linen and flax.nnx, alone and in RNN and Bidirectional."""
    import jax
    from flax import linen, nnx

    jax.config.update("jax_enable_x64", True)
    kind = str(dtype)[6:]
    values = torch.randn(3, 7, 4, dtype=dtype)
    pairs = []
    for name in ("OptimizedLSTMCell", "LSTMCell", "GRUCell", "SimpleCell"):

        def make(name: str = name) -> Any:
            bias = jax.nn.initializers.normal()
            return linen.RNN(getattr(linen, name)(5, bias_init=bias, dtype=kind, param_dtype=kind))

        for model in (make(), linen.Bidirectional(make(), make())):
            params = model.init(jax.random.key(0), values.numpy())
            pairs.append((rl.import_layer(params)(values)[0], model.apply(params, values.numpy())))
        cell = getattr(nnx, name)(4, 5, dtype=kind, param_dtype=kind, rngs=nnx.Rngs(0))
        model = nnx.RNN(cell, rngs=nnx.Rngs(0))
        states = nnx.state(model, nnx.Param), nnx.state(cell, nnx.Param).to_pure_dict()
        pairs += [(rl.import_layer(params)(values)[0], model(values.numpy())) for params in states]
    return _worst(pairs)


def onnx(dtype: torch.dtype) -> float:
    """Nodes LSTM, GRU and RNN of files, run by ONNX Runtime."""
    import onnxruntime
    from onnx import helper, numpy_helper

    if dtype is torch.float64:
        return math.nan  # ONNX Runtime has no kernels for it
    values = torch.randn(7, 3, 4)
    cases: list[tuple[str, int, dict[str, Any]]] = [
        ("LSTM", 4, {}),
        ("LSTM", 4, {"clip": 0.3}),
        ("LSTM", 4, {"input_forget": 1}),
        ("LSTM", 4, {"peepholes": True, "clip": 0.5}),
        ("GRU", 3, {}),
        ("GRU", 3, {"linear_before_reset": 1}),
        ("RNN", 1, {}),
        ("RNN", 1, {"activations": ["Relu"]}),
    ]
    pairs = []
    for name, gates, attributes in cases:
        for count in (1, 2):
            options = {
                key: value * count if isinstance(value, list) else value
                for key, value in attributes.items()
            }
            shapes = {
                "W": (count, 5 * gates, 4),
                "R": (count, 5 * gates, 5),
                "B": (count, 10 * gates),
            }
            if options.pop("peepholes", False):
                shapes["P"] = (count, 15)
            stored = [
                numpy_helper.from_array(torch.randn(shape).numpy(), part)
                for part, shape in shapes.items()
            ]
            inputs = ["X", "W", "R", "B", *(["", "", "", "P"] if "P" in shapes else [])]
            direction = "forward" if count == 1 else "bidirectional"
            node = helper.make_node(
                name, inputs, ["Y", "Y_h"], hidden_size=5, direction=direction, **options
            )
            ends = [
                [helper.make_tensor_value_info(part, 1, None) for part in parts]
                for parts in (["X"], ["Y", "Y_h"])
            ]
            graph = helper.make_graph([node], "model", *ends, stored)
            model = helper.make_model(
                graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10
            )
            output, state = onnxruntime.InferenceSession(model.SerializeToString()).run(
                None, {"X": values.numpy()}
            )
            ours, final = rl.import_layer(model)(values)
            pairs.append((ours, output.transpose(0, 2, 1, 3).reshape(7, 3, -1)))
            pairs.append((final[0] if isinstance(final, tuple) else final, state))
    return _worst(pairs)


def tirex(dtype: torch.dtype) -> float:
    """The sLSTM layers of TiRex, with the equations of its torch backend in this dtype."""
    from tirex.models.slstm.block import sLSTMBlockConfig
    from tirex.models.slstm.cell import sLSTMCellTorch
    from tirex.models.slstm.layer import sLSTMLayer

    layer = sLSTMLayer(sLSTMBlockConfig(embedding_dim=32, num_heads=4), "torch").to(dtype)
    for part in layer.parameters():
        torch.nn.init.normal_(part, std=0.3)
    cell, values = layer.slstm_cell, torch.randn(3, 20, 32, dtype=dtype)
    gates = torch.cat(
        [gate(values) for gate in (layer.fgate, layer.igate, layer.zgate, layer.ogate)], 2
    )
    bias = cell._bias_.view(4, 4, 8).transpose(0, 1).flatten()
    state = torch.zeros(4, 3, 32, dtype=dtype)
    float32, torch.Tensor.float = torch.Tensor.float, lambda part: part.to(dtype)
    output, _ = sLSTMCellTorch.slstm_forward(
        gates.transpose(0, 1), state, cell._recurrent_kernel_, bias
    )
    torch.Tensor.float = float32
    output = output.transpose(0, 1).detach()
    pairs = [
        (rl.import_layer(layer)(values)[0], output),
        (rl.import_layer(cell)(gates)[0], output),
    ]
    whole = rl.accelerate(cell)(gates)[0].transpose(1, 2).flatten(2)
    return _worst([*pairs, (whole, output)])
