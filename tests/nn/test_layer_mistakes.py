"""Messages of all layers about wrong arguments, inputs and states."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import raglane as rl
from every_layer import GATED, KINDS, D, H, Kind, build
from raglane.cells import CELLS
from raglane.errors import RaglaneError

OURS = [kind for kind in KINDS if kind.layer not in ("RNN", "LSTM", "GRU")]


def _batch(dtype: torch.dtype = torch.float64) -> rl.Ragged:
    return rl.Ragged.from_flat(torch.randn(5, D, dtype=dtype), lengths=[2, 0, 3])


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        ({"input_size": 0}, "input_size: got 0"),
        ({"input_size": 3.0}, r"input_size: got 3\.0"),
        ({"hidden_size": -1}, "hidden_size: got -1"),
        ({"hidden_size": "4"}, "hidden_size: got '4'"),
        ({"num_layers": 0}, "num_layers: got 0"),
        ({"num_layers": True}, "num_layers: got True"),
        ({"bias": None}, "bias: got None"),
        ({"bias": "relu"}, "bias: got 'relu'"),
        ({"batch_first": 1}, "batch_first: got 1"),
        ({"bidirectional": "yes"}, "bidirectional: got 'yes'"),
        ({"dropout": 1.5}, r"dropout: got 1\.5"),
        ({"dropout": True}, "dropout: got True"),
        ({"dropout": "0.5"}, r"dropout: got '0\.5'"),
        ({"dtype": torch.int64}, r"dtype: got torch\.int64"),
        ({"dtype": "float32"}, "dtype: got 'float32'"),
        ({"proj_size": 7}, "proj_size: got 7"),
        ({"foo": 7}, "foo: got 7"),
        ({"schedule": "sorted"}, "schedule: got 'sorted'"),
        ({"backend": None}, "backend: got None"),
        ({"schedule": "each", "backend": "cpu"}, "schedule, backend: got 'each', 'cpu'"),
        ({"initial_state": "ones"}, "initial_state: got 'ones'"),
        ({"initial_state": None}, "initial_state: got None"),
        ({"input_dropout": 1.0}, r"input_dropout: got 1\.0"),
        ({"weight_dropout": -0.1}, r"weight_dropout: got -0\.1"),
        ({"zoneout": (0.1,) * 3}, r"zoneout: got \(0\.1, 0\.1, 0\.1\)"),
    ],
)
@pytest.mark.parametrize("layer", ["RNN", "GRU", "IndRNN", "SLSTM"])
def test_wrong_arguments_are_named(layer: str, mistake: dict[str, Any], says: str) -> None:
    with pytest.raises(RaglaneError, match=says) as caught:
        getattr(rl.nn, layer)(**{"input_size": D, "hidden_size": H, **mistake})
    assert "Fix: " in str(caught.value)


@pytest.mark.parametrize("proj_size", [-1, 4, True, 2.0, "2"])
def test_wrong_projections_are_named(proj_size: Any) -> None:
    with pytest.raises(RaglaneError, match="proj_size: got "):
        rl.nn.LSTM(D, H, proj_size=proj_size)


@pytest.mark.parametrize("kind", GATED)
def test_wrong_clips_are_named(kind: Kind) -> None:
    for clip in (0, -1.0, float("nan"), "5", [1.0]):
        with pytest.raises(RaglaneError, match="clip: got "):
            build(kind, clip=clip)


@pytest.mark.parametrize("kind", [kind for kind in OURS if kind not in GATED])
def test_others_have_no_clip(kind: Kind) -> None:
    with pytest.raises(TypeError, match=r"clip: got 3\.0"):
        build(kind, clip=3.0)


@pytest.mark.parametrize("max_length", [0, -3, 2.5, True, "10"])
def test_wrong_max_lengths_are_named(max_length: Any) -> None:
    with pytest.raises(RaglaneError, match="max_length: got "):
        rl.nn.IndRNN(D, H, max_length=max_length)


@pytest.mark.parametrize("layer", ["RNN", "IndRNN"])
@pytest.mark.parametrize("nonlinearity", ["sigmoid", None, True])
def test_wrong_nonlinearities_are_named(layer: str, nonlinearity: Any) -> None:
    with pytest.raises(RaglaneError, match="nonlinearity: got "):
        getattr(rl.nn, layer)(D, H, nonlinearity=nonlinearity)


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_inputs_are_named(kind: Kind) -> None:
    layer, batch = build(kind), _batch()
    states = len(CELLS[kind.cell].states)
    wrong = torch.zeros(1, 2, H, dtype=torch.float64)
    for arguments, says in (
        ((rl.Ragged([torch.ones(2, D + 1, dtype=torch.float64)]),), f"input_size = {D}"),
        ((_batch(torch.float32),), r"\.to\(torch\.float64\)"),
        (([torch.ones(2, D)],), r"rl\.Ragged\(sequences\)"),
        ((batch, wrong if states == 1 else (wrong,) * states), r"hx \(h\): got shape \(1, 2, 4\)"),
        ((batch, (wrong,) * (states + 1)), "hx: got a tuple"),
        ((torch.ones(2, 3, D, dtype=torch.float64).to_sparse(),), r"input: .*sparse_coo; .* \.to_dense\(\)"),
        ((torch.ones(2, 3, D, dtype=torch.float64, device="meta"),), "input: got a tensor on meta"),
    ):
        with pytest.raises(RaglaneError, match=says):
            layer(*arguments)
    for name in ("return_output", "return_states"):
        with pytest.raises(RaglaneError, match=f"{name}: got 1"):
            layer(batch, **{name: 1})
    for shape in ((2, 3, H), (1, 3, H + 1), (1,), (1, 1, 3, H)):
        state = torch.zeros(shape, dtype=torch.float64)
        with pytest.raises(RaglaneError, match=r"state: got shape .*\(1, B, 4\)"):
            layer.summary(None, state if states == 1 else (state,) * states)
    with pytest.raises(RaglaneError, match="bidirectional=False"):
        build(kind, bidirectional=True).step(torch.ones(D, dtype=torch.float64))
    with pytest.raises(RaglaneError, match="x_t"):
        layer.step([1.0])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.bool, torch.float64])
@pytest.mark.parametrize("kind", ["lstm", "cfc", "sru"])
def test_autocast_converts_no_other_dtypes(kind: str, dtype: torch.dtype) -> None:
    layer = build(kind, dtype=torch.float32)
    values = torch.ones(2, 3, D).to(dtype)
    for given in (values, rl.Ragged.from_flat(values[0], lengths=[1, 0, 2])):
        with (
            torch.autocast("cpu", torch.bfloat16),
            pytest.raises(ValueError, match=r"input: got .*\.to\(torch\.float32"),
        ):
            layer(given)
    with torch.autocast("cpu", torch.bfloat16):
        assert build(kind)(_batch())[0].dtype is torch.float64


def test_wrong_lengths_are_named() -> None:
    layer = rl.nn.GRU(D, H, batch_first=True)
    with pytest.raises(TypeError, match="contains its lengths"):
        layer(rl.Ragged([torch.ones(2, D)]), lengths=[2])
    with pytest.raises(ValueError, match="lengths"):
        layer(torch.ones(2, 3, D), lengths=[1, 4])
    with pytest.raises(ValueError, match=r"\(B, T, D\)"):
        layer(torch.ones(3, D), lengths=[3])


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize(
    ("hx", "says"),
    [
        (torch.ones(1, 3, H), r"a tuple \(h, c\)"),
        ((None, None), r"a tuple \(h, c\)"),
        ((torch.ones(1, 2, H), torch.ones(1, 3, H)), r"hx \(h\).*\(1, 3, 4\)"),
        ((torch.ones(1, 3, H).double(),) * 2, r"hx \(h\).*float64"),
    ],
)
def test_a_wrong_state_is_named_for_tensors_and_packs(hx: Any, says: str, batch_first: bool) -> None:
    layer = rl.nn.LSTM(D, H, batch_first=batch_first)
    inputs = torch.ones(3, 6, D) if batch_first else torch.ones(6, 3, D)
    for batch in (inputs, torch.nn.utils.rnn.pack_sequence([torch.ones(6, D)] * 3)):
        with pytest.raises((TypeError, ValueError), match=says):
            layer(batch, hx)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda layer: layer(torch.ones(6, 3, 7)), f"input_size = {D}"),
        (lambda layer: layer(torch.ones(6, 3, D).double()), r"\.to\(torch\.float32\)"),
        (lambda layer: layer(torch.ones(D)), r"\(T, D\)"),
        (lambda layer: layer(torch.nested.nested_tensor([torch.ones(2, D)], layout=torch.jagged)), "from_nested"),
        (lambda layer: layer.summary(None, None), "state: got a NoneType"),
    ],
)
def test_other_wrong_inputs_are_named(call: Any, says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        call(rl.nn.GRU(D, H))
