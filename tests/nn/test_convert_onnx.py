"""``rl.import_layer`` of ONNX models, which are files of torch's exporters, or written by
``onnx_models``.
"""

from __future__ import annotations

import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import raglane as rl
from foreign_cells import GATES, B, D, H, T, keras_arrays, output_of, run_keras, sigmoid
from onnx_models import FOLDER, Model, Network, file_names, message, node, tensor
from raglane.errors import ArgumentError, ArgumentTypeError, RaglaneError, ShapeError

RANDOM = np.random.default_rng(5).normal(size=(1, B, H))
INTEGERS = {"R": np.ones((1, 4 * H, H), np.int64), "B": np.ones((1, 8 * H), np.int64)}


def _onnx(
    operator: str, arrays: dict[str, Any], computed: bool = False, **attributes: Any
) -> Model:
    """A model of one node, whose inputs that are neither X nor arrays are left out."""
    names = "X W R B sequence_lens initial_h initial_c P".split()
    inputs = " ".join(name if name in (*arrays, "X") else "_" for name in names)
    nodes = [node(operator, inputs, "_ state", "node", hidden_size=H, **attributes)]
    stored = dict(arrays)
    if computed:  # as exporters of layers with several tensors write them
        stored["W1"] = stored.pop("W")[0]
        stored["axes"] = np.array([0])
        nodes.insert(0, node("Unsqueeze", "W1 axes", "W"))
    return Model(nodes, stored, {"X": ["steps", "sequences", D]}, ["state"])


def _onnx_arrays(kind: str) -> dict[str, Any]:
    """The arrays of Keras in ONNX's layout: rows of gates i o f c, or z r h."""
    w, u, b = keras_arrays(kind)
    b, reset = b if kind == "gru" else (b, b * 0)
    order = (0, 3, 1, 2) if kind == "lstm" else range(GATES[kind])
    w, u, b, reset = (
        np.concatenate([np.split(part, GATES[kind], -1)[place] for place in order], -1)
        for part in (w, u, b, reset)
    )
    return {"W": w.T[None], "R": u.T[None], "B": np.concatenate([b, reset])[None]}


@pytest.mark.parametrize("computed", [False, True])
@pytest.mark.parametrize(
    ("kind", "attributes"),
    [
        ("lstm", {}),
        ("gru", {"linear_before_reset": 1}),
        ("gru_reset_before", {"activations": ["Sigmoid", "Tanh"]}),
        ("rnn", {"layout": 1}),
        ("rnn_relu", {"activations": ["Relu"]}),
    ],
)
def test_nodes_of_onnx(
    kind: str, attributes: dict[str, Any], computed: bool, tmp_path: Any
) -> None:
    model = _onnx(kind.partition("_")[0].upper(), _onnx_arrays(kind), computed, **attributes)
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    values = np.random.default_rng(1).normal(size=(T, B, D))
    for source, name in ((model, "node"), (tmp_path / "model.onnx", "state")):
        output = output_of(
            rl.import_layer(source, node=name), values, batch_first="layout" in attributes
        )
        np.testing.assert_allclose(
            output, run_keras(kind, values, [keras_arrays(kind)]), rtol=0, atol=1e-12
        )


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("coupled", [False, True])
def test_variants_of_onnx_lstm(coupled: bool, clip: float | None) -> None:
    arrays, values = _onnx_arrays("lstm"), np.random.default_rng(1).normal(size=(T, B, D))
    peepholes = np.random.default_rng(2).normal(size=(1, 3 * H))
    options: dict[str, Any] = ({"clip": clip} if clip else {}) | (
        {"input_forget": 1} if coupled else {}
    )
    arrays |= {} if coupled else {"P": peepholes}
    layer = rl.import_layer(_onnx("LSTM", arrays, **options))
    doubled = {name: np.concatenate([2 * part, part]) for name, part in arrays.items()}
    both = rl.import_layer(
        _onnx("LSTM", doubled, direction="bidirectional", **options)
    ).state_dict()
    for name, part in layer.state_dict().items():
        assert torch.equal(
            torch.stack([both[name], both[f"{name}_reverse"]]), torch.stack([2 * part, part])
        )
    h, c, p = np.zeros((B, H)), np.zeros((B, H)), np.split(peepholes[0] * (not coupled), 3)
    most = clip or np.inf
    expected = []
    for x in values:
        i, o, f, g = np.split(
            x @ arrays["W"][0].T + h @ arrays["R"][0].T + arrays["B"][0, : 4 * H], 4, 1
        )
        i = sigmoid(np.clip(i + p[0] * c, -most, most))
        f = 1 - i if coupled else sigmoid(np.clip(f + p[2] * c, -most, most))
        c = f * c + i * np.tanh(np.clip(g, -most, most))
        h = sigmoid(np.clip(o + p[1] * c, -most, most)) * np.tanh(c)
        expected.append(h)
    np.testing.assert_allclose(
        output_of(layer, values, False), np.stack(expected), rtol=0, atol=1e-7 if clip else 1e-12
    )


