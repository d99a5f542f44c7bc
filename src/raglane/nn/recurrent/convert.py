"""Layers with the weights of other libraries: ``rl.convert_weights``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raglane._utils.checks import check_choice, read_values
from raglane._utils.messages import quote, quote_all, require
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from raglane.nn.recurrent.cell_layers import SLSTM, CoupledLSTM, PeepholeLSTM
from raglane.nn.recurrent.layer import RecurrentLayer
from raglane.nn.recurrent.torch_layers import GRU, LSTM, RNN

Arrays = dict[str, Tensor]
"""The parameters of one direction, e.g. by ``"weight_ih"``."""

_KINDS: dict[str, Callable[..., RecurrentLayer]] = {
    "lstm": LSTM,
    "gru": GRU,
    "gru_reset_before": partial(GRU, reset_after=False),
    "rnn_tanh": RNN,
    "rnn_relu": partial(RNN, nonlinearity="relu"),
}
_Z_R_N = (1, 0, 2)  # the places of our gates r z n in the order of Keras and ONNX


def convert_weights(
    source: Any, kind: str | None = None, *, node: str | None = None
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
        kind: of arrays, the name of the cell in ``raglane.cells.CELLS``: ``"lstm"``, ``"gru"``,
            ``"gru_reset_before"`` (Keras' ``reset_after=False``), ``"rnn_tanh"`` or ``"rnn_relu"``.
            Of parameters of Flax only for ``"rnn_relu"``, since they do not contain the activation.
            Otherwise None.
        node: the name of the node, or of its first output, in an ONNX model with several.

    Returns:
        A layer of ``rl.nn`` with copies of the weights, in their dtype. It is ``batch_first``,
        except for an ONNX node with another layout. Options of the library that are not weights,
        such as dropout, are left out.

    Raises:
        ArgumentTypeError: ``source`` is none of these.
        ArgumentError: the layer has options that no layer of ``rl.nn`` has, such as other
            activations.
        ShapeError: the shapes of the arrays do not match each other.
        MissingExtraError: ``source`` is an ONNX model, and onnx is not installed.

    Example:
        >>> import numpy as np
        >>> arrays = [np.ones((3, 16)), np.ones((4, 16)), np.ones(16)]  # keras_layer.get_weights()
        >>> rl.convert_weights(arrays, "lstm")
        LSTM(3, 4, batch_first=True)
    """
    is_onnx = isinstance(source, str | Path) or hasattr(source, "graph")
    has_kind = isinstance(source, Mapping | list | tuple)
    for name, given, is_used in (("kind", kind, has_kind), ("node", node, is_onnx)):
        if given is not None and not is_used:
            raise ArgumentError(name, quote(given), "None for this source", "leave it out")
    if is_onnx:
        return _of_onnx(source, node)
    if isinstance(source, Mapping):
        return _of_flax(source, kind)
    if isinstance(source, list | tuple):
        return _of_arrays(source, check_choice("kind", kind, tuple(_KINDS)))
    if hasattr(source, "get_weights") and hasattr(source, "get_config"):
        return _of_keras(source)
    if isinstance(source, torch.nn.Module) and hasattr(
        getattr(source, "slstm_cell", source), "_recurrent_kernel_"
    ):
        return _of_slstm(source)
    rule = "a recurrent layer of Keras, parameters of Flax, an ONNX model, or an sLSTM of xlstm"
    fix = "pass one of these; rl.accelerate converts torch.nn.LSTM, GRU and RNN"
    raise ArgumentTypeError("source", f"a {type(source).__name__}", rule, fix)


# ---- layers from arrays --------------------------------------------------------------------------


def _layer(
    kind: Callable[..., RecurrentLayer], directions: Sequence[Arrays], **options: Any
) -> RecurrentLayer:
    """Return a layer with copies of arrays, whose shapes are checked."""
    first = directions[0]
    hidden = first["weight_hh"]
    sizes = first["weight_ih"].shape[1], hidden.shape[1]
    options = {"batch_first": True, "dtype": hidden.dtype} | options
    return _filled(
        kind(*sizes, bias="bias_ih" in first, bidirectional=len(directions) == 2, **options),
        directions,
    )


