"""Initialisations of recurrent layers: the values of every parameter afterwards."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import raglane as rl
from every_layer import KINDS, Kind
from raglane.cells import CELLS
from raglane.errors import RaglaneError
from raglane.nn import init

D, H = 6, 8
SUFFIXES = ("_l0", "_l0_reverse", "_l1", "_l1_reverse")

THEIRS = [
    Kind("torch.RNN", "rnn_tanh"),
    Kind("torch.RNN", "rnn_relu", {"nonlinearity": "relu"}),
    Kind("torch.LSTM", "lstm"),
    Kind("torch.LSTM", "lstm", {"proj_size": 3}),
    Kind("torch.GRU", "gru"),
]
ALL = [*KINDS, Kind("LSTM", "lstm", {"proj_size": 3}), *THEIRS]
WITH_MATRIX = [kind for kind in ALL if len(CELLS[kind.cell].shapes(D, H)["weight_hh"] or ()) == 2]
FORGETTING = [kind for kind in ALL if "f" in CELLS[kind.cell].gates]


def _build(kind: Kind, hidden_size: int = H, **options: Any) -> Any:
    """Build two layers in both directions, in float64."""
    where, _, name = kind.layer.rpartition(".")
    arguments = {
        "num_layers": 2,
        "bidirectional": True,
        "dtype": torch.float64,
        **kind.options,
        **options,
    }
    return getattr(nn if where else rl.nn, name)(D, hidden_size, **arguments)


def _gates(layer: Any, name: str) -> Iterator[Tensor]:
    """Yield the rows of each gate in every layer and direction."""
    for suffix in SUFFIXES:
        yield from getattr(layer, name + suffix).detach().split(layer.hidden_size)


def _changed(layer: Any, before: dict[str, Tensor]) -> set[str]:
    return {
        name.partition("_l")[0]
        for name, value in layer.state_dict().items()
        if not torch.equal(value, before[name])
    }


@pytest.mark.parametrize("gain", [1.0, 1.7])
@pytest.mark.parametrize("kind", WITH_MATRIX)
def test_orthogonal(kind: Kind, gain: float) -> None:
    layer = _build(kind)
    before = copy.deepcopy(layer.state_dict())
    assert init.orthogonal_(layer, gain) is layer
    blocks = list(_gates(layer, "weight_hh"))
    assert len(blocks) == 4 * len(CELLS[kind.cell].gates)
    for block in blocks:
        # With a projection the columns are orthogonal instead of the rows.
        torch.testing.assert_close(
            block.t() @ block, gain**2 * torch.eye(block.shape[1]).double(), rtol=0, atol=1e-12
        )
    assert len({tuple(block.flatten().tolist()) for block in blocks}) == len(blocks)
    assert _changed(layer, before) == {"weight_hh"}


@pytest.mark.parametrize("gain", [1.0, 0.3])
@pytest.mark.parametrize("kind", ALL)
def test_xavier(kind: Kind, gain: float) -> None:
    size = 64
    layer = _build(kind, size)
    before = copy.deepcopy(layer.state_dict())
    assert init.xavier_uniform_(layer, gain) is layer
    for block in _gates(layer, "weight_ih"):
        bound = gain * sqrt(6 / (block.shape[1] + size))
        assert bound * 0.95 < float(block.abs().max()) <= bound
        # Uniform: a variance of bound^2 / 3, the mean within five of its standard deviations.
        count = block.numel()
        assert float(block.var()) == pytest.approx(bound**2 / 3, rel=5 / sqrt(count))
        assert abs(float(block.mean())) < 5 * bound / sqrt(3 * count)
    assert _changed(layer, before) == {"weight_ih"}


@pytest.mark.parametrize("kind", [kind for kind in ALL if kind not in WITH_MATRIX])
def test_orthogonal_requires_a_matrix(kind: Kind) -> None:
    layer = _build(kind)
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(
        ValueError,
        match=f"layer must be .*a cell with a matrix weight_hh.*, got cell '{kind.cell}'",
    ):
        init.orthogonal_(layer)
    assert not _changed(layer, before)


def _biases(kind: Kind, layer: Any, gate: str) -> list[Tensor]:
    """Return a gate's bias in every layer and direction: the sum of both, if there are two."""
    gates = [
        name for name in CELLS[kind.cell].gates if (kind.cell, name) != ("sru", "n")
    ]  # which has no such bias
    row = gates.index(gate) * layer.hidden_size
    totals = []
    for suffix in SUFFIXES:
        both = [getattr(layer, name + suffix, None) for name in ("bias_ih", "bias_hh")]
        blocks = [bias.detach()[row : row + layer.hidden_size] for bias in both if bias is not None]
        totals.append(torch.stack(blocks).sum(0))
    return totals


