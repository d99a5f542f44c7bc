"""What sequences begin with: zeros, a state given for each, learned ones, and modules of lengths or features."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import raglane as rl
from every_layer import LAYERS, LENGTHS, PAIRS, D, H, a_batch, assert_same, build, gradients, parts, results_of
from looped import looped
from raglane.errors import ArgumentError, ArgumentTypeError, DispatchError, ShapeError
from raglane.schedules import SCHEDULES
from strategies import sequences_of


class OfLength(nn.Module):
    """A small network of the logarithm of a sequence's length."""

    def __init__(self, rows: int, sizes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.rows, self.sizes = rows, sizes
        width = rows * sum(sizes)
        self.layers = nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, width)).to(dtype)

    def forward(self, batch: rl.Ragged) -> Any:
        return self.split(self.layers(batch.lengths.to(batch.dtype).log1p().unsqueeze(1)))

    def split(self, made: Tensor) -> Any:
        states = torch.split(made.view(len(made), self.rows, sum(self.sizes)).transpose(0, 1), list(self.sizes), 2)
        return states if len(states) > 1 else states[0]


class OfFeatures(OfLength):
    """The same of the mean of a sequence's features."""

    def __init__(self, rows: int, sizes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> None:
        super().__init__(rows, sizes, dtype)
        self.layers[0] = nn.Linear(D, 5, dtype=dtype)

    def forward(self, batch: rl.Ragged) -> Any:
        return self.split(self.layers(batch.mean()))


def kinds_of(name: str, rows: int) -> dict[str, Any]:
    sizes = build(name).state_sizes
    return {
        "learned": "learned",
        "lengths": "lengths",
        "module of lengths": OfLength(rows, sizes),
        "module of features": OfFeatures(rows, sizes),
    }


KINDS = ["learned", "lengths", "module of lengths", "module of features"]


def layer_of(name: str, kind: str, layers: int = 2, both: bool = True, **options: Any) -> Any:
    """A layer whose own parameters and initial state are all random."""
    initial = kinds_of(name, layers * (2 if both else 1))[kind]
    layer = build(name, layers, bidirectional=both, initial_state=initial, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(-0.5, 0.5)
    return layer


def plain_copy(layer: Any, name: str) -> Any:
    """The layer without an initial state of its own, and the same weights."""
    plain = build(name, layer.num_layers, bidirectional=layer.bidirectional)
    plain.load_state_dict({key: value for key, value in layer.state_dict().items() if not key.startswith("initial_")})
    return plain


def by_hand(layer: Any, batch: rl.Ragged) -> Any:
    """The initial state of a batch, from the layer's parameters."""
    if layer.initial_state == "module":
        return layer.initial_module(batch)
    if layer.initial_state == "lengths":
        made = layer.initial_module
        states = made.intercept + made.slope * torch.log(batch.lengths.double() + 1.0).view(1, -1, 1)
        split = torch.split(states, layer.state_sizes, 2)
    else:
        own = [getattr(layer, f"initial_{name}") for name in layer.cell.states]
        split = tuple(torch.stack([part] * len(batch), 1) for part in own)
    return tuple(split) if len(split) > 1 else split[0]


# -- the same as giving it --------------------------------------------------------------------------------------------


@looped("kind", KINDS)
@looped("name", LAYERS)
def test_as_if_it_were_given(name: str, kind: str) -> None:
    """Results, and gradients of everything, the initial state's parameters and the features it reads included."""
    layer = layer_of(name, kind)
    batch = a_batch()
    plain = plain_copy(layer, name)
    own = [value for key, value in layer.named_parameters() if key.startswith("initial_")]
    assert own

    ours = results_of(layer(batch))
    theirs = results_of(plain(batch, by_hand(layer, batch)))
    assert_same(ours, theirs)
    shared = [key for key, _ in plain.named_parameters()]
    our_gradients = gradients(ours, [batch.values, *own, *(dict(layer.named_parameters())[key] for key in shared)])
    their_gradients = gradients(theirs, [batch.values, *own, *plain.parameters()])
    assert_same(our_gradients, their_gradients)
    # Where a state is read, what it is made of gets a gradient; an SRU's and a QRNN's h is read by nothing.
    read = [grad for grad in our_gradients[1 : 1 + len(own)] if grad.any()]
    assert len(read) == len(own) if kind != "learned" else read


def test_zeros() -> None:
    layer = build("lstm", 2, bidirectional=True, initial_state="zeros")
    batch = rl.Ragged(sequences_of(LENGTHS))
    zeros = torch.zeros(4, len(LENGTHS), H, dtype=torch.float64)
    assert_same(results_of(layer(batch)), results_of(layer(batch, (zeros, zeros))), 0.0)
    assert not any(key.startswith("initial_") for key in layer.state_dict())


@looped("kind", KINDS)
def test_what_is_given_goes_before(kind: str) -> None:
    layer = layer_of("gru", kind)
    batch, hx = rl.Ragged(sequences_of(LENGTHS)), torch.randn(4, len(LENGTHS), H, dtype=torch.float64)
    assert_same(results_of(layer(batch, hx)), results_of(plain_copy(layer, "gru")(batch, hx)), 0.0)


@looped("kind", KINDS)
def test_an_empty_sequence_ends_with_it(kind: str) -> None:
    layer = layer_of("lstm", kind)
    batch = rl.Ragged(sequences_of(LENGTHS))
    _, state = layer(batch)
    for part, initial in zip(state, by_hand(layer, batch), strict=True):
        assert torch.equal(part[:, 1], initial[:, 1])


@looped("kind", KINDS)
@pytest.mark.parametrize("name", ["lstm", "sru"])
def test_every_schedule_and_backend(name: str, kind: str) -> None:
    layer, seen = layer_of(name, kind), []
    batch = a_batch()
    for schedule, backend in PAIRS:
        try:
            with rl.use_backend(schedule=schedule, backend=backend):
                results = results_of(layer(batch))
        except DispatchError:
            continue
        seen.append([*results, *gradients(results, [batch.values, *layer.parameters()])])
    assert len(seen) >= len(SCHEDULES)
    for other in seen[1:]:
        assert_same(other, seen[0])


@looped("kind", KINDS)
@pytest.mark.parametrize("name", ["gru", "minlstm", "lstm projected"])
def test_gradients(name: str, kind: str) -> None:
    layer = layer_of(name, kind, layers=1)
    parameters = list(layer.parameters())

    def function(values: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        return tuple(results_of(layer(rl.Ragged.from_flat(values, lengths=[2, 0, 1]))))

    values = torch.randn(3, D, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(function, (values, *parameters), fast_mode=True)


# -- every way to call ------------------------------------------------------------------------------------------------


@looped("first", [False, True])
@looped("kind", KINDS)
def test_every_kind_of_input(kind: str, first: bool) -> None:
    layer = layer_of("lstm", kind, batch_first=first)
    batch = rl.Ragged(sequences_of([4, 1, 5]))
    out, state = layer(batch)

    padded, told = batch.to_padded(first, total_length=7)
    by_padded = layer(padded, lengths=told)
    assert_same(results_of(by_padded), [out.to_padded(first, total_length=7)[0], *state])

    by_packed, packed_state = layer(batch.to_packed())
    assert_same([rl.Ragged.from_packed(by_packed).values, *packed_state], [out.values, *state])

    assert_same(results_of(layer(batch[2])), [out[2], *(part[:, 2] for part in state)])

    equal = rl.Ragged(sequences_of([3, 3]))
    dense, _ = layer(equal.to_padded(first)[0])
    assert_same([dense], [layer(equal)[0].to_padded(first)[0]])


@looped("kind", KINDS)
def test_no_output_and_every_state(kind: str) -> None:
    layer = layer_of("lstm", kind)
    batch = rl.Ragged(sequences_of(LENGTHS))
    out, state = layer(batch)
    nothing, same = layer(batch, return_output=False)
    assert nothing is None
    assert_same(same, state)
    again, same, states = layer(batch, return_states=True)
    assert_same([again.values, *same, states[1][0].values], [out.values, *state, out.values])


def test_a_stream_begins_with_it() -> None:
    layer = layer_of("lstm", "learned", both=False)
    inputs = torch.randn(5, 2, D, dtype=torch.float64)
    expected, final = layer(inputs)
    state = None
    for t in range(5):
        out, state = layer.step(inputs[t], state)
        assert_same([out], [expected[t]])
    assert_same(parts(state), final)
    alone, _ = layer.step(inputs[0, 0])
    assert_same([alone], [expected[0, 0]])


@looped("count", [0, 1])
@looped("kind", KINDS)
def test_few_sequences(kind: str, count: int) -> None:
    layer = layer_of("gru", kind)
    batch = rl.Ragged.from_flat(torch.zeros(0, D, dtype=torch.float64), lengths=[0] * count)
    out, state = layer(batch)
    assert out.values.shape == (0, 2 * H)
    assert state.shape == (4, count, H)
    if count:
        assert_same([state], [by_hand(layer, batch)])


@looped("kind", KINDS)
def test_autocast(kind: str, device: torch.device) -> None:
    """What a module makes there is bfloat16, and what is learned is not: both fit."""
    initial = {
        "module of lengths": OfLength(2, (H, H), torch.float32),
        "module of features": OfFeatures(2, (H, H), torch.float32),
    }.get(kind, kind)
    layer = rl.nn.LSTM(D, H, bidirectional=True, initial_state=initial)
    batch = rl.Ragged(sequences_of(LENGTHS, dtype=torch.float32))
    expected = results_of(layer(batch))
    with torch.autocast(device.type, dtype=torch.bfloat16):
        for schedule in SCHEDULES:
            with rl.use_backend(schedule=schedule):
                results = results_of(layer(batch))
            assert_same([part.float() for part in results], expected, 0.05)


# -- as a module ------------------------------------------------------------------------------------------------------


def test_names_of_parameters() -> None:
    plain = set(build("lstm").state_dict())
    learned = build("lstm", initial_state="learned")
    assert set(learned.state_dict()) - plain == {"initial_h", "initial_c"}
    assert learned.initial_h.shape == (1, H)
    assert not learned.initial_h.any()
    assert learned.initial_h.dtype is torch.float64
    assert set(build("gru", initial_state="learned").state_dict()) - set(build("gru").state_dict()) == {"initial_h"}
    projected = build("lstm projected", 2, bidirectional=True, initial_state="learned")
    assert projected.initial_h.shape == (4, 2)
    assert projected.initial_c.shape == (4, H)
    moduled = build("gru", initial_state=OfLength(1, (H,)))
    assert {key.split(".")[0] for key in moduled.state_dict()} - set(build("gru").state_dict()) == {"initial_module"}
    assert "initial_state='learned'" in repr(learned)


@looped("kind", KINDS)
@looped("name", ["lstm", "sru"])
def test_copies_and_files(name: str, kind: str) -> None:
    layer = layer_of(name, kind)
    batch = rl.Ragged(sequences_of(LENGTHS))
    expected = results_of(layer(batch))
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert_same(results_of(other(batch)), expected, 0.0)
    fresh = layer_of(name, kind)
    assert not torch.equal(results_of(fresh(batch))[0], expected[0])
    fresh.load_state_dict(layer.state_dict())
    assert_same(results_of(fresh(batch)), expected, 0.0)


def test_float_and_double_follow_the_layer() -> None:
    layer = build("gru", initial_state="learned").float()
    assert layer(rl.Ragged(sequences_of([2], dtype=torch.float32)))[1].dtype is torch.float32


def test_training_moves_it() -> None:
    layer = build("gru", initial_state="learned")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(rl.Ragged(sequences_of(LENGTHS)))[1].sum().backward()
    optimizer.step()
    assert bool(layer.initial_h.any())


def test_accelerated_layers_begin_with_zeros() -> None:
    model: Any = nn.Sequential(nn.LSTM(D, H, 2, dtype=torch.float64))
    names, batch = set(model.state_dict()), rl.Ragged(sequences_of(LENGTHS))
    inputs = torch.randn(4, 2, D, dtype=torch.float64)
    before = model[0](inputs)
    rl.accelerate(model)
    assert set(model.state_dict()) == names
    zeros = torch.zeros(2, len(LENGTHS), H, dtype=torch.float64)
    assert_same(results_of(model[0](batch)), results_of(model[0](batch, (zeros, zeros))), 0.0)
    assert_same(results_of(model[0](inputs)), results_of(before))
    assert "initial_state" not in repr(model)


def test_a_compiled_layer(device: torch.device) -> None:
    layer = layer_of("lstm", "learned")
    compiled: Any = torch.compile(layer, backend="eager", dynamic=True)
    for lengths in ([3, 2], [1, 4, 4]):
        batch = rl.Ragged(sequences_of(lengths))
        assert_same(results_of(compiled(batch)), results_of(layer(batch)))


# -- mistakes ---------------------------------------------------------------------------------------------------------


class Gives(nn.Module):
    """A module that gives whatever it was told to."""

    def __init__(self, made: Callable[[rl.Ragged], Any]) -> None:
        super().__init__()
        self.made = made

    def forward(self, batch: rl.Ragged) -> Any:
        return self.made(batch)


@looped(
    ("made", "kind", "says"),
    [
        (lambda _: None, ArgumentTypeError, "initial_state must be a tensor.*, got a NoneType"),
        (lambda batch: (batch.mean(),) * 2, ArgumentTypeError, "initial_state must be .*got a tuple"),
        (
            lambda batch: torch.zeros(len(batch), H),
            ShapeError,
            r"initial_state \(h\) must be .*\(1, 2, 4\).*, got shape \(2, 4\)",
        ),
        (lambda _: torch.zeros(1, 3, H), ShapeError, r"initial_state \(h\) must be .*got shape \(1, 3, 4\)"),
        (
            lambda _: torch.zeros(1, 2, H),
            ShapeError,
            r"initial_state \(h\) must be .*torch.float64.*, got torch.float32",
        ),
    ],
)
def test_a_module_that_gives_no_state(made: Any, kind: type[Exception], says: str) -> None:
    layer = build("gru", initial_state=Gives(made))
    with pytest.raises(kind, match=says):
        layer(rl.Ragged(sequences_of([2, 1])))


def test_a_tensor_for_a_pair() -> None:
    layer = build("lstm", initial_state=Gives(lambda batch: torch.zeros(1, len(batch), H)))
    with pytest.raises(ArgumentTypeError, match=r"initial_state must be a tuple \(h, c\).*, got a Tensor"):
        layer(rl.Ragged(sequences_of([2, 1])))


@looped("given", ["random", None, 0, torch.zeros(1, 1, H), OfLength])
def test_no_such_initial_state(given: Any) -> None:
    with pytest.raises(
        ArgumentError, match=r"initial_state must be .* 'zeros', 'learned', 'lengths', or a module.*, got "
    ):
        build("gru", initial_state=given)