def _filled(layer: RecurrentLayer, directions: Sequence[Arrays]) -> RecurrentLayer:
    """Return the layer with copies of arrays, whose shapes are checked."""
    given = {
        f"{name}_l0{suffix}": array
        for suffix, arrays in zip(("", "_reverse"), directions, strict=False)
        for name, array in arrays.items()
    }
    for name, parameter in layer.named_parameters():
        if name not in given or given[name].shape != parameter.shape:
            got = (
                f"{name} of shape {tuple(given[name].shape)}"
                if name in given
                else f"arrays without {name}"
            )
            fix = "check that all arrays are of one layer, and of this kind"
            raise ShapeError(
                "source", got, f"arrays with {name} of shape {tuple(parameter.shape)}", fix
            )
        parameter.detach().copy_(given[name].detach())
    return layer


def _ordered(array: Tensor, order: Sequence[int], gates: int = 3) -> Tensor:
    """Return blocks of rows in another order, of which ``array`` has one for each gate."""
    if array.shape[0] % gates:
        rule = f"arrays with a block for each of {gates} gates"
        raise ShapeError(
            "source", f"an array of {array.shape[0]} rows", rule, "check the kind of the cell"
        )
    return torch.cat([array.chunk(gates)[place] for place in order])


def _matrix(array: Any, name: str) -> Tensor:
    """Return an array as a tensor with two dimensions."""
    tensor = read_values(array, name)
    if tensor.dim() != 2 or 0 in tensor.shape or not tensor.is_floating_point():
        rule = "a matrix of floating-point numbers that is not empty"
        got = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
        raise ShapeError(name, got, rule, "pass the weights of a recurrent layer")
    return tensor


_BACKWARDS = "convert a layer that reads forward, and call the result on batch.reverse()"


def _check_option(
    name: str,
    given: Any,
    *valid: Any,
    fix: str = "use rl.nn.Recurrent with a cell that computes it",
) -> None:
    """Raise if an option of a foreign layer has a value that no layer of ours has."""
    if given not in valid:
        raise ArgumentError(f"source: {name}", quote(given), " or ".join(map(quote, valid)), fix)


# ---- Keras ---------------------------------------------------------------------------------------


def _of_arrays(arrays: Sequence[Any], kind: str) -> RecurrentLayer:
    """Return the layer of arrays in the order of Keras' ``get_weights``."""
    if len(arrays) not in (2, 3, 4, 6):
        rule = "2 arrays per direction, or 3 with a bias: kernel, recurrent kernel, bias"
        fix = "pass what layer.get_weights() returns, after the layer was built"
        raise ArgumentError("source", f"{len(arrays)} arrays", rule, fix)
    count = len(arrays) // 2 if len(arrays) > 3 else len(arrays)
    return _layer(
        _KINDS[kind],
        [
            _of_keras_direction(arrays[start : start + count], start, kind)
            for start in range(0, len(arrays), count)
        ],
    )


def _of_keras_direction(arrays: Sequence[Any], start: int, kind: str) -> Arrays:
    kernel, recurrent = [
        _matrix(array, f"source[{start + place}]") for place, array in enumerate(arrays[:2])
    ]
    found = {"weight_ih": kernel.t(), "weight_hh": recurrent.t()}
    if len(arrays) == 3:
        bias = read_values(arrays[2], f"source[{start + 2}]")
        if bias.dim() != (2 if kind == "gru" else 1) or (kind == "gru" and bias.shape[0] != 2):
            rule = f"({'2, ' if kind == 'gru' else ''}gates * units,) for kind={kind!r}"
            fix = "a GRU with reset_after has two biases, kind='gru'; without, one, kind='gru_reset_before'"
            raise ShapeError(f"source[{start + 2}]", f"shape {tuple(bias.shape)}", rule, fix)
        biases = bias if kind == "gru" else (bias, torch.zeros_like(bias))
        found |= zip(("bias_ih", "bias_hh"), biases, strict=True)
    return (
        {name: _ordered(part, _Z_R_N) for name, part in found.items()}
        if kind.startswith("gru")
        else found
    )