@pytest.mark.parametrize("kind", FORGETTING)
def test_forget_bias(kind: Kind) -> None:
    for value in (1.0, -2.5):
        layer = _build(kind)
        before = copy.deepcopy(layer.state_dict())
        assert init.forget_bias_(layer, value) is layer
        for bias in _biases(kind, layer, "f"):
            assert bias.tolist() == [value] * H
        assert _changed(layer, before) <= {"bias_ih", "bias_hh"}
        # Other gates are unchanged.
        for name, old in before.items():
            if name.startswith("bias"):
                assert int((layer.state_dict()[name] != old).sum()) <= H


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        *(
            (kind, {}, f"a gate 'f'.*, got cell '{kind.cell.split('_')[0]}")
            for kind in ALL
            if kind not in FORGETTING
        ),
        (FORGETTING[0], {"bias": False}, "a gate 'f' with a bias, got .*bias=False"),
    ],
)
def test_forgetting_requires_a_forget_gate_with_a_bias(
    kind: Kind, options: dict[str, Any], says: str
) -> None:
    layer = _build(kind, **options)
    before = copy.deepcopy(layer.state_dict())
    for start in (init.forget_bias_, partial(init.chrono_, max_length=10)):
        with pytest.raises(ValueError, match=f"layer must be .*{says}"):
            start(layer)
    assert not _changed(layer, before)


@pytest.mark.parametrize("kind", FORGETTING)
def test_chrono(kind: Kind) -> None:
    longest, size = 50, 500
    layer = _build(kind, size)
    before = copy.deepcopy(layer.state_dict())
    assert init.chrono_(layer, np.array([7, longest]).max()) is layer  # as lengths give it
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
            [
                (layer.state_dict()[name] != old)
                for name, old in before.items()
                if name.startswith("bias_ih")
            ]
        )
        assert int(moved.sum()) == 4 * size
    assert _changed(layer, before) <= {"bias_ih", "bias_hh"}


@pytest.mark.parametrize(
    ("start", "name", "numbers"),
    [
        (init.chrono_, "max_length", [1, -5, 2.5, True, "10", 10**400]),
        (init.orthogonal_, "gain", ["1", True, float("nan"), -1.0]),
        (init.xavier_uniform_, "gain", ["1", True, float("inf"), -1.0]),
        (init.forget_bias_, "value", ["1", True, float("nan"), None]),
    ],
)
def test_invalid_numbers(start: Any, name: str, numbers: list[Any]) -> None:
    for number in numbers:
        with pytest.raises(RaglaneError, match=f"{name} must be .*got "):
            start(rl.nn.LSTM(D, H), number)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (nn.LSTMCell(2, 2), r"a recurrent layer of rl\.nn or torch\.nn.*, got LSTMCell"),
        (
            nn.Sequential(nn.LSTM(2, 2)),
            r"a recurrent layer of rl\.nn or torch\.nn.*, got Sequential",
        ),
        (None, r"a recurrent layer of rl\.nn or torch\.nn.*, got NoneType"),
        (
            rl.nn.Recurrent(nn.LSTMCell(D, H)),
            "got a Recurrent of LSTMCell. Initialise .* the cell's module",
        ),
    ],
)
@pytest.mark.parametrize(
    "start",
    [
        init.orthogonal_,
        init.xavier_uniform_,
        init.forget_bias_,
        partial(init.chrono_, max_length=10),
    ],
)
def test_they_require_a_recurrent_layer_of_a_known_cell(start: Any, other: Any, says: str) -> None:
    with pytest.raises(RaglaneError, match=f"layer must be .*{says}"):
        start(other)
