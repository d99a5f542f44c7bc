"""The sequence encoder compared with its steps, one sequence at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import raglane as rl
from own_cells import Whole
from raglane import Ragged
from raglane.errors import ArgumentError, ArgumentTypeError, RaglaneError, ShapeError
from raglane.nn import GRU, Recurrent, SequenceEncoder
from raglane.nn.encoder import LAYERS
from raglane.nn.pooling import POOLINGS
from raglane.training.settings import Settings

LENGTHS = [4, 0, 1, 6, 2]
D, H, TOKENS = 3, 4, 11


def _floats(device: torch.device) -> Ragged:
    return Ragged(
        [torch.randn(length, D, dtype=torch.float64, device=device) for length in LENGTHS]
    )


def _by_hand(encoder: SequenceEncoder, sequence: Tensor) -> Tensor:
    """Encode one sequence with torch's modules."""
    inputs = sequence if encoder.embedding is None else encoder.embedding(sequence)
    layer: Any = encoder.recurrent
    twin = nn.GRU(
        layer.input_size,
        layer.hidden_size,
        layer.num_layers,
        bidirectional=layer.bidirectional,
        dtype=torch.float64,
        device=inputs.device,
    )
    twin.load_state_dict(layer.state_dict())
    output, h = twin(inputs)
    if encoder.pooling is None:
        return output
    if encoder.pooling == "final":
        return torch.cat([h[-2], h[-1]]) if layer.bidirectional else h[-1]
    assert encoder.pool is not None
    return encoder.pool(Ragged([output]))[0]


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("embedding", [None, 5])
@pytest.mark.parametrize("pooling", ["final", *POOLINGS, None])
def test_encoders_by_hand(
    pooling: Any, embedding: int | None, bidirectional: bool, device: Any
) -> None:
    encoder = SequenceEncoder(
        embedding or D,
        H,
        num_embeddings=None if embedding is None else TOKENS,
        pooling=pooling,
        num_layers=2,
        bidirectional=bidirectional,
        dtype=torch.float64,
    ).to(device=device, dtype=torch.float64)
    tokens = Ragged([torch.randint(TOKENS, (length,), device=device) for length in LENGTHS])
    batch = _floats(device) if embedding is None else tokens
    found = encoder(batch)
    assert encoder.output_size == H * (1 + bidirectional)
    for number, sequence in enumerate(batch):
        if len(sequence):
            torch.testing.assert_close(
                found[number], _by_hand(encoder, sequence), rtol=0, atol=1e-12
            )
        elif pooling is not None:
            assert torch.equal(found[number], torch.zeros_like(found[number]))
    if pooling is None:
        assert found.lengths.tolist() == LENGTHS


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("cell", LAYERS)
def test_every_cell_learns(cell: Any, layer_norm: bool, device: Any) -> None:
    if layer_norm and cell not in ("lstm", "gru"):
        with pytest.raises(
            ArgumentError, match=r"cell must be .*one of lstm, gru with layer_norm=True.*, got "
        ):
            SequenceEncoder(D, H, cell, layer_norm=True)
        return
    encoder = SequenceEncoder(
        D, H, cell, layer_norm=layer_norm, bidirectional=True, initial_state="learned"
    ).double()
    encoder.to(device)(_floats(device)).square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in encoder.named_parameters()}
    assert all(grad is not None and bool(grad.isfinite().all()) for grad in gradients.values())
    assert any(
        bool(grad.any())
        for name, grad in gradients.items()
        if grad is not None and "initial" in name
    )


def test_user_defined_layers(device: Any) -> None:
    def recurrent(input_size: int, hidden_size: int, **options: Any) -> Recurrent:
        return Recurrent(Whole, input_size, hidden_size, **options)

    encoder = SequenceEncoder(D, H, recurrent, bidirectional=True).double().to(device)
    assert (
        encoder(_floats(device)).shape
        == (len(LENGTHS), encoder.output_size)
        == (len(LENGTHS), 2 * H + 2)
    )
    assert SequenceEncoder(D, H, GRU)(Ragged([torch.randn(2, D)])).shape == (1, H)


