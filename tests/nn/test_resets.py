"""Resets: a batch compared with its episodes, run one at a time."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import raglane as rl
from every_layer import (
    LAYERS,
    PAIRS,
    D,
    H,
    a_state,
    assert_same,
    build,
    gradients,
    parts,
    results_of,
)
from own_cells import Halved, Whole
from raglane.errors import ArgumentTypeError, ShapeError
from raglane.kernels.dispatch import BACKENDS
from raglane.nn.recurrent import call
from raglane.nn.recurrent.stack import one_or_tuple
from raglane.schedules import SCHEDULES
from strategies import sequences_of

# One list per sequence, 1 where an episode starts.
MARKS = [[0, 0, 1, 0, 1], [], [1, 0, 1], [0], [], [0, 1], [1]]


def ragged_marks(marks: list[list[int]]) -> rl.Ragged:
    return rl.Ragged([torch.tensor(part, dtype=torch.bool) for part in marks])


def episodes_alone(
    layer: Any, sequences: list[Tensor], marks: list[list[int]], hx: Any
) -> list[Tensor]:
    """Run each episode as its own batch; return the outputs and the final states of the
    sequences.
    """
    outputs, finals = [], []
    reverse_rows = (
        torch.arange(layer.num_layers * (2 if layer.bidirectional else 1))
        % (1 + layer.bidirectional)
        == 1
    )
    for row, (sequence, own_marks) in enumerate(zip(sequences, marks, strict=True)):
        pieces = list(
            torch.tensor_split(sequence, [t for t, mark in enumerate(own_marks) if mark and t > 0])
        )
        left: list[list[Tensor]] = []
        for number, piece in enumerate(pieces):
            batch = rl.Ragged([piece])
            own = layer._own_initial(batch) if layer._has_own_initial() else a_state(layer, 1)
            state = fresh = [part[:, 0] * layer._has_own_initial() for part in parts(own)]
            if hx is not None:
                # hx enters at the first piece, in reverse direction at the last.
                reads_forward = number == 0 and not (len(own_marks) and own_marks[0])
                given = torch.where(
                    reverse_rows,
                    torch.tensor(number == len(pieces) - 1),
                    torch.tensor(reads_forward),
                )
                state = [
                    torch.where(given.unsqueeze(1), part[:, row], own)
                    for part, own in zip(parts(hx), fresh, strict=True)
                ]
            out, final = layer(batch, one_or_tuple(tuple(part.unsqueeze(1) for part in state)))
            outputs.append(out.values)
            left.append(list(parts(final)))
        finals.append(
            [
                torch.where(reverse_rows.view(-1, 1, 1), first, last)
                for first, last in zip(left[0], left[-1], strict=True)
            ]
        )
    return [torch.cat(outputs), *(torch.cat(columns, 1) for columns in zip(*finals, strict=True))]


def compare(layer: Any, marks: list[list[int]], with_hx: bool) -> None:
    sequences = sequences_of([len(part) for part in marks], requires_grad=True)
    hx = a_state(layer, len(marks)) if with_hx else None
    ours = results_of(layer(rl.Ragged(sequences), hx, resets=ragged_marks(marks)))
    theirs = episodes_alone(layer, sequences, marks, hx)
    assert_same(ours, theirs, what="result")
    wanted = [*sequences, *(parts(hx) if with_hx else ()), *layer.parameters()]
    if any(result.requires_grad for result in theirs):
        assert_same(gradients(ours, wanted), gradients(theirs, wanted), 1e-11, "gradient")


class Affine(nn.Module):
    """An initial state from the first element and the length of each sequence."""

    def __init__(self, rows: int, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.rows, self.sizes = rows, sizes
        self.linear = nn.Linear(4, rows * sum(sizes), dtype=torch.float64)

    def forward(self, batch: rl.Ragged) -> Any:
        seen = torch.cat([batch.first(), batch.lengths.unsqueeze(1).to(batch.dtype)], 1)
        made = self.linear(seen).view(len(batch), self.rows, -1).transpose(0, 1)
        return one_or_tuple(torch.split(made, list(self.sizes), 2))


@pytest.mark.parametrize("with_hx", [False, True])
@pytest.mark.parametrize("name", [*LAYERS, "user-defined"])
def test_every_layer(name: str, with_hx: bool) -> None:
    options: dict[str, Any] = {"num_layers": 2, "bidirectional": with_hx}
    compare(
        build(name, **options) if name in LAYERS else rl.nn.Recurrent(Whole, D, H, **options),
        MARKS,
        with_hx,
    )


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name in ("program", "reference")])
@pytest.mark.parametrize("name", [*LAYERS, "user-defined"])
def test_resets_in_the_steps_of_a_cell(
    monkeypatch: pytest.MonkeyPatch, name: str, backend: str
) -> None:
    """As on a GPU, for which splitting a batch would wait."""
    monkeypatch.setattr(call, "_resets_in_steps", lambda *_: True)
    options: dict[str, Any] = {"num_layers": 2, "bidirectional": True, "backend": backend}
    layer = build(name, **options) if name in LAYERS else rl.nn.Recurrent(Halved, D, H, **options)
    for marks, with_hx in ((MARKS, True), ([[1, 1, 1], []], False)):
        compare(layer, marks, with_hx)


@pytest.mark.parametrize(("schedule", "backend"), PAIRS)
def test_every_schedule_and_backend(schedule: str, backend: str) -> None:
    compare(
        build("lstm", 2, bidirectional=True, schedule=schedule, backend=backend),
        MARKS,
        with_hx=True,
    )


@pytest.mark.parametrize("with_hx", [False, True])
@pytest.mark.parametrize("initial_state", ["learned", "lengths", "module"])
@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_initial_states_of_episodes(name: str, initial_state: Any, with_hx: bool) -> None:
    """Each episode has its own initial state, learned or computed from that episode."""
    if initial_state == "module":
        initial_state = Affine(4, build(name).cell.state_sizes(H))
    layer = build(name, 2, bidirectional=True, initial_state=initial_state)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter))
    compare(layer, MARKS, with_hx)


@settings(max_examples=12)
@given(
    marks=st.lists(st.lists(st.integers(0, 1), max_size=6), min_size=1, max_size=5),
    with_hx=st.booleans(),
    both=st.booleans(),
    seed=st.integers(0, 2**30),
)
@example(marks=[[1, 1, 1], [], [1]], with_hx=True, both=True, seed=0)
@example(marks=[[], [1, 0]], with_hx=True, both=False, seed=0)
def test_any_marks(marks: list[list[int]], with_hx: bool, both: bool, seed: int) -> None:
    torch.manual_seed(seed)
    compare(build("gru", 2, bidirectional=both), marks, with_hx)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nothing_crosses_a_reset(schedule: str) -> None:
    """Neither a NaN nor a gradient, in either direction."""
    layer = build("gru", 1, bidirectional=True, schedule=schedule)
    sequence = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    marks = ragged_marks([[0, 0, 0, 1, 0, 0]])
    clean = layer(rl.Ragged.from_flat(sequence, lengths=[6]), resets=marks)[0]
    for bad, good in ((slice(0, 3), slice(3, 6)), (slice(3, 6), slice(0, 3))):
        (grad,) = gradients([clean.values[good]], [sequence])
        assert bool(grad[good].any())
        assert not grad[bad].any()
        values = sequence.detach().clone()
        values[bad] = torch.nan
        out, _ = layer(rl.Ragged.from_flat(values.requires_grad_(), lengths=[6]), resets=marks)
        assert_same([out.values[good]], [clean.values[good]])
        (grad,) = gradients([out.values[good]], [values])
        assert bool(grad[good].isfinite().all())


def test_a_reset_at_the_first_element_ignores_hx() -> None:
    layer, marks = build("lstm"), ragged_marks([[1]])
    assert layer(rl.Ragged(sequences_of([1]))[:0], resets=marks[:0])[1][0].shape == (1, 0, H)
    batch = rl.Ragged(sequences_of([3, 2]))
    hx = tuple(torch.randn(1, 2, H, dtype=torch.float64) for _ in range(2))
    for part in hx:
        part[:, 0] = torch.nan
        part.requires_grad_()
    marks = ragged_marks([[1, 0, 0], [0, 0]])
    results = results_of(layer(batch, hx, resets=marks))
    assert_same(
        [results[0][:3], results[1][:, :1], results[2][:, :1]],
        results_of(layer(rl.Ragged([batch[0]]))),
    )
    for grad in gradients(results, hx):
        assert not grad[:, 0].any()
        assert bool(grad[:, 1].all())


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("name", ["lstm", "sru"])
def test_every_kind_of_input(name: str, first: bool) -> None:
    layer = build(name, 2, bidirectional=True, batch_first=first)
    batch, marks = (
        rl.Ragged(sequences_of([4, 1, 5])),
        ragged_marks([[0, 1, 0, 1], [1], [0, 0, 0, 1, 0]]),
    )
    hx = a_state(layer, 3)
    expected = results_of(layer(batch, hx, resets=marks))

    padded, told = batch.to_padded(first, total_length=6)
    # Marks in the padding have no effect.
    padded_marks, _ = marks.to_padded(first, padding_value=True, total_length=6)
    for own_marks in (padded_marks, marks):
        answer = results_of(layer(padded, hx, lengths=told, resets=own_marks))
        assert answer[0].shape[:2] == padded.shape[:2]
        answer[0] = rl.Ragged.from_padded(answer[0], told, first).values
        assert_same(answer, expected)

    for packed_marks in (marks.to_packed(), marks):
        out, state = layer(batch.to_packed(), hx, resets=packed_marks)
        assert isinstance(out, rl.packing.PackedSequence)
        assert_same([rl.Ragged.from_packed(out).values, *parts(state)], expected)

    single = results_of(
        layer(batch[2], one_or_tuple(tuple(part[:, 2] for part in parts(hx))), resets=marks[2])
    )
    assert_same(single, [expected[0][5:], *(part[:, 2] for part in expected[1:])])

    equal, equal_marks = rl.Ragged(sequences_of([4, 4])), ragged_marks([[0, 1, 0, 1], [1, 0, 0, 0]])
    out, *state = results_of(
        layer(equal.to_padded(first)[0], resets=equal_marks.to_padded(first)[0])
    )
    assert_same(
        [rl.Ragged.from_padded(out, [4, 4], first).values, *state],
        results_of(layer(equal, resets=equal_marks)),
    )


def test_autocast_with_states_of_two_dtypes(device: torch.device) -> None:
    """The states of a module are bfloat16, and hx is float32."""
    made = rl.nn.GRU(3, H, initial_state=Affine(1, (H,)).float())
    batch = rl.Ragged(sequences_of([3, 2], dtype=torch.float32))
    marks = ragged_marks([[0, 1, 0], [1, 0]])
    expected = made(batch, torch.ones(1, 2, H), resets=marks)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        out, _ = made(batch, torch.ones(1, 2, H), resets=marks)
    torch.testing.assert_close(out.values.float(), expected[0].values, rtol=0, atol=0.03)


# torch.compile reads every tensor's .grad and suppresses the warning, unless it is an error.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled(device: torch.device) -> None:
    """The number of episodes is known only at run time, so the graph breaks there."""
    layer = build("gru", bidirectional=True)
    compiled: Any = torch.compile(layer, backend="eager", dynamic=True)
    for marks in ([[0, 1, 0], [1, 0]], [[0, 1, 0, 1], [1, 0, 1], [0]]):
        batch = rl.Ragged(sequences_of([len(part) for part in marks]))
        assert_same(
            results_of(compiled(batch, resets=ragged_marks(marks))),
            results_of(layer(batch, resets=ragged_marks(marks))),
        )


@pytest.mark.parametrize(
    ("resets", "kind", "says"),
    [
        ([True, False], ArgumentTypeError, "resets must be .*a Ragged.*, got a list"),
        (
            torch.zeros(2, 3, dtype=torch.bool),
            ArgumentTypeError,
            "resets must be .*a Ragged.*, got a Tensor",
        ),
        (
            rl.Ragged([torch.zeros(3), torch.zeros(2)]),
            ArgumentTypeError,
            "resets must be .*torch.float32",
        ),
        (
            ragged_marks([[0, 0], [0, 0, 0]]),
            ShapeError,
            r"resets must be .*\[3, 2\].* lengths \[2, 3\]",
        ),
        (
            ragged_marks([[0] * 3, [0] * 2]).map(lambda marks: marks.unsqueeze(1)),
            ShapeError,
            r"shape \(1,\)",
        ),
    ],
)
def test_resets_that_do_not_fit(resets: Any, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        build("gru")(rl.Ragged(sequences_of([3, 2])), resets=resets)


@pytest.mark.parametrize("shape", [(3, 3), (3, 2, 1), (3,)])
def test_padded_resets_of_another_shape(shape: tuple[int, ...]) -> None:
    inputs = torch.zeros(3, 2, 3, dtype=torch.float64)
    for lengths in (None, torch.tensor([3, 2])):
        with pytest.raises(ShapeError, match=r"resets must be .* \(3, 2\).*, got shape .*"):
            build("gru")(inputs, lengths=lengths, resets=torch.zeros(shape, dtype=torch.bool))


class _Counting(torch.nn.Module):
    """A cell whose own initial state is not zeros."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        self.linear = torch.nn.Linear(input_size, hidden_size)

    def initial_state(self, count: int) -> Tensor:
        return torch.full((count, self.hidden_size), 2.0, dtype=torch.float64)

    def step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = 0.5 * state + self.linear(x)
        return state, state


