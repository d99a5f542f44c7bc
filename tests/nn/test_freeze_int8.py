"""Layers with int8 weights: what they are in a model, what they stay close to, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import raglane as rl
from looped import looped
from raglane.errors import ArgumentError, DispatchError
from raglane.native import missing_kernels

if missing := missing_kernels():
    pytest.skip(missing, allow_module_level=True)

LAYERS: dict[str, dict[str, Any]] = {
    "LSTM": {"num_layers": 2, "bidirectional": True},
    "GRU": {"num_layers": 2},
    "RNN": {"nonlinearity": "relu"},
}
BATCH = rl.Ragged([torch.randn(length, 20) for length in (7, 0, 1, 12)])


def build(name: str, **options: Any) -> Any:
    return getattr(rl.nn, name)(20, 48, **(LAYERS[name] | options)).eval()


def freeze(layer: Any) -> Any:
    return rl.freeze(layer, dtype=torch.int8)


@torch.no_grad()
def output(layer: Any, batch: Any = BATCH) -> Tensor:
    """Of a call that records no gradients."""
    found: Tensor = layer(batch)[0].values
    return found


def is_int8(layer: Any) -> bool:
    return "int8 in calls" in rl.explain(layer, BATCH).reason


@looped("name", LAYERS)
def test_close_to_float32_and_the_same_in_any_batch(name: str) -> None:
    layer = build(name)
    wanted = output(layer)
    stored = copy.deepcopy(layer.state_dict())
    assert freeze(layer) is layer
    assert is_int8(layer)
    found = output(layer)
    assert not torch.equal(found, wanted)
    assert (found - wanted).abs().max() < 0.02 * (1 + wanted.abs().max())
    for index in range(len(BATCH)):
        assert torch.equal(output(layer, BATCH[index : index + 1]), layer_rows(found, index))
    for key, part in layer.state_dict().items():
        assert torch.equal(part, stored[key])


def layer_rows(values: Tensor, index: int) -> Tensor:
    return values[BATCH.offsets[index] : BATCH.offsets[index + 1]]


def test_a_model_with_an_embedding_and_a_head() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.encoder, self.head = nn.Embedding(9, 20), build("GRU"), nn.Linear(48, 3)

        def forward(self, tokens: rl.Ragged) -> rl.Ragged:
            result: rl.Ragged = self.head(self.encoder(self.embedding(tokens))[0])
            return result

    model = freeze(Tagger().eval())
    tokens = rl.Ragged([torch.randint(9, (5,)), torch.randint(9, (2,))])
    with torch.no_grad():
        inner = model.encoder(model.embedding(tokens))[0]
        assert torch.equal(model(tokens).values, model.head(inner).values)
    assert is_int8(model.encoder)
    assert output(model.encoder).dtype is torch.float32


@looped("name", ["GRU", "LSTM"])
def test_steps_have_the_bits_of_a_call(name: str) -> None:
    layer, sequence = freeze(build(name, bidirectional=False)), BATCH[3]
    state: Any = None
    with torch.inference_mode():
        whole, final = layer(sequence)
        for x_t, wanted in zip(sequence, whole, strict=True):
            out, state = layer.step(x_t, state)
            assert torch.equal(out, wanted)
    for one, other in zip(*([part] if name == "GRU" else part for part in (state, final)), strict=True):
        assert torch.equal(one, other)


def test_other_calls_read_the_float32_weights() -> None:
    plain = build("LSTM")
    layer: Any = freeze(copy.deepcopy(plain))
    wanted = output(plain)
    assert torch.equal(layer(BATCH)[0].values.detach(), wanted)  # gradients are recorded
    with torch.no_grad():
        compiled: Any = torch.compile(layer, backend="eager")
        assert torch.equal(compiled(BATCH)[0].values, wanted)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(output(layer), output(plain))
    assert torch.equal(output(copy.deepcopy(layer)), wanted)
    assert torch.equal(output(layer.train()), output(copy.deepcopy(plain).train()))
    assert "in training mode" in rl.explain(layer, BATCH).reason
    assert is_int8(layer.eval())
    with torch.no_grad():
        layer.weight_hh_l0.mul_(2)
        plain.weight_hh_l0.mul_(2)
    assert torch.equal(output(layer), output(plain))
    assert not is_int8(layer)


def test_freezing_again_in_another_way() -> None:
    layer = freeze(build("RNN"))
    assert is_int8(layer)
    plain = output(copy.deepcopy(layer))
    assert torch.equal(output(rl.freeze(layer)), plain)
    assert not is_int8(layer)
    assert is_int8(freeze(layer))


def test_accelerated_layers() -> None:
    layer, x = rl.accelerate(nn.LSTM(20, 48)).eval(), torch.randn(4, 2, 20)
    with torch.no_grad():
        wanted = layer(x)[0]
        found = freeze(layer)(x)[0]
    assert 0 < (found - wanted).abs().max() < 0.02


def test_what_is_refused() -> None:
    layer = build("GRU")
    for dtype in (torch.float16, torch.uint8, "int8"):
        with pytest.raises(ArgumentError, match=r"dtype must be .*got .*torch\.int8, or None"):
            rl.freeze(layer, dtype=dtype)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"training mode.*call model\.eval\(\) first"):
        freeze(nn.Sequential(layer.train()))
    for other, reason in (
        (build("GRU").double(), r"its weights are torch\.float64"),
        (rl.nn.SRU(3, 4).eval(), "cell, sru, have no int8 weights; those of RNN, LSTM and GRU have"),
        (rl.nn.LSTM(65_537, 1).eval(), "its sizes reach 65537"),
        (rl.nn.GRU(3, 4, device="meta").eval(), "backend torch"),
        (nn.Linear(2, 2).eval(), r"no recurrent layer of rl\.nn"),
    ):
        with pytest.raises(DispatchError, match=reason):
            freeze(other)
    mixed = nn.Sequential(build("GRU"), rl.nn.MinGRU(3, 4)).eval()
    with pytest.warns(UserWarning, match=r"left a layer as it is\. 1: the kernels of its cell, mingru"):
        freeze(mixed)
    assert is_int8(mixed[0])
    assert "frozen" not in rl.explain(mixed[1], rl.Ragged([torch.randn(2, 3)])).reason
