"""``rl.convert_weights``, and ``rl.accelerate`` on sLSTM cells: compared with the formulas of the
other libraries.
"""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import raglane as rl
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError

D, H, B, T = 3, 5, 4, 6
GATES = {"lstm": 4, "gru": 3, "gru_reset_before": 3, "rnn_tanh": 1, "rnn_relu": 1}


def _sigmoid(values: Any) -> Any:
    return 1 / (1 + np.exp(-values))


def _step(kind: str, x: Any, h: Any, c: Any, w: Any, u: Any, b: Any, reset: Any) -> tuple[Any, Any]:
    """One step of Keras' cells: kernels ``(D, G * H)``, gates i f c o and z r h; ``reset`` is the
    second bias.
    """
    if kind == "lstm":
        i, f, g, o = np.split(x @ w + h @ u + b + reset, 4, 1)
        c = _sigmoid(f) * c + _sigmoid(i) * np.tanh(g)
        return _sigmoid(o) * np.tanh(c), c
    if kind.startswith("rnn"):
        argument = x @ w + h @ u + b + reset
        return (np.tanh(argument) if kind == "rnn_tanh" else np.maximum(argument, 0)), c
    xz, xr, xh = np.split(x @ w + b, 3, 1)
    hz, hr, hh = np.split(h @ u + reset, 3, 1)
    z, r = _sigmoid(xz + hz), _sigmoid(xr + hr)
    inner = r * hh if kind == "gru" else (r * h) @ u[:, 2 * H :]
    return z * h + (1 - z) * np.tanh(xh + inner), c


def _run(kind: str, values: Any, directions: list[list[Any]]) -> Any:
    outputs = []
    for reverse, (w, u, *bias) in enumerate(directions):
        b, reset = bias[0] if bias and bias[0].ndim == 2 else ([*bias, 0.0][0], 0.0)
        h, c, found = np.zeros((B, H)), np.zeros((B, H)), []
        for x in values[::-1] if reverse else values:
            h, c = _step(kind, x, h, c, w, u, b, reset)
            found.append(h)
        outputs.append(np.stack(found[::-1] if reverse else found))
    return np.concatenate(outputs, 2)


def _arrays(kind: str, bias: bool = True) -> list[Any]:
    random, rows = np.random.default_rng(7), GATES[kind] * H
    shapes = [(D, rows), (H, rows), *([(2, rows) if kind == "gru" else (rows,)] if bias else [])]
    return [random.normal(size=shape) for shape in shapes]


class KerasLayer:
    """A layer with Keras' methods."""

    def __init__(self, kind: str, **settings: Any) -> None:
        gru = {"reset_after": kind == "gru"} if kind.startswith("gru") else {}
        self.settings = {
            "activation": kind.removeprefix("rnn_") if "rnn" in kind else "tanh",
            **gru,
            **settings,
        }
        self.arrays = _arrays(kind)

    def get_config(self) -> dict[str, Any]:
        return self.settings

    def get_weights(self) -> list[Any]:
        return self.arrays


def _keras(kind: str, **settings: Any) -> Any:
    name = {"lstm": "LSTM", "gru": "GRU", "gru_reset_before": "GRU"}.get(kind, "SimpleRNN")
    return type(name, (KerasLayer,), {})(kind, **settings)


def _bidirectional(forward: Any, backward: Any, merge_mode: str = "concat") -> Any:
    pair = SimpleNamespace(forward_layer=forward, backward_layer=backward)
    pair.get_config, pair.get_weights = (
        lambda: {"merge_mode": merge_mode},
        lambda: forward.arrays + backward.arrays,
    )
    return pair