@pytest.mark.parametrize(
    ("arrays", "attributes", "text"),
    [
        ({}, {"direction": "reverse"}, "direction must be .*reverse.*batch.reverse"),
        ({}, {"activations": ["HardSigmoid", "Tanh", "Tanh"]}, "activations must be .*hardsigmoid"),
        ({"P": np.ones((1, 3 * H))}, {"input_forget": 1}, "P with input_forget must be False"),
        ({"initial_h": RANDOM}, {}, "initial_h must be .*differs between sequences"),
        ({"initial_c": RANDOM}, {}, "initial_c must be .*differs between sequences"),
        ({"initial_h": RANDOM[:, :, 0]}, {}, r"initial_h must be .*shape \(1, 4\)"),
        ({"initial_h": RANDOM[:, :0]}, {}, r"initial_h must be .*shape \(1, 0, 5\)"),
        ({"sequence_lens": np.full(B, T, np.int32)}, {}, "sequence_lens must be .*other lengths"),
        ({"B": np.ones((1, 3))}, {}, "a block for each of 4 gates, got an array of 1 rows"),
        ({"B": np.ones((1, 8 * H), np.complex64)}, {}, "bias_ih must be real numbers"),
        (
            {"R": np.ones((1, 4 * H, 4))},
            {},
            "hidden_size must be 4, the last dimension of R, got 5",
        ),
        ({"W": np.ones((1, 4 * H, D), np.int64)} | INTEGERS, {}, "source must be of dtype"),
        ({}, {"direction": 1}, "the attribute direction must be one of"),
        ({}, {"activations": [1, 2]}, "activations must be"),
        ({}, {"new_option": 1}, "the attribute new_option must be one of"),
        (
            {},
            {"direction": "bidirectional"},
            "W must be an array of 3 dimensions, of which the first is 2",
        ),
    ],
)
def test_refused_nodes_of_onnx(
    arrays: dict[str, Any], attributes: dict[str, Any], text: str
) -> None:
    model = _onnx("LSTM", _onnx_arrays("lstm") | arrays, **attributes)
    with pytest.raises((ArgumentError, ShapeError), match=text):
        rl.import_layer(model)
    with pytest.raises(ArgumentError, match=r"node must be .*'node'"):
        rl.import_layer(model, node="other")


