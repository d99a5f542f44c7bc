"""``rl.nn.Recurrent`` compared with a naive loop and with torch's layers, its calls, and as a
module.
"""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn
from torch.nn.utils import prune

import raglane as rl
from every_layer import (
    LENGTHS,
    PAIRS,
    D,
    H,
    a_batch,
    a_state,
    assert_nan_stays_in_its_sequence,
    assert_same,
    assert_same_for_every_input,
    gradients,
    parts,
    results_of,
)
from own_cells import OWN, Fixed, Halved, Leaky, Moved, Whole, naive
from raglane.errors import ArgumentError, ArgumentTypeError, DispatchError, ShapeError
from raglane.native import missing_kernels
from raglane.schedules import SCHEDULES
from strategies import sequences_of


def compare(layer: Any, lengths: list[int], with_hx: bool = False) -> None:
    """Compare outputs, final states and all gradients with the naive loop."""
    sequences = sequences_of(lengths, (layer.input_size,), requires_grad=True)
    hx = a_state(layer, len(lengths)) if with_hx else None
    ours = results_of(layer(rl.Ragged(sequences), hx))
    outputs, finals = naive(layer, sequences, hx)
    theirs = [torch.cat(outputs), *finals]
    assert_same(ours, theirs, what="result")
    wanted = [*sequences, *(parts(hx) if with_hx else ()), *layer.parameters()]
    assert_same(gradients(ours, wanted), gradients(theirs, wanted), 1e-11, "gradient")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("cell", OWN)
def test_a_naive_loop(cell: Any, schedule: Any) -> None:
    for lengths, both in ((LENGTHS, True), ([0], False), ([1], True)):
        layer = rl.nn.Recurrent(cell, D, H, num_layers=2, bidirectional=both, schedule=schedule)
        compare(layer, lengths, with_hx=both)


@pytest.mark.parametrize("cell", [*OWN, lambda *_: Fixed()])
def test_an_instance(cell: Any) -> None:
    module: Any = cell(D, H)
    layer = rl.nn.Recurrent(module)
    assert (layer.input_size, layer.hidden_size) == (module.input_size, module.hidden_size)
    assert layer.cells[0] is module
    compare(layer, LENGTHS)


def test_weights_that_pruning_computes() -> None:
    """A hook of the cell's call computes them, also from weights that were changed or loaded."""
    layer, (x,), h = (
        rl.nn.Recurrent(nn.GRUCell, D, H).double(),
        sequences_of([5], (D,)),
        torch.zeros(H).double(),
    )
    cell: Any = prune.l1_unstructured(layer.cells[0], "weight_hh", 0.5)
    with torch.no_grad():
        cell.weight_hh_orig.mul_(2)
    out = layer(x)[0]
    assert_same([out], [torch.stack([h := cell(row, h) for row in x])])