@pytest.mark.parametrize("initial_state", ["zeros", "learned"])
@pytest.mark.parametrize(
    "make",
    [
        partial(rl.nn.LSTM, num_layers=2),
        partial(rl.nn.GRU, batch_first=True),
        rl.nn.SLSTM,
        partial(rl.nn.Recurrent, _Counting),
    ],
)
@pytest.mark.parametrize("is_single", [False, True])
def test_steps_with_resets(make: Any, initial_state: str, is_single: bool) -> None:
    """Each step with resets is that of a whole call with resets, also after a state of NaN."""
    layer = make(3, 4, initial_state=initial_state).double()
    for parameter in layer.parameters():
        torch.nn.init.uniform_(parameter, -1, 1)
    steps = torch.randn(6, 3, dtype=torch.float64)
    marks = torch.tensor([False, False, True, False, True, True])
    whole, last = layer(rl.Ragged([steps]), resets=rl.Ragged([marks]))
    state = None
    for step, (x, done) in enumerate(zip(steps, marks, strict=True)):
        rows = (x, done) if is_single else (x[None], done[None])
        if done and state is not None:
            parts = state if isinstance(state, tuple) else (state,)
            parts = tuple(part.detach() * float("nan") for part in parts)
            state = parts if isinstance(state, tuple) else parts[0]
        out, state = layer.step(rows[0], state, resets=rows[1])
        torch.testing.assert_close(out.reshape(-1), whole[0][step])
    ours, theirs = (part if isinstance(part, tuple) else (part,) for part in (state, last))
    for own, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own.reshape(expected.shape), expected)
    parameters = list(layer.parameters())
    gradients = [
        torch.autograd.grad(
            torch.cat(parts, -1).sum(), parameters, allow_unused=True, materialize_grads=True
        )
        for parts in (ours, theirs)
    ]
    torch.testing.assert_close(*gradients)


def test_wrong_resets_of_a_step() -> None:
    layer = rl.nn.GRU(3, 4)
    _, state = layer.step(torch.randn(2, 3))
    with pytest.raises(ArgumentTypeError, match="resets must be bools, True where an episode"):
        layer.step(torch.randn(2, 3), state, resets=torch.tensor([0.0, 1.0]))
    with pytest.raises(ShapeError, match=r"resets must be one bool per stream, of shape \(2,\)"):
        layer.step(torch.randn(2, 3), state, resets=torch.tensor([True]))
    layer = rl.nn.GRU(3, 4, initial_state="lengths")
    with pytest.raises(ArgumentTypeError, match="initial_state must be 'zeros' or 'learned'"):
        layer.step(torch.randn(2, 3), state, resets=torch.tensor([True, False]))
