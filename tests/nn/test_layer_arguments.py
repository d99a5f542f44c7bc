"""Every layer of rl.nn as a module: its arguments, parameters, copies and mistakes."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import raglane as rl
from cell_requests import largest_error
from every_layer import GATED, KINDS, D, H, Kind, a_state, build, parts
from looped import looped
from raglane.cells import CELLS
from raglane.nn import init

OURS = [kind for kind in KINDS if kind.layer not in ("RNN", "LSTM", "GRU")]
FORGETTING = [kind for kind in KINDS if "f" in CELLS[kind.cell].gates]


def _batch(dtype: torch.dtype = torch.float64) -> rl.Ragged:
    return rl.Ragged.from_flat(torch.randn(5, D, dtype=dtype), lengths=[2, 0, 3])


def _outputs(layer: Any, batch: rl.Ragged) -> list[torch.Tensor]:
    out, state = layer(batch)
    return [out.values, *parts(state)]


def _same_bits(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(mine, wanted) for mine, wanted in zip(one, other, strict=True))


# -- arguments and parameters -----------------------------------------------------------------------------------------


@looped("kind", KINDS)
def test_arguments_stand_in_torchs_order(kind: Kind) -> None:
    # A nonlinearity stands before the bias in torch's RNN, and in what is like it.
    before = (kind.options.get("nonlinearity", "relu"),) if kind.layer in ("RNN", "IndRNN") else ()
    options = {} if before else kind.options
    layer = getattr(rl.nn, kind.layer)(D, H, 2, *before, False, True, 0.25, True, **options)
    given = (layer.input_size, layer.hidden_size, layer.num_layers, layer.bias, layer.batch_first, layer.dropout)
    assert given == (D, H, 2, False, True, 0.25)
    assert layer.bidirectional is True
    plain = getattr(rl.nn, kind.layer)(D, H)
    assert (plain.num_layers, plain.bias, plain.batch_first, plain.dropout) == (1, True, False, 0.0)
    assert plain.bidirectional is False
    assert layer.training
    assert layer.weight_ih_l1.shape[1] == 2 * H
    if kind in OURS:
        placed = getattr(rl.nn, kind.layer)(
            D, H, 1, *before, True, False, 0.0, False, "meta", torch.bfloat16, **options
        )
        assert {(p.device.type, p.dtype) for p in placed.parameters()} == {("meta", torch.bfloat16)}


# What one layer in one direction has, besides the input's weights: by cell, in the order of named_parameters.
PARAMETERS: dict[str, dict[str, tuple[int, ...]]] = {
    "rnn_tanh": {"weight_hh": (4, 4), "bias_ih": (4,), "bias_hh": (4,)},
    "rnn_relu": {"weight_hh": (4, 4), "bias_ih": (4,), "bias_hh": (4,)},
    "lstm": {"weight_hh": (16, 4), "bias_ih": (16,), "bias_hh": (16,)},
    "peephole_lstm": {"weight_hh": (16, 4), "bias_ih": (16,), "bias_hh": (16,), "weight_ch": (12,)},
    "coupled_lstm": {"weight_hh": (12, 4), "bias_ih": (12,), "bias_hh": (12,)},
    "slstm": {"weight_hh": (16, 4), "bias_ih": (16,)},
    "grud": {
        "weight_hh": (12, 4),
        "bias_ih": (12,),
        "weight_dx": (1,),
        "bias_dx": (1,),
        "weight_dh": (4, 1),
        "bias_dh": (4,),
    },
    "cfc": {"weight_hh": (4, 4), "bias_ih": (4,), "weight_heads": (16, 4), "bias_heads": (16,)},
    "layernorm_lstm": {
        "weight_hh": (16, 4),
        "gain_ih": (16,),
        "gain_hh": (16,),
        "bias_ih": (16,),
        "bias_hh": (16,),
        "gain_c": (4,),
        "bias_c": (4,),
    },
    "gru": {"weight_hh": (12, 4), "bias_ih": (12,), "bias_hh": (12,)},
    "gru_reset_before": {"weight_hh": (12, 4), "bias_ih": (12,), "bias_hh": (12,)},
    "layernorm_gru": {
        "weight_hh": (12, 4),
        "gain_ih": (12,),
        "gain_hh": (12,),
        "bias_ih": (12,),
        "bias_hh": (12,),
    },
    "indrnn_relu": {"weight_hh": (4,), "bias_ih": (4,)},
    "indrnn_tanh": {"weight_hh": (4,), "bias_ih": (4,)},
    "sru": {"weight_hh": (8,), "bias_ih": (8,), "weight_skip": (H, D)},
    "qrnn": {"bias_ih": (12,)},
    "mingru": {"bias_ih": (8,)},
    "minlstm": {"bias_ih": (12,)},
}


@looped("bias", [True, False])
@looped("both", [True, False])
@looped("kind", KINDS)
def test_parameters_have_torchs_names(kind: Kind, both: bool, bias: bool) -> None:
    layer = build(kind, 2, bidirectional=both, bias=bias)
    width, rows = (2 * H if both else H), len(CELLS[kind.cell].gates) * H
    wanted: dict[str, tuple[int, ...]] = {}
    for index in range(2):
        for suffix in ("", "_reverse")[: 2 if both else 1]:
            # Of a channel's three columns a GRU-D multiplies two by these weights, and decays in its first layer alone.
            wanted[f"weight_ih_l{index}{suffix}"] = (rows, width if index else D - (kind.cell == "grud"))
            for name, shape in PARAMETERS[kind.cell].items():
                if name.endswith(("_dx", "_dh")) and index:
                    continue
                if name == "weight_skip" and index:
                    if not both:
                        continue  # sizes that agree need none
                    shape = (H, width)
                if bias or not name.startswith("bias"):
                    wanted[f"{name}_l{index}{suffix}"] = shape
    assert {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()} == wanted
    assert set(layer.state_dict()) == set(wanted)
    assert all(parameter.requires_grad and bool(parameter.isfinite().all()) for parameter in layer.parameters())


@looped("kind", KINDS)
def test_the_seed_decides_the_weights(kind: Kind) -> None:
    torch.manual_seed(5)
    layer = build(kind, 2)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    torch.manual_seed(5)
    assert _same_bits(list(build(kind, 2).state_dict().values()), list(before.values()))
    layer.reset_parameters()
    assert all(not torch.equal(value, before[name]) for name, value in layer.state_dict().items() if "weight" in name)
    torch.manual_seed(5)
    layer.reset_parameters()
    assert _same_bits(list(layer.state_dict().values()), list(before.values()))


class _Start(nn.Module):
    """An initial state with parameters whose names look like a layer's."""

    def __init__(self, states: int) -> None:
        super().__init__()
        self.states = states
        self.weight_ih_l0 = nn.Parameter(torch.full((1, 1, H), 7.0, dtype=torch.float64))

    def forward(self, batch: rl.Ragged) -> Any:
        made = (self.weight_ih_l0.expand(1, len(batch), H),) * self.states
        return made if self.states > 1 else made[0]


