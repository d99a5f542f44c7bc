"""``rl.nn.Recurrent`` as a module: parameters, copies, autocast, torch.compile, and wrong cells."""

from __future__ import annotations

import copy
import pickle
import weakref
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn

import raglane as rl
from every_layer import LENGTHS, D, H, a_batch, assert_same, gradients, results_of
from own_cells import OWN, Leaky, Whole
from raglane.errors import ArgumentError, ArgumentTypeError, RaglaneError, ShapeError
from raglane.schedules import SCHEDULES


def test_no_output_keeps_no_output() -> None:
    alive: list[int] = []
    outputs: weakref.WeakSet[Tensor] = weakref.WeakSet()

    class Watched(Leaky):
        def step(self, x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            output, state = super().step(x_t, state)
            alive.append(len(outputs))
            outputs.add(output)
            return output, state

    layer = rl.nn.Recurrent(Watched, D, H)
    for schedule in SCHEDULES:
        with rl.use_backend(schedule=schedule), torch.no_grad():
            alive.clear()
            assert layer(a_batch([6, 6]), return_output=False)[0] is None
            assert max(alive) <= 1
            alive.clear()
            layer(a_batch([6, 6]))
            assert max(alive) == len(alive) - 1


# -- as a module ------------------------------------------------------------------------------------------------------


def test_names_of_parameters() -> None:
    layer = rl.nn.Recurrent(Leaky, D, H, num_layers=2, bidirectional=True)
    assert list(layer.state_dict()) == [f"cells.{i}.linear.{part}" for i in range(4) for part in ("weight", "bias")]
    whole = rl.nn.Recurrent(Whole, D, H, initial_state="learned")
    names = [name for name, _ in whole.named_parameters() if name.startswith("initial")]
    assert names == ["initial_state_0", "initial_state_1"]
    assert (whole.output_size, layer.output_size) == (H + 1, 2 * H)
    assert "num_layers=2, bidirectional=True" in repr(layer)


@pytest.mark.parametrize("cell", OWN)
def test_copies_and_files(cell: Any) -> None:
    layer, batch = rl.nn.Recurrent(cell, D, H, num_layers=2, initial_state="learned"), a_batch()
    expected = results_of(layer(batch))
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert_same(results_of(other(batch)), expected, 0.0)
        with torch.no_grad():
            next(other.parameters()).add_(1.0)
            next(other.cells.parameters()).add_(1.0)
    assert_same(results_of(layer(batch)), expected, 0.0)
    fresh = rl.nn.Recurrent(cell, D, H, num_layers=2, initial_state="learned")
    fresh.load_state_dict(layer.state_dict())
    assert_same(results_of(fresh(batch)), expected, 0.0)


class Elman(nn.Module):
    """A float32 cell, whose state is bfloat16 under autocast."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        self.linear = nn.Linear(input_size + hidden_size, hidden_size)

    def step(self, x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = self.linear(torch.cat([x_t, state], 1)).tanh()
        return state, state


@pytest.mark.parametrize("lengths", [LENGTHS, [3, 2], [0], []])
def test_autocast(lengths: list[int], device: torch.device) -> None:
    """Dtypes do not depend on the schedule or on empty sequences."""
    layer = rl.nn.Recurrent(Elman, D, H, num_layers=2, bidirectional=True)
    batch = a_batch(lengths, torch.float32)
    expected = results_of(layer(batch, return_states=True))
    for schedule in SCHEDULES:
        with torch.autocast(device.type, dtype=torch.bfloat16), rl.use_backend(schedule=schedule):
            out, state, states = layer(batch, return_states=True)
        assert out.dtype is torch.bfloat16
        assert {state.dtype, *(part.dtype for part in states)} == {torch.float32}
        assert_same([part.float() for part in results_of((out, state, states))], expected, 0.05)
        (grad,) = gradients([out.values.float()], [batch.values])
        assert grad.dtype is torch.float32


class Turned(Elman):
    """With an operation that programs do not support."""

    def step(self, x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        output, state = super().step(x_t, state)
        return output.atan(), state


# torch.compile reads every tensor's .grad and suppresses the warning, unless it is an error.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_model() -> None:
    """A step that is no program runs outside of the graphs, so that no number of steps is compiled."""
    model = rl.nn.Recurrent(Turned, D, H, num_layers=2, bidirectional=True)
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter)
    compiled_by: list[int] = []
    # After the second batch, torch.compile knows which sizes vary; it compiles again only for sizes of 0 and 1.
    for counts in ([2, 4], [3, 0, 1, 5], *([(i * k) % 7 + k % 2 for k in range(1, 4 + i % 3)] for i in range(2, 11))):
        batch = a_batch(counts, torch.float32)
        seen = []
        for network in (compiled, model):
            results = results_of(network(batch))
            seen.append([*results, *gradients(results, [batch.values, *model.parameters()])])
        assert_same(seen[0], seen[1], 1e-5)
        compiled_by.append(counter.frame_count)
    assert len(set(compiled_by[1:])) == 1, compiled_by
    # One graph before the loop, one after it, and one for the results of the layer.
    assert compiled_by[0] <= 4
    assert compiled_by[1] <= 2 * compiled_by[0]


# -- wrong cells ------------------------------------------------------------------------------------------------------


def cell_with(**members: Any) -> Any:
    """Return Leaky with other members."""
    return type("Wrong", (Leaky,), members)


def resized(module: Any, input_size: int) -> Any:
    """Set another input_size on a module."""
    module.input_size = input_size
    return module


@pytest.mark.parametrize(
    ("cell", "kind", "says"),
    [
        (
            nn.Linear,
            ArgumentTypeError,
            r"cell must be .*got a Linear without step\(x_t, state\), input_size, hidden_size",
        ),
        (nn.LSTM, ArgumentTypeError, "cell must be .*a layer runs whole sequences.*, got a LSTM"),
        (rl.nn.GRU, ArgumentTypeError, "cell must be .*a layer runs whole sequences.*, got a GRU"),
        (lambda *_: 3, ArgumentTypeError, "cell must be .*got a int without"),
        (3, ArgumentTypeError, "cell must be a module with step.*, got a int"),
        (
            lambda i, h: Leaky(i, h + 1),
            ArgumentError,
            "cell must be .*=4.*, got a function that returns a Leaky with hidden_size=5",
        ),
        (
            lambda _, h: Leaky(D, h),
            ArgumentError,
            "cell must be .*=8.*, got a function that returns a Leaky with input_size=3",
        ),
        (cell_with(step=None), ArgumentTypeError, r"cell must be .*got a Wrong without step\(x_t, state\)"),
        (
            cell_with(initial_state=torch.zeros(4)),
            ArgumentTypeError,
            r"Wrong.initial_state must be .*a method.*, got a Tensor",
        ),
        (cell_with(prepare=3), ArgumentTypeError, r"Wrong.prepare must be a method.*, got a int"),
        (lambda size: Leaky(size, H), ArgumentTypeError, r"got <lambda>\(size\), with .*\(input_size, hidden_size\)"),
        (cell_with(output_size=0), ArgumentError, r"Wrong.output_size must be .*got 0"),
        (lambda i, h: resized(Leaky(i, h), -1), ArgumentError, "Leaky.input_size must be .*got -1"),
        (cell_with(initial_state=lambda *_: None), ArgumentTypeError, r"initial_state\(1\) must be .*got a NoneType"),
        (cell_with(initial_state=lambda *_: torch.zeros(9, H)), ArgumentTypeError, r"got shape \(9, 4\)"),
    ],
)
def test_no_cell(cell: Any, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        rl.nn.Recurrent(cell, D, H, num_layers=2, bidirectional=True)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: rl.nn.Recurrent(Leaky), "input_size must be .*got None"),
        (lambda: rl.nn.Recurrent(Leaky, D), "hidden_size must be .*got None"),
        (lambda: rl.nn.Recurrent(Leaky(D, H), num_layers=2), "cell must be .*got a module, with num_layers=2"),
        (
            lambda: rl.nn.Recurrent(Leaky(D, H), bidirectional=True),
            "cell must be .* bidirectional=True.*, got a module, ",
        ),
        (lambda: rl.nn.Recurrent(Leaky(D, H), 5), "input_size must be the cell's input_size, 3.*, got 5"),
        (lambda: rl.nn.Recurrent(Leaky, D, H, num_layers=0), "num_layers must be .*got 0"),
        (lambda: rl.nn.Recurrent(Leaky, D, H, dropout=2.0), "dropout must be .*got 2.0"),
        (lambda: rl.nn.Recurrent(Leaky, D, H, zoneout=0.1), "zoneout must be .*a user-defined cell.*, got 0.1"),
    ],
)
def test_arguments_that_do_not_fit(make: Any, says: str) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match=says):
        make()


@pytest.mark.parametrize(
    ("members", "kind", "says"),
    [
        ({"step": lambda *_: None}, ArgumentTypeError, r"Wrong.step must be .*a pair.*, got a NoneType"),
        ({"step": lambda _self, _x, s: s}, ArgumentTypeError, r"Wrong.step must be .*a pair.*, got a Tensor"),
        ({"step": lambda _, x, s: (x, s)}, ShapeError, r"Wrong.step: output must be .*\(3, 4\).*, got shape \(3, 3\)"),
        ({"step": lambda _, x, s: (s, x)}, ShapeError, r"Wrong.step: state must be .*\(3, 4\).*, got shape \(3, 3\)"),
        (
            {"step": lambda _self, _x, s: (s.mean(0, True), s)},
            ShapeError,
            r"output must be .*one row.*, got shape \(1, 4\)",
        ),
        (
            {"step": lambda _self, _x, s: (s, s.sum(0))},
            ShapeError,
            r"state must be .*one row per sequence.*, got shape \(4,\)",
        ),
        ({"step": lambda _self, _x, s: (s, (s, s))}, ShapeError, r"state must be .*a tensor of shape.*, got a tuple"),
        (
            {"prepare": lambda _self, v, _offsets: v[:2]},
            ShapeError,
            r"Wrong.prepare must be .*one row per element.*, got shape \(2, 3\)",
        ),
        ({"prepare": lambda *_: None}, ShapeError, r"Wrong.prepare must be .*got a NoneType"),
        (
            {"prepare": lambda _self, v, _offsets: v.long()},
            ArgumentTypeError,
            r"Wrong.prepare must be .*got torch.int64",
        ),
        ({"step": lambda _self, _x, s: (s.long(), s)}, ArgumentTypeError, r"step: output must be .*got torch.int64"),
        ({"step": lambda _self, _x, s: (s, s > 0)}, ArgumentTypeError, r"step: state must be .*got torch.bool"),
        (
            {
                "initial_state": lambda _, n: (torch.zeros(n, H, dtype=torch.float64),) * 2,
                "step": lambda _self, _x, s: (s[0], s[:1]),
            },
            ShapeError,
            r"Wrong.step: state must be 2 tensors.*, got 1 tensors",
        ),
        (
            {"initial_state": lambda _, n: torch.zeros(n, H)},
            ShapeError,
            r"initial_state \(h\) must be .*torch.float64.*, got torch.float32",
        ),
    ],
)
def test_wrong_cells(members: dict[str, Any], kind: type[Exception], says: str) -> None:
    layer = rl.nn.Recurrent(cell_with(**members), D, H)
    with pytest.raises(kind, match=says) as caught:
        layer(a_batch([3, 2, 4]))
    assert isinstance(caught.value, RaglaneError)
    assert caught.value.__cause__ is None
