"""What every layer of rl.nn says of wrong arguments, inputs and states."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import raglane as rl
from every_layer import GATED, KINDS, D, H, Kind, build
from looped import looped
from raglane.cells import CELLS
from raglane.errors import RaglaneError

OURS = [kind for kind in KINDS if kind.layer not in ("RNN", "LSTM", "GRU")]


def _batch(dtype: torch.dtype = torch.float64) -> rl.Ragged:
    return rl.Ragged.from_flat(torch.randn(5, D, dtype=dtype), lengths=[2, 0, 3])


@looped(
    ("mistake", "says"),
    [
        ({"input_size": 0}, "input_size must be .*got 0"),
        ({"input_size": 3.0}, r"input_size must be .*got 3\.0"),
        ({"hidden_size": -1}, "hidden_size must be .*got -1"),
        ({"hidden_size": "4"}, "hidden_size must be .*got '4'"),
        ({"num_layers": 0}, "num_layers must be .*got 0"),
        ({"num_layers": True}, "num_layers must be .*got True"),
        ({"bias": None}, "bias must be .*got None"),
        ({"bias": "relu"}, "bias must be .*got 'relu'"),
        ({"batch_first": 1}, "batch_first must be .*got 1"),
        ({"bidirectional": "yes"}, "bidirectional must be .*got 'yes'"),
        ({"dropout": 1.5}, r"dropout must be .*got 1\.5"),
        ({"dropout": True}, "dropout must be .*got True"),
        ({"dropout": "0.5"}, r"dropout must be .*got '0\.5'"),
        ({"dtype": torch.int64}, r"dtype must be .*got torch\.int64"),
        ({"dtype": "float32"}, "dtype must be .*got 'float32'"),
        ({"proj_size": 7}, "proj_size must be .*got 7"),
        ({"foo": 7}, "foo must be .*got 7"),
        ({"schedule": "sorted"}, "schedule must be .*got 'sorted'"),
        ({"backend": None}, "backend must be .*got None"),
        ({"schedule": "each", "backend": "cpu"}, "schedule, backend must be .*got 'each', 'cpu'"),
        ({"initial_state": "ones"}, "initial_state must be .*got 'ones'"),
        ({"initial_state": None}, "initial_state must be .*got None"),
        ({"input_dropout": 1.0}, r"input_dropout must be .*got 1\.0"),
        ({"weight_dropout": -0.1}, r"weight_dropout must be .*got -0\.1"),
        ({"zoneout": (0.1,) * 3}, r"zoneout must be .*got \(0\.1, 0\.1, 0\.1\)"),
    ],
)
@looped("kind", KINDS)
def test_wrong_arguments_are_named(kind: Kind, mistake: dict[str, Any], says: str) -> None:
    sizes = {"input_size": D, "hidden_size": H}
    with pytest.raises(RaglaneError, match=says) as caught:
        getattr(rl.nn, kind.layer)(**{**sizes, **kind.options, **mistake})
    assert " must be " in str(caught.value)


@looped("proj_size", [-1, 4, True, 2.0, "2"])
def test_wrong_projections_are_named(proj_size: Any) -> None:
    with pytest.raises(RaglaneError, match=r"proj_size must be .*got "):
        rl.nn.LSTM(D, H, proj_size=proj_size)


@looped("clip", [0, -1.0, float("nan"), "5", [1.0]])
@looped("kind", GATED)
def test_wrong_clips_are_named(kind: Kind, clip: Any) -> None:
    with pytest.raises(RaglaneError, match=r"clip must be .*got "):
        build(kind, clip=clip)


@looped("kind", [kind for kind in OURS if kind not in GATED])
def test_others_have_no_clip(kind: Kind) -> None:
    with pytest.raises(TypeError, match=r"clip must be .*got 3\.0"):
        build(kind, clip=3.0)


@looped("max_length", [0, -3, 2.5, True, "10"])
def test_wrong_max_lengths_are_named(max_length: Any) -> None:
    with pytest.raises(RaglaneError, match=r"max_length must be .*got "):
        rl.nn.IndRNN(D, H, max_length=max_length)


@looped("layer", ["RNN", "IndRNN"])
@looped("nonlinearity", ["sigmoid", None, True])
def test_wrong_nonlinearities_are_named(layer: str, nonlinearity: Any) -> None:
    with pytest.raises(RaglaneError, match=r"nonlinearity must be .*got "):
        getattr(rl.nn, layer)(D, H, nonlinearity=nonlinearity)


@looped("kind", KINDS)
def test_wrong_inputs_are_named(kind: Kind) -> None:
    layer, batch = build(kind), _batch()
    states = len(CELLS[kind.cell].states)
    wrong = torch.zeros(1, 2, H, dtype=torch.float64)
    for arguments, says in (
        ((rl.Ragged([torch.ones(2, D + 1, dtype=torch.float64)]),), f"input_size = {D}"),
        ((_batch(torch.float32),), r"\.to\(torch\.float64\)"),
        (([torch.ones(2, D)],), r"rl\.Ragged\(sequences\)"),
        ((batch, wrong if states == 1 else (wrong,) * states), r"hx \(h\) must be .*got shape \(1, 2, 4\)"),
        ((batch, (wrong,) * (states + 1)), "hx must be .*got a tuple"),
        ((torch.ones(2, 3, D, dtype=torch.float64).to_sparse(),), r"input: .*sparse_coo; .* \.to_dense\(\)"),
        ((torch.ones(2, 3, D, dtype=torch.float64, device="meta"),), "input must be .*got a tensor on meta"),
    ):
        with pytest.raises(RaglaneError, match=says):
            layer(*arguments)
    for name in ("return_output", "return_states"):
        with pytest.raises(RaglaneError, match=f"{name} must be .*got 1"):
            layer(batch, **{name: 1})
    for shape in ((2, 3, H), (1, 3, H + 1), (1,), (1, 1, 3, H)):
        state = torch.zeros(shape, dtype=torch.float64)
        with pytest.raises(RaglaneError, match=r"state must be .*\(1, B, 4\).*, got shape "):
            layer.summary(None, state if states == 1 else (state,) * states)
    with pytest.raises(RaglaneError, match="bidirectional=False"):
        build(kind, bidirectional=True).step(torch.ones(D, dtype=torch.float64))
    with pytest.raises(RaglaneError, match="x_t"):
        layer.step([1.0])


@looped("dtype", [torch.complex64, torch.int64, torch.bool, torch.float64])
@looped("kind", KINDS)
def test_autocast_converts_no_other_dtypes(kind: Kind, dtype: torch.dtype) -> None:
    layer = build(kind, dtype=torch.float32)
    values = torch.ones(2, 3, D).to(dtype)
    for given in (values, rl.Ragged.from_flat(values[0], lengths=[1, 0, 2])):
        with (
            torch.autocast("cpu", torch.bfloat16),
            pytest.raises(ValueError, match=r"input must be .*got .*\.to\(torch\.float32"),
        ):
            layer(given)
    with torch.autocast("cpu", torch.bfloat16):
        assert build(kind)(_batch())[0].dtype is torch.float64
