"""The sequence encoder: the whole recipe against the same steps done by hand, one sequence at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from looped import looped
from raglane import Ragged
from raglane.errors import ArgumentError, ArgumentTypeError, RaglaneError, ShapeError
from raglane.nn import GRU, Recurrent, SequenceEncoder
from raglane.nn.encoder import LAYERS
from raglane.nn.pooling import POOLINGS

LENGTHS = [4, 0, 1, 6, 2]
D, H, TOKENS = 3, 4, 11


def _floats(device: torch.device) -> Ragged:
    return Ragged([torch.randn(length, D, dtype=torch.float64, device=device) for length in LENGTHS])


def _tokens(device: torch.device) -> Ragged:
    return Ragged([torch.randint(TOKENS, (length,), device=device) for length in LENGTHS])


def _by_hand(encoder: SequenceEncoder, sequence: Tensor) -> Tensor:
    """One sequence, by torch's own modules; the encoder's layer is a GRU of torch's in all but name."""
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
        return output  # type: ignore[no-any-return]
    if encoder.pooling == "summary":
        return torch.cat([h[-2], h[-1]]) if layer.bidirectional else h[-1]
    by_hand: dict[str, Any] = {
        "last": lambda: output[-1],
        "first": lambda: output[0],
        "mean": lambda: output.mean(0),
        "max": lambda: output.amax(0),
        "logsumexp": lambda: output.logsumexp(0),
    }
    if encoder.pooling in by_hand:
        return by_hand[encoder.pooling]()  # type: ignore[no-any-return]
    assert encoder.pool is not None
    return encoder.pool(Ragged([output]))[0]  # type: ignore[no-any-return]


@looped("bidirectional", [False, True])
@looped("embedding", [None, 5])
@looped("pooling", ["summary", *POOLINGS, None])
def test_the_recipe_by_hand(pooling: str | None, embedding: int | None, bidirectional: bool, device: Any) -> None:
    size = D if embedding is None else TOKENS
    encoder = SequenceEncoder(
        size, H, embedding=embedding, pooling=pooling, num_layers=2, bidirectional=bidirectional, dtype=torch.float64
    ).to(device=device, dtype=torch.float64)
    batch = _floats(device) if embedding is None else _tokens(device)
    found = encoder(batch)
    assert encoder.output_size == H * (1 + bidirectional)
    for number, sequence in enumerate(batch):
        if len(sequence):
            torch.testing.assert_close(found[number], _by_hand(encoder, sequence), rtol=0, atol=1e-12)
        elif pooling is not None:
            assert torch.equal(found[number], torch.zeros_like(found[number]))
    if pooling is None:
        assert found.lengths.tolist() == LENGTHS


@looped("layer_norm", [False, True])
@looped("layer", LAYERS)
def test_every_layer_learns(layer: str, layer_norm: bool, device: Any) -> None:
    if layer_norm and layer not in ("lstm", "gru"):
        with pytest.raises(ArgumentError, match=r"layer must be .*with layer_norm one of lstm, gru.*, got "):
            SequenceEncoder(D, H, layer, layer_norm=True)
        return
    encoder = SequenceEncoder(D, H, layer, layer_norm=layer_norm, bidirectional=True, initial_state="learned").double()
    encoder.to(device)(_floats(device)).square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in encoder.named_parameters()}
    assert all(grad is not None and bool(grad.isfinite().all()) for grad in gradients.values())
    assert any(bool(grad.any()) for name, grad in gradients.items() if grad is not None and "initial" in name)


