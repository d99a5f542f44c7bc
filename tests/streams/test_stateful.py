"""Models that take the state as an argument, without a wrapper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import raglane as rl
from raglane.errors import ArgumentError, ArgumentTypeError, DispatchError
from raglane.serve import Engine


class Detector(nn.Module):
    """Of the shape of exported voice detectors."""

    def __init__(self, padding: str = "reflect") -> None:
        super().__init__()
        self.padding = padding
        self.waves = nn.Conv1d(1, 34, 32, stride=16, bias=False)
        self.inside = nn.Conv1d(17, 8, 3, stride=2, padding=1)
        self.cell = nn.LSTMCell(8, 8)
        self.head = nn.Sequential(nn.Dropout(0.5), nn.ReLU(), nn.Conv1d(8, 1, 1), nn.Sigmoid())

    def forward(self, x: Tensor, state: Tensor, rate: int = 16000) -> tuple[Tensor, Tensor]:
        assert rate == 16000
        x = F.pad(x, (3, 13), mode=self.padding)
        real, imaginary = self.waves(x.unsqueeze(1)).split(17, 1)
        x = self.inside((real.square() + imaginary.square() + 1e-6).sqrt()).relu().mean(-1)
        h, c = self.cell(x, (state[0], state[1]))
        return self.head(h.unsqueeze(-1)).squeeze(2).mean(1, keepdim=True), torch.stack([h, c])


class Layers(nn.Module):
    """Layers of torch in a step, with each of their states as an argument."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.dim = 1 if batch_first else 0
        self.layer = nn.LSTM(6, 4, num_layers=2, batch_first=batch_first)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out, (h, c) = self.layer(x.unsqueeze(self.dim), (h, c))
        return self.head(out.squeeze(self.dim)), h, c


class Gated(nn.Module):
    def __init__(self, cell: Any) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        if hasattr(self.cell, "flatten_parameters"):
            self.cell.flatten_parameters()
            out, state = self.cell(x[None], state)
            return out[0], state
        state = self.cell(x, state)
        return state.relu(), state


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.GRUCell(6, 4), nn.GRUCell(4, 4)

    def forward(self, x: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Any]:
        low = self.low(x, low)
        high = self.high(low, high)
        return high, (low, high)


class Tuples(nn.Module):
    """A tuple of states per cell, and an output of two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList([nn.LSTMCell(6, 4), nn.LSTMCell(4, 4)])

    def forward(self, x: Tensor, states: Any) -> tuple[Tensor, Any]:
        after = []
        for cell, state in zip(self.cells, states, strict=True):
            after.append(cell(x, state))
            x = after[-1][0]
        return x.reshape(-1, 2, 2), after


class Own(nn.Module):
    """First states of its own, of several forms, that are not zero."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 8)

    def initial_state(self, count: int) -> tuple[Tensor, Tensor]:
        dtype = self.enter.weight.dtype
        return torch.ones(count, 8, dtype=dtype), torch.full((2, count, 3), 0.5, dtype=dtype)

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        one, other = state
        one = (one + self.enter(x)).tanh()
        other = 0.9 * other + one[:, :3]
        return one.sum(1) + other.sum((0, 2)), [one, other]