@pytest.mark.parametrize("name", "WRBP")
def test_weights_that_are_no_constants(name: str) -> None:
    arrays = _onnx_arrays("lstm") | {"P": np.ones((1, 3 * H))}
    inputs = "X W R B _ _ _ P"
    rest = {key: array for key, array in arrays.items() if key != name}
    other = "W" if name == "R" else "R"
    rule = f"source: {name} must be a constant of the model"
    recurrent = node("LSTM", inputs, "Y", hidden_size=H)
    for first, reason in (
        (node("Relu", "X", name), "computed from inputs: the result of Relu"),
        (node("RandomNormal", "", name, shape=[1]), "the result of RandomNormal"),
        (node("Made", other, name, domain="org.example"), "the result of org.example.Made"),
        (node("Loop", other, "other"), f"'{name}', which the model does not contain"),
        (node("Transpose", other, name, perm=[5, 6]), "the result of Transpose"),
    ):
        model = Model([first, recurrent], rest, {"X": ["steps", "sequences", D]}, ["Y"])
        with pytest.raises(ArgumentError, match=f"{rule}, got .*{reason}"):
            rl.import_layer(model)
    model = Model([recurrent], rest, {"X": [T, B, D], name: [1, 2]}, ["Y"])
    with pytest.raises(ArgumentError, match=f"{rule}, got .*the input '{name}'"):
        rl.import_layer(model)


# ---- files of torch's exporters ------------------------------------------------------------------


DEEP = {"script": ["/layer/GRU", "/layer/GRU_1"], "dynamo": ["node_GRU_80", "node_GRU_163"]}


@pytest.mark.parametrize("name", file_names())
def test_files_of_torchs_exporters(name: str) -> None:
    kind, form, exporter, _ = name.split("-")
    network = Network(kind, form)
    values = torch.randn(4, 3, 2)
    expected = network(values)[0]
    names = DEEP[exporter] if form == "deep" else [None]
    layers = [rl.import_layer(FOLDER / f"{name}.onnx", node=title) for title in names]
    assert len(layers) == network.layer.num_layers
    assert [layer.initial_state for layer in layers] == [
        "learned" if form == "learned" else "zeros"
    ] * len(layers)
    for layer in layers:
        values = layer(values)[0]
    torch.testing.assert_close(values, expected)


# ---- initial states ------------------------------------------------------------------------------

# The chains that exporters write between the shape of an input and an initial state of a GRU.
OF_TORCH = [
    node("Shape", "X", "shape"),
    node("Constant", "", "one", value=np.array(1)),
    node("Gather", "shape one", "count", axis=0),
    node("Constant", "", "axes0", value=np.array([0])),
    node("Unsqueeze", "count axes0", "counts"),
]
OF_TF2ONNX = [
    node("Shape", "X", "shape"),
    node("Cast", "shape", "sizes", to=1),
    node("Slice", "sizes from to axes", "count"),
    node("Cast", "count", "counts", to=7),
]
STORED = {
    "from": np.array([1]),
    "to": np.array([2]),
    "axes": np.array([0]),
    "one": np.array([1]),
    "minus": np.array([-1]),
    "units": np.array([H]),
    "zero": np.zeros(1, np.float32),
    "state": RANDOM[:, :1],
}
CHAINS = {
    "torch": [*OF_TORCH, node("Concat", "one1 counts units", "sizes1", axis=0)],
    "tf2onnx": [*OF_TF2ONNX, node("Concat", "one1 counts units", "sizes1", axis=0)],
}


def _gru(chain: list[bytes], shape: list[Any] | None = None, **stored: Any) -> Model:
    """A GRU whose initial state is the value h of a chain of nodes."""
    arrays = _onnx_arrays("gru")
    chain = [*chain, node("GRU", "X W R B _ h", "Y", hidden_size=H, linear_before_reset=1)]
    constants = {key: array for key, array in STORED.items() if key != "one"}
    stored = arrays | constants | {"one1": np.array([1])} | stored
    inputs = {"X": shape or ["steps", "sequences", D], "given": [1, "sequences", H]}
    return Model(chain, stored, inputs, ["Y"])


def _expected(state: Any) -> Any:
    """The outputs of the GRU that begins with a state ``(1, 1, H)``."""
    layer = rl.import_layer(keras_arrays("gru"), "gru")
    values = torch.as_tensor(VALUES)
    return layer(
        values.transpose(0, 1), torch.as_tensor(state, dtype=torch.float64).expand(1, B, H)
    )[0].transpose(0, 1)


