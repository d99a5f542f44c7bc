"""Reads the graph of an ONNX file: the fields of onnx.proto that a recurrent node's inputs need.

The package onnx is not required. Numbers of fields are those of onnx.proto.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raglane._utils.messages import quote
from raglane.errors import ArgumentError

# The sizes in bytes of the fields of protobuf with a fixed size, by wire type.
_FIXED = {1: 8, 5: 4}
_BYTES = 2  # the wire type of fields that begin with their size
# TensorProto.DataType: torch's dtype, and the field of numbers without raw_data.
_DTYPES = {
    1: (torch.float32, 4),
    2: (torch.uint8, 5),
    3: (torch.int8, 5),
    4: (torch.uint16, 5),
    5: (torch.int16, 5),
    6: (torch.int32, 5),
    7: (torch.int64, 7),
    9: (torch.bool, 5),
    10: (torch.float16, 5),
    11: (torch.float64, 10),
    12: (torch.uint32, 11),
    13: (torch.uint64, 11),
    14: (torch.complex64, 4),
    15: (torch.complex128, 10),
    16: (torch.bfloat16, 5),
}
_MOST = 2**31  # a dimension of a weight is smaller
_STORED_ELSEWHERE = 1  # TensorProto.DataLocation


def _damaged(what: str) -> ArgumentError:
    """Return the error of bytes that are no ONNX model."""
    return ArgumentError("source", what, "an ONNX file", "pass the path of one")


class Message:
    """A message of protobuf: the values of its fields by number, decoded when they are read."""

    def __init__(self, data: memoryview) -> None:
        self._fields: dict[int, list[int | memoryview]] = {}
        position = 0
        while position < len(data):
            key, position = _varint(data, position)
            wire = key & 7
            value: int | memoryview
            if wire == 0:
                value, position = _varint(data, position)
            else:
                size = _FIXED.get(wire)
                if wire == _BYTES:
                    size, position = _varint(data, position)
                if size is None or size > len(data) - position:
                    raise _damaged("a message that ends too early")
                value = data[position : position + size]
                position += size
            self._fields.setdefault(key >> 3, []).append(value)

    def __contains__(self, number: int) -> bool:
        return number in self._fields

    def blocks(self, number: int) -> list[memoryview]:
        """Return the values of a field of bytes."""
        values = self._fields.get(number, [])
        blocks = [value for value in values if isinstance(value, memoryview)]
        if len(blocks) != len(values):
            raise _damaged(f"a number in field {number}")
        return blocks

    def texts(self, number: int) -> list[str]:
        """Return the values of a field of text."""
        try:
            return [str(block, "utf-8") for block in self.blocks(number)]
        except UnicodeDecodeError as error:
            raise _damaged("a name that is not UTF-8") from error

    def text(self, number: int) -> str:
        """Return the last value of a field of text, or ""."""
        return self.texts(number)[-1] if number in self else ""

    def messages(self, number: int) -> list[Message]:
        """Return the values of a field of messages."""
        return [Message(block) for block in self.blocks(number)]

    def message(self, number: int) -> Message:
        """Return the last value of a field of messages, or an empty message."""
        return Message(self.blocks(number)[-1] if number in self else memoryview(b""))

    def integers(self, number: int) -> list[int]:
        """Return the values of a field of integers, packed or not."""
        return [
            value - 2**64 if value >= 2**63 else value
            for values in self._fields.get(number, [])
            for value in ([values] if isinstance(values, int) else _varints(values))
        ]

    def integer(self, number: int) -> int:
        """Return the last value of a field of integers, or 0."""
        return [0, *self.integers(number)][-1]

    def floats(self, number: int) -> list[float]:
        """Return the values of a field of 32-bit floats, packed or not."""
        data = b"".join(self.blocks(number))
        if len(data) % 4:
            raise _damaged("a float of fewer than 4 bytes")
        return list(struct.unpack(f"<{len(data) // 4}f", data))


def _varint(data: memoryview, start: int) -> tuple[int, int]:
    """Return an integer of 7 bits per byte, and the position after it."""
    value = 0
    for shift in range(10):
        if start + shift >= len(data):
            break
        value |= (data[start + shift] & 127) << 7 * shift
        if data[start + shift] < 128:
            return value & (2**64 - 1), start + shift + 1
    raise _damaged("an integer that ends too early")


def _varints(data: memoryview) -> Iterator[int]:
    """Yield packed integers."""
    position = 0
    while position < len(data):
        value, position = _varint(data, position)
        yield value


@dataclass(frozen=True)
class OnnxNode:
    """A node of a graph: an operator, with its domain if it is not ONNX's own."""

    operator: str
    name: str
    inputs: list[str]
    outputs: list[str]
    attributes: dict[str, Any]