def test_any_layer_will_do(device: Any) -> None:
    class Twice(nn.Module):
        output_size = 2 * H

        def __init__(self, input_size: int, hidden_size: int) -> None:
            super().__init__()
            self.input_size, self.hidden_size = input_size, hidden_size
            self.linear = nn.Linear(input_size, hidden_size)

        def step(self, x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            state = torch.tanh(state + self.linear(x_t))
            return torch.cat([state, -state], 1), state

    def recurrent(input_size: int, hidden_size: int, **options: Any) -> Recurrent:
        return Recurrent(Twice, input_size, hidden_size, **options)

    encoder = SequenceEncoder(D, H, recurrent, bidirectional=True).double().to(device)
    found = encoder(_floats(device))
    assert found.shape == (len(LENGTHS), encoder.output_size) == (len(LENGTHS), 4 * H)
    assert SequenceEncoder(D, H, GRU)(Ragged([torch.randn(2, D)])).shape == (1, H)


@looped("pooling", ["summary", *POOLINGS, None])
def test_device_and_dtype_reach_every_part(pooling: str | None) -> None:
    encoder = SequenceEncoder(D, H, embedding=5, pooling=pooling, device="meta", dtype=torch.float64)
    assert {(part.device.type, part.dtype) for part in encoder.parameters()} == {("meta", torch.float64)}


def test_shows_what_it_pools() -> None:
    assert "pooling='mean', output_size=8" in repr(SequenceEncoder(D, H, pooling="mean", bidirectional=True))


def test_dropout_is_for_training_only(device: Any) -> None:
    batch = _floats(device)
    encoder = SequenceEncoder(D, H, dropout=0.5, num_layers=2, zoneout=0.0, state_dropout=0.3).double().to(device)
    assert not torch.equal(encoder(batch), encoder(batch))
    encoder.eval()
    assert torch.equal(encoder(batch), encoder(batch))
    shares = [float((SequenceEncoder(D, 500, dropout=0.3).to(device)(batch.to(torch.float32))[0] == 0).float().mean())]
    assert 0.2 < shares[0] < 0.4


def test_only_the_last_state_is_computed_where_it_is_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    plain = GRU.forward

    def watch(self: GRU, *args: Any, return_output: bool = True, **kwargs: Any) -> Any:
        seen.append(not return_output)
        return plain(self, *args, return_output=return_output, **kwargs)

    monkeypatch.setattr(GRU, "forward", watch)
    batch = Ragged([torch.randn(2, D)])
    SequenceEncoder(D, H)(batch)
    SequenceEncoder(D, H, pooling="mean")(batch)
    assert seen == [True, False]


_TOKENS = Ragged([[1, 2], [3]])


@looped(
    ("options", "batch", "kind", "says"),
    [
        ({"layer": "foo"}, None, ArgumentError, "layer must be .*got 'foo'"),
        ({"pooling": "median"}, None, ArgumentError, "pooling must be .*got 'median'"),
        ({"input_size": 0}, None, ArgumentError, "input_size must be .*got 0"),
        ({"hidden_size": -1}, None, ArgumentError, "hidden_size must be .*got -1"),
        ({"hidden_size": 2.5}, None, ArgumentError, "hidden_size must be .*got 2.5"),
        ({"num_layers": 0}, None, ArgumentError, "num_layers must be .*got 0"),
        (
            {"layer": nn.GRU},
            None,
            ArgumentTypeError,
            r"layer must be .*a class of rl\.nn.*, got what makes a torch\..*GRU",
        ),
        ({"layer": GRU(D, H)}, None, ArgumentError, r"layer must be .*what makes a layer.*, got GRU\(3, 4\)"),
        (
            {"layer": lambda size: GRU(size, H)},
            None,
            ArgumentTypeError,
            r"layer must be .*got <lambda>\(size\), with too many",
        ),
        ({"layer": lambda *_, **__: 3}, None, ArgumentTypeError, r"layer must be .*got what makes a builtins\.int"),
        ({"layer": ["gru"]}, None, ArgumentError, r"layer must be .*got \['gru'\]"),
        ({"pooling": ["last"]}, None, ArgumentError, r"pooling must be .*got \['last'\]"),
        ({"pooling": {}}, None, ArgumentError, "pooling must be .*got {}"),
        ({"bidirectional": 1}, None, ArgumentTypeError, "bidirectional must be .*got 1"),
        ({"layer_norm": "yes"}, None, ArgumentTypeError, "layer_norm must be .*got 'yes'"),
        ({"dtype": torch.int64}, None, ArgumentError, r"dtype must be .*got torch\.int64"),
        ({"foo": 1}, None, ArgumentTypeError, "foo must be .*got 1"),
        ({"embedding": 0}, None, ArgumentError, "embedding must be .*got 0"),
        ({"dropout": 1.5}, None, ArgumentError, "dropout must be .*got 1.5"),
        ({"layer": "mingru", "state_dropout": 0.2}, None, ArgumentError, "state_dropout"),
        ({"zoneout": 1.0}, None, ArgumentError, "zoneout"),
        ({}, torch.zeros(2, 3), ArgumentTypeError, "batch must be .*got a Tensor"),
        ({}, Ragged([torch.zeros(2, 5)]), ShapeError, "input_size = 3"),
        ({"embedding": 4}, Ragged([torch.zeros(2, 3)]), ArgumentTypeError, "tokens"),
        ({"embedding": 4}, Ragged([torch.zeros(2, 3).long()]), ShapeError, "one token per element"),
        ({"embedding": 4, "input_size": 2}, _TOKENS, ArgumentError, "tokens from 1 to 3"),
    ],
)
def test_mistakes(options: dict[str, Any], batch: Any, kind: type[RaglaneError], says: str) -> None:
    with pytest.raises(kind, match=says):
        SequenceEncoder(**{"input_size": D, "hidden_size": H} | options)(batch)


@looped("pooling", ["summary", *POOLINGS, None])
def test_dropout_of_every_pooling_is_for_training_only(pooling: str | None, device: Any) -> None:
    """In evaluation the numbers are those of the same network without dropout."""
    batch = _floats(device)
    encoder, plain = (
        SequenceEncoder(D, H, pooling=pooling, num_layers=2, dropout=share, dtype=torch.float64).to(device)
        for share in (0.5, 0.0)
    )
    plain.load_state_dict(encoder.state_dict())

    def numbers(network: SequenceEncoder) -> Tensor:
        out = network(batch)
        return out.values if isinstance(out, Ragged) else out

    assert not torch.equal(numbers(encoder), numbers(encoder))
    assert torch.equal(numbers(encoder.eval()), numbers(plain))
