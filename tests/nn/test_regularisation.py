"""Dropout on inputs, states and weights, and zoneout: the same everywhere, in evaluation, and what must not change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import raglane as rl
from every_layer import (
    LAYERS,
    LENGTHS,
    PAIRS,
    READ,
    SINGLE,
    H,
    a_batch,
    assert_same,
    build,
    gradients,
    parts,
    regularisation_of,
    results_of,
)
from looped import looped
from raglane.errors import ArgumentError, DispatchError
from raglane.native import missing_kernels
from raglane.nn.recurrent.regularisation import Regularisation
from raglane.schedules import SCHEDULES
from strategies import sequences_of


def run(layer: Any, batch: Any, seed: int = 7, **call: Any) -> list[Tensor]:
    """All that a call returns, drawn from a seed, and last the state of the generator after it."""
    torch.manual_seed(seed)
    results = results_of(layer(batch, **call))
    return [*results, torch.rand(1, dtype=torch.float64)]


# -- the same everywhere ----------------------------------------------------------------------------------------------


def assert_alike_everywhere(layer: Any) -> None:
    """Results, gradients and the generator's state under every pair that can run the layer."""
    batch = a_batch()
    seen: list[list[Tensor]] = []
    for schedule, backend in PAIRS:
        try:
            with rl.use_backend(schedule=schedule, backend=backend):
                results = run(layer, batch)
        except DispatchError:
            continue
        seen.append([*results, *gradients(results, [batch.values, *layer.parameters()])])
    assert len(seen) >= len(SCHEDULES)
    for other in seen[1:]:
        assert_same(other, seen[0])


@pytest.mark.parametrize("name", LAYERS)
def test_every_schedule_and_backend_draws_the_same(name: str) -> None:
    assert_alike_everywhere(build(name, 2, bidirectional=True, **regularisation_of(name, dropout=0.3)))


@looped("name", ["lstm", "sru"])
@looped("options", SINGLE)
def test_each_alone_draws_the_same(name: str, options: dict[str, Any]) -> None:
    assert_alike_everywhere(build(name, 2, bidirectional=True, **options))


def test_every_kind_of_input_draws_the_same() -> None:
    layer = build("lstm", 2, bidirectional=True, **regularisation_of("lstm"))
    batch = a_batch([3, 1, 5, 5])
    expected = run(layer, batch)
    padded, told = batch.to_padded(batch_first=False, total_length=7)
    by_padded = run(layer, padded, lengths=told)
    assert not by_padded[0][told.max() :].any()
    by_padded[0] = rl.Ragged.from_padded(by_padded[0], told, batch_first=False).values
    assert_same(by_padded, expected, 0.0)
    torch.manual_seed(7)
    packed_out, packed_state = layer(batch.to_packed())
    packed = [rl.Ragged.from_packed(packed_out).values, *parts(packed_state)]
    assert_same(packed, expected[:-1], 0.0)
    single, alone = run(layer, batch[0]), run(layer, rl.Ragged([batch[0]]))
    assert_same(single, [alone[0], *(part.squeeze(1) for part in alone[1:-1]), alone[-1]], 0.0)


@pytest.mark.parametrize("name", ["gru", "sru"])
def test_a_seed_reproduces(name: str) -> None:
    layer, batch = build(name, **regularisation_of(name)), a_batch()
    first = run(layer, batch, 1)
    assert_same(run(layer, batch, 1), first, 0.0)
    assert not torch.equal(run(layer, batch, 2)[0], first[0])
    layer.eval()
    assert_same(run(layer, batch, 1)[:-1], run(layer, batch, 2)[:-1], 0.0)


def test_masks_do_not_hang_on_the_layout_of_hx() -> None:
    layer = build("gru", **READ)
    batch, hx = a_batch(), torch.randn(1, 5, H, dtype=torch.float64)
    other = torch.empty_strided(hx.shape, (20, 1, 5), dtype=torch.float64).copy_(hx)
    assert_same(run(layer, batch, hx=other), run(layer, batch, hx=hx), 0.0)