class OnnxGraph:
    """The nodes of a model, its stored tensors, and the sizes of its values.

    Args:
        data: the bytes of a ``ModelProto``.
        folder: the folder of the file, for tensors that are stored in other files; None without
            one.
    """

    def __init__(self, data: bytes, folder: Path | None) -> None:
        graph = Message(memoryview(data)).message(7)
        self._folder = folder
        self.nodes = [_node_of(message) for message in graph.messages(1)]
        self.stored = {message.text(8): message for message in graph.messages(5)}
        sparse = [message.message(1).text(8) for message in graph.messages(15)]
        self.inputs = {message.text(1) for message in graph.messages(11)}
        described = [message for number in (13, 12, 11) for message in graph.messages(number)]
        shapes = {message.text(1): _shape_of(message) for message in described}
        self.shapes = {name: shape for name, shape in shapes.items() if shape is not None}
        self.producers: dict[str, OnnxNode] = {}
        for node in self.nodes:
            for name in filter(None, node.outputs):
                if name in self.producers or name in self.stored:
                    name = f"source: {name}"
                    raise ArgumentError(name, "several", "computed once", "check the model")
                self.producers[name] = node
        for name in sparse:
            self.producers[name] = OnnxNode("a sparse initializer", name, [], [name], {})

    def tensor_of(self, message: Message) -> Tensor:
        """Return the tensor of a ``TensorProto``."""
        name = f"source: {message.text(8) or 'a constant'}"
        shape = message.integers(1)
        dtype, field = _DTYPES.get(message.integer(2), (None, 0))
        if dtype is None:
            rule = "a tensor of floats or integers of at least 8 bits"
            got = f"data type {message.integer(2)} of ONNX"
            raise ArgumentError(name, got, rule, "convert the weights to float32")
        count = math.prod(shape)
        size = count * dtype.itemsize
        if message.integer(14) == _STORED_ELSEWHERE:
            data = self._read_elsewhere(message, name, size)
        elif 9 in message:
            data = b"".join(message.blocks(9))
        else:
            data = _numbers_of(message, dtype, field)
        if not all(0 <= length < _MOST for length in shape) or len(data) != size:
            rule = f"{size} bytes, for the shape {tuple(shape)}"
            raise ArgumentError(name, f"{len(data)} bytes", rule, "check the model")
        if count == 0:
            return torch.empty(0, dtype=dtype, device="cpu").reshape(shape)
        return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)

    def _read_elsewhere(self, message: Message, name: str, size: int) -> bytes:
        """Return the bytes of a tensor that is stored in a file next to the model."""
        entries = {entry.text(1): entry.text(2) for entry in message.messages(13)}
        location = entries.get("location", "")
        if self._folder is None:
            rule = "a part of the model"
            fix = "pass the path of the file, or load its external data"
            raise ArgumentError(name, f"a tensor in {quote(location)}", rule, fix)
        folder = self._folder.resolve()
        path = (folder / location).resolve()
        if not path.is_relative_to(folder) or not path.is_file():
            rule = f"in a file in {quote(str(folder))}"
            fix = "put all files of the model there"
            raise ArgumentError(name, f"a tensor in {quote(location)}", rule, fix)
        try:
            offset = int(entries.get("offset", 0))
            length = int(entries.get("length", size))
        except ValueError as error:
            raise _damaged(f"external data {quote(entries)}") from error
        if offset < 0 or not 0 <= length <= path.stat().st_size:
            raise _damaged(f"external data {quote(entries)}")
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(length)


def _numbers_of(message: Message, dtype: torch.dtype, field: int) -> bytes:
    """Return the bytes of numbers that are stored one by one."""
    if field in (4, 10):
        return b"".join(message.blocks(field))
    size = dtype.itemsize
    mask = 2 ** (8 * size) - 1
    return b"".join((value & mask).to_bytes(size, "little") for value in message.integers(field))


def _node_of(message: Message) -> OnnxNode:
    """Return a node of a ``NodeProto``."""
    domain = message.text(7)
    operator = message.text(4)
    return OnnxNode(
        operator if domain in ("", "ai.onnx") else f"{domain}.{operator}",
        message.text(3),
        message.texts(1),
        message.texts(2),
        {attribute.text(1): _attribute_of(attribute) for attribute in message.messages(5)},
    )


def _attribute_of(message: Message) -> Any:
    """Return the value of an ``AttributeProto``: a tensor as a message, None for graphs."""
    kind = message.integer(20)
    if kind == 1:
        return [0.0, *message.floats(2)][-1]
    if kind == 2:
        return message.integer(3)
    if kind == 3:
        return message.text(4)
    if kind == 4:
        return message.message(5)
    if kind == 6:
        return message.floats(7)
    if kind == 7:
        return message.integers(8)
    return message.texts(9) if kind == 8 else None


def _shape_of(message: Message) -> list[int | None] | None:
    """Return the sizes of a ``ValueInfoProto``, None for unknown ones, or None without a shape."""
    tensor = message.message(2).message(1)
    if 2 not in tensor:
        return None
    dimensions = tensor.message(2).messages(1)
    return [size.integer(1) if 1 in size else None for size in dimensions]


def read_graph(source: Any) -> OnnxGraph:
    """Return the graph of a file, or of a ``ModelProto``."""
    if hasattr(source, "SerializeToString"):
        try:
            data = source.SerializeToString()
        except Exception as error:  # of protobuf, which is not imported
            rule = "a model of less than 2 GB"
            fix = "pass the path of the file"
            raise ArgumentError("source", quote(error), rule, fix) from error
        return OnnxGraph(data, None)
    path = Path(source)
    return OnnxGraph(path.read_bytes(), path.parent)
