"""``rl.import_layer``, and ``rl.accelerate`` on sLSTM cells: compared with the formulas of the
other libraries.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import raglane as rl
from foreign_cells import GATES, B, D, H, T, keras_arrays, output_of, run_keras
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError


class KerasLayer:
    """A layer with Keras' methods."""

    def __init__(self, kind: str, **settings: Any) -> None:
        gru = {"reset_after": kind == "gru"} if kind.startswith("gru") else {}
        self.settings = {
            "activation": "relu" if kind == "rnn_relu" else "tanh",
            **gru,
            **settings,
        }
        self.arrays = keras_arrays(kind)

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


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", list(GATES))
def test_arrays_of_keras(kind: Any, bias: bool, count: int) -> None:
    directions = [
        [array * scale for array in keras_arrays(kind, bias)] for scale in (1, 0.5)[:count]
    ]
    layer = rl.import_layer([array for arrays in directions for array in arrays], kind)
    values = np.random.default_rng(1).normal(size=(T, B, D))
    np.testing.assert_allclose(
        output_of(layer, values), run_keras(kind, values, directions), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("kind", list(GATES))
def test_layers_of_keras(kind: str) -> None:
    values = np.random.default_rng(1).normal(size=(T, B, D))
    layer = _keras(kind)
    expected = run_keras(kind, values, [layer.arrays])
    np.testing.assert_allclose(
        output_of(rl.import_layer(layer), values), expected, rtol=0, atol=1e-12
    )
    both = rl.import_layer(_bidirectional(layer, _keras(kind, go_backwards=True)))
    expected = run_keras(kind, values, [layer.arrays] * 2)
    np.testing.assert_allclose(output_of(both, values), expected, rtol=0, atol=1e-12)


def _flax(kind: str, gates: str, fused: bool, nnx: bool) -> dict[str, Any]:
    """Parameters by Flax's names, of kernels with the gates in its order."""
    w, u, b = keras_arrays("gru_reset_before" if kind == "gru" else kind)
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
    ("kind", "gates"), [("lstm", "ifgo"), ("gru", "rzn"), ("rnn", ""), ("rnn_relu", "")]
)
def test_parameters_of_flax(kind: str, gates: str, fused: bool, nnx: bool, nested: bool) -> None:
    params = _flax(kind, gates, fused, nnx)
    arrays = keras_arrays("gru_reset_before" if kind == "gru" else kind)
    if kind == "gru":  # Keras has z first
        arrays = [
            np.concatenate([np.split(part, 3, -1)[place] for place in (1, 0, 2)], -1)
            for part in arrays
        ]
        arrays[2] = np.stack([arrays[2], np.zeros_like(arrays[2])])
    if nested:
        params = {"params": {"forward_rnn": {"cell": params}, "backward_rnn": {"cell": params}}}
    layer = rl.import_layer(params, "rnn_relu" if kind == "rnn_relu" else None)
    values = np.random.default_rng(1).normal(size=(T, B, D))
    expected = run_keras(kind, values, [arrays] * (2 if nested else 1))
    np.testing.assert_allclose(output_of(layer, values), expected, rtol=0, atol=1e-12)


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


@pytest.mark.parametrize("tirex", [False, True])
def test_an_slstm_cell_first_called_in_inference_mode_is_verified(
    tirex: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sLSTMCell_vanilla, "__module__", "tirex.cell" if tirex else "xlstm.cell")
    cell, given = _cell(tirex), torch.randn(4, 5, 24, dtype=torch.float64)
    fast = rl.accelerate(copy.deepcopy(cell))
    # A warning names a program that could not be verified.
    with torch.inference_mode(), warnings.catch_warnings(action="error"):
        torch.testing.assert_close(fast(given)[0], cell(given)[0])


@pytest.mark.parametrize("steps", [1, 7])
@pytest.mark.parametrize("tirex", [False, True])
def test_slstm_cells_are_accelerated(
    tirex: bool, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sLSTMCell_vanilla, "__module__", "another.cell")
    with pytest.warns(UserWarning, match="replaced no layer"):
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
    torch.testing.assert_close(fast.with_states(given, lengths=lengths)[1], whole)
    layer = rl.import_layer(cell)
    torch.testing.assert_close(layer(given)[0], cell(given)[0].transpose(1, 2).flatten(2))
    torch.testing.assert_close(rl.import_layer(fast)(given)[0], layer(given)[0], rtol=0, atol=0)
    fast.config.input_shape = "SBGNH"
    torch.testing.assert_close(fast(given.transpose(0, 1)), cell(given))
    converted = fast.forward
    fast.forward = lambda *args: converted(*args)
    back = rl.to_torch(fast)
    assert type(back) is sLSTMCell_vanilla
    torch.testing.assert_close(back(given, state), cell(given, state), rtol=0, atol=0)
    del back.forward
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
    torch.testing.assert_close(rl.import_layer(layer)(values)[0], expected)
    layer.conv1d = torch.nn.Identity()
    with pytest.raises(ArgumentError, match=r"conv1d must be False.*slstm_cell"):
        rl.import_layer(layer)


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


FLAX = _flax("lstm", "ifgo", False, False)
CIRCLE: dict[str, Any] = {}
CIRCLE["params"] = CIRCLE


