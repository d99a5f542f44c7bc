"""``rl.nn.Recurrent`` against a naive loop and torch's layers, and every way to call it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import raglane as rl
from every_layer import LENGTHS, PAIRS, D, H, a_batch, a_state, assert_same, gradients, parts, results_of
from looped import looped
from own_cells import OWN, Fixed, Halved, Leaky, Listed, Moved, Whole, naive
from raglane.cells import CELLS
from raglane.errors import ArgumentTypeError
from raglane.native import missing_kernels
from raglane.schedules import SCHEDULES
from strategies import lengths, sequences_of


def compare(layer: Any, lengths: list[int], with_hx: bool = False) -> None:
    """Outputs, final states and all gradients against the naive loop."""
    sequences = sequences_of(lengths, (layer.input_size,), requires_grad=True)
    hx = a_state(layer, len(lengths)) if with_hx else None
    ours = results_of(layer(rl.Ragged(sequences), hx))
    outputs, finals = naive(layer, sequences, hx)
    theirs = [torch.cat(outputs), *finals]
    assert_same(ours, theirs, what="result")
    wanted = [*sequences, *(parts(hx) if with_hx else ()), *layer.parameters()]
    assert_same(gradients(ours, wanted), gradients(theirs, wanted), 1e-11, "gradient")


@looped("with_hx", [False, True])
@looped("both", [False, True])
@looped("cell", OWN)
def test_a_naive_loop(cell: Any, both: bool, with_hx: bool) -> None:
    compare(rl.nn.Recurrent(cell, D, H, num_layers=2, bidirectional=both), LENGTHS, with_hx)


@looped("schedule", SCHEDULES)
@looped("cell", OWN)
def test_a_naive_loop_under_every_schedule(cell: Any, schedule: str) -> None:
    compare(rl.nn.Recurrent(cell, D, H, num_layers=2, bidirectional=True, schedule=schedule), LENGTHS, True)


@settings(max_examples=20)
@given(lengths=lengths(most=4), schedule=st.sampled_from(list(SCHEDULES)), seed=st.integers(0, 2**30))
def test_a_naive_loop_on_any_lengths(lengths: list[int], schedule: str, seed: int) -> None:
    torch.manual_seed(seed)
    if lengths:
        compare(rl.nn.Recurrent(Whole, D, H, bidirectional=True, schedule=schedule), lengths)


@looped("cell", [*OWN, lambda *_: Fixed()])
def test_an_instance(cell: Any) -> None:
    module: Any = cell(D, H)
    layer = rl.nn.Recurrent(module)
    assert (layer.input_size, layer.hidden_size) == (module.input_size, module.hidden_size)
    assert layer.cells[0] is module
    compare(layer, LENGTHS)


@looped("lengths", [[], [0], [0, 0], [1], [4, 4]])
@looped("schedule", SCHEDULES)
@pytest.mark.parametrize("cell", [Whole, Halved])
def test_few_sequences(cell: Any, schedule: str, lengths: list[int]) -> None:
    layer = rl.nn.Recurrent(cell, D, H, num_layers=2, bidirectional=True, schedule=schedule)
    results = results_of(layer(a_batch(lengths)))
    assert results[0].shape == (sum(lengths), layer.output_size)
    assert all(part.shape[:2] == (4, len(lengths)) for part in results[1:])
    if lengths:
        compare(layer, lengths)


@pytest.mark.parametrize("cell", [Leaky, Whole])
def test_gradients_of_gradients(cell: Any) -> None:
    layer = rl.nn.Recurrent(cell, D, 2, bidirectional=True)
    parameters = list(layer.parameters())

    def function(values: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        return tuple(results_of(layer(rl.Ragged.from_flat(values, lengths=[2, 0, 1]))))

    values = torch.randn(3, D, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(function, (values, *parameters), fast_mode=True)
    assert torch.autograd.gradgradcheck(function, (values, *parameters), fast_mode=True)


@looped("backend", ["auto", "reference"])
def test_a_step_may_write_over_what_it_is_given(backend: str) -> None:
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
        out, state = rl.nn.Recurrent(Over(), backend=backend)(rl.Ragged.from_flat(given[0], lengths=[3, 1]), given[1])
        assert out.values[:, 0].tolist() == [3.0, 4.5, 5.25, 3.0]
        assert state[0, :, 0].tolist() == [5.25, 3.0]
        assert torch.equal(given[0], values)
        assert torch.equal(given[1], hx)


@looped("schedule", SCHEDULES)
def test_nan_stays_in_its_sequence(schedule: str) -> None:
    layer = rl.nn.Recurrent(Whole, D, H, num_layers=2, bidirectional=True, schedule=schedule)
    clean = sequences_of([3, 2, 4])
    seen = []
    for middle in (clean[1], torch.full_like(clean[1], torch.nan)):
        values = torch.cat([clean[0], middle, clean[2]]).requires_grad_()
        out, state = layer(rl.Ragged.from_flat(values, lengths=[3, 2, 4]))
        kept = [out[0], out[2], *(part[:, [0, 2]] for part in state)]
        (grad,) = gradients(kept, [values])
        seen.append([*kept, grad[:3], grad[5:]])
    assert_same(seen[1], seen[0])


def test_dropout_between_layers() -> None:
    """Between layers only, in training only."""
    layer = rl.nn.Recurrent(Leaky, D, H, num_layers=2, dropout=0.5)
    batch = a_batch()
    torch.manual_seed(0)
    out, state = layer(batch)
    torch.manual_seed(1)
    other, other_state = layer(batch)
    assert torch.equal(state[0], other_state[0])
    assert not torch.allclose(out.values, other.values)
    compare(layer.eval(), LENGTHS)


# -- torch's own cells ------------------------------------------------------------------------------------------------

TORCHS: list[tuple[Any, Any]] = [(nn.LSTMCell, nn.LSTM), (nn.GRUCell, nn.GRU), (nn.RNNCell, nn.RNN)]


@looped("bias", [True, False])
@looped("both", [False, True])
@pytest.mark.parametrize(("cell", "theirs"), TORCHS)
def test_torchs_cells_are_torchs_layers(cell: Any, theirs: Any, both: bool, bias: bool) -> None:
    layer: Any = rl.nn.Recurrent(
        lambda *sizes: cell(*sizes, bias=bias, dtype=torch.float64), D, H, num_layers=2, bidirectional=both
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
    assert rl.explain(rl.nn.Recurrent({nn.LSTMCell: Moved}.get(cell, Halved), D, H), batch).backend == "reference"


def test_relu_cells() -> None:
    module = nn.RNNCell(D, H, nonlinearity="relu", dtype=torch.float64)
    assert rl.nn.Recurrent(module).cell is CELLS["rnn_relu"]


def test_torchs_cells_can_be_regularised() -> None:
    options: dict[str, Any] = {"zoneout": (0.1, 0.2), "state_dropout": 0.3, "weight_dropout": 0.2}
    layer = rl.nn.Recurrent(nn.LSTMCell(D, H, dtype=torch.float64), **options)
    other = rl.nn.LSTM(D, H, dtype=torch.float64, **options)
    other.load_state_dict({f"{key.removeprefix('cells.0.')}_l0": value for key, value in layer.state_dict().items()})
    batch, seen = a_batch(), []
    for network in (layer, other):
        torch.manual_seed(3)
        seen.append(results_of(network(batch)))
    assert_same(seen[0], seen[1], 0.0)


def test_dropout_on_inputs_of_an_own_cell() -> None:
    layer = rl.nn.Recurrent(Leaky, D, H, num_layers=2, input_dropout=0.5)
    batch, seen = a_batch(), []
    for schedule in SCHEDULES:
        torch.manual_seed(3)
        with rl.use_backend(schedule=schedule):
            seen.append(results_of(layer(batch)))
    for other in seen[1:]:
        assert_same(other, seen[0])
    assert not torch.allclose(seen[0][0], layer.eval()(batch)[0].values)


# -- every way to call ------------------------------------------------------------------------------------------------


@looped("first", [False, True])
@looped("cell", [Leaky, Whole])
def test_every_kind_of_input(cell: Any, first: bool) -> None:
    layer = rl.nn.Recurrent(cell, D, H, num_layers=2, bidirectional=True, batch_first=first)
    batch = rl.Ragged(sequences_of([4, 1, 5]))
    out, state = layer(batch)
    padded, told = batch.to_padded(first, total_length=7)
    assert_same(results_of(layer(padded, lengths=told)), [out.to_padded(first, total_length=7)[0], *parts(state)])
    packed, packed_state = layer(batch.to_packed())
    assert_same([rl.Ragged.from_packed(packed).values, *parts(packed_state)], [out.values, *parts(state)])
    assert_same(results_of(layer(batch[2])), [out[2], *(part[:, 2] for part in parts(state))])


def test_every_state() -> None:
    layer = rl.nn.Recurrent(Whole, D, H, num_layers=2, bidirectional=True)
    batch = rl.Ragged(sequences_of(LENGTHS))
    for schedule in SCHEDULES:
        with rl.use_backend(schedule=schedule):
            out, state, states = layer(batch, return_states=True)
        assert_same([out.values, *state], results_of(layer(batch)))
        assert [[part.features[0] for part in layer_states] for layer_states in states] == [[2 * H, 4]] * 2
        full = [0, 2, 3, 4]
        for depth, layer_states in enumerate(states):
            for part, final in zip(layer_states, state, strict=True):
                size = final.shape[2]
                assert_same([part.last()[full, :size]], [final[2 * depth, full]])
                assert_same([part.first()[full, size:]], [final[2 * depth + 1, full]])
    # A prefix of a sequence has the same states in the forward direction.
    single = rl.nn.Recurrent(Whole, D, H)
    _, _, ((up, down),) = single(rl.Ragged([batch[3]]), return_states=True)
    for t in range(1, 6):
        _, final = single(rl.Ragged([batch[3][:t]]))
        assert_same([up.values[t - 1], down.values[t - 1]], [part[0, 0] for part in final])


def test_summary() -> None:
    layer = rl.nn.Recurrent(Whole, D, H, num_layers=2, bidirectional=True)
    batch = rl.Ragged(sequences_of([4, 0, 5]))
    out, state = layer(batch)
    size = H + 1
    expected = torch.cat([out.last()[:, :size], out.first()[:, size:]], 1)
    assert_same([layer.summary(out, state)], [expected])
    assert not expected[1].any()
    packed, packed_state = layer(batch.to_packed())
    assert_same([layer.summary(packed, packed_state)], [expected])
    alone, alone_state = layer(batch[2])
    assert_same([layer.summary(alone, alone_state)], [expected[2]])
    single = rl.nn.Recurrent(Leaky, D, H)
    out, state = single(batch)
    assert_same([single.summary(out, state)], [out.last()])
    padded, told = batch.to_padded(batch_first=False)
    for wrong, says in (
        (single(padded, lengths=told), "a padded tensor"),
        (single(batch, return_output=False), "NoneType"),
    ):
        with pytest.raises(ArgumentTypeError, match=f"out must be .*{says}.*, got "):
            single.summary(*wrong)
    torchs = rl.nn.Recurrent(nn.LSTMCell(D, H, dtype=torch.float64))
    out, state = torchs(batch)
    assert_same([torchs.summary(None, state)], [out.last()])


def test_steps_of_a_stream() -> None:
    for cell in (Leaky, Moved, Listed):  # a prepare that looks back would see one element at a time
        layer = rl.nn.Recurrent(cell, D, H, num_layers=2)
        inputs = torch.randn(5, 2, D, dtype=torch.float64)
        expected, final = layer(inputs)
        state = None
        for t in range(5):
            out, state = layer.step(inputs[t], state)
            assert_same([out], [expected[t]])
        assert_same(parts(state), parts(final))
        alone, own = layer.step(inputs[0, 0])
        assert_same([alone], [expected[0, 0]])
        assert parts(own)[0].shape == (2, H)
    with pytest.raises(ArgumentTypeError, match=r"step must be .*got a bidirectional layer"):
        rl.nn.Recurrent(Leaky, D, H, bidirectional=True).step(torch.zeros(2, D, dtype=torch.float64))


@looped("initial_state", ["learned", "lengths"])
@looped("cell", [Leaky, Whole, Moved])
def test_initial_states(cell: Any, initial_state: str) -> None:
    layer = rl.nn.Recurrent(cell, D, H, num_layers=2, bidirectional=True, initial_state=initial_state)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.startswith("initial_"):
                parameter.normal_()
    batch = a_batch()
    hx = layer._own_initial(batch)
    outputs, finals = naive(layer, list(batch), hx)
    ours = results_of(layer(batch))
    assert_same(ours, [torch.cat(outputs), *finals])
    own = [parameter for name, parameter in layer.named_parameters() if name.startswith("initial_")]
    assert own
    assert all(bool(grad.any()) for grad in gradients(ours, own))