VALUES = np.random.default_rng(1).normal(size=(T, B, D))
CASES: dict[str, tuple[list[bytes], Any]] = {
    "zeros of a shape": ([node("ConstantOfShape", "sizes1", "h")], 0.0),
    "a number of a shape": (
        [node("ConstantOfShape", "sizes1", "h", value=np.array([0.9]))],
        0.9,
    ),
    "an expanded learned state": ([node("Expand", "state sizes1", "h")], STORED["state"]),
    "a tiled learned state": (
        [node("Concat", "one1 counts one1", "counts1", axis=0), node("Tile", "state counts1", "h")],
        STORED["state"],
    ),
    "a slice of two layers": (
        [
            node("Concat", "to counts units", "sizes2", axis=0),
            node("Concat", "state state2", "states", axis=0),
            node("Expand", "states sizes2", "both"),
            node("Slice", "both from to axes", "h"),
        ],
        STORED["state"] * 2,
    ),
    "layers that are unbound": (
        [
            node("Concat", "state state2", "states", axis=0),
            node("Concat", "to counts units", "sizes2", axis=0),
            node("Expand", "states sizes2", "both"),
            node("Split", "both", "first second", axis=0, num_outputs=2),
            node("Squeeze", "second axes", "flat"),
            node("Unsqueeze", "flat axes", "h"),
        ],
        STORED["state"] * 2,
    ),
    "a state of Keras": (  # (sequences, units), with a row of zeros for each sequence
        [
            node("Concat", "counts units", "sizes2", axis=0),
            node("Expand", "zero sizes2", "flat"),
            node("Unsqueeze", "flat axes", "h"),
        ],
        0.0,
    ),
    "a transposed state": (
        [
            node("Concat", "counts one1 units", "sizes2", axis=0),
            node("Expand", "state sizes2", "turned"),
            node("Transpose", "turned", "first", perm=[1, 0, 2]),
            node("Add", "first first", "second"),
            node("Concat", "first second", "both", axis=0),
            node("Gather", "both axes", "h", axis=0),
        ],
        STORED["state"],
    ),
    "a gathered state": (
        [
            node("Concat", "to counts units", "sizes2", axis=0),
            node("Concat", "state state2", "states", axis=0),
            node("Expand", "states sizes2", "both"),
            node("Gather", "both minus", "h", axis=0),
        ],
        STORED["state"] * 2,
    ),
    "a sum with zeros": (
        [
            node("ConstantOfShape", "sizes1", "zeros", value=np.array([0.0])),
            node("Add", "zeros state", "h"),
        ],
        STORED["state"],
    ),
    "a reshaped number": (
        [
            node("Concat", "counts units", "sizes2", axis=0),
            node("ConstantOfShape", "sizes2", "flat", value=np.array([0.5])),
            node("Reshape", "flat sizes1", "h"),
        ],
        0.5,
    ),
    "a size where -1 is written": (  # as torch.Tensor.expand is exported
        [
            node("Concat", "minus counts minus", "minuses", axis=0),
            node("Shape", "minuses", "rank"),
            node("ConstantOfShape", "rank", "ones", value=np.array([1])),
            node("Mul", "ones minus", "all"),
            node("Equal", "minuses all", "equal"),
            node("Where", "equal ones minuses", "target"),
            node("Expand", "state target", "h"),
        ],
        STORED["state"],
    ),
}