@looped("name", ["lstm", "layernorm_gru", "indrnn_tanh", "minlstm"])
def test_gradients_under_a_fixed_seed(name: str) -> None:
    layer = build(name, 2, bidirectional=True, **regularisation_of(name, dropout=0.2))
    parameters = list(layer.parameters())

    def function(values: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        return tuple(run(layer, rl.Ragged.from_flat(values, lengths=[2, 0, 1]))[:-1])

    values = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(function, (values, *parameters), fast_mode=True)
    assert torch.autograd.gradgradcheck(function, (values, *parameters), fast_mode=True)


# -- evaluation -------------------------------------------------------------------------------------------------------


@looped("name", LAYERS)
def test_nothing_is_left_of_it_in_evaluation(name: str) -> None:
    options = {**regularisation_of(name, dropout=0.5), "zoneout": (0.0,) * len(build(name).cell.states)}
    layer = build(name, 2, bidirectional=True, **options).eval()
    plain = build(name, 2, bidirectional=True).eval()
    plain.load_state_dict(layer.state_dict())
    batch = a_batch()
    assert_same(run(layer, batch), run(plain, batch), 0.0)
    assert_same(run(layer, batch, return_states=True), run(plain, batch, return_states=True), 0.0)


@looped("name", LAYERS)
def test_evaluation_takes_the_mean_of_zoneout(name: str) -> None:
    """Each new state is the share held times the old one, and the rest times what the cell gives."""
    count = len(build(name).cell.states)
    shares = (0.25, 0.6, 0.1, 0.4)[:count]
    layer = build(name, **regularisation_of(name, zoneout=shares)).eval()
    sequences = sequences_of([3, 0, 2])
    weights = layer._weights()[0]
    expected, finals = [], []
    for sequence in sequences:
        state = tuple(torch.zeros(1, size, dtype=torch.float64) for size in layer.state_sizes)
        for t in range(len(sequence)):
            ready = layer.cell.prepare(weights, sequence[t : t + 1], torch.tensor([0, 1]))
            _, new = layer.cell.step(weights, ready, state)
            state = tuple(p * old + (1 - p) * n for p, old, n in zip(shares, state, new, strict=True))
            expected.append(state[0])
        finals.append(state)
    theirs = [torch.cat(expected), *(torch.cat(part).unsqueeze(0) for part in zip(*finals, strict=True))]
    for schedule in SCHEDULES:
        with rl.use_backend(schedule=schedule):
            assert_same(results_of(layer(rl.Ragged(sequences))), theirs, what=schedule)


def test_the_mean_of_zoneout_by_hand() -> None:
    layer: Any = rl.nn.RNN(1, 1, nonlinearity="relu", bias=False, zoneout=0.25, dtype=torch.float64).eval()
    with torch.no_grad():
        layer.weight_ih_l0.fill_(2.0)
        layer.weight_hh_l0.fill_(0.5)
    out, _ = layer(rl.Ragged([torch.tensor([[1.0], [0.0], [3.0]], dtype=torch.float64)]))
    # 0.75 * 2 = 1.5; 0.25 * 1.5 + 0.75 * 0.75 = 0.9375; 0.25 * 0.9375 + 0.75 * (6 + 0.46875) = 5.0859375
    assert out.values.flatten().tolist() == [1.5, 0.9375, 5.0859375]


# -- what else it meets -----------------------------------------------------------------------------------------------


def test_a_checkpoint_draws_the_same_again() -> None:
    layer, batch = build("lstm", 2, **regularisation_of("lstm", dropout=0.3)), a_batch()

    def function(values: Tensor) -> tuple[Tensor, ...]:
        return tuple(results_of(layer(rl.Ragged.from_flat(values, lengths=LENGTHS))))

    wanted = [batch.values, *layer.parameters()]
    torch.manual_seed(3)
    plain = function(batch.values)
    torch.manual_seed(3)
    again = checkpoint(function, batch.values, use_reentrant=False)
    assert_same(again, plain, 0.0)
    assert_same(gradients(again, wanted), gradients(plain, wanted), 0.0)


@looped("schedule", SCHEDULES)
@looped("name", ["lstm", "sru"])
def test_nan_stays_in_its_sequence(name: str, schedule: str) -> None:
    layer = build(name, 2, bidirectional=True, schedule=schedule, **regularisation_of(name, dropout=0.2))
    clean = [torch.randn(length, 3, dtype=torch.float64) for length in (3, 2, 4)]
    dirty = [clean[0], torch.full_like(clean[1], torch.nan), clean[2]]
    seen = []
    for sequences in (clean, dirty):
        batch = rl.Ragged([part.clone().requires_grad_() for part in sequences])
        batch.values.retain_grad()
        torch.manual_seed(1)
        out, state = layer(batch)
        kept = [out[0], out[2], *(part[:, [0, 2]] for part in parts(state))]
        (grad,) = gradients(kept, [batch.values])
        seen.append([*kept, grad[:3], grad[5:]])
    assert all(bool(part.isfinite().all()) for part in seen[1])
    assert_same(seen[1], seen[0])


@pytest.mark.parametrize("name", ["gru", "lstm projected", "mingru"])
def test_autocast(name: str, device: torch.device) -> None:
    """The same masks, computed in bfloat16, whoever runs it."""
    layer = build(name, 2, bidirectional=True, dtype=torch.float32, **regularisation_of(name))
    batch = rl.Ragged([torch.randn(length, 3) for length in LENGTHS])
    seen = []
    for schedule in SCHEDULES:
        with torch.autocast(device.type, dtype=torch.bfloat16), rl.use_backend(schedule=schedule):
            seen.append(run(layer, batch))
    assert seen[0][0].dtype is torch.bfloat16
    for other in seen[1:]:
        assert_same(other, seen[0], 0.02)


def test_explain_names_what_will_run() -> None:
    batch = rl.Ragged([torch.randn(2, 3)])
    layer = rl.nn.LSTM(3, 4, state_dropout=0.2)
    program = "reference" if missing_kernels() else "program"
    assert rl.explain(layer, batch).backend == program
    assert "lstm with state dropout" in rl.explain(layer, batch).reason
    assert rl.explain(layer.eval(), batch).backend == rl.explain(rl.nn.LSTM(3, 4), batch).backend
    assert rl.explain(rl.nn.LSTM(3, 4, zoneout=0.2).eval(), batch).backend == program
    assert rl.explain(rl.nn.LSTM(3, 4, weight_dropout=0.2), batch).backend != "reference"
    assert "zoneout=(0.1, 0.2)" in repr(rl.nn.LSTM(3, 4, zoneout=(0.1, 0.2)))


def test_nothing_drawn_where_nothing_acts() -> None:
    """Layers without regularisation take nothing from the generator, nor do those in evaluation."""
    layers = [build("lstm", 2, zoneout=(0.0, 0.0)), build("lstm", 2, **regularisation_of("lstm", dropout=0.5)).eval()]
    before = torch.random.get_rng_state()
    for layer in layers:
        layer(rl.Ragged([torch.ones(2, 3, dtype=torch.float64)]))
    assert torch.equal(torch.random.get_rng_state(), before)


@looped(
    ("make", "says"),
    [
        (lambda: rl.nn.MinGRU(3, 4, state_dropout=0.1), "state_dropout must be no weight of this cell.*, got 0.1"),
        (lambda: rl.nn.MinLSTM(3, 4, weight_dropout=0.1), "weight_dropout must be .*got 0.1"),
        (lambda: rl.nn.QRNN(3, 4, state_dropout=0.1), "state_dropout must be .*got 0.1"),
        (lambda: rl.nn.LSTM(3, 4, zoneout=(0.1,)), r"zoneout must be .* h, c.*, got \(0.1,\)"),
        (lambda: rl.nn.GRU(3, 4, zoneout=(0.1, 0.1)), r"zoneout must be .*got \(0.1, 0.1\)"),
        (lambda: rl.nn.GRU(3, 4, zoneout=1.0), "zoneout must be a probability.*, got 1.0"),
        (lambda: rl.nn.LSTM(3, 4, zoneout=(0.1, 1.5)), r"zoneout must be .*got \(0.1, 1.5\)"),
        (lambda: rl.nn.GRU(3, 4, input_dropout=-0.1), "input_dropout must be .*got -0.1"),
        (lambda: rl.nn.GRU(3, 4, state_dropout=float("nan")), "state_dropout must be .*got nan"),
        (
            lambda: rl.nn.GRU(3, 4, weight_dropout="0.1"),  # type: ignore[arg-type]
            "weight_dropout must be .*got '0.1'",
        ),
        (
            lambda: rl.nn.GRU(3, 4, state_dropout=(0.1,)),  # type: ignore[arg-type]
            r"state_dropout must be .*got \(0.1,\)",
        ),
        (
            lambda: rl.nn.SRU(3, 4, zoneout=[0.1, 0.2]),  # type: ignore[arg-type]
            r"zoneout must be .*got \[0.1, 0.2\]",
        ),
    ],
)
def test_refusals(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        make()


def test_acts() -> None:
    assert not Regularisation().acts(True)
    assert not Regularisation(zoneout=(0.0, 0.0)).acts(True)
    assert Regularisation(zoneout=(0.0, 0.1)).acts(False)
    assert Regularisation(input_dropout=0.1).acts(True)
    assert not Regularisation(input_dropout=0.1).acts(False)