@pytest.mark.parametrize("cell", [Leaky, Whole])
def test_gradients_of_gradients(cell: Any) -> None:
    layer = rl.nn.Recurrent(cell, D, 2, bidirectional=True)
    parameters = dict(layer.named_parameters())

    def function(values: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        own, batch = (
            dict(zip(parameters, weights, strict=True)),
            rl.Ragged.from_flat(values, lengths=[2, 0, 1]),
        )
        return tuple(results_of(torch.func.functional_call(layer, own, (batch,))))

    values = torch.randn(3, D, dtype=torch.float64, requires_grad=True)
    others = [parameter.detach().clone().requires_grad_() for parameter in parameters.values()]
    assert torch.autograd.gradcheck(function, (values, *parameters.values()), fast_mode=True)
    for weights in (parameters.values(), others):
        assert torch.autograd.gradgradcheck(function, (values, *weights), fast_mode=True)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("cell", [Leaky, Whole])
def test_a_nan_stays_in_its_sequence(cell: Any, schedule: Any) -> None:
    assert_nan_stays_in_its_sequence(
        rl.nn.Recurrent(cell, D, H, num_layers=2, bidirectional=True, schedule=schedule)
    )


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_step_may_change_its_arguments_in_place(backend: Any) -> None:
    class Over(nn.Module):
        input_size = hidden_size = 4

        def prepare(self, values: Tensor, offsets: Tensor) -> Tensor:  # noqa: ARG002
            return values.mul_(2.0)

        def step(self, x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            state = state.mul_(0.5).add_(x_t.add_(1.0))
            return state, state

    values, hx = torch.ones(4, 4), torch.zeros(1, 2, 4)
    for recorded in (False, True):
        given = values.clone().requires_grad_(recorded), hx.clone().requires_grad_(recorded)
        out, state = rl.nn.Recurrent(Over(), backend=backend)(
            rl.Ragged.from_flat(given[0], lengths=[3, 1]), given[1]
        )
        assert out.values[:, 0].tolist() == [3.0, 4.5, 5.25, 3.0]
        assert state[0, :, 0].tolist() == [5.25, 3.0]
        assert torch.equal(given[0], values)
        assert torch.equal(given[1], hx)


TORCHS: list[tuple[Any, Any]] = [(nn.LSTMCell, nn.LSTM), (nn.GRUCell, nn.GRU), (nn.RNNCell, nn.RNN)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize(("cell", "theirs"), TORCHS)
def test_torchs_cells_are_torchs_layers(cell: Any, theirs: Any, both: bool, bias: bool) -> None:
    layer: Any = rl.nn.Recurrent(
        lambda *sizes: cell(*sizes, bias=bias, dtype=torch.float64),
        D,
        H,
        num_layers=2,
        bidirectional=both,
    )
    other: Any = theirs(D, H, 2, bias=bias, bidirectional=both, dtype=torch.float64)
    suffixes = [f"_l{depth}{side}" for depth in range(2) for side in ("", "_reverse")[: 1 + both]]
    weights = []
    with torch.no_grad():
        for module, suffix in zip(layer.cells, suffixes, strict=True):
            for name, weight in module.named_parameters():
                getattr(other, name + suffix).copy_(weight)
                weights.append((weight, getattr(other, name + suffix)))
    batch = rl.Ragged(sequences_of([3, 1, 5, 2]))
    wanted = None
    for schedule, backend in PAIRS:
        with rl.use_backend(schedule=schedule, backend=backend):
            ours = results_of(layer(batch))
        packed, state = other(batch.to_packed())
        theirs_results = [rl.Ragged.from_packed(packed).values, *parts(state)]
        assert_same(ours, theirs_results)
        wanted = wanted or gradients(theirs_results, [weight for _, weight in weights])
        assert_same(gradients(ours, [weight for weight, _ in weights]), wanted, 1e-11)


@pytest.mark.parametrize(("cell", "theirs"), TORCHS)
def test_torchs_cells_run_on_the_fast_kernels(cell: Any, theirs: Any) -> None:
    batch = rl.Ragged([torch.randn(2, D)])
    fastest = rl.explain(getattr(rl.nn, theirs.__name__)(D, H), batch).backend
    assert fastest == ("torch" if missing_kernels() else "cpu")
    assert rl.explain(rl.nn.Recurrent(cell, D, H), batch).backend == fastest
    assert rl.explain(rl.nn.Recurrent(cell(D, H)), batch).backend == fastest
    other = rl.nn.Recurrent({nn.LSTMCell: Moved}.get(cell, Halved), D, H)
    slower = "reference" if missing_kernels() else "program"
    assert rl.explain(other, batch.to(torch.float64)).backend == slower


def test_torchs_cells_can_be_regularised() -> None:
    options: dict[str, Any] = {"zoneout": (0.1, 0.2), "state_dropout": 0.3, "weight_dropout": 0.2}
    layer = rl.nn.Recurrent(nn.LSTMCell(D, H, dtype=torch.float64), **options)
    other = rl.nn.LSTM(D, H, dtype=torch.float64, **options)
    other.load_state_dict(
        {f"{key.removeprefix('cells.0.')}_l0": value for key, value in layer.state_dict().items()}
    )
    batch, seen = a_batch(), []
    for network in (layer, other):
        torch.manual_seed(3)
        seen.append(results_of(network(batch)))
    assert_same(seen[0], seen[1], 0.0)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("cell", [Leaky, Whole])
def test_every_kind_of_input(cell: Any, first: bool) -> None:
    assert_same_for_every_input(
        rl.nn.Recurrent(cell, D, H, num_layers=2, bidirectional=True, batch_first=first)
    )


def test_summary() -> None:
    layer = rl.nn.Recurrent(Whole, D, H, num_layers=2, bidirectional=True)
    batch = rl.Ragged(sequences_of([4, 0, 5]))
    out, state = layer(batch)
    size = H + 1
    expected = torch.cat([out.last()[:, :size], out.first()[:, size:]], 1)
    assert_same([layer.final(out, state)], [expected])
    assert not expected[1].any()
    assert_same(
        [layer.final(*layer(batch.to_packed())), layer.final(*layer(batch[2]))],
        [expected, expected[2]],
    )
    padded, told = batch.to_padded(batch_first=False)
    for wrong, says in (
        (layer(padded, lengths=told), "a padded tensor"),
        (layer(batch, return_output=False), "NoneType"),
    ):
        with pytest.raises(ArgumentTypeError, match=f"out must be .*got .*{says}"):
            layer.final(*wrong)
    torchs = rl.nn.Recurrent(nn.LSTMCell(D, H, dtype=torch.float64))
    out, state = torchs(batch)
    assert_same([torchs.final(None, state)], [out.last()])


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


def test_names_of_parameters() -> None:
    layer = rl.nn.Recurrent(Leaky, D, H, num_layers=2, bidirectional=True)
    assert list(layer.state_dict()) == [
        f"cells.{i}.linear.{part}" for i in range(4) for part in ("weight", "bias")
    ]
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


class Elman(Leaky):
    """In float32, its state is bfloat16 under autocast."""

    def step(self, x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = self.linear(torch.cat([x_t, state], 1)).tanh()
        return state, state


@pytest.mark.parametrize("lengths", [LENGTHS, [3, 2], [0], []])
def test_autocast(lengths: list[int], device: torch.device) -> None:
    """Dtypes do not depend on the schedule or on empty sequences."""
    layer = rl.nn.Recurrent(Elman, D, H, num_layers=2, bidirectional=True).float()
    batch = a_batch(lengths, torch.float32)
    expected = results_of(layer.with_states(batch))
    for schedule in SCHEDULES:
        with torch.autocast(device.type, dtype=torch.bfloat16), rl.use_backend(schedule=schedule):
            out, state, states = layer.with_states(batch)
        assert out.dtype is torch.bfloat16
        assert {state.dtype, *(part.dtype for part in states)} == {torch.float32}
        assert_same([part.float() for part in results_of((out, state, states))], expected, 0.05)
        (grad,) = gradients([out.values.float()], [batch.values])
        assert grad.dtype is torch.float32


# torch.compile reads every tensor's .grad and suppresses the warning, unless it is an error.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_model() -> None:
    """A step that is no program, here for its atan, runs outside of the graphs: no number of steps
    is compiled.
    """
    model = rl.nn.Recurrent(Leaky, D, H, num_layers=2, bidirectional=True).float()
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter)
    compiled_by: list[int] = []
    # After the second batch, torch.compile knows which sizes vary; it compiles again only for sizes
    # of 0 and 1.
    for counts in (
        [2, 4],
        [3, 0, 1, 5],
        *([(i * k) % 7 + k % 2 for k in range(1, 4 + i % 3)] for i in range(2, 11)),
    ):
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


def cell_with(**members: Any) -> Any:
    """Return Leaky with other members."""
    return type("Wrong", (Leaky,), members)


@pytest.mark.parametrize(
    ("cell", "kind", "says"),
    [
        (
            nn.Linear,
            ArgumentTypeError,
            r"cell must .*Linear without step\(x_t, state\), input_size, hidden_size",
        ),
        (nn.LSTM, ArgumentTypeError, "cell must be .*a layer runs whole sequences.*, got a LSTM"),
        (lambda *_: 3, ArgumentTypeError, "cell must be .*got a int without"),
        (
            lambda i, h: Leaky(i, h + 1),
            ArgumentError,
            "=4.*, got a function that returns a Leaky with hidden_size=5",
        ),
        (
            cell_with(step=None),
            ArgumentTypeError,
            r"cell must be .*got a Wrong without step\(x_t, state\)",
        ),
        (
            cell_with(initial_state=torch.zeros(4)),
            ArgumentTypeError,
            "initial_state must be a method.*, got a Tensor",
        ),
        (
            lambda size: Leaky(size, H),
            ArgumentTypeError,
            r"\(input_size, hidden_size\).*got <lambda>\(size\), with",
        ),
        (cell_with(output_size=0), ArgumentError, r"Wrong.output_size must be .*got 0"),
        (
            cell_with(initial_state=lambda *_: None),
            ArgumentTypeError,
            r"initial_state\(1\) must be .*got a NoneType",
        ),
        (
            cell_with(initial_state=lambda *_: torch.zeros(9, H)),
            ArgumentTypeError,
            r"got shape \(9, 4\)",
        ),
    ],
)
def test_no_cell(cell: Any, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        rl.nn.Recurrent(cell, D, H, num_layers=2, bidirectional=True)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: rl.nn.Recurrent(Leaky), "input_size must be .*got None"),
        (
            lambda: rl.nn.Recurrent(Leaky(D, H), num_layers=2),
            "cell must be .*got a module, with num_layers=2",
        ),
        (
            lambda: rl.nn.Recurrent(Leaky(D, H), 5),
            "input_size must be the cell's input_size, 3.*, got 5",
        ),
        (lambda: rl.nn.Recurrent(Leaky, D, H, num_layers=0), "num_layers must be .*got 0"),
        (
            lambda: rl.nn.Recurrent(Leaky, D, H, zoneout=0.1),
            "zoneout must be .*a user-defined cell.*, got 0.1",
        ),
    ],
)
def test_arguments_that_do_not_fit(make: Any, says: str) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match=says):
        make()