@pytest.mark.parametrize("shape", [["steps", "sequences", D], [T, B, D]])
@pytest.mark.parametrize("chain", list(CHAINS))
@pytest.mark.parametrize("case", list(CASES))
def test_initial_states_from_the_shape(case: str, chain: str, shape: list[Any]) -> None:
    nodes, state = CASES[case]
    model = _gru([*CHAINS[chain], *nodes], shape, state2=STORED["state"] * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer = rl.import_layer(model)
    assert layer.initial_state == ("learned" if np.any(state) else "zeros")
    output = layer(torch.as_tensor(VALUES))[0]
    torch.testing.assert_close(output, _expected(state), rtol=0, atol=1e-12)


def test_an_unknown_rank() -> None:
    """tf2onnx writes no shapes of values within the graph."""
    chain = [
        node("Relu", "X", "hidden"),
        node("Shape", "hidden", "shape", start=1, end=2),
        node("Concat", "one1 shape units", "sizes1", axis=0),
        node("Expand", "state sizes1", "h"),
    ]
    output = rl.import_layer(_gru(chain))(torch.as_tensor(VALUES))[0]
    torch.testing.assert_close(output, _expected(STORED["state"]), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        ([node("RandomNormal", "", "h", shape=[1, B, H])], "the result of RandomNormal"),
        ([node("Relu", "nothing", "h")], "'nothing', which the model does not contain"),
        (
            [*CHAINS["torch"], node("Cast", "sizes1", "n", to=11), node("Mul", "n state", "h")],
            "the result of Mul",
        ),
        (
            [
                *CHAINS["torch"],
                node("Cast", "counts", "count1", to=11),
                node("Mul", "count1 state", "h"),
            ],
            "a value that depends on sizes",
        ),
        (  # another state for two sequences
            [
                *CHAINS["torch"],
                node("Equal", "counts to", "is_two"),
                node("Where", "is_two state zero", "h"),
            ],
            "a value that depends on sizes",
        ),
    ],
)
def test_refused_initial_states(nodes: list[bytes], text: str) -> None:
    with pytest.raises(ArgumentError, match=f"source: initial_h must be .*{text}.*hx"):
        rl.import_layer(_gru(nodes))


def test_initial_states_of_inputs() -> None:
    layer: Any = None
    for chain in ([node("Identity", "given", "h")], [node("Slice", "given from to axes", "h")]):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            layer = rl.import_layer(_gru(chain))
        assert layer.initial_state == "zeros"
    with pytest.warns(UserWarning, match="initial_h of the node 'Y' is the result of Tanh.*as hx"):
        rl.import_layer(_gru([node("Tanh", "given", "h")]))


@pytest.mark.parametrize("constant", [0.0, 0.5])
def test_an_input_next_to_a_constant(constant: float) -> None:
    recurrent = node("LSTM", "X W R B _ h c", "Y", hidden_size=H)
    stored = _onnx_arrays("lstm") | {"h": np.full((1, 1, H), constant)}
    model = Model([recurrent], stored, {"X": [T, B, D], "c": [1, B, H]}, ["Y"])
    if constant == 0:
        assert rl.import_layer(model).initial_state == "zeros"
        return
    with pytest.raises(ArgumentError, match=r"initial_c must be .*'c', next to a constant"):
        rl.import_layer(model)


def test_one_constant_state_of_two_directions() -> None:
    arrays = {key: np.concatenate([array, array]) for key, array in _onnx_arrays("lstm").items()}
    state = np.random.default_rng(2).normal(size=(1, 2, H))
    for layout, shape in ((0, (2, B, H)), (1, (B, 2, H))):
        rows = state if layout else state.transpose(1, 0, 2)
        stored = arrays | {"initial_c": np.broadcast_to(rows, shape).copy()}
        layer = rl.import_layer(_onnx("LSTM", stored, direction="bidirectional", layout=layout))
        parameters = dict(layer.named_parameters())
        assert torch.equal(parameters["initial_c"], torch.as_tensor(state[0]))
        assert not parameters["initial_h"].any()


# ---- lengths -------------------------------------------------------------------------------------

# tf2onnx tiles the number of steps of an input (sequences, steps, features).
TURNED = node("Transpose", "x", "X", perm=[1, 0, 2])
OF_STEPS = [
    TURNED,
    node("Shape", "x", "shape"),
    node("Cast", "shape", "sizes", to=1),
    node("Slice", "sizes zero one axes", "sequences"),
    node("Slice", "sizes one two axes", "steps"),
    node("Cast", "sequences", "counts", to=7),
]


