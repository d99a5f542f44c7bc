"""rl.accelerate on models that reset states where episodes start, in the form of those of
sb3-contrib and torchrl.
"""

from __future__ import annotations

import copy
import itertools
import pickle
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import raglane as rl


class Policy(nn.Module):
    """A policy of the form of sb3-contrib's: flat sequences of one length, and starts as
    numbers.
    """

    def __init__(self, bidirectional: bool = False) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, num_layers=2, bidirectional=bidirectional)

    @staticmethod
    def _process_sequence(features: Tensor, states: Any, starts: Tensor, lstm: Any) -> Any:
        count = states[0].shape[1]
        rows = []
        for x, start in zip(
            features.view(count, -1, 3).unbind(1), starts.view(count, -1).unbind(1), strict=True
        ):
            y, states = lstm(
                x.unsqueeze(0), tuple(part * (1 - start).view(-1, 1) for part in states)
            )
            rows.append(y[0])
        return torch.stack(rows, 1).flatten(0, 1), states

    def forward(self, features: Tensor, states: Any, starts: Tensor) -> list[Tensor]:
        start_of = starts.to(features.dtype).flatten()
        output, states = self._process_sequence(features.flatten(0, 1), states, start_of, self.lstm)
        return [output, *states]

    def states(self, count: int, _: int) -> list[Tensor]:
        rows = 2 * (1 + self.lstm.bidirectional)
        return [torch.randn(rows, count, 4, requires_grad=True) for _ in range(2)]


class Module(nn.Module):
    """A module of the form of torchrl's, with a state per step: an episode begins with that of its
    first step.
    """

    def __init__(self, name: str = "lstm", bidirectional: bool = False) -> None:
        super().__init__()
        kind = {"lstm": nn.LSTM, "gru": nn.GRU}[name]
        setattr(self, name, kind(3, 4, num_layers=2, bidirectional=bidirectional, batch_first=True))
        self.name, self.recurrent_backend = name, "pad"

    def forward(self, features: Tensor, states: Any, starts: Tensor) -> list[Tensor]:
        if self.recurrent_backend == "scan":
            return list(
                getattr(self, f"_{self.name}_scan_with_resets")(features, *states, None, starts)
            )
        layer, (count, steps) = getattr(self, self.name), starts.shape
        found = [
            features.new_zeros(count, steps, 4 * (1 + layer.bidirectional)),
            *map(torch.zeros_like, states),
        ]
        for row in range(count):
            bounds = [0, *(step for step in range(1, steps) if starts[row, step]), steps]
            for begin, end in itertools.pairwise(bounds):
                hx = tuple(part[row, begin] for part in states)
                found[0][row, begin:end], final = layer(
                    features[row, begin:end], hx if len(hx) > 1 else hx[0]
                )
                for place, part in zip(found[1:], final if len(hx) > 1 else [final], strict=True):
                    place[row, end - 1] = part
        return found

    def states(self, count: int, steps: int) -> list[Tensor]:
        rows, parts = 2 * (1 + getattr(self, self.name).bidirectional), 1 + (self.name == "lstm")
        return [torch.randn(count, steps, rows, 4, requires_grad=True) for _ in range(parts)]

    def _lstm_scan_with_resets(self, *_: Any) -> Any:
        raise AssertionError

    _gru_scan_with_resets = _lstm_scan_with_resets


class Own(Policy):
    """A policy with a computation of its own."""

    @staticmethod
    def _process_sequence(features: Tensor, states: Any, starts: Tensor, lstm: Any) -> Any:
        return Policy._process_sequence(features, states, starts * 0, lstm)


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, name in ((Policy, "sb3_contrib"), (Module, "torchrl")):
        monkeypatch.setattr(kind, "__module__", name)
        module = types.ModuleType(name)
        vars(module)[kind.__name__] = kind
        monkeypatch.setitem(sys.modules, name, module)


MODELS: list[Any] = [
    Policy,
    lambda: Policy(bidirectional=True),
    Module,
    lambda: Module("gru"),
    lambda: Module("lstm", bidirectional=True),
]


def run(model: nn.Module, features: Tensor, states: list[Tensor], starts: Tensor) -> list[Tensor]:
    """Return outputs, final states, and all gradients."""
    found = model(features, states, starts)
    weights = [
        torch.linspace(-1, 1, part.numel(), dtype=part.dtype).view_as(part) for part in found
    ]
    total = sum((part * weight).sum() for part, weight in zip(found, weights, strict=True))
    return [
        *found,
        *torch.autograd.grad(total, [features, *states, *model.parameters()], allow_unused=True),
    ]


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize(("count", "steps"), [(3, 8), (1, 5), (4, 1)])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_starts_of_episodes(make: Any, count: int, steps: int, share: float) -> None:
    model = make().double()
    fast = rl.accelerate(copy.deepcopy(model))
    features = torch.randn(count, steps, 3, dtype=torch.float64, requires_grad=True)
    states = [part.detach().double().requires_grad_() for part in model.states(count, steps)]
    starts = torch.rand(count, steps) < share
    expected = run(model, features, states, starts)
    for found in (
        fast,
        copy.deepcopy(fast),
        pickle.loads(pickle.dumps(fast)),
        rl.to_torch(copy.deepcopy(fast)),
    ):
        torch.testing.assert_close(
            run(found, features, states, starts), expected, atol=1e-12, rtol=1e-10
        )
    assert share or not starts.any()  # which no model changes


@pytest.mark.parametrize("kind", [Policy, Module])
def test_one_call_of_the_layer(kind: Any) -> None:
    calls: list[int] = []
    model = rl.accelerate(kind())
    model.lstm.register_forward_hook(lambda *_: calls.append(1))
    model(torch.randn(3, 8, 3), model.states(3, 8), torch.ones(3, 8, dtype=torch.bool))
    assert len(calls) == 1
    assert isinstance(model, kind)
    assert type(rl.to_torch(rl.accelerate(model))) is kind


def test_a_closure_over_a_converted_method_survives_to_torch() -> None:
    model: Any = Policy()
    given = torch.randn(3, 8, 3), model.states(3, 8), torch.rand(3, 8) < 0.4
    expected = model(*given)
    converted = rl.accelerate(model)._process_sequence
    model._process_sequence = lambda *args: converted(*args)
    torch.testing.assert_close(model(*given), expected)
    rl.to_torch(model)
    torch.testing.assert_close(model(*given), expected, rtol=0, atol=0)


def test_models_that_are_left_unchanged() -> None:
    chosen = Module()
    chosen.recurrent_backend = "triton"
    for model in (Own(), chosen):
        assert type(rl.accelerate(model)) in (Own, Module)
        assert isinstance(model.lstm, rl.nn.LSTM)