@pytest.mark.parametrize(
    ("members", "kind", "says"),
    [
        (
            {"step": lambda *_: None},
            ArgumentTypeError,
            r"Wrong.step must be .*a pair.*, got a NoneType",
        ),
        (
            {"step": lambda _, x, s: (x, s)},
            ShapeError,
            r"step: output must be .*\(R, 4\).*, got shape \(R, 3\)",
        ),
        (
            {"step": lambda _self, _x, s: (s.mean(0, True), s)},
            ShapeError,
            r"must be .*one row.*, got shape \(1, 4\)",
        ),
        (
            {"step": lambda _self, _x, s: (s, (s, s))},
            ShapeError,
            r"state must be one tensor, .*, got a tuple of 2 tensors",
        ),
        (
            {
                "initial_state": lambda _, n: torch.zeros(n, H, dtype=torch.float64),
                "step": lambda _self, _x, s: (s, (s, s, s)),
            },
            ShapeError,
            r"state must be one tensor, .*, got a tuple of 3 tensors. Return as many",
        ),
        ({"step": lambda _self, _x, s: s.h}, AttributeError, "has no attribute 'h'"),
        (
            {"prepare": lambda _self, v, _: v[:2]},
            ShapeError,
            r"prepare must be .*one row per.*, got shape \(2, 3\)",
        ),
        (
            {"prepare": lambda _self, v, _offsets: v.long()},
            ArgumentTypeError,
            r"prepare must be .*got torch.int64",
        ),
        (
            {"step": lambda _self, _x, s: (s, s > 0)},
            ArgumentTypeError,
            r"step: state must be .*got torch.bool",
        ),
        (
            {
                "initial_state": lambda _, n: (torch.zeros(n, H, dtype=torch.float64),) * 2,
                "step": lambda _self, _x, s: (s[0], s[:1]),
            },
            ShapeError,
            r"Wrong.step: state must be a tuple of 2 tensors.*, got one tensor",
        ),
        (
            {"initial_state": lambda _, n: torch.zeros(n, H)},
            ShapeError,
            "must be .*torch.float64.*, got torch.float32",
        ),
    ],
)
def test_wrong_cells(members: dict[str, Any], kind: type[Exception], says: str) -> None:
    layer, batch = rl.nn.Recurrent(cell_with(**members), D, H), a_batch([3, 2, 4])
    for backend in ("auto", "reference"):
        layer.backend = backend
        for call in (layer, lambda given: rl.explain(layer, given)):
            with pytest.raises(kind, match=says) as caught:
                call(batch)
            assert caught.value.__cause__ is None
            assert ("initial_state" in str(getattr(caught.value, "__notes__", ""))) == (
                kind is AttributeError
            )