def _of_keras(layer: Any) -> RecurrentLayer:
    """Return the layer of a Keras layer."""
    settings = layer.get_config()
    directions = [layer]
    if "merge_mode" in settings:
        _check_option("merge_mode", settings["merge_mode"], "concat")
        directions = [layer.forward_layer, layer.backward_layer]
    kinds = set()
    for reverse, direction in enumerate(directions):
        settings, name = direction.get_config(), type(direction).__name__
        _check_option("the class of the layer", name, "LSTM", "GRU", "SimpleRNN")
        _check_option(
            "go_backwards", settings.get("go_backwards", False), bool(reverse), fix=_BACKWARDS
        )
        _check_option(
            "activation",
            settings["activation"],
            *(("tanh", "relu") if name == "SimpleRNN" else ("tanh",)),
        )
        _check_option(
            "recurrent_activation", settings.get("recurrent_activation", "sigmoid"), "sigmoid"
        )
        gru = "gru" if settings.get("reset_after", False) else "gru_reset_before"
        kinds.add({"LSTM": "lstm", "GRU": gru, "SimpleRNN": f"rnn_{settings['activation']}"}[name])
    if len(kinds) > 1:
        rule, fix = "layers of one kind in both directions", "convert each by itself"
        raise ArgumentError("source", " and ".join(sorted(kinds)), rule, fix)
    return _of_arrays(layer.get_weights(), kinds.pop())


# ---- Flax ----------------------------------------------------------------------------------------


def _of_flax(params: Mapping[str, Any], kind: str | None) -> RecurrentLayer:
    """Return the layer of the parameters of a Flax cell, ``RNN`` or ``Bidirectional``."""
    if {"forward_rnn", "backward_rnn"} <= params.keys():
        found = [_of_flax_cell(params[name]) for name in ("forward_rnn", "backward_rnn")]
    elif len(params) == 1 and isinstance(only := next(iter(params.values())), Mapping):
        return _of_flax(only, kind)
    else:
        found = [_of_flax_cell(params)]
    own = found[0][0]
    if kind is not None:
        own = check_choice("kind", kind, ("rnn_tanh", "rnn_relu") if own == "rnn_tanh" else (own,))
    return _layer(_KINDS[own], [arrays for _, arrays in found])