@pytest.mark.parametrize(
    ("source", "kind", "text"),
    [
        (
            torch.nn.LSTM(3, 4),
            None,
            "source must be a recurrent layer of Keras.*got a LSTM.*rl.accelerate",
        ),
        (None, None, "source must be"),
        (keras_arrays("lstm"), None, "kind must be one of lstm"),
        (keras_arrays("lstm"), "lstmm", "kind must be one of.*Pass lstm"),
        (keras_arrays("lstm")[:1], "lstm", "source must be 2 arrays per direction.*got 1 arrays"),
        (
            keras_arrays("lstm") + keras_arrays("lstm", False),
            "lstm",
            "source must be 2 arrays per direction.*got 5 arrays",
        ),
        (
            [np.ones((0, 16)), np.ones((4, 16))],
            "lstm",
            r"source\[0\] must be a matrix .* not empty",
        ),
        (
            keras_arrays("lstm"),
            "rnn",
            r"source must be arrays with weight_ih_l0 of shape \(5, 3\)",
        ),
        (keras_arrays("gru"), "gru_reset_before", r"source\[2\] must be .*got shape \(2, 15\)"),
        (keras_arrays("gru_reset_before"), "gru", r"source\[2\] must be \(2, gates \* units,\)"),
        *(
            ([*keras_arrays("gru")[:2], np.ones((count, 15))], "gru", rf"got shape \({count}, 15\)")
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
        (
            [*keras_arrays("lstm")[:2], np.ones(20, np.complex64)],
            "lstm",
            "source: bias_ih must be real numbers, got torch.complex64",
        ),
        (
            [torch.ones(3, 20, device="meta"), torch.ones(5, 20)],
            "lstm",
            "source: weight_ih must be an array of numbers, got a tensor on meta",
        ),
        (
            [torch.ones(3, 20).to(torch.float8_e5m2), torch.ones(5, 20).to(torch.float8_e5m2)],
            "lstm",
            "source must be of dtype float16, bfloat16, float32 or float64, got torch.float8_e5m2",
        ),
        (FLAX | {"pi": FLAX["ii"]}, None, "source must be the parameters of an LSTM.*'pi'"),
        (
            FLAX | _flax("gru", "rzn", False, False),
            None,
            "source must be the parameters of an LSTM.*'hn'",
        ),
        (FLAX | {"if_": FLAX["if"]}, None, "source must be the parameters of an LSTM.*'if_'"),
        (
            FLAX | {"if": FLAX["if"] | {"scale": 1}},
            None,
            "source: if must be a kernel, and a bias or none, got a dict with 'kernel', 'scale'",
        ),
        (FLAX | {"if": 3}, None, "source: if must be a kernel, .*got a int"),
        (
            FLAX | {"if": {"kernel": np.ones((2, H))}},
            None,
            r"source must be kernels of one shape, got kernels \(2, 5\), \(3, 5\)",
        ),
        (
            FLAX | {"hf": FLAX["hf"] | {"bias": np.ones((1, H))}},
            None,
            r"source: hf.bias must be of shape \(5,\) on cpu.*got shape \(1, 5\)",
        ),
        (
            {"forward_rnn": FLAX, "backward_rnn": FLAX, "other": {}},
            None,
            "source must be parameters with 'forward_rnn', 'backward_rnn' only",
        ),
        (
            {"forward_rnn": FLAX, "backward_rnn": _flax("gru", "rzn", False, False)},
            None,
            "source must be cells of one kind in both directions, got gru and lstm",
        ),
        (CIRCLE, None, "source must be parameters, got a dict that contains itself"),
    ],
)
def test_mistakes(source: Any, kind: Any, text: str) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError, ShapeError), match=text):
        rl.import_layer(source, kind)


def test_dtypes_that_differ() -> None:
    kernel, recurrent, bias = keras_arrays("lstm")
    bias[:] = 1e300
    layer = rl.import_layer([kernel, recurrent.astype(np.float32), bias], "lstm")
    parameters = dict(layer.named_parameters())
    assert {parameter.dtype for parameter in parameters.values()} == {torch.float64}
    assert torch.equal(parameters["weight_ih_l0"], torch.as_tensor(kernel.T))
    assert parameters["bias_ih_l0"].tolist() == [1e300] * 4 * H
    nnx = {
        "dense_i": {"kernel": kernel, "bias": bias},
        "dense_h": {"kernel": recurrent.astype("f")},
    }
    assert rl.import_layer(nnx).get_parameter("bias_ih_l0").tolist() == [1e300] * 4 * H
    cell = _cell().float()
    cell._bias_ = torch.nn.Parameter(torch.full((24,), 1e300, dtype=torch.float64))
    assert rl.import_layer(cell).get_parameter("bias_ih_l0").tolist() == [1e300] * 24
    cell._bias_ = torch.nn.Parameter(torch.zeros(24, device="meta"))
    with pytest.raises(ArgumentError, match=r"bias_ih must be an array of numbers.*meta"):
        rl.import_layer(cell)


@pytest.mark.parametrize(
    ("backend", "dtype"), [("reference", torch.float64), ("program", torch.float32)]
)
def test_slstm_without_input_weights(backend: Any, dtype: torch.dtype) -> None:
    whole = rl.nn.SLSTM(3, 4, 2, num_heads=2, bidirectional=True, dtype=dtype)
    layer: Any = rl.nn.SLSTM(
        16, 4, 2, num_heads=2, bidirectional=True, input_weights=False, dtype=dtype, backend=backend
    )
    weights = whole.state_dict()
    one, other = weights.pop("weight_ih_l0"), weights.pop("weight_ih_l0_reverse")
    other.copy_(one)  # both directions read the same input
    layer.load_state_dict(weights)
    values = torch.randn(5, 2, 3, dtype=dtype)
    torch.testing.assert_close(layer(values @ one.t())[0], whole(values)[0])
    assert repr(layer).startswith(
        "SLSTM(16, 4, num_layers=2, bidirectional=True, num_heads=2, input_weights=False"
    )
    with pytest.raises(ArgumentError, match="input_size must be 4 \\* hidden_size = 16"):
        rl.nn.SLSTM(3, 4, input_weights=False)
