"""Initialisations of recurrent layers: the values of every parameter afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import raglane as rl
from every_layer import KINDS, Kind
from raglane.cells import CELLS
from raglane.errors import RaglaneError
from raglane.nn import init

D, H = 6, 8

THEIRS = [
    Kind("torch.RNN", "rnn_tanh"),
    Kind("torch.RNN", "rnn_relu", {"nonlinearity": "relu"}),
    Kind("torch.LSTM", "lstm"),
    Kind("torch.LSTM", "lstm", {"proj_size": 3}),
    Kind("torch.GRU", "gru"),
]
ALL = [*KINDS, Kind("LSTM", "lstm", {"proj_size": 3}), *THEIRS]
WITH_MATRIX = [kind for kind in ALL if len(CELLS[kind.cell].shapes(D, H)["weight_hh"] or ()) == 2]
WITHOUT_MATRIX = [kind for kind in ALL if kind not in WITH_MATRIX]
FORGETTING = [kind for kind in ALL if "f" in CELLS[kind.cell].gates]
NOT_FORGETTING = [kind for kind in ALL if kind not in FORGETTING]


def _build(kind: Kind, hidden_size: int = H, **options: Any) -> Any:
    """Build two layers in both directions, in float64."""
    where, _, name = kind.layer.rpartition(".")
    arguments = {"num_layers": 2, "bidirectional": True, "dtype": torch.float64, **kind.options, **options}
    return getattr(nn if where else rl.nn, name)(D, hidden_size, **arguments)


def _parameters(layer: Any, name: str) -> Iterator[Tensor]:
    for suffix in ("_l0", "_l0_reverse", "_l1", "_l1_reverse"):
        yield getattr(layer, name + suffix).detach()


def _gates(kind: Kind, layer: Any, name: str) -> Iterator[Tensor]:
    """Yield the rows of each gate, without ``CellSpec.block``."""
    for parameter in _parameters(layer, name):
        yield from parameter.split(layer.hidden_size)


def _changed(layer: Any, before: dict[str, Tensor]) -> set[str]:
    return {
        name.partition("_l")[0] for name, value in layer.state_dict().items() if not torch.equal(value, before[name])
    }


def _copy(layer: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in layer.state_dict().items()}


# -- matrices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gain", [1.0, 1.7])
@pytest.mark.parametrize("kind", WITH_MATRIX)
def test_orthogonal(kind: Kind, gain: float) -> None:
    layer = _build(kind)
    before = _copy(layer)
    assert init.orthogonal_(layer, gain) is layer
    blocks = list(_gates(kind, layer, "weight_hh"))
    assert len(blocks) == 4 * len(CELLS[kind.cell].gates)
    for block in blocks:
        # With a projection the columns are orthogonal instead of the rows.
        size = block.shape[1]
        torch.testing.assert_close(block.t() @ block, gain**2 * torch.eye(size).double(), rtol=0, atol=1e-12)
    assert len({tuple(block.flatten().tolist()) for block in blocks}) == len(blocks)
    assert _changed(layer, before) == {"weight_hh"}


@pytest.mark.parametrize("gain", [1.0, 0.3])
@pytest.mark.parametrize("kind", ALL)
def test_xavier(kind: Kind, gain: float) -> None:
    size = 64
    layer = _build(kind, size)
    before = _copy(layer)
    assert init.xavier_(layer, gain) is layer
    for block in _gates(kind, layer, "weight_ih"):
        bound = gain * sqrt(6 / (block.shape[1] + size))
        assert bound * 0.95 < float(block.abs().max()) <= bound
        # Uniform: a variance of bound^2 / 3, the mean within five of its standard deviations.
        count = block.numel()
        assert float(block.var()) == pytest.approx(bound**2 / 3, rel=5 / sqrt(count))
        assert abs(float(block.mean())) < 5 * bound / sqrt(3 * count)
    assert _changed(layer, before) == {"weight_ih"}


@pytest.mark.parametrize("kind", WITHOUT_MATRIX)
def test_orthogonal_requires_a_matrix(kind: Kind) -> None:
    layer = _build(kind)
    before = _copy(layer)
    with pytest.raises(ValueError, match=f"layer must be .*a cell with a matrix weight_hh.*, got cell '{kind.cell}'"):
        init.orthogonal_(layer)
    assert not _changed(layer, before)


# -- biases -----------------------------------------------------------------------------------------------------------


def _biases(kind: Kind, layer: Any, gate: str) -> list[Tensor]:
    """Return a gate's bias in every layer and direction: the sum of both, if there are two."""
    gates = [name for name in CELLS[kind.cell].gates if (kind.cell, name) != ("sru", "n")]  # which has no such bias
    row = gates.index(gate) * layer.hidden_size
    totals = []
    for suffix in ("_l0", "_l0_reverse", "_l1", "_l1_reverse"):
        both = [getattr(layer, name + suffix, None) for name in ("bias_ih", "bias_hh")]
        blocks = [bias.detach()[row : row + layer.hidden_size] for bias in both if bias is not None]
        totals.append(torch.stack(blocks).sum(0))
    return totals