def states(count: int) -> Callable[..., Any]:
    """Return an initial_state of one tensor, or of a tuple of several."""
    return lambda _, n: (
        torch.zeros(n, H, dtype=torch.float64)
        if count == 1
        else (torch.zeros(n, H, dtype=torch.float64),) * count
    )


@pytest.mark.parametrize("lengths", [[3, 2, 4], [3, 2, 4, 1], [5, 1, 1, 1, 1, 1]])
@pytest.mark.parametrize(
    ("initial", "got"),
    [
        ({}, "none"),
        ({"initial_state": states(1)}, "one tensor"),
        ({"initial_state": states(2)}, "a tuple of 2 tensors"),
        ({"initial_state": states(5)}, "a tuple of 5 tensors"),
    ],
)
def test_a_step_that_unpacks_other_states(
    initial: dict[str, Any], got: str, lengths: list[int]
) -> None:
    class Four(cell_with(**initial)):  # type: ignore[misc]
        def step(self, _: Tensor, state: Any) -> Any:
            c, n, h, m = state
            return h, (c, n, h, m)

    layer = rl.nn.Recurrent(Four, D, H)
    says = (
        rf"Four.initial_state must be a method that returns a tuple of 4 tensors, .*, got {got}\."
    )
    if len(lengths) == 4 and got in ("none", "one tensor"):  # the tensor has four rows
        says = r"Four.step: state must be one tensor, .*, got a tuple of 4 tensors"
    for call in (layer, lambda batch: rl.explain(layer, batch)):
        with pytest.raises((ArgumentTypeError, ShapeError), match=says):
            call(a_batch(lengths))