def _with_lengths(nodes: list[bytes], steps: Any = "steps", **stored: Any) -> Model:
    recurrent = node("GRU", "X W R B lengths _", "Y", hidden_size=H, linear_before_reset=1)
    numbers = {"zero": [0], "one": [1], "two": [2], "axes": [0]}
    constants = {key: np.array(number) for key, number in numbers.items()}
    inputs = {"x": ["sequences", steps, D], "given": ["sequences"]}
    stored = _onnx_arrays("gru") | constants | stored
    return Model([*nodes, recurrent], stored, inputs, ["Y"])


TILED = [node("Tile", "steps counts", "lens"), node("Cast", "lens", "lengths", to=6)]


@pytest.mark.parametrize(
    ("nodes", "steps", "stored"),
    [
        ([*OF_STEPS, *TILED], "steps", {}),
        ([*OF_STEPS, *TILED], T, {}),
        ([TURNED], T, {"lengths": np.full(B, T, np.int32)}),
        (
            [
                TURNED,
                node("Shape", "X", "shape"),
                node("Slice", "shape zero one axes", "steps"),
                node("Slice", "shape one two axes", "counts"),
                node("Expand", "steps counts", "all"),
                node("Cast", "all", "lengths", to=6),
            ],
            "steps",
            {},
        ),
        ([TURNED, node("Cast", "given", "lengths", to=6)], "steps", {}),
    ],
)
def test_lengths_of_all_steps_or_an_input(
    nodes: list[bytes], steps: Any, stored: dict[str, Any]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer = rl.import_layer(_with_lengths(nodes, steps, **stored))
    output = layer(torch.as_tensor(VALUES))[0]
    torch.testing.assert_close(output, _expected(np.zeros((1, 1, H))), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("nodes", "steps", "stored"),
    [
        ([TURNED], T, {"lengths": np.array([T, T, T - 1, T], np.int32)}),
        ([TURNED], "steps", {"lengths": np.full(B, T, np.int32)}),
        (
            [*OF_STEPS, node("Sub", "steps one", "less"), *TILED[1:]],
            "steps",
            {"lens": np.full(B, 2)},
        ),
        (
            [
                *OF_STEPS,
                node("Tile", "steps counts", "lens"),
                node("Cast", "lens", "whole", to=7),
                node("Sub", "whole one", "lengths"),
            ],
            "steps",
            {},
        ),
        (
            [
                *OF_STEPS,
                node("Cast", "steps", "whole", to=7),
                node("Min", "whole ten", "lengths"),
            ],
            "steps",
            {"ten": np.array([10])},
        ),
        ([*OF_STEPS[:-1], node("Cast", "sequences", "lengths", to=6)], "steps", {}),
        ([TURNED, node("RandomUniform", "", "lengths", shape=[B])], "steps", {}),
    ],
)
def test_refused_lengths(nodes: list[bytes], steps: Any, stored: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=r"source: sequence_lens must be .*as lengths"):
        rl.import_layer(_with_lengths(nodes, steps, **stored))


def test_computed_lengths() -> None:
    with pytest.warns(UserWarning, match="sequence_lens of the node 'Y' is the result of Abs"):
        rl.import_layer(_with_lengths([TURNED, node("Abs", "given", "lengths")]))


# ---- constants -----------------------------------------------------------------------------------


def _constant(nodes: list[bytes], **stored: Any) -> Tensor:
    """The bias of the input's products, of a GRU whose bias is the value B of nodes."""
    arrays = {key: array for key, array in _onnx_arrays("gru").items() if key != "B"}
    recurrent = node("GRU", "X W R B", "Y", hidden_size=H, linear_before_reset=1)
    model = Model([*nodes, recurrent], arrays | stored, {"X": [T, B, D]}, ["Y"])
    bias = dict(rl.import_layer(model).named_parameters())
    reset, update, new = bias["bias_ih_l0"].detach().chunk(3)
    hidden = bias["bias_hh_l0"].detach().chunk(3)
    return torch.cat([update, reset, new, hidden[1], hidden[0], hidden[2]])


ROW = np.random.default_rng(3).normal(size=6 * H)
POSITIVE = np.abs(ROW)
ONNX_AXES = {"axes": np.array([0])}


@pytest.mark.parametrize(
    ("nodes", "stored", "expected"),
    [
        ([node("Constant", "", "B", value=ROW[None])], {}, ROW),
        ([node("Constant", "", "row", value_floats=[2.0, 3.0] * 15)], {}, [2.0, 3.0] * 15),
        ([node("Reshape", "flat shape", "B")], {"flat": ROW, "shape": np.array([1, -1])}, ROW),
        ([node("Flatten", "flat", "B", axis=0)], {"flat": ROW}, ROW),
        ([node("Unsqueeze", "flat", "B", axes=[0])], {"flat": ROW}, ROW),
        (
            [node("Slice", "flat starts ends _ steps", "row")],
            {
                "flat": ROW,
                "starts": np.array([-1]),
                "ends": np.array([-(2**63)]),
                "steps": np.array([-1]),
            },
            ROW[::-1],
        ),
        (
            [
                node("Split", "flat", "a b", axis=0, split=[12, 18]),
                node("Concat", "b a", "row", axis=0),
            ],
            {"flat": ROW},
            [*ROW[12:], *ROW[:12]],
        ),
        (
            [node("DequantizeLinear", "codes scale zero", "row", axis=0)],
            {
                "codes": np.arange(30, dtype=np.int32),
                "scale": POSITIVE,
                "zero": np.full(30, 5, np.int32),
            },
            (np.arange(30) - 5) * POSITIVE,
        ),
        (
            [  # torch.nn.utils.weight_norm
                node("ReduceL2", "flat", "norm", keepdims=0),
                node("Div", "flat norm", "unit"),
                node("Mul", "unit scale", "row"),
            ],
            {"flat": ROW, "scale": np.array(3.0)},
            3 * ROW / np.linalg.norm(ROW),
        ),
        (
            [
                node("Pow", "flat two", "squares"),
                node("ReduceSum", "squares", "sum", keepdims=0),
                node("Sqrt", "sum", "norm"),
                node("Reciprocal", "norm", "less"),
                node("Mul", "flat less", "row"),
            ],
            {"flat": ROW, "two": np.array(2.0)},
            ROW / np.linalg.norm(ROW),
        ),
        (
            [node("Div", "thirty seven", "count"), node("Tile", "numbers count", "row")],
            {"thirty": np.array([30]), "seven": np.array([7]), "numbers": ROW[:7]},
            None,  # 4 times 7 numbers are not 30
        ),
        (
            [
                node("ReduceProd", "sizes", "count", keepdims=1),
                node("Expand", "number count", "row"),
            ],
            {"sizes": np.array([5, 6]), "number": np.array([0.7])},
            [0.7] * 30,
        ),
    ],
)
def test_constants_that_nodes_compute(
    nodes: list[bytes], stored: dict[str, Any], expected: Any
) -> None:
    row = node("Unsqueeze", "row axes", "B")
    if expected is None:
        with pytest.raises(ShapeError, match="a block for each of 3 gates"):
            _constant([*nodes, row], **stored, **ONNX_AXES)
        return
    is_whole = b"\x12\x01B" in nodes[-1]  # its output is B
    bias = _constant(nodes if is_whole else [*nodes, row], **stored, **ONNX_AXES)
    torch.testing.assert_close(bias, torch.tensor([*expected], dtype=torch.float64))


def test_dtypes_of_weights() -> None:
    arrays = {key: torch.as_tensor(array) for key, array in _onnx_arrays("gru").items()}
    recurrent = node("GRU", "X W R B", "Y", hidden_size=H, domain="ai.onnx")
    halves: dict[str, Any] = {key: array.bfloat16() for key, array in arrays.items()}
    inputs = {"X": [T, B, D]}
    layer = rl.import_layer(Model([recurrent], halves, inputs, ["Y"]))
    assert {parameter.dtype for parameter in layer.parameters()} == {torch.bfloat16}
    assert torch.equal(layer.get_parameter("weight_hh_l0").detach()[:H], halves["R"][0, H : 2 * H])
    mixed = halves | {"B": np.full((1, 6 * H), 1e300)}
    layer = rl.import_layer(Model([recurrent], mixed, inputs, ["Y"]))
    assert layer.get_parameter("bias_ih_l0").tolist() == [1e300] * 3 * H


def test_chains_and_circles() -> None:
    names = [f"n{index}" for index in range(5000)]
    chain = [node("Identity", first, second) for first, second in pairwise(names)]
    chain.append(node("Identity", names[-1], "B"))
    bias = _constant(chain[::-1], n0=ROW[None])
    torch.testing.assert_close(bias, torch.as_tensor(ROW))
    circle = [node("Add", "B other", "C"), node("Neg", "C", "B")]
    with pytest.raises(ArgumentError, match=r"source: . must be .*got a circle of nodes"):
        _constant(circle, other=ROW[None])
    with pytest.raises(ArgumentError, match="source: B must be computed once, got several"):
        _constant([node("Identity", "b", "B")] * 2, b=ROW[None])


# ---- files ---------------------------------------------------------------------------------------


def test_weights_in_another_file(tmp_path: Path) -> None:
    arrays = _onnx_arrays("gru")
    data = arrays["B"].tobytes()
    (tmp_path / "weights").write_bytes(b"before" + data)
    (tmp_path.parent / "outside").write_bytes(b"before" + data)

    def model(location: str, offset: str = "6") -> bytes:
        entries = {"location": location, "offset": offset, "length": str(len(data))}
        pairs = [(13, message((1, key), (2, text))) for key, text in entries.items()]
        elsewhere = message((1, 1), (1, 6 * H), (2, 11), (8, "B"), *pairs, (14, 1))
        recurrent = node("GRU", "X W R B", "Y", hidden_size=H, linear_before_reset=1)
        stored = [(5, tensor(arrays[name], name)) for name in "WR"]
        return message((7, message((1, recurrent), *stored, (5, elsewhere))))

    path = tmp_path / "model.onnx"
    path.write_bytes(model("weights"))
    output = output_of(rl.import_layer(path), VALUES, batch_first=False)
    np.testing.assert_allclose(output, _expected(np.zeros((1, 1, H))).detach(), rtol=0, atol=1e-12)
    for location, offset in (
        ("../outside", "6"),
        (str(tmp_path.parent / "outside"), "6"),
        ("missing", "6"),
        ("weights", "7"),
        ("weights", "-1"),
        ("weights", "x"),
    ):
        path.write_bytes(model(location, offset))
        with pytest.raises(ArgumentError, match="source"):
            rl.import_layer(path)
    pickled: Any = Model([], {}, {}, [])
    pickled.data = model("weights")
    with pytest.raises(ArgumentError, match=r"source: B must be a part of the model.*path"):
        rl.import_layer(pickled)


def test_damaged_files(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    for text in (b"", b"no model", b"\x0b", b"\xff" * 20):
        path.write_bytes(text)
        with pytest.raises(ArgumentError, match=r"must be (an ONNX file|the name or an output)"):
            rl.import_layer(path)
    data = (FOLDER / "GRU-plain-script-dynamic.onnx").read_bytes()
    random = np.random.default_rng(0)
    for _ in range(300):
        changed = bytearray(data[: random.integers(len(data))] if random.random() < 0.3 else data)
        for _ in range(min(2, len(changed))):
            changed[random.integers(len(changed))] = random.integers(256)
        path.write_bytes(changed)
        try:
            layer = rl.import_layer(path)
        except RaglaneError:
            continue
        assert layer.hidden_size == 3


def test_models_without_a_node() -> None:
    model = Model([node("Tanh", "X", "Y")], {}, {"X": [T, B, D]}, ["Y"])
    with pytest.raises(ArgumentError, match=r"the model has none.*dynamo=False"):
        rl.import_layer(model)
    with pytest.raises(ArgumentTypeError, match="source must be"):
        rl.import_layer(object())