@looped("kind", OURS)
def test_reset_parameters_leaves_a_module_for_the_initial_state(kind: Kind) -> None:
    start = _Start(len(CELLS[kind.cell].states))
    layer = build(kind, initial_state=start)
    layer.reset_parameters()
    assert bool((start.weight_ih_l0 == 7).all())
    assert bool((parts(layer(_batch())[1])[0][:, 1] == 7).all())  # where the empty sequence stays


@looped("kind", KINDS)
def test_weights_may_be_parametrized(kind: Kind) -> None:
    layer, batch = build(kind), _batch()
    plain = _outputs(layer, batch)

    class Doubled(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 2 * weight

    nn.utils.parametrize.register_parametrization(layer, "weight_ih_l0", Doubled())
    doubled = _outputs(layer, batch)
    # Layer norm takes out the scale of its products.
    assert torch.allclose(doubled[0], plain[0], atol=1e-2) == kind.cell.startswith("layernorm")
    nn.utils.parametrize.remove_parametrizations(layer, "weight_ih_l0")
    assert largest_error(_outputs(layer, batch)[0], doubled[0]) < 1e-12


# -- copies -----------------------------------------------------------------------------------------------------------


@looped("kind", KINDS)
def test_copies_compute_the_same(kind: Kind) -> None:
    layer, batch = build(kind, 2, bidirectional=True, schedule="lanes", initial_state="learned"), _batch()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    wanted = _outputs(layer, batch)

    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    loaded = build(kind, 2, bidirectional=True, schedule="lanes", initial_state="learned")
    loaded.load_state_dict(torch.load(file, weights_only=True))
    for other in (*copies, loaded):
        assert _same_bits(_outputs(other, batch), wanted)
        assert repr(other) == repr(layer)
        assert other.cell.name == layer.cell.name
    with torch.no_grad():
        copies[0].weight_ih_l0.zero_()
    assert _same_bits(_outputs(layer, batch), wanted)


@looped("kind", KINDS)
def test_dtypes_and_back(kind: Kind) -> None:
    layer, batch = build(kind, dtype=torch.float32), _batch(torch.float32)
    wanted = _outputs(layer, batch)
    layer.to(torch.float64)
    assert {parameter.dtype for parameter in layer.parameters()} == {torch.float64}
    with pytest.raises(ValueError, match=r"\.to\(torch\.float64\)"):
        layer(batch)
    assert _same_bits(_outputs(layer.float(), batch), wanted)


@looped("kind", OURS)
def test_accelerate_leaves_them(kind: Kind) -> None:
    model = nn.ModuleDict({"ours": build(kind), "theirs": nn.LSTM(D, H)})
    before = type(model["ours"])
    report = rl.explain(rl.accelerate(model))
    assert report.replaced == ["theirs"]
    assert report.left == {}
    assert type(model["ours"]) is before


# -- what they say of themselves --------------------------------------------------------------------------------------


@looped("kind", KINDS)
def test_repr(kind: Kind) -> None:
    assert repr(getattr(rl.nn, kind.layer)(D, H)) == f"{kind.layer}({D}, {H})"
    everything = build(kind, 2, bias=False, batch_first=True, dropout=0.5, bidirectional=True, zoneout=0.1)
    for part in ("num_layers=2", "bias=False", "batch_first=True", "dropout=0.5", "bidirectional=True", "zoneout=0.1"):
        assert part in repr(everything)
    chosen = repr(build(kind, schedule="packed", backend="reference", initial_state="learned"))
    assert "schedule='packed', backend='reference', initial_state='learned'" in chosen


def test_repr_shows_what_a_layer_has_of_its_own() -> None:
    assert repr(rl.nn.IndRNN(D, H, 2)) == "IndRNN(3, 4, num_layers=2)"
    layer = rl.nn.IndRNN(D, H, nonlinearity="tanh", max_length=9)
    assert repr(layer) == "IndRNN(3, 4, nonlinearity='tanh', max_length=9)"
    assert repr(rl.nn.PeepholeLSTM(D, H, clip=2.5)) == "PeepholeLSTM(3, 4, clip=2.5)"
    assert repr(rl.nn.CoupledLSTM(D, H, clip=2.5)) == "CoupledLSTM(3, 4, clip=2.5)"


@looped("kind", KINDS)
def test_explain_says_the_backend(kind: Kind) -> None:
    layer, batch = build(kind), _batch()
    choice = rl.explain(layer, batch)
    assert choice.backend in ("cpu", "program", "torch", "reference")
    assert str(choice).startswith(f"backend {choice.backend}, schedule {choice.schedule}: auto takes the fastest")
    if choice.backend in ("program", "reference"):
        assert f"{kind.cell!r}" in choice.reason  # why those before it could not
    chosen = rl.explain(build(kind, backend="reference", schedule="lanes"), batch)
    assert (chosen.backend, chosen.schedule) == ("reference", "lanes")
    with rl.use_backend(backend="reference"):
        assert rl.explain(layer, batch, return_states=True).backend == "reference"


@looped("kind", GATED)
def test_no_fast_kernel_takes_a_clipped_cell_for_the_plain_one(kind: Kind) -> None:
    choice = rl.explain(build(kind, clip=3.0), _batch())
    assert choice.backend in ("program", "reference")
    assert f"{kind.cell} clipped at 3.0" in choice.reason


@looped("kind", OURS)
def test_torch_has_no_kernel_for_them(kind: Kind) -> None:
    layer = build(kind, backend="torch")
    for call in (lambda: layer(_batch()), lambda: rl.explain(layer, _batch())):
        with pytest.raises(ValueError, match=rf"torch has no kernel for the cell '{kind.cell}'"):
            call()


# -- beginnings -------------------------------------------------------------------------------------------------------


@looped("kind", FORGETTING)
def test_open_forget_gates(kind: Kind) -> None:
    layer = init.forget_bias_(build(kind, 2, bidirectional=True))
    cell = CELLS[kind.cell]
    for suffix in ("_l0", "_l0_reverse", "_l1", "_l1_reverse"):
        biases = [value for name, value in layer.named_parameters() if name in (f"bias_ih{suffix}", f"bias_hh{suffix}")]
        for gate in cell.gates:
            if (kind.cell, gate) == ("sru", "n"):
                continue
            total = sum(bias[cell.block("bias_ih", gate, H)] for bias in biases)
            assert isinstance(total, torch.Tensor)
            assert (total.tolist() == [1.0] * H) == (gate == "f")
    # And where the forget gates are: of a memory of ones, sigmoid(1) is kept where nothing is taken up.
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if not name.startswith("bias"):
                parameter.zero_()
    hx = a_state(layer, 3)
    states = layer(_batch(), hx, return_states=True)[2][0]
    kept = torch.sigmoid(torch.tensor(1.0, dtype=torch.float64))
    memory: Any = parts(states)[-1]
    slopes = torch.autograd.grad(memory.values[0, 0], parts(hx)[-1])[0][0, 0, 0]
    if kind.cell not in ("minlstm", "slstm"):  # whose gates share one; whose last state is a logarithm
        torch.testing.assert_close(slopes, kept)


@looped("kind", [kind for kind in KINDS if kind not in FORGETTING])
def test_open_forget_gates_need_one(kind: Kind) -> None:
    with pytest.raises(ValueError, match=r"a gate 'f' with a bias"):
        init.forget_bias_(build(kind))


@looped("kind", KINDS)
def test_numbers_of_numpy_are_numbers(kind: Kind) -> None:
    layer = getattr(rl.nn, kind.layer)(np.int64(D), np.int32(H), np.int64(2), dropout=np.float32(0.5), **kind.options)
    assert (type(layer.input_size), type(layer.hidden_size), type(layer.num_layers)) == (int, int, int)
    assert layer(rl.Ragged([torch.randn(2, D)]))[0].values.shape == (2, H)
