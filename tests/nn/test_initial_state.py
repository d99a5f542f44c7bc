"""Initial states of layers: learned, of lengths, and from modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import raglane as rl
from every_layer import (
    LAYERS,
    LENGTHS,
    D,
    H,
    a_batch,
    assert_alike_everywhere,
    assert_same,
    assert_same_for_every_input,
    build,
    gradients,
    has_torch_lstm_under_autocast,
    results_of,
)
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from raglane.schedules import SCHEDULES
from strategies import sequences_of


class OfSequence(nn.Module):
    """A small network of log(1 + length) and of the mean of a sequence's features."""

    def __init__(
        self, rows: int, sizes: tuple[int, ...], dtype: torch.dtype = torch.float64
    ) -> None:
        super().__init__()
        self.rows, self.sizes = rows, sizes
        self.layers = nn.Sequential(
            nn.Linear(1 + D, 5), nn.Tanh(), nn.Linear(5, rows * sum(sizes))
        ).to(dtype)

    def forward(self, batch: rl.Ragged) -> Any:
        made = self.layers(
            torch.cat(
                [batch.lengths.to(batch.dtype).log1p().unsqueeze(1), batch.mean(1, empty=0.0)], 1
            )
        )
        states = torch.split(
            made.view(len(made), self.rows, sum(self.sizes)).transpose(0, 1), list(self.sizes), 2
        )
        return states if len(states) > 1 else states[0]


KINDS = ["learned", "lengths", "module"]


def layer_of(name: str, kind: str, layers: int = 2, both: bool = True, **options: Any) -> Any:
    """Build a layer with random parameters, those of the initial state included."""
    initial = (
        OfSequence(layers * (2 if both else 1), build(name).state_sizes)
        if kind == "module"
        else kind
    )
    layer = build(name, layers, bidirectional=both, initial_state=initial, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(-0.5, 0.5)
    return layer


def by_hand(layer: Any, batch: rl.Ragged) -> Any:
    """Compute the initial state of a batch from the layer's parameters."""
    if isinstance(layer.initial_state, nn.Module):
        assert layer.initial_state is layer.initial_module
        return layer.initial_module(batch)
    if layer.initial_state == "lengths":
        made = layer.initial_module
        states = made.intercept + made.slope * torch.log(batch.lengths.double() + 1.0).view(
            1, -1, 1
        )
        split = torch.split(states, layer.state_sizes, 2)
    else:
        own = [getattr(layer, f"initial_{name}") for name in layer.cell.states]
        split = tuple(torch.stack([part] * len(batch), 1) for part in own)
    return tuple(split) if len(split) > 1 else split[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LAYERS)
def test_as_if_it_were_given(name: str, kind: str) -> None:
    layer = layer_of(name, kind)
    batch = a_batch()
    plain = build(name, 2, bidirectional=True)
    plain.load_state_dict(
        {key: value for key, value in layer.state_dict().items() if not key.startswith("initial_")}
    )
    own = [value for key, value in layer.named_parameters() if key.startswith("initial_")]
    assert own

    ours = results_of(layer(batch))
    theirs = results_of(plain(batch, by_hand(layer, batch)))
    assert_same(ours, theirs)
    shared = [key for key, _ in plain.named_parameters()]
    our_gradients = gradients(
        ours, [batch.values, *own, *(dict(layer.named_parameters())[key] for key in shared)]
    )
    assert_same(our_gradients, gradients(theirs, [batch.values, *own, *plain.parameters()]))
    # Every parameter has a gradient, except those of the h of SRU and QRNN, which is not read.
    read = [grad for grad in our_gradients[1 : 1 + len(own)] if grad.any()]
    assert len(read) == len(own) if kind != "learned" else read


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["lstm", "sru"])
def test_every_schedule_and_backend(name: str, kind: str) -> None:
    assert_alike_everywhere(layer_of(name, kind), lambda layer, batch: results_of(layer(batch)))


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_every_kind_of_input(kind: str, first: bool, backend: str) -> None:
    assert_same_for_every_input(layer_of("lstm", kind, batch_first=first, backend=backend))


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_few_sequences(kind: str, count: int) -> None:
    layer = layer_of("gru", kind)
    batch = rl.Ragged.from_flat(torch.zeros(0, D, dtype=torch.float64), lengths=[0] * count)
    out, state = layer(batch)
    assert out.values.shape == (0, 2 * H)
    assert state.shape == (4, count, H)
    if count:
        assert_same([state], [by_hand(layer, batch)])