class Frames(nn.Module):
    """Frames of two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.cell = nn.Conv1d(2, 3, 2), nn.RNNCell(6, 4, nonlinearity="relu")

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = self.cell(F.pad(self.inside(x), (1, 0), mode="replicate").flatten(1)[:, :6], state)
        return state, state


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)


MODELS: dict[str, tuple[Any, Any, tuple[int, ...]]] = {
    "detector": (Detector, (zeros(2, 1, 8),), (64,)),
    "circular": (lambda: Detector("circular"), (zeros(2, 1, 8),), (64,)),
    "layers": (lambda: Layers(False), (zeros(2, 1, 4), zeros(2, 1, 4)), (6,)),
    "batch first": (lambda: Layers(True), (zeros(2, 1, 4), zeros(2, 1, 4)), (6,)),
    "gru": (lambda: Gated(nn.GRU(6, 4, bias=False)), (zeros(1, 1, 4),), (6,)),
    "gru cell": (lambda: Gated(nn.GRUCell(6, 4)), (zeros(1, 4),), (6,)),
    "pair": (Pair, (zeros(1, 4), zeros(1, 4)), (6,)),
    "tuples": (Tuples, (((zeros(1, 4),) * 2,) * 2,), (6,)),
    "own": (Own, ((zeros(1, 8) + 1, zeros(2, 1, 3) + 0.5),), (6,)),
    "frames": (Frames, (zeros(1, 4),), (2, 3)),
}


@pytest.mark.parametrize("name", MODELS)
def test_served_is_offline_and_torch(name: str) -> None:
    make, states, features = MODELS[name]
    torch.manual_seed(0)
    model = make().double().eval()
    engine = Engine(model, max_streams=2, feature_shape=features)
    frames = torch.randn(9, *features, dtype=torch.float64)
    whole = engine.run(rl.Ragged([frames])).values
    expected = []
    with torch.no_grad():
        for frame in frames:
            output, *after = model(frame[None], *states)
            states = after if len(after) == len(states) else after[0]
            expected.append(output.reshape(1, *whole.shape[1:]))
    torch.testing.assert_close(whole, torch.cat(expected), rtol=1e-11, atol=1e-11)
    stream, other = engine.open(), engine.open()
    pieces = []
    for begin, end in ((0, 2), (2, 3), (3, 9)):
        stream.push(frames[begin:end])
        other.push(torch.randn(3, *features, dtype=torch.float64))
        engine.step()
        pieces.append(stream.pull())
    assert torch.equal(torch.cat(pieces), whole)


def test_first_states_that_a_model_gets() -> None:
    """A model without cells has no states that could be tried."""

    class Sum(nn.Module):
        def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            return x * state[..., :1], state + x.sum(1, keepdim=True)

    model: Any = Sum()
    with pytest.raises(DispatchError, match=f"found. {WRAPPER}"):
        Engine(model, max_streams=1, feature_shape=3)
    model.initial_state = lambda count: torch.full((count, 2), 2.0)
    engine = Engine(model, max_streams=1, feature_shape=3)
    whole = engine.run(rl.Ragged([torch.ones(3, 3)])).values
    assert torch.equal(whole, torch.tensor([2.0, 5.0, 8.0])[:, None].expand(3, 3))


def test_modes_of_the_model_stay() -> None:
    """Dropout is off in the engine, and on in the model."""
    model = Detector().train()
    engine = Engine(model, max_streams=1, feature_shape=64)
    frames = rl.Ragged([torch.randn(5, 64)])
    assert model.training
    assert model.head.training
    assert torch.equal(engine.run(frames).values, engine.run(frames).values)


class Refusing(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.cell = nn.GRUCell(6, 4)
        self.other = nn.GRU(6, 4, bidirectional=True) if how == "directions" else None

    def forward(self, x: Tensor, state: Tensor) -> Any:
        h = self.cell(x, state)
        if self.how == "rows":
            h = h.softmax(0)
        if self.how == "no state":
            return h
        if self.how == "broken":
            raise KeyError("no such rate")
        return (h, h) if self.how != "numbers" else (h, 1.0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit
def test_a_scripted_model() -> None:
    traced = torch.jit.trace(Gated(nn.GRUCell(6, 4)), (torch.randn(2, 6), torch.zeros(2, 4)))
    with pytest.raises(DispatchError, match=r"compiled by torch\.jit\. Load its weights"):
        Engine(traced, max_streams=1, feature_shape=6)


WRAPPER = r"Give it a method initial_state\(batch_size\).*pass rl\.nn\.Recurrent\(cell\)"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("rows", rf"Refusing whose forward takes 'state'.*{WRAPPER}"),
        ("no state", rf"whose forward takes 'state'.*{WRAPPER}"),
        ("numbers", rf"for which no states were found.*{WRAPPER}"),
        ("broken", rf"no states were found \(.*'no such rate'\)\. {WRAPPER}"),
        ("directions", "other .GRU., which reads sequences from the end"),
    ],
)
def test_refusals_say_what_works(how: str, words: str) -> None:
    with pytest.raises(DispatchError, match=words):
        Engine(Refusing(how), max_streams=1, feature_shape=6)


def test_tokens_and_wrong_sizes() -> None:
    with pytest.raises(ArgumentError, match="feature_shape must be given for this model"):
        Engine(Detector(), max_streams=1)  # not the size of the cell behind its convolutions
    with pytest.raises(DispatchError, match=rf"no states were found \(.*input.*\)\. {WRAPPER}"):
        Engine(Gated(nn.GRUCell(6, 4)), max_streams=1, feature_shape=5)
    tokens = nn.Module()
    tokens.table, tokens.forward = nn.Embedding(5, 6), Refusing("").forward
    with pytest.raises(DispatchError, match="tokens with the state as an argument"):
        Engine(tokens, max_streams=1)

    class Cell(nn.Module):
        input_size, hidden_size = 6, (2, 4)

        def step(self, x: Tensor, state: Tensor) -> Any:
            return x, state

    with pytest.raises(ArgumentTypeError, match=r"Cell\.hidden_size must be a whole number"):
        rl.nn.Recurrent(Cell())


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_padding_inside_of_frames(mode: str, dims: int) -> None:
    """Also outside of cells, and its gradients in a cell."""

    class Padded(nn.Module):
        input_size, hidden_size = 64, 4

        def __init__(self) -> None:
            super().__init__()
            self.leave = nn.LazyLinear(4)

        def forward(self, x: Tensor) -> Tensor:
            shape = (64,) if dims == 1 else (1, *((8, 8) if dims == 2 else (4, 4, 4)))
            padded = F.pad(x.reshape(-1, *shape), (2, 1, 1, 0, 3, 2)[: 2 * dims], mode=mode)
            return self.leave(padded.flatten(1))

        def step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            state = (self(x) + state).tanh()
            return state, state

    module = Padded().double()
    frames = torch.randn(5, 64, dtype=torch.float64)
    expected = module(frames)
    engine = Engine([module], max_streams=1, feature_shape=64)
    torch.testing.assert_close(engine.run(rl.Ragged([frames])).values, expected)

    grads = []
    for backend in ("program", "reference"):
        values = frames.clone().requires_grad_()
        out, _ = rl.nn.Recurrent(module, backend=backend)(rl.Ragged([values]))
        grads.append(torch.autograd.grad(out.values.square().sum(), [values, *module.parameters()]))
    for grad, expected in zip(*grads, strict=True):
        torch.testing.assert_close(grad, expected)
