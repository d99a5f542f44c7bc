"""Engines that run an ONNX model: ONNX Runtime and OpenVINO. Inference in float32, padded, with
``sequence_lens``.

The model is one LSTM, GRU or RNN node. ONNX has another order of gates, and an attribute for a GRU
whose reset gate is applied after the product, like torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.batch import Batch
from harness.competitors import pytorch
from harness.competitors.base import Answer, Runner, rows_of
from raglane._utils.messages import require

__all__ = ["bound", "model_of", "onnxruntime", "openvino", "session_of"]

_OPERATORS = {"lstm": "LSTM", "gru": "GRU", "rnn_tanh": "RNN"}
# The index of each gate of ONNX in torch's order: i, o, f, c of i, f, g, o; z, r, h of r, z, n.
_GATES = {"lstm": (0, 3, 1, 2), "gru": (1, 0, 2), "rnn_tanh": (0,)}
_OPSET, _IR_VERSION = 17, 8


def model_of(batch: Batch) -> bytes:
    """Return the layer in ONNX: ``x (T, B, D)`` and ``lengths (B,)`` int32 in; ``y (T, 1, B, H)``,
    ``h``, ``c`` out.
    """
    onnx: Any = require("onnx", "bench")
    helper, number = onnx.helper, onnx.TensorProto
    steps, count, features = batch.longest, len(batch.lengths), batch.values.shape[1]
    weights = batch.weights
    bias = torch.cat([_reorder(weights[f"bias_{side}_l0"], batch.cell) for side in ("ih", "hh")])
    constants = {
        "w": _reorder(weights["weight_ih_l0"], batch.cell),
        "r": _reorder(weights["weight_hh_l0"], batch.cell),
        "b": bias,
    }
    outputs = ["y", "h", "c"] if batch.cell == "lstm" else ["y", "h"]
    node = helper.make_node(
        _OPERATORS[batch.cell],
        ["x", *constants, "lengths"],
        outputs,
        hidden_size=batch.hidden,
        **({"linear_before_reset": 1} if batch.cell == "gru" else {}),
    )
    shapes = {
        "y": [steps, 1, count, batch.hidden],
        "h": [1, count, batch.hidden],
        "c": [1, count, batch.hidden],
    }
    graph = helper.make_graph(
        [node],
        "layer",
        [
            helper.make_tensor_value_info("x", number.FLOAT, [steps, count, features]),
            helper.make_tensor_value_info("lengths", number.INT32, [count]),
        ],
        [helper.make_tensor_value_info(name, number.FLOAT, shapes[name]) for name in outputs],
        [
            onnx.numpy_helper.from_array(constant[None].numpy(), name)
            for name, constant in constants.items()
        ],
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR_VERSION
    )
    onnx.checker.check_model(model)
    serialized: bytes = model.SerializeToString()
    return serialized


def onnxruntime(batch: Batch, mode: str, threads: int) -> Runner:  # noqa: ARG001
    """Prepare ONNX Runtime with bound inputs; every call allocates its outputs."""
    given = _inputs(batch)
    call, outputs = bound(session_of(model_of(batch), threads), given)
    return Runner(call, _answer(batch, outputs), given)


def session_of(model: bytes, threads: int) -> Any:
    """Return a session of ONNX Runtime with some threads."""
    engine: Any = require("onnxruntime", "bench")
    options = engine.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    # Its threads may spin while it runs, but not into the next competitor's turn.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return engine.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def bound(
    session: Any, given: dict[str, Any]
) -> tuple[Callable[[], None], Callable[[], list[Any]]]:
    """Return a function that runs a session on bound inputs, and one that also returns its
    outputs.
    """
    binding = session.io_binding()
    for name, array in given.items():
        binding.bind_cpu_input(name, array)
    for output in session.get_outputs():
        binding.bind_output(output.name, "cpu")

    def call() -> None:
        session.run_with_iobinding(binding)

    def outputs() -> list[Any]:
        call()
        found: list[Any] = binding.copy_outputs_to_cpu()
        return found

    return call, outputs


def openvino(batch: Batch, mode: str, threads: int) -> Runner:  # noqa: ARG001
    """Prepare OpenVINO in float32, tuned for latency, with its inputs set."""
    engine: Any = require("openvino", "bench")
    core = engine.Core()
    properties = {
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": "f32",
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
    }
    compiled = core.compile_model(core.read_model(model_of(batch), b""), "CPU", properties)
    request, given = compiled.create_infer_request(), _inputs(batch)
    for name, array in given.items():
        request.set_tensor(name, engine.Tensor(array, shared_memory=True))

    def call() -> None:
        request.infer()

    def outputs() -> list[Any]:
        call()
        return [
            np.array(request.get_output_tensor(place).data)
            for place in range(len(compiled.outputs))
        ]

    return Runner(call, _answer(batch, outputs), given)


def _inputs(batch: Batch) -> dict[str, Any]:
    padded = np.ascontiguousarray(pytorch.pad(batch.values, batch.lengths).numpy())
    return {"x": padded, "lengths": batch.lengths.numpy().astype(np.int32)}


def _answer(batch: Batch, outputs: Callable[[], list[Any]]) -> Callable[[], Answer]:
    def answer() -> Answer:
        y, *state = (torch.from_numpy(part) for part in outputs())
        return Answer(rows_of(y[:, 0], batch.lengths), tuple(part[0] for part in state))

    return answer


def _reorder(weight: Tensor, cell: str) -> Tensor:
    gates = weight.chunk(len(_GATES[cell]))
    return torch.cat([gates[place] for place in _GATES[cell]])