@pytest.mark.parametrize("kind", FORGETTING)
def test_forget_bias(kind: Kind) -> None:
    for value in (1.0, -2.5):
        layer = _build(kind)
        before = _copy(layer)
        assert init.forget_bias_(layer, value) is layer
        for bias in _biases(kind, layer, "f"):
            assert bias.tolist() == [value] * H
        assert _changed(layer, before) <= {"bias_ih", "bias_hh"}
        # Other gates are unchanged.
        for name, old in before.items():
            if name.startswith("bias"):
                assert int((layer.state_dict()[name] != old).sum()) <= H


@pytest.mark.parametrize("kind", NOT_FORGETTING)
@pytest.mark.parametrize("start", [init.forget_bias_, lambda layer: init.chrono_(layer, 10)])
def test_forgetting_requires_a_forget_gate(kind: Kind, start: Any) -> None:
    layer = _build(kind)
    before = _copy(layer)
    with pytest.raises(
        ValueError, match=f"layer must be .*a gate 'f'.*, got cell '{CELLS[kind.cell].name.split('_')[0]}"
    ):
        start(layer)
    assert not _changed(layer, before)


@pytest.mark.parametrize("kind", FORGETTING[:2])
@pytest.mark.parametrize("start", [init.forget_bias_, lambda layer: init.chrono_(layer, 10)])
def test_forgetting_requires_a_bias(kind: Kind, start: Any) -> None:
    with pytest.raises(ValueError, match=r"a gate 'f' with a bias, got .*bias=False"):
        start(_build(kind, bias=False))


@pytest.mark.parametrize("kind", FORGETTING)
def test_chrono(kind: Kind) -> None:
    longest, size = 50, 500
    layer = _build(kind, size)
    before = _copy(layer)
    assert init.chrono_(layer, longest) is layer
    forget = _biases(kind, layer, "f")
    times = torch.cat(forget).exp()
    # Uniform from 1 to longest - 1: values near both ends, and a tenth of them in each tenth.
    assert 1 <= float(times.min()) < 1.2
    assert longest - 1.2 < float(times.max()) <= longest - 1
    counts = torch.histc(times.cpu(), bins=10, min=1, max=longest - 1) / times.numel()
    assert float((counts - 0.1).abs().max()) < 0.03  # four and a half standard deviations
    assert len({tuple(bias.tolist()) for bias in forget}) == 4  # drawn for each layer and direction
    if "i" in CELLS[kind.cell].gates:
        for ours, theirs in zip(_biases(kind, layer, "i"), forget, strict=True):
            assert torch.equal(ours, -theirs)
    else:
        moved = torch.cat(
            [(layer.state_dict()[name] != old) for name, old in before.items() if name.startswith("bias_ih")]
        )
        assert int(moved.sum()) == 4 * size
    assert _changed(layer, before) <= {"bias_ih", "bias_hh"}


@pytest.mark.parametrize("longest", [1, 0, -5, 2.5, True, "10", None])
def test_chrono_requires_a_length(longest: Any) -> None:
    with pytest.raises(RaglaneError, match=r"max_length must be .*got "):
        init.chrono_(rl.nn.LSTM(D, H), longest)


@pytest.mark.parametrize(
    ("start", "name"), [(init.orthogonal_, "gain"), (init.xavier_, "gain"), (init.forget_bias_, "value")]
)
def test_invalid_numbers(start: Any, name: str) -> None:
    for number in ("1", True, None, float("nan"), float("inf"), *([-1.0] if name == "gain" else [])):
        with pytest.raises(RaglaneError, match=f"{name} must be .*got "):
            start(rl.nn.LSTM(D, H), number)


# -- any layer --------------------------------------------------------------------------------------------------------


EVERY = {
    "orthogonal_": init.orthogonal_,
    "xavier_": init.xavier_,
    "forget_bias_": init.forget_bias_,
    "chrono_": lambda layer: init.chrono_(layer, 10),
}


@pytest.mark.parametrize("start", EVERY.values())
@pytest.mark.parametrize("other", [nn.Linear(2, 2), nn.LSTMCell(2, 2), nn.Sequential(nn.LSTM(2, 2)), "lstm", None])
def test_they_require_a_recurrent_layer(start: Any, other: Any) -> None:
    with pytest.raises(TypeError, match=r"layer must be a recurrent layer of rl\.nn or torch\.nn.*, got \w+") as caught:
        start(other)
    assert isinstance(caught.value, RaglaneError)


@pytest.mark.parametrize("start", EVERY.values())
def test_a_user_defined_cell_is_refused(start: Any) -> None:
    with pytest.raises(
        RaglaneError,
        match=r"layer must be .*, got a Recurrent of LSTMCell. Initialise the parameters of the cell's module",
    ):
        start(rl.nn.Recurrent(nn.LSTMCell(D, H)))
