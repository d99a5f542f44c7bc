"""Mistakes of those who come from PyTorch: one line names what to call instead."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

import raglane as rl
from raglane.errors import ArgumentError, ArgumentTypeError
from raglane.nn.porting import accelerate
from raglane.nn.recurrent.layer import RecurrentLayer

SEQUENCES = [torch.randn(3, 4, device="cpu"), torch.randn(2, 4, device="cpu")]
PACKED = pack_sequence(SEQUENCES)
NESTED = torch.nested.nested_tensor(SEQUENCES, layout=torch.jagged)

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: rl.nn.LSTM(4, 5),
    "GRU": lambda: rl.nn.GRU(4, 5, num_layers=2, bidirectional=True),
    "SRU": lambda: rl.nn.SRU(4, 5),
    "converted": lambda: rl.accelerate(nn.LSTM(4, 5)),
}
READERS: dict[str, Callable[[Any], object]] = {
    "encoder": lambda batch: rl.nn.SequenceEncoder(4, 5)(batch),
    "tokens": lambda batch: rl.nn.SequenceEncoder(2, 5, num_embeddings=4)(batch),
    "pooling": lambda batch: rl.nn.Pooling("mean")(batch),
    "attention pooling": lambda batch: rl.nn.AttentionPooling(4)(batch),
    "mark_missing": lambda batch: rl.data.mark_missing(batch),
    "engine": lambda batch: rl.serve.Engine(rl.nn.GRU(4, 5).eval(), max_streams=1).run(batch),
    "concat": lambda batch: rl.Ragged(SEQUENCES).concat(batch),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("batch", "call"),
    [
        (PACKED, r"rl\.Ragged\.from_packed\(packed\)"),
        (torch.zeros(2, 3, 4), r"rl\.Ragged\.from_padded\(padded, lengths\)"),
        (torch.zeros(4), r"rl\.Ragged\.from_flat\(values, lengths=lengths\)"),
        (NESTED, r"rl\.Ragged\.from_nested\(nested\)"),
        (SEQUENCES, r"rl\.Ragged\(sequences\)"),
    ],
    ids=["packed", "padded", "flat", "nested", "list"],
)
def test_other_kinds_of_batches(reader: str, batch: Any, call: str) -> None:
    with pytest.raises(ArgumentTypeError, match=f"must be a Ragged, got .*{call}") as caught:
        READERS[reader](batch)
    assert "[[" not in str(caught.value) or batch is SEQUENCES  # no numbers of a pack


def test_a_pack_for_a_loss() -> None:
    with pytest.raises(ArgumentTypeError, match=r"Ragged\.from_packed\(packed\)"):
        rl.transduction.ctc_loss(PACKED, PACKED)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    "lengths",
    [
        torch.tensor([3, 2]),
        torch.tensor([3, 2], dtype=torch.int32),
        np.array([3, 2]),
        [3, 2],
        (3, 2),
    ],
    ids=["int64", "int32", "array", "list", "tuple"],
)
def test_lengths_in_place_of_the_state(name: str, lengths: Any) -> None:
    layer = LAYERS[name]()
    for batch in (rl.Ragged(SEQUENCES), PACKED, torch.zeros(3, 2, 4)):
        with pytest.raises(
            ArgumentTypeError,
            match=r"hx must be the initial state.*got whole numbers.*as lengths=\.\.\.; a Ragged",
        ):
            layer(batch, lengths)
    for state in (torch.zeros(5), [torch.zeros(2)], "zeros", ()):
        with pytest.raises((ArgumentError, ArgumentTypeError), match="hx") as caught:
            layer(rl.Ragged(SEQUENCES), state)
        assert "whole numbers" not in str(caught.value)


@pytest.mark.parametrize(
    ("cell", "layer_norm", "near"),
    [
        ("lsmt", False, "lstm"),
        ("peephole", False, "peephole_lstm"),
        ("min-gru", False, "mingru"),
        ("lstn", True, "lstm"),
    ],
)
def test_the_nearest_cell(cell: Any, layer_norm: bool, near: str) -> None:
    with pytest.raises(ArgumentError, match=rf"cell must be one of .*got '{cell}'\. Pass '{near}'"):
        rl.nn.SequenceEncoder(4, 5, cell=cell, layer_norm=layer_norm)
    with pytest.raises(ArgumentError, match="Choose one of them"):
        rl.nn.SequenceEncoder(4, 5, cell="transformer")  # type: ignore[arg-type]


def _warnings(call: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(one.message) for one in caught if issubclass(one.category, UserWarning)]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: nn.Linear(3, 3), "no torch.nn.RNN, LSTM or GRU to convert."),
        (lambda: nn.TransformerEncoderLayer(4, 2, batch_first=True), "to convert."),
        (
            lambda: nn.ModuleDict({"own": nn.GRUCell(3, 3)}),
            "own: GRUCell is a cell, which runs one",
        ),
    ],
)
def test_nothing_to_accelerate(model: Callable[[], nn.Module], words: str) -> None:
    (line,) = _warnings(lambda: rl.accelerate(model()))
    assert line.startswith("rl.accelerate replaced no layer: the model has no")
    assert words in line


@pytest.mark.skipif(rl.native.missing_kernels() is not None, reason="needs the kernels")
def test_acceleration_with_an_effect_is_silent() -> None:
    for model in (
        nn.LSTM(3, 3),
        rl.nn.LSTM(3, 3),
        nn.Sequential(nn.LSTMCell(3, 3), nn.GRU(3, 3)),
        rl.accelerate(nn.LSTM(3, 3)),
        nn.LSTM(3, 3, device="meta"),
    ):
        assert _warnings(lambda own=model: rl.accelerate(own)) == []  # type: ignore[misc]


def test_acceleration_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerate, "missing_kernels", lambda: "the kernels are not built")
    (line,) = _warnings(lambda: rl.accelerate(nn.LSTM(3, 3, device="cpu")))
    assert line.endswith(
        "run on PyTorch's kernels on this CPU as before: the kernels are not built."
    )
    # Of layers on another device, other kernels matter.
    assert _warnings(lambda: rl.accelerate(nn.LSTM(3, 3, device="meta"))) == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per:UserWarning")
@pytest.mark.parametrize(
    ("model", "name"),
    [
        (lambda: rl.nn.LSTM(3, 4), "LSTM"),
        (lambda: nn.Sequential(nn.Linear(3, 3), rl.nn.SRU(3, 4)), "SRU"),
        (lambda: rl.nn.SequenceEncoder(3, 4), "GRU"),
    ],
)
def test_dynamic_quantisation_warns(model: Callable[[], nn.Module], name: str) -> None:
    kept: list[Any] = []
    lines = _warnings(lambda: kept.append(torch.ao.quantization.quantize_dynamic(model().eval())))
    (line,) = [line for line in lines if "torch.quantize_per" not in line]
    assert f"does not quantise {name}, a layer of Raglane" in line
    assert "rl.quantize(model)" in line
    assert "to_torch" not in line  # for converted layers, see test_graphs.py
    (layer,) = [part for part in kept[0].modules() if isinstance(part, RecurrentLayer)]
    assert isinstance(layer(rl.Ragged([torch.zeros(2, 3)]))[0].values, Tensor)