def test_a_note_tells_the_states_of_a_step_that_raises() -> None:
    layer = rl.nn.Recurrent(cell_with(initial_state=states(2)), D, H)
    with pytest.raises(TypeError) as caught:
        layer(a_batch([3, 2]))
    assert caught.value.__notes__ == [
        "The state is a tuple of 2 tensors, as initial_state returns it"
    ]


@pytest.mark.parametrize(
    ("member", "says"),
    [
        ({"initial_state": lambda _: torch.zeros(1, H)}, r"initial_state\(batch_size\)"),
        ({"step": lambda _self, x: x}, r"step\(x_t, state\)"),
        ({"prepare": lambda _self, x: x}, r"prepare\(values, offsets\)"),
    ],
)
def test_methods_with_other_parameters(member: dict[str, Any], says: str) -> None:
    name = next(iter(member))
    with pytest.raises(ArgumentTypeError, match=rf"Wrong.{name} must be a method {says}, got"):
        rl.nn.Recurrent(cell_with(**member), D, H)


class Counted(Leaky):
    calls = 0

    def step(self, x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        return super().step(x_t + torch.randn_like(x_t), state)


def test_an_explanation_changes_neither_a_cell_nor_random_numbers() -> None:
    layer: Any = rl.nn.Recurrent(Counted, D, H)
    batch = a_batch([3, 2])
    before = torch.get_rng_state()
    assert rl.explain(layer, batch).backend == "reference"
    assert layer.cells[0].calls == 0
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.skipif(bool(missing_kernels()), reason="programs run on the cpu kernels")
def test_a_refusal_names_its_reason_first() -> None:
    class Noisy(Leaky):
        def step(self, x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            return super().step(x_t + torch.randn_like(x_t), state)

    layer, batch = rl.nn.Recurrent(Noisy, D, H), a_batch([3, 2])
    refused = "the cell 'module Noisy' cannot become a program: it draws random numbers inside"
    choice = rl.explain(layer, batch)
    assert choice.reason.startswith(refused)
    layer.backend = "program"
    with pytest.raises(DispatchError) as caught:
        layer(batch)
    assert f"a pair that runs this layer ({refused}" in str(caught.value)
    for text in (choice.reason, str(caught.value)):
        assert "Triton" not in text
        assert "torch" not in text
        assert "triton" not in text
    assert "(packed, reference)" in str(caught.value)