@pytest.mark.parametrize(
    ("kind", "schedule"), list(zip([*KINDS, *KINDS[:2]], SCHEDULES, strict=True))
)
def test_autocast(kind: str, schedule: str, device: torch.device) -> None:
    """Under autocast a module returns bfloat16, and learned states are float32."""
    initial: Any = OfSequence(2, (H, H), torch.float32) if kind == "module" else kind
    layer = rl.nn.LSTM(D, H, bidirectional=True, initial_state=initial)
    batch = rl.Ragged(sequences_of(LENGTHS, dtype=torch.float32))
    expected = results_of(layer(batch))
    with torch.autocast(device.type, dtype=torch.bfloat16), rl.use_backend(schedule=schedule):
        is_torchs = rl.explain(layer, batch).backend == "torch"
        if is_torchs and schedule == "padded" and not has_torch_lstm_under_autocast(device.type):
            pytest.skip("torch has no padded LSTM in bfloat16 on this processor")
        results = results_of(layer(batch))
    assert_same([part.float() for part in results], expected, 0.05)


def test_names_of_parameters() -> None:
    plain = set(build("lstm").state_dict())
    learned = build("lstm", initial_state="learned")
    assert set(learned.state_dict()) - plain == {"initial_h", "initial_c"}
    assert learned.initial_h.shape == (1, H)
    assert not learned.initial_h.any()
    assert learned.initial_h.dtype is torch.float64
    assert set(build("gru", initial_state="learned").state_dict()) - set(
        build("gru").state_dict()
    ) == {"initial_h"}
    projected = build("lstm projected", 2, bidirectional=True, initial_state="learned")
    assert projected.initial_h.shape == (4, 2)
    assert projected.initial_c.shape == (4, H)
    moduled = build("gru", initial_state=OfSequence(1, (H,)))
    assert {key.split(".")[0] for key in moduled.state_dict()} - set(build("gru").state_dict()) == {
        "initial_module"
    }
    assert "initial_state='learned'" in repr(learned)


@pytest.mark.parametrize(
    ("made", "kind", "says"),
    [
        (lambda _: None, ArgumentTypeError, "initial_state must be a tensor.*, got a NoneType"),
        (
            lambda batch: (batch.mean(1, empty=0.0),) * 2,
            ArgumentTypeError,
            "initial_state must be .*got a tuple",
        ),
        (
            lambda batch: torch.zeros(len(batch), H),
            ShapeError,
            r"\(h\) must be .*\(1, 2, 4\).*, got shape \(2, 4\)",
        ),
        (
            lambda _: torch.zeros(1, 3, H),
            ShapeError,
            r"initial_state \(h\) must be .*got shape \(1, 3, 4\)",
        ),
        (
            lambda _: torch.zeros(1, 2, H),
            ShapeError,
            r"\(h\) must be .*torch.float64.*, got torch.float32",
        ),
    ],
)
def test_a_module_with_a_wrong_result(
    made: Callable[[rl.Ragged], Any], kind: type[Exception], says: str
) -> None:
    initial = nn.Module()
    initial.forward = made
    layer = build("gru", initial_state=initial)
    with pytest.raises(kind, match=says):
        layer(rl.Ragged(sequences_of([2, 1])))


@pytest.mark.parametrize("given", ["lengths", OfSequence(1, (H,))])
def test_a_first_step_cannot_read_the_sequence(given: Any) -> None:
    x_t = sequences_of([2])[0]
    with pytest.raises(
        ArgumentTypeError, match="initial_state must be 'zeros' or 'learned' for a first step"
    ):
        build("gru", initial_state=given).step(x_t)
    assert build("gru", initial_state="learned").step(x_t)[0].shape == (2, H)


@pytest.mark.parametrize("given", ["random", None, 0, torch.zeros(1, 1, H), OfSequence])
def test_no_such_initial_state(given: Any) -> None:
    with pytest.raises(
        ArgumentError,
        match=r"initial_state must be.*'zeros', 'learned', 'lengths', or a module.*got",
    ):
        build("gru", initial_state=given)