@pytest.mark.parametrize(
    ("options", "batch", "kind", "says"),
    [
        ({"cell": "foo"}, None, ArgumentError, "cell must be .*got 'foo'"),
        ({"pooling": "median"}, None, ArgumentError, "pooling must be .*got 'median'"),
        ({"input_size": 0}, None, ArgumentError, "input_size must be .*got 0"),
        (
            {"cell": nn.GRU},
            None,
            ArgumentTypeError,
            r"cell must be .* of rl\.nn, got a function that returns a .*GRU",
        ),
        (
            {"cell": GRU(D, H)},
            None,
            ArgumentError,
            r"cell must be .* returns a layer.*, got GRU\(3, 4\)",
        ),
        (
            {"cell": lambda size: GRU(size, H)},
            None,
            ArgumentTypeError,
            r"cell must .*, got <lambda>\(size\), with",
        ),
        ({"bidirectional": 1}, None, ArgumentTypeError, "bidirectional must be .*got 1"),
        ({"foo": 1}, None, ArgumentTypeError, "foo must be .*got 1"),
        ({"dropout": 1.5}, None, ArgumentError, "dropout must be .*got 1.5"),
        ({"cell": "mingru", "state_dropout": 0.2}, None, ArgumentError, "state_dropout"),
        ({}, torch.zeros(2, 3), ArgumentTypeError, "batch must be .*got a Tensor"),
        ({}, Ragged([torch.zeros(2, 5)]), ShapeError, "input_size = 3"),
        ({"num_embeddings": 3}, Ragged([torch.zeros(2, 3)]), ArgumentTypeError, "tokens"),
        (
            {"num_embeddings": 3},
            Ragged([torch.zeros(2, 3).long()]),
            ShapeError,
            "one token per element",
        ),
        (
            {"num_embeddings": 2, "input_size": 4},
            Ragged([[1, 2], [3]]),
            ArgumentError,
            "tokens from 1 to 3",
        ),
    ],
)
def test_mistakes(options: dict[str, Any], batch: Any, kind: type[RaglaneError], says: str) -> None:
    with pytest.raises(kind, match=says):
        SequenceEncoder(**{"input_size": D, "hidden_size": H} | options)(batch)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("LSTM", rl.nn.LSTM),
        ("PeepholeLSTM", rl.nn.PeepholeLSTM),
        ("Coupled_lstm", rl.nn.CoupledLSTM),
    ],
)
def test_a_cell_is_named_as_its_class_or_in_lower_case(name: Any, kind: type) -> None:
    assert type(SequenceEncoder(D, H, name).recurrent) is kind
    assert type(SequenceEncoder(D, H, name.lower()).recurrent) is kind
    assert Settings(cell=name) == Settings(cell=name.lower())


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("pooling", ["final", *POOLINGS, None])
def test_dropout_of_every_pooling_is_for_training_only(
    pooling: Any, num_layers: int, device: Any
) -> None:
    """In evaluation, results are those of the same network without dropout."""
    batch = _floats(device)
    encoder, plain = (
        SequenceEncoder(
            D, H, pooling=pooling, num_layers=num_layers, dropout=share, dtype=torch.float64
        ).to(device)
        for share in (0.5, 0.0)
    )
    plain.load_state_dict(encoder.state_dict())

    def numbers(network: SequenceEncoder) -> Tensor:
        out = network(batch)
        return out.values if isinstance(out, Ragged) else out

    assert encoder.recurrent.dropout == (0.5 if num_layers > 1 else 0)
    assert not torch.equal(numbers(encoder), numbers(encoder))
    assert torch.equal(numbers(encoder.eval()), numbers(plain.eval()))
