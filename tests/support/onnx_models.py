"""ONNX models without the package onnx: a writer of protobuf with the fields of onnx.proto, and the
networks of the files in tests/nn/exported.

``python tests/support/onnx_models.py`` writes these files again; it needs raglane[export].
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

FOLDER = Path(__file__).parents[1] / "nn" / "exported"
_TYPES = {"float32": 1, "int32": 6, "int64": 7, "bool": 9, "float16": 10, "float64": 11}
_TYPES |= {"complex64": 14}
_SINGLE = {float: (2, 1), int: (3, 2), str: (4, 3)}


def message(*fields: tuple[int, Any]) -> bytes:
    """Return a message of fields: their numbers and values."""
    return b"".join(_field(number, value) for number, value in fields)


def _field(number: int, value: Any) -> bytes:
    if isinstance(value, float):
        return _varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value % 2**64)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    data = b""
    while value > 127:
        data += bytes([value & 127 | 128])
        value >>= 7
    return data + bytes([value])


def tensor(array: Any, name: str = "") -> bytes:
    """Return a ``TensorProto`` of an array, or of a tensor of bfloat16."""
    if isinstance(array, Tensor):
        kind, data, shape = 16, array.view(torch.int16).numpy().tobytes(), tuple(array.shape)
    else:
        array = np.asarray(array)
        kind, data, shape = _TYPES[str(array.dtype)], array.tobytes(), array.shape
    return message(*((1, size) for size in shape), (2, kind), (8, name), (9, data))


def _attribute(name: str, value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        return message((1, name), (5, tensor(value)), (20, 4))
    is_list = isinstance(value, list)
    # The field of the value, and AttributeProto.AttributeType.
    fields = {float: (7, 6), int: (8, 7), str: (9, 8)} if is_list else _SINGLE
    number, kind = fields[type(value[0] if is_list else value)]
    values = value if is_list else [value]
    return message((1, name), *((number, item) for item in values), (20, kind))


def node(
    operator: str, inputs: str, outputs: str, name: str = "", domain: str = "", **attributes: Any
) -> bytes:
    """Return a ``NodeProto``; inputs and outputs are separated by blanks, and "_" is none."""
    ends = [
        (number, "" if end == "_" else end)
        for number, ends in ((1, inputs), (2, outputs))
        for end in ends.split()
    ]
    parts = [(5, _attribute(key, value)) for key, value in attributes.items()]
    return message(*ends, (3, name), (4, operator), *parts, (7, domain))


def _value(name: str, shape: list[Any]) -> bytes:
    sizes = [(1, message((1 if isinstance(size, int) else 2, size))) for size in shape]
    return message((1, name), (2, message((1, message((1, 1), (2, message(*sizes)))))))


class Model:
    """A model with the one method of a ``ModelProto`` that is used.

    Args:
        nodes: the nodes, in order.
        stored: the initializers by name.
        inputs: the sizes of the inputs by name: numbers, or names.
        outputs: the names of the outputs.
    """

    def __init__(
        self,
        nodes: list[bytes],
        stored: dict[str, Any],
        inputs: dict[str, list[Any]],
        outputs: list[str],
    ) -> None:
        graph = message(
            *((1, item) for item in nodes),
            (2, "graph"),
            *((5, tensor(array, name)) for name, array in stored.items()),
            *((11, _value(name, shape)) for name, shape in inputs.items()),
            *((12, message((1, name))) for name in outputs),
        )
        self.data = message((1, 9), (7, graph), (8, message((1, ""), (2, 20))))

    def SerializeToString(self) -> bytes:  # noqa: N802
        """Return the bytes of the file."""
        return self.data


class Network(torch.nn.Module):
    """A layer of torch with weights that need no file, and a learned initial state or none."""

    def __init__(self, kind: str, form: str) -> None:
        super().__init__()
        options: dict[str, Any] = {"num_layers": 2, "bidirectional": True} if form == "deep" else {}
        self.layer = getattr(torch.nn, kind)(2, 3, **options)
        for index, parameter in enumerate(self.layer.parameters()):
            numbers = torch.arange(parameter.numel(), dtype=torch.float32)
            parameter.data = (numbers * 1.7 + index).sin().reshape(parameter.shape)
        self.is_lstm = kind == "LSTM"
        self.initial = torch.nn.Parameter(torch.tensor([[[0.5, -0.25, 0.75]]]))
        self.is_learned = form == "learned"

    def forward(self, values: Tensor) -> Any:
        if not self.is_learned:
            return self.layer(values)
        state = self.initial.expand(-1, values.shape[1], -1).contiguous()
        return self.layer(values, (state, 2 * state) if self.is_lstm else state)


def file_names() -> list[str]:
    """Return the names of the files: layer, form, exporter and sizes."""
    names = [
        f"{kind}-{form}-{exporter}-{sizes}"
        for kind in ("LSTM", "GRU", "RNN")
        for form in ("plain", "learned")
        for exporter in ("script", "dynamo")
        for sizes in ("static", "dynamic")
        if (kind, exporter) != ("RNN", "dynamo")  # this exporter writes a node per step
    ]
    return [*names, "GRU-deep-script-dynamic", "GRU-deep-dynamo-dynamic"]


def _write(name: str) -> None:
    import onnx

    kind, form, exporter, sizes = name.split("-")
    options: dict[str, Any] = {}
    if sizes == "dynamic" and exporter == "script":
        options["dynamic_axes"] = {"x": {0: "steps", 1: "sequences"}}
    elif sizes == "dynamic":
        size = torch.export.Dim("sequences")
        options["dynamic_shapes"] = ({1: size},)
    path = FOLDER / f"{name}.onnx"
    torch.onnx.export(
        Network(kind, form).eval(),
        (torch.zeros(4, 3, 2),),
        path,
        dynamo=exporter == "dynamo",
        input_names=["x"],
        verbose=False,
        external_data=False,
        **options,
    )
    model = onnx.load(path)
    for part in (model.graph, *model.graph.node, *model.graph.input, *model.graph.output):
        del part.metadata_props[:]
        part.doc_string = ""
    del model.graph.value_info[:]
    onnx.save(model, path)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file_name in file_names():
        _write(file_name)
