"""Nodes LSTM, GRU and RNN of ONNX models."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor

from raglane._utils.messages import quote, quote_all
from raglane.errors import ArgumentError, ShapeError
from raglane.nn.porting.arrays import (
    BACKWARDS,
    Z_R_N,
    Arrays,
    check_option,
    layer_of,
    ordered,
)
from raglane.nn.porting.onnx_file import OnnxGraph, OnnxNode, read_graph
from raglane.nn.porting.onnx_rules import Constant
from raglane.nn.porting.onnx_values import Computed, Times, Values
from raglane.nn.recurrent.cell_layers import CoupledLSTM, PeepholeLSTM
from raglane.nn.recurrent.layer import RecurrentLayer
from raglane.nn.recurrent.torch_layers import GRU, LSTM, RNN

_ACTIVATIONS = {"LSTM": ["sigmoid", "tanh", "tanh"], "GRU": ["sigmoid", "tanh"], "RNN": ["tanh"]}
_INPUTS = ("X", "W", "R", "B", "sequence_lens", "initial_h", "initial_c", "P")
_PASSED = {"sequence_lens": "lengths", "initial_h": "hx", "initial_c": "hx"}
_DIMENSIONS = {"W": 3, "R": 3, "B": 2, "P": 2}
_ATTRIBUTES: dict[str, Any] = {
    "activations": list,
    "activation_alpha": list,  # Sigmoid, Tanh and Relu do not read these
    "activation_beta": list,
    "clip": float,
    "direction": str,
    "hidden_size": int,
    "input_forget": int,
    "layout": int,
    "linear_before_reset": int,
    "output_sequence": int,
}
# Numbers of steps with which computed lengths are compared.
_STEPS = (1, 7, 4099)


def of_onnx(source: Any, name: str | None) -> RecurrentLayer:
    """Return the layer of a node of an ONNX model."""
    graph = read_graph(source)
    node = _node_of(graph, name)
    _check_attributes(node)
    values = Values(graph)
    names = {key: name for key, name in zip(_INPUTS, node.inputs, strict=False) if name}
    arrays = {key: _weights_of(values, names[key]) for key in _DIMENSIONS if key in names}
    passed = {key: values.of(names[key]) for key in _PASSED if key in names}
    if "sequence_lens" in passed:
        _check_lengths(graph, node, passed["sequence_lens"])
    layer = _Converter(node, arrays).layer(
        {key: value for key, value in passed.items() if key != "sequence_lens"}
    )
    for key, value in passed.items():
        if isinstance(value, Computed) and value.from_input and not value.is_input:
            title = quote(node.name or node.outputs[0])
            warnings.warn(
                f"{key} of the node {title} is {value.reason}. Compute it, and pass it to the layer as"
                f" {_PASSED[key]}.",
                stacklevel=3,
            )
    return layer


def _node_of(graph: OnnxGraph, name: str | None) -> OnnxNode:
    """Return the recurrent node of a name or an output, or the only one."""
    nodes = [node for node in graph.nodes if node.operator in _ACTIVATIONS]
    chosen = [node for node in nodes if name is None or name in (node.name, *node.outputs)]
    if len(chosen) == 1:
        return chosen[0]
    names = quote_all(node.name or next(filter(None, node.outputs), "") for node in nodes)
    rule = f"the name or an output of one node LSTM, GRU or RNN: {names or 'the model has none'}"
    fix = "pass one of these; each is converted by itself"
    if not nodes:
        fix = "export the layer as one node, e.g. with torch.onnx.export(..., dynamo=False)"
    raise ArgumentError("node", quote(name), rule, fix)


def _check_attributes(node: OnnxNode) -> None:
    for option, value in node.attributes.items():
        if not isinstance(value, _ATTRIBUTES.get(option, ())):
            name = f"source: the attribute {option}"
            rule = f"one of {', '.join(_ATTRIBUTES)}, and of its type"
            raise ArgumentError(name, quote(value), rule, "check the model")


def _weights_of(values: Values, name: str) -> Tensor:
    """Return the numbers of an input that must be constant."""
    value = values.of(name)
    if isinstance(value, Constant) and not value.spread:
        return value.tensor
    got = value.reason if isinstance(value, Computed) else "a value that depends on sizes of inputs"
    if isinstance(value, Computed) and value.from_input:
        got = f"a value that is computed from inputs: {value.reason}"
    fix = "export the model with its weights, for inference, and with its constants folded"
    raise ArgumentError(f"source: {name}", got, "a constant of the model", fix)


def _check_lengths(graph: OnnxGraph, node: OnnxNode, lengths: Constant | Computed) -> None:
    """Raise if ``sequence_lens`` is neither an input nor the number of all steps."""
    if isinstance(lengths, Computed) and lengths.from_input:
        return
    name = node.inputs[_INPUTS.index("sequence_lens")]
    for times in _times_of(graph, node):
        steps = next(iter(times.values()))[1]
        value = Values(graph, times).of(name)
        if isinstance(value, Computed) or not bool((value.tensor == steps).all()):
            got = value.reason if isinstance(value, Computed) else f"{quote(name)} of other lengths"
            rule = "an input of the model, or the number of all steps"
            fix = "pass them as lengths, and remove sequence_lens from the node"
            raise ArgumentError("source: sequence_lens", got, rule, fix)


def _times_of(graph: OnnxGraph, node: OnnxNode) -> list[Times]:
    """Return numbers of steps of the input of a node, for all names of values with these steps: the
    number that the file contains, or several.
    """
    name = node.inputs[0]
    axis = 1 if node.attributes.get("layout", 0) else 0
    axes = {name: axis}
    while (producer := graph.producers.get(name)) is not None:
        if producer.operator == "Transpose" and "perm" in producer.attributes:
            axis = producer.attributes["perm"][axis]
        elif producer.operator not in ("Identity", "Cast"):
            break
        name = producer.inputs[0]
        if name in axes:
            break
        axes[name] = axis
    shapes = [(graph.shapes.get(name, []), axis) for name, axis in axes.items()]
    sizes = {shape[axis] for shape, axis in shapes if axis < len(shape)}
    counts = [size for size in sizes if isinstance(size, int) and size > 0] or _STEPS
    return [{name: (axis, count) for name, axis in axes.items()} for count in counts]


class _Converter:
    """A node, of which the arrays W, R, B and P are constant."""

    def __init__(self, node: OnnxNode, arrays: Arrays) -> None:
        self._node = node
        self._options = node.attributes
        self._arrays = arrays
        for name in ("W", "R"):
            if name not in arrays:
                raise ArgumentError(
                    f"source: {name}", "none", "an input of the node", "check the model"
                )
        direction = self._options.get("direction", "forward")
        check_option("direction", direction, "forward", "bidirectional", fix=BACKWARDS)
        self._count = 2 if direction == "bidirectional" else 1
        for name, array in arrays.items():
            rank = _DIMENSIONS[name]
            if array.dim() != rank or array.shape[0] != self._count:
                rule = f"an array of {rank} dimensions, of which the first is {self._count}"
                got = f"shape {tuple(array.shape)}"
                raise ShapeError(f"source: {name}", got, rule, "check the model")
        self._units = arrays["R"].shape[2]
        hidden_size = self._options.get("hidden_size", self._units)
        if hidden_size != self._units:
            rule = f"{self._units}, the last dimension of R"
            raise ShapeError("source: hidden_size", quote(hidden_size), rule, "check the model")

    def layer(self, states: dict[str, Constant | Computed]) -> RecurrentLayer:
        """Return the layer, whose initial states are learned ones if they are not zeros."""
        operator = self._node.operator
        activations = self._activations()
        is_coupled = operator == "LSTM" and bool(self._options.get("input_forget", 0))
        if is_coupled:
            check_option("P with input_forget", "P" in self._arrays, False)
        kind: Any
        if operator == "GRU":
            kind = partial(GRU, reset_after=bool(self._options.get("linear_before_reset", 0)))
            order: tuple[int, ...] = Z_R_N
        elif operator == "RNN":
            nonlinearity: Any = activations[0]
            kind = partial(RNN, nonlinearity=nonlinearity)
            order = (0,)
        else:
            has_peepholes = "P" in self._arrays
            kind = PeepholeLSTM if has_peepholes else LSTM
            order = (0, 2, 3, 1)
            if is_coupled:
                kind = CoupledLSTM
                order = (0, 3, 1)
        directions = [self._direction(index, order, is_coupled) for index in range(self._count)]
        return layer_of(
            kind,
            directions,
            self._learned(states),
            batch_first=bool(self._options.get("layout", 0)),
            clip=self._options.get("clip"),
        )

    def _activations(self) -> list[str]:
        """Return the activations, which are those of a layer of ours."""
        default = _ACTIVATIONS[self._node.operator] * self._count
        activations = [str(name).lower() for name in self._options.get("activations", default)]
        relu = [["relu"] * self._count] if self._node.operator == "RNN" else []
        check_option("activations", activations, default, *relu)
        return activations

    def _direction(self, index: int, order: tuple[int, ...], is_coupled: bool) -> Arrays:
        """Return the parameters of one direction."""
        arrays = {"weight_ih": self._arrays["W"][index], "weight_hh": self._arrays["R"][index]}
        if "B" in self._arrays:
            bias = self._arrays["B"][index]
            half = len(bias) // 2
            arrays |= {"bias_ih": bias[:half], "bias_hh": bias[half:]}
        gates = max(order) + 1
        arrays = {name: ordered(array, order, gates) for name, array in arrays.items()}
        if is_coupled:
            # ONNX's forget gate is 1 - i, our input gate 1 - f, and 1 - sigmoid(a) is sigmoid(-a).
            for array in arrays.values():
                array[: len(array) // 3].neg_()
        if "P" in self._arrays:
            arrays["weight_ch"] = ordered(self._arrays["P"][index], (0, 2, 1))
        return arrays

    def _learned(self, states: dict[str, Constant | Computed]) -> Arrays:
        """Return the initial states ``(directions, units)``, or {} if they are zeros or inputs."""
        learned = {}
        for name, value in states.items():
            if isinstance(value, Constant):
                learned[name] = self._state_of(name, value)
            elif not value.from_input:
                self._refuse_state(name, value.reason)
        if not any(bool(state.any()) for state in learned.values()):
            return {}
        for name, value in states.items():
            if isinstance(value, Computed):
                self._refuse_state(name, f"{value.reason}, next to a constant of another state")
        names = ("initial_h", "initial_c") if self._node.operator == "LSTM" else ("initial_h",)
        zeros = torch.zeros_like(next(iter(learned.values())))
        return {name: learned.get(name, zeros) for name in names}

    def _state_of(self, name: str, value: Constant) -> Tensor:
        """Return an initial state ``(directions, units)``, equal for all sequences."""
        tensor = value.tensor
        if tensor.dim() != 3:
            self._refuse_state(name, f"shape {tuple(tensor.shape)}")
        batch = 0 if self._options.get("layout", 0) else 1
        sizes = [self._count, tensor.shape[batch], self._units]
        if batch == 0:
            sizes[:2] = sizes[1::-1]
        is_fit = all(
            size == tensor.shape[axis] or axis in value.spread for axis, size in enumerate(sizes)
        )
        if not is_fit or 0 in tensor.shape:
            self._refuse_state(name, f"shape {tuple(tensor.shape)}")
        rows = tensor.expand(sizes)
        if bool(rows.isnan().any()):
            self._refuse_state(name, "a value that depends on sizes of inputs")
        first = rows.select(batch, 0)
        if not torch.equal(rows, first.unsqueeze(batch).expand(sizes)):
            self._refuse_state(name, "a constant that differs between sequences")
        return first

    def _refuse_state(self, name: str, got: str) -> None:
        """Raise the error of an initial state that no layer of ours has."""
        rule = "an input of the model, or one state for all sequences"
        fix = "pass it as hx, and remove it from the node"
        raise ArgumentError(f"source: {name}", got, rule, fix)