def _of_flax_cell(params: Mapping[str, Any]) -> tuple[str, Arrays]:
    """Return the kind of a cell, and its arrays."""
    if params.keys() == {"cell"}:
        params = params["cell"]
    gates = next(
        (
            gates
            for gates in ("ifgo", "rzn")
            if f"i{gates[1]}" in {key.rstrip("_") for key in params}
        ),
        "",
    )
    sides = []
    for side in "ih":
        # One matrix per gate, or one for all; flax.nnx writes if_ for if.
        names = [f"{side}{gate}" for gate in gates] or [side]
        parts = [
            params.get(name, params.get(f"{name}_", params.get(f"dense_{name}"))) for name in names
        ]
        if not all(isinstance(part, Mapping) and "kernel" in part for part in parts):
            rule = "the parameters of an LSTM, GRU or SimpleCell of Flax, or of an RNN of it"
            fix = "pass the part of the parameters that belongs to the cell"
            raise ArgumentError("source", f"a dict with {quote_all(params)}", rule, fix)
        kernels = [
            _matrix(part["kernel"], f"{name}.kernel")
            for name, part in zip(names, parts, strict=True)
        ]
        biases = [
            read_values(part["bias"], f"{name}.bias")
            if part.get("bias") is not None
            else kernel.new_zeros(len(kernel.t()))
            for name, part, kernel in zip(names, parts, kernels, strict=True)
        ]
        sides.append((torch.cat(kernels, 1).t(), torch.cat(biases)))
    (weight_ih, bias_ih), (weight_hh, bias_hh) = sides
    kind = {4: "lstm", 3: "gru"}.get(weight_hh.shape[0] // weight_hh.shape[1], "rnn_tanh")
    return kind, {
        "weight_ih": weight_ih,
        "weight_hh": weight_hh,
        "bias_ih": bias_ih,
        "bias_hh": bias_hh,
    }


# ---- ONNX ----------------------------------------------------------------------------------------

_ACTIVATIONS = {
    "LSTM": [b"sigmoid", b"tanh", b"tanh"],
    "GRU": [b"sigmoid", b"tanh"],
    "RNN": [b"tanh"],
}


def _of_onnx(source: Any, name: str | None) -> RecurrentLayer:
    """Return the layer of a node of an ONNX model."""
    onnx = require("onnx", "export")
    try:
        model = source if hasattr(source, "graph") else onnx.load(str(source))
    except importlib.import_module("google.protobuf.message").DecodeError as error:
        raise ArgumentError(
            "source", quote(source), "an ONNX file", "pass the path of one"
        ) from error
    nodes = [node for node in model.graph.node if node.op_type in _ACTIVATIONS and not node.domain]
    chosen = [node for node in nodes if name is None or name in (node.name, *node.output)]
    if len(chosen) != 1:
        names = quote_all(node.name or next(filter(None, node.output)) for node in nodes)
        rule = (
            f"the name or an output of one node LSTM, GRU or RNN: {names or 'the model has none'}"
        )
        raise ArgumentError(
            "node", quote(name), rule, "pass one of these; each is converted by itself"
        )
    node = chosen[0]
    options = {part.name: onnx.helper.get_attribute_value(part) for part in node.attribute}
    _, w, r, b, _, h, c, p = [part for part, _ in zip_longest(node.input, range(8), fillvalue="")]
    found: dict[str, Any] = {
        part: _constant(onnx, model, part) for part in (w, r, b, h, c, p) if part
    }
    for part in (w, r, b, p):
        if part and found[part] is None:
            rule, fix = (
                "a constant of the model",
                "export the model with its weights, and for inference",
            )
            raise ArgumentError(
                f"source: {part}", "a value that is computed from inputs", rule, fix
            )
    if any(found[part] is not None and found[part].any() for part in (h, c) if part):
        rule, fix = "zeros, or an input of the model", "pass it as hx, and remove it from the node"
        raise ArgumentError("source: initial state", "a constant", rule, fix)
    return _of_node(node.op_type, options, [found[part] if part else None for part in (w, r, b, p)])


def _constant(onnx: Any, model: Any, name: str) -> Tensor | None:
    """Return a value of an ONNX model that depends on no input, or None."""
    for stored in model.graph.initializer:
        if stored.name == name:
            return read_values(onnx.numpy_helper.to_array(stored), name)
    node = next((node for node in model.graph.node if name in node.output), None)
    given: dict[str, Any] = (
        {} if node is None else {part: _constant(onnx, model, part) for part in node.input if part}
    )
    if node is None or any(part is None for part in given.values()):
        return None
    ends = [
        [onnx.helper.make_empty_tensor_value_info(part) for part in parts]
        for parts in (given, [name])
    ]
    graph = onnx.helper.make_graph([node], "constant", *ends)
    alone = onnx.helper.make_model(
        graph, opset_imports=model.opset_import, ir_version=model.ir_version
    )
    evaluator = importlib.import_module("onnx.reference").ReferenceEvaluator(alone)
    return read_values(
        evaluator.run(None, {key: part.numpy() for key, part in given.items()})[0], name
    )


def _of_node(operator: str, options: dict[str, Any], inputs: Sequence[Any]) -> RecurrentLayer:
    """Return the layer of a node with these attributes, and the inputs W, R, B and P."""
    w, r, b, p = inputs
    direction = options.get("direction", b"forward")
    _check_option("direction", direction, b"forward", b"bidirectional", fix=_BACKWARDS)
    count = 2 if direction == b"bidirectional" else 1
    activations = [
        part.lower() for part in options.get("activations", _ACTIVATIONS[operator] * count)
    ]
    relu = operator == "RNN" and activations == [b"relu"] * count
    if not relu:
        _check_option("activations", activations, _ACTIVATIONS[operator] * count)
    coupled = operator == "LSTM" and bool(options.get("input_forget", 0))
    if coupled:
        _check_option("P with input_forget", p is not None, False)
    kind, order = {
        "LSTM": (
            CoupledLSTM if coupled else LSTM if p is None else PeepholeLSTM,
            (0, 3, 1) if coupled else (0, 2, 3, 1),
        ),
        "GRU": (partial(GRU, reset_after=bool(options.get("linear_before_reset", 0))), _Z_R_N),
        "RNN": (partial(RNN, nonlinearity="relu" if relu else "tanh"), (0,)),
    }[operator]
    for name, part, dims in (("W", w, 3), ("R", r, 3), ("B", b, 2), ("P", p, 2)):
        if part is not None and (part.dim() != dims or part.shape[0] != count):
            rule = f"an array of {dims} dimensions, of which the first is {count}"
            raise ShapeError(
                f"source: {name}", f"shape {tuple(part.shape)}", rule, "check the model"
            )
    directions = []
    for place in range(count):
        arrays = {"weight_ih": w[place], "weight_hh": r[place]}
        if b is not None:
            arrays |= zip(("bias_ih", "bias_hh"), b[place].chunk(2), strict=False)
        arrays = {name: _ordered(part, order, max(order) + 1) for name, part in arrays.items()}
        if coupled:
            # ONNX's forget gate is 1 - i, our input gate 1 - f, and 1 - sigmoid(a) is sigmoid(-a).
            for part in arrays.values():
                part[: len(part) // 3].neg_()
        if p is not None:
            arrays["weight_ch"] = _ordered(p[place], (0, 2, 1))
        directions.append(arrays)
    return _layer(
        kind, directions, batch_first=bool(options.get("layout", 0)), clip=options.get("clip")
    )


# ---- xlstm and TiRex -----------------------------------------------------------------------------


def slstm_weights(kernel: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return an sLSTM cell's recurrent weights ``(4 * H, H / heads)`` and bias ``(4 * H,)`` in our
    order of rows.
    """
    heads, rows, columns = kernel.shape
    if rows > columns:  # (heads, 4 * size, size), and the bias gate after gate
        size = columns
        return kernel.view(heads, 4, size, size).transpose(0, 1).reshape(-1, size), bias
    size = rows  # (heads, size, 4 * size): the transpose, and the bias head after head
    hidden = kernel.view(heads, size, 4, size).permute(2, 0, 3, 1).reshape(-1, size)
    return hidden, bias.view(heads, 4, size).transpose(0, 1).flatten()


def _of_slstm(source: Any) -> RecurrentLayer:
    """Return the layer of an sLSTM cell, or of the projections and the cell of a layer."""
    cell = getattr(source, "slstm_cell", source)
    _check_option("function", getattr(cell.config, "function", "slstm"), "slstm")
    hidden, bias = slstm_weights(cell._recurrent_kernel_, cell._bias_)
    arrays, units = {"weight_hh": hidden, "bias_ih": bias}, len(hidden) // 4
    if cell is not source:
        _check_option(
            "conv1d",
            hasattr(source, "conv1d"),
            False,
            fix="pass its slstm_cell, or use rl.accelerate",
        )
        # The layer passes the product of fgate to the cell's input gate, and that of igate to its
        # forget gate.
        gates = [source.fgate, source.igate, source.zgate, source.ogate]
        arrays["weight_ih"] = torch.cat([torch.block_diag(*gate.weight) for gate in gates])
    layer = SLSTM(
        units if "weight_ih" in arrays else 4 * units,
        units,
        heads=len(cell._recurrent_kernel_),
        input_weights="weight_ih" in arrays,
        batch_first=True,
        device=hidden.device,
        dtype=hidden.dtype,
    )
    return _filled(layer, [arrays])