def _output(layer: Any, values: Any, batch_first: bool = True) -> Any:
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


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", list(GATES))
def test_arrays_of_keras(kind: str, bias: bool, count: int) -> None:
    directions = [[array * scale for array in _arrays(kind, bias)] for scale in (1, 0.5)[:count]]
    layer = rl.convert_weights([array for arrays in directions for array in arrays], kind)
    values = np.random.default_rng(1).normal(size=(T, B, D))
    np.testing.assert_allclose(
        _output(layer, values), _run(kind, values, directions), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("kind", list(GATES))
def test_layers_of_keras(kind: str) -> None:
    values = np.random.default_rng(1).normal(size=(T, B, D))
    layer = _keras(kind)
    expected = _run(kind, values, [layer.arrays])
    np.testing.assert_allclose(
        _output(rl.convert_weights(layer), values), expected, rtol=0, atol=1e-12
    )
    both = rl.convert_weights(_bidirectional(layer, _keras(kind, go_backwards=True)))
    expected = _run(kind, values, [layer.arrays] * 2)
    np.testing.assert_allclose(_output(both, values), expected, rtol=0, atol=1e-12)


def _flax(kind: str, gates: str, fused: bool, nnx: bool) -> dict[str, Any]:
    """Parameters by Flax's names, of kernels with the gates in its order."""
    w, u, b = _arrays("gru_reset_before" if kind == "gru" else kind)
    if fused:
        return {"dense_i": {"kernel": w, "bias": b}, "dense_h": {"kernel": u}}
    if not gates:
        return {"i": {"kernel": w, "bias": b}, "h": {"kernel": u}}
    split = [np.split(array, len(gates), -1) for array in (w, u, b)]
    params: dict[str, Any] = {}
    for place, gate in enumerate(gates):
        # flax's LSTM has the biases of the state's products, its GRU those of the input's.
        params[f"i{gate}" + ("_" if nnx and gate == "f" else "")] = {"kernel": split[0][place]}
        params[f"h{gate}"] = {"kernel": split[1][place]}
        params[f"{'h' if kind == 'lstm' else 'i'}{gate}"]["bias"] = split[2][place]
    return params


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("fused", "nnx"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize(
    ("kind", "gates"), [("lstm", "ifgo"), ("gru", "rzn"), ("rnn_tanh", ""), ("rnn_relu", "")]
)
def test_parameters_of_flax(kind: str, gates: str, fused: bool, nnx: bool, nested: bool) -> None:
    params = _flax(kind, gates, fused, nnx)
    arrays = _arrays("gru_reset_before" if kind == "gru" else kind)
    if kind == "gru":  # Keras has z first
        arrays = [
            np.concatenate([np.split(part, 3, -1)[place] for place in (1, 0, 2)], -1)
            for part in arrays
        ]
        arrays[2] = np.stack([arrays[2], np.zeros_like(arrays[2])])
    if nested:
        params = {"params": {"forward_rnn": {"cell": params}, "backward_rnn": {"cell": params}}}
    layer = rl.convert_weights(params, "rnn_relu" if kind == "rnn_relu" else None)
    values = np.random.default_rng(1).normal(size=(T, B, D))
    expected = _run(kind, values, [arrays] * (2 if nested else 1))
    np.testing.assert_allclose(_output(layer, values), expected, rtol=0, atol=1e-12)


def _onnx(operator: str, arrays: dict[str, Any], computed: bool = False, **attributes: Any) -> Any:
    onnx = pytest.importorskip("onnx", reason="needs raglane[export]")
    helper = onnx.helper
    inputs = [
        name if name in (*arrays, "X") else "" for name in "X W R B _ initial_h initial_c P".split()
    ]
    nodes = [
        helper.make_node(operator, inputs, ["", "state"], name="node", hidden_size=H, **attributes)
    ]
    stored = dict(arrays)
    if computed:  # as exporters of layers with several tensors write them
        stored["W1"] = stored.pop("W")[0]
        stored["axes"] = np.array([0])
        nodes.insert(0, helper.make_node("Unsqueeze", ["W1", "axes"], ["W"]))
    ends = [[helper.make_tensor_value_info(part, 11, None)] for part in ("X", "state")]
    constants = [onnx.numpy_helper.from_array(array, name) for name, array in stored.items()]
    return helper.make_model(helper.make_graph(nodes, "graph", *ends, constants))


def _onnx_arrays(kind: str) -> dict[str, Any]:
    """The arrays of Keras in ONNX's layout: rows of gates i o f c, or z r h."""
    w, u, b = _arrays(kind)
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
        ("rnn_tanh", {"layout": 1}),
        ("rnn_relu", {"activations": ["Relu"]}),
    ],
)
def test_nodes_of_onnx(
    kind: str, attributes: dict[str, Any], computed: bool, tmp_path: Any
) -> None:
    model = _onnx(kind.partition("_")[0].upper(), _onnx_arrays(kind), computed, **attributes)
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    values = np.random.default_rng(1).normal(size=(T, B, D))
    for source, node in ((model, "node"), (tmp_path / "model.onnx", "state")):
        output = _output(
            rl.convert_weights(source, node=node), values, batch_first="layout" in attributes
        )
        np.testing.assert_allclose(output, _run(kind, values, [_arrays(kind)]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("coupled", [False, True])
def test_variants_of_onnx_lstm(coupled: bool, clip: float | None) -> None:
    arrays, values = _onnx_arrays("lstm"), np.random.default_rng(1).normal(size=(T, B, D))
    peepholes = np.random.default_rng(2).normal(size=(1, 3 * H))
    options: dict[str, Any] = ({"clip": clip} if clip else {}) | (
        {"input_forget": 1} if coupled else {}
    )
    arrays |= {} if coupled else {"P": peepholes}
    layer = rl.convert_weights(_onnx("LSTM", arrays, **options))
    doubled = {name: np.concatenate([2 * part, part]) for name, part in arrays.items()}
    both = rl.convert_weights(
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
        i = _sigmoid(np.clip(i + p[0] * c, -most, most))
        f = 1 - i if coupled else _sigmoid(np.clip(f + p[2] * c, -most, most))
        c = f * c + i * np.tanh(np.clip(g, -most, most))
        h = _sigmoid(np.clip(o + p[1] * c, -most, most)) * np.tanh(c)
        expected.append(h)
    np.testing.assert_allclose(
        _output(layer, values, False), np.stack(expected), rtol=0, atol=1e-7 if clip else 1e-12
    )


@pytest.mark.parametrize(
    ("arrays", "attributes", "text"),
    [
        ({}, {"direction": "reverse"}, "direction must be .*reverse.*batch.reverse"),
        ({}, {"activations": ["HardSigmoid", "Tanh", "Tanh"]}, "activations must be .*hardsigmoid"),
        ({"P": np.ones((1, 3 * H))}, {"input_forget": 1}, "P with input_forget must be False"),
        ({"initial_h": np.ones((1, B, H))}, {}, "initial state must be zeros"),
        ({"initial_c": np.ones((1, B, H))}, {}, "initial state must be zeros"),
        ({"B": np.ones((1, 3))}, {}, "a block for each of 4 gates, got an array of 2 rows"),
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
        rl.convert_weights(model)
    with pytest.raises(ArgumentError, match=r"node must be .*'node'"):
        rl.convert_weights(model, node="other")


def test_onnx_weights_that_are_no_constants() -> None:
    model = _onnx(
        "LSTM", _onnx_arrays("lstm") | {"P": np.ones((1, 3 * H)), "initial_h": np.zeros((1, B, H))}
    )
    model.graph.initializer.pop()  # an initial state may be an input
    assert isinstance(rl.convert_weights(model), rl.nn.PeepholeLSTM)
    for name in "PBRW":
        assert model.graph.initializer.pop().name == name
        with pytest.raises(ArgumentError, match=f"source: {name} must be a constant of the model"):
            rl.convert_weights(model)
    with pytest.raises(ArgumentError, match="activations must be"):
        rl.convert_weights(
            _onnx("RNN", {}, direction="bidirectional", activations=["Relu", "Tanh"])
        )


class sLSTMCell_vanilla(torch.nn.Module):  # noqa: N801
    """A cell with xlstm's parameters, or TiRex's, and a plain loop over steps."""

    def __init__(self, heads: int, size: int, tirex: bool = False, function: str = "slstm") -> None:
        super().__init__()
        shape = (heads, size, 4 * size) if tirex else (heads, 4 * size, size)
        self.heads, self.size, self.tirex = heads, size, tirex
        self.config = SimpleNamespace(function=function, backend="vanilla")
        if tirex:
            self.backend, self.config = "torch", SimpleNamespace()
        self._recurrent_kernel_ = torch.nn.Parameter(torch.randn(shape) / 2)
        self._bias_ = torch.nn.Parameter(torch.randn(4 * heads * size))

    def _permute_output(self, output: Tensor) -> Tensor:
        return output.view(*output.shape[:2], self.heads, self.size).permute(1, 2, 0, 3)

    def forward(self, input: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        heads, size, kernel = self.heads, self.size, self._recurrent_kernel_ * 1
        kernel = (
            kernel.view(heads, size, 4, size)
            if self.tirex
            else kernel.view(heads, 4, size, size).permute(0, 3, 1, 2)
        )
        bias = (
            self._bias_.view(heads, 4, size)
            if self.tirex
            else self._bias_.view(4, heads, size).transpose(0, 1)
        )
        state = input.new_zeros(4, len(input), heads * size) if state is None else state
        h, c, n, m = (part.view(-1, heads, size) for part in state)
        outputs = []
        for x in input.view(*input.shape[:2], 4, heads, size).unbind(1):
            i, f, z, o = (
                x.transpose(1, 2) + torch.einsum("bki,kigo->bkgo", h, kernel) + bias
            ).unbind(2)
            kept = m + torch.nn.functional.logsigmoid(f)
            m = torch.where(n == 0, i, torch.maximum(i, kept))
            c = (kept - m).exp().clamp(max=1) * c + (i - m).exp() * z.tanh()
            n = (kept - m).exp().clamp(max=1) * n + (i - m).exp()
            h = o.sigmoid() * c / n
            outputs.append(h.flatten(1))
        return self._permute_output(torch.stack(outputs)), torch.stack(
            [part.flatten(1) for part in (h, c, n, m)]
        )


sLSTMCell_vanilla.__module__ = "xlstm.blocks.slstm.cell"


def _cell(tirex: bool = False, **options: Any) -> Any:
    torch.manual_seed(3)
    return sLSTMCell_vanilla(2, 3, tirex, **options).double()


def _results(cell: Any, given: Tensor, state: Any) -> list[Tensor]:
    given = given.clone().requires_grad_()
    output, final = cell(given, state)
    loss = output.sin().sum() + (final[0] * final[1] / final[2]).sum()
    return [output, final, *torch.autograd.grad(loss, [given, *cell.parameters()])]


@pytest.mark.parametrize("steps", [1, 7])
@pytest.mark.parametrize("tirex", [False, True])
def test_slstm_cells_are_accelerated(
    tirex: bool, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sLSTMCell_vanilla, "__module__", "another.cell")
    assert type(rl.accelerate(_cell(tirex))) is sLSTMCell_vanilla
    monkeypatch.setattr(sLSTMCell_vanilla, "__module__", "tirex.cell" if tirex else "xlstm.cell")
    cell, given = _cell(tirex), torch.randn(4, steps, 24, dtype=torch.float64)
    fast = rl.accelerate(copy.deepcopy(cell))
    assert rl.explain(fast).replaced == [""]
    assert fast.state_dict().keys() == cell.state_dict().keys()
    state = cell(torch.randn(4, 2, 24, dtype=torch.float64))[1].detach()
    for hx in (None, state):
        torch.testing.assert_close(
            _results(fast, given, hx), _results(cell, given, hx), rtol=1e-10, atol=1e-10
        )
    output, final = fast(rl.Ragged([given[0], given[1, :0], given[2, :1]]))
    torch.testing.assert_close(
        output.select([0]).values, cell(given[:1])[0].transpose(1, 2).flatten(2)[0]
    )
    assert final[0].shape == (1, 3, 6)
    lengths = torch.tensor([steps, 0, 1, steps])
    whole = fast(rl.Ragged.from_padded(given, lengths))[1]
    torch.testing.assert_close(fast(given, lengths=lengths, return_states=True)[1], whole)
    layer = rl.convert_weights(cell)
    torch.testing.assert_close(layer(given)[0], cell(given)[0].transpose(1, 2).flatten(2))
    torch.testing.assert_close(rl.convert_weights(fast)(given)[0], layer(given)[0], rtol=0, atol=0)
    fast.config.input_shape = "SBGNH"
    torch.testing.assert_close(fast(given.transpose(0, 1)), cell(given))
    back = rl.unaccelerate(fast)
    assert type(back) is sLSTMCell_vanilla
    assert vars(back).keys() == vars(cell).keys()


def test_layers_around_slstm_cells() -> None:
    cell = _cell()
    layer = torch.nn.Module()
    layer.slstm_cell = cell
    for name in ("fgate", "igate", "zgate", "ogate"):
        gate = torch.nn.Module()
        gate.weight = torch.nn.Parameter(torch.randn(2, 3, 3, dtype=torch.float64))
        layer.add_module(name, gate)
    values = torch.randn(4, 5, 6, dtype=torch.float64)
    products = [
        torch.einsum(
            "bthd,hod->btho", values.view(4, 5, 2, 3), getattr(layer, name).weight
        ).flatten(2)
        for name in ("fgate", "igate", "zgate", "ogate")  # to the gates i, f, z and o
    ]
    expected = cell(torch.cat(products, 2))[0].transpose(1, 2).flatten(2)
    torch.testing.assert_close(rl.convert_weights(layer)(values)[0], expected)
    layer.conv1d = torch.nn.Identity()
    with pytest.raises(ArgumentError, match=r"conv1d must be False.*slstm_cell"):
        rl.convert_weights(layer)


@pytest.mark.parametrize(
    ("options", "backend", "reason"),
    [({"function": "lstm"}, "vanilla", "its function is lstm"), ({}, "cuda", "CUDA kernels")],
)
def test_slstm_cells_that_are_left(options: dict[str, Any], backend: str, reason: str) -> None:
    cell = _cell(**options)
    cell.config.backend = backend
    with pytest.warns(UserWarning, match=reason):
        rl.accelerate(torch.nn.Sequential(cell))
    assert type(cell) is sLSTMCell_vanilla


def test_accelerated_slstm_can_be_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sLSTMCell_vanilla, "__module__", "xlstm")
    monkeypatch.setitem(
        __import__("sys").modules, "xlstm", SimpleNamespace(sLSTMCell_vanilla=sLSTMCell_vanilla)
    )
    fast, given = rl.accelerate(_cell()), torch.randn(4, 3, 24, dtype=torch.float64)
    again = pickle.loads(pickle.dumps(fast))
    assert type(again) is type(fast)
    assert torch.equal(again(given)[0], fast(given)[0])


@pytest.mark.parametrize(
    ("source", "kind", "text"),
    [
        (
            torch.nn.LSTM(3, 4),
            None,
            "source must be a recurrent layer of Keras.*got a LSTM.*rl.accelerate",
        ),
        (None, None, "source must be"),
        (_arrays("lstm"), None, "kind must be one of lstm"),
        (_arrays("lstm"), "lstmm", "kind must be one of.*Pass lstm"),
        (_arrays("lstm")[:1], "lstm", "source must be 2 arrays per direction.*got 1 arrays"),
        (
            _arrays("lstm") + _arrays("lstm", False),
            "lstm",
            "source must be 2 arrays per direction.*got 5 arrays",
        ),
        (
            [np.ones((0, 16)), np.ones((4, 16))],
            "lstm",
            r"source\[0\] must be a matrix .* not empty",
        ),
        (_arrays("lstm"), "rnn_tanh", r"source must be arrays with weight_ih_l0 of shape \(5, 3\)"),
        (_arrays("gru"), "gru_reset_before", r"source\[2\] must be .*got shape \(2, 15\)"),
        (_arrays("gru_reset_before"), "gru", r"source\[2\] must be \(2, gates \* units,\)"),
        *(
            ([*_arrays("gru")[:2], np.ones((count, 15))], "gru", rf"got shape \({count}, 15\)")
            for count in (1, 3)
        ),
        ([np.ones((3, 4)), np.ones(4)], "lstm", r"source\[1\] must be a matrix"),
        ([np.ones((3, 4)), "no array"], "lstm", r"source\[1\] must be numbers"),
        ([np.ones((3, 10)), np.ones((5, 10))], "gru", "a block for each of 3 gates"),
        (_keras("lstm"), "lstm", "kind must be None"),
        (
            _keras("lstm", recurrent_activation="hard_sigmoid"),
            None,
            "recurrent_activation must be 'sigmoid'",
        ),
        (_keras("lstm", activation="relu"), None, "activation must be 'tanh', got 'relu'"),
        (_keras("gru", go_backwards=True), None, "go_backwards must be False.*batch.reverse"),
        (
            _bidirectional(_keras("gru"), _keras("gru")),
            None,
            "go_backwards must be True, got False",
        ),
        (
            _bidirectional(_keras("gru"), _keras("gru", go_backwards=True), "sum"),
            None,
            "merge_mode must be 'concat'",
        ),
        (
            _bidirectional(_keras("gru"), _keras("lstm", go_backwards=True)),
            None,
            "layers of one kind",
        ),
        ({"a": {}, "b": {}}, None, "source must be the parameters of an LSTM.*'a', 'b'"),
        (_flax("lstm", "ifgo", False, False), "gru", "kind must be one of lstm"),
        (_cell(function="lstm"), None, "function must be 'slstm', got 'lstm'"),
    ],
)
def test_mistakes(source: Any, kind: str | None, text: str) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError, ShapeError), match=text):
        rl.convert_weights(source, kind)


@pytest.mark.parametrize(
    ("backend", "dtype"), [("reference", torch.float64), ("program", torch.float32)]
)
def test_slstm_without_input_weights(backend: str, dtype: torch.dtype) -> None:
    whole = rl.nn.SLSTM(3, 4, 2, heads=2, bidirectional=True, dtype=dtype)
    layer: Any = rl.nn.SLSTM(
        16, 4, 2, heads=2, bidirectional=True, input_weights=False, dtype=dtype, backend=backend
    )
    weights = whole.state_dict()
    one, other = weights.pop("weight_ih_l0"), weights.pop("weight_ih_l0_reverse")
    other.copy_(one)  # both directions read the same input
    layer.load_state_dict(weights)
    values = torch.randn(5, 2, 3, dtype=dtype)
    torch.testing.assert_close(layer(values @ one.t())[0], whole(values)[0])
    assert repr(layer).startswith(
        "SLSTM(16, 4, num_layers=2, bidirectional=True, heads=2, input_weights=False"
    )
    with pytest.raises(ArgumentError, match="input_size must be 4 \\* hidden_size = 16"):
        rl.nn.SLSTM(3, 4, input_weights=False)
