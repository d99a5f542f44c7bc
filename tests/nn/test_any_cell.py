"""``rl.nn.Recurrent`` compared with a naive loop and with torch's layers, and its calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

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
from raglane.errors import ArgumentTypeError
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
def test_a_naive_loop(cell: Any, schedule: str) -> None:
    for lengths, both in ((LENGTHS, True), (LENGTHS, False), ([0], True), ([1], True)):
        layer = rl.nn.Recurrent(cell, D, H, num_layers=2, bidirectional=both, schedule=schedule)
        compare(layer, lengths, with_hx=both)


@pytest.mark.parametrize("cell", [*OWN, lambda *_: Fixed()])
def test_an_instance(cell: Any) -> None:
    module: Any = cell(D, H)
    layer = rl.nn.Recurrent(module)
    assert (layer.input_size, layer.hidden_size) == (module.input_size, module.hidden_size)
    assert layer.cells[0] is module
    compare(layer, LENGTHS)


@pytest.mark.parametrize("cell", [Leaky, Whole])
def test_gradients_of_gradients(cell: Any) -> None:
    layer = rl.nn.Recurrent(cell, D, 2, bidirectional=True)
    parameters = list(layer.parameters())

    def function(values: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        return tuple(results_of(layer(rl.Ragged.from_flat(values, lengths=[2, 0, 1]))))

    values = torch.randn(3, D, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(function, (values, *parameters), fast_mode=True)
    assert torch.autograd.gradgradcheck(function, (values, *parameters), fast_mode=True)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("cell", [Leaky, Whole])
def test_a_nan_stays_in_its_sequence(cell: Any, schedule: str) -> None:
    assert_nan_stays_in_its_sequence(rl.nn.Recurrent(cell, D, H, num_layers=2, bidirectional=True, schedule=schedule))


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_step_may_change_its_arguments_in_place(backend: str) -> None:
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


# -- torch's own cells ------------------------------------------------------------------------------------------------

TORCHS: list[tuple[Any, Any]] = [(nn.LSTMCell, nn.LSTM), (nn.GRUCell, nn.GRU), (nn.RNNCell, nn.RNN)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("both", [False, True])
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


# -- every way to call ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("cell", [Leaky, Whole])
def test_every_kind_of_input(cell: Any, first: bool) -> None:
    assert_same_for_every_input(rl.nn.Recurrent(cell, D, H, num_layers=2, bidirectional=True, batch_first=first))


def test_summary() -> None:
    layer = rl.nn.Recurrent(Whole, D, H, num_layers=2, bidirectional=True)
    batch = rl.Ragged(sequences_of([4, 0, 5]))
    out, state = layer(batch)
    size = H + 1
    expected = torch.cat([out.last()[:, :size], out.first()[:, size:]], 1)
    assert_same([layer.summary(out, state)], [expected])
    assert not expected[1].any()
    assert_same([layer.summary(*layer(batch.to_packed())), layer.summary(*layer(batch[2]))], [expected, expected[2]])
    padded, told = batch.to_padded(batch_first=False)
    for wrong, says in (
        (layer(padded, lengths=told), "a padded tensor"),
        (layer(batch, return_output=False), "NoneType"),
    ):
        with pytest.raises(ArgumentTypeError, match=f"out must be .*got .*{says}"):
            layer.summary(*wrong)
    torchs = rl.nn.Recurrent(nn.LSTMCell(D, H, dtype=torch.float64))
    out, state = torchs(batch)
    assert_same([torchs.summary(None, state)], [out.last()])
